"""From the logical axes of specs to shards: which dimension of a leaf lies on which axis of the mesh.

A leaf is cut twice: first along its logical axes (`Rules`: heads and MLP width over `tp`), then what is left over
the FSDP shards (`shard_dim`). Every function of sizes needs no process group, so a plan is made of them too.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from core import compat, specs
from core.checkpoint import LazyLeaf
from core.errors import nearest_names, raise_faults
from core.rules import PACKED
from core.specs import ParamSpec, Specs
from core.trees import Params
from parallel.mesh import Mesh, Sizes, folded

DATA_AXES = ("dp_replicate", "dp_shard", "sp")


@dataclasses.dataclass(frozen=True)
class Rules:
    """`axes`: logical axis of a spec -> mesh axis that cuts it. Weights are also cut over the FSDP axes, see
    `shard_dim`."""

    axes: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"heads": "tp", "mlp": "tp"})


def mesh_dims(sizes: Sizes) -> dict[str, int]:
    """`{dimension of the DeviceMesh: size}`, outermost first, of the axes that are larger than 1."""
    return {name: math.prod(sizes[axis] for axis in axes) for name, axes in folded(sizes).items()}


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


# --- what does not fit --------------------------------------------------------------------------------------------


def leaf_faults(spec: ParamSpec, sizes: Sizes, rules: Rules) -> list[str]:
    """What keeps a leaf from being cut along its logical axes; empty when it can be."""
    named = [(dim, name, rules.axes[name]) for dim, name in enumerate(spec.axes or ()) if name in rules.axes]
    faults = []
    for dim, name, axis in named:
        n, twice = sizes.get(axis, 1), [other for _, other, a in named if a == axis]
        if spec.shape[dim] % n:
            faults.append(f"dimension {dim} of {list(spec.shape)} ({name}) is not divisible by {axis} {n}")
        if len(twice) > 1 and n > 1 and name == twice[0]:
            faults.append(f"{axis} cuts more than one dimension: {', '.join(twice)}")
    joined = [rules.axes.get(name.removeprefix(PACKED)) for name in spec.axes or () if (name or "").startswith(PACKED)]
    faults += [f"{axis} {sizes[axis]} would cut across packed parts: pack after the cut, bound to local_specs"
               for axis in joined if sizes.get(axis, 1) > 1]  # fmt: skip
    return faults


def _rule_faults(sizes: Sizes, rules: Rules) -> list[str]:
    """Mesh axes of the rules that the mesh has not, or that cut weights already."""
    faults = []
    for name, axis in rules.axes.items():
        if axis in DATA_AXES:
            faults.append(f"{name} -> {axis}: this axis splits data, a rule names tp or a further axis")
        elif axis not in sizes:
            known = [a for a in sizes if a not in DATA_AXES]
            faults.append(f"{name} -> {axis}: the mesh has {', '.join(known)}{nearest_names(axis, known)}")
    return faults


def starred(key: str) -> str:
    """A key with its layer number as a star, for messages and tables: `blocks.3.norm.bias -> blocks.*.norm.bias`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", key, count=1)


def check(model: Specs, sizes: Sizes, rules: Rules) -> None:
    """Refuses rules and leaves that do not fit a mesh, in one UserError with all of them; equal layers are one line."""
    found: dict[str, list[str]] = {}
    for key, spec in model.items():
        for fault in leaf_faults(spec, sizes, rules):
            found.setdefault(f"{starred(key)}: {fault}", []).append(key)
    lines = [line + (f" ({len(keys)} leaves)" if len(keys) > 1 else "") for line, keys in found.items()]
    raise_faults("sharding rules", [*_rule_faults(sizes, rules), *lines])


# --- where the parts lie ------------------------------------------------------------------------------------------


def local_shape(spec: ParamSpec, sizes: Sizes, rules: Rules) -> tuple[int, ...]:
    """Shape of the part of a leaf that is left after the logical axes are cut, before FSDP.

    Raises UserError when a dimension is not divisible.
    """
    raise_faults("sharding rules", leaf_faults(spec, sizes, rules))
    shape = list(spec.shape)
    for axis, dim in cut_dims(spec, rules).items():
        shape[dim] //= sizes.get(axis, 1)
    return tuple(shape)


