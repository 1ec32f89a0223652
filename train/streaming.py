"""Sequential reading of large Parquet sets: the order of an epoch, and the index of a set.

An epoch is all row groups in one order, shuffled by the key or as they stand. `train.order` cuts the endless row of
epochs into batches, each complete at its last row. A reader that starts at any batch reads the row groups that its
samples need from there on, in order, each once in an epoch (rows that were left for an epoch's first batches are read
from the epoch before).
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
from train.order import Entries
from train.rows import Signature

VERSION = 1
BUFFER = 1 << 20  # bytes per read of a column when a row group is read page by page


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How a set is streamed: rows per read, and whether row groups are shuffled."""

    read_batch_size: int = 8
    shuffle_row_groups: bool = True

    def __post_init__(self):
        if self.read_batch_size < 1:
            raise UserError(f"streaming: read_batch_size is {self.read_batch_size!r}, expected an integer >= 1")


@dataclasses.dataclass(frozen=True)
class Group:
    """Row group `number` of file `file`: samples `first` to `first + rows - 1`."""

    file: int
    number: int
    first: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Order:
    """The rows of one epoch as they are read. A place counts rows through `groups`; group g begins at `starts[g]`.

    `samples` `[n]` are the samples at the places.
    """

    groups: tuple[Group, ...]
    starts: np.ndarray
    samples: np.ndarray


# --- order ----------------------------------------------------------------------------------------------------


def epoch_order(groups: Sequence[Group], key: keys.Key, epoch: int, shuffle: bool) -> Order:
    """The order of an epoch; depends on nothing but the arguments."""
    if shuffle:
        own = keys.fold_in(keys.fold_in(keys.fold_in(key, "epoch"), epoch), "row groups")
        groups = [groups[i] for i in keys.permutation(own, len(groups))]
    samples = np.concatenate([np.arange(g.first, g.first + g.rows) for g in groups])
    starts = np.cumsum([0, *(g.rows for g in groups)])[:-1]
    return Order(tuple(groups), starts, samples)


def stream_entries(order_of: Callable[[int], Order], buckets: np.ndarray) -> Entries:
    """Entries of `train.order` for a stream: *ticks*, which count places through all epochs.

    Args:
        order_of: the order of an epoch.
        buckets: the number of each sample's signature, int `[n]`.
    """

    def entries(epoch: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        places = np.flatnonzero(buckets[order_of(epoch).samples] == bucket)
        return epoch * len(buckets) + places, places

    return entries


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
    batches: np.ndarray,
    order_of: Callable[[int], Order],
    size: int,
    read: Callable[[Group, Sequence[int]], Iterable[Any]],
) -> Iterator[list[tuple[int, Any]]]:
    """Batches `[n, B]` of ticks as lists of pairs: the number of a sample, and what was read for it.

    Row groups come in the epochs' order; those without a sample of these batches are not read.

    Args:
        batches: each ascending, in the order in which they are complete.
        size: samples of an epoch.
        read: gives the samples of some rows (ascending) of a group.
    """
    found = _in_order(np.sort(batches, axis=None), order_of, size, read)
    waiting: dict[int, tuple[int, Any]] = {}
    for batch in batches.tolist():
        while batch[-1] not in waiting:
            tick, pair = next(found)
            waiting[tick] = pair
        yield [waiting.pop(tick) for tick in batch]


def _in_order(ticks: np.ndarray, order_of, size: int, read) -> Iterator[tuple[int, tuple[int, Any]]]:
    for epoch in np.unique(ticks // size).tolist():
        order, places = order_of(epoch), ticks[ticks // size == epoch] - epoch * size
        numbers = np.searchsorted(order.starts, places, side="right") - 1
        changes = np.flatnonzero(np.diff(numbers, prepend=-1))
        for number, mine in zip(numbers[changes], np.split(places, changes)[1:], strict=True):
            group, rows = order.groups[number], mine - order.starts[number]
            for place, row, value in zip(mine.tolist(), rows.tolist(), read(group, rows), strict=True):
                yield epoch * size + place, (group.first + row, value)


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
