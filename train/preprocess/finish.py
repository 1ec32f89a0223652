"""The end of preprocessing: the report, the prompts for validation, and the mark that a set is complete."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pyarrow.parquet as pq
from torch import Tensor

from core.errors import raise_faults
from core.files import atomic_file
from infer.words import counted
from train.preprocess.buckets import SIZES, Unusable
from train.preprocess.metadata import Entry
from train.preprocess.parts import (
    Part,
    PartReport,
    as_json,
    disk_faults,
    merged,
    read_report,
    write_if_new,
)
from train.preprocess.record import MANIFEST
from train.rows import PICTURE, decode_tensor, row_type, stored_columns

REPORT, VALIDATION = "report.json", "validation.json"
NUM_PROMPTS = 4
LISTED = 20  # unusable clips in a message; the report has all


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call of `preprocess` leaves: whether the set is complete, its clips and rows, and the unusable clips.

    `psnr` is the mean distance in dB of the clips from their latents decoded again, where a codec was fitted. Of a set
    that other ranks are still making, the figures are those of this rank's parts.
    """

    complete: bool
    clips: int
    rows: int
    unusable: tuple[Unusable, ...]
    psnr: float | None = None


def listed(unusable: Sequence[Unusable]) -> list[str]:
    """The first of the unusable clips, and how many more there are."""
    more = len(unusable) - LISTED
    return [str(clip) for clip in unusable[:LISTED]] + ([f"and {more} more, see {REPORT}"] if more > 0 else [])


def outcome(report: PartReport, clips: int, complete: bool) -> Outcome:
    """The outcome of the parts that a report covers."""
    psnr = sum(report.psnr) / len(report.psnr) if report.psnr else None
    return Outcome(complete, clips, report.rows, report.unusable, psnr)


def finish(
    folder: Path, record: dict[str, Any], entries: Sequence[Entry], parts: Sequence[Part], *, strict: bool
) -> Outcome | None:
    """Completes a set whose parts are all there, whoever made them; None while some are missing.

    Files that are as they should be stay untouched. Raises UserError when no clip could be used, and with `strict`
    when one could not.
    """
    reports = [read_report(folder, part) for part in parts]
    if any(report is None for report in reports):
        return None
    whole = merged(reports)
    write_if_new(folder / REPORT, as_json(whole, len(entries)))
    if strict or not whole.rows:
        clips = counted(len(entries), "clip")
        raise_faults(f"{folder}: {len(whole.unusable)} of {clips} cannot be used", listed(whole.unusable))
    if record["settings"].get("captions", True):
        data = [_prompt(folder, record, parts, whole.unusable, row, entries[row]) for row in _captions(entries, whole)]
        write_if_new(folder / VALIDATION, {"data": data})
    done = outcome(whole, len(entries), True)
    quality = {} if done.psnr is None else {"codec_psnr_db": round(done.psnr, 2)}
    counts = {"clips": whole.rows, "unusable_clips": len(whole.unusable), "buckets": whole.buckets}
    write_if_new(folder / MANIFEST, {**record, **counts, **quality, "complete": True})
    return done


def _captions(entries: Sequence[Entry], report: PartReport) -> list[int]:
    """The rows of the first usable clips with different captions."""
    unusable, rows = {clip.row for clip in report.unusable}, {}
    for row, entry in enumerate(entries):
        if row not in unusable:
            rows.setdefault(entry.caption, row)
        if len(rows) == NUM_PROMPTS:
            break
    return list(rows.values())


def _prompt(folder: Path, record, parts: Sequence[Part], unusable: Sequence[Unusable], row: int, entry: Entry) -> dict:
    """An entry of validation.json, of the size of the clip's sample, which sound alone has not; for i2v rows with the
    first frame as a PNG.
    """
    part = next(part for part in parts if part.first <= row < part.stop)
    skipped = sum(part.first <= clip.row < row for clip in unusable)
    pictured = record["row_type"] == "i2v"
    path, place = part.data(folder), row - part.first - skipped
    sizes = [name for name in SIZES if name in row_type(record["row_type"]).schema.names]
    columns = [*sizes, *(stored_columns(PICTURE.stem) if pictured else [])]
    stored = pq.read_table(path, columns=columns, use_threads=False).slice(place, 1).to_pylist()[0] if columns else {}
    sized = {"caption": entry.caption, **{name: stored[name] for name in sizes}}
    if not pictured:
        return sized
    name = Path("validation") / f"{row:06d}.png"
    _write_png_if_new(folder / name, decode_tensor(PICTURE, stored, f"{path}, row {place}").permute(1, 2, 0))
    return {**sized, "image": str(name)}


def _write_png_if_new(path: Path, picture: Tensor) -> None:
    if not path.is_file() or path.read_bytes() != png(picture):
        with disk_faults(path):
            write_png(path, picture)


def png(picture: Tensor) -> bytes:
    """A picture uint8 `[H, W, 3]` as a PNG, which keeps it to the bit."""
    height, width, _ = picture.shape
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt, codec.time_base = width, height, "rgb24", Fraction(1, 25)
    frame = av.VideoFrame.from_ndarray(picture.contiguous().numpy(), format="rgb24")
    return b"".join(bytes(packet) for packet in [*codec.encode(frame), *codec.encode(None)])


def write_png(path: Path, picture: Tensor) -> None:
    """Writes `png(picture)`; the file appears whole or not at all."""
    with atomic_file(path) as part:
        part.write_bytes(png(picture))
