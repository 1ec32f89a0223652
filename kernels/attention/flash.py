"""Attention by our Triton kernels, as differentiable ops: output and log-sum-exp, gradients, tangents.

Three ops, `attention_forward`, `attention_backward` and `attention_tangent`, on `q [B, Lq, H, D]` and `k, v [B, Lk,
Hkv, D]` in any strides with contiguous, 16-byte aligned rows: `[B, H, L, D]` tensors are passed as
`x.transpose(1, 2)`, slices of a packed QKV as they are. Nothing here reads a value back from the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.errors import UserError
from kernels.attention.tiles import HEAD_SIZES
from kernels.dispatch import constant_result, remembered, triton_fault
from kernels.op import differentiable, fold_batch, forward_mode, product_flops, raw_op, unfold_batch
from kernels.tiles import DTYPES

PRECISIONS = ("ieee", "tf32")
N_INDEX = 5  # key_mask, starts_q, lens_q, starts_k, lens_k


@constant_result
def tangent_fault() -> str | None:
    """Why a call cannot be differentiated here, or None: a registered op would give a silent zero tangent."""
    if torch.compiler.is_compiling() and forward_mode():
        return "inside a compiled function it has no forward-mode derivative; take jvp in eager code or use reference"
    return None


def strided_fault(dtype: torch.dtype, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> str | None:
    """Why the kernels cannot read q, k, v of these shapes `[B, L, H, D]` and strides, or None."""
    size, head_size = dtype.itemsize, shapes[0][3]
    if dtype not in DTYPES:
        return f"it needs float16, bfloat16 or float32, got {dtype}"
    if not HEAD_SIZES[0] <= head_size <= HEAD_SIZES[1]:
        return f"head size {head_size} is outside of {HEAD_SIZES[0]} to {HEAD_SIZES[1]}"
    for name, shape, stride in zip("qkv", shapes, strides, strict=True):
        if stride[3] != 1:
            return f"the last dimension of {name} is not contiguous (stride {stride[3]}); use .contiguous()"
        for i in range(3):
            if shape[i] > 1 and stride[i] * size % 16:
                return (
                    f"{name}: stride {stride[i]} of dimension {i} is {stride[i] * size} bytes, not a multiple of "
                    f"16; use a head size that is a multiple of {16 // size} or .contiguous()"
                )
    return None


_known_fault = remembered(strided_fault)


def layout_fault(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot read these `[B, L, H, D]` tensors, or None."""
    return _known_fault(q.dtype, (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()))


def _checked(q: Tensor, k: Tensor, v: Tensor) -> None:
    if (fault := triton_fault(q.device.type) or layout_fault(q, k, v)) is not None:
        raise UserError(f"attention: backend 'triton' cannot serve this call: {fault}")


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, starts_q: Tensor | None, lens_q: Tensor | None,
    starts_k: Tensor | None, lens_k: Tensor | None, max_q: int, max_k: int, causal: bool, scale: float, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _checked(q, k, v)
    from kernels.attention import launch

    if 0 in q.shape or 0 in k.shape:
        out, lse = forward_shapes(q, k, v)
        return out.zero_(), lse.fill_(-torch.inf)
    index = (key_mask, starts_q, lens_q, starts_k, lens_k)
    return launch.forward(q, k, v, index, max_q, max_k, causal, scale, precision)


def forward_shapes(q, *rest):
    """Empty output `[B, Lq, H, D]` and log-sum-exp `[B, H, Lq]` for q."""
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    key_mask: Tensor | None, starts_q: Tensor | None, lens_q: Tensor | None, starts_k: Tensor | None,
    lens_k: Tensor | None, max_q: int, max_k: int, causal: bool, scale: float, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _checked(q, k, v)
    from kernels.attention import launch

    if 0 in q.shape or 0 in k.shape:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    index = (key_mask, starts_q, lens_q, starts_k, lens_k)
    return launch.backward(q, k, v, out, lse, dout, dlse, index, max_q, max_k, causal, scale, precision)


