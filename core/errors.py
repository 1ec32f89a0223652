"""Errors that are a user's to fix, and one way to report many faults at once."""

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator


class UserError(ValueError):
    """Bad input. The message says what was wrong, where, and what would be right.

    Command lines print it without a traceback and exit with status 2.
    """


def raise_faults(title: str, faults: Iterable[str], error: type[Exception] = UserError) -> None:
    """Raises one `error` that lists every fault below `title`; returns when there is none."""
    faults = list(faults)
    if faults:
        raise error(title + "".join(f"\n  - {fault}" for fault in faults))


def nearest_names(name: str, allowed: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for a near miss, else an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Puts `what` (the dotted key that led there) before a UserError's message."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def exit_status(work: Callable[[], object]) -> int:
    """Runs a command line's work: 0, 2 after printing what is wrong as `error: ...` to stderr, 130 when interrupted.

    A UserError is what is wrong, and so is what the system says of a file (a full disk, no permission).
    """
    try:
        work()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
