"""Runs the Triton kernels of QK norm with rotary embedding on tensors whose shapes were checked before.

Shapes: q, k `[B, T, H, D]` alike, any strides but 1 along D; weights `[W, H*D]` or `[W, D]` with W dividing B, row
`b // (B / W)` serves sample b; cos, sin `[B or 1, T, H or 1, D/2]` with equal strides.
"""

import torch
from torch import Tensor

from core.compat import launched
from kernels.norm.config import Launch, launch_of, programs_per_sample
from kernels.norm.launch import COLUMNS, DEPTH, absent, packed, unit
from kernels.tiles import power_of_two


def rope_kernels() -> list:
    """What QK norm with rotary embedding and its gradient launch."""
    from kernels.norm import triton_norm, triton_rope

    return [triton_rope.rope_forward, triton_rope.rope_backward, triton_norm.sum_rows]


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    """Of samples, tokens and heads; 0 for an axis of length 1, so that tables broadcast."""
    return (0, 0, 0) if x is None else tuple(0 if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3]))


def _column_bytes(q: Tensor, k: Tensor | None, cos: Tensor | None) -> int:
    """Bytes that a token reads per column: of q, k, and tables per head."""
    tables = 4 if cos is not None and cos.shape[2] > 1 else 0
    return q.element_size() * (1 if k is None else 2) + tables


def _group(weight: Tensor | None, samples: int) -> int:
    return samples if weight is None else samples // weight.shape[0]


def _flags(q: Tensor, k, weight, cos, over: str, pairs: str, launch: Launch) -> dict:
    half = -(-q.shape[3] // 2)
    return {
        "HAS_K": k is not None, "WEIGHT": weight is not None, "ROPE": cos is not None,
        "PER_HEAD": cos is not None and cos.shape[2] > 1, "JOINT": over == "inner",
        "INTERLEAVED": pairs == "interleaved", "ROWS": launch.rows, "HEADS": power_of_two(q.shape[2]),
        "PAIRS": power_of_two(half), "STAGES": launch.stages, "num_warps": launch.warps,
    }  # fmt: skip


def rstd_shape(x: Tensor, over: str) -> tuple[int, ...]:
    """`[B, T, 1]`, or per head `[B, T, H]`."""
    return (*x.shape[:2], 1 if over == "inner" else x.shape[2])


def rope_forward(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, eps: float, over: str, pairs: str, launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(q_out, k_out [B, T, H, D], q_rstd, k_rstd [B, T, 1 or H] float32)`; those of k absent without k."""
    from kernels.norm import triton_rope

    b, t, h, d = q.shape
    q_weight, k_weight = packed(q_weight, k_weight)
    outs = [absent(q) if x is None else x.new_empty(x.shape) for x in (q, k)]
    rstds = [absent(q) if x is None else x.new_empty(rstd_shape(x, over), dtype=torch.float32) for x in (q, k)]
    if q.numel() == 0:
        return *outs, *rstds
    if launch is None:
        launch = launch_of("rope_forward", h * d, _column_bytes(q, k, cos))
    programs = programs_per_sample(launch, q.device, b, t)
    inputs = [q if x is None else x for x in (q, k, q_weight, k_weight, cos, sin)]
    with torch.cuda.device_of(q):
        launched(triton_rope.rope_forward, q)[(b * programs,)](
            *inputs, *outs, *rstds, t, h, d // 2, programs, _group(q_weight, b), eps,
            *_strides(q), *_strides(k), *_strides(cos), **_flags(q, k, q_weight, cos, over, pairs, launch),
        )  # fmt: skip
    return *outs, *rstds


def rope_backward(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, q_rstd: Tensor, k_rstd: Tensor | None, q_grad: Tensor, k_grad: Tensor | None, over: str,
    pairs: str, launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(dq, dk, dq_weight, dk_weight)` in the shapes and dtypes of their inputs; absent where those are."""
    from kernels.norm import triton_norm, triton_rope

    b, t, h, d = q.shape
    q_weight, k_weight, q_rstd, k_rstd = packed(q_weight, k_weight, q_rstd, k_rstd)
    inputs = (q, k, q_weight, k_weight)
    if q.numel() == 0:
        return tuple(absent(q) if x is None else torch.zeros_like(x) for x in inputs)
    q_grad, k_grad = unit(q_grad), unit(k_grad)
    dq, dk, *sums = (absent(q) if x is None else x.new_empty(x.shape) for x in inputs)
    if launch is None:
        launch = launch_of("rope_backward", h * d, 2 * _column_bytes(q, k, cos))
    programs, group = programs_per_sample(launch, q.device, b, t), _group(q_weight, b)
    tensors, width = 1 + (k is not None), h * d if over == "inner" else d
    partial = q.new_empty(b * programs, tensors, width if q_weight is not None else 0, dtype=torch.float32)
    given = [q if x is None else x for x in (*inputs, cos, sin, q_rstd, k_rstd, q_grad, k_grad)]
    with torch.cuda.device_of(q):
        launched(triton_rope.rope_backward, q)[(b * programs,)](
            *given, dq, dk, partial, t, h, d // 2, programs, group, *_strides(q), *_strides(k), *_strides(cos),
            *_strides(q_grad), *_strides(k_grad), **_flags(q, k, q_weight, cos, over, pairs, launch),
        )  # fmt: skip
        if q_weight is not None:
            rows = b // group
            total = q.new_empty(rows, tensors, width, dtype=q_weight.dtype)
            launched(triton_norm.sum_rows, q)[(rows, -(-tensors * width // COLUMNS))](
                partial, total, group * programs, tensors * width, DEPTH=DEPTH, BLOCK=COLUMNS, num_warps=4
            )
            sums = [total[:, 0].clone(), absent(q) if k is None else total[:, 1].to(k_weight.dtype, copy=True)]
    return dq, dk, *sums
