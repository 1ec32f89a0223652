"""The Triton norms as operations with derivatives: backward kernels, a vmap rule, a tangent in plain PyTorch.

Shapes as in `kernels.norm.launch`. Under vmap the mapped axis joins the batch; a weight that is mapped too becomes
one row per sample of the mapped axis, and so does the gradient of one that is not.
"""

import torch
from torch import Tensor

from kernels.norm import launch
from kernels.op import differentiable, fold_batch, raw_op, unfold_batch


def folded(operation, shared: tuple[int, ...] = ()):
    """The vmap rule of `operation()`: every tensor folds, but `shared` ones of one row that are not mapped stay."""

    def fold(size, dims, args):
        def one(i, x, dim):
            if not isinstance(x, Tensor) or (i in shared and dim is None and x.shape[0] == 1):
                return x
            return fold_batch(x, dim, size)

        out = operation()(*(one(i, x, d) for i, (x, d) in enumerate(zip(args, dims, strict=True))))
        if isinstance(out, Tensor):
            return unfold_batch(out, size), 0
        return tuple(unfold_batch(o, size) for o in out), (0,) * len(out)

    return fold


def per_sample(p: Tensor | None, samples: int) -> Tensor | None:
    """`[W, D] -> [B, 1, D]` (or `[1, 1, D]`), float32."""
    if p is None:
        return None
    return (p if p.shape[0] == 1 else p.repeat_interleave(samples // p.shape[0], 0))[:, None].float()


def _backward(
    x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, stats: Tensor | None, grad: Tensor | None, grad_new: Tensor | None,
    kind: str, gating: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return launch.norm_backward(x, y, gate, weight, bias, scale, shift, stats, grad, grad_new, kind, gating)


def _backward_shapes(x, y, gate, weight, bias, scale, shift, stats, grad, grad_new, kind, gating):
    dense = lambda wanted: x.new_empty(x.shape) if wanted else launch.absent(x)  # noqa: E731
    vectors = (gate, *((None,) * 4 if kind == "none" else (weight, bias, scale, shift)))
    like = (launch.absent(x) if p is None else p.new_empty(p.shape) for p in vectors)
    return dense(kind != "none"), dense(gate is not None), *like


_norm_backward = differentiable(
    raw_op("norm_backward", _backward, _backward_shapes, kernels=launch.norm_kernels),
    fold=folded(lambda: _norm_backward),
)


def _gradients(x, y, gate, weight, bias, scale, shift, stats, grad, grad_new, kind, gating):
    """`_norm_backward` with None for what is absent; kind "none" where nothing flows back into the norm."""
    kind = "none" if grad is None else kind
    if grad is None and grad_new is None:
        return (None,) * 7
    if kind == "none" and gate is None:
        return grad_new, grad_new, *(None,) * 5
    dx, dy, *vectors = _norm_backward(
        x, y, gate, weight, bias, scale, shift, stats, grad, grad_new, kind, gating
    )  # fmt: skip
    dx = grad_new if kind == "none" else dx
    present = (gate, *((None,) * 4 if kind == "none" else (weight, bias, scale, shift)))
    return dx, dx if gate is None else dy, *(
        None if p is None else v for p, v in zip(present, vectors, strict=True)
    )


def _sum_of(terms) -> Tensor | None:
    """The sum of the terms that are not None."""
    terms = [t for t in terms if t is not None]
    return sum(terms[1:], terms[0]) if terms else None


def _norm_tangent(h: Tensor, stats: Tensor, params, tangents, kind: str) -> Tensor:
    """Tangent of `(xhat w + c)(1 + s) + z` in h's dtype; a tangent that is None is zero.

    d xhat = rstd (dx - mean(dx) - xhat mean(dx xhat)), without mean(dx) for RMS.
    """
    samples, (weight, bias, scale, _) = h.shape[0], params
    dh, dweight, dbias, dscale, dshift = tangents
    weight, bias, dweight, dbias = (per_sample(p, samples) for p in (weight, bias, dweight, dbias))
    mean, rstd = stats.split(1, -1)
    n = (h.float() - mean) * rstd
    terms = []
    if dh is not None:
        dh = dh.float()
        dn = rstd * (dh - (dh.mean(-1, keepdim=True) if kind == "layer" else 0) - n * (dh * n).mean(-1, keepdim=True))
        terms.append(dn if weight is None else dn * weight)
    terms += [None if dweight is None else n * dweight, dbias]
    out = _sum_of(terms)
    if out is not None and scale is not None:
        out = out * (1 + scale.float())
    if dscale is not None:
        n = n if weight is None else n * weight
        out = _sum_of([out, (n if bias is None else n + bias) * dscale.float()])
    out = _sum_of([out, None if dshift is None else dshift.float()])
    return torch.zeros_like(h) if out is None else out.expand(h.shape).to(h.dtype)


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float,
    kind: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return launch.norm_forward(x, None, None, weight, bias, scale, shift, eps, kind, "plain")[1:]


def _norm_shapes(x, weight, bias, scale, shift, eps, kind):
    return x.new_empty(x.shape), x.new_empty(*x.shape[:2], 2, dtype=torch.float32)


def _norm_gradients(kept, args, grads):
    x, weight, bias, scale, shift, stats = kept
    dx, _, _, *vectors = _gradients(
        x, None, None, weight, bias, scale, shift, stats, grads[0], None, args[6], "plain"
    )  # fmt: skip
    return dx, *vectors, None, None


norm = differentiable(
    raw_op("norm", _norm, _norm_shapes, kernels=launch.norm_kernels),
    fold=folded(lambda: norm, shared=(1, 2)),
    keep=lambda args, outputs: (*args[:5], outputs[1]),
    backward=_norm_gradients,
    tangent=lambda kept, args, tangents: (
        _norm_tangent(kept[0], kept[5], kept[1:5], tangents[:5], args[6]),
        None,
    ),
    constant=(1,),
)
"""`(x, weight, bias, scale, shift, eps, kind) -> (out, stats)`."""


def _residual_norm(
    x: Tensor, y: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, eps: float, kind: str, gating: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return launch.norm_forward(x, y, gate, weight, bias, scale, shift, eps, kind, gating)


def _residual_norm_shapes(x, y, gate, weight, bias, scale, shift, eps, kind, gating):
    return x.new_empty(x.shape), *_norm_shapes(x, weight, bias, scale, shift, eps, kind)


def _residual_norm_gradients(kept, args, grads):
    new, y, gate, weight, bias, scale, shift, stats = kept
    found = _gradients(new, y, gate, weight, bias, scale, shift, stats, grads[1], grads[0], args[8], args[9])
    return *found, None, None, None


def _gated_tangent(y: Tensor | None, gate: Tensor | None, gating: str, tangents) -> Tensor | None:
    """Tangent of `x + y gate`, float32; y may be None without a gate."""
    dx, dy, dgate = (None if t is None else t.float() for t in tangents)
    if gate is None:
        return _sum_of([dx, dy])
    gate = gate.float()
    if gating == "tanh":
        gate = gate.tanh()
        dgate = None if dgate is None else dgate * (1 - gate.square())
    return _sum_of([dx, None if dy is None else dy * gate, None if dgate is None else y.float() * dgate])


def _residual_norm_tangent(kept, args, tangents):
    new, y, gate, *params, stats = kept
    dnew = _gated_tangent(y, gate, args[9], tangents[:3])
    out = _norm_tangent(new, stats, params, (dnew, *tangents[3:7]), args[8])
    return torch.zeros_like(new) if dnew is None else dnew.to(new.dtype), out, None


residual_norm = differentiable(
    raw_op("residual_norm", _residual_norm, _residual_norm_shapes, kernels=launch.norm_kernels),
    fold=folded(lambda: residual_norm, shared=(3, 4)),
    keep=lambda args, out: (out[0], None if args[2] is None else args[1], *args[2:7], out[2]),
    backward=_residual_norm_gradients,
    tangent=_residual_norm_tangent,
    constant=(2,),
)
"""`(x, y, gate, weight, bias, scale, shift, eps, kind, gating) -> (new, out, stats)`."""


def _gated_add(x: Tensor, y: Tensor, gate: Tensor, gating: str) -> Tensor:
    return launch.norm_forward(x, y, gate, None, None, None, None, 0.0, "none", gating)[0]


def _gated_add_gradients(kept, args, grads):
    y, gate = kept
    found = _gradients(y, y, gate, None, None, None, None, None, None, grads[0], "none", args[3])
    return *found[:3], None


gated_add = differentiable(
    raw_op("gated_add", _gated_add, lambda x, y, gate, gating: x.new_empty(x.shape), kernels=launch.norm_kernels),
    fold=folded(lambda: gated_add),
    keep=lambda args, outputs: (args[1], args[2]),
    backward=_gated_add_gradients,
    tangent=lambda kept, args, tangents: _gated_tangent(*kept, args[3], tangents[:3]).to(kept[0].dtype),
)
"""`(x, y, gate, gating) -> new`."""
