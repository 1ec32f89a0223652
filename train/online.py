"""Encoding on the fly: a data set whose samples are encoded when a batch asks for them.

Clips are indexed as in preprocessing, and `encode_clip` makes the samples, so batches are to the bit those of a set
that was preprocessed with the same settings, models, device and number of threads; order and epochs are the same.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.errors import UserError, raise_faults
from infer.autoencoders import load_audio_vae, load_vae
from infer.encoders import UMT5, read_mapping
from infer.words import counted
from nn import text_hash
from train.config import Data, Encode
from train.data import Dataset, Origin, bucketed
from train.preprocess.buckets import Bucket, Clip, Unusable, buckets_of, survey
from train.preprocess.encode import encode_clip
from train.preprocess.metadata import Entry, read_metadata
from train.preprocess.models import (
    BESIDE,
    CONFIG,
    Models,
    Sources,
    beside,
    check_encoders,
    find_sources,
    is_gemma,
    ltx2_config,
    open_models,
    stand_ins,
    strides,
    with_dtype,
)
from train.preprocess.record import MODELS, fingerprint
from train.preprocess.settings import Encoding, noted
from train.preprocess.stamps import Stamp, changed
from train.rows import AUDIO, AUDIO_TEXT, TEXT, RowType, Signature, narrowed, signature_of

WIDTHS = {UMT5: "d_model", text_hash.MODEL_TYPE: "dim"}  # the entry of a text encoder's config


def sources_of(encode: Encode, row_type: str, log: Callable[[str], None] = print) -> Sources:
    """The folders of the models. Raises UserError for those that are not there: nothing is fitted on the fly."""
    given = (encode.model, encode.vae, encode.text_encoder, encode.image_encoder, encode.audio_vae)
    sources = find_sources(*given, row_type=row_type, log=log)
    missing = [name for name in stand_ins(row_type) if getattr(sources, name) is None]
    raise_faults("models that encode needs", [f"{name}: give its folder, or model" for name in missing])
    return sources


def encode_folders(data: Data) -> dict[str, Path | None] | None:
    """The folders of the models that a recipe encodes with; None for preprocessed data."""
    if data.encode is None:
        return None
    sources = sources_of(data.encode, data.preprocessed_data_type, log=lambda text: None)
    found = {name: getattr(sources, name) for name in MODELS}
    return found | {name: beside(name, found[other]) for name, other in BESIDE.items() if name not in found}


def signatures_of(kind: RowType, clips: Sequence[Clip], sources: Sources) -> list[Signature]:
    """The signatures of the samples of clips, from the configs of the models."""
    vae, widths = load_vae(sources.vae, keep=False), text_widths(kind, sources)
    fixed: dict[str, tuple[int, ...]] = {TEXT.stem: (1, widths["video"])}
    if "audio" in widths and AUDIO_TEXT.stem in {column.stem for column in kind.channels}:
        fixed[AUDIO_TEXT.stem] = (1, widths["audio"])
    if sources.image_encoder is not None:
        config = {"image_size": 224, "patch_size": 32, "hidden_size": 768}  # transformers' defaults
        config |= read_mapping(sources.image_encoder / CONFIG)
        fixed["clip_feature"] = ((config["image_size"] // config["patch_size"]) ** 2 + 1, config["hidden_size"])
    sound = None if sources.audio_vae is None else load_audio_vae(sources.audio_vae, None)

    @functools.cache
    def of(bucket: Bucket, fps: float) -> Signature:
        frames = (bucket.frames - 1) // vae.temporal + 1
        latents = (vae.latent_channels, frames, bucket.height // vae.spatial, bucket.width // vae.spatial)
        shapes = {"vae_latent": latents, "first_frame_latent": latents, **fixed}
        if sound is not None:
            length = sound.latent_frames(bucket.frames / fps)
            shapes[AUDIO.stem] = (sound.latent_channels, length, sound.latent_bins)
        return tuple(signature_of(c, shapes[c.stem]) if c.stem in shapes else () for c in kind.channels)

    return [of(clip.bucket, clip.fps) for clip in clips]


def text_widths(kind: RowType, sources: Sources) -> dict[str, int]:
    """The widths of text embeddings by stream: of a pipeline's connectors, or `video` alone of other encoders."""
    if not is_gemma(sources.text_encoder):
        config = read_mapping(sources.text_encoder / CONFIG)
        return {"video": config[WIDTHS[config["model_type"]]]}
    widths = {s.name: s.text_dim for s in ltx2_config(sources.text_encoder.parent, kind).streams}
    return widths if "video" in widths else {"video": widths["audio"]}


