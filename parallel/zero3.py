"""ZeRO-3 by DTensor: layers that gather the shards of their weights inside the call, for anything autograd can do.

No hooks, no buffers, no streams: `torch.autograd.grad`, second derivatives and adapters that are placed otherwise than
the base work, and it is what the FSDP2 units are tested against. It has no performance target. Leaves are DTensors as
`parallel.rules.place` makes them; gradients come back with the placements of their leaves, averaged over the axes that
split data. Under `recompute` a layer's weights are gathered again in the backward pass; without it autograd keeps
them. Derivatives above the first are those of the data axes: collectives inside a block (`tp`, `sp`) need their own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from core import trees
from core.errors import raise_faults
from core.trees import Layered
from parallel.modules import DATA


def _over_data(leaf: DTensor, placement: Placement) -> list[Placement]:
    """Placements of a leaf with those of the data axes replaced."""
    names = leaf.device_mesh.mesh_dim_names
    return [placement if name in DATA else p for name, p in zip(names, leaf.placements, strict=True)]


class _Whole(torch.autograd.Function):
    """Shards -> the whole leaf. With `_Average` a pair of linear maps, so that derivatives of any order exist."""

    @staticmethod
    def forward(ctx, leaf: DTensor) -> Tensor:
        ctx.like = leaf.detach()
        return leaf.redistribute(placements=_over_data(leaf, Replicate())).to_local()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Average.apply(grad, ctx.like)


class _Average(torch.autograd.Function):
    """Gradients of the whole leaf, one per data rank -> shards of their average."""

    @staticmethod
    def forward(ctx, grad: Tensor, like: DTensor) -> DTensor:
        own = DTensor.from_local(
            grad.contiguous(), like.device_mesh, _over_data(like, Partial("avg")), run_check=False, shape=like.shape,
            stride=like.stride(),
        )  # fmt: skip
        return own.redistribute(placements=like.placements)

    @staticmethod
    def backward(ctx, grad: DTensor):
        return _Whole.apply(grad), None


def gather(leaf: Tensor) -> Tensor:
    """The leaf whole over the data axes, as a plain tensor; other axes (`tp`) keep this process's part.

    Its gradient is averaged over the data axes and cut as the leaf is. Plain tensors pass.
    """
    return _Whole.apply(leaf) if isinstance(leaf, DTensor) else leaf


@dataclasses.dataclass(frozen=True)
class Gathering:
    """A callable layer: `layer(fn, *args)` is `fn(tree, *args)` with the layer's leaves gathered."""

    tree: Mapping[str, Tensor]

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn({name: gather(leaf) for name, leaf in self.tree.items()}, *args)


def gathered(params: Mapping[str, Tensor], stacks: Sequence[str]) -> Layered:
    """A flat tree of DTensors as what a model's `forward` takes: root leaves gathered now, layers when called.

    Call it once per forward pass.

    Raises:
        UserError: a trainable leaf is no DTensor though others are, so its gradient would be this process's alone; a
            stack has no layers.
    """
    if any(isinstance(leaf, DTensor) for leaf in params.values()):
        lone = [k for k, leaf in params.items() if leaf.requires_grad and not isinstance(leaf, DTensor)]
        raise_faults("trainable leaves beside sharded ones must be DTensors too (Replicate for whole copies)", lone)
    flat = trees.layered(params, stacks)
    root = {key: gather(leaf) for key, leaf in flat.root.items()}
    return Layered(root, {name: [Gathering(layer) for layer in flat.stacks[name]] for name in stacks})
