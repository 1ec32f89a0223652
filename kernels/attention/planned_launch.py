"""Launches the kernels of attention over a tile plan. Imports Triton, so only the ops import it."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kernels.attention import launch
from kernels.attention.planned_triton import dkv_kernel, dq_kernel, forward_kernel
from kernels.attention.tiles import ByHand, Fused
from kernels.descriptors import rows_of_heads
from kernels.tiles import padded

LOG2_E = 1.4426950408889634
# Heads that share the machine at a time. Programs of one head that run together read the same keys from the L2 cache,
# so with many heads at once too few would meet; with few, no short tiles of other heads are left for the end.
HEADS_AT_ONCE = 16
# Of the kernel by hand that adds to sums of dQ: these, and what is read beside them, should stay in the L2 cache. Two,
# so that the long tiles of the last head (sinks) do not begin when nothing else is left.
HEADS_AT_ONCE_FUSED = 2
LN_2 = 0.6931471805599453


def _descriptor(x: Tensor, rows: int):
    """Loads of `rows` rows of one head of `x [B, L, H, D]`, by the bulk copy engine where there is one."""
    return rows_of_heads(x, rows, padded(x.shape[3]))


def _flags(q: Tensor, tile: Sequence[int]) -> dict:
    """The compile-time arguments of all three kernels for stacked queries `q [T, B, L, H, D]`."""
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        precision = "upcast"
    return {
        "TURNS": q.shape[0], "HEAD": q.shape[4], "D": padded(q.shape[4]), "TILE_Q": tile[0], "TILE_K": tile[1],
        "PRECISION": precision, "num_warps": tile[2], "num_stages": tile[3],
    }  # fmt: skip


def _device(x: Tensor):
    return torch.cuda.device(x.device if x.is_cuda else -1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, bounds: Tensor, class_rows: int, scale: float, tile: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Output `[B, L, H, D]` and base-2 lse `[B, H, whole query tiles]`; arguments as `planned.planned_forward`."""
    _, b, length, h, _ = q.shape
    n_tiles, heads = triton.cdiv(length, tile[0]), b * h
    out = torch.empty_like(q[0])
    lse = torch.empty(b, h, n_tiles * tile[0], dtype=torch.float32, device=q.device)
    with _device(q):
        forward_kernel[(n_tiles * heads,)](
            _descriptor(q.flatten(0, 1), tile[0]), _descriptor(k, tile[1]), _descriptor(v, tile[1]), out, lse, plan,
            bounds, n_tiles, heads, min(heads, HEADS_AT_ONCE), h, h // k.shape[2], length, class_rows, bounds.shape[1],
            scale * LOG2_E, *out.stride()[:3], **_flags(q, tile),
        )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, dq_plan: Tensor,
    dkv_plan: Tensor, bounds: Tensor, class_rows: int, scale: float, dq_tile: Sequence[int], dkv_tile: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the stacked queries, k and v. The first kernel leaves delta for the second."""
    _, b, length, h, _ = q.shape
    dq, dk, dv = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(k), torch.empty_like(k)
    delta_len = triton.cdiv(length, dq_tile[0]) * dq_tile[0]
    delta = torch.empty(b, h, delta_len, dtype=torch.float32, device=q.device)
    rows, share, n_classes = q.flatten(0, 1), h // k.shape[2], bounds.shape[1]
    with _device(q):
        n_tiles, heads = triton.cdiv(length, dq_tile[0]), b * h
        dq_kernel[(n_tiles * heads,)](
            _descriptor(rows, dq_tile[0]), *(_descriptor(x, dq_tile[1]) for x in (k, v)),
            *(_descriptor(x, dq_tile[0]) for x in (out, dout)), lse, dlse, delta, dq, dq_plan, bounds, n_tiles, heads,
            min(heads, HEADS_AT_ONCE), h, share, length, class_rows, n_classes, lse.shape[2], scale, scale * LOG2_E,
            *dq.stride()[1:4], **_flags(q, dq_tile),
        )  # fmt: skip
        n_tiles, heads = triton.cdiv(k.shape[1], dkv_tile[1]), b * k.shape[2]
        dkv_kernel[(n_tiles * heads,)](
            _descriptor(rows, dkv_tile[0]), *(_descriptor(x, dkv_tile[1]) for x in (k, v)),
            _descriptor(dout, dkv_tile[0]), lse, delta, dk, dv, dkv_plan, bounds, n_tiles, heads,
            min(heads, HEADS_AT_ONCE), k.shape[2], share, length, k.shape[1], class_rows, n_classes, lse.shape[2],
            delta_len, scale, scale * LOG2_E, *dk.stride()[:3], **_flags(q, dkv_tile),
        )  # fmt: skip
    return dq, dk, dv


def forward_by_hand(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, bounds: Tensor, scale: float, tiles: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`forward` by the kernel in Gluon; `plan` and `bounds` from `plan.steps` and `plan.row_bounds`."""
    _, b, length, h, _ = q.shape
    tiles = ByHand(*tiles)
    out = torch.empty_like(q[0])
    lse = torch.empty(b, h, triton.cdiv(length, tiles.queries) * tiles.queries, dtype=torch.float32, device=q.device)
    steps = launch.Steps(plan, bounds, HEADS_AT_ONCE)
    launch.forward_by_hand(q.flatten(0, 1), k, v, out, lse, scale, tiles, steps)
    return out, lse


def backward_by_hand(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, plan: Tensor,
    bounds: Tensor, scale: float, tiles: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`backward` by the one kernel in Gluon; `plan` is that of key tiles."""
    length = q.shape[2]
    # Here the log-sum-exp is in base 2 and of whole tiles, in `prepare` neither.
    natural = lse[..., :length] * LN_2
    dlse = None if dlse is None else dlse[..., :length] * LOG2_E
    base, delta = launch.prepare(q[0], dout, (None,) * 5, length, out, natural, dlse)
    dq, dk, dv = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(k), torch.empty_like(k)
    steps = launch.Steps(plan, bounds, HEADS_AT_ONCE_FUSED)
    flat = q.flatten(0, 1), k, v, dout, base, delta, dq.flatten(0, 1), dk, dv
    launch.backward_by_hand(*flat, scale, Fused(*tiles), steps)
    return dq, dk, dv
