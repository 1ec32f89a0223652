"""Datasets over Parquet files, and batches that depend on nothing but the key and their position.

A set is read as a map (samples in any order, the default) or as a stream (see `train.streaming`).
"""

import dataclasses
import functools
import itertools
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from core import keys
from core.errors import UserError, raise_faults
from train import streaming
from train.order import Entries, Share, batches_from
from train.preprocess.record import check_complete
from train.rows import (
    SOLE_TEXT,
    TEXT,
    Batch,
    RowType,
    Signature,
    TensorColumn,
    check_schema,
    check_shape,
    collate,
    decode_row,
    lacks,
    narrowed,
    rate_of,
    signature_of,
    unread,
)
from train.rows import read_columns as columns_of
from train.streaming import FileIndex, Group, Streaming, open_parquet

DataPath = str | Path | Sequence[str | Path] | Mapping[str | Path, int]


@dataclasses.dataclass(frozen=True)
class File:
    """A Parquet file; row group g holds rows `bounds[g]` to `bounds[g + 1]`."""

    path: Path
    bounds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Samples that are not in files but made when asked for, see `train.online`.

    `sample(row)` gives one as `rows.decode_row` would, `name(row)` its name in messages. `fps` is that of the first;
    `identity` changes when a sample would.
    """

    sample: Callable[[int], dict[str, Any]]
    name: Callable[[int], str]
    fps: float | None
    identity: str


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Samples 0..n-1: sample i is row `places[i, 1]` of `files[places[i, 0]]`, int64 `[n, 2]`.

    `signatures[buckets[i]]` has the sizes of its tensors that a batch must share. Repeats repeat `places`, not
    data. `streaming` says how it is streamed; None: read as a map. With an `origin` there are no files.
    """

    row_type: RowType
    files: tuple[File, ...]
    places: np.ndarray
    signatures: tuple[Signature, ...]
    buckets: np.ndarray
    streaming: Streaming | None = None
    origin: Origin | None = None

    def __len__(self) -> int:
        return len(self.places)

    @property
    def shapes(self) -> tuple[tuple[int | None, ...], ...]:
        """The shape of the first tensor (the latents) in each bucket."""
        return tuple(signature[0] for signature in self.signatures)


def where(dataset: Dataset, index: int) -> str:
    """`"file, row n"` of a sample, for messages."""
    file, row = (int(n) for n in dataset.places[index])
    return f"{dataset.files[file].path}, row {row}" if dataset.origin is None else dataset.origin.name(row)


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
    paths = [Path(path) for path, _ in pairs]
    faults += [f"{p}: given {paths.count(p)} times; to repeat data write {{path: n}}" for p in dict.fromkeys(paths)
               if paths.count(p) > 1]  # fmt: skip
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


def _sizes(file: pq.ParquetFile, column: TensorColumn, path: Path) -> list[tuple[int | None, ...]]:
    """The sizes of one tensor in every row, None for free ones, () where it is absent; no other column is read."""
    if lacks(column, file.schema_arrow):
        return [()] * file.metadata.num_rows
    stored = file.read(columns=[f"{column.stem}_shape"], use_threads=False).column(0).to_pylist()
    return [
        () if column.optional and not shape else signature_of(column, check_shape(column, shape, f"{path}, row {row}"))
        for row, shape in enumerate(stored)
    ]


def _index_file(path: Path, row_type: RowType) -> FileIndex:
    """A file's row groups and its rows' signatures, from the footer and small columns."""
    with open_parquet(path) as file:
        check_schema(row_type, file.schema_arrow, str(path))
        rows = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
        signatures = list(zip(*(_sizes(file, column, path) for column in row_type.channels), strict=True))
        return FileIndex(path, path.stat().st_size, (0, *np.cumsum(rows).tolist()), signatures)


def _find_files(data_path: DataPath) -> tuple[dict[Path, int], list[str]]:
    """Every file of `data_path` with its repeat, and the faults of the paths."""
    owner: dict[Path, Path] = {}
    found, faults = {}, []
    for path, repeat in _repeats(data_path).items():
        try:
            for name in _parquet_files(path):
                if (first := owner.setdefault(name.resolve(), path)) != path:
                    raise UserError(f"{name}: in both {first} and {path}; to repeat data write {{path: n}}")
                found[name] = repeat
        except UserError as error:
            faults.append(str(error))
    check_complete(found)
    return found, faults


