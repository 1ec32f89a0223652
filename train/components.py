"""The models around the transformer of a run: where they are found, and what training needs of them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from core.files import read_json
from infer.folder import TextEncoder, Vae, load_text_encoder, load_vae
from infer.schedules import is_int
from nn import wan
from train.config import Recipe

# Pixels and frames per latent where the data set's VAE cannot be read: Wan 2.1's, and Wan 2.2's with 48 channels.
VAE_STRIDES, VAE_STRIDES_48 = (8, 4), (16, 4)
STRIDE_KEYS = (("spatial", "temporal"), ("scale_factor_spatial", "scale_factor_temporal"))


@dataclasses.dataclass(frozen=True)
class Components:
    """The models that the latents and captions were made with: their folders, and themselves where we run them."""

    vae_folder: Path | None
    text_folder: Path | None
    vae: Vae | None
    text: TextEncoder | None


def data_roots(data_path: str | tuple[str, ...] | Mapping[str, int]) -> list[Path]:
    """The paths of `training.data.data_path` in any of its forms."""
    return [Path(data_path)] if isinstance(data_path, str) else [Path(p) for p in data_path]


def beside(roots: list[Path], init_from: str | None, name: str) -> Path | None:
    """The folder `name` (`vae`, `text_encoder`) in a data set's folder or the one above, else in `init_from`."""
    places = [root / name for root in roots] + [root.parent / name for root in roots]
    if init_from is not None:
        places.append(Path(init_from) / name)
    return next((p for p in places if (p / "config.json").is_file()), None)


def find_components(recipe: Recipe) -> Components:
    """VAE and text encoder of the run; either may be missing, or known by its folder only.

    Raises:
        UserError: a folder that the recipe names and that is not there, or that validation needs and
            cannot be run.
    """
    roots, student = data_roots(recipe.training.data.data_path), recipe.models.student
    folders, faults = {}, []
    for name in ("vae", "text_encoder"):
        asked = getattr(recipe.pipeline, name)
        folders[name] = beside(roots, student.init_from, name) if asked is None else Path(asked)
        if asked is not None and not (Path(asked) / "config.json").is_file():
            faults.append(f"pipeline.{name}: {asked} has no config.json")
    raise_faults("models around the transformer", faults)
    if recipe.callbacks.validation is None:
        return Components(folders["vae"], folders["text_encoder"], None, _maybe_text(folders["text_encoder"]))
    raise_faults(
        "callbacks.validation cannot sample videos",
        [f"no {n}/ beside the data or in init_from; name it in pipeline.{n}" for n, f in folders.items() if f is None],
    )
    return Components(
        folders["vae"], folders["text_encoder"], load_vae(folders["vae"]), load_text_encoder(folders["text_encoder"])
    )


def _maybe_text(folder: Path | None) -> TextEncoder | None:
    """The encoder, for the empty caption; None where there is none or it is of a kind we cannot run."""
    try:
        return None if folder is None else load_text_encoder(folder)
    except UserError:
        return None


def empty_caption(recipe: Recipe, cfg: wan.WanConfig, text: TextEncoder | None) -> Tensor:
    """The embedding `[L, text_dim]` of the empty caption, zero-padded; zeros where no encoder can be run.

    L is `training.data.text_padding_length`, else the encoder's length, else 512 (Wan's).
    """
    length = recipe.training.data.text_padding_length
    if length is None:
        length = 512 if text is None else text.max_length
    empty = torch.zeros(length, cfg.text_dim)
    # Embedded only when it is used: a large encoder takes minutes to read.
    if text is not None and recipe.training.data.training_cfg_rate > 0:
        (embedding,) = text.embed([""])
        if embedding.shape[0] > length or embedding.shape[1] != cfg.text_dim:
            raise UserError(
                f"the text encoder gives {list(embedding.shape)} for an empty caption, the model takes at most "
                f"[{length}, {cfg.text_dim}] (text_dim)"
            )
        empty[: embedding.shape[0]] = embedding
    return empty


def strides(components: Components, channels: int) -> tuple[int, int]:
    """Pixels and frames per latent: of the VAE, of its config where it is not loaded, else Wan's by channels."""
    if components.vae is not None:
        return components.vae.spatial, components.vae.temporal
    config = {} if components.vae_folder is None else read_json(components.vae_folder / "config.json")
    for pair in STRIDE_KEYS:
        if all(is_int(config.get(k)) for k in pair):
            return config[pair[0]], config[pair[1]]
    return VAE_STRIDES_48 if channels == 48 else VAE_STRIDES
