"""Differentiable collectives over one group, traceable by torch.compile. Backwards are made of them too, so that second
derivatives are right.

`Group` is data (a name, a size, a rank), so that frozen wrappers can hold and compare it. A group of one process is
None everywhere, and no collective runs.
"""

import dataclasses
from collections.abc import Callable

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


Operator = Callable[[Tensor, Group], Tensor]


class _Linear(torch.autograd.Function):
    """A linear operator over the group, whose backward is its adjoint: such a pair is each other's backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, operator: Operator, adjoint: Operator) -> Tensor:
        ctx.rest = group, adjoint, operator
        return operator(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Linear.apply(grad, *ctx.rest), None, None, None


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group) -> Tensor:
    return compat.all_reduce(x, group.name)


def _swap(x: Tensor, group: Group) -> Tensor:
    return compat.all_to_all(x, group.size, group.name)


def _join(x: Tensor, group: Group) -> Tensor:
    return compat.all_gather(x, group.size, group.name)


def _part(x: Tensor, group: Group) -> Tensor:
    return compat.reduce_scatter(x, group.size, group.name)


def all_sum(x: Tensor, group: Group | None) -> Tensor:
    """Sum of x over the group, on all of it. Backward: identity (each process holds the whole gradient)."""
    return x if group is None else _Linear.apply(x, group, _sum, _same)


def copy(x: Tensor, group: Group | None) -> Tensor:
    """x, which is equal on the group; backward: the sum of the gradients."""
    return x if group is None else _Linear.apply(x, group, _same, _sum)


def exchange(x: Tensor, group: Group | None) -> Tensor:
    """Part j of x along dimension 0 goes to process j; part i of the result comes from process i.

    Dimension 0 must be divisible by the group's size. The backward exchanges the gradient back.
    """
    return x if group is None else _Linear.apply(x, group, _swap, _swap)


def gather(x: Tensor, group: Group | None) -> Tensor:
    """Every process's x one after another along dimension 0: `[n, ...] -> [size * n, ...]`.

    Backward: each process gets the sum over the group of the gradients of its part.
    """
    return x if group is None else _Linear.apply(x, group, _join, _part)
