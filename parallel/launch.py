"""The processes of a run: their place from torchrun's environment, their device, their group, and a common end.

    with processes(None) as world:      # all there is to it: python -m ..., or torchrun --nproc-per-node 8 -m ...
        mesh = build_mesh({"dp_shard": world.size}, world.device)

A process alone needs neither torchrun nor a group. Of several, an exception ends all: it is shown once, by the rank
that raised it, and every process exits with its status (2 for what is a user's to fix, else 1). See `parallel.watch`.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core import compat, devices
from core.errors import UserError, raise_faults
from parallel import parent
from parallel.mesh import AXES, Mesh
from parallel.watch import Failure, Watch

TIMEOUT_S = 1800.0
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
POLICY, ZERO_CTA = "NCCL_CTA_POLICY", "2"


@dataclasses.dataclass(frozen=True)
class Place:
    """This process among those of the run; of several, with the store they share and what they are watched by."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store: dist.Store | None = dataclasses.field(default=None, repr=False, compare=False)
    watch: Watch | None = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class World:
    """This process among those of the run, and its device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device


def place_from(env: Mapping[str, str]) -> Place:
    """The place that torchrun's variables name; that of a process alone where there are none.

    Raises:
        UserError: listing every variable that is missing, malformed or contradicts another.
    """
    if not any(name in env for name in NUMBERS[:3]):
        return Place()
    found, faults = {}, []
    for name in NUMBERS:
        text = env.get(name)
        if text is None and (name != "MASTER_PORT" or env.get("WORLD_SIZE", "").strip() != "1"):
            faults.append(f"{name} is missing")
        elif text is not None and not text.strip().isdecimal():
            faults.append(f"{name} is {text!r}, expected a whole number")
        elif text is not None:
            found[name] = int(text)
    rank, size, local = (found.get(name) for name in NUMBERS[:3])
    if size == 0:
        faults.append("WORLD_SIZE is 0, expected at least 1")
    here = env.get("LOCAL_WORLD_SIZE", "").strip()
    for name, value, bound, limit in (
        ("RANK", rank, "WORLD_SIZE", size),
        ("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", int(here) if here.isdecimal() else size),
    ):
        if value is not None and limit and value >= limit:
            faults.append(f"{name} is {value}, expected less than {bound}, which is {limit}")
    if size != 1 and not env.get("MASTER_ADDR"):
        faults.append("MASTER_ADDR is missing")
    raise_faults("the environment is not that of a process that torchrun started", faults)
    return Place(rank, size, local)


def device_of(device: str | None, place: Place) -> torch.device:
    """The device of a process; of several on one machine, each takes the GPU of its LOCAL_RANK.

    Raises:
        UserError: a device that is not here, or that several processes would share.
    """
    asked = devices.resolve(device)
    if place.size == 1 or asked.type == "cpu":
        return asked
    if device is None and asked.type != "cuda":
        return torch.device("cpu")
    if asked.type != "cuda":
        raise UserError(f"device {device!r}: several processes run on cuda or cpu")
    if asked.index is not None:
        raise UserError(
            f"device {device!r} with {place.size} processes: each takes the GPU of its LOCAL_RANK, write cuda"
        )
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        limited = "" if seen is None else f" (CUDA_VISIBLE_DEVICES is {seen})"
        raise UserError(f"LOCAL_RANK is {place.local_rank}, but this process sees {count} GPUs{limited}")
    return torch.device("cuda", place.local_rank)


def check_policy(symmetric_memory: bool, env: Mapping[str, str]) -> None:
    """Refuses a NCCL policy that keeps symmetric memory from working; it has to be set before NCCL starts."""
    if symmetric_memory and env.get(POLICY, ZERO_CTA) != ZERO_CTA:
        seen = env[POLICY]
        raise UserError(f"fsdp_symmetric_memory needs {POLICY}={ZERO_CTA} before processes start, it is {seen!r}")


@contextlib.contextmanager
def together() -> Iterator[Place]:
    """Watches the processes of a run: an exception that leaves the block ends all of them, and is shown once.

    For what every process does alike, such as reading a recipe, before the device is known; then comes `start`. A
    process alone is not watched: its exceptions are its caller's. An exit by SystemExit is a process's good right.
    A process of any number that torchrun started gets SIGTERM when torchrun is gone; see `orphaned`.

    Raises:
        UserError: as `place_from`; no connection.
    """
    place = place_from(os.environ)
    if place.size == 1:
        with _parent_watched(place):
            yield place
        return
    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    watch = Watch(store, place.rank, place.size, os.environ["MASTER_ADDR"])
    place = dataclasses.replace(place, store=store, watch=watch)
    try:
        with _parent_watched(place):
            watch.join()
            yield place
    except SystemExit:
        _finish(watch)
        raise
    except BaseException as error:
        watch.end(error)
    else:
        _finish(watch)


def _parent_watched(place: Place) -> contextlib.AbstractContextManager[None]:
    """Sees to a torchrun that is gone, where one started this process."""
    if parent.STARTED not in os.environ:
        return contextlib.nullcontext()
    first = place.local_rank == 0
    return parent.parent_watched(lambda text: orphaned(place, text, say=first), first=first)


def orphaned(place: Place, text: str, say: bool) -> None:
    """Stops a process without parent as SIGTERM does. Of several that have no handler for it, all end with one word:
    each would else find the others killed.

    Args:
        text: why, in words. say: whether this process says so where a handler takes the signal.
    """
    if place.watch is None or parent.heard():
        parent.stop_self(text, say)
    else:
        place.watch.note(Failure(place.rank, place.rank, parent.STATUS, text))


def _finish(watch: Watch) -> None:
    """Waits for the other processes, since the group of those that are still at work must stand."""
    watch.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def start(
    place: Place,
    device: str | None,
    *,
    timeout_s: float = TIMEOUT_S,
    symmetric_memory: bool = False,
    traces: Path | None = None,
) -> World:
    """Starts the default group of the processes that are `together`, and takes this one's device.

    Args:
        device: `cuda`, `cpu`, or None for the best there is; a process alone takes any.
        timeout_s: of one collective, after which the run ends and says where each rank was.
        symmetric_memory: sets the NCCL policy that symmetric memory needs.
        traces: folder for every rank's record of collectives when one takes too long; None: the system's for
            temporary files.

    Raises:
        UserError: as `device_of` and `check_policy`.
    """
    check_policy(symmetric_memory, os.environ)
    found = device_of(device, place)
    world = World(place.rank, place.size, place.local_rank, found)
    if place.size == 1:
        return world
    if symmetric_memory:
        os.environ[POLICY] = ZERO_CTA
    backend, how = "gloo", {}
    if found.type == "cuda":
        torch.cuda.set_device(found)
        compat.record_collectives()
        backend, how = "cpu:gloo,cuda:nccl", {"device_id": found}
    # The watch is to see a late collective before its backend does, which knows less of it.
    limit = datetime.timedelta(seconds=60 + 1.5 * timeout_s)
    dist.init_process_group(backend, store=place.store, rank=place.rank, world_size=place.size, timeout=limit, **how)
    place.watch.limit(timeout_s, Path(tempfile.gettempdir()) if traces is None else traces)
    return world


@contextlib.contextmanager
def processes(
    device: str | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    symmetric_memory: bool = False,
    traces: Path | None = None,
) -> Iterator[World]:
    """`together` and `start`: the processes of a run with their group, for as long as the block lasts."""
    with together() as place:
        yield start(place, device, timeout_s=timeout_s, symmetric_memory=symmetric_memory, traces=traces)


# --- what one process knows -------------------------------------------------------------------------------------------


def gathered(value: Any, mesh: Mesh) -> list[Any]:
    """Every process's value in mesh order, on all of them. Collective over the mesh.

    Args:
        value: anything that JSON holds.
    """
    group = mesh.group(*AXES)
    if group is None:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(mesh.world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = int(max(sizes))
    out = [torch.zeros(longest, dtype=torch.uint8) for _ in range(mesh.world)]
    dist.all_gather(out, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    texts = [bytes(t[: int(n)].tolist()) for t, n in zip(out, sizes, strict=True)]
    order = [dist.get_group_rank(group, int(rank)) for rank in mesh.ranks.flatten()]
    return [json.loads(texts[i]) for i in order]


def summed(values: Sequence[float], mesh: Mesh) -> list[float]:
    """Sums over all processes of the mesh, in float64. Collective over it, on its device."""
    group = mesh.group(*AXES)
    if group is None:
        return list(values)
    x = torch.tensor(values, dtype=torch.float64, device=mesh.device)
    dist.all_reduce(x, group=group)
    return x.tolist()


def agreed(choose: Callable[[], Any], mesh: Mesh) -> Any:
    """What `choose()` gives on the first process of the mesh, on all of them. Collective over the mesh.

    For choices that need not come out alike everywhere, such as the fastest of several kernels by measurement:
    processes that choose differently add up differently. A UserError of the first process is raised on all.

    Args:
        choose: gives anything that JSON holds.
    """
    if mesh.world == 1:
        return choose()
    said: dict[str, Any] = {}
    if mesh.leader:
        try:
            said = {"value": choose()}
        except UserError as error:
            said = {"error": str(error)}
    first = gathered(said, mesh)[0]
    if "error" in first:
        raise UserError(first["error"])
    return first["value"]
