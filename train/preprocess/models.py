"""The models of preprocessing: a pipeline's, held in memory for the whole run, or stand-ins that need no downloads."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import devices
from core.errors import UserError, raise_faults
from core.trees import Params
from infer import gemma
from infer.autoencoders import AudioVae, Vae, load_audio_vae, load_vae
from infer.encoders import ImageEncoder, TextEncoder, load_image_encoder, load_text_encoder, read_mapping
from infer.hub import PARTS, resolve_model
from infer.ltx2_text import LTX2Text, load_ltx2_text
from nn import ltx2_fastvideo, ltx2_formats, mel_codec, patch_codec, text_hash
from train.precision import FLOATS
from train.preprocess.settings import SOUND, Encoding, Settings
from train.rows import AUDIO, T2V, VIDEO, RowType

CONFIG = "config.json"
BESIDE = {"connectors": "text_encoder", "vocoder": "audio_vae"}
"""Models that are found beside another one of their pipeline."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """The folders of the models; None: a stand-in, and for images and connectors none."""

    vae: Path | None = None
    text_encoder: Path | None = None
    image_encoder: Path | None = None
    audio_vae: Path | None = None
    connectors: Path | None = None


@dataclasses.dataclass(frozen=True)
class Models:
    """The models themselves; those that the rows do not need are None. Without `image`, rows have no clip_feature."""

    vae: Vae | None
    text: TextEncoder | LTX2Text | None
    image: ImageEncoder | None = None
    sound: AudioVae | None = None


def stand_ins(row_type: str) -> tuple[str, ...]:
    """The models that preprocessing makes where none is given."""
    return ("vae", "text_encoder", "audio_vae") if row_type == "t2va" else ("vae", "text_encoder")


def find_sources(
    model: str | None,
    vae: str | Path | None,
    text_encoder: str | Path | None,
    image_encoder: str | Path | None,
    audio_vae: str | Path | None = None,
    *,
    row_type: str,
    log: Callable[[str], None] = print,
) -> Sources:
    """The folders of a pipeline folder (or hub id) `model`, each replaced by its own where that is given.

    The image encoder is for i2v rows only, and a pipeline may lack it; the audio VAE is for t2va rows, and without a
    pipeline is that beside the VAE. LTX-2's connectors are those beside the text encoder. Raises one UserError listing
    what is missing.
    """
    given = {"vae": vae, "text_encoder": text_encoder, "image_encoder": image_encoder, "audio_vae": audio_vae}
    found = {name: None if folder is None else Path(folder) for name, folder in given.items()}
    if image_encoder is not None and row_type != "i2v":
        raise UserError(f"image_encoder: {row_type} rows have no image features; it is for row type i2v")
    if audio_vae is not None and row_type != "t2va":
        raise UserError(f"audio_vae: {row_type} rows have no sound; it is for row type t2va")
    only = {"image_encoder": "i2v", "audio_vae": "t2va"}
    wanted = [name for name in given if found[name] is None and only.get(name, row_type) == row_type]
    if model is not None:
        root = resolve_model(model, [name for name in wanted if name in PARTS], transformer=False, log=log)
        found |= {n: root / n for n in wanted if n != "image_encoder" or (root / n / CONFIG).is_file()}
    elif "audio_vae" in wanted:
        found["audio_vae"] = beside("audio_vae", found["vae"])
    missing = [(n, f) for n, f in found.items() if f is not None and not (f / CONFIG).is_file()]
    raise_faults("models that are not there", [f"{f / CONFIG}: no such file{_inside(f, n)}" for n, f in missing])
    text = found["text_encoder"]
    return Sources(**found, connectors=beside("connectors", text) if text is not None and is_gemma(text) else None)


def is_gemma(text_encoder: Path) -> bool:
    """Whether a folder holds LTX-2's text encoder, which connectors follow; others have one text for all streams."""
    config = read_mapping(text_encoder / CONFIG)
    return config.get("model_type") in gemma.MODEL_TYPES or ltx2_fastvideo.is_text_encoder(config)


def beside(name: str, folder: Path | None) -> Path | None:
    """The folder of the model `name`, which stands beside `folder`, that of another; None where it is not there."""
    place = None if folder is None else folder.parent / name
    return place if place is not None and (place / CONFIG).is_file() else None


def _inside(folder: Path, name: str) -> str:
    """A hint where a pipeline's folder was given for a model's."""
    return f"; did you mean {folder / name}?" if (folder / name / CONFIG).is_file() else ""


def strides(sources: Sources) -> tuple[int, int]:
    """Frames and pixels per latent of the autoencoder; no weights of Wan's are read, but their shapes are checked."""
    if sources.vae is None:
        codec = patch_codec.PatchCodecConfig()
        return codec.temporal, codec.spatial
    vae = load_vae(sources.vae, keep=False)
    return vae.temporal, vae.spatial


def with_dtype(settings: Encoding, device: torch.device) -> Encoding:
    """The settings with the encoders' dtype written out."""
    if settings.dtype is not None:
        return settings
    names = {dtype: name for name, dtype in FLOATS.items()}
    return settings.model_copy(update={"dtype": names[devices.default_compute_dtype(device)]})


