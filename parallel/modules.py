"""The thin modules that FSDP2 wraps: parts of units, units, and the root. None of them computes anything."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from core.errors import UserError
from core.specs import ParamSpec, Specs
from core.trees import Layered
from parallel.mesh import Mesh
from parallel.rules import Rules, cut_dims, local_shape

DATA = ("dp_replicate", "shard")  # dimensions of the DeviceMesh that FSDP works on; on the others leaves are cut before


class Part(nn.Module):
    """Leaves of one unit that travel together. `names` are their keys within the unit.

    `whole`: leaves that every process holds, since FSDP has no dimension to cut.
    """

    def __init__(self, leaves: Mapping[str, nn.Parameter], storage: torch.dtype, compute: torch.dtype, whole: bool):
        super().__init__()
        self.names, self.storage, self.compute, self.whole = list(leaves), storage, compute, whole
        for i, leaf in enumerate(leaves.values()):
            self.register_parameter(str(i), leaf)

    @property
    def trainable(self) -> bool:
        """Whether any leaf has a gradient."""
        return any(p.requires_grad for p in self._parameters.values())

    def tree(self) -> dict[str, Tensor]:
        """The leaves as plain tensors in the compute dtype: gathered inside a call, local parts under `tp`."""
        plain = (p.to_local() if isinstance(p, DTensor) else p for p in self._parameters.values())
        return {name: p.to(self.compute) for name, p in zip(self.names, plain, strict=True)}

    def forward(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(self.tree(), *args, **kwargs)


class Unit(nn.Module):
    """The root's own leaves, or one layer: a callable layer of `core.scan`. `prefix` is what its keys begin with."""

    def __init__(self, prefix: str, parts: Sequence[Part]):
        super().__init__()
        self.prefix, self.ran = prefix, False
        self.parts = nn.ModuleList(parts)

    def forward(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.ran = True

        def enter(parts, tree, *args, **kwargs):
            if not parts:
                return fn(tree, *args, **kwargs)
            inner = lambda own, *a, **kw: enter(parts[1:], {**tree, **own}, *a, **kw)  # noqa: E731
            return parts[0](inner, *args, **kwargs)

        return enter(list(self.parts), {}, *args, **kwargs)


class Root(nn.Module):
    """The FSDP root. It has no leaves itself: those outside the stacks are the unit `own`.

    `order` is how units communicate: the root's own, then the layers, `g` at a time; the last group of a stack may be
    shorter.
    """

    def __init__(self, own: Unit, stacks: Mapping[str, Sequence[Unit]], g: int):
        super().__init__()
        self.own = own
        self.stacks = nn.ModuleDict({name: nn.ModuleList(units) for name, units in stacks.items()})
        self.order = [[own], *(units[i : i + g] for units in stacks.values() for i in range(0, len(units), g))]

    def units(self) -> list[Unit]:
        """All units, in the order of the forward pass."""
        return [unit for units in self.order for unit in units]

    def parts(self) -> list[Part]:
        """All parts of all units."""
        return [part for unit in self.units() for part in unit.parts]

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True) -> Iterator[tuple[str, nn.Parameter]]:
        """The leaves under their flat keys, which know nothing of parts."""
        for unit in self.units() if recurse else ():
            for part in unit.parts:
                for name, p in zip(part.names, part._parameters.values(), strict=True):
                    yield prefix + unit.prefix + name, p

    def forward(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for unit in self.units():
            unit.ran = False
        stacks = {name: list(units) for name, units in self.stacks.items()}
        out = self.own(lambda tree, *a, **kw: fn(Layered(tree, stacks), *a, **kw), *args, **kwargs)
        if not torch.is_grad_enabled():
            # Before torch 2.13 a group of which some layers did not run stayed gathered, with weights of long ago.
            for unit in (u for units in self.order if any(u.ran for u in units) for u in units if not u.ran):
                unit(lambda tree: None)
        return out


def groups_of(units: Sequence[Unit]) -> list[list[Part]]:
    """Parts of consecutive units that communicate together: those of equal dtypes, in the order they are entered."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[Part]] = {}
    for unit in units:
        for part in (p for p in unit.parts if not p.whole):
            groups.setdefault((part.storage, part.compute), []).append(part)
    return list(groups.values())


# --- from specs, without memory --------------------------------------------------------------------------------------


def meta_leaf(spec: ParamSpec, mesh: Mesh, model: DeviceMesh | None, rules: Rules) -> Tensor:
    """A leaf without memory: whole, or cut along its logical axes as a DTensor over the model dimensions."""
    shape = local_shape(spec, mesh.sizes, rules)
    leaf = torch.empty(shape, dtype=spec.dtype, device="meta")
    if model is None or not shape:
        return leaf
    cuts = cut_dims(spec, rules)
    where = [Shard(cuts[name]) if name in cuts else Replicate() for name in model.mesh_dim_names]
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(leaf, model, where, run_check=False, shape=spec.shape, stride=stride)


def make_unit(
    prefix: str, specs: Specs, *, make: Callable[[ParamSpec], Tensor], compute, trainable, fsdp: bool
) -> Unit:
    """The unit of `specs`, which are keyed within it."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for name, spec in specs.items():
        kind = (spec.dtype, compute.get(prefix + name, spec.dtype), fsdp and not spec.shape)
        learns = spec.dtype.is_floating_point and trainable(prefix + name)
        kinds.setdefault(kind, {})[name] = nn.Parameter(make(spec), requires_grad=learns)
    return Unit(prefix, [Part(leaves, *kind) for kind, leaves in kinds.items()])


def _lone_shard(mesh: Mesh) -> DeviceMesh:
    """The mesh's DeviceMesh with a dimension `shard` of size 1, for which each process makes a group of itself."""
    if not dist.is_initialized():
        raise UserError("FSDP of a process alone (solo) needs a process group: start one of a single process first")
    sizes = {n: mesh.size(n) for n in mesh.sizes if n not in ("dp_shard", "sp") and mesh.size(n) > 1}
    groups = {name: mesh.group(name) for name in sizes}
    groups["shard"] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    names = sorted(groups, key=lambda n: DATA.index(n) if n in DATA else len(DATA))
    if names == ["shard"]:
        return DeviceMesh.from_group(groups["shard"], mesh.device.type, mesh_dim_names=("shard",))
    table = mesh.ranks.reshape([sizes.get(n, 1) for n in names])
    of = [groups[n] for n in names]
    return DeviceMesh.from_group(of, mesh.device.type, mesh=table, mesh_dim_names=tuple(names))


def data_and_model(mesh: Mesh, solo: bool) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """`(dimensions that FSDP shards and replicates over, dimensions that leaves are cut over before)`."""
    whole = mesh.device_mesh
    names = () if whole is None else whole.mesh_dim_names
    if "shard" not in names and ("dp_replicate" in names or solo):
        whole = _lone_shard(mesh)
        names = whole.mesh_dim_names
    data, model = tuple(n for n in DATA if n in names), tuple(n for n in names if n not in DATA)
    return whole[data] if data else None, whole[model] if model else None
