"""Preprocessing from a metadata file of clips to a complete set: what `train.preprocess.job` needs to know of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from core.trees import Params
from infer.autoencoders import decode_frames
from infer.media import psnr
from infer.progress import tracked
from infer.words import counted
from nn import mel_codec, patch_codec
from train.preprocess.buckets import Bucket, Clip, Unusable, buckets_of, survey
from train.preprocess.encode import encode_video, read_clip, read_span, sound_of
from train.preprocess.finish import Outcome
from train.preprocess.job import How, Job, make_set
from train.preprocess.metadata import read_metadata
from train.preprocess.models import (
    Models,
    Sources,
    check_encoders,
    fit_codec,
    open_models,
    save_stand_ins,
    sound_config,
    stand_in_configs,
    stand_ins,
    strides,
    unused_faults,
    with_dtype,
)
from train.preprocess.record import identity
from train.preprocess.settings import Settings
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
        sources: folders of models; without a VAE a patch codec is fitted on the clips, without an audio VAE a mel codec
            on their sound, without a text encoder words are hashed.
        overwrite: replace a set that is complete, or of other settings, models or metadata.
        strict: a clip that cannot be used is an error.
        retry_unusable: make the parts again that have unusable clips.
        stop: of `train.preprocess.stop.stop_signals`; no clip is encoded once there is a signal.

    Raises:
        UserError: bad settings, metadata or models; a folder that is no set, or another set; no usable clip; a file
            that cannot be written.
        Stopped: a signal, see `train.preprocess.stop`.
    """
    device, kind = torch.device(device), row_type(settings.row_type)
    settings = with_dtype(settings, device)
    buckets = check_settings(settings, sources, kind, world)
    entries = read_metadata(data)
    sound = settings.row_type == "t2va"

    def opened(folder: Path, begun: Callable[[int], None]) -> Callable[[Clip], tuple[dict[str, Any], float | None]]:
        models = open_models(within(folder, sources, settings.row_type), settings, device, kind)
        return encoder(settings, models, kind, sources.vae is None, begun)

    job = Job(
        entries=entries,
        record=identity(entries, settings, sources, device),
        kind=kind,
        survey=lambda rows: survey(rows, entries, buckets, settings, sound),
        fit=lambda placed: fitted(placed, settings, sources, strict),
        open=opened,
    )
    return make_set(job, Path(output), How(overwrite, strict, retry_unusable, rank, world, log, stop))


def check_settings(settings: Settings, sources: Sources, kind: RowType, world: int) -> tuple[Bucket, ...]:
    """The buckets of the settings. Raises UserError for models that cannot be run, and for values that cannot be, or go
    with other models only.
    """
    stand_in_configs(settings)
    check_encoders(sources, kind)
    buckets = buckets_of(settings, *strides(sources))
    faults = unused_faults(settings, sources)
    for name in ("rows_per_group", "clips_per_file"):
        if getattr(settings, name) < 1:
            faults.append(f"{name} is {getattr(settings, name)}, expected at least 1")
    fits = {"vae": "a VAE", "audio_vae": "an audio VAE"}
    lacking = [fits[n] for n in stand_ins(kind.name) if n in fits and getattr(sources, n) is None]
    if lacking and world > 1:
        faults.append(
            f"{world} processes cannot fit one codec: give {' and '.join(lacking)}; or fit the codec once, with one "
            "process on some of the clips, and give that set's vae folder"
        )
    raise_faults("settings that cannot be used", faults)
    return buckets


# --- the models that a set makes itself -----------------------------------------------------------------------


def fitted(
    placed: Mapping[int, Clip | Unusable], settings: Settings, sources: Sources, strict: bool
) -> Callable[[Path], None]:
    """What saves the stand-ins of a set, fitted on its usable clips, in its folder."""
    codecs: dict[str, Params] = {}
    if sources.vae is None:
        codecs["vae"] = fit(placed, settings, strict)
    if "audio_vae" in stand_ins(settings.row_type) and sources.audio_vae is None:
        codecs["audio_vae"] = fit_sound(placed, settings, strict)
    made = [name for name in stand_ins(settings.row_type) if getattr(sources, name) is None]
    return lambda folder: save_stand_ins(folder, codecs, settings, made)


def fit(placed: Mapping[int, Clip | Unusable], settings: Settings, strict: bool) -> Params:
    """The patch codec of all usable clips; those that turn out not to be decodable are left out."""
    read = lambda clip: read_clip(clip.entry, clip.bucket, settings).frames  # noqa: E731
    frames = readable(placed, read, "reading clips", strict)
    return fit_codec(frames, patch_codec.PatchCodecConfig(latent_channels=settings.latent_channels))


def fit_sound(placed: Mapping[int, Clip | Unusable], settings: Settings, strict: bool) -> Params:
    """The mel codec of the sound of all usable clips, for the time that their frames are shown."""
    cfg = sound_config(settings)
    read = lambda clip: read_span(clip.entry, clip.bucket.frames / clip.fps, cfg.rate, settings)  # noqa: E731
    return mel_codec.fit(cfg, readable(placed, lambda clip: read(clip).waveform, "listening to clips", strict))


def readable(
    placed: Mapping[int, Clip | Unusable], read: Callable[[Clip], Tensor], label: str, strict: bool
) -> Iterator[Tensor]:
    """What `read` gives of every usable clip. Raises UserError when it fails for all, or with `strict` for one."""
    clips, faults = [clip for clip in placed.values() if isinstance(clip, Clip)], []
    for clip in tracked(clips, label, "clips"):
        try:
            one = read(clip)
        except UserError as error:
            faults.append(str(error))
            continue
        yield one
    if strict or len(faults) == len(clips):
        raise_faults(f"{len(faults)} of {counted(len(clips), 'clip')} cannot be used", faults)


def within(output: Path, sources: Sources, kind: str) -> Sources:
    """The sources with the models that the set itself holds in place of those that were not given."""
    held = {name: output / name for name in stand_ins(kind) if getattr(sources, name) is None}
    return Sources(**{**vars(sources), **held})


# --- a clip ---------------------------------------------------------------------------------------------------


def encoder(
    settings: Settings, models: Models, kind: RowType, measured: bool, begun: Callable[[int], None]
) -> Callable[[Clip], tuple[dict[str, Any], float | None]]:
    """The function of a clip: its sample, and where it is `measured` how well it is rebuilt, in dB."""

    def encode(clip: Clip) -> tuple[dict[str, Any], float | None]:
        begun(clip.row)
        video = read_clip(clip.entry, clip.bucket, settings)
        sound = sound_of(clip.entry, video, models, settings, kind)
        sample = encode_video(clip.entry, video, models, kind, sound)
        if not measured:
            return sample, None
        (rebuilt,) = decode_frames(models.vae, sample["vae_latent"][None])
        return sample, psnr(rebuilt, video.frames)

    return encode
