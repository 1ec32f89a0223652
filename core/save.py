"""Writing safetensors checkpoints: sharded above a size, whole or absent, with metadata in every header."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from core.checkpoint import DTYPES, INDEX_SUFFIX, LazyLeaf, LazyTree, read_leaves
from core.errors import UserError, raise_faults
from core.files import atomic_file, atomic_folder, write_json
from core.trees import Params, num_bytes

SCHEMA_VERSION = 1
STEM = "diffusion_pytorch_model"


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
    stay. Lazy leaves are read shard by shard, so that memory is bounded by one shard. Returns the
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
        elif leaf.dtype not in DTYPES.values():
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
    except (OSError, SafetensorError) as error:
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
    """One safetensors file; `format` is what other libraries look for before they load it."""
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(_stored(read_leaves(tree, keys)), path, metadata={"format": "pt", **metadata})
    path.chmod(mode)  # the library's files are private to the user, whatever the umask


def _stored(tensors: Params) -> Params:
    """Contiguous CPU tensors, each alone in its storage."""
    out: Params = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        out[key] = tensor
    return out
