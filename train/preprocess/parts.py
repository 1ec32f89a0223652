"""A set is made in parts: consecutive rows of the metadata, each a Parquet file with its report.

`data/part-00012.parquet` and `reports/part-00012.json` appear whole or not at all. The report comes last and notes the
file's size, so a part is finished when its report is there and fits its file. A part without a usable clip has
no Parquet file. Finished parts are not touched again.
"""

import contextlib
import dataclasses
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
from train.rows import RowType, encode_row

DATA, REPORTS = "data", "reports"
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

    `psnr` has the distance in dB of every clip from its decoded latents, where that was measured.
    """

    buckets: dict[str, int]
    unusable: tuple[Unusable, ...]
    psnr: tuple[float, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the Parquet file."""
        return sum(self.buckets.values())


def read_report(folder: Path, part: Part) -> PartReport | None:
    """The report of a finished part; None for one that has to be made."""
    path, data = part.report(folder), part.data(folder)
    with contextlib.suppress(UserError, KeyError, TypeError):
        noted = read_json(path)
        report = PartReport(
            noted["buckets"], tuple(Unusable(**entry) for entry in noted["unusable"]), tuple(noted["psnr"])
        )
        size = data.stat().st_size if data.is_file() else 0
        return report if (noted["rows"], noted["bytes"]) == (report.rows, size) else None
    return None


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
    buckets, psnr, unusable = Counter(), [], [clip for clip in clips if isinstance(clip, Unusable)]

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
            buckets[str(clip.bucket)] += 1
            psnr.extend([] if db is None else [round(db, 4)])
            yield encode_row(row_type, sample)

    part.report(folder).unlink(missing_ok=True)
    data = part.data(folder)
    write_rows(data, rows(), row_type.schema, rows_per_group)
    report = PartReport(dict(buckets), tuple(sorted(unusable, key=lambda clip: clip.row)), tuple(psnr))
    size = data.stat().st_size if report.rows else 0
    write_json(part.report(folder), {"rows": report.rows, "bytes": size, **dataclasses.asdict(report)})
    return report


def merged(reports: Sequence[PartReport]) -> PartReport:
    """The reports of several parts as one."""
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
    write_json(path, data)
