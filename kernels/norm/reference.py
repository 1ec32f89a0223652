"""Norms with modulation, gated residuals, QK norm with rotary embedding in plain PyTorch: the definition of truth.

The arithmetic is in float32 or wider, each result is rounded once, at its end.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["layer", "rms"]
Gating = Literal["plain", "tanh"]
Over = Literal["inner", "head"]
Pairs = Literal["interleaved", "half"]
Rope = tuple[Tensor, Tensor]


def wide_of(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic for x: float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def widened(p: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`p` in `dtype`; a per-sample `[B, D]` gets its token axis. None stays None."""
    if p is None:
        return None
    return (p[:, None] if p.ndim == 2 else p).to(dtype)


def norm_modulate(
    x: Tensor,
    *,
    eps: float,
    kind: Kind = "layer",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """`norm(x) * weight + bias`, then `* (1 + scale) + shift`, each part optional.

    Args:
        x: `[B, T, D]`. weight, bias: `[D]`.
        scale, shift: per sample `[B, D]` or `[B, 1, D]`, or per token `[B, T, D]`.
        kind: `"layer"` subtracts the mean, `"rms"` does not.

    Returns:
        `[B, T, D]` in x's dtype; the arithmetic is in float32 or wider.
    """
    wide = wide_of(x)
    h, width = x.to(wide), (x.shape[-1],)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    if kind == "layer":
        h = F.layer_norm(h, width, weight, bias, eps)
    else:
        h = F.rms_norm(h, width, weight, eps)
        h = h if bias is None else h + bias
    if scale is not None:
        h = h * (1 + widened(scale, wide))
    if shift is not None:
        h = h + widened(shift, wide)
    return h.to(x.dtype)


def gated_residual(residual: Tensor, y: Tensor, gate: Tensor | None = None, *, gating: Gating = "plain") -> Tensor:
    """`residual + y * gate` in float32 or wider, cast back to residual's dtype.

    Args:
        residual, y: `[B, T, D]`. gate: `[B, D]`, `[B, 1, D]` or `[B, T, D]`; None adds y as it is.
        gating: `"tanh"` multiplies with `tanh(gate)` instead (Z-Image).
    """
    if gate is None:
        return residual + y
    wide = wide_of(residual)
    gate = widened(gate, wide)
    return (residual.to(wide) + y.to(wide) * (gate.tanh() if gating == "tanh" else gate)).to(residual.dtype)


def residual_gate_norm(
    residual: Tensor, y: Tensor, gate: Tensor | None, *, gating: Gating = "plain", **norm
) -> tuple[Tensor, Tensor]:
    """`(new_residual, norm_modulate(new_residual, **norm))` with `new_residual = residual + y * gate`."""
    new = gated_residual(residual, y, gate, gating=gating)
    return new, norm_modulate(new, **norm)


def rotate(x: Tensor, rope: Rope, pairs: Pairs = "interleaved") -> Tensor:
    """Rotates channel pairs of `x [B, T, H, D]` (Su et al., 2021, eq. 34), in x's dtype.

    Args:
        rope: cosines and sines `[T, D/2]`, `[B, T, D/2]`, or per head `[B, T, H, D/2]` (1 for B or H broadcasts).
        pairs: channels `(2i, 2i + 1)` or, with `"half"`, `(i, i + D/2)` turn by angle i.
    """
    cos, sin = (t[..., None, :] if t.ndim < 4 else t for t in rope)
    if pairs == "interleaved":
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def norm_rope(
    x: Tensor, *, eps: float, weight: Tensor | None = None, rope: Rope | None = None, over: Over = "inner",
    pairs: Pairs = "interleaved",
) -> Tensor:  # fmt: skip
    """RMSNorm of queries or keys, then their rotary embedding.

    Args:
        x: `[B, T, H, D]`.
        weight: `[H*D]` for a norm over the inner width (Wan, LTX-2), `[D]` for one per head (Z-Image, LingBot).
        rope: cosines and sines as in `rotate`; None leaves the rotation out.
        over: the width of the norm: `"inner"` H*D, `"head"` D.

    Returns:
        `[B, T, H, D]` in x's dtype.
    """
    h = x.to(wide_of(x))
    square = h.flatten(-2).square().mean(-1)[..., None, None] if over == "inner" else h.square().mean(-1, keepdim=True)
    h = h * torch.rsqrt(square + eps)
    if weight is not None:
        h = h * (weight.unflatten(-1, (-1, x.shape[-1])) if over == "inner" else weight)
    return (h if rope is None else rotate(h, rope, pairs)).to(x.dtype)


def qk_norm_rope(
    q: Tensor, k: Tensor, *, eps: float, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    rope: Rope | None = None, over: Over = "inner", pairs: Pairs = "interleaved",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`norm_rope` of `q [B, T, H, D]` and `k [B, T, H_kv, D]`, with one table for both."""
    shared = {"eps": eps, "rope": rope, "over": over, "pairs": pairs}
    return norm_rope(q, weight=q_weight, **shared), norm_rope(k, weight=k_weight, **shared)
