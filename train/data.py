"""Datasets over Parquet files, and batches that depend on nothing but the key and their position."""

import dataclasses
import signal
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from core import keys
from core.errors import UserError, raise_faults
from train.rows import Batch, RowType, TensorColumn, check_schema, check_shape, decode_row

DataPath = str | Path | Sequence[str | Path] | Mapping[str | Path, int]


@dataclasses.dataclass(frozen=True)
class File:
    """A Parquet file; row group g holds rows `bounds[g]` to `bounds[g + 1]`."""

    path: Path
    bounds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Samples 0..n-1: sample i is row `places[i, 1]` of `files[places[i, 0]]`, int64 `[n, 2]`.

    `shapes[buckets[i]]` is the shape of its first tensor (the latents). Repeats repeat `places`, not data.
    """

    row_type: RowType
    files: tuple[File, ...]
    places: np.ndarray
    shapes: tuple[tuple[int, ...], ...]
    buckets: np.ndarray

    def __len__(self) -> int:
        return len(self.places)


def where(dataset: Dataset, index: int) -> str:
    """`"file, row n"` of a sample, for messages."""
    file, row = dataset.places[index]
    return f"{dataset.files[file].path}, row {row}"


# --- opening --------------------------------------------------------------------------------------------------


def _repeats(data_path: DataPath) -> dict[Path, int]:
    """Every accepted form of `data_path` as `{path: repeat}`. Raises UserError listing every bad entry."""
    if isinstance(data_path, str | Path):
        data_path = [data_path]
    pairs = list(data_path.items()) if isinstance(data_path, Mapping) else [(path, 1) for path in data_path]
    faults = [
        f"{path}: repeat is {n!r}, expected an integer >= 1"
        for path, n in pairs
        if isinstance(n, bool) or not isinstance(n, int) or n < 1
    ]
    raise_faults("data_path", faults if pairs else ["it is empty, expected at least one path"])
    return {Path(path): n for path, n in pairs}


def _parquet_files(path: Path) -> list[Path]:
    """The file itself, or every `*.parquet` below a folder in sorted order."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder")
    found = sorted(path.rglob("*.parquet"))
    if not found:
        raise UserError(f"{path}: no *.parquet file in this folder or below")
    return found


def _shape_column(file: pq.ParquetFile, column: TensorColumn, path: Path) -> list[tuple[int, ...]]:
    """The shape of one tensor in every row; no other column is read."""
    stored = file.read(columns=[f"{column.stem}_shape"], use_threads=False).column(0).to_pylist()
    return [check_shape(column, shape, f"{path}, row {row}") for row, shape in enumerate(stored)]


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file, or cut short: {error}") from None


def _open_file(path: Path, row_type: RowType) -> tuple[File, list[tuple[int, ...]]]:
    """A file's row groups and its rows' bucket shapes, from the footer and one small column."""
    with _open_parquet(path) as file:
        check_schema(row_type, file.schema_arrow, str(path))
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
        return File(path, (0, *np.cumsum(sizes).tolist())), _shape_column(file, row_type.tensors[0], path)


def open_dataset(data_path: DataPath, row_type: RowType) -> Dataset:
    """Opens Parquet files: a file, a folder (searched recursively, sorted), a list of those, or `{path: repeat}`.

    Reads footers and the column of latent shapes, nothing else. Raises one UserError that lists every
    missing path, unreadable file, file of another row type, empty latent and bad repeat.
    """
    faults: list[str] = []
    owner: dict[Path, Path] = {}
    files, places, shapes = [], [], []
    for path, repeat in _repeats(data_path).items():
        try:
            for name in _parquet_files(path):
                if (first := owner.setdefault(name.resolve(), path)) != path:
                    raise UserError(f"{name}: in both {first} and {path}; to repeat data write {{path: n}}")
                file, rows = _open_file(name, row_type)
                one = np.stack([np.full(len(rows), len(files)), np.arange(len(rows))], axis=1)
                places.append(np.tile(one, (repeat, 1)))
                shapes += rows * repeat
                files.append(file)
        except UserError as error:
            faults.append(str(error))
    raise_faults("cannot open the dataset", faults)
    if not shapes:
        raise UserError(f"cannot open the dataset: no rows in {', '.join(str(f.path) for f in files)}")
    distinct = sorted(set(shapes))
    number = {shape: i for i, shape in enumerate(distinct)}
    buckets = np.array([number[shape] for shape in shapes])
    return Dataset(row_type, tuple(files), np.concatenate(places), tuple(distinct), buckets)


