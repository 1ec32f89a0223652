"""SIGTERM and SIGINT during preprocessing: the work ends at once, and what is finished stays."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from infer.words import counted

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 5.0  # in which torchrun passes on a signal that a terminal sent to its processes too


class Stopped(BaseException):
    """A signal arrived. `done` of `clips` are in finished parts by then; None before the set was begun."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number
        self.done: int | None = None
        self.clips = 0

    def message(self, output: str | Path) -> str:
        """How far the set `output` is, and how to go on: one line."""
        said = f"stopped by {signal.Signals(self.number).name}"
        if self.done is None:
            return f"{said} before a clip was encoded, {output} is as it was; run the same command again"
        state = f"{self.done} of {counted(self.clips, 'clip')} are done in {output}"
        return f"{said}: {state}; run the same command again to go on"


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Raises Stopped where the main thread is when a signal arrives, and KeyboardInterrupt at a later one that is no
    repetition.

    Yields the signals received: where the main thread was in a destructor, Python drops what is raised there.
    """
    received: list[int] = []
    first: list[float] = []

    def handler(number, frame):
        if received and time.monotonic() - first[0] > REPEAT_S:
            raise KeyboardInterrupt
        if not received:
            first.append(time.monotonic())
            received.append(number)
            raise Stopped(number)

    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def ignore_signals() -> None:
    """For the rest of a process that was stopped: one that torchrun repeats would spoil its exit status."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
