"""The mesh of processes: named axes, this process's place on them, and one group per set of ranks.

Axes, outermost first: `dp_replicate` (copies of the sharded weights), `dp_shard` (shards of the weights, each
with its own data), `sp` (parts of one sample's tokens; weights are sharded over it too), `tp` (parts of each
matrix). Further axes (`ep` for experts) follow in the order given. An axis of size 1 has no group.
"""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from core.errors import UserError

AXES = ("dp_replicate", "dp_shard", "sp", "tp")
# How the axes are folded into the dimensions of the DeviceMesh that DTensors live on.
FOLDED = {"dp_replicate": ("dp_replicate",), "shard": ("dp_shard", "sp"), "tp": ("tp",)}

Sizes = dict[str, int]


def infer_sizes(world: int, sizes: Mapping[str, int]) -> Sizes:
    """Every axis with its size, in mesh order; one axis may be -1 and takes the ranks that the others leave.

    Raises:
        UserError: sizes that are neither positive nor -1, more than one -1, or a product other than `world`; it
            names all the numbers.
    """
    axes = [*AXES, *(name for name in sizes if name not in AXES)]
    given = {name: sizes.get(name, 1) for name in axes}
    said = " x ".join(f"{name} {n}" for name, n in given.items())
    bad = [f"{name} is {n}" for name, n in given.items() if n == 0 or n < -1]
    if bad:
        raise UserError(f"mesh {said}: {', '.join(bad)}, expected a positive size, or -1 for what is left")
    open_ = [name for name, n in given.items() if n == -1]
    known = math.prod(n for n in given.values() if n > 0)
    if len(open_) > 1:
        raise UserError(f"mesh {said}: only one axis can be -1, got {', '.join(open_)}")
    if open_ and world % known:
        raise UserError(f"mesh {said}: {world} processes are not divisible by {known}, so {open_[0]} has no size")
    given |= {name: world // known for name in open_}
    if math.prod(given.values()) != world:
        raise UserError(f"mesh {said} needs {math.prod(given.values())} processes, there are {world}")
    return given


@dataclasses.dataclass(frozen=True, eq=False)
class Mesh:
    """The place of this process: see `build_mesh`. Groups and the DeviceMesh are None where one process is alone.

    `ranks` holds the global ranks in the shape of `sizes`. `device_mesh` has the dimensions of FOLDED that are larger
    than 1, and those of further axes; its groups are this mesh's.
    """

    sizes: Sizes
    ranks: torch.Tensor
    rank: int
    device: torch.device
    groups: Mapping[tuple[str, ...], ProcessGroup]
    device_mesh: DeviceMesh | None

    @property
    def world(self) -> int:
        """Number of processes of the mesh."""
        return self.ranks.numel()

    def size(self, *axes: str) -> int:
        """Product of the sizes of axes."""
        return math.prod(self.sizes[name] for name in axes)

    def coordinate(self, axis: str) -> int:
        """This process's index on an axis."""
        return int((self.ranks == self.rank).nonzero()[0][list(self.sizes).index(axis)])

    def index(self, *axes: str) -> int:
        """This process's index among those that differ along `axes` only, the last one fastest."""
        out = 0
        for name in axes:
            out = out * self.sizes[name] + self.coordinate(name)
        return out

    def group(self, *axes: str) -> ProcessGroup | None:
        """The processes that differ from this one along `axes` only; None when it is alone.

        Raises KeyError for a combination that the mesh has no group for (see GROUPS).
        """
        wide = tuple(name for name in axes if self.sizes[name] > 1)
        return self.groups[wide] if wide else None

    @property
    def leader(self) -> bool:
        """Whether this is the first process of the mesh, which writes and prints."""
        return self.rank == int(self.ranks.flatten()[0])


# Every combination of axes that something communicates over; further axes get one group each.
GROUPS = (
    ("dp_replicate",),
    ("dp_shard",),
    ("sp",),
    ("tp",),
    ("dp_shard", "sp"),  # shards of the weights
    ("dp_replicate", "dp_shard"),  # different data
    ("dp_replicate", "dp_shard", "sp"),  # copies of the gradients
    AXES,
)


def single(device: torch.device | str = "cpu") -> Mesh:
    """The mesh of a process that is alone: no group, no collective."""
    sizes = infer_sizes(1, {})
    return Mesh(sizes, torch.zeros([1] * len(sizes), dtype=torch.int64), 0, torch.device(device), {}, None)


def build_mesh(
    sizes: Mapping[str, int],
    device: torch.device | str,
    *,
    ranks: Sequence[int] | None = None,
    timeout: datetime.timedelta | None = None,
) -> Mesh | None:
    """The mesh over the processes of the default group, or over `ranks` of them.

    Collective: every process of the default group calls it, with equal arguments but for `device`.

    Args:
        sizes: axes, see `infer_sizes`.
        device: of this process's tensors.
        ranks: global ranks of the mesh in mesh order; None: all.
        timeout: of the collectives; None: the default group's.

    Returns:
        The mesh, or None on a process that is not in `ranks`.

    Raises:
        UserError: as `infer_sizes`.
    """
    device = torch.device(device)
    if not dist.is_initialized():
        infer_sizes(1, sizes)
        return single(device)
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    sizes = infer_sizes(len(members), sizes)
    table, me = torch.tensor(members).reshape(list(sizes.values())), dist.get_rank()
    further = [(name,) for name in sizes if name not in AXES]
    groups = _make_groups(table, list(sizes), [*GROUPS, *further], me, timeout)
    if me not in members:
        return None
    return Mesh(sizes, table, me, device, groups, _device_mesh(table, sizes, groups, device))


def _rows(table: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """`[groups, members]`: the ranks that differ along `dims` only."""
    rest = [d for d in range(table.ndim) if d not in dims]
    return table.permute(*rest, *dims).flatten(len(rest)).reshape(-1, math.prod(table.shape[d] for d in dims))


def _make_groups(table, names, wanted, me, timeout) -> dict[tuple[str, ...], ProcessGroup]:
    """One group per set of ranks, however many names it has; made in the same order on every process."""
    made: dict[tuple[int, ...], ProcessGroup] = {}
    if table.numel() == dist.get_world_size() and timeout is None:
        made[tuple(sorted(table.flatten().tolist()))] = dist.group.WORLD
    out = {}
    for axes in wanted:
        wide = tuple(a for a in axes if table.shape[names.index(a)] > 1)
        if not wide or wide in out:
            continue
        for row in _rows(table, [names.index(a) for a in wide]).tolist():
            if tuple(row) not in made:
                made[tuple(row)] = dist.new_group(row, timeout=timeout)
            if me in row:
                out[wide] = made[tuple(row)]
    return out


def folded(sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """`{dimension of the DeviceMesh: its axes that are larger than 1}`, outermost first, of those that have any."""
    every = {**FOLDED, **{name: (name,) for name in sizes if name not in AXES}}
    wide = {name: tuple(axis for axis in axes if sizes.get(axis, 1) > 1) for name, axes in every.items()}
    return {name: axes for name, axes in wide.items() if axes}


def _device_mesh(table, sizes: Sizes, groups, device) -> DeviceMesh | None:
    wide = folded(sizes)
    if not wide:
        return None
    shape = [math.prod(sizes[a] for a in axes) for axes in wide.values()]
    # One group per dimension; from_group makes none of its own.
    of = [groups[axes] for axes in wide.values()]
    return DeviceMesh.from_group(
        of if len(of) > 1 else of[0],
        device.type,
        mesh=table.reshape(shape) if len(of) > 1 else None,
        mesh_dim_names=tuple(wide),
    )