def _tangent(
    q: Tensor, k: Tensor, v: Tensor, tq: Tensor, tk: Tensor | None, tv: Tensor | None, key_mask: Tensor | None,
    starts_q: Tensor | None, lens_q: Tensor | None, starts_k: Tensor | None, lens_k: Tensor | None, max_q: int,
    max_k: int, causal: bool, scale: float, precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _checked(q, k, v)
    from kernels.attention import launch

    if 0 in q.shape or 0 in k.shape:
        out, lse = forward_shapes(q)
        return out.zero_(), torch.zeros_like(out), lse.fill_(-torch.inf), torch.zeros_like(lse)
    index = (key_mask, starts_q, lens_q, starts_k, lens_k)
    return launch.tangent(q, k, v, tq, tk, tv, index, max_q, max_k, causal, scale, precision)


def _tangent_shapes(q, *rest):
    return *forward_shapes(q), *forward_shapes(q)


def _tangent_order(q, *rest):
    out, lse, tout, tlse = _tangent_shapes(q)
    return out, tout, lse, tlse


def _fold_rows(x: Tensor | None, dim: int | None, size: int, packed: bool) -> Tensor | None:
    """`[B, L, H, D]` with the mapped axis in the batch, or, packed (B = 1), in the rows."""
    if x is None or not packed:
        return fold_batch(x, dim, size)
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 2)[None]


def _fold_lse(x: Tensor | None, dim: int | None, size: int, packed: bool) -> Tensor | None:
    """The same for `[B, H, L]`."""
    if x is None or not packed:
        return fold_batch(x, dim, size)
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.movedim(0, 2).flatten(2, 3)


def _unfold(x: Tensor, size: int, packed: bool) -> Tensor:
    """The inverse for outputs, the mapped axis first."""
    if not packed:
        return unfold_batch(x, size)
    return x.unflatten(1, (size, -1)).movedim(1, 0) if x.ndim == 4 else x.unflatten(2, (size, -1)).movedim(2, 0)


