"""The fused norms of a transformer block: choice of a backend, and the call."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from core.errors import raise_faults
from kernels.dispatch import Backend, choose, explain, not_interpreted, remembered
from kernels.norm import ops, reference, rope_ops
from kernels.norm.checks import (
    Like,
    NormRequest,
    Tables,
    alike,
    choice_faults,
    faults_of,
    like,
    norm_request,
    qk_request,
    residual_faults,
    rope_faults,
    triton_refusal,
)
from kernels.norm.config import MAX_JOINT_WIDTH
from kernels.norm.reference import Gating, Kind, Over, Pairs, Rope

BackendName = Literal["auto", "triton", "reference"]


def _backends(run: Callable, plain: Callable) -> tuple[Backend, ...]:
    return Backend("triton", run, triton_refusal), Backend("reference", plain, lambda request: None)


def _explained(request: NormRequest) -> dict[str, str]:
    """Triton first, but where there is no GPU last."""
    both = _backends(ops.norm, reference.norm_modulate)
    return explain(both if request.device == "cuda" else both[::-1], request)


def _chosen(op: str, backends: Sequence[Backend], name: str, request: NormRequest) -> Callable:
    return choose(op, backends, name, request, not_interpreted(request.device)).run


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


def explain_norm(x: Tensor, y: Tensor | None = None, params: Sequence[Tensor | None] = ()) -> dict[str, str]:
    """`{backend: "usable" or why not}`, in order of preference, for `norm_modulate(x)`, or with y the residual calls.

    Args:
        x, y: `[B, T, D]`. params: weight, bias, scale, shift, gate in any order.
    """
    return _explained(norm_request(like(x), like(y), [like(p) for p in params]))


NORM = _backends(_norm_triton, reference.norm_modulate)
GATED = _backends(_gated_triton, reference.gated_residual)
RESIDUAL_NORM = _backends(_residual_norm_triton, reference.residual_gate_norm)


@remembered
def _decide_norm(backend: str, kind: str, x: Like, weight, bias, scale, shift) -> Callable:
    faults = faults_of(x, {"weight": weight, "bias": bias}, {"scale": scale, "shift": shift})
    raise_faults("norm_modulate: the arguments do not fit", faults + choice_faults(kind=(kind, Kind)))
    return _chosen("norm_modulate", NORM, backend, norm_request(x, None, (weight, bias, scale, shift)))


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
    run = _decide_norm(backend, kind, like(x), like(weight), like(bias), like(scale), like(shift))
    return run(x, eps=eps, kind=kind, weight=weight, bias=bias, scale=scale, shift=shift)


@remembered
def _decide_gated(backend: str, gating: str, residual: Like, y: Like, gate: Like | None) -> Callable:
    raise_faults("gated_residual: the arguments do not fit", residual_faults(residual, y, gate, gating))
    return _chosen("gated_residual", GATED, backend, norm_request(residual, y, (gate,)))


@remembered
def _decide_residual_norm(
    backend: str, kind: str, gating: str, residual: Like, y: Like, gate: Like | None, weight, bias, scale, shift
) -> Callable:
    faults = residual_faults(residual, y, gate, gating) + choice_faults(kind=(kind, Kind))
    faults += faults_of(residual, {"weight": weight, "bias": bias}, {"scale": scale, "shift": shift})
    raise_faults("residual_gate_norm: the arguments do not fit", faults)
    request = norm_request(residual, y, (gate, weight, bias, scale, shift))
    return _chosen("residual_gate_norm", RESIDUAL_NORM, backend, request)


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
    run = _decide_gated(backend, gating, like(residual), like(y), like(gate))
    return run(residual, y, gate, gating=gating)


def residual_gate_norm(
    residual: Tensor, y: Tensor, gate: Tensor | None, *, eps: float, kind: Kind = "layer", gating: Gating = "plain",
    weight: Tensor | None = None, bias: Tensor | None = None, scale: Tensor | None = None,
    shift: Tensor | None = None, backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(new, norm_modulate(new, ...))` with `new = gated_residual(residual, y, gate)`, in one pass.

    Args and Raises: as `gated_residual` and `norm_modulate`.
    """
    norm = {"weight": weight, "bias": bias, "scale": scale, "shift": shift}
    likes = [like(t) for t in (residual, y, gate, *norm.values())]
    run = _decide_residual_norm(backend, kind, gating, *likes)
    return run(residual, y, gate, gating=gating, eps=eps, kind=kind, **norm)


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


def explain_qk_norm_rope(q: Tensor, k: Tensor | None = None, weights=(), rope: Rope | None = None) -> dict[str, str]:
    """`{backend: "usable" or why not}`, in order of preference, for `qk_norm_rope(q, k)` or `norm_rope(q)`."""
    return _explained(qk_request(like(q), like(k), [like(w) for w in weights], alike(rope)))


ROPE = _backends(_norm_rope_triton, reference.norm_rope)
QK = _backends(_qk_triton, reference.qk_norm_rope)


@remembered
def _decide_rope(backend: str, over: str, pairs: str, x: Like, weight: Like | None, rope: Tables | None) -> Callable:
    faults = rope_faults("x", x, weight, rope, over) + choice_faults(over=(over, Over), pairs=(pairs, Pairs))
    raise_faults("norm_rope: the arguments do not fit", faults)
    return _chosen("norm_rope", ROPE, backend, qk_request(x, None, (weight,), rope))


@remembered
def _decide_qk(backend: str, over: str, pairs: str, q: Like, k: Like, q_weight, k_weight, rope) -> Callable:
    faults = rope_faults("q", q, q_weight, rope, over) + rope_faults("k", k, k_weight, rope, over)
    faults += choice_faults(over=(over, Over), pairs=(pairs, Pairs))
    raise_faults("qk_norm_rope: the arguments do not fit", faults)
    return _chosen("qk_norm_rope", QK, backend, qk_request(q, k, (q_weight, k_weight), rope))


def norm_rope(
    x: Tensor, *, eps: float, weight: Tensor | None = None, rope: Rope | None = None, over: Over = "inner",
    pairs: Pairs = "interleaved", backend: BackendName = "auto",
) -> Tensor:  # fmt: skip
    """RMSNorm of queries or keys alone, then their rotary embedding; see `qk_norm_rope`.

    Args:
        x: `[B, T, H, D]`, any strides but 1 along D. weight: `[H*D]` or `[D]`, as `over` says.
    """
    run = _decide_rope(backend, over, pairs, like(x), like(weight), alike(rope))
    return run(x, eps=eps, weight=weight, rope=rope, over=over, pairs=pairs)


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
    run = _decide_qk(backend, over, pairs, like(q), like(k), like(q_weight), like(k_weight), alike(rope))
    options = {"q_weight": q_weight, "k_weight": k_weight, "rope": rope, "over": over, "pairs": pairs}
    return run(q, k, eps=eps, **options)
