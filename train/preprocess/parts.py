"""A set is made in parts: consecutive rows of the metadata, each a Parquet file with its report.

`data/part-00012.parquet` and `reports/part-00012.json` appear whole or not at all. The report comes last and notes the
file's size, so a part is finished when its report is there and fits its file. A part without a usable clip has
no Parquet file. Finished parts are not touched again while the clips in them are what they were.
"""

import contextlib
import dataclasses
import errno
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import UserError
from core.files import atomic_file, read_json, write_json
from train.preprocess.buckets import Clip, Unusable, reason_of
from train.preprocess.metadata import Entry
from train.preprocess.stamps import Stamp, changed
from train.rows import RowType, encode_row

DATA, REPORTS = "data", "reports"
KEPT = "finished parts are kept, and the same command goes on with them"
# A page holds one row, so that streaming reads a row at a time; latents do not repeat, so a dictionary is a waste.
PAGES = {"use_dictionary": False, "write_batch_size": 1, "data_page_size": 1 << 12}


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows `first` to `stop - 1` of the metadata."""

    number: int
    first: int
    stop: int

    @property
    def name(self) -> str:
        """Of its files, without their endings."""
        return f"part-{self.number:05d}"

    def data(self, folder: Path) -> Path:
        """Its Parquet file in a set."""
        return folder / DATA / f"{self.name}.parquet"

    def report(self, folder: Path) -> Path:
        """Its report in a set."""
        return folder / REPORTS / f"{self.name}.json"


def parts_of(clips: int, clips_per_file: int) -> list[Part]:
    """The parts of a metadata file with so many rows."""
    starts = range(0, clips, clips_per_file)
    return [Part(i, start, min(start + clips_per_file, clips)) for i, start in enumerate(starts)]


@dataclasses.dataclass(frozen=True)
class PartReport:
    """What became of a part's clips: rows per bucket, and those that were not used.

    `psnr` has the distance in dB of every clip from its decoded latents, where that was measured; `stamps` what the
    files of the used clips were, by their rows of the metadata.
    """

    buckets: dict[str, int]
    unusable: tuple[Unusable, ...]
    psnr: tuple[float, ...] = ()
    stamps: dict[int, Stamp] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of the Parquet file."""
        return sum(self.buckets.values())


def read_report(folder: Path, part: Part) -> PartReport | None:
    """The report of a finished part; None for one that has to be made."""
    path, data = part.report(folder), part.data(folder)
    with contextlib.suppress(UserError, KeyError, TypeError, ValueError, AttributeError):
        noted = read_json(path)
        stamps = {int(row): Stamp(**one) for row, one in noted.get("stamps", {}).items()}
        unusable = tuple(Unusable(**entry) for entry in noted["unusable"])
        report = PartReport(noted["buckets"], unusable, tuple(noted["psnr"]), stamps)
        size = data.stat().st_size if data.is_file() else 0
        return report if (noted["rows"], noted["bytes"]) == (report.rows, size) else None
    return None


def edited(report: PartReport, entries: Sequence[Entry]) -> list[int]:
    """The rows of a part whose clips have other contents than when they were encoded, see `stamps.changed`."""
    return [row for row, before in report.stamps.items() if changed(entries[row].path, before)]


@contextlib.contextmanager
def disk_faults(path: Path, kept: str = KEPT) -> Iterator[None]:
    """Turns what the system says while `path` is written (a full disk) into a UserError with its name and `kept`."""
    try:
        yield
    except OSError as error:
        full = "make room; " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; {full}{kept}") from error


def write_rows(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema, rows_per_group: int) -> int:
    """Writes Parquet in row groups of `rows_per_group`, holding one group in memory; returns the number of rows.

    The file appears whole, or not at all when there are no rows.
    """
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    count, group = 0, []
    with _parquet(path, schema) as write:
        for row in rows:
            group.append(row)
            if len(group) == rows_per_group:
                count, group = count + write(group), []
        count += write(group)
    return count


@contextlib.contextmanager
def _parquet(path: Path, schema: pa.Schema) -> Iterator[Callable[[list[dict[str, Any]]], int]]:
    """Yields `write(group)`, which opens the file at the first rows that there are."""
    with contextlib.ExitStack() as stack:
        writers: list[pq.ParquetWriter] = []

        def write(group: list[dict[str, Any]]) -> int:
            if group and not writers:
                part = stack.enter_context(atomic_file(path))
                writers.append(stack.enter_context(pq.ParquetWriter(part, schema, **PAGES)))
            if group:
                writers[0].write_table(pa.Table.from_pylist(group, schema))
            return len(group)

        yield write


def write_part(
    folder: Path,
    part: Part,
    clips: Sequence[Clip | Unusable],
    encode: Callable[[Clip], tuple[dict[str, Any], float | None]],
    row_type: RowType,
    rows_per_group: int,
    *,
    strict: bool = False,
) -> PartReport:
    """Encodes the usable `clips` of a part and writes its files.

    `encode` gives a sample, and a PSNR or None. A clip that it cannot read joins the unusable ones; with `strict` the
    UserError is raised and nothing of the part is written.
    """
    buckets, psnr, stamps, unusable = Counter(), [], {}, [clip for clip in clips if isinstance(clip, Unusable)]

    def rows() -> Iterator[dict[str, Any]]:
        for clip in clips:
            if isinstance(clip, Unusable):
                continue
            try:
                sample, db = encode(clip)
            except UserError as error:
                if strict:
                    raise
                unusable.append(Unusable(clip.row, clip.entry.name, reason_of(clip.entry, error)))
                continue
            except OSError as error:  # of a model, not of the file that is written
                raise UserError(f"{clip.entry.path}: cannot be encoded: {error}; {KEPT}") from error
            buckets[str(clip.bucket)] += 1
            psnr.extend([] if db is None else [round(db, 4)])
            stamps.update({} if clip.stamp is None else {clip.row: clip.stamp})
            yield encode_row(row_type, sample)

    data, place = part.data(folder), part.report(folder)
    place.unlink(missing_ok=True)
    with disk_faults(data):
        write_rows(data, rows(), row_type.schema, rows_per_group)
    report = PartReport(dict(buckets), tuple(sorted(unusable, key=lambda clip: clip.row)), tuple(psnr), stamps)
    size = data.stat().st_size if report.rows else 0
    with disk_faults(place):
        write_json(place, {"rows": report.rows, "bytes": size, **dataclasses.asdict(report)})
    return report


def merged(reports: Sequence[PartReport]) -> PartReport:
    """The reports of several parts as one, without stamps."""
    buckets = sum((Counter(report.buckets) for report in reports), Counter())
    unusable = tuple(clip for report in reports for clip in report.unusable)
    return PartReport(dict(buckets), unusable, tuple(db for report in reports for db in report.psnr))


def as_json(report: PartReport, clips: int) -> Mapping[str, Any]:
    """`report.json`: counts, and every unusable clip with its row of the metadata, its name and the reason."""
    return {
        "clips": clips,
        "rows": report.rows,
        "unusable_clips": len(report.unusable),
        "buckets": report.buckets,
        "unusable": [dataclasses.asdict(clip) for clip in report.unusable],
    }


def write_if_new(path: Path, data: Any) -> None:
    """Writes JSON unless the file holds just that."""
    with contextlib.suppress(UserError):
        if read_json(path) == json.loads(json.dumps(data)):
            return
    with disk_faults(path):
        write_json(path, data)