def open_text(folder: Path, row_type: RowType, **how: Any) -> TextEncoder | LTX2Text:
    """The text encoder of a folder; LTX-2's with the connectors of the streams that rows have (see `rows.narrowed`).

    Raises UserError for one that cannot be run.
    """
    if not is_gemma(folder):
        return load_text_encoder(folder, **how)
    return load_ltx2_text(folder.parent, ltx2_config(folder.parent, row_type), **how)


def ltx2_config(folder: Path, row_type: RowType) -> Any:
    """The config of a pipeline's transformer, of the streams that rows have.

    Raises UserError for a transformer that lacks one.
    """
    streams = [name for name in ("video", "audio") if any(c.target == name for c in row_type.channels)]
    cfg = ltx2_formats.read_config(folder / "transformer")
    asked = None if len(streams) != 1 or cfg.modality == streams[0] else streams[0]
    return ltx2_formats.with_modality(cfg, asked, str(folder / "transformer"))


def check_encoders(sources: Sources, row_type: RowType) -> None:
    """Refuses encoders that cannot be run; nothing of their weights is read. Raises one UserError for all of them."""
    loaders = {
        "text_encoder": lambda folder: open_text(folder, row_type),
        "image_encoder": load_image_encoder,
        "audio_vae": lambda folder: load_audio_vae(folder, None),
    }
    faults = []
    for name, load in loaders.items():
        try:
            if getattr(sources, name) is not None:
                load(getattr(sources, name))
        except UserError as error:
            faults.append(str(error))
    raise_faults("encoders that cannot be run", faults)


def open_models(
    sources: Sources, settings: Encoding, device: torch.device, row_type: RowType = T2V, *, keep: bool = True
) -> Models:
    """The models that rows need, on `device`: VAEs are read now, the encoders at their first use; all are held.

    Needs the folders of those. Without `keep` nothing is read yet, only checked, and every call reads and frees.
    Raises UserError for models that cannot be run.
    """
    stems = {column.stem for column in row_type.channels}
    encoders = {"device": device, "dtype": FLOATS[with_dtype(settings, device).dtype], "keep": keep}
    coders = {"device": device, "dtype": FLOATS[settings.vae_dtype], "keep": keep}
    text = open_text(sources.text_encoder, row_type, **encoders)
    image = None if sources.image_encoder is None else load_image_encoder(sources.image_encoder, **encoders)
    vae = load_vae(sources.vae, **coders) if VIDEO.stem in stems else None
    sound = load_audio_vae(sources.audio_vae, None, **coders) if AUDIO.stem in stems else None
    return Models(vae, text, image, sound)


# --- stand-ins ------------------------------------------------------------------------------------------------


def stand_in_configs(settings: Settings) -> tuple[patch_codec.PatchCodecConfig, text_hash.HashTextConfig]:
    """The configs of the patch codec and of the hash embedder. Raises UserError for values that they refuse."""
    codec = patch_codec.PatchCodecConfig(latent_channels=settings.latent_channels)
    return codec, text_hash.HashTextConfig(settings.text_dim, settings.text_max_length)


def sound_config(settings: Settings) -> mel_codec.MelCodecConfig:
    """The config of the sound codec. Raises UserError for values that it refuses."""
    return mel_codec.MelCodecConfig(
        latent_channels=settings.audio_latent_channels, latent_bins=settings.audio_latent_bins
    )


def unused_faults(settings: Settings, sources: Sources) -> list[str]:
    """Settings that decide nothing and are not the defaults: a given model replaces them, or rows have no sound."""
    replaced = {"latent_channels": sources.vae, "text_dim": sources.text_encoder}
    replaced["text_max_length"] = sources.text_encoder
    replaced |= dict.fromkeys(("audio_latent_channels", "audio_latent_bins"), sources.audio_vae)
    changed = {name for name, field in Settings.model_fields.items() if getattr(settings, name) != field.default}
    faults = [
        f"{name} is {getattr(settings, name)}, but {folder} decides it: leave it out"
        for name, folder in replaced.items()
        if folder is not None and name in changed
    ]
    silent = [name for name in SOUND if name in changed] if settings.row_type != "t2va" else []
    return faults + [f"{name}: {settings.row_type} rows have no sound; it is for row type t2va" for name in silent]


def fit_codec(clips: Iterable[Tensor], cfg: patch_codec.PatchCodecConfig) -> Params:
    """The patch codec of clips uint8 `[T, H, W, 3]`, one in memory at a time. Pictures alone say nothing of motion:
    they are encoded, but not fitted on.

    Raises UserError when no clip is left.
    """
    moving: Iterator[Tensor] = (clip for clip in clips if len(clip) > 1)
    return patch_codec.fit(cfg, moving)


def save_stand_ins(folder: Path, codecs: Mapping[str, Params], settings: Settings, made: Sequence[str]) -> None:
    """Writes the folders `made` of a set: codecs with their weights, and the hash embedder, which has none."""
    codec_cfg, text_cfg = stand_in_configs(settings)
    if "vae" in made:
        patch_codec.save(folder / "vae", codecs["vae"], codec_cfg)
    if "audio_vae" in made:
        mel_codec.save(folder / "audio_vae", codecs["audio_vae"], sound_config(settings))
    if "text_encoder" in made:
        text_hash.save(folder / "text_encoder", text_cfg)
