"""How a kernel becomes an operation that autograd, `torch.func`, `torch.compile` and checkpointing can use.

`raw_op` registers a kernel in the library `latentree`, with a shape rule, so that the compiler sees one opaque node, or
for short kernels their launches.
`differentiable` gives it derivatives, twice, because no one way serves every caller:

* eager code and `torch.func` go through an `autograd.Function` with a vmap rule and, where there is one, a tangent
  (a registered op raises under `torch.func.grad` and gives a silent zero tangent under `jvp`);
* code that is being compiled calls the op, whose gradient and vmap rule are registered. There `torch.func.grad`
  inside the compiled function is an error; a Function in its place would give a silent zero gradient.

Only `differentiable` results are ever exported. Where no function transform is at work, which is nearly always, the
Function is one without those rules: what PyTorch does for them takes longer than some kernels run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from core import compat
from core.compat import forward_mode

LIBRARY = torch.library.Library("latentree", "DEF")

Rule = Callable[..., Any]


def raw_op(
    name: str, run: Rule, shapes: Rule, flops: Rule | None = None, kernels: Callable[[], Sequence] | None = None
) -> torch._ops.OpOverload:
    """Registers `latentree::name`; its schema is read from the annotations of `run`.

    Args:
        run: launches the kernel on whatever device its tensors are on; returns new tensors, never its arguments.
        shapes: the same signature; returns empty tensors with the shapes, strides, dtypes and devices of the result.
        flops: the same signature with shapes in place of tensors; FLOPs of a call, by which the compiler judges what
            to recompute under a memory budget. None: next to nothing.
        kernels: the Triton kernels that `run` and its gradient launch by `core.compat.launched`; the compiler then sees
            these launches on a GPU, not the op. None: the op is one opaque node.
    """
    LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"latentree::{name}", shapes, lib=LIBRARY)
    op = getattr(torch.ops.latentree, name)
    if flops is not None:
        register_flop_formula(op)(lambda *args, out_shape=None, **rest: flops(*args))
    if kernels is not None:
        compat.inline_kernels(LIBRARY, name, run, kernels)
    return op.default


def differentiable(
    op: torch._ops.OpOverload, *, fold: Rule, keep: Rule | None = None, backward: Rule | None = None,
    tangent: Rule | None = None, constant: Sequence[int] = (),
) -> Callable[..., Any]:  # fmt: skip
    """A function `(*args) -> Tensor or tuple of Tensors` with derivatives from a raw op with the same arguments.

    Args:
        fold: `(size, dims, args) -> (outputs, out_dims)`, the vmap rule: `size` samples along `dims[i]` of args[i]
            (None: not mapped). Moves the mapped axis into the batch (see `fold_batch`), never loops.
        keep: `(args, outputs) -> Tensors` that the derivatives need.
        backward: `(kept, args, grads) -> gradient of every arg` (None for what has none). `args` has None in the
            place of tensors, `grads` where nothing flows back. It calls `differentiable` functions, so that it can
            be mapped too. None: there is no gradient, and asking for one raises NotImplementedError.
        tangent: `(kept, args, tangents) -> tangent of every output`; None: forward-mode derivatives raise
            NotImplementedError.
        constant: numbers of the outputs that have no gradient (a log-sum-exp kept for the backward pass).
    """
    name = op._schema.name.removeprefix("latentree::")
    missing = f"{name} has no derivative of this kind (forward mode, or a second one)"

    def save(ctx, inputs, output) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.args = tuple([None if isinstance(x, Tensor) else x for x in inputs])
        ctx.save_for_backward(*(() if keep is None else keep(inputs, outputs)))

    def save_eager(ctx, inputs, output) -> None:
        save(ctx, inputs, output)
        ctx.mark_non_differentiable(*[output[i] for i in constant])
        ctx.set_materialize_grads(False)

    def launch(*args):
        with compat.below_autograd():  # the gradient is the Function's
            return op(*args)

    def gradients(ctx, *grads):
        if backward is None:
            raise NotImplementedError(missing)
        return backward(ctx.saved_tensors, ctx.args, grads)

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            output = launch(*args)
            save_eager(ctx, args, output)
            return output

        backward = staticmethod(gradients)

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return op(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            save_eager(ctx, inputs, output)
            if tangent is not None:
                ctx.save_for_forward(*keep(inputs, output if isinstance(output, tuple) else (output,)))

        backward = staticmethod(gradients)

        @staticmethod
        def vmap(info, dims, *args):
            return fold(info.batch_size, dims, args)

        @staticmethod
        def jvp(ctx, *tangents):
            if tangent is None:
                raise NotImplementedError(missing)
            return tangent(ctx.saved_tensors, ctx.args, tangents)

    Plain.__name__ = Transformed.__name__ = name
    torch.library.register_autograd(op, gradients, setup_context=save, lib=LIBRARY)
    torch.library.register_vmap(op, lambda info, dims, *args: fold(info.batch_size, dims, args), lib=LIBRARY)

    def call(*args):
        if not torch.compiler.is_compiling():
            if compat.transforms_active() or forward_mode():
                return Transformed.apply(*args)
            return Plain.apply(*args) if wants_gradient(args) else launch(*args)
        if forward_mode():  # a registered op would give a silent zero tangent
            raise NotImplementedError(f"{name} has no forward-mode derivative inside a compiled function")
        return op(*args)

    return call


def wants_gradient(args: Sequence[Any]) -> bool:
    """Whether autograd records what is done with these arguments."""
    return torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in args])


def fold_batch(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """`x` with the mapped axis `dim` folded into its first one: `[size * B, ...]`.

    What is not mapped is repeated (a copy where B > 1). None stays None.
    """
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def unfold_batch(x: Tensor, size: int) -> Tensor:
    """`[size * B, ...] -> [size, B, ...]`, the inverse of `fold_batch` for outputs (their `out_dims` are 0)."""
    return x.unflatten(0, (size, x.shape[0] // size))


def product_flops(q: Sequence[int], k: Sequence[int]) -> int:
    """FLOPs of one product of attention; shapes `[B, L, H, D]`. Packed sequences count as one long one."""
    return 2 * q[0] * q[2] * q[1] * k[1] * q[3]