def _index(data_path: DataPath, row_type: RowType, manifest: Path | None) -> list[tuple[FileIndex, int]]:
    """The index of every file with its repeat: from the manifest, or from the files, and then noted there."""
    found, faults = _find_files(data_path)
    if manifest is not None and manifest.exists() and not faults:
        files = streaming.read_manifest(manifest, row_type.name, list(found))
        return list(zip(files, found.values(), strict=True))
    files = []
    for name in found:
        try:
            files.append(_index_file(name, row_type))
        except UserError as error:
            faults.append(str(error))
    raise_faults("cannot open the dataset", faults)
    if manifest is not None:
        streaming.write_manifest(manifest, row_type.name, files)
    return list(zip(files, found.values(), strict=True))


def narrow(dataset: Dataset, streams: Sequence[str] | None) -> Dataset:
    """The data set as a model of these streams sees it, see `rows.narrowed`; the video's text is left out as well where
    every sample of sound alone has one of its own.
    """
    kind = narrowed(dataset.row_type, streams)
    stems = [column.stem for column in dataset.row_type.channels]
    of = lambda signature, kind: {c.stem: signature[stems.index(c.stem)] for c in kind.channels}  # noqa: E731
    if SOLE_TEXT in kind.tensors and all(of(s, kind)[SOLE_TEXT.stem] for s in dataset.signatures):
        kind = unread(kind, TEXT.stem)
    signatures = [tuple(of(signature, kind).values()) for signature in dataset.signatures]
    distinct, numbers = bucketed(signatures)
    return dataclasses.replace(dataset, row_type=kind, signatures=distinct, buckets=numbers[dataset.buckets])


def open_dataset(
    data_path: DataPath,
    row_type: RowType,
    how: Streaming | None = None,
    manifest: Path | None = None,
    *,
    streams: Sequence[str] | None = None,
) -> Dataset:
    """Opens Parquet files: a file, a folder (searched recursively, sorted), a list of those, or `{path: repeat}`.

    Reads footers and the columns of shapes, nothing else.

    Args:
        how: how to stream it; None: read it as a map.
        manifest: JSON file outside the data that keeps what was read: made when missing, else checked against
            the files' sizes, and then no file is opened.
        streams: `"video"`, `"audio"`, those that the model has: the tensors of others are not read; None: all.

    Raises one UserError that lists every missing path, unreadable file, file of another row type, empty latent
    and bad repeat; and one for sets that `train.preprocess` has not finished.
    """
    if manifest is not None:
        streaming.check_place(manifest, _repeats(data_path))
    places, signatures, files = [], [], []
    for file, repeat in _index(data_path, row_type, manifest):
        rows = len(file.signatures)
        one = np.stack([np.full(rows, len(files)), np.arange(rows)], axis=1)
        places.append(np.tile(one, (repeat, 1)))
        signatures += file.signatures * repeat
        files.append(File(file.path, file.bounds))
    if not signatures:
        raise UserError(f"cannot open the dataset: no rows in {', '.join(str(f.path) for f in files)}")
    return narrow(Dataset(row_type, tuple(files), np.concatenate(places), *bucketed(signatures), how), streams)


def bucketed(signatures: Sequence[Signature]) -> tuple[tuple[Signature, ...], np.ndarray]:
    """The distinct signatures, sorted, and the number of each sample's, int64 `[n]`."""
    distinct = sorted(set(signatures))
    number = {signature: i for i, signature in enumerate(distinct)}
    return tuple(distinct), np.array([number[signature] for signature in signatures])


def common_shape(dataset: Dataset) -> tuple[int, ...]:
    """The latent shape `[C, T, H, W]` that most samples have; of videos where there are any, the longest of several."""
    counts = np.bincount(dataset.buckets)
    rank = lambda i: (dataset.shapes[i][1] > 1, counts[i], dataset.shapes[i][1:])  # noqa: E731
    return dataset.shapes[max(range(len(dataset.shapes)), key=rank)]


