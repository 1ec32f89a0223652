"""A process whose torchrun is gone: nobody would end it, so it stops by itself.

A torchrun that is killed (SIGKILL, or the system when memory runs out) can pass nothing on to the processes that it
started; the system gives them another parent, which is how they notice.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

STARTED = "TORCHELASTIC_RUN_ID"  # torchrun gives it to what it starts
EVERY_S = 1.0
LATER_S = 2.0  # after the first process of a machine, whose word may reach the others by itself
STATUS = 128 + signal.SIGTERM


@contextlib.contextmanager
def parent_watched(gone: Callable[[str], None], *, first: bool = True, every_s: float = EVERY_S) -> Iterator[None]:
    """Calls `gone(text)` in a thread, once, when this process no longer has the parent that it has now.

    Args:
        gone: gets what happened, in words; not called once the block is left.
        first: whether to call at once; the others of a machine do LATER_S seconds later.
        every_s: seconds between looks.
    """
    parent, left = os.getppid(), threading.Event()

    def look() -> None:
        while os.getppid() == parent:
            if left.wait(every_s):
                return
        if not left.wait(0.0 if first else LATER_S):
            gone(f"torchrun (process {parent}), which started this run, is gone")

    thread = threading.Thread(target=look, name="parent", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def heard() -> bool:
    """Whether this process sees to SIGTERM itself, as a run does that then saves after its step."""
    return signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def stop_self(text: str, say: bool = True) -> None:
    """Sends this process the SIGTERM that torchrun would have passed on; says `text` before if asked."""
    if say:
        with contextlib.suppress(OSError, ValueError):
            print(f"{text}: stopping as at SIGTERM", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
