"""Reading safetensors checkpoints: opened by their headers, leaves read when asked for.

Leaves are read by position into fresh memory instead of through a memory map: host memory holds the bytes
once, and a file cut short while it is open is an error instead of a bus error. No pickle is ever loaded.
"""

import dataclasses
import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import UserError, nearest_names, raise_faults
from core.files import read_json
from core.specs import Specs, specs_of
from core.trees import Params

# What one pass over a tree remembers: outputs of rules that were computed and not yet handed out.
Pass = dict[Any, Any]

INDEX_SUFFIX = ".safetensors.index.json"
SLICE, READERS = 16 * 2**20, 8  # bytes that one of so many threads reads at a time
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")

# Names of the safetensors format; sub-byte types are left out, torch stores them two to an element.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclasses.dataclass(frozen=True)
class LazyLeaf:
    """A leaf that knows its shape and dtype and is read when asked for.

    `load(memo)` gives the whole tensor on the CPU; `memo` is shared by the leaves of one pass, so that a
    computation behind several leaves runs once. `rows(start, stop)` gives rows of dimension 0 without
    reading the others; None where there is no such short cut.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[Pass], Tensor]
    rows: Callable[[int, int], Tensor] | None = None

    def read(self) -> Tensor:
        """The whole leaf, a fresh tensor on the CPU."""
        return self.load({})

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of dimension 0, `[stop - start, ...]`, on the CPU.

        Raises UserError for a scalar and for a range outside the leaf.
        """
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise UserError(f"rows {start}:{stop} do not exist in a leaf of shape {list(self.shape)}")
        return self.load({})[start:stop] if self.rows is None else self.rows(start, stop)


