"""The fused norms of a transformer block: checks, choice of a backend, and the call."""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from core.errors import raise_faults
from kernels.dispatch import Backend, choose, explain
from kernels.norm import ops, reference, rope_ops
from kernels.norm.config import MAX_JOINT_WIDTH, MAX_WIDTH
from kernels.norm.reference import Gating, Kind, Over, Pairs, Rope

BackendName = Literal["auto", "triton", "reference"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON = importlib.util.find_spec("triton") is not None


@dataclasses.dataclass(frozen=True)
class NormRequest:
    """What a backend needs to know to say whether it can serve."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    width: int
    unit_strides: bool
    fits: str | None = None


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    """Whether Triton runs on CPU tensors, through its interpreter."""
    from triton import knobs

    return knobs.runtime.interpret


def _triton_refusal(request: NormRequest) -> str | None:
    if not TRITON:
        return "Triton is not installed"
    if request.device != "cuda" and not (request.device == "cpu" and _interpreted()):
        return f"it needs a CUDA device, the tensors are on {request.device}"
    if wrong := [d for d in request.dtypes if d not in DTYPES]:
        return f"it takes float32, float16 and bfloat16, got {wrong[0]}"
    if not 1 <= request.width <= MAX_WIDTH:
        return f"the inner width must be 1 to {MAX_WIDTH}, got {request.width}"
    if not request.unit_strides:
        return "the last axis of every tensor must have stride 1; call .contiguous() on those that have another"
    return request.fits


def _ordered(request: NormRequest, run: Callable, plain: Callable) -> tuple[Backend, ...]:
    """Triton first, but on a CPU (where it is interpreted, for tests) last."""
    both = (Backend("triton", run, _triton_refusal), Backend("reference", plain, lambda request: None))
    return both if request.device == "cuda" else both[::-1]


def _request(x: Tensor, tensors: Sequence[Tensor | None], width: int, fits: str | None = None) -> NormRequest:
    found = [t for t in (x, *tensors) if t is not None]
    unit = all(t.shape[-1] == 1 or t.stride(-1) == 1 for t in found)
    return NormRequest(x.device.type, tuple(t.dtype for t in found), tuple(x.shape), width, unit, fits)


def _faults(x: Tensor, vectors: dict[str, Tensor | None], modulation: dict[str, Tensor | None]) -> list[str]:
    """What does not fit x `[..., D]`: vectors must be `[D]`, modulations `[B, D]`, `[B, 1, D]` or `[B, T, D]`."""
    faults = []
    for name, p in vectors.items():
        if p is not None and p.shape != x.shape[-1:]:
            faults.append(f"{name} must be [{x.shape[-1]}], got {list(p.shape)}")
    for name, p in modulation.items():
        if p is None:
            continue
        shape = (p.shape[0], 1, p.shape[1]) if p.ndim == 2 and x.ndim == 3 else tuple(p.shape)
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


def _choice_faults(**choices) -> list[str]:
    """`name=(value, Literal type)` whose value is not allowed."""
    return [
        f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}"
        for name, (value, kind) in choices.items()
        if value not in get_args(kind)
    ]


def _broadcast(x: Tensor, *modulation: Tensor | None) -> list[Tensor | None]:
    """Views `[B, 1, D]`, or `[B, T, D]` for all of them if one is per token."""
    full = [p[:, None] if p is not None and p.ndim == 2 else p for p in modulation]
    tokens = x.shape[1] if any(p is not None and p.shape[1] != 1 for p in full) else 1
    return [None if p is None else p.expand(x.shape[0], tokens, -1) for p in full]


def _row(p: Tensor | None) -> Tensor | None:
    return None if p is None else p[None]


def _as_one_sample(x: Tensor, modulation: Sequence[Tensor | None]) -> bool:
    """Whether the batch can join the tokens: nothing is per sample, and it is a view."""
    return all(p is None for p in modulation) and x.shape[0] > 1 and x.stride(0) == x.stride(1) * x.shape[1]


def _norm_triton(x: Tensor, *, eps, kind, weight, bias, scale, shift) -> Tensor:
    shape = x.shape
    if _as_one_sample(x, (scale, shift)):
        x = x.flatten(0, 1)[None]
    scale, shift = _broadcast(x, scale, shift)
    return ops.norm(x, _row(weight), _row(bias), scale, shift, eps, kind)[0].view(shape)


def _gated_triton(residual: Tensor, y: Tensor, gate: Tensor | None, *, gating: Gating) -> Tensor:
    if gate is None:
        return residual + y
    return ops.gated_add(residual, y, _broadcast(residual, gate)[0], gating)


def _residual_norm_triton(residual, y, gate, *, gating, eps, kind, weight, bias, scale, shift):
    shape = residual.shape
    if _as_one_sample(residual, (gate, scale, shift)) and _as_one_sample(y, ()):
        residual, y = residual.flatten(0, 1)[None], y.flatten(0, 1)[None]
    scale, shift = _broadcast(residual, scale, shift)
    gate = _broadcast(residual, gate)[0]
    new, out, _ = ops.residual_norm(residual, y, gate, _row(weight), _row(bias), scale, shift, eps, kind, gating)
    return new.view(shape), out.view(shape)


def _rank_fit(x: Tensor, y: Tensor | None = None) -> str | None:
    if x.ndim != 3:
        return f"x must be [B, T, D], got {list(x.shape)}"
    if y is not None and (y.shape != x.shape or y.dtype != x.dtype):
        return f"residual and y must be alike, got {list(x.shape)} {x.dtype} and {list(y.shape)} {y.dtype}"
    return None


def norm_request(x: Tensor, y: Tensor | None = None, params: Sequence[Tensor | None] = ()) -> NormRequest:
    """The request of `norm_modulate(x)`, or with y of the two residual calls; params: every other tensor."""
    return _request(x, (y, *params), x.shape[-1], _rank_fit(x, y))


def explain_norm(x: Tensor, y: Tensor | None = None, params: Sequence[Tensor | None] = ()) -> dict[str, str]:
    """`{backend: "usable" or why not}`, in order of preference, for `norm_modulate(x)`, or with y the residual calls.

    Args:
        x, y: `[B, T, D]`. params: weight, bias, scale, shift, gate in any order.
    """
    request = norm_request(x, y, params)
    return explain(_ordered(request, _norm_triton, reference.norm_modulate), request)


def norm_modulate(
    x: Tensor, *, eps: float, kind: Kind = "layer", weight: Tensor | None = None, bias: Tensor | None = None,
    scale: Tensor | None = None, shift: Tensor | None = None, backend: BackendName = "auto",
) -> Tensor:  # fmt: skip
    """`norm(x) * weight + bias`, then `* (1 + scale) + shift`; see `kernels.norm.reference.norm_modulate`.

    Args:
        x: `[B, T, D]`. weight, bias: `[D]`. scale, shift: `[B, D]`, `[B, 1, D]` or `[B, T, D]`.
        kind: `"layer"` or `"rms"`.
        backend: `"auto"` is Triton on CUDA where it can serve, else the reference.

    Raises:
        UserError: shapes that do not fit; a backend that is unknown or cannot serve, with the reason.
    """
    faults = _faults(x, {"weight": weight, "bias": bias}, {"scale": scale, "shift": shift})
    raise_faults("norm_modulate: the arguments do not fit", faults + _choice_faults(kind=(kind, Kind)))
    request = norm_request(x, params=(weight, bias, scale, shift))
    chosen = choose("norm_modulate", _ordered(request, _norm_triton, reference.norm_modulate), backend, request)
    return chosen.run(x, eps=eps, kind=kind, weight=weight, bias=bias, scale=scale, shift=shift)


def _residual_faults(residual: Tensor, y: Tensor, gate: Tensor | None, gating: str) -> list[str]:
    faults = _faults(residual, {}, {"gate": gate}) + _choice_faults(gating=(gating, Gating))
    if y.shape != residual.shape:
        faults.append(f"residual and y must have one shape, got {list(residual.shape)} and {list(y.shape)}")
    return faults


def gated_residual(
    residual: Tensor, y: Tensor, gate: Tensor | None = None, *, gating: Gating = "plain",
    backend: BackendName = "auto",
) -> Tensor:  # fmt: skip
    """`residual + y * gate` in residual's dtype; see `kernels.norm.reference.gated_residual`.

    Args:
        residual, y: `[B, T, D]`. gate: `[B, D]`, `[B, 1, D]` or `[B, T, D]`; None adds y as it is.
        gating: `"plain"`, or `"tanh"` for `tanh(gate)`.

    Raises:
        UserError: as `norm_modulate`.
    """
    raise_faults("gated_residual: the arguments do not fit", _residual_faults(residual, y, gate, gating))
    request = norm_request(residual, y, (gate,))
    chosen = choose("gated_residual", _ordered(request, _gated_triton, reference.gated_residual), backend, request)
    return chosen.run(residual, y, gate, gating=gating)


def residual_gate_norm(
    residual: Tensor, y: Tensor, gate: Tensor | None, *, eps: float, kind: Kind = "layer", gating: Gating = "plain",
    weight: Tensor | None = None, bias: Tensor | None = None, scale: Tensor | None = None,
    shift: Tensor | None = None, backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(new, norm_modulate(new, ...))` with `new = gated_residual(residual, y, gate)`, in one pass.

    Args and Raises: as `gated_residual` and `norm_modulate`.
    """
    faults = _residual_faults(residual, y, gate, gating) + _choice_faults(kind=(kind, Kind))
    faults += _faults(residual, {"weight": weight, "bias": bias}, {"scale": scale, "shift": shift})
    raise_faults("residual_gate_norm: the arguments do not fit", faults)
    request = norm_request(residual, y, (gate, weight, bias, scale, shift))
    backends = _ordered(request, _residual_norm_triton, reference.residual_gate_norm)
    norm = {"eps": eps, "kind": kind, "weight": weight, "bias": bias, "scale": scale, "shift": shift}
    return choose("residual_gate_norm", backends, backend, request).run(residual, y, gate, gating=gating, **norm)


def _table_fit(rope: Rope | None, q: Tensor) -> str | None:
    if q.ndim != 4:
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


def _rope_faults(name: str, x: Tensor, weight: Tensor | None, rope: Rope | None, over: str) -> list[str]:
    if x.ndim != 4:
        return [f"{name} must be [B, T, H, D], got {list(x.shape)}"]
    b, t, h, d = x.shape
    faults, width = [], h * d if over == "inner" else d
    if weight is not None and weight.shape != (width,):
        faults.append(f"{name}_weight must be [{width}] for a norm over {over}, got {list(weight.shape)}")
    if rope is not None and d % 2:
        faults.append(f"{name}: rotary embedding needs an even head size, got {d}")
    for part, table in zip(("cosines", "sines"), () if rope is None else rope, strict=False):
        full = (1, *table.shape) if table.ndim == 2 else tuple(table.shape)
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


def _tables(rope: Rope | None) -> tuple[Tensor | None, Tensor | None]:
    """`[1|B, T, 1|H, D/2]` views with equal strides."""
    if rope is None:
        return None, None
    cos, sin = (t[None] if t.ndim == 2 else t for t in rope)
    cos, sin = (t[:, :, None] if t.ndim == 3 else t for t in (cos, sin))
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


def _norm_rope_triton(x, *, eps, weight, rope, over, pairs) -> Tensor:
    return rope_ops.norm_rope(x, None, _row(weight), None, *_tables(rope), eps, over, pairs)[0]


def _qk_triton(q, k, *, eps, q_weight, k_weight, rope, over, pairs) -> tuple[Tensor, Tensor]:
    alike = q.shape == k.shape and q.dtype == k.dtype and (q_weight is None) == (k_weight is None)
    if alike and q.shape[2] * q.shape[3] <= MAX_JOINT_WIDTH:
        weights = (_row(q_weight), _row(k_weight))
        return rope_ops.norm_rope(q, k, *weights, *_tables(rope), eps, over, pairs)[:2]
    shared = {"eps": eps, "rope": rope, "over": over, "pairs": pairs}
    return _norm_rope_triton(q, weight=q_weight, **shared), _norm_rope_triton(k, weight=k_weight, **shared)


def _qk_request(q: Tensor, k: Tensor | None, weights, rope: Rope | None) -> NormRequest:
    tables = () if rope is None else rope
    width = max(t.shape[-2] * t.shape[-1] for t in (q, k) if t is not None)
    return _request(q, (k, *weights, *tables), width, _table_fit(rope, q))


def explain_qk_norm_rope(q: Tensor, k: Tensor | None = None, weights=(), rope: Rope | None = None) -> dict[str, str]:
    """`{backend: "usable" or why not}`, in order of preference, for `qk_norm_rope(q, k)` or `norm_rope(q)`."""
    request = _qk_request(q, k, weights, rope)
    return explain(_ordered(request, _qk_triton, reference.qk_norm_rope), request)


def norm_rope(
    x: Tensor, *, eps: float, weight: Tensor | None = None, rope: Rope | None = None, over: Over = "inner",
    pairs: Pairs = "interleaved", backend: BackendName = "auto",
) -> Tensor:  # fmt: skip
    """RMSNorm of queries or keys alone, then their rotary embedding; see `qk_norm_rope`.

    Args:
        x: `[B, T, H, D]`, any strides but 1 along D. weight: `[H*D]` or `[D]`, as `over` says.
    """
    faults = _rope_faults("x", x, weight, rope, over) + _choice_faults(over=(over, Over), pairs=(pairs, Pairs))
    raise_faults("norm_rope: the arguments do not fit", faults)
    request = _qk_request(x, None, (weight,), rope)
    chosen = choose("norm_rope", _ordered(request, _norm_rope_triton, reference.norm_rope), backend, request)
    return chosen.run(x, eps=eps, weight=weight, rope=rope, over=over, pairs=pairs)


def qk_norm_rope(
    q: Tensor, k: Tensor, *, eps: float, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    rope: Rope | None = None, over: Over = "inner", pairs: Pairs = "interleaved", backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RMSNorm of queries and keys, then their rotary embedding; see `kernels.norm.reference.norm_rope`.

    Args:
        q, k: `[B, T, H, D]`; views into packed projections are read in place. They may differ in T (without a
            table) and in H.
        q_weight, k_weight: `[H*D]` with `over="inner"` (Wan, LTX-2), `[D]` with `over="head"` (Z-Image, LingBot).
        rope: float32 cosines and sines `[T, D/2]`, `[B, T, D/2]` or `[B, T, H, D/2]`.
        pairs: channels `(2i, 2i + 1)` turn together, or with `"half"` `(i, i + D/2)`.

    Returns:
        q and k, `[B, T, H, D]` contiguous, in their dtypes.

    Raises:
        UserError: shapes that do not fit; a backend that is unknown or cannot serve, with the reason.
    """
    faults = _rope_faults("q", q, q_weight, rope, over) + _rope_faults("k", k, k_weight, rope, over)
    faults += _choice_faults(over=(over, Over), pairs=(pairs, Pairs))
    raise_faults("qk_norm_rope: the arguments do not fit", faults)
    request = _qk_request(q, k, (q_weight, k_weight), rope)
    chosen = choose("qk_norm_rope", _ordered(request, _qk_triton, reference.qk_norm_rope), backend, request)
    options = {"q_weight": q_weight, "k_weight": k_weight, "rope": rope, "over": over, "pairs": pairs}
    return chosen.run(q, k, eps=eps, **options)