def common_shape(dataset: Dataset) -> tuple[int, ...]:
    """The latent shape `[C, T, H, W]` that most samples have."""
    return dataset.shapes[int(np.bincount(dataset.buckets).argmax())]


def first_fps(dataset: Dataset) -> float | None:
    """Frames per second of the first sample; None where it is not noted."""
    with _open_parquet(dataset.files[0].path) as file:
        fps = file.read_row_group(0, columns=["fps"], use_threads=False).column(0)[0].as_py()
    return None if not fps else float(fps)


# --- checks against a model -----------------------------------------------------------------------------------


def check_latents(
    dataset: Dataset,
    expected_channels: int,
    patch_size: tuple[int, int, int],
    expected_shape: Sequence[int | None] | None = None,
) -> None:
    """Checks every latent shape `[C, T, H, W]` against the model: channels, patches, and a shape if given.

    None in `expected_shape` fits any size.

    Raises one UserError with the first file and row of every shape that does not fit.
    """
    expected = (None,) * 4 if expected_shape is None else expected_shape
    faults = []
    for bucket, shape in enumerate(dataset.shapes):
        wrong = [] if shape[0] == expected_channels else [f"expected {expected_channels} channels"]
        for name, size, patch in zip("THW", shape[1:], patch_size, strict=True):
            if size % patch:
                wrong.append(f"{name} = {size} is not a multiple of the patch size {patch}")
        wanted = [size if e is None else e for size, e in zip(shape, expected, strict=True)]
        if wanted != list(shape):
            wrong.append(f"expected {wanted}")
        if wrong:
            rows = np.flatnonzero(dataset.buckets == bucket)
            faults.append(f"{where(dataset, rows[0])}: latents {list(shape)} ({len(rows)} such): {'; '.join(wrong)}")
    raise_faults("latents that do not fit the model", faults)


def check_text(dataset: Dataset, dim: int) -> None:
    """Checks that text embeddings `[L, D]` have D = `dim`. Raises one UserError with the first row per file."""
    column = next(c for c in dataset.row_type.tensors if c.stem == "text_embedding")
    faults = []
    for file in dataset.files:
        with _open_parquet(file.path) as parquet:
            shapes = _shape_column(parquet, column, file.path)
        bad = [row for row, shape in enumerate(shapes) if shape[-1] != dim]
        if bad:
            faults.append(f"{file.path}, row {bad[0]}: {list(shapes[bad[0]])} ({len(bad)} such), expected [L, {dim}]")
    raise_faults("text embeddings that do not fit the model", faults)


# --- reading --------------------------------------------------------------------------------------------------