class LazyTree(Mapping[str, LazyLeaf]):
    """A checkpoint that is opened but not read.

    `metadata` are the strings of the files' headers, `files` the files behind the leaves.
    """

    def __init__(self, leaves: Mapping[str, LazyLeaf], metadata: Mapping[str, str], files: Sequence[Path] = ()):
        self.leaves = dict(leaves)
        self.metadata = dict(metadata)
        self.files = tuple(files)

    def __getitem__(self, key: str) -> LazyLeaf:
        return self.leaves[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def specs(self) -> Specs:
        """Shapes and dtypes of all leaves."""
        return specs_of(self.leaves)

    def read(self, keys: Iterable[str] | None = None, device="cpu") -> Params:
        """The leaves of `keys` (all when None) as tensors on `device`, in one pass; no other leaf is read.

        Raises UserError naming every key that the tree does not have.
        """
        return read_leaves(self.leaves, self.leaves if keys is None else keys, device)


def unknown(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """`names`, which are not in `known`, each with the nearest known one.

    Many at once mean another model instead of typing errors, and the search is slow: then without.
    """
    return [n + nearest_names(n, known) for n in names] if len(names) <= 8 else list(names)


def read_leaves(tree: Mapping[str, Tensor | LazyLeaf], keys: Iterable[str], device="cpu") -> Params:
    """`keys` of a tree of tensors or lazy leaves, on `device`, in one pass.

    Raises UserError naming every key that the tree does not have.
    """
    keys = list(keys)
    raise_faults("cannot read", [f"no leaf {k}" for k in unknown([k for k in keys if k not in tree], tree)])
    memo: Pass = {}
    load = lambda leaf: leaf.load(memo) if isinstance(leaf, LazyLeaf) else leaf  # noqa: E731
    leaves = [tree[k] for k in keys]
    if torch.device(device).type == "cpu":
        return {k: load(leaf).to(device) for k, leaf in zip(keys, leaves, strict=True)}
    return {k: x.to(device) for k, x in zip(keys, _ahead(load, leaves), strict=True)}


def _ahead(load: Callable[[Any], Tensor], leaves: Iterable[Any]) -> Iterator[Tensor]:
    """`load` of each in turn, the next one in the background while the caller copies the one before."""
    with ThreadPoolExecutor(1) as pool:
        waiting = None
        for leaf in leaves:
            loaded, waiting = waiting, pool.submit(load, leaf)
            if loaded is not None:
                yield loaded.result()
        if waiting is not None:
            yield waiting.result()


class _File:
    """An open file, read by position; closed when the last leaf that needs it is gone.

    Holding it open keeps the bytes that the header described readable when a save replaces the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.fd)

    def fill(self, buffer: memoryview, offset: int, key: str) -> None:
        """Reads `len(buffer)` bytes at `offset`, large ones in slices side by side: one thread alone neither
        copies nor touches fresh memory as fast as a disk cache gives it.

        Raises UserError when the file ends before.
        """
        if len(buffer) <= SLICE:
            return self._fill(buffer, offset, key)
        starts = range(0, len(buffer), SLICE)
        with ThreadPoolExecutor(min(READERS, len(starts))) as pool:
            for _ in pool.map(lambda i: self._fill(buffer[i : i + SLICE], offset + i, key), starts):
                pass

    def _fill(self, buffer: memoryview, offset: int, key: str) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self.fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise UserError(f"{self.path}: cannot read {key}: {error.strerror}") from error
            if got == 0:
                end = offset + len(buffer)
                raise UserError(f"{self.path}: cut short after it was opened: {key} ends at byte {end}")
            done += got


def _file_leaf(file: _File, key: str, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> LazyLeaf:
    """The leaf whose bytes begin at `start` of the file."""

    def read(at: int, part: tuple[int, ...]) -> Tensor:
        flat = torch.empty(math.prod(part), dtype=dtype)
        file.fill(memoryview(flat.view(torch.uint8).numpy()), at, key)
        return flat.reshape(part)

    def rows(first: int, last: int) -> Tensor:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        return read(start + first * row_bytes, (last - first, *shape[1:]))

    return LazyLeaf(shape, dtype, lambda memo: read(start, shape), rows if shape else None)


def _header(file: _File) -> tuple[dict[str, Any], int]:
    """`(header, first byte of the data)`. Raises UserError for what is not a whole safetensors file."""
    size = os.fstat(file.fd).st_size
    start = os.pread(file.fd, 24, 0)
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{file.path}: a Git LFS pointer, not the weights: run `git lfs pull`")
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    if len(start) < 8 or length + 8 > size:
        raise UserError(f"{file.path}: not safetensors or cut short: {size} bytes, its header alone says {length + 8}")
    try:
        header = json.loads(os.pread(file.fd, length, 8))
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        expected = 8 + length + max((v["data_offsets"][1] for v in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise UserError(f"{file.path}: not safetensors: the header of {length} bytes is corrupt") from None
    if size != expected:
        state = "cut short" if size < expected else "too long"
        raise UserError(f"{file.path}: {state}: {size} bytes, its header says {expected}")
    return header, 8 + length


def _open_file(path: Path) -> LazyTree:
    """One safetensors file by its header. Raises UserError naming the file."""
    if path.suffix in PICKLES:
        raise UserError(f"{path}: a pickle, which can run code when loaded: convert it to safetensors")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    file = _File(path)
    header, data = _header(file)
    try:
        # The library judges what the header says of each leaf: overlaps, holes, sizes that do not fit shapes.
        with safe_open(path, "pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not safetensors: {error}") from None
    metadata = header.pop("__metadata__", {})
    faults = [f"{k} has dtype {v['dtype']}" for k, v in header.items() if v["dtype"] not in DTYPES]
    raise_faults(f"{path}: dtypes that cannot be read, only {', '.join(DTYPES)}", faults)
    leaves = {
        k: _file_leaf(file, k, tuple(v["shape"]), DTYPES[v["dtype"]], data + v["data_offsets"][0])
        for k, v in header.items()
    }
    return LazyTree(leaves, metadata, [path])


def open_checkpoint(path: str | Path | Sequence[str | Path]) -> LazyTree:
    """Opens a checkpoint by its headers; no leaf is read.

    `path` is a `.safetensors` file, a `*.safetensors.index.json`, a folder (with one index: the shards it
    names; else all its `*.safetensors`), or a sequence of these taken as one tree. Raises one UserError
    that lists every fault: a missing or damaged file, a shard or a key that an index promises and that is
    not there, a key in two files, files of different models, a pickle.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(p) for p in path]
    faults: list[str] = []
    files: list[tuple[Path, set[str]]] = []
    for each in paths:
        try:
            files += _files_of(each)
        except UserError as error:
            faults.append(str(error))
    trees = []
    for file, promised in files:
        try:
            trees.append(_open_file(file))
            lacking = sorted(promised.difference(trees[-1]))
            faults += [f"{file}: lacks {', '.join(lacking)}, which the index promises"] if lacking else []
        except UserError as error:
            faults.append(str(error))
    faults += _clashes(trees)
    raise_faults(f"cannot open checkpoint {', '.join(map(str, paths)) if paths else '(no path given)'}", faults)
    if not paths:
        raise UserError("cannot open checkpoint: no path was given")
    leaves = {k: leaf for tree in trees for k, leaf in tree.items()}
    metadata = {k: v for tree in reversed(trees) for k, v in tree.metadata.items()}
    return LazyTree(leaves, metadata, [file for file, _ in files])


def _files_of(path: Path) -> list[tuple[Path, set[str]]]:
    """`(file, keys that an index promises in it)` of one path. Raises UserError."""
    if path.name.endswith(".index.json"):
        return _files_of_index(path)
    if not path.is_dir():
        return [(path, set())]
    indices = sorted(path.glob("*" + INDEX_SUFFIX))
    if len(indices) > 1:
        raise UserError(f"{path}: several indices, give one: {', '.join(i.name for i in indices)}")
    if indices:
        return _files_of_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if files:
        return [(file, set()) for file in files]
    if (path / "model_index.json").is_file():
        raise UserError(f"{path}: a pipeline folder, give one of its models: {path / 'transformer'}")
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
    hint = f"; pickles are not loaded, convert them: {', '.join(pickles)}" if pickles else ""
    raise UserError(f"{path}: no *.safetensors in this folder{hint}")


def _files_of_index(index: Path) -> list[tuple[Path, set[str]]]:
    """The shards of an index in their order, with the keys each must hold. Raises UserError."""
    data = read_json(index)
    table = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise UserError(f"{index}: not an index: weight_map must map keys to file names")
    outside = sorted({name for name in table.values() if Path(name).name != name})
    if outside:
        raise UserError(f"{index}: shards must lie beside the index, not at {', '.join(outside)}")
    shards: dict[str, set[str]] = {}
    for key, name in table.items():
        shards.setdefault(name, set()).add(key)
    return [(index.parent / name, keys) for name, keys in shards.items()]


def _clashes(trees: Sequence[LazyTree]) -> list[str]:
    """Faults of trees that do not go together: keys in two files, files of different models."""
    faults, home = [], {}
    for i, tree in enumerate(trees):
        twice: dict[int, list[str]] = {}
        for key in tree:
            if home.setdefault(key, i) != i:
                twice.setdefault(home[key], []).append(key)
        faults += [f"{trees[j].files[0]} and {tree.files[0]} both hold {', '.join(k)}" for j, k in twice.items()]
    models = {tree.metadata["model_type"]: tree.files[0] for tree in trees if "model_type" in tree.metadata}
    if len(models) > 1:
        faults.append("files of different models: " + ", ".join(f"{file} is {name}" for name, file in models.items()))
    return faults
