"""Sharded checkpoints: every process writes the parts of leaves that it holds, and one folder appears when all did.

PyTorch's distributed checkpoint (DCP) plans which process writes which region (replicas once, evenly), runs the write
and tells every process when one of them failed. The storage is ours, one safetensors file per process and group with
the regions in its header (`core.parts`): DCP's own `HuggingFaceStorageWriter` notes no global shapes, so that a file
that is missing makes a smaller tensor instead of an error (its reader takes the largest index it sees, in PyTorch 2.11
as in 2.13), and it holds a second copy of a process's tensors while it writes. Reading needs no process group and no
planner: `core.checkpoint.open_checkpoint` gives lazy leaves, of which each process reads its own region.
"""

import contextlib
import dataclasses
import datetime
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from core import compat
from core.checkpoint import LazyLeaf
from core.errors import UserError
from core.files import atomic_folder
from core.parts import Place
from core.save import save_checkpoint, save_part
from parallel.mesh import Mesh
from parallel.norms import local

TIMEOUT = datetime.timedelta(minutes=30)
Trees = Mapping[str, Mapping[str, Tensor]]


def flat(trees: Trees) -> dict[str, Tensor]:
    """`{"group/key": leaf}` of several trees."""
    return {f"{group}/{key}": leaf for group, tree in trees.items() for key, leaf in tree.items()}


