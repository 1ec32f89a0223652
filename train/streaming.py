"""Sequential reading of large Parquet sets: the order of an epoch, a rank's part of it, and the index of a set.

An epoch is all row groups in one order, shuffled by the key or as they stand. In that order, the rows of each
signature are cut into batches, each complete at its last row, and each rank gets an equal run of them. So a batch
depends on the index of the set, the key, the batch size, the rank and the number of ranks alone, and a reader that
starts at any position reads the row groups that are needed from there on, once and in order.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core import keys
from core.errors import UserError, raise_faults
from core.files import atomic_file, check_target, read_json
from train.rows import Signature

VERSION = 1
BUFFER = 1 << 20  # bytes per read of a column when a row group is read page by page


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How a set is streamed: rows per read, whether row groups are shuffled, and which part this rank reads."""

    read_batch_size: int = 8
    shuffle_row_groups: bool = True
    rank: int = 0
    world: int = 1

    def __post_init__(self):
        least = {"read_batch_size": 1, "world": 1, "rank": 0}
        values = {k: getattr(self, k) for k in least}
        faults = [f"{k} is {v!r}, expected an integer >= {least[k]}" for k, v in values.items() if v < least[k]]
        if self.rank >= self.world:
            faults.append(f"rank is {self.rank}, expected one below world, {self.world}")
        raise_faults("streaming", faults)


@dataclasses.dataclass(frozen=True)
class Group:
    """Row group `number` of file `file`: samples `first` to `first + rows - 1`."""

    file: int
    number: int
    first: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """One rank's epoch. A place counts rows through `groups`; group g begins at `starts[g]`.

    `batches` `[n, B]`, int64, are the places of each batch's samples, ascending.
    """

    groups: tuple[Group, ...]
    starts: np.ndarray
    batches: np.ndarray


# --- order ----------------------------------------------------------------------------------------------------


