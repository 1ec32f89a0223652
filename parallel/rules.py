"""From the logical axes of specs to shards: which dimension of a leaf lies on which axis of the mesh."""

import dataclasses
from collections.abc import Mapping

from core.errors import raise_faults
from core.specs import ParamSpec
from parallel.mesh import Sizes


@dataclasses.dataclass(frozen=True)
class Rules:
    """`axes`: logical axis of a spec -> mesh axis that cuts it. Weights are also cut over the FSDP axes, see
    `shard_dim`."""

    axes: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"heads": "tp", "mlp": "tp"})


def cut_dims(spec: ParamSpec, rules: Rules) -> dict[str, int]:
    """`{mesh axis: dimension of the leaf}` of the logical axes that the rules cut."""
    named = enumerate(spec.axes or ())
    return {rules.axes[name]: dim for dim, name in named if name in rules.axes}


def shard_dim(shape: tuple[int, ...], n: int) -> int:
    """The dimension that n FSDP shards cut: the first if it divides evenly, else the first that does, else the first.

    A first dimension smaller than n, or uneven, makes shards of unequal size, which are padded in communication.
    """
    even = [d for d, size in enumerate(shape) if size % n == 0 and size > 0]
    return even[0] if even else 0


def local_shape(spec: ParamSpec, sizes: Sizes, rules: Rules) -> tuple[int, ...]:
    """Shape of the part of a leaf that is left after the logical axes are cut, before FSDP.

    Raises UserError when a dimension is not divisible.
    """
    shape, faults = list(spec.shape), []
    for axis, dim in cut_dims(spec, rules).items():
        n = sizes.get(axis, 1)
        if shape[dim] % n:
            faults.append(f"dimension {dim} of {list(spec.shape)} ({spec.axes[dim]}) is not divisible by {axis} {n}")
        shape[dim] //= n
    raise_faults("sharding rules", faults)
    return tuple(shape)
