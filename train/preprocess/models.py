"""The models of preprocessing: Wan's, held in memory for the whole run, or stand-ins that need no downloads."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core import devices
from core.errors import UserError, raise_faults
from core.trees import Params
from infer.autoencoders import Vae, load_vae
from infer.encoders import (
    ImageEncoder,
    TextEncoder,
    load_image_encoder,
    load_text_encoder,
)
from infer.hub import PARTS, resolve_model
from nn import patch_codec, text_hash
from train.precision import FLOATS
from train.preprocess.settings import Encoding, Settings

CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class Sources:
    """The folders of the models; None: a stand-in, and for images none."""

    vae: Path | None = None
    text_encoder: Path | None = None
    image_encoder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Models:
    """The models themselves. Without `image`, rows have no clip_feature."""

    vae: Vae
    text: TextEncoder
    image: ImageEncoder | None = None


def find_sources(
    model: str | None,
    vae: str | Path | None,
    text_encoder: str | Path | None,
    image_encoder: str | Path | None,
    *,
    row_type: str,
    log: Callable[[str], None] = print,
) -> Sources:
    """The folders of a pipeline folder (or hub id) `model`, each replaced by its own where that is given.

    The image encoder is for i2v rows only, and a pipeline may lack it. Raises one UserError listing what is missing.
    """
    given = {"vae": vae, "text_encoder": text_encoder, "image_encoder": image_encoder}
    found = {name: None if folder is None else Path(folder) for name, folder in given.items()}
    if image_encoder is not None and row_type != "i2v":
        raise UserError(f"image_encoder: {row_type} rows have no image features; it is for row type i2v")
    wanted = [name for name in given if found[name] is None and (name != "image_encoder" or row_type == "i2v")]
    if model is not None:
        root = resolve_model(model, [name for name in wanted if name in PARTS], transformer=False, log=log)
        found |= {n: root / n for n in wanted if n != "image_encoder" or (root / n / CONFIG).is_file()}
    missing = [(n, f) for n, f in found.items() if f is not None and not (f / CONFIG).is_file()]
    raise_faults("models that are not there", [f"{f / CONFIG}: no such file{_inside(f, n)}" for n, f in missing])
    return Sources(**found)


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


def check_encoders(sources: Sources) -> None:
    """Refuses encoders that cannot be run; nothing of their weights is read. Raises one UserError for all of them."""
    loaders = {"text_encoder": load_text_encoder, "image_encoder": load_image_encoder}
    faults = []
    for name, load in loaders.items():
        try:
            if getattr(sources, name) is not None:
                load(getattr(sources, name))
        except UserError as error:
            faults.append(str(error))
    raise_faults("encoders that cannot be run", faults)


def open_models(sources: Sources, settings: Encoding, device: torch.device, *, keep: bool = True) -> Models:
    """The models of these folders, on `device`: Wan's VAE is read now, the encoders at their first use; all are held.

    Needs `vae` and `text_encoder`. Without `keep` nothing is read yet, only checked, and every call reads and frees.
    Raises UserError for models that cannot be run.
    """
    how = {"device": device, "dtype": FLOATS[with_dtype(settings, device).dtype], "keep": keep}
    text = load_text_encoder(sources.text_encoder, **how)
    image = None if sources.image_encoder is None else load_image_encoder(sources.image_encoder, **how)
    vae = load_vae(sources.vae, device=device, dtype=FLOATS[settings.vae_dtype], keep=keep)
    return Models(vae, text, image)


# --- stand-ins ------------------------------------------------------------------------------------------------


def stand_in_configs(settings: Settings) -> tuple[patch_codec.PatchCodecConfig, text_hash.HashTextConfig]:
    """The configs of the patch codec and of the hash embedder. Raises UserError for values that they refuse."""
    codec = patch_codec.PatchCodecConfig(latent_channels=settings.latent_channels)
    return codec, text_hash.HashTextConfig(settings.text_dim, settings.text_max_length)


def unused_faults(settings: Settings, sources: Sources) -> list[str]:
    """Settings of stand-ins that a given model replaces, where they are not the defaults."""
    replaced = {"latent_channels": sources.vae, "text_dim": sources.text_encoder}
    replaced["text_max_length"] = sources.text_encoder
    defaults = {name: Settings.model_fields[name].default for name in replaced}
    return [
        f"{name} is {getattr(settings, name)}, but {folder} decides it: leave it out"
        for name, folder in replaced.items()
        if folder is not None and getattr(settings, name) != defaults[name]
    ]


def fit_codec(clips: Iterable[Tensor], cfg: patch_codec.PatchCodecConfig) -> Params:
    """The patch codec of clips uint8 `[T, H, W, 3]`, one in memory at a time. Pictures alone say nothing of motion:
    they are encoded, but not fitted on.

    Raises UserError when no clip is left.
    """
    moving: Iterator[Tensor] = (clip for clip in clips if len(clip) > 1)
    return patch_codec.fit(cfg, moving)


def save_stand_ins(folder: Path, codec: Params | None, settings: Settings, sources: Sequence[str]) -> None:
    """Writes `vae/` and `text_encoder/` of a set, those of `sources`."""
    codec_cfg, text_cfg = stand_in_configs(settings)
    if "vae" in sources:
        patch_codec.save(folder / "vae", codec, codec_cfg)
    if "text_encoder" in sources:
        text_hash.save(folder / "text_encoder", text_cfg)
