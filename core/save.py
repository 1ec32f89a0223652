"""Writing safetensors checkpoints: sharded above a size, whole or absent, with metadata in every header."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from core.checkpoint import INDEX_SUFFIX, LazyLeaf, LazyTree, each_leaf
from core.errors import UserError, raise_faults
from core.files import atomic_file, atomic_folder, fsync_path, write_json
from core.parts import Place, part_metadata, part_name
from core.stored import DTYPES
from core.trees import num_bytes

SCHEMA_VERSION = 1  # of the files, not of what a run notes beside them
STEM = "diffusion_pytorch_model"
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(model_type: str, config: Mapping[str, Any], transforms: Sequence[str] = ()) -> dict[str, str]:
    """The metadata of a checkpoint: model type, its config and the transforms applied as JSON, versions.

    Raises UserError for a config that JSON cannot hold.
    """
    try:
        config_json = json.dumps(dict(config), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"config of {model_type} cannot be written as JSON: {error}") from None
    return {
        "model_type": model_type,
        "config": config_json,
        "transforms": json.dumps(list(transforms)),
        "schema_version": str(SCHEMA_VERSION),
        "project_version": _project_version(),
    }


def _project_version() -> str:
    try:
        return importlib.metadata.version("latentree")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"  # run from a source tree that is not installed


def check_metadata(tree: LazyTree, model_type: str) -> None:
    """Refuses a checkpoint of another model or of a newer schema, in one UserError.

    Files of other projects carry neither entry and pass: their keys and shapes are what can be checked.
    """
    faults = []
    found = tree.metadata.get("model_type", model_type)
    if found != model_type:
        faults.append(f"it holds a model of type {found!r}, wanted {model_type!r}")
    version = tree.metadata.get("schema_version", str(SCHEMA_VERSION))
    if not (version.isascii() and version.isdigit()):
        faults.append(f"schema_version is {version!r}, must be a number")
    elif int(version) > SCHEMA_VERSION:
        writer = tree.metadata.get("project_version", "unknown")
        faults.append(f"schema_version is {version} (written by {writer}), this one reads up to {SCHEMA_VERSION}")
    raise_faults(f"checkpoint {', '.join(map(str, tree.files))} does not fit", faults)


def save_file(path: str | Path, tree: Mapping[str, Tensor | LazyLeaf], metadata: Mapping[str, str]) -> None:
    """Writes all leaves into one safetensors file that is whole or absent.

    Raises UserError for what cannot be stored, before anything is written, and for a full disk.
    """
    _check_storable(path, tree, metadata)
    with _disk_faults(path, num_bytes(tree)), atomic_file(path) as part:
        _write(part, tree, list(tree), metadata)


def save_checkpoint(
    folder: str | Path,
    tree: Mapping[str, Tensor | LazyLeaf],
    *,
    metadata: Mapping[str, str],
    stem: str = STEM,
    max_shard_bytes: int = 10 * 2**30,
) -> list[Path]:
    """Writes `stem.safetensors`, or shards with an index when the leaves take more than `max_shard_bytes`.

    The folder's new content appears at once: files of an earlier save under `stem` are gone, other files
    stay. Lazy leaves are read one at a time, so that memory is bounded by the largest. Returns the
    safetensors files. Raises UserError for what cannot be stored, before anything is written, and for a
    full disk; the earlier content is then untouched.
    """
    _check_storable(folder, tree, metadata)
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes is {max_shard_bytes}, must be at least 1")
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file stands where the checkpoint folder should be")
    shards = plan_shards(tree, max_shard_bytes)
    names = shard_names(stem, len(shards))
    with _disk_faults(folder, num_bytes(tree)), atomic_folder(folder) as part:
        if folder.exists():
            _keep_others(folder, part, stem)
        for name, keys in zip(names, shards, strict=True):
            _write(part / name, tree, keys, metadata)
        if len(shards) > 1:
            weight_map = {k: name for name, keys in zip(names, shards, strict=True) for k in keys}
            total = {"total_size": num_bytes(tree)}
            write_json(part / (stem + INDEX_SUFFIX), {"metadata": total, "weight_map": weight_map})
    return [folder / name for name in names]


def save_part(
    folder: str | Path,
    tree: Mapping[str, Tensor | LazyLeaf],
    places: Mapping[str, Place],
    number: int,
    count: int,
    *,
    metadata: Mapping[str, str],
) -> Path:
    """Writes one of the `count` files of a sharded checkpoint (see `core.parts`) and flushes it to the disk.

    It is not atomic: the folder appears when all processes are done. A leaf is read when its turn comes.
    """
    path = Path(folder) / part_name(number, count)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, tree, list(tree), {**metadata, **part_metadata(places, number, count)})
    fsync_path(path)
    return path


def plan_shards(tree: Mapping[str, Any], max_shard_bytes: int) -> list[list[str]]:
    """Keys per shard, in the order of `tree`; a leaf larger than a shard gets one of its own."""
    shards: list[list[str]] = []
    room = 0
    for key, leaf in tree.items():
        size = num_bytes({key: leaf})
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(key)
        room -= size
    return shards


def shard_names(stem: str, count: int) -> list[str]:
    """File names of `count` shards, as on the Hugging Face hub."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _check_storable(path: str | Path, tree: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Raises one UserError listing every leaf and metadata entry that a safetensors file cannot hold."""
    faults = [] if tree else ["the tree is empty"]
    for key, leaf in tree.items():
        if not isinstance(key, str) or key == "__metadata__":
            faults.append(f"{key!r} is not a key of a leaf")
        elif not isinstance(leaf, Tensor | LazyLeaf):
            faults.append(f"{key} is a {type(leaf).__name__}, not a tensor")
        elif leaf.dtype not in NAMES:
            faults.append(f"{key} has dtype {leaf.dtype}, which safetensors does not store")
        elif isinstance(leaf, Tensor) and leaf.is_meta:
            faults.append(f"{key} is on the meta device and has no data")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            faults.append(f"metadata {key!r} is {value!r}, keys and values must be strings")
    raise_faults(f"cannot save {path}", faults)


