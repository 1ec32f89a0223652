"""SIGTERM and SIGINT during training: collected, and heard by all processes of a run alike."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence

from parallel.launch import summed
from parallel.mesh import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 5.0  # in which torchrun passes on a signal that a terminal sent to its processes too


@contextlib.contextmanager
def stop_requests(alone: bool = True) -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT; a second one interrupts at once, of several processes one that is no repetition."""
    received: list[int] = []
    first: list[float] = []

    def handler(number, frame):
        if received and (alone or time.monotonic() - first[0] > REPEAT_S):
            raise KeyboardInterrupt
        if not received:
            first.append(time.monotonic())
            received.append(number)

    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def heard_by(received: Sequence[int]) -> dict[int, int]:
    """`{signal: whether this process received it}`."""
    return {int(number): int(number in received) for number in SIGNALS}


def stopping(received: Sequence[int], mesh: Mesh) -> list[int]:
    """The signals that any process received, equal on all. Collective over the mesh."""
    mine = heard_by(received)
    return [number for number, n in zip(mine, summed(list(mine.values()), mesh), strict=True) if n]
