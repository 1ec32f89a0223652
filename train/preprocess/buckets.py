"""Buckets: the sizes that samples may have, and the rule by which a clip gets one of them.

A clip is resampled in time (`fps`) and its frames are counted. Of the buckets with at most so many frames it gets one
of those with the most; of these the nearest in aspect ratio, |log(w / h) - log(W / H)|; of these the largest. Then its
first frames are scaled until they cover the bucket, and the centre is cropped. A clip is misshapen when more than
`max_crop` of its area would be lost, or when it would be enlarged more than `max_upscale` times.
"""

import concurrent.futures
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Sequence

from core.errors import UserError, raise_faults
from core.geometry import check_geometry
from infer.media import ClipInfo, frame_rate, probe
from infer.progress import progress
from infer.sound import has_sound
from infer.words import counted
from train.preprocess.metadata import Entry
from train.preprocess.settings import Encoding
from train.preprocess.stamps import Stamp, stamp

FORM = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?")
SIZES = ("num_frames", "height", "width")
THREADS = 8  # that read packets: waiting for files, not computing


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A size of samples, in pixels and frames; pictures have one frame."""

    width: int
    height: int
    frames: int = 1

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")


@dataclasses.dataclass(frozen=True)
class Clip:
    """A usable clip: its row in the metadata, its entry, its bucket, its rate after resampling, and what its file was
    when it was probed (None where it was gone a moment later).
    """

    row: int
    entry: Entry
    bucket: Bucket
    fps: float
    stamp: Stamp | None


@dataclasses.dataclass(frozen=True)
class Unusable:
    """A clip that cannot be used, and why."""

    row: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.name}: {self.reason}"


# --- which buckets there are ----------------------------------------------------------------------------------


def _parsed(settings: Encoding) -> tuple[list[Bucket], list[str]]:
    """The buckets that the settings name in either form, and the faults of their form."""
    given = [name for name in SIZES if getattr(settings, name) is not None]
    if settings.buckets is None:
        missing = [name for name in SIZES if name not in given]
        if missing:
            return [], [f"{', '.join(missing)} missing: give buckets, or all of num_frames, height and width"]
        return [Bucket(settings.width, settings.height, settings.num_frames)], []
    matches = {text: FORM.fullmatch(text) for text in settings.buckets}
    faults = [f"bucket {text!r}: expected WxHxFRAMES or WxH" for text, match in matches.items() if match is None]
    faults += [f"{name}: give either it or buckets" for name in given]
    faults += [] if settings.buckets else ["buckets is empty, expected at least one"]
    found = [Bucket(*(int(n) for n in match.groups("1"))) for match in map(FORM.fullmatch, settings.buckets) if match]
    faults += [f"bucket {b}: given {found.count(b)} times" for b in dict.fromkeys(found) if found.count(b) > 1]
    return found, faults


def _geometry_faults(bucket: Bucket, temporal: int, spatial: int) -> list[str]:
    try:
        check_geometry(bucket.frames, bucket.height, bucket.width, temporal=temporal, spatial=spatial)
    except UserError as error:
        return [f"bucket {bucket}: {line.removeprefix('  - ')}" for line in str(error).splitlines()[1:]]
    return []


def buckets_of(settings: Encoding, temporal: int, spatial: int) -> tuple[Bucket, ...]:
    """The buckets of the settings, checked against an autoencoder's strides (frames and pixels per latent).

    Raises one UserError that lists every fault, with the nearest valid sizes.
    """
    found, faults = _parsed(settings)
    for bucket in found:
        faults += _geometry_faults(bucket, temporal, spatial)
    if settings.fps is not None:
        try:
            frame_rate(settings.fps)
        except UserError as error:
            faults.append(str(error))
    if not 0 <= settings.max_crop < 1:
        faults.append(f"max_crop is {settings.max_crop}, expected at least 0 and below 1")
    if settings.max_upscale < 1:
        faults.append(f"max_upscale is {settings.max_upscale}, expected at least 1")
    raise_faults("sizes that cannot be used", faults)
    return tuple(found)


# --- which one a clip gets ------------------------------------------------------------------------------------


def cover(info: ClipInfo, bucket: Bucket) -> tuple[float, float]:
    """By what factor a clip is enlarged to cover a bucket, and the share of its area that is then cropped."""
    scale = max(bucket.height / info.height, bucket.width / info.width)
    return scale, 1 - bucket.height * bucket.width / (info.height * info.width * scale**2)


def choose(info: ClipInfo, buckets: Sequence[Bucket], settings: Encoding) -> Bucket:
    """The bucket of a clip by the rule above. Raises UserError with the numbers: too short, or misshapen."""
    fitting = [b for b in buckets if b.frames <= info.frames]
    if not fitting:
        has = counted(info.frames, "frame")
        if info.frames != info.in_file:
            has = f"{counted(info.in_file, 'frame')}, {info.frames} after resampling to {info.fps:g} fps"
        raise UserError(f"too short: it has {has}; the shortest bucket takes {min(b.frames for b in buckets)}")
    longest = max(b.frames for b in fitting)
    aspect = math.log(info.width / info.height)
    bucket = min(
        (b for b in fitting if b.frames == longest),
        key=lambda b: (abs(aspect - math.log(b.width / b.height)), -b.width * b.height),
    )
    scale, crop = cover(info, bucket)
    faults = [f"{crop:.0%} of its area would be cropped, at most {settings.max_crop:.0%} may be"]
    faults = faults if crop > settings.max_crop else []
    if scale > settings.max_upscale:
        faults.append(f"it would be enlarged {scale:.2f} times, at most {settings.max_upscale:g} are allowed")
    if faults:
        raise UserError(f"misshapen: {info.width}x{info.height} for bucket {bucket}: {'; '.join(faults)}")
    return bucket


def reason_of(entry: Entry, error: UserError) -> str:
    """What an error says of a clip, without its path."""
    return str(error).removeprefix(f"{entry.path}: ")


def place(
    row: int, entry: Entry, buckets: Sequence[Bucket], settings: Encoding, sound: bool = False
) -> Clip | Unusable:
    """A clip with its bucket, or why it has none; see `infer.media.probe` for what is read.

    `sound`: one without an audio stream cannot be used, unless the settings allow it.
    """
    try:
        info = probe(entry.path, settings.fps)
        if sound and not settings.allow_silent and not has_sound(entry.path):
            raise UserError("silent: it has no audio stream, and t2va rows need one (allow_silent takes it as silence)")
        return Clip(row, entry, choose(info, buckets, settings), info.fps, stamp(entry.path))
    except UserError as error:
        return Unusable(row, entry.name, reason_of(entry, error))


def survey(
    rows: Sequence[int], entries: Sequence[Entry], buckets: Sequence[Bucket], settings: Encoding, sound: bool = False
) -> dict[int, Clip | Unusable]:
    """`place` for the entries of these rows, by several threads, in the order of `rows`."""

    def found(pool: concurrent.futures.Executor) -> Iterator[tuple[int, Clip | Unusable]]:
        placed = pool.map(lambda row: place(row, entries[row], buckets, settings, sound), rows)
        with progress("probing clips", len(rows), "clips") as update:
            for done, (row, one) in enumerate(zip(rows, placed, strict=True), start=1):
                update(done)
                yield row, one

    pool = concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    try:
        return dict(found(pool))
    finally:
        pool.shutdown(cancel_futures=True)  # a signal does not wait for the clips that are still to be probed
