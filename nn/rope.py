"""Rotary position embedding over a (t, h, w) grid."""

import torch
from torch import Tensor

from core.devices import highest_float
from kernels.norm.reference import Pairs, rotate

Rope = tuple[Tensor, Tensor]


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """How Wan shares a head's channels among time, height and width: two sixths each for space, the rest time."""
    space = 2 * (head_dim // 6)
    return head_dim - 2 * space, space, space


def axis_angles(positions: Tensor, dim: int, theta: float) -> Tensor:
    """Angles `[L, dim // 2]` of positions `[L]`: `pos * theta ** (-2i / dim)` (Su et al., 2021, eq. 15)."""
    exponent = torch.arange(0, dim, 2, dtype=positions.dtype, device=positions.device) / dim
    return positions[:, None] * theta**-exponent


def rope_3d(grid: tuple[int, int, int], head_dim: int, *, theta: float = 10000.0, device="cpu") -> Rope:
    """Cosines and sines `[T*H*W, head_dim // 2]` for tokens in (t, h, w) order.

    Angles are computed in the device's widest float and stored in float32.
    """
    dims, wide = axis_dims(head_dim), highest_float(device)
    axes = [
        axis_angles(torch.arange(n, dtype=wide, device=device), dim, theta)
        for n, dim in zip(grid, dims, strict=True)
    ]
    t, h, w = grid
    angles = torch.cat(
        [
            axes[0][:, None, None].expand(t, h, w, -1),
            axes[1][None, :, None].expand(t, h, w, -1),
            axes[2][None, None, :].expand(t, h, w, -1),
        ],
        dim=-1,
    ).reshape(t * h * w, -1)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, rope: Rope, pairs: Pairs = "interleaved") -> Tensor:
    """Rotates channel pairs of `x [B, L, H, D]`, in float32 or wider.

    Args:
        rope: cosines and sines `[L, D // 2]`, `[B, L, D // 2]`, or per head `[B, L, H, D // 2]` (1 for B broadcasts).
        pairs: `"interleaved"` turns channels `(2i, 2i + 1)`, `"half"` `(i, i + D / 2)`.
    """
    return rotate(x.to(torch.promote_types(x.dtype, torch.float32)), rope, pairs).to(x.dtype)
