"""Attention over a tile plan as differentiable ops: output and log-sum-exp, and their gradients.

Queries come stacked, `q [T, B, L, H, D]`: T = 1, or T = 2 with the rotated queries second, which score the keys of
the rotated slots. Strides are arbitrary but for contiguous, 16-byte aligned rows. Nothing is read back from the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.errors import UserError
from kernels.attention.flash import layout_fault
from kernels.dispatch import triton_fault
from kernels.op import differentiable, fold_batch, raw_op, unfold_batch


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy where it is expanded or its rows are not aligned: what autograd and vmap hand in."""
    ok = all(n == 1 or (s > 0 and s * x.element_size() % 16 == 0) for n, s in zip(x.shape[:-1], x.stride()[:-1]))
    return x if ok and x.stride(-1) == 1 and x.data_ptr() % 16 == 0 else x.contiguous()


def _checked(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    fault = triton_fault(q.device.type) or layout_fault(q[-1], k, v)
    if fault is not None:
        raise UserError(f"attention over a plan: backend 'triton' cannot serve this call: {fault}")
    return [_aligned(x) for x in (q, k, v)]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, forward_plan: Tensor, bounds: Tensor, row_bounds: Tensor | None, dq_plan: Tensor,
    dkv_plan: Tensor, fused_plan: Tensor | None, class_rows: int, scale: float, tiles: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = _checked(q, k, v)
    if 0 in q.shape:
        return _forward_shapes(q, k, v, *[None] * 8, tiles)
    from kernels.attention import planned_launch

    if row_bounds is not None:
        return planned_launch.forward_by_hand(q, k, v, forward_plan, row_bounds, scale, tiles[:5])
    return planned_launch.forward(q, k, v, forward_plan, bounds, class_rows, scale, tiles[:4])


def _forward_shapes(q, k, v, *rest):
    tiles = rest[-1]
    rows = -(-q.shape[2] // tiles[0]) * tiles[0]
    return torch.empty_like(q[0]), q.new_empty(q.shape[1], q.shape[3], rows, dtype=torch.float32)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, bounds: Tensor,
    row_bounds: Tensor | None, dq_plan: Tensor, dkv_plan: Tensor, fused_plan: Tensor | None, class_rows: int,
    scale: float, tiles: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = _checked(q, k, v)
    if 0 in q.shape:
        return _backward_shapes(q, k)
    from kernels.attention import planned_launch

    dlse = None if dlse is None else dlse.contiguous()
    tensors = q, k, v, _aligned(out), lse.contiguous(), _aligned(dout), dlse
    if row_bounds is not None and fused_plan is not None and not torch.are_deterministic_algorithms_enabled():
        return planned_launch.backward_by_hand(*tensors, fused_plan, row_bounds, scale, tiles[15:])
    return planned_launch.backward(
        *tensors, dq_plan, dkv_plan, bounds, class_rows, scale, tiles[5:9], tiles[10:14]
    )  # fmt: skip


def _backward_shapes(q, k, *rest):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(k), torch.empty_like(k)


def _fold_stacked(q: Tensor, dim: int | None, size: int) -> Tensor:
    q = q.unsqueeze(1).expand(-1, size, *q.shape[1:]) if dim is None else q.movedim(dim, 1)
    return q.flatten(1, 2)


def _fold(size, dims, args, f, n: int):
    """q and the `n - 1` tensors after it have a batch; the plan is the same for all samples."""
    folded = [fold_batch(x, d, size) for x, d in zip(args[1:n], dims[1:n], strict=True)]
    return f(_fold_stacked(args[0], dims[0], size), *folded, *args[n:])


def _fold_forward(size, dims, args):
    return tuple(unfold_batch(x, size) for x in _fold(size, dims, args, planned_forward, 3)), (0, 0)


def _fold_backward(size, dims, args):
    dq, dk, dv = _fold(size, dims, args, planned_backward, 7)
    return (dq.unflatten(1, (size, -1)), unfold_batch(dk, size), unfold_batch(dv, size)), (1, 0, 0)


def _gradients(kept, args, grads):
    q, k, v, out, lse, *plans = kept
    dout, dlse = grads
    if dout is None and dlse is None:
        return (None,) * len(args)
    dout = torch.zeros_like(out) if dout is None else dout
    found = planned_backward(q, k, v, out, lse, dout, dlse, *plans, *args[9:])
    return *found, *(None,) * (len(args) - 3)


planned_backward = differentiable(raw_op("planned_backward", _backward, _backward_shapes), fold=_fold_backward)
planned_forward = differentiable(
    raw_op("planned_forward", _forward, _forward_shapes),
    fold=_fold_forward,
    keep=lambda args, outputs: (*args[:3], *outputs, *args[4:9]),
    backward=_gradients,
)
