"""The models around the transformer of a run: where they are found, and what training needs of them."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from core.files import read_json
from infer.autoencoders import Vae, load_vae
from infer.encoders import ImageEncoder, TextEncoder, load_image_encoder, load_text_encoder, read_mapping
from infer.folder import INDEX
from infer.schedules import is_int
from nn import wan
from train.config import Recipe
from train.online import encode_folders
from train.precision import FLOATS
from train.preprocess.record import recorded_folders

# Pixels and frames per latent where the data set's VAE cannot be read: Wan 2.1's, and Wan 2.2's with 48 channels.
VAE_STRIDES, VAE_STRIDES_48 = (8, 4), (16, 4)
STRIDE_KEYS = (("spatial", "temporal"), ("scale_factor_spatial", "scale_factor_temporal"))


@dataclasses.dataclass(frozen=True)
class Components:
    """The models that latents, captions and pictures are encoded with: their folders, and themselves where we run them.

    `expand_timesteps`: the model takes a picture as a clean first latent frame (Wan2.2's 5B).
    """

    vae_folder: Path | None
    text_folder: Path | None
    vae: Vae | None
    text: TextEncoder | None
    image_folder: Path | None = None
    image: ImageEncoder | None = None
    expand_timesteps: bool = False


def data_roots(data_path: str | tuple[str, ...] | Mapping[str, int]) -> list[Path]:
    """The paths of `training.data.data_path` in any of its forms."""
    return [Path(data_path)] if isinstance(data_path, str) else [Path(p) for p in data_path]


def beside(roots: list[Path], init_from: str | None, name: str) -> Path | None:
    """The folder `name` (`vae`, `text_encoder`, ...) in a data set's folder or the one above, else where the set was
    made with it, else in `init_from`.
    """
    places = [root / name for root in roots] + [root.parent / name for root in roots]
    places += recorded_folders(roots, name)
    if init_from is not None:
        places.append(Path(init_from) / name)
    return next((p for p in places if (p / "config.json").is_file()), None)


def find_folders(recipe: Recipe, cfg: wan.WanConfig) -> dict[str, Path | None]:
    """The folders of the VAE and of the encoders that a model has a place for; None for what is nowhere.

    Raises:
        UserError: a folder that the recipe names and that is not there, or that the model has no use for.
    """
    roots, init_from = data_roots(recipe.training.data.data_path), recipe.models.student.init_from
    folders, faults, own = {}, [], encode_folders(recipe.training.data)
    for name in ("vae", "text_encoder", "image_encoder"):
        asked = getattr(recipe.pipeline, name)
        found = beside(roots, init_from, name) if own is None else own[name]
        folders[name] = found if asked is None else Path(asked)
        if asked is not None and not (Path(asked) / "config.json").is_file():
            faults.append(f"pipeline.{name}: {asked} has no config.json")
    if cfg.image_dim is None:
        folders["image_encoder"] = None
        if recipe.pipeline.image_encoder is not None:
            faults.append("pipeline.image_encoder: the model takes no image features (its image_dim is null)")
    raise_faults("models around the transformer", faults)
    return folders


def find_components(recipe: Recipe, cfg: wan.WanConfig, device: torch.device, dtype: torch.dtype) -> Components:
    """VAE and encoders of the run; each may be missing, or known by its folder only.

    For validation all are opened on `device`, the encoders in `dtype`, and as in inference Wan's VAE, UMT5 and CLIP
    are read by the call that needs them and freed after it.

    Raises:
        UserError: a folder that the recipe names and that is not there, or that validation needs and
            cannot be run.
    """
    folders, expand = find_folders(recipe, cfg), expands_timesteps(recipe, cfg)
    paths = (folders["vae"], folders["text_encoder"])
    text = lambda folder: load_text_encoder(folder, device=device, dtype=dtype)  # noqa: E731
    if recipe.callbacks.validation is None:
        return Components(*paths, None, _maybe(text, paths[1]), folders["image_encoder"], None, expand)
    loaders: dict[str, Callable[[Path], Any]] = {
        "vae": lambda f: load_vae(f, device=device, dtype=FLOATS[recipe.pipeline.vae_dtype], keep=False),
        "text_encoder": text,
        "image_encoder": lambda f: _fitting(load_image_encoder(f, device=device, dtype=dtype), cfg, f),
    }
    needed = {k: load for k, load in loaders.items() if k != "image_encoder" or cfg.image_dim is not None}
    raise_faults(
        "callbacks.validation cannot sample videos",
        [f"no {n}/ beside the data or in init_from; name it in pipeline.{n}" for n in needed if folders[n] is None],
    )
    found = {name: load(folders[name]) for name, load in needed.items()}
    image = found.get("image_encoder")
    return Components(*paths, found["vae"], found["text_encoder"], folders["image_encoder"], image, expand)


def expands_timesteps(recipe: Recipe, cfg: wan.WanConfig) -> bool:
    """Whether a picture is the model's clean first latent frame: as the recipe says, else as `init_from` does.

    Raises:
        UserError: a model that takes pictures in another way.
    """
    where, value = "pipeline.expand_timesteps", recipe.pipeline.expand_timesteps
    init_from = recipe.models.student.init_from
    if value is None and init_from is not None and (Path(init_from) / INDEX).is_file():
        where = f"{Path(init_from) / INDEX}: expand_timesteps"
        value = read_mapping(Path(init_from) / INDEX).get("expand_timesteps")
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{where} is {value!r}, expected true or false")
    if value and (cfg.condition_channels or cfg.image_dim is not None):
        raise UserError(
            f"{where} is true, but this model takes pictures by condition channels or features "
            f"(in_channels {cfg.in_channels}, out_channels {cfg.out_channels}, image_dim {cfg.image_dim})"
        )
    return value is True


def _fitting(encoder: ImageEncoder, cfg: wan.WanConfig, folder: Path) -> ImageEncoder:
    if encoder.dim != cfg.image_dim:
        raise UserError(f"{folder}: it makes features of width {encoder.dim}, the model takes {cfg.image_dim}")
    return encoder


def _maybe(load: Callable[[Path], TextEncoder], folder: Path | None) -> TextEncoder | None:
    """The encoder, for the empty caption; None where there is none or it is of a kind we cannot run."""
    try:
        return None if folder is None else load(folder)
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