def _fold_index(index, dims, size: int, rows_q: int, rows_k: int) -> list[Tensor | None]:
    """key_mask, starts and lens, one entry per sample and sequence; packed sequences move to their sample's rows."""
    folded = [fold_batch(x, d, size) for x, d in zip(index, dims, strict=True)]
    for i, rows in ((1, rows_q), (3, rows_k)):
        if (starts := folded[i]) is not None:
            each = torch.arange(size, device=starts.device, dtype=starts.dtype) * rows
            folded[i] = starts + each.repeat_interleave(starts.shape[0] // size)
    return folded


def _fold(f, n_rows: int, n_lse: int = 0):
    """The vmap rule of an op whose arguments are `n_rows` of `[B, L, H, D]`, `n_lse` of `[B, H, L]`, index, options.

    The first is q, the second k. The log-sum-exps come after the output (fifth argument of the backward pass).
    """

    def fold(size, dims, args):
        n = n_rows + n_lse
        index = args[n : n + N_INDEX]
        packed = index[1] is not None
        length = lambda i: args[i].shape[1 + (dims[i] is not None and dims[i] <= 1)]  # noqa: E731
        is_lse = lambda i: n_lse and i in (4, 6)  # noqa: E731
        tensors = [(_fold_lse if is_lse(i) else _fold_rows)(args[i], dims[i], size, packed) for i in range(n)]
        places = _fold_index(index, dims[n : n + N_INDEX], size, length(0), length(1))
        out = f()(*tensors, *places, *args[n + N_INDEX :])
        return tuple(_unfold(x, size, packed) for x in out), (0,) * len(out)

    return fold


def _gradients(kept, args, grads):
    dout, dlse = grads
    q, k, v, out, lse, *index = kept
    if dout is None and dlse is None:
        return (None,) * len(args)
    dout = torch.zeros_like(out) if dout is None else dout
    found = flash_backward(q, k, v, out, lse, dout, dlse, *index, *args[3 + N_INDEX :])
    return *found, *(None,) * (len(args) - 3)


def _tangents(kept, args, tangents):
    q, k, v, _, _, *index = kept
    tq, tk, tv = tangents[:3]
    tq = torch.zeros_like(q) if tq is None else tq
    _, tout, _, tlse = flash_tangent(q, k, v, tq, tk, tv, *index, *args[3 + N_INDEX :])
    return tout, tlse


flash_backward = differentiable(
    raw_op(
        "attention_backward",
        _backward,
        lambda q, k, v, *_: tuple(torch.empty_like(x) for x in (q, k, v)),
        lambda q, k, *_: 5 * product_flops(q, k),
    ),
    fold=_fold(lambda: flash_backward, 5, 2),
)
flash_tangent = differentiable(
    raw_op("attention_tangent", _tangent, _tangent_order), fold=_fold(lambda: flash_tangent, 6)
)
flash_forward = differentiable(
    raw_op("attention_forward", _forward, forward_shapes, lambda q, k, *_: 2 * product_flops(q, k)),
    fold=_fold(lambda: flash_forward, 3),
    keep=lambda args, outputs: (*args[:3], *outputs, *args[3 : 3 + N_INDEX]),
    backward=_gradients,
    tangent=_tangents,
)


def scaled(q: Tensor, scale: float | None) -> float:
    """The scale of scores, `D ** -0.5` for None. Raises UserError for one that our kernels do not take."""
    if (fault := tangent_fault()) is not None:
        raise UserError(f"attention: backend 'triton' cannot serve this call: {fault}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not scale > 0:
        raise UserError(f"attention: backend 'triton' needs a scale above 0, got {scale}")
    return scale


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, lens: Tensor | None = None,
    causal: bool = False, scale: float | None = None, return_lse: bool = False, precision: str = "ieee",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by the Triton kernels; arguments and result as `attention_reference`, which also takes a bias.

    The log-sum-exp has a gradient. Head sizes 16 to 256: one that is no power of two is computed as the next one,
    with zeros. bfloat16 and float16 are multiplied as they are and summed in float32.

    Args:
        precision: of float32 products: `"ieee"` or `"tf32"` (10 bits of mantissa, many times faster on a GPU). To
            compute in bfloat16, cast the inputs.
    """
    if precision not in PRECISIONS:
        raise UserError(f"attention: precision {precision!r} is none of {', '.join(PRECISIONS)}")
    lens = None if lens is None else lens.to(torch.int32)
    out, lse = flash_forward(
        q, k, v, key_mask, None, None, None, lens, q.shape[1], k.shape[1], causal, scaled(q, scale), precision
    )
    return (out, lse) if return_lse else out


def flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *, max_q: int, max_k: int, causal: bool = False,
    scale: float | None = None, return_lse: bool = False, precision: str = "ieee",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`flash_attention` of packed sequences; arguments as `attention_varlen`."""
    (starts_q, lens_q), (starts_k, lens_k) = (
        (cu[:-1].to(torch.int32), cu.diff().to(torch.int32)) for cu in (cu_q, cu_k)
    )
    out, lse = flash_forward(
        q[None], k[None], v[None], None, starts_q, lens_q, starts_k, lens_k, max_q, max_k, causal, scaled(q, scale),
        precision,
    )  # fmt: skip
    return (out[0], lse[0]) if return_lse else out[0]


def flash_with_tangent(
    q: Tensor, k: Tensor, v: Tensor, tq: Tensor, tk: Tensor | None = None, tv: Tensor | None = None, *,
    key_mask: Tensor | None = None, lens: Tensor | None = None, causal: bool = False, scale: float | None = None,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(output, its tangent)` `[B, Lq, H, D]` in one kernel, for tangents of q, k and v (None: constant).

    `torch.func.jvp` of `flash_attention` gives the same from two kernels. It has no further derivative.
    """
    lens = None if lens is None else lens.to(torch.int32)
    out, tangent, _, _ = flash_tangent(
        q, k, v, tq, tk, tv, key_mask, None, None, None, lens, q.shape[1], k.shape[1], causal, scaled(q, scale),
        precision,
    )  # fmt: skip
    return out, tangent
