"""The data set that a recipe names: opened, checked against the model, and identified."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from core.errors import raise_faults
from core.geometry import nearest_valid
from train.components import Components, data_roots, strides
from train.config import Data, Recipe
from train.data import Dataset, check_latents, check_tensors, open_dataset, where
from train.families import family_of
from train.online import open_online
from train.preprocess import record
from train.preprocess.metadata import PARSERS
from train.preprocess.models import beside, is_gemma
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


def open_recipe_data(
    data: Data, device: torch.device, streams: Sequence[str] | None = None, *,
    once: Callable[[Callable[[], Any]], Any] = lambda choose: choose(), log: Callable[[str], None] = print,
) -> Dataset:  # fmt: skip
    """The data set of a recipe, as a map or a stream, or encoded on the fly on `device`.

    Args:
        streams: those of the model: the tensors of others are not read; None: all are.
        once, log: how several processes share what one of them finds out, and what is said, see `train.online`.
    """
    path, kind = _plain(data.data_path), row_type(data.preprocessed_data_type)
    if data.encode is not None:
        return open_online(path, kind, data.encode, device, log, streams=streams, once=once)
    check_preprocessed(data_roots(data.data_path))
    if data.dataloader_type == "map":
        return open_dataset(path, kind, streams=streams)
    manifest = None if data.streaming_manifest_path is None else Path(data.streaming_manifest_path)
    how = Streaming(data.streaming_read_batch_size, data.streaming_shuffle_row_groups)
    return open_dataset(path, kind, how, manifest, streams=streams)


def check_data(recipe: Recipe, cfg: Any, dataset: Dataset, components: Components) -> None:
    """Refuses data that do not fit the model or the sizes that `training.data` asks for, naming file and row."""
    family = family_of(recipe)
    video = family.video(cfg)
    found = None if video is None else strides(components, family, cfg)
    raise_faults("latents that the model cannot place", family.place_faults(cfg, found, components.sound))
    if video is not None:
        channels, patch = video
        check_latents(dataset, channels, patch, expected_latents(recipe.training.data, channels, found))
    first = [where(dataset, int((dataset.buckets == i).argmax())) for i in range(len(dataset.signatures))]
    stems, faults = [column.stem for column in dataset.row_type.channels], []
    for row, signature in zip(first, dataset.signatures, strict=True):
        shapes = dict(zip(stems, signature, strict=True))
        faults += [f"{row}: {fault}" for fault in family.tensor_faults(cfg, shapes)]
    raise_faults("samples that do not fit the model", faults)
    for title, wanted in family.tensors(cfg, dataset.row_type.name).items():
        check_tensors(dataset, wanted, title)


def check_models(recipe: Recipe, components: Components) -> None:
    """Refuses data that were made with other models than the run uses, see `record.check_models`.

    Those that come with `init_from` count before those of the data: its weights belong to their latents. To train on
    the latents of another VAE, `pipeline.vae` names it.
    """
    data, root = recipe.training.data, recipe.models.student.init_from
    found, own = dict(components.folders), {}
    for name in found:
        place = None if root is None else Path(root) / name
        if place is not None and getattr(recipe.pipeline, name) is None and (place / "config.json").is_file():
            own[name] = place
    found, own = _with_connectors(found), _with_connectors(own)
    if data.encode is None:
        return record.check_models(data_roots(data.data_path), found | own)
    both = [name for name in own if found.get(name) is not None]
    other = [name for name in both if record.fingerprint(found[name]) != record.fingerprint(own[name])]
    raise_faults(
        "training.data.encode uses other models than models.student.init_from",
        [f"{name}: {found[name]}, not {own[name]} (pipeline.{name} names another on purpose)" for name in other],
    )


def _with_connectors(folders: dict[str, Path | None]) -> dict[str, Path | None]:
    """The folders with that of the connectors, which follow Gemma."""
    text = folders.get("text_encoder")
    found = beside("connectors", text) if text is not None and is_gemma(text) else None
    return folders if found is None else folders | {"connectors": found}


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
