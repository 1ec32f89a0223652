"""Backends of an operation: each says whether it can serve a request, and why not.

A backend that was asked for by name and cannot serve is an error, never a silent fallback. What a choice depends on
outside of the request (whether Triton runs here, the GPU's capability) is asked for in this one place.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from core.errors import UserError, nearest_names
from kernels.tiles import Capability


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation. `refusal(request)` is None when it can serve, else the reason it cannot."""

    name: str
    run: Callable[..., Any]
    refusal: Callable[[Any], str | None]


def explain(backends: Sequence[Backend], request: Any) -> dict[str, str]:
    """`{backend: "usable" or the reason why not}` for one request, in order of preference."""
    return {b.name: b.refusal(request) or "usable" for b in backends}


def spelled(name: Any) -> str:
    """A backend's name as it is compared: stripped and in lower case; empty for what is no text."""
    return name.strip().lower() if isinstance(name, str) else ""


def backend_name(op: str, name: str, names: Iterable[str]) -> str:
    """`name` as it is spelled in `names`, or `"auto"`.

    Raises:
        UserError: no such backend; lists those there are.
    """
    found, known = spelled(name), ("auto", *names)
    if found not in known:
        near = nearest_names(found, known)
        raise UserError(f"{op}: unknown backend {name!r}{near}; allowed: {', '.join(known)}")
    return found


def choose(op: str, backends: Sequence[Backend], name: str, request: Any, auto: Sequence[str] | None = None) -> Backend:
    """The backend called `name` (see `backend_name`), or for `"auto"` the first usable one.

    Args:
        auto: the names that `"auto"` tries, in order; default all.

    Raises:
        UserError: unknown name (lists the known ones), or a backend that cannot serve (says why).
    """
    by_name = {b.name: b for b in backends}
    name = backend_name(op, name, by_name)
    if name == "auto":
        tried = backends if auto is None else [by_name[n] for n in auto]
        for backend in tried:
            if backend.refusal(request) is None:
                return backend
        raise UserError(f"{op}: no backend can serve this call: {explain(tried, request)}")
    if (reason := by_name[name].refusal(request)) is not None:
        raise UserError(f"{op}: backend {name!r} cannot serve this call: {reason}")
    return by_name[name]


def not_interpreted(device_type: str) -> tuple[str, ...] | None:
    """What `"auto"` tries where Triton would be interpreted, on a CPU: the reference. Elsewhere all backends (None)."""
    return ("reference",) if device_type == "cpu" else None


def remembered(decide: Callable[..., Any]) -> Callable[..., Any]:
    """`decide(*facts)`, which depends on nothing else, remembered for equal facts; an error is raised anew.

    What is compiled must not depend on a cache of this process: there, and for facts that have no hash (symbolic
    sizes), it decides each time.
    """
    cached = functools.lru_cache(maxsize=4096)(decide)

    def call(*facts):
        if torch.compiler.is_compiling():
            return decide(*facts)
        try:
            return cached(*facts)
        except TypeError:
            return decide(*facts)

    call.cache_info = cached.cache_info
    return call


def constant_result(f: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, which imports the compiler, and Triton with it: a second."""
    f._dynamo_marked_constant = True
    return f


@functools.cache
def _triton_fault(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type == "cuda":
        return None
    if device_type == "cpu":
        import triton

        if triton.knobs.runtime.interpret:
            return None
        return "it needs a CUDA device; on CPU tensors Triton runs only under its interpreter (TRITON_INTERPRET=1)"
    return f"it needs a CUDA device, the tensors are on {device_type}"


@constant_result
def triton_fault(device_type: str) -> str | None:
    """Why Triton cannot run on such a device, or None. In code that is being compiled it is a constant."""
    return _triton_fault(device_type)


@functools.cache
def _capability(index: int) -> Capability:
    return torch.cuda.get_device_capability(index)


@constant_result
def _constant_capability(index: int | None) -> Capability:
    return torch.cuda.get_device_capability() if index is None else _capability(index)


def capability_of(device: torch.device) -> Capability | None:
    """Compute capability of a CUDA device, of the current one where it has no index; None elsewhere."""
    return _constant_capability(device.index) if device.type == "cuda" else None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 2 for a CPU, where the interpreter runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