def batches_per_rank(buckets: np.ndarray, batch_size: int, world: int) -> int:
    """Batches of every rank in each epoch: full ones of each signature, split evenly.

    Args:
        buckets: the number of each sample's signature, int `[n]`.
    """
    return int((np.bincount(buckets) // batch_size).sum()) // world


def epoch_plan(
    groups: Sequence[Group], buckets: np.ndarray, key: keys.Key, batch_size: int, epoch: int, how: Streaming
) -> Plan:
    """What a rank reads in an epoch; depends on nothing but the arguments (and not on `how.read_batch_size`).

    Over all ranks every sample comes once, but for the last of each signature that fill no batch and the last
    batches that do not divide by the ranks.
    """
    if how.shuffle_row_groups:
        own = keys.fold_in(keys.fold_in(keys.fold_in(key, "epoch"), epoch), "row groups")
        groups = [groups[i] for i in keys.permutation(own, len(groups))]
    samples = np.concatenate([np.arange(g.first, g.first + g.rows) for g in groups])
    bucket_at, cut = buckets[samples], []
    for bucket in np.unique(bucket_at):
        places = np.flatnonzero(bucket_at == bucket)
        cut.append(places[: len(places) // batch_size * batch_size].reshape(-1, batch_size))
    batches = np.concatenate(cut)
    batches = batches[np.argsort(batches[:, -1])]
    count = len(batches) // how.world
    starts = np.cumsum([0, *(g.rows for g in groups)])[:-1]
    return Plan(tuple(groups), starts, batches[how.rank * count : (how.rank + 1) * count])


def locate(plan: Plan, place: int) -> tuple[Group, int]:
    """The row group of a place, and the row in it."""
    number = int(np.searchsorted(plan.starts, place, side="right")) - 1
    return plan.groups[number], int(place - plan.starts[number])


# --- reading --------------------------------------------------------------------------------------------------


def open_parquet(path: Path, *, paged: bool = False) -> pq.ParquetFile:
    """Opens a file, to read whole row groups or, `paged`, single pages of them.

    Raises UserError for one that is none, or was cut short.
    """
    try:
        return pq.ParquetFile(path, pre_buffer=not paged, buffer_size=BUFFER if paged else 0)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file, or cut short: {error}") from None


def read_group(
    path: Path, number: int, rows: Sequence[int], columns: Sequence[str], read_batch_size: int
) -> Iterator[dict[str, Any]]:
    """The stored `rows` (ascending) of a row group, with `read_batch_size` rows (or a page) in memory at a time.

    Raises UserError when the file cannot be read.
    """
    rows, first = np.asarray(rows), 0
    with open_parquet(path, paged=True) as file:
        options = {"row_groups": [number], "columns": list(columns), "use_threads": False}
        try:
            for table in file.iter_batches(read_batch_size, **options):
                for row in rows[(first <= rows) & (rows < first + table.num_rows)]:
                    yield table.slice(row - first, 1).to_pylist()[0]
                first += table.num_rows
                if first > rows[-1]:
                    return
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}, row group {number}: cannot be read: {error}") from None


def read_batches(
    plan: Plan, start: int, read: Callable[[Group, Sequence[int]], Iterable[Any]]
) -> Iterator[list[tuple[int, Any]]]:
    """Batches `start`, `start` + 1, ... of a plan as pairs of sample number and what was read for it.

    Row groups come in the plan's order; those without a sample of these batches are not read.

    Args:
        read: gives the samples of some rows (ascending) of a group.
    """
    batches = plan.batches[start:]
    found = _in_order(plan, np.sort(batches, axis=None), read)
    waiting: dict[int, tuple[int, Any]] = {}
    for batch in batches.tolist():
        while batch[-1] not in waiting:
            place, pair = next(found)
            waiting[place] = pair
        yield [waiting.pop(place) for place in batch]


def _in_order(plan: Plan, places: np.ndarray, read) -> Iterator[tuple[int, tuple[int, Any]]]:
    numbers = np.searchsorted(plan.starts, places, side="right") - 1
    changes = np.flatnonzero(np.diff(numbers, prepend=-1))
    for number, mine in zip(numbers[changes], np.split(places, changes)[1:], strict=True):
        group, rows = plan.groups[number], mine - plan.starts[number]
        for place, row, value in zip(mine.tolist(), rows.tolist(), read(group, rows), strict=True):
            yield place, (group.first + row, value)


# --- the index of a set ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """What reading needs to know of a Parquet file: row group g holds rows `bounds[g]` to `bounds[g + 1]`.

    `signatures` has an entry per row; `size` is that of the file, in bytes.
    """

    path: Path
    size: int
    bounds: tuple[int, ...]
    signatures: list[Signature]


def check_place(path: Path, roots: Iterable[Path]) -> None:
    """Refuses a place for the index that is inside the data, or where no file can be written."""
    check_target(path)
    for root in roots:
        if path.resolve().is_relative_to(root.resolve()):
            raise UserError(f"{path}: the index must be outside the data, which are never written to: {root}")


def write_manifest(path: Path, row_type: str, files: Sequence[FileIndex]) -> None:
    """Writes the index as JSON that appears whole. Signatures are numbered; equal ones in a row are one entry."""
    numbers: dict[Signature, int] = {}
    for signature in itertools.chain.from_iterable(f.signatures for f in files):
        numbers.setdefault(signature, len(numbers))
    entries = [
        {
            "path": str(f.path.resolve()),
            "bytes": f.size,
            "bounds": f.bounds,
            "signatures": [[numbers[s], len(list(run))] for s, run in itertools.groupby(f.signatures)],
        }
        for f in files
    ]
    with atomic_file(path) as part:
        body = {"version": VERSION, "row_type": row_type, "signatures": list(numbers), "files": entries}
        part.write_text(json.dumps(body) + "\n", encoding="utf-8")


def read_manifest(path: Path, row_type: str, files: Sequence[Path]) -> list[FileIndex]:
    """The index of `files`, checked against their sizes; no data file is opened.

    Raises UserError listing every file that is missing in it, too many, or of another size.
    """
    data, again = read_json(path), f"{path}: not the index of this set; remove it to have it made again"
    try:
        version, kind = data["version"], data["row_type"]
        known = [_tuples(signature) for signature in data["signatures"]]
        entries = {entry["path"]: _entry(entry, known) for entry in data["files"]}
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{again}: malformed ({error!r})") from None
    wanted = {"version": (version, VERSION), "row type": (kind, row_type)}
    raise_faults(again, [f"{k} {a!r}, expected {b!r}" for k, (a, b) in wanted.items() if a != b])
    found = {str(file.resolve()): file for file in files}
    faults = [f"{name}: is not in it" for name in found if name not in entries]
    faults += [f"{name}: is in it, but not in training.data.data_path" for name in entries if name not in found]
    sizes = {name: found[name].stat().st_size for name in found if name in entries}
    faults += [
        f"{n}: {size} bytes, noted are {entries[n].size}" for n, size in sizes.items() if size != entries[n].size
    ]
    raise_faults(again, faults)
    return [dataclasses.replace(entries[name], path=file) for name, file in found.items()]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _entry(entry: dict[str, Any], known: Sequence[Signature]) -> FileIndex:
    signatures = [known[number] for number, count in entry["signatures"] for _ in range(count)]
    return FileIndex(Path(entry["path"]), entry["bytes"], tuple(entry["bounds"]), signatures)
