"""The models around the transformer of a run: where they are found, and what training needs of them."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from core.errors import UserError, raise_faults
from core.files import read_json
from infer.autoencoders import AudioVae, Vae, load_audio_vae, load_vae
from infer.encoders import ImageEncoder, load_image_encoder
from infer.schedules import is_int
from train.config import Recipe
from train.families import Family, family_of
from train.online import encode_folders
from train.precision import FLOATS
from train.preprocess.record import recorded_folders

# How configs of VAEs call pixels and frames per latent.
STRIDE_KEYS = (
    ("spatial", "temporal"),
    ("scale_factor_spatial", "scale_factor_temporal"),
    ("spatial_compression_ratio", "temporal_compression_ratio"),
)


@dataclasses.dataclass(frozen=True)
class Components:
    """The models that latents, captions and pictures are encoded with, by name (`vae`, `text_encoder`, ...): their
    folders (None: there is none), and themselves where we run them.
    """

    folders: Mapping[str, Path | None]
    models: Mapping[str, Any]

    @property
    def vae(self) -> Vae | None:
        """The video VAE, where it is run."""
        return self.models.get("vae")

    @property
    def sound(self) -> AudioVae | None:
        """The audio VAE, where it is run."""
        return self.models.get("audio_vae")

    @property
    def text(self) -> Any:
        """What embeds captions, where it can be run."""
        return self.models.get("text_encoder")


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


def find_folders(recipe: Recipe, cfg: Any) -> dict[str, Path | None]:
    """The folders of the models that a transformer has a place for; None for what is nowhere.

    Raises:
        UserError: a folder that the recipe names and that is not there, or that the model has no use for.
    """
    roots, init_from = data_roots(recipe.training.data.data_path), recipe.models.student.init_from
    folders, faults, own = {}, [], encode_folders(recipe.training.data)
    for name, without in family_of(recipe).parts(cfg).items():
        asked = getattr(recipe.pipeline, name)
        found = beside(roots, init_from, name) if own is None else own.get(name)
        folders[name] = None if without else found if asked is None else Path(asked)
        if asked is not None and not (Path(asked) / "config.json").is_file():
            faults.append(f"pipeline.{name}: {asked} has no config.json")
        if asked is not None and without:
            faults.append(f"pipeline.{name}: {without}")
    raise_faults("models around the transformer", faults)
    return folders


def find_components(recipe: Recipe, cfg: Any, device: torch.device, dtype: torch.dtype) -> Components:
    """The models around the transformer of a run; each may be missing, or known by its folder only.

    For validation all are opened on `device`, the encoders in `dtype`, and as in inference large ones are read by the
    call that needs them and freed after it.

    Raises:
        UserError: a folder that the recipe names and that is not there, or that validation needs and
            cannot be run.
    """
    family, folders = family_of(recipe), find_folders(recipe, cfg)
    loaders = _loaders(recipe, family, cfg, folders, device, dtype)
    if recipe.callbacks.validation is None:
        opened = {name: _maybe(loaders[name], folders.get(name)) for name in ("text_encoder", "audio_vae")}
        return Components(folders, {name: model for name, model in opened.items() if model is not None})
    needed = [name for name, without in family.parts(cfg).items() if not without and name in loaders]
    raise_faults(
        "callbacks.validation cannot sample videos",
        [f"no {n}/ beside the data or in init_from; name it in pipeline.{n}" for n in needed if folders[n] is None],
    )
    found = Components(folders, {name: loaders[name](folders[name]) for name in needed})
    if found.sound is not None and found.sound.decode is None:
        raise UserError(
            f"callbacks.validation cannot sample sound: {folders['audio_vae']} decodes to spectrograms, which need a "
            "vocoder; there is no vocoder/ beside the data or in init_from; name it in pipeline.vocoder"
        )
    return found


def _loaders(
    recipe: Recipe, family: Family, cfg: Any, folders: Mapping[str, Path | None], device, dtype
) -> dict[str, Callable[[Path], Any]]:
    """How each model is opened from its folder."""
    how = {"device": device, "dtype": FLOATS[recipe.pipeline.vae_dtype], "keep": False}
    return {
        "vae": lambda f: load_vae(f, **how),
        "audio_vae": lambda f: load_audio_vae(f, folders["vocoder"], **how),
        "text_encoder": lambda f: family.open_text(f, cfg, device, dtype),
        "image_encoder": lambda f: _fitting(load_image_encoder(f, device=device, dtype=dtype), cfg, f),
    }


def _fitting(encoder: ImageEncoder, cfg: Any, folder: Path) -> ImageEncoder:
    if encoder.dim != cfg.image_dim:
        raise UserError(f"{folder}: it makes features of width {encoder.dim}, the model takes {cfg.image_dim}")
    return encoder


def _maybe(load: Callable[[Path], Any], folder: Path | None) -> Any:
    """A model that is of use without validation: what embeds the empty caption, and whose rate of latents is known.
    None where there is none or it is of a kind we cannot run.
    """
    try:
        return None if folder is None else load(folder)
    except UserError:
        return None


def strides(components: Components, family: Family, cfg: Any) -> tuple[int, int]:
    """Pixels and frames per latent: of the VAE, of its config where it is not loaded, else as the model's usually are.
    """
    if components.vae is not None:
        return components.vae.spatial, components.vae.temporal
    folder = components.folders["vae"]
    config = {} if folder is None else read_json(folder / "config.json")
    for pair in STRIDE_KEYS:
        if all(is_int(config.get(k)) for k in pair):
            return config[pair[0]], config[pair[1]]
    return family.strides(cfg)