class Reader:
    """Reads samples by index and remembers the last `keep` row groups.

    Reads with one thread, so that it works in forked worker processes.
    """

    def __init__(self, dataset: Dataset, keep: int = 4):
        self.dataset = dataset
        self.keep = keep
        self.groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()

    def _group(self, file: int, group: int) -> pa.Table:
        if (file, group) not in self.groups:
            columns = self.dataset.row_type.schema.names
            path = self.dataset.files[file].path
            with _open_parquet(path) as parquet:
                try:
                    table = parquet.read_row_group(group, columns=columns, use_threads=False)
                except (pa.ArrowException, OSError) as error:
                    raise UserError(f"{path}, row group {group}: cannot be read: {error}") from None
            self.groups[file, group] = table
            while len(self.groups) > self.keep:
                self.groups.popitem(last=False)
        self.groups.move_to_end((file, group))
        return self.groups[file, group]

    def sample(self, index: int) -> dict[str, Any]:
        """Sample `index` decoded, see `rows.decode_row`. Raises UserError naming file, row and column."""
        file, row = (int(n) for n in self.dataset.places[index])
        bounds = self.dataset.files[file].bounds
        group = int(np.searchsorted(bounds, row, side="right")) - 1
        (stored,) = self._group(file, group).slice(row - bounds[group], 1).to_pylist()
        return decode_row(self.dataset.row_type, stored, where(self.dataset, index))

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples of `indices` as a batch."""
        return self.dataset.row_type.collate([self.sample(index) for index in indices], indices)


# --- batches --------------------------------------------------------------------------------------------------


def batches_per_epoch(dataset: Dataset, batch_size: int) -> int:
    """Batches in one epoch: full ones of each latent shape, at least one per shape."""
    return sum(max(1, int(n) // batch_size) for n in np.bincount(dataset.buckets))


def epoch_plan(dataset: Dataset, key: keys.Key, batch_size: int, epoch: int) -> list[list[int]]:
    """The sample indices of every batch of an epoch; depends on nothing but the arguments.

    A batch holds one latent shape. Every sample comes once, but for those that do not fill a batch of
    their shape (others in every epoch); a shape with fewer samples than a batch repeats them to fill one.
    """
    key = keys.fold_in(keys.fold_in(key, "epoch"), epoch)
    plan = []
    for bucket in range(len(dataset.shapes)):
        members = np.flatnonzero(dataset.buckets == bucket)
        order = members[keys.permutation(keys.fold_in(key, bucket), len(members))]
        order = np.resize(order, max(batch_size, len(order) // batch_size * batch_size))
        plan += order.reshape(-1, batch_size).tolist()
    return [plan[i] for i in keys.permutation(keys.fold_in(key, "order"), len(plan))]


def batch_indices(dataset: Dataset, key: keys.Key, batch_size: int, start: int = 0) -> Iterator[list[int]]:
    """The sample indices of batches `start`, `start` + 1, ... without end, through epochs 0, 1, ..."""
    epoch, skip = divmod(start, batches_per_epoch(dataset, batch_size))
    while True:
        yield from epoch_plan(dataset, key, batch_size, epoch)[skip:]
        epoch, skip = epoch + 1, 0


class _Fetch(torch.utils.data.Dataset):
    """What a DataLoader worker does: a list of indices -> a batch, or the error to raise in the main process."""

    def __init__(self, dataset: Dataset):
        self.reader = Reader(dataset)

    def __getitem__(self, indices: list[int]) -> Batch | UserError:
        try:
            return self.reader.batch(indices)
        except UserError as error:
            return error


def _same(item):
    return item


def _ignore_signals(worker: int) -> None:
    """A signal to the whole process group is the main process's to answer: it ends the workers when it is done."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _loaded(dataset: Dataset, plan: Iterable[list[int]], num_workers: int) -> Iterator[Batch]:
    # Its own generator: a DataLoader without one advances torch's global random state.
    loader = torch.utils.data.DataLoader(
        _Fetch(dataset),
        sampler=plan,
        batch_size=None,
        collate_fn=_same,
        num_workers=num_workers,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),
    )
    for item in loader:
        if isinstance(item, UserError):
            raise item
        yield item


def batches(
    dataset: Dataset, *, key: keys.Key, batch_size: int, start: int = 0, num_workers: int = 0
) -> Iterator[Batch]:
    """Batches at positions `start`, `start` + 1, ... (micro-batches since the start of training), without end.

    A batch depends on (dataset, key, batch_size, position) alone: not on where reading started nor on
    `num_workers`, the number of background processes (0 reads inline). See `epoch_plan` for the order.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("start", start, 0), ("num_workers", num_workers, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} is {value!r}, expected an integer >= {least}")
    return _loaded(dataset, batch_indices(dataset, key, batch_size, start), num_workers)
