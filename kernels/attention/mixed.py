"""Attention whose forward pass is ours and whose backward pass is cuDNN's: on a Hopper GPU each is the faster one.

cuDNN's backward takes the output and the natural log-sum-exp of any forward pass, which ours has.
"""

import torch
from torch import Tensor

from core.compat import cudnn_attention_backward
from kernels.attention.flash import forward_shapes, scaled
from kernels.op import differentiable, fold_batch, product_flops, raw_op, unfold_batch


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from kernels.attention import launch

    return launch.forward(q, k, v, (None,) * 5, q.shape[1], k.shape[1], False, scale, "ieee")


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found = cudnn_attention_backward(grad, q, k, v, out, lse, scale)
    # In the layouts that the compiler was told, should cuDNN choose others.
    return tuple(
        g if g.stride() == like.stride() else like.copy_(g)
        for g, like in zip(found, _backward_shapes(q, k, v), strict=True)
    )


def _backward_shapes(q, k, v, *rest):
    return tuple(torch.empty_like(x) for x in (q, k, v))


def _fold(operation):
    """The vmap rule of an op of tensors with a batch, and a scale."""

    def fold(size, dims, args):
        tensors = [fold_batch(x, dim, size) for x, dim in zip(args[:-1], dims[:-1], strict=True)]
        out = [unfold_batch(x, size) for x in operation()(*tensors, args[-1])]
        return tuple(out), (0,) * len(out)

    return fold


def _gradients(kept, args, grads):
    if grads[0] is None:
        return (None,) * 4
    return *mixed_backward(*kept, grads[0], args[3]), None


mixed_backward = differentiable(
    raw_op("mixed_backward", _backward, _backward_shapes, lambda q, k, *_: 5 * product_flops(q, k)),
    fold=_fold(lambda: mixed_backward),
)
mixed_forward = differentiable(
    raw_op("mixed_forward", _forward, forward_shapes, lambda q, k, *_: 2 * product_flops(q, k)),
    fold=_fold(lambda: mixed_forward),
    keep=lambda args, outputs: (*args[:3], *outputs),
    backward=_gradients,
    constant=(1,),
)


def mixed_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention of 16-bit `q [B, Lq, H, D]` over `k, v [B, Lk, H, D]` on a GPU, without masks."""
    return mixed_forward(q, k, v, scaled(q, scale))[0]
