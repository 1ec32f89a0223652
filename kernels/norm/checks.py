"""What the norms of a transformer block check before they run, and what their backends are asked."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from kernels.dispatch import triton_fault
from kernels.norm.config import MAX_WIDTH
from kernels.norm.reference import Gating, Rope
from kernels.tiles import DTYPES


@dataclasses.dataclass(frozen=True)
class NormRequest:
    """What a backend needs to know to say whether it can serve."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    width: int
    unit_strides: bool
    fits: str | None = None


class Like(NamedTuple):
    """All that the checks and the choice look at in a tensor, cheap to collect: an eager call costs little but this.

    `unit`: its last axis has stride 1.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    unit: bool
    requires_grad: bool


Tables = tuple[Like, Like]


def like(t: Tensor | None) -> Like | None:
    """What is looked at in a tensor; None stays None."""
    if t is None:
        return None
    shape = t.shape
    unit = len(shape) == 0 or shape[-1] == 1 or t.stride(-1) == 1
    return Like(shape, t.dtype, t.device, unit, t.requires_grad)


def triton_refusal(request: NormRequest) -> str | None:
    """Why the Triton kernels cannot serve, or None."""
    if (fault := triton_fault(request.device)) is not None:
        return fault
    if wrong := [d for d in request.dtypes if d not in DTYPES]:
        return f"it takes float32, float16 and bfloat16, got {wrong[0]}"
    if not 1 <= request.width <= MAX_WIDTH:
        return f"the inner width must be 1 to {MAX_WIDTH}, got {request.width}"
    if not request.unit_strides:
        return "the last axis of every tensor must have stride 1; call .contiguous() on those that have another"
    return request.fits


def _request(x: Like, tensors: Sequence[Like | None], width: int, fits: str | None = None) -> NormRequest:
    found = [t for t in (x, *tensors) if t is not None]
    unit, dtypes = all(t.unit for t in found), tuple(t.dtype for t in found)
    return NormRequest(x.device.type, dtypes, tuple(x.shape), width, unit, fits)


def faults_of(x: Like, vectors: dict[str, Like | None], modulation: dict[str, Like | None]) -> list[str]:
    """What does not fit x `[..., D]`: vectors must be `[D]`, modulations `[B, D]`, `[B, 1, D]` or `[B, T, D]`."""
    faults = []
    for name, p in vectors.items():
        if p is not None and p.shape != x.shape[-1:]:
            faults.append(f"{name} must be [{x.shape[-1]}], got {list(p.shape)}")
    for name, p in modulation.items():
        if p is None:
            continue
        shape = (p.shape[0], 1, p.shape[1]) if len(p.shape) == 2 and len(x.shape) == 3 else tuple(p.shape)
        want = tuple(x.shape)
        if len(shape) != len(want) or shape[-1] != want[-1] or any(
            n not in (1, m) for n, m in zip(shape[:-1], want[:-1])
        ):  # fmt: skip
            faults.append(
                f"{name} must be [B, D], [B, 1, D] or [B, T, D] for x {list(want)} (1 for B broadcasts), "
                f"got {list(p.shape)}"
            )
    for name, p in {**vectors, **modulation}.items():
        if p is not None and p.device != x.device:
            faults.append(f"{name} is on {p.device}, x on {x.device}")
    return faults


def choice_faults(**choices) -> list[str]:
    """`name=(value, Literal type)` whose value is not allowed."""
    return [
        f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}"
        for name, (value, kind) in choices.items()
        if value not in get_args(kind)
    ]


def _rank_fit(x: Like, y: Like | None) -> str | None:
    if len(x.shape) != 3:
        return f"x must be [B, T, D], got {list(x.shape)}"
    if y is not None and (y.shape != x.shape or y.dtype != x.dtype):
        return f"residual and y must be alike, got {list(x.shape)} {x.dtype} and {list(y.shape)} {y.dtype}"
    return None


def norm_request(x: Like, y: Like | None, params: Sequence[Like | None]) -> NormRequest:
    """The request of `norm_modulate(x)`, or with y of the two residual calls; params: every other tensor."""
    return _request(x, (y, *params), x.shape[-1], _rank_fit(x, y))


def residual_faults(residual: Like, y: Like, gate: Like | None, gating: str) -> list[str]:
    """What does not fit in a gated residual sum."""
    faults = faults_of(residual, {}, {"gate": gate}) + choice_faults(gating=(gating, Gating))
    if y.shape != residual.shape:
        faults.append(f"residual and y must have one shape, got {list(residual.shape)} and {list(y.shape)}")
    return faults


def _table_fit(rope: Tables | None, q: Like) -> str | None:
    if len(q.shape) != 4:
        return f"q and k must be [B, T, H, D], got {list(q.shape)}"
    if q.shape[-1] % 2:
        return f"the head size must be even, got {q.shape[-1]}"
    if rope is None:
        return None
    if any(t.dtype != torch.float32 for t in rope):
        return f"cosines and sines must be float32, got {rope[0].dtype} and {rope[1].dtype}"
    if any(t.requires_grad for t in rope):
        return "it has no gradient for cosines and sines"
    return None


def rope_faults(name: str, x: Like, weight: Like | None, rope: Tables | None, over: str) -> list[str]:
    """What does not fit in the norm and rotary embedding of x, which an error calls `name`."""
    if len(x.shape) != 4:
        return [f"{name} must be [B, T, H, D], got {list(x.shape)}"]
    b, t, h, d = x.shape
    faults, width = [], h * d if over == "inner" else d
    if weight is not None and weight.shape != (width,):
        faults.append(f"{name}_weight must be [{width}] for a norm over {over}, got {list(weight.shape)}")
    if rope is not None and d % 2:
        faults.append(f"{name}: rotary embedding needs an even head size, got {d}")
    for part, table in zip(("cosines", "sines"), () if rope is None else rope, strict=False):
        full = (1, *table.shape) if len(table.shape) == 2 else tuple(table.shape)
        full = (*full[:2], 1, full[2]) if len(full) == 3 else full
        if len(full) != 4 or full[1] != t or full[3] != d // 2 or full[0] not in (1, b) or full[2] not in (1, h):
            faults.append(
                f"{part} must be [T, D/2], [B, T, D/2] or [B, T, H, D/2] for {name} {list(x.shape)}, "
                f"got {list(table.shape)}"
            )
    for part, p in (("weight", weight), *(() if rope is None else zip(("cosines", "sines"), rope, strict=True))):
        if p is not None and p.device != x.device:
            faults.append(f"{name} is on {x.device}, its {part} on {p.device}")
    return faults


def alike(rope: Rope | None) -> Tables | None:
    """`like` of cosines and sines."""
    return None if rope is None else tuple([like(t) for t in rope])


def qk_request(q: Like, k: Like | None, weights: Sequence[Like | None], rope: Tables | None) -> NormRequest:
    """The request of `qk_norm_rope(q, k)`, or without k of `norm_rope(q)`."""
    tables = () if rope is None else rope
    width = max(t.shape[-2] * t.shape[-1] for t in (q, k) if t is not None)
    return _request(q, (k, *weights, *tables), width, _table_fit(rope, q))