@contextlib.contextmanager
def _disk_faults(path: str | Path, needed: int) -> Iterator[None]:
    """Turns failures of the disk into a UserError that names the path and the bytes needed."""
    try:
        yield
    except OSError as error:
        above = next((p for p in Path(path).absolute().parents if p.exists()), Path("/"))
        free = shutil.disk_usage(above).free
        raise UserError(
            f"{path}: not saved: {error}; {needed} bytes are needed, {free} are free; what stood there is untouched"
        ) from error


def _keep_others(folder: Path, part: Path, stem: str) -> None:
    """Carries all but the files of an earlier save under `stem` over to `part`, by hard links if possible."""
    name = re.escape(stem)
    stale = re.compile(rf"{name}(-\d+-of-\d+)?\.safetensors|{name}{re.escape(INDEX_SUFFIX)}")

    def skipped(where: str, names: list[str]) -> list[str]:
        return [n for n in names if stale.fullmatch(n)] if Path(where) == folder else []

    shutil.copytree(folder, part, symlinks=True, ignore=skipped, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)  # a file system without hard links


def _write(path: Path, tree: Mapping[str, Tensor | LazyLeaf], keys: Sequence[str], metadata: Mapping[str, str]) -> None:
    """One safetensors file, a leaf at a time: memory holds the largest, and what its rule made with it.

    Wide dtypes come first, as the library writes them, so that every leaf is aligned. The metadata entry `format` is
    what other libraries look for before they load a file.
    """
    keys = sorted(keys, key=lambda k: -tree[k].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for key in keys:
        start, end = end, end + num_bytes({key: tree[key]})
        name, shape = NAMES[tree[key].dtype], list(tree[key].shape)
        header[key] = {"dtype": name, "shape": shape, "data_offsets": [start, end]}
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(blob)) + blob)
        for key, leaf in zip(keys, each_leaf(tree, keys), strict=True):
            _append(file, key, leaf, header[key]["data_offsets"])


def _append(file: BinaryIO, key: str, leaf: Tensor, place: Sequence[int]) -> None:
    """Writes the bytes of a leaf. RuntimeError when they are not those that its header promised: an error of ours."""
    data = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() != place[1] - place[0]:
        raise RuntimeError(f"{key}: read {data.numel()} bytes, its shape and dtype said {place[1] - place[0]}")
    file.write(memoryview(data.numpy()))
