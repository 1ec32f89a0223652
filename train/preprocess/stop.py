"""SIGTERM and SIGINT during preprocessing: the work ends at once, and what is finished stays."""

import contextlib
import signal
from pathlib import Path

from infer.words import counted
from train.signals import REPEAT_S, SIGNALS, handled


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


def stop_signals() -> contextlib.AbstractContextManager[list[int]]:
    """Raises Stopped where the main thread is when a signal arrives, and KeyboardInterrupt at a later one that is no
    repetition.

    Yields the signal received: where the main thread was in a destructor, Python drops what is raised there.
    """

    def stop(number: int) -> None:
        raise Stopped(number)

    return handled(stop, REPEAT_S)


def ignore_signals() -> None:
    """For the rest of a process that was stopped: one that torchrun repeats would spoil its exit status."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
