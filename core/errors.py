"""Errors that are a user's to fix, and one way to report many faults at once."""

from collections.abc import Iterable


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
    import difflib

    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