def local_specs(model: Specs, sizes: Sizes, rules: Rules) -> Specs:
    """Specs of the tree that a block sees on one rank: leaves cut along their logical axes, whole otherwise.

    Transforms that join leaves by rows (`core.rules.pack`) bind to these: joined before they are cut, the rows of
    one rank would be those of one part. Raises UserError as `check`.
    """
    check(model, sizes, rules)
    return {k: dataclasses.replace(s, shape=local_shape(s, sizes, rules)) for k, s in model.items()}


def part(spec: ParamSpec, sizes: Sizes, rules: Rules, at: Mapping[str, int]) -> tuple[slice, ...]:
    """The part of a leaf at one place of the mesh; `at`: index along every dimension of `mesh_dims`.

    Shards are those of `torch.chunk`: equal ones of `ceil(size / n)` first, then a smaller one, then empty ones.
    """
    shape = list(local_shape(spec, sizes, rules))
    starts = [0] * len(shape)
    for axis, dim in cut_dims(spec, rules).items():
        starts[dim] = at.get(axis, 0) * shape[dim]
    n = mesh_dims(sizes).get("shard", 1)
    if n > 1 and shape:
        dim = shard_dim(tuple(shape), n)
        size, step = shape[dim], -(-shape[dim] // n)
        first = min(at["shard"] * step, size)
        starts[dim] += first
        shape[dim] = min(first + step, size) - first
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))


def layout(spec: ParamSpec, sizes: Sizes, rules: Rules) -> dict[str, Placement]:
    """`{dimension of the DeviceMesh: placement}` of a leaf, as FSDP2 makes it of a leaf that is cut over `tp`.

    FSDP cuts what tensor parallelism left, so where both cut one dimension the outer placement is strided: shards
    of a part lie side by side. A scalar is whole everywhere.
    """
    shape, cuts = local_shape(spec, sizes, rules), cut_dims(spec, rules)
    dims = mesh_dims(sizes)
    out: dict[str, Placement] = {name: Shard(cuts[name]) if name in cuts else Replicate() for name in dims}
    if "shard" in dims and shape:
        dim = shard_dim(shape, dims["shard"])
        inner = math.prod(dims.get(axis, 1) for axis, d in cuts.items() if d == dim)
        out["shard"] = Shard(dim) if inner == 1 else compat.strided_shard(dim, inner)
    return out


def placements(spec: ParamSpec, mesh: Mesh, rules: Rules = Rules()) -> tuple[Placement, ...]:
    """One placement per dimension of `mesh.device_mesh`; empty for a process alone. See `layout`."""
    return tuple(layout(spec, mesh.sizes, rules).values())


def place_of(mesh: Mesh) -> dict[str, int]:
    """This process's index along every dimension of `mesh_dims`."""
    return {name: mesh.index(*axes) for name, axes in folded(mesh.sizes).items()}


def place(params: Mapping[str, Tensor | LazyLeaf], model: Specs, mesh: Mesh, rules: Rules = Rules()) -> Params:
    """A tree on the mesh: `{key: DTensor}`, or plain tensors for a process alone. Nothing is communicated.

    Args:
        params: every leaf whole on every rank, or lazy; of a lazy leaf each rank reads its own part.
        model: specs with global shapes and logical axes. Leaves keep the dtypes they have.

    Raises:
        UserError: keys or shapes do not fit the specs; rules or dimensions do not fit the mesh.
    """
    specs.check(params, model)
    check(model, mesh.sizes, rules)
    return {key: _place_leaf(leaf, model[key], mesh, rules) for key, leaf in params.items()}


def _place_leaf(leaf: Tensor | LazyLeaf, spec: ParamSpec, mesh: Mesh, rules: Rules) -> Tensor:
    local = read_part(leaf, part(spec, mesh.sizes, rules, place_of(mesh))).to(mesh.device)
    if mesh.device_mesh is None:
        return local
    return as_dtensor(local, spec, mesh, rules)


def as_dtensor(local: Tensor, spec: ParamSpec, mesh: Mesh, rules: Rules = Rules()) -> DTensor:
    """This rank's part of a leaf as a DTensor of the leaf's global shape."""
    stride = torch.empty(spec.shape, device="meta").stride()
    where = placements(spec, mesh, rules)
    return DTensor.from_local(local, mesh.device_mesh, where, run_check=False, shape=spec.shape, stride=stride)


def read_part(leaf: Tensor | LazyLeaf, where: tuple[slice, ...]) -> Tensor:
    """A part of a leaf as a contiguous tensor of its own, so that the whole leaf can be freed."""
    if isinstance(leaf, LazyLeaf):
        return leaf.read(where)
    return leaf.detach()[where].clone(memory_format=torch.contiguous_format)
