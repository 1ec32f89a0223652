"""QK norm with rotary embedding as an operation with derivatives; shapes as in `kernels.norm.rope_launch`."""

import torch
from torch import Tensor

from kernels.norm import rope_launch
from kernels.norm.launch import absent
from kernels.norm.ops import folded
from kernels.norm.reference import rotate
from kernels.op import differentiable, raw_op

TABLES = (4, 5)  # the arguments that hold cosines and sines


def _folded(operation, shared: tuple[int, ...]):
    """The vmap rule: as `folded`, and tables that are mapped get one row per sample first."""

    def fold(size, dims, args):
        args, dims = list(args), list(dims)
        samples = args[0].movedim(dims[0], 0).shape[1] if dims[0] is not None else args[0].shape[0]
        for i in TABLES:
            if dims[i] is not None:
                table = args[i].movedim(dims[i], 0)
                args[i], dims[i] = table.expand(size, samples, *table.shape[2:]), 0
        return folded(operation, shared)(size, dims, args)

    return fold


def _forward(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, eps: float, over: str, pairs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return rope_launch.rope_forward(q, k, q_weight, k_weight, cos, sin, eps, over, pairs)


def _forward_shapes(q, k, q_weight, k_weight, cos, sin, eps, over, pairs):
    rstd = lambda x: x.new_empty(rope_launch.rstd_shape(x, over), dtype=torch.float32)  # noqa: E731
    if k is None:
        return q.new_empty(q.shape), absent(q), rstd(q), absent(q)
    return q.new_empty(q.shape), k.new_empty(k.shape), rstd(q), rstd(k)


def _backward(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, q_rstd: Tensor, k_rstd: Tensor | None, q_grad: Tensor, k_grad: Tensor | None, over: str,
    pairs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return rope_launch.rope_backward(
        q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd, q_grad, k_grad, over, pairs
    )  # fmt: skip


def _backward_shapes(q, k, q_weight, k_weight, *rest):
    return tuple(absent(q) if x is None else x.new_empty(x.shape) for x in (q, k, q_weight, k_weight))


_norm_rope_backward = differentiable(
    raw_op("norm_rope_backward", _backward, _backward_shapes, kernels=rope_launch.rope_kernels),
    fold=_folded(lambda: _norm_rope_backward, TABLES),
)


def _gradients(kept, args, grads):
    q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd = kept
    q_grad, k_grad = grads[:2]
    if q_grad is None and (k is None or k_grad is None):
        return (None,) * 9
    q_grad = torch.zeros_like(q) if q_grad is None else q_grad
    if k is None:
        k_grad = k_rstd = None
    elif k_grad is None:
        k_grad = torch.zeros_like(k)
    found = _norm_rope_backward(
        q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd, q_grad, k_grad, args[7], args[8]
    )  # fmt: skip
    present = (q, k, q_weight, k_weight)
    return *(None if p is None else g for p, g in zip(present, found, strict=True)), *(None,) * 5


def _tangent_of(x: Tensor, rstd: Tensor, weight: Tensor | None, dx, dweight, rope, over: str, pairs: str) -> Tensor:
    """`rotate(d(xhat) w + xhat dw)`, with d xhat = rstd (dx - xhat mean(dx xhat)), in float32, then x's dtype."""

    def rows(p: Tensor) -> Tensor:
        p = p.float() if p.shape[0] == 1 else p.float().repeat_interleave(x.shape[0] // p.shape[0], 0)
        return (p.unflatten(-1, x.shape[2:]) if over == "inner" else p[:, None])[:, None]

    n, terms = x.float() * rstd[..., None], []
    if dx is not None:
        dx = dx.float()
        along = (-2, -1) if over == "inner" else -1
        dn = rstd[..., None] * (dx - n * (dx * n).mean(along, keepdim=True))
        terms.append(dn if weight is None else dn * rows(weight))
    if dweight is not None:
        terms.append(n * rows(dweight))
    if not terms:
        return torch.zeros_like(x)
    out = sum(terms[1:], terms[0])
    return (out if rope[0] is None else rotate(out, rope, pairs)).to(x.dtype)


def _tangent(kept, args, tangents):
    q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd = kept
    if tangents[4] is not None or tangents[5] is not None:
        raise NotImplementedError("norm_rope has no derivative of cosines and sines")
    rest = ((cos, sin), args[7], args[8])
    dq = _tangent_of(q, q_rstd, q_weight, tangents[0], tangents[2], *rest)
    dk = None if k is None else _tangent_of(k, k_rstd, k_weight, tangents[1], tangents[3], *rest)
    return dq, absent(q) if dk is None else dk, None, None


norm_rope = differentiable(
    raw_op("norm_rope", _forward, _forward_shapes, kernels=rope_launch.rope_kernels),
    fold=_folded(lambda: norm_rope, (2, 3, *TABLES)),
    keep=lambda args, outputs: (*args[:6], *outputs[2:]),
    backward=_gradients,
    tangent=_tangent,
    constant=(2, 3),
)
"""`(q, k, q_weight, k_weight, cos, sin, eps, over, pairs) -> (q_out, k_out, q_rstd, k_rstd)`."""
