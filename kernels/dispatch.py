"""Backends of an operation: each says whether it can serve a request, and why not.

A backend that was asked for by name and cannot serve is an error, never a silent fallback.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from core.errors import UserError, nearest_names


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation. `refusal(request)` is None when it can serve, else the reason it cannot."""

    name: str
    run: Callable[..., Any]
    refusal: Callable[[Any], str | None]


def explain(backends: Sequence[Backend], request: Any) -> dict[str, str]:
    """`{backend: "usable" or the reason why not}` for one request, in order of preference."""
    return {b.name: b.refusal(request) or "usable" for b in backends}


def choose(op: str, backends: Sequence[Backend], name: str, request: Any) -> Backend:
    """The backend called `name`, or for `"auto"` the first usable one.

    Raises:
        UserError: unknown name (lists the known ones), or a backend that cannot serve (says why).
    """
    if name == "auto":
        for backend in backends:
            if backend.refusal(request) is None:
                return backend
        raise UserError(f"{op}: no backend can serve this call: {explain(backends, request)}")
    by_name = {b.name: b for b in backends}
    if name not in by_name:
        known = ", ".join(["auto", *by_name])
        raise UserError(f"{op}: unknown backend {name!r}{nearest_names(name, by_name)}; allowed: {known}")
    if (reason := by_name[name].refusal(request)) is not None:
        raise UserError(f"{op}: backend {name!r} cannot serve this call: {reason}")
    return by_name[name]