def first_fps(dataset: Dataset) -> float | None:
    """Frames per second of the first sample of several frames; None where there is none, or it is not noted."""
    if dataset.origin is not None:
        return dataset.origin.fps
    columns = ["fps", "num_frames"] if "fps" in dataset.row_type.schema.names else []
    for name in dataset.files if columns else ():
        with open_parquet(name.path) as file:
            rows = file.read(columns=columns, use_threads=False).to_pylist()
        videos = [row for row in rows if row["num_frames"] != 1]
        if videos:
            return rate_of(videos[0])
    return None


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


def check_tensors(dataset: Dataset, expected: Mapping[str, Sequence[int | None] | str], title: str) -> None:
    """Checks the sizes of tensors by their stems; None fits any size, a stem stands for that tensor's own shape.

    A tensor that is expected must be there. Raises one UserError with the first file and row of every signature that
    does not fit.
    """
    faults = []
    for bucket, signature in enumerate(dataset.signatures):
        shapes = dict(zip((c.stem for c in dataset.row_type.channels), signature, strict=True))
        for column in dataset.row_type.channels:
            shape, want = shapes[column.stem], expected.get(column.stem)
            want = shapes[want] if isinstance(want, str) else want
            if want is not None and (not shape or any(w not in (None, n) for n, w in zip(shape, want, strict=True))):
                rows = np.flatnonzero(dataset.buckets == bucket)
                found = _lettered(column, shape) if shape else "is missing"
                row, wanted = where(dataset, rows[0]), _lettered(column, want)
                faults.append(f"{row}: {column.stem} {found} ({len(rows)} such), expected {wanted}")
    raise_faults(title, faults)


def _lettered(column: TensorColumn, sizes: Sequence[int | None]) -> str:
    """`[sizes]`, with a dimension's letter where any size will do."""
    return f"[{', '.join(d if n is None else str(n) for d, n in zip(column.dims, sizes, strict=True))}]"


def check_text(dataset: Dataset, dim: int) -> None:
    """Checks that text embeddings `[L, D]` have D = `dim`. Raises UserError as `check_tensors`."""
    check_tensors(dataset, {"text_embedding": (None, dim)}, "text embeddings that do not fit the model")


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
            columns = columns_of(self.dataset.row_type)
            path = self.dataset.files[file].path
            with open_parquet(path) as parquet:
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
        if self.dataset.origin is not None:
            return self.dataset.origin.sample(row)
        bounds = self.dataset.files[file].bounds
        group = int(np.searchsorted(bounds, row, side="right")) - 1
        (stored,) = self._group(file, group).slice(row - bounds[group], 1).to_pylist()
        return decode_row(self.dataset.row_type, stored, where(self.dataset, index))

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples of `indices` as a batch."""
        return collate(self.dataset.row_type, [self.sample(index) for index in indices], indices)


def row_groups(dataset: Dataset) -> list[Group]:
    """Every row group in the order of the samples, repeats included."""
    groups = []
    for first in np.flatnonzero(dataset.places[:, 1] == 0).tolist():
        file = int(dataset.places[first, 0])
        bounds = dataset.files[file].bounds
        groups += [Group(file, g, first + a, b - a) for g, (a, b) in enumerate(itertools.pairwise(bounds)) if b > a]
    return groups


def _stream(dataset: Dataset, key: keys.Key, batch_size: int, start: int, share: Share) -> Iterator[Batch]:
    how, groups, columns = dataset.streaming, row_groups(dataset), columns_of(dataset.row_type)
    # The order of the epoch before is asked for as well: its last rows may be in this one's first batches.
    order_of = functools.lru_cache(maxsize=2)(
        lambda epoch: streaming.epoch_order(groups, key, epoch, how.shuffle_row_groups)
    )

    def read(group: Group, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        path = dataset.files[group.file].path
        stored = streaming.read_group(path, group.number, rows, columns, how.read_batch_size)
        for row, values in zip(rows, stored, strict=True):
            yield decode_row(dataset.row_type, values, where(dataset, group.first + row))

    entries = streaming.stream_entries(order_of, dataset.buckets)
    for _, plan in batches_from(entries, np.bincount(dataset.buckets), batch_size, start):
        own = plan[:, share.part(batch_size)]
        for batch in streaming.read_batches(own, order_of, len(dataset), read):
            indices, rows = zip(*batch, strict=True)
            yield collate(dataset.row_type, rows, indices)


# --- batches --------------------------------------------------------------------------------------------------


def epoch_order(dataset: Dataset, key: keys.Key, epoch: int) -> np.ndarray:
    """The samples in a map's order of an epoch, int64 `[n]`: shuffled within each bucket, and then all of them."""
    key = keys.fold_in(keys.fold_in(key, "epoch"), epoch)
    members = [np.flatnonzero(dataset.buckets == bucket) for bucket in range(len(dataset.shapes))]
    shuffled = [m[keys.permutation(keys.fold_in(key, bucket), len(m))] for bucket, m in enumerate(members)]
    return np.concatenate(shuffled)[keys.permutation(keys.fold_in(key, "order"), len(dataset))]


