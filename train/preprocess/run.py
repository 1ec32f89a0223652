"""Preprocessing from a metadata file to a complete set: one rank's share of it, resumable at any point."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from core.files import atomic_folder, check_target, write_json
from core.trees import Params
from infer.autoencoders import decode_frames
from infer.media import psnr
from infer.progress import progress, tracked
from infer.words import counted
from nn import patch_codec
from train.preprocess.buckets import Bucket, Clip, Unusable, buckets_of, survey
from train.preprocess.encode import encode_video, read_clip
from train.preprocess.finish import LISTED, Outcome, finish, listed, outcome
from train.preprocess.metadata import Entry, read_metadata
from train.preprocess.models import (
    Models,
    Sources,
    check_encoders,
    fit_codec,
    open_models,
    save_stand_ins,
    stand_in_configs,
    strides,
    unused_faults,
    with_dtype,
)
from train.preprocess.parts import (
    Part,
    disk_faults,
    edited,
    merged,
    parts_of,
    read_report,
    write_if_new,
    write_part,
)
from train.preprocess.record import (
    MANIFEST,
    MODELS,
    differences,
    identity,
    model_entry,
    read_record,
)
from train.preprocess.settings import Settings
from train.preprocess.stop import Stopped
from train.rows import RowType, row_type


def preprocess(
    data: str | Path,
    output: str | Path,
    settings: Settings,
    sources: Sources = Sources(),
    *,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    strict: bool = False,
    retry_unusable: bool = False,
    rank: int = 0,
    world: int = 1,
    log: Callable[[str], None] = print,
    stop: Sequence[int] = (),
) -> Outcome:
    """Encodes the clips of the metadata file `data` into the set `output`, or goes on with one that was begun.

    Part i of the set belongs to rank i % `world`. Finished parts are not touched, but made again when one of their
    clips has other contents by now (`log` is told which). Everything is checked before the first clip is encoded, and
    until then nothing is written.

    Args:
        sources: folders of models; without a VAE a patch codec is fitted on the clips, without a text encoder words are
            hashed.
        overwrite: replace a set that is complete, or of other settings, models or metadata.
        strict: a clip that cannot be used is an error.
        retry_unusable: make the parts again that have unusable clips.
        stop: of `train.preprocess.stop.stop_signals`; no clip is encoded once there is a signal.

    Raises:
        UserError: bad settings, metadata or models; a folder that is no set, or another set; no usable clip; a file
            that cannot be written.
        Stopped: a signal, see `train.preprocess.stop`.
    """
    output, device = Path(output), torch.device(device)
    settings = with_dtype(settings, device)
    buckets = check_settings(settings, sources, world)
    entries = read_metadata(data)
    record = identity(entries, settings, sources, device)
    parts = parts_of(len(entries), settings.clips_per_file)
    started = opened(output, record, overwrite, world)
    if started is not None:
        record = started
    mine = [part for part in parts if part.number % world == rank]
    with clips_counted(output, parts, started is not None):
        todo = mine if started is None else owed(output, mine, entries, retry_unusable, log)
        rows = range(len(entries)) if strict else [row for part in todo for row in range(part.first, part.stop)]
        placed = survey(rows, entries, buckets, settings) if rows else {}
        check_usable(placed, started is None and world == 1, strict)
        if started is None:
            codec = None if sources.vae is not None else fit(placed, settings, strict)
            record = create(output, record, codec, settings, sources, alone=world == 1)
    with clips_counted(output, parts, True):
        if todo:
            record = {**record, "complete": False}
            write_if_new(output / MANIFEST, record)
            make_parts(output, todo, placed, settings, sources, device, stop, strict=strict)
        done = finish(output, record, entries, parts, strict=strict)
    if done is not None:
        return done
    own = merged([report for part in mine if (report := read_report(output, part)) is not None])
    return outcome(own, sum(part.stop - part.first for part in mine), False)


@contextlib.contextmanager
def clips_counted(output: Path, parts: Sequence[Part], begun: bool) -> Iterator[None]:
    """Notes in a Stopped how many clips are in finished parts of the set, whoever made them, if the set is `begun`."""
    try:
        yield
    except Stopped as stopped:
        if begun:
            size = lambda part: part.stop - part.first  # noqa: E731
            stopped.clips = sum(map(size, parts))
            stopped.done = sum(size(part) for part in parts if read_report(output, part) is not None)
        raise


# --- before anything is written -------------------------------------------------------------------------------


def check_settings(settings: Settings, sources: Sources, world: int) -> tuple[Bucket, ...]:
    """The buckets of the settings. Raises UserError for models that cannot be run, and for values that cannot be, or go
    with other models only.
    """
    stand_in_configs(settings)
    check_encoders(sources)
    buckets = buckets_of(settings, *strides(sources))
    faults = unused_faults(settings, sources)
    for name in ("rows_per_group", "clips_per_file"):
        if getattr(settings, name) < 1:
            faults.append(f"{name} is {getattr(settings, name)}, expected at least 1")
    if sources.vae is None and world > 1:
        faults.append(
            f"{world} processes cannot fit one codec: give a VAE; or fit the codec once, with one process on some of "
            "the clips, and give that set's vae folder"
        )
    raise_faults("settings that cannot be used", faults)
    return buckets


def opened(output: Path, record: dict[str, Any], overwrite: bool, world: int) -> dict[str, Any] | None:
    """The record of a set to go on with; None where there is none, or one to be replaced.

    Raises UserError for a folder that holds something else or cannot be written, and for a set of other settings,
    models or metadata, listing what differs.
    """
    check_target(output / MANIFEST)
    # Other ranks may be at work: temporary names begin with a dot, and the record comes after the stand-in.
    begun = {"text_encoder"} if world > 1 else set()
    names = {p.name for p in output.iterdir()} if output.is_dir() else set()
    held = [name for name in names if not name.startswith(".") and name not in begun]
    found = read_record(output)
    if found is None and held:
        raise UserError(f"{output}: already exists and is not a preprocessed set; give another --output")
    if found is None:
        return None
    other = differences(found, record)
    if not overwrite:
        raise_faults(f"{output}: already holds another set; give another --output, or --overwrite", other)
    if overwrite and (other or found["complete"]):
        if world > 1:
            raise UserError(f"{output}: {world} processes cannot replace a set: remove it first")
        return None
    return found


def owed(
    output: Path, mine: Sequence[Part], entries: Sequence[Entry], retry_unusable: bool, log: Callable[[str], None]
) -> list[Part]:
    """The parts to make: unfinished ones, those with edited clips, and with `retry_unusable` those with unusable ones.

    A repaired clip that had been unusable counts as one of the last, not as edited.
    """
    reports = {part: read_report(output, part) for part in mine}
    rows = {part: [] if report is None else edited(report, entries) for part, report in reports.items()}
    names = [entries[row].name for found in rows.values() for row in found]
    if names:
        shown = ", ".join(names[:LISTED]) + (" ..." if len(names) > LISTED else "")
        parts = counted(sum(map(bool, rows.values())), "part")
        log(f"{counted(len(names), 'clip')} changed since being encoded, so {parts} will be made again: {shown}")
    retried = lambda report: retry_unusable and len(report.unusable) > 0  # noqa: E731
    return [part for part, report in reports.items() if report is None or rows[part] or retried(report)]


def check_usable(placed: dict[int, Clip | Unusable], all_new: bool, strict: bool) -> None:
    """Refuses clips of which none is usable when they are `all_new`, a whole set; with `strict` any unusable one."""
    unusable = [clip for clip in placed.values() if isinstance(clip, Unusable)]
    if strict or (all_new and len(unusable) == len(placed)):
        raise_faults(f"{len(unusable)} of {counted(len(placed), 'clip')} cannot be used", listed(unusable))


# --- making a set ---------------------------------------------------------------------------------------------


def fit(placed: dict[int, Clip | Unusable], settings: Settings, strict: bool) -> Params:
    """The patch codec of all usable clips; those that turn out not to be decodable are left out."""
    clips, faults = [clip for clip in placed.values() if isinstance(clip, Clip)], []

    def frames() -> Iterator[Tensor]:
        for clip in tracked(clips, "reading clips", "clips"):
            try:
                yield read_clip(clip.entry, clip.bucket, settings).frames
            except UserError as error:
                faults.append(str(error))
        if strict or len(faults) == len(clips):
            raise_faults(f"{len(faults)} of {counted(len(clips), 'clip')} cannot be used", faults)

    return fit_codec(frames(), patch_codec.PatchCodecConfig(latent_channels=settings.latent_channels))


def create(
    output: Path, record: dict[str, Any], codec: Params | None, settings: Settings, sources: Sources, *, alone: bool
) -> dict[str, Any]:
    """Begins a set: the models made here, and its record. Returns the record.

    `alone`, the folder appears at once, in place of an older one; else other ranks may write the same files there.
    """
    own = [name for name in MODELS if record["models"].get(name) == {"folder": name}]

    def begin(folder: Path) -> dict[str, Any]:
        begun = {**record, "models": dict(record["models"])}
        save_stand_ins(folder, codec, settings, own)
        for name in own:
            begun["models"][name] = model_entry(folder / name, name)
        write_json(folder / MANIFEST, begun)
        return begun

    with disk_faults(output, "nothing was begun"):
        if not alone:
            return begin(output)
        with atomic_folder(output) as part:
            return begin(part)


def make_parts(
    output: Path,
    todo: Sequence[Part],
    placed: dict[int, Clip | Unusable],
    settings: Settings,
    sources: Sources,
    device: torch.device,
    stop: Sequence[int] = (),
    *,
    strict: bool,
) -> None:
    """Writes parts of a set, with the models in memory throughout."""
    fitted = sources.vae is None
    models = open_models(within(output, sources), settings, device)
    kind, count = row_type(settings.row_type), sum(part.stop - part.first for part in todo)
    with progress("encoding", count, "clips") as update:
        before = 0
        for part in todo:
            clips = [placed[row] for row in range(part.first, part.stop)]
            encode = encoder(
                settings, models, kind, fitted, lambda row, b=before, p=part: update(b + row - p.first), stop
            )
            write_part(output, part, clips, encode, kind, settings.rows_per_group, strict=strict)
            before += len(clips)
            update(before)


def within(output: Path, sources: Sources) -> Sources:
    """The sources with the models that the set itself holds in place of those that were not given."""
    place = lambda given, name: output / name if given is None else given  # noqa: E731
    return Sources(place(sources.vae, "vae"), place(sources.text_encoder, "text_encoder"), sources.image_encoder)


def encoder(
    settings: Settings,
    models: Models,
    kind: RowType,
    fitted: bool,
    update: Callable[[int], None],
    stop: Sequence[int] = (),
) -> Callable[[Clip], tuple[dict[str, Any], float | None]]:
    """The function that `write_part` calls: a clip's sample, and for a fitted codec how well it is rebuilt, in dB."""

    def encode(clip: Clip) -> tuple[dict[str, Any], float | None]:
        update(clip.row)
        if stop:
            raise Stopped(stop[0])
        video = read_clip(clip.entry, clip.bucket, settings)
        sample = encode_video(clip.entry, video, models, kind)
        if not fitted:
            return sample, None
        (rebuilt,) = decode_frames(models.vae, sample["vae_latent"][None])
        return sample, psnr(rebuilt, video.frames)

    return encode