def snapshot(trees: Trees, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of this process's shards on the CPU, by `group/key`, after which the originals may change.

    Args:
        buffers: the copies of an earlier call, which are used again where they fit; pinned for leaves on a GPU, whose
            copies then overlap each other.
    """
    out: dict[str, Tensor] = {}
    shards = {name: local(leaf).detach() for name, leaf in flat(trees).items()}
    for name, shard in shards.items():
        buffer = buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (shard.shape, shard.dtype):
            buffer = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
        out[name] = buffer.copy_(shard, non_blocking=shard.is_cuda)
    for device in {shard.device for shard in shards.values() if shard.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return out


@dataclasses.dataclass(frozen=True)
class Duties:
    """What the first process does besides: before the write, in the temporary folder before it appears, and after."""

    before: Callable[[], None]
    complete: Callable[[Path], None]
    after: Callable[[], None]


class Writer:
    """Writes folders of trees, one at a time, in the background where asked.

    Collective over the mesh, also to make: all of its processes call it in the same order. A failure on one of them is
    raised on all, and leaves what stood on the disk. Leaving the context waits for the write that is under way; after
    an exception for at most PATIENCE seconds, since other processes may be gone.

    Args:
        background: `write` returns when the trees are copied to the CPU, and they may change. The memory of the copy is
            kept for the next one.
        timeout: of what the processes tell each other: the longest that one may write while another waits.
    """

    PATIENCE = 20.0

    def __init__(self, mesh: Mesh, *, background: bool = False, timeout: datetime.timedelta = TIMEOUT):
        self.background = background
        # A group of its own: its messages must not mix with those of training, which run meanwhile.
        self.group = _cpu_group(mesh, timeout)
        self.buffers: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.last: Path | None = None

    def write(self, folder: Path, trees: Trees, *, metadata: Mapping[str, str], duties: Duties) -> None:
        """Writes a folder that appears whole, with one subfolder per tree; waits for an earlier write first.

        Args:
            trees: DTensors, and tensors that are equal on all processes.
            metadata: of every file.

        Raises:
            UserError: on all processes alike, what those that failed say, now or in the write before.
        """
        self.wait()
        if self.background:
            data = self.buffers = snapshot(trees, self.buffers)
        else:
            data = {name: local(leaf).detach() for name, leaf in flat(trees).items()}
        work = functools.partial(self._write, Path(folder), trees, data, metadata, duties)
        if not self.background:
            return work()
        # A daemon: a process that is told to end must not wait for one that is gone.
        self.thread = threading.Thread(target=self._caught, args=(work,), name="checkpoint", daemon=True)
        self.thread.start()

    def wait(self) -> Path | None:
        """Waits for the write that is under way. Returns the newest folder that this object wrote.

        Raises:
            UserError: what that write failed of.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return self.last

    def _caught(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: B036 - raised by wait()
            self.failure = error

    def _write(self, folder: Path, trees: Trees, data, metadata: Mapping[str, str], duties: Duties) -> None:
        if self.group is None:
            _write_alone(folder, trees, data, metadata, duties)
        else:
            _write_sharded(folder, trees, data, metadata, duties, self.group)
        self.last = folder

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.wait()
        elif self.thread is not None:
            self.thread.join(self.PATIENCE)


def _cpu_group(mesh: Mesh, timeout: datetime.timedelta) -> ProcessGroup | None:
    """A group for CPU tensors over the mesh's processes; None for a process alone. Collective over the mesh."""
    ranks = mesh.ranks.flatten().tolist()
    if mesh.world == 1:
        return None
    if mesh.world == dist.get_world_size():
        return dist.new_group(ranks, timeout=timeout, backend="gloo")
    return compat.members_group(ranks, timeout)


# --- writing ------------------------------------------------------------------------------------------------------


def _write_alone(folder: Path, trees: Trees, data: Mapping[str, Tensor], metadata, duties: Duties) -> None:
    """One process's folder, in files that other libraries load too."""
    try:
        duties.before()
        with atomic_folder(folder) as part:
            for name, tree in trees.items():
                save_checkpoint(part / name, {k: data[f"{name}/{k}"] for k in tree}, metadata=metadata)
            duties.complete(part)
        duties.after()
    except OSError as error:
        raise _failed(folder, str(error)) from None


def _write_sharded(folder: Path, trees: Trees, data, metadata, duties: Duties, group: ProcessGroup) -> None:
    """The parts of several processes. Of the leaves in `trees` only shapes and places are read: they may change."""
    with contextlib.ExitStack() as stack:
        storage = _Storage(folder, stack, metadata, duties)
        try:
            dcp.save(flat(trees), storage_writer=storage, planner=_Planner(data), process_group=group)
        except CheckpointException as error:
            raise _as_ours(error, folder, dist.get_process_group_ranks(group)) from None
        except RuntimeError as error:  # DCP wraps all but what its own messages fail of
            raise RuntimeError(f"{folder}: not saved, another process ended or does not answer: {error}") from error


def _failed(folder: Path, why: str) -> UserError:
    return UserError(f"{folder}: the checkpoint could not be written ({why}); older ones are untouched")


def _as_ours(error: CheckpointException, folder: Path, ranks: Sequence[int]) -> Exception:
    """DCP's exception, which is no Exception, as ours: a UserError where all that failed is a user's to mend.

    `ranks` are the global ranks of the group, whose places DCP counts.
    """
    causes = {ranks[place]: cause for place, (cause, _) in sorted(error.failures.items())}
    if not all(isinstance(cause, UserError | OSError) for cause in causes.values()):
        return RuntimeError(f"{folder}: not saved: {error}")
    said = "; ".join(f"process {rank}: {cause}" for rank, cause in causes.items())
    return _failed(folder, said)


class _Planner(DefaultSavePlanner):
    """Plans with the live leaves, of which only shapes and places are read; the data are those handed in."""

    def __init__(self, data: Mapping[str, Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.data = data

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.data[index.fqn]


@dataclasses.dataclass(frozen=True)
class _Orders:
    """What the first process tells another: the folder, and `{group: (number of its file, number of files)}`."""

    folder: Path
    files: dict[str, tuple[int, int]]


class _Storage(StorageWriter):
    """One safetensors file per process and group. The first process makes the folder and publishes it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, metadata: Mapping[str, str], duties: Duties):
        self.folder, self.stack, self.metadata, self.duties = folder, stack, metadata, duties
        self.part: Path | None = None  # on the first process

    def reset(self, checkpoint_id=None) -> None:
        """Part of the interface; a storage serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        """Part of the interface."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        """Part of the interface: this storage is always handed in."""
        return False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leaves out the empty shards of processes that a leaf is too small for."""
        items = [i for i in plan.items if 0 not in i.tensor_data.chunk.sizes or 0 in i.tensor_data.size]
        return dataclasses.replace(plan, items=items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the temporary folder and numbers the files of each group; a process without regions writes none."""
        self.duties.before()
        self.part = self.stack.enter_context(atomic_folder(self.folder))
        writers: dict[str, list[int]] = {}
        for rank, plan in enumerate(plans):
            for group in _by_group(plan.items):
                writers.setdefault(group, []).append(rank)
        files = [
            {g: (ranks.index(rank) + 1, len(ranks)) for g, ranks in writers.items() if rank in ranks}
            for rank in range(len(plans))
        ]
        return [
            dataclasses.replace(plan, storage_data=_Orders(self.part, own))
            for plan, own in zip(plans, files, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: DefaultSavePlanner) -> Future[list[WriteResult]]:
        """Writes this process's files."""
        done, orders = [], plan.storage_data
        for group, items in _by_group(plan.items).items():
            number, count = orders.files[group]
            leaves = {key: _leaf(item, planner) for key, item in items.items()}
            places = {key: _place(item) for key, item in items.items()}
            path = save_part(orders.folder / group, leaves, places, number, count, metadata=self.metadata)
            done.append(WriteResult(MetadataIndex(group), path.stat().st_size, f"{group}/{path.name}"))
        future: Future[list[WriteResult]] = Future()
        future.set_result(done)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the folder, after every process has written; an error here reaches all of them too."""
        for path, size in ((self.part / f.storage_data, f.size_in_bytes) for result in results for f in result):
            if not path.is_file() or path.stat().st_size != size:
                raise UserError(f"{path}: another process wrote it and it is not here: all need one file system")
        self.duties.complete(self.part)
        self.stack.pop_all().close()
        self.duties.after()


def _by_group(items: list[WriteItem]) -> dict[str, dict[str, WriteItem]]:
    """`{group: {key: item}}` of a plan."""
    out: dict[str, dict[str, WriteItem]] = {}
    for item in items:
        group, _, key = item.index.fqn.partition("/")
        out.setdefault(group, {})[key] = item
    return out


def _leaf(item: WriteItem, planner: DefaultSavePlanner) -> LazyLeaf:
    """The region of an item as a leaf that is brought to the CPU when it is written."""
    data = item.tensor_data
    return LazyLeaf(tuple(data.chunk.sizes), data.properties.dtype, lambda memo: planner.resolve_data(item))


def _place(item: WriteItem) -> Place:
    """Where the region of an item begins in its leaf."""
    return Place(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.size))
