"""Reading safetensors checkpoints: opened by their headers, leaves read when asked for.

Leaves are read by position into fresh memory instead of through a memory map: host memory holds the bytes
once, and a file cut short while it is open is an error instead of a bus error. No pickle is ever loaded.

The files of a sharded checkpoint hold regions of leaves, which `core.parts` puts together: its leaves are read whole
or by region like any others, whatever the number of processes that wrote them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import parts, regions, stored
from core.errors import UserError, nearest_names, raise_faults
from core.files import read_json
from core.regions import Region
from core.specs import Specs, specs_of
from core.stored import PICKLES, Stored
from core.trees import Params

# What one pass over a tree remembers: outputs of rules that were computed and not yet handed out.
Pass = dict[Any, Any]

INDEX_SUFFIX = ".safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class LazyLeaf:
    """A leaf that knows its shape and dtype and is read when asked for.

    `load(memo)` gives the whole tensor on the CPU; `memo` is shared by the leaves of one pass, so that a
    computation behind several leaves runs once. `rows(start, stop)` gives rows of dimension 0 without
    reading the others, `part(region)` a region; None where there is no such short cut.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[Pass], Tensor]
    rows: Callable[[int, int], Tensor] | None = None
    part: Callable[[Region], Tensor] | None = None

    def read(self, where: Sequence[slice] | None = None, memo: Pass | None = None) -> Tensor:
        """The leaf, or the region `where` of it, as a fresh contiguous tensor on the CPU.

        Args:
            where: one slice per dimension, without steps; None: all. Nothing else is read where the leaf has a short
                cut; else the leaf is read whole and freed.
            memo: of the pass that the leaf is read in, see above.

        Raises:
            UserError: a region outside the leaf.
        """
        region = regions.whole(self.shape) if where is None else regions.inside(where, self.shape)
        if region == regions.whole(self.shape):
            return self.load({} if memo is None else memo)
        if self.part is not None:
            return self.part(region)
        if self.rows is not None:
            return _cut(self.rows(region[0].start, region[0].stop), (slice(None), *region[1:]))
        return _cut(self.load({} if memo is None else memo), region)

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of dimension 0, `[stop - start, ...]`, on the CPU.

        Raises UserError for a scalar and for a range outside the leaf.
        """
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise UserError(f"rows {start}:{stop} do not exist in a leaf of shape {list(self.shape)}")
        return self.read((slice(start, stop), *(slice(0, n) for n in self.shape[1:])))


def _cut(whole: Tensor, where: Region) -> Tensor:
    """A part of a tensor that does not keep the whole in memory; all of it as it is."""
    part = whole[where]
    return part if part.shape == whole.shape else part.clone(memory_format=torch.contiguous_format)


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
    if torch.device(device).type == "cpu":
        return dict(zip(keys, each_leaf(tree, keys), strict=True))
    return {k: x.to(device) for k, x in zip(keys, _ahead(each_leaf(tree, keys)), strict=True)}


def each_leaf(tree: Mapping[str, Tensor | LazyLeaf], keys: Iterable[str]) -> Iterator[Tensor]:
    """`keys` of a tree one at a time, in one pass; lazy leaves are read when their turn comes."""
    memo: Pass = {}
    for leaf in (tree[k] for k in keys):
        yield leaf.load(memo) if isinstance(leaf, LazyLeaf) else leaf


def _ahead(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    """`tensors` in turn, the next one made in the background while the caller copies the one before."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, tensors, None)
        while (tensor := waiting.result()) is not None:
            waiting = pool.submit(next, tensors, None)
            yield tensor


def _file_leaf(tensor: Stored) -> LazyLeaf:
    """A tensor of a file as a leaf."""
    part = functools.partial(stored.read, tensor)
    return LazyLeaf(tensor.shape, tensor.dtype, lambda memo: part(regions.whole(tensor.shape)), part=part)


def _assembled_leaf(leaf: parts.Whole) -> LazyLeaf:
    """A leaf in pieces as one."""
    part = functools.partial(parts.read, leaf)
    return LazyLeaf(leaf.shape, leaf.dtype, lambda memo: part(regions.whole(leaf.shape)), part=part)


def open_checkpoint(path: str | Path | Sequence[str | Path]) -> LazyTree:
    """Opens a checkpoint by its headers; no leaf is read.

    `path` is a `.safetensors` file, a `*.safetensors.index.json`, a folder (with one index: the shards it
    names; else all its `*.safetensors`), or a sequence of these taken as one tree. The files of a folder may be parts
    that several processes wrote (`core.parts`): the leaves are whole. Raises one UserError
    that lists every fault: a missing or damaged file, a shard or a key that an index promises and that is
    not there, a key in two files, parts that are missing or do not make whole leaves, files of different models, a
    pickle.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(p) for p in path]
    faults: list[str] = []
    trees: list[LazyTree] = []
    for each in paths:
        found, wrong = _trees_of(each)
        trees += found
        faults += wrong
    faults += _clashes(trees)
    raise_faults(f"cannot open checkpoint {', '.join(map(str, paths)) if paths else '(no path given)'}", faults)
    if not paths:
        raise UserError("cannot open checkpoint: no path was given")
    leaves = {k: leaf for tree in trees for k, leaf in tree.items()}
    metadata = {k: v for tree in reversed(trees) for k, v in tree.metadata.items()}
    return LazyTree(leaves, metadata, [file for tree in trees for file in tree.files])


def _trees_of(path: Path) -> tuple[list[LazyTree], list[str]]:
    """The trees of one path and its faults: one per file, or one of all the parts."""
    faults: list[str] = []
    try:
        files = _files_of(path)
    except UserError as error:
        return [], [str(error)]
    pieces, trees, damaged = [], [], []
    for file, promised in files:
        try:
            contents = stored.open_file(file)
        except UserError as error:
            faults.append(str(error))
            damaged.append(file.name)
            continue
        lacking = sorted(promised.difference(contents.tensors))
        faults += [f"{file}: lacks {', '.join(lacking)}, which the index promises"] if lacking else []
        if parts.is_part(contents):
            contents.file.release()
            pieces.append(contents)
        else:
            leaves = {k: _file_leaf(tensor) for k, tensor in contents.tensors.items()}
            trees.append(LazyTree(leaves, contents.metadata, [file]))
    if pieces:
        whole, wrong = parts.assemble(pieces, damaged)
        faults += wrong
        metadata = {k: v for k, v in pieces[0].metadata.items() if k not in (parts.PART, parts.REGIONS)}
        leaves = {k: _assembled_leaf(leaf) for k, leaf in whole.items()}
        trees.append(LazyTree(leaves, metadata, [contents.file.path for contents in pieces]))
    return trees, faults


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
