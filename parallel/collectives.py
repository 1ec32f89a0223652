"""Differentiable collectives over one group, traceable by torch.compile. Backwards are made of them too, so that second
derivatives are right.

`Group` is data (a name, a size, a rank), so that frozen wrappers can hold and compare it. A group of one process is
None everywhere, and no collective runs.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from core import compat


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group by name, with its size and this process's place in it."""

    name: str
    size: int
    rank: int


def as_group(group: ProcessGroup | None) -> Group | None:
    """The data of a process group."""
    if group is None:
        return None
    return Group(group.group_name, dist.get_world_size(group), dist.get_rank(group))


class _Sum(torch.autograd.Function):
    """Sum over the group; the gradient, equal on all processes, passes through."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return compat.all_reduce(x, group.name)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Copy.apply(grad, ctx.group), None


class _Copy(torch.autograd.Function):
    """The same value on all processes; gradients add up."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Sum.apply(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts along dimension 0; the gradient takes the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return compat.all_to_all(x, group.size, group.name)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Exchange.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """`[n, ...] -> [size * n, ...]`; the gradient of a part is the sum over all processes' uses of it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return compat.all_gather(x, group.size, group.name)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Scatter.apply(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    """`[size * n, ...] -> [n, ...]`, this process's part of the sum. It and `_Gather` are each other's backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return compat.reduce_scatter(x, group.size, group.name)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Gather.apply(grad, ctx.group), None


def all_sum(x: Tensor, group: Group | None) -> Tensor:
    """Sum of x over the group, on all of it. Backward: identity (each process holds the whole gradient)."""
    return x if group is None else _Sum.apply(x, group)


def copy(x: Tensor, group: Group | None) -> Tensor:
    """x, which is equal on the group; backward: the sum of the gradients."""
    return x if group is None else _Copy.apply(x, group)


def exchange(x: Tensor, group: Group | None) -> Tensor:
    """Part j of x along dimension 0 goes to process j; part i of the result comes from process i.

    Dimension 0 must be divisible by the group's size. The backward exchanges the gradient back.
    """
    return x if group is None else _Exchange.apply(x, group)


def gather(x: Tensor, group: Group | None) -> Tensor:
    """Every process's x one after another along dimension 0: `[n, ...] -> [size * n, ...]`.

    Backward: each process gets the sum over the group of the gradients of its part.
    """
    return x if group is None else _Gather.apply(x, group)
