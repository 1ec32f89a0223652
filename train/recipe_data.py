"""The data set that a recipe names: opened, checked against the model, and identified."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from core.errors import raise_faults
from core.geometry import nearest_valid
from nn import wan
from nn.wan_inputs import check_latent_shape
from train.components import Components, data_roots, strides
from train.config import Data, Recipe
from train.data import Dataset, check_latents, check_tensors, check_text, open_dataset, where
from train.online import open_online
from train.preprocess import record
from train.preprocess.metadata import PARSERS
from train.rows import row_type
from train.streaming import Streaming


def expected_latents(data: Data, channels: int, strides_: tuple[int, int]) -> tuple[int | None, ...]:
    """`(C, t, h, w)` of the latents that `training.data` asks for; None for what it leaves to the data.

    Raises:
        UserError: a height or width that no latents have, with the nearest valid ones.
    """
    spatial, temporal = strides_
    frames = data.num_latent_t
    if frames is None and data.num_frames is not None:
        frames = (data.num_frames - 1) // temporal + 1
    sizes, faults = {"num_height": data.num_height, "num_width": data.num_width}, []
    for k, n in sizes.items():
        if n is not None and n % spatial:
            near = " or ".join(map(str, nearest_valid(n, spatial)))
            faults.append(f"training.data.{k} is {n}, expected a multiple of {spatial}: nearest valid {near}")
    raise_faults("sizes that the autoencoder cannot hold", faults)
    return (channels, frames, *(None if n is None else n // spatial for n in sizes.values()))


def check_preprocessed(paths: Iterable[Path]) -> None:
    """Refuses metadata files of clips where preprocessed data are expected."""
    how = "run `python -m train.preprocess --data {} --output DIR` and name DIR, or set training.data.encode"
    raise_faults(
        "clips instead of preprocessed data",
        [f"{f}: lists clips: {how.format(f)}" for f in paths if f.suffix.lower() in PARSERS and f.is_file()],
    )


def open_recipe_data(data: Data, device: torch.device) -> Dataset:
    """The data set of a recipe, as a map or a stream, or encoded on the fly on `device`."""
    path, kind = _plain(data.data_path), row_type(data.preprocessed_data_type)
    if data.encode is not None:
        return open_online(path, kind, data.encode, device)
    check_preprocessed(data_roots(data.data_path))
    if data.dataloader_type == "map":
        return open_dataset(path, kind)
    manifest = None if data.streaming_manifest_path is None else Path(data.streaming_manifest_path)
    how = Streaming(data.streaming_read_batch_size, data.streaming_shuffle_row_groups)
    return open_dataset(path, kind, how, manifest)


def check_data(recipe: Recipe, cfg: wan.WanConfig, dataset: Dataset, components: Components) -> None:
    """Refuses data that do not fit the model or the sizes that `training.data` asks for, naming file and row."""
    expected = expected_latents(recipe.training.data, cfg.out_channels, strides(components, cfg.out_channels))
    check_latents(dataset, cfg.out_channels, cfg.patch_size, expected)
    first = [where(dataset, int((dataset.buckets == i).argmax())) for i in range(len(dataset.shapes))]
    faults = [f"{row}: {f}" for row, s in zip(first, dataset.shapes, strict=True) for f in check_latent_shape(cfg, s)]
    raise_faults("latents that do not fit the model", faults)
    check_text(dataset, cfg.text_dim)
    if dataset.row_type.name == "i2v":
        expected = {"first_frame_latent": "vae_latent"}
        if cfg.image_dim is not None:
            expected["clip_feature"] = (None, cfg.image_dim)
        check_tensors(dataset, expected, "image conditions that do not fit the model or the latents")


def check_models(recipe: Recipe, components: Components) -> None:
    """Refuses data that were made with other models than the run uses, see `record.check_models`.

    Those that come with `init_from` count before those of the data: its weights belong to their latents. To train on
    the latents of another VAE, `pipeline.vae` names it.
    """
    data, root = recipe.training.data, recipe.models.student.init_from
    folders = (components.vae_folder, components.text_folder, components.image_folder)
    found, own = dict(zip(record.MODELS, folders, strict=True)), {}
    for name in record.MODELS:
        beside = None if root is None else Path(root) / name
        if beside is not None and getattr(recipe.pipeline, name) is None and (beside / "config.json").is_file():
            own[name] = beside
    if data.encode is None:
        return record.check_models(data_roots(data.data_path), found | own)
    both = [name for name in own if found[name] is not None]
    other = [name for name in both if record.fingerprint(found[name]) != record.fingerprint(own[name])]
    raise_faults(
        "training.data.encode uses other models than models.student.init_from",
        [f"{name}: {found[name]}, not {own[name]} (pipeline.{name} names another on purpose)" for name in other],
    )


def fingerprint(dataset: Dataset) -> str:
    """Changes when samples, their order, shapes or repeats do, or a file's size; not when the files are moved."""
    digest = hashlib.blake2b(repr((dataset.row_type.name, dataset.shapes)).encode(), digest_size=8)
    if dataset.origin is not None:
        digest.update(dataset.origin.identity.encode())
    for file in dataset.files:
        digest.update(repr((file.path.stat().st_size, file.bounds)).encode())
    digest.update(dataset.places.tobytes() + dataset.buckets.tobytes())
    return digest.hexdigest()


def _plain(data_path: Any) -> Any:
    return list(data_path) if isinstance(data_path, tuple) else data_path