def map_entries(dataset: Dataset, key: keys.Key) -> Entries:
    """Entries of `train.order` for a map: samples, in the order of each epoch."""
    # An epoch's first batches hold what the one before left.
    order_of = functools.lru_cache(maxsize=2)(functools.partial(epoch_order, dataset, key))

    def entries(epoch: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        order = order_of(epoch)
        places = np.flatnonzero(dataset.buckets[order] == bucket)
        return order[places], places

    return entries


def batch_indices(dataset: Dataset, key: keys.Key, batch_size: int, start: int = 0) -> Iterator[list[int]]:
    """The sample indices of batches `start`, `start` + 1, ... of a map, without end."""
    for _, plan in batches_from(map_entries(dataset, key), np.bincount(dataset.buckets), batch_size, start):
        yield from plan.tolist()


class _Fetch(torch.utils.data.Dataset):
    """What a DataLoader worker does: a list of indices -> a batch, or the error to raise in the main process."""

    def __init__(self, dataset: Dataset):
        self.reader = Reader(dataset)

    def __getitem__(self, indices: list[int]) -> Batch | UserError:
        try:
            return self.reader.batch(indices)
        except UserError as error:
            return error


class _Source(torch.utils.data.IterableDataset):
    """What the one worker of a stream does: batches in order, or the error to raise in the main process."""

    def __init__(self, make: Callable[[], Iterator[Batch]]):
        self.make = make

    def __iter__(self) -> Iterator[Batch | UserError]:
        try:
            yield from self.make()
        except UserError as error:
            yield error


def _same(item):
    return item


def _ignore_signals(worker: int) -> None:
    """A signal to the whole process group is the main process's to answer: it ends the workers when it is done."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _loaded(source: torch.utils.data.Dataset, num_workers: int, **sampler) -> Iterator[Batch]:
    # Its own generator: a DataLoader without one advances torch's global random state.
    loader = torch.utils.data.DataLoader(
        source,
        batch_size=None,
        collate_fn=_same,
        num_workers=num_workers,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),
        **sampler,
    )
    for item in loader:
        if isinstance(item, UserError):
            raise item
        yield item


def batches(
    dataset: Dataset,
    *,
    key: keys.Key,
    batch_size: int,
    start: int = 0,
    num_workers: int = 0,
    share: Share = Share(),
) -> Iterator[Batch]:
    """This process's share of batches `start`, `start` + 1, ... since the start of training, without end.

    The samples of a batch depend on (dataset, key, batch_size, its number) alone (see `train.order`): not on how many
    processes share it, on where reading started, nor on `num_workers`, the number of background processes (0 reads
    inline; a stream takes at most one).

    Args:
        batch_size: samples of all processes together; each reads an equal share of every batch.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("start", start, 0), ("num_workers", num_workers, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} is {value!r}, expected an integer >= {least}")
    if batch_size % share.count:
        raise UserError(f"batch_size is {batch_size}, expected a multiple of the {share.count} that share it")
    if dataset.streaming is None:
        part = share.part(batch_size)
        own = (batch[part] for batch in batch_indices(dataset, key, batch_size, start))
        return _loaded(_Fetch(dataset), num_workers, sampler=own)
    if num_workers > 1:
        raise UserError(f"num_workers is {num_workers}, a stream is read by one process: expected 0 or 1")
    return _loaded(_Source(functools.partial(_stream, dataset, key, batch_size, start, share)), num_workers)
