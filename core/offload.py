"""Tensors that autograd saves, kept in host memory from the forward pass until the backward pass needs them."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # smaller tensors stay: a copy costs more than it frees


@dataclasses.dataclass
class Saved:
    """A tensor on its way: its copy in pinned memory, and the one that comes back, each with what says it is there."""

    host: Tensor
    device: torch.device
    copied: torch.cuda.Event
    back: Tensor | None = None
    fetched: torch.cuda.Event | None = None


class Host:
    """Saves tensors of one forward pass in host memory. Copies run beside the computation, on a stream of their own.

    The backward pass asks for them last saved, first needed: the one before is fetched ahead. Tensors of a CPU, and
    small ones, stay where they are.
    """

    def __init__(self):
        self.saved: list[Saved] = []
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Within, what autograd saves goes to the host."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def _pack(self, t: Tensor) -> Tensor | int:
        if not t.is_cuda or t.nbytes < LEAST_BYTES:
            return t
        stream = self._stream(t.device)
        stream.wait_stream(torch.cuda.current_stream(t.device))
        with torch.cuda.stream(stream):
            host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            host.copy_(t, non_blocking=True)
            t.record_stream(stream)
            self.saved.append(Saved(host, t.device, stream.record_event()))
        return len(self.saved) - 1

    def _unpack(self, item: Tensor | int) -> Tensor:
        if isinstance(item, Tensor):
            return item
        for number in (item, item - 1):
            if number >= 0:
                self._fetch(self.saved[number])
        entry = self.saved[item]
        current = torch.cuda.current_stream(entry.device)
        current.wait_event(entry.fetched)
        back, entry.back = entry.back, None  # the caller's alone now
        back.record_stream(current)
        return back

    def _fetch(self, entry: Saved) -> None:
        if entry.back is None:
            stream = self._stream(entry.device)
            with torch.cuda.stream(stream):
                stream.wait_event(entry.copied)
                entry.back = entry.host.to(entry.device, non_blocking=True)
                entry.fetched = stream.record_event()
