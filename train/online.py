"""Encoding on the fly: a data set whose samples are encoded when a batch asks for them.

Clips are indexed as in preprocessing, and `encode_clip` makes the samples, so batches are to the bit those of a set
that was preprocessed with the same settings, models, device and number of threads; order and epochs are the same.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.errors import UserError, raise_faults
from infer.autoencoders import Vae
from infer.encoders import UMT5, read_mapping
from infer.words import counted
from nn import text_hash
from train.config import Data, Encode
from train.data import Dataset, Origin, bucketed
from train.preprocess.buckets import Bucket, Clip, Unusable, buckets_of, survey
from train.preprocess.encode import encode_clip
from train.preprocess.metadata import read_metadata
from train.preprocess.models import CONFIG, Models, Sources, find_sources, open_models, strides, with_dtype
from train.preprocess.record import MODELS, fingerprint
from train.preprocess.settings import Encoding
from train.preprocess.stamps import changed
from train.rows import RowType, Signature, signature_of

WIDTHS = {UMT5: "d_model", text_hash.MODEL_TYPE: "dim"}  # the entry of a text encoder's config


def sources_of(encode: Encode, row_type: str, log: Callable[[str], None] = print) -> Sources:
    """The folders of the models. Raises UserError for those that are not there: nothing is fitted on the fly."""
    given = (encode.model, encode.vae, encode.text_encoder, encode.image_encoder)
    sources = find_sources(*given, row_type=row_type, log=log)
    missing = [name for name in MODELS[:2] if getattr(sources, name) is None]
    raise_faults("models that encode needs", [f"{name}: give its folder, or model" for name in missing])
    return sources


def encode_folders(data: Data) -> dict[str, Path | None] | None:
    """The folders of the models that a recipe encodes with; None for preprocessed data."""
    if data.encode is None:
        return None
    sources = sources_of(data.encode, data.preprocessed_data_type, log=lambda text: None)
    return {name: getattr(sources, name) for name in MODELS}


def signature(row_type: RowType, bucket: Bucket, vae: Vae, sources: Sources) -> Signature:
    """The signature of a sample of this bucket, from the configs of the models."""
    frames = (bucket.frames - 1) // vae.temporal + 1
    latents = (vae.latent_channels, frames, bucket.height // vae.spatial, bucket.width // vae.spatial)
    text = read_mapping(sources.text_encoder / CONFIG)
    shapes = {"vae_latent": latents, "first_frame_latent": latents}
    shapes["text_embedding"] = (1, text[WIDTHS[text["model_type"]]])
    if sources.image_encoder is not None:
        config = {"image_size": 224, "patch_size": 32, "hidden_size": 768}  # transformers' defaults
        config |= read_mapping(sources.image_encoder / CONFIG)
        shapes["clip_feature"] = ((config["image_size"] // config["patch_size"]) ** 2 + 1, config["hidden_size"])
    return tuple(signature_of(c, shapes[c.stem]) if c.stem in shapes else () for c in row_type.channels)


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


def identity(clips: Sequence[Clip], settings: Encoding, sources: Sources) -> str:
    """Changes when a sample would: with names, captions, contents of the clips (see `stamps`), settings and models; not
    with the place of any of them, nor with their times.
    """
    given = {name: getattr(sources, name) for name in MODELS}
    text = {
        "clips": [(c.entry.name, c.entry.caption, None if c.stamp is None else c.stamp.digest) for c in clips],
        "settings": {name: getattr(settings, name) for name in Encoding.model_fields},
        "models": {name: None if folder is None else fingerprint(folder) for name, folder in given.items()},
    }
    return hashlib.blake2b(json.dumps(text).encode(), digest_size=8).hexdigest()


def open_online(
    path: str | Path, row_type: RowType, encode: Encode, device: torch.device, log: Callable[[str], None] = print
) -> Dataset:
    """The data set of a metadata file. Clips are probed and the models checked; their weights are read at the first
    sample, and held.

    Raises UserError for bad settings, metadata or models, and for clips that cannot be used (see `usable`).
    """
    if row_type.name not in ("t2v", "i2v"):
        raise UserError(f"encode makes t2v and i2v rows, not {row_type.name}")
    sources, settings = sources_of(encode, row_type.name), with_dtype(encode, device)
    buckets, entries = buckets_of(settings, *strides(sources)), read_metadata(path)
    placed = survey(range(len(entries)), entries, buckets, settings)
    clips = usable(list(placed.values()), str(path), encode.skip_unusable, log)
    vae = open_models(sources, settings, device, keep=False).vae
    signatures = {bucket: signature(row_type, bucket, vae, sources) for bucket in buckets}
    models = functools.cache(lambda: open_models(sources, settings, device))
    origin = Origin(
        functools.partial(sample, clips, settings, models, row_type),
        lambda row: f"{path}, row {clips[row].row} ({clips[row].entry.name})",
        next((clip.fps for clip in clips if clip.bucket.frames > 1), None),
        identity(clips, settings, sources),
    )
    places = np.stack([np.zeros(len(clips), int), np.arange(len(clips))], axis=1)
    return Dataset(row_type, (), places, *bucketed([signatures[clip.bucket] for clip in clips]), origin=origin)
