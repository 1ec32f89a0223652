"""SIGTERM and SIGINT: collected, and in training heard by all processes of a run alike."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from parallel.launch import summed
from parallel.mesh import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 5.0  # in which torchrun passes on a signal that a terminal sent to its processes too


@contextlib.contextmanager
def handled(first: Callable[[int], None], repeat_s: float) -> Iterator[list[int]]:
    """Calls `first(number)` at the first signal; one that comes `repeat_s` seconds later, or after, interrupts at once.

    Yields a list, which then holds the number of the first.
    """
    received: list[int] = []
    came: list[float] = []

    def handler(number, frame):
        if received:
            if time.monotonic() - came[0] >= repeat_s:
                raise KeyboardInterrupt
            return
        came.append(time.monotonic())
        received.append(number)
        first(number)

    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def stop_requests(alone: bool = True) -> contextlib.AbstractContextManager[list[int]]:
    """Collects a signal; a second one interrupts at once, of several processes one that is no repetition."""
    return handled(lambda number: None, 0.0 if alone else REPEAT_S)


def heard_by(received: Sequence[int]) -> dict[int, int]:
    """`{signal: whether this process received it}`."""
    return {int(number): int(number in received) for number in SIGNALS}


def stopping(received: Sequence[int], mesh: Mesh) -> list[int]:
    """The signals that any process received, equal on all. Collective over the mesh."""
    mine = heard_by(received)
    return [number for number, n in zip(mine, summed(list(mine.values()), mesh), strict=True) if n]
