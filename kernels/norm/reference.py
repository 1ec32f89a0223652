"""LayerNorm and RMSNorm with modulation in plain PyTorch, statistics in float32 or wider."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["layer", "rms"]


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
        scale, shift: `[B, D]`-like with a singleton token axis `[B, 1, D]`, or per token `[B, T, D]`.
        kind: `"layer"` subtracts the mean, `"rms"` does not.

    Returns:
        `[B, T, D]` in x's dtype; the arithmetic is in float32 or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h, width = x.to(wide), (x.shape[-1],)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    if kind == "layer":
        h = F.layer_norm(h, width, weight, bias, eps)
    else:
        h = F.rms_norm(h, width, weight, eps)
        h = h if bias is None else h + bias
    if scale is not None:
        h = h * (1 + scale)
    if shift is not None:
        h = h + shift
    return h.to(x.dtype)


def gated_residual(residual: Tensor, y: Tensor, gate: Tensor | None = None) -> Tensor:
    """`residual + y * gate` in float32 or wider, cast back to residual's dtype.

    Args:
        residual, y: `[B, T, D]`. gate: `[B, 1, D]` or `[B, T, D]`; None adds y as it is.
    """
    if gate is None:
        return residual + y
    wide = torch.promote_types(residual.dtype, torch.float32)
    return (residual.to(wide) + y.to(wide) * gate).to(residual.dtype)


def residual_gate_norm(residual: Tensor, y: Tensor, gate: Tensor | None, **norm) -> tuple[Tensor, Tensor]:
    """`(new_residual, norm_modulate(new_residual, **norm))` with `new_residual = residual + y * gate`."""
    new = gated_residual(residual, y, gate)
    return new, norm_modulate(new, **norm)