def usable(placed: Sequence[Clip | Unusable], path: str, skip: bool, log: Callable[[str], None]) -> list[Clip]:
    """The usable clips. Raises UserError listing the others, unless they are to be skipped; the log then has them."""
    unusable = [clip for clip in placed if isinstance(clip, Unusable)]
    what = f"{path}: {len(unusable)} of {counted(len(placed), 'clip')} cannot be used"
    if not skip or len(unusable) == len(placed):
        advice = "" if len(unusable) == len(placed) else " (training.data.encode.skip_unusable: true leaves them out)"
        raise_faults(what + advice, map(str, unusable))
    if unusable:
        log(f"{what} and {'is' if len(unusable) == 1 else 'are'} left out: " + "; ".join(map(str, unusable)))
    return [clip for clip in placed if isinstance(clip, Clip)]


def sample(
    clips: Sequence[Clip], settings: Encoding, models: Callable[[], Models], row_type: RowType, row: int
) -> dict[str, Any]:
    """Sample `row`. Raises UserError naming the clip when it cannot be decoded, or has changed since it was indexed."""
    clip = clips[row]
    if clip.stamp is not None and changed(clip.entry.path, clip.stamp):
        raise UserError(
            f"{clip.entry.path}: changed since training began, so its sample would be another: put the clip back, or "
            "start anew with the changed one"
        )
    return encode_clip(clip.entry, clip.bucket, settings, models(), row_type)


def identity(clips: Sequence[Clip], settings: Encoding, sources: Sources, row_type: str) -> str:
    """Changes when a sample would: with names, captions, contents of the clips (see `stamps`), settings and models; not
    with the place of any of them, nor with their times.
    """
    given = {name: getattr(sources, name) for name in MODELS}
    marks = {name: None if folder is None else fingerprint(folder) for name, folder in given.items()}
    text = {
        "clips": [(c.entry.name, c.entry.caption, None if c.stamp is None else c.stamp.digest) for c in clips],
        "settings": noted(settings, Encoding, row_type),
        "models": {name: mark for name, mark in marks.items() if name in MODELS[:3] or mark is not None},
    }
    return hashlib.blake2b(json.dumps(text).encode(), digest_size=8).hexdigest()


def indexed(
    entries: Sequence[Entry],
    buckets: Sequence[Bucket],
    settings: Encoding,
    sound: bool,
    usable: Callable[[Sequence[Clip | Unusable]], list[Clip]],
    once: Callable[[Callable[[], Any]], Any],
) -> list[Clip]:
    """The usable clips; they are probed by the process that `once` chooses, which tells the others."""

    def probed() -> list[dict[str, Any]]:
        clips = usable(list(survey(range(len(entries)), entries, buckets, settings, sound).values()))
        stamped = lambda clip: None if clip.stamp is None else dataclasses.asdict(clip.stamp)  # noqa: E731
        return [{"row": c.row, "bucket": buckets.index(c.bucket), "fps": c.fps, "stamp": stamped(c)} for c in clips]

    def clip(noted: Mapping[str, Any]) -> Clip:
        stamp = None if noted["stamp"] is None else Stamp(**noted["stamp"])
        return Clip(noted["row"], entries[noted["row"]], buckets[noted["bucket"]], noted["fps"], stamp)

    return [clip(noted) for noted in once(probed)]


def open_online(
    path: str | Path,
    row_type: RowType,
    encode: Encode,
    device: torch.device,
    log: Callable[[str], None] = print,
    *,
    streams: Sequence[str] | None = None,
    once: Callable[[Callable[[], Any]], Any] = lambda choose: choose(),
) -> Dataset:
    """The data set of a metadata file. Clips are probed and the models checked; their weights are read at the first
    sample, and held.

    Args:
        log: is told which clips are left out, by the process that probes them.
        streams: `"video"`, `"audio"`, those that the model has: of others nothing is encoded; None: all.
        once: `(choose)` -> what `choose()` gives, anything that JSON holds, of the one of several processes that calls
            it, on all of them (`parallel.launch.agreed`).

    Raises UserError for bad settings, metadata or models, and for clips that cannot be used (see `usable`).
    """
    if row_type.name not in ("t2v", "i2v", "t2va"):
        raise UserError(f"encode makes t2v, i2v and t2va rows, not {row_type.name}")
    kind = narrowed(row_type, streams)
    sources, settings = sources_of(encode, row_type.name, log), with_dtype(encode, device)
    buckets, entries = buckets_of(settings, *strides(sources)), read_metadata(path)
    check_encoders(sources, kind)
    sound = any(column.stem == AUDIO.stem for column in kind.channels)
    fit = functools.partial(usable, path=str(path), skip=encode.skip_unusable, log=log)
    clips = indexed(entries, buckets, settings, sound, fit, once)
    models = functools.cache(lambda: open_models(sources, settings, device, kind))
    origin = Origin(
        functools.partial(sample, clips, settings, models, kind),
        lambda row: f"{path}, row {clips[row].row} ({clips[row].entry.name})",
        next((clip.fps for clip in clips if clip.bucket.frames > 1), None),
        identity(clips, settings, sources, row_type.name),
    )
    places = np.stack([np.zeros(len(clips), int), np.arange(len(clips))], axis=1)
    return Dataset(kind, (), places, *bucketed(signatures_of(kind, clips, sources)), origin=origin)
