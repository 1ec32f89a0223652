"""Flat parameter trees: `dict[str, Tensor]` with dotted checkpoint paths as keys.

Nested structures (train state, caches, carries) are mapped with optree; a parameter tree itself is a
plain dict, so ordinary dict operations are the tree operations.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optree
from torch import Tensor

from core.errors import UserError

Params = dict[str, Tensor]
Layer = Mapping[str, Tensor] | Callable[..., Any]

NAMESPACE = "latentree"


class Layered(Mapping):
    """Root leaves of a model as a mapping, with its layers apart in `stacks`.

    Layouts other than a flat dict (sharded units, streamed weights) hand this to a model's `forward`.
    A layer is a tree with block-local keys, or a callable that satisfies
    `layer(fn, *args) == fn(own_tree, *args)`.
    """

    def __init__(self, root: Mapping[str, Tensor], stacks: Mapping[str, Sequence[Layer]]):
        self.root = root
        self.stacks = stacks

    def __getitem__(self, key: str) -> Tensor:
        return self.root[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.root)

    def __len__(self) -> int:
        return len(self.root)


def split_key(key: str, name: str) -> tuple[int, str] | None:
    """`("blocks.3.attn1.to_q.weight", "blocks") -> (3, "attn1.to_q.weight")`; None for other keys."""
    prefix = name + "."
    if not key.startswith(prefix):
        return None
    index, _, rest = key[len(prefix) :].partition(".")
    # Only the one way of writing a number: "03" and "3" would be two keys of one layer.
    plain = index.isascii() and index.isdigit() and str(int(index)) == index
    return (int(index), rest) if rest and plain else None


def stack(params: Mapping[str, Any], name: str) -> Sequence[Layer]:
    """The layers of one stack: slices of a flat dict with block-local keys, or `params.stacks[name]`.

    Raises UserError when the flat dict has no such layer or a gap in their numbers.
    """
    if isinstance(params, Layered):
        return params.stacks[name]
    layers: dict[int, dict[str, Any]] = {}
    for key, value in params.items():
        if (at := split_key(key, name)) is not None:
            layers.setdefault(at[0], {})[at[1]] = value
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise UserError(f"stack {name!r}: expected layers 0..n-1, the tree has {sorted(layers)}")
    return [layers[i] for i in range(len(layers))]


def unstack(layers: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Inverse of `stack` on plain trees: `{name.i.key: leaf}`."""
    return {f"{name}.{i}.{key}": leaf for i, layer in enumerate(layers) for key, leaf in layer.items()}


def layered(params: Mapping[str, Any], names: Sequence[str]) -> Layered:
    """A flat dict as `Layered`, with one stack per name."""
    root = {k: v for k, v in params.items() if all(split_key(k, n) is None for n in names)}
    return Layered(root, {name: stack(params, name) for name in names})


def partition(tree: Mapping[str, Any], keep: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`(leaves whose key satisfies keep, the others)`, each in the order of `tree`."""
    return {k: v for k, v in tree.items() if keep(k)}, {k: v for k, v in tree.items() if not keep(k)}


def combine(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Union of disjoint trees. Raises UserError naming every key that stands in two of them."""
    out: dict[str, Any] = {}
    twice = [k for tree in trees for k in tree if k in out or out.update({k: tree[k]})]
    if twice:
        raise UserError(f"combine: keys in more than one tree: {sorted(set(twice))}")
    return out


def map_tree(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps `fn` over the leaves of nested structures of equal shape (optree; None is a leaf)."""
    return optree.tree_map(fn, tree, *rest, none_is_leaf=True, namespace=NAMESPACE)


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a nested structure, and what builds it again from such leaves."""
    leaves, shape = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    return leaves, shape.unflatten


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor of a nested structure, in optree's order."""
    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def num_params(tree: Mapping[str, Any]) -> int:
    """Number of scalars in a tree of anything with `.shape`."""
    total = 0
    for leaf in tree.values():
        size = 1
        for n in leaf.shape:
            size *= n
        total += size
    return total


def num_bytes(tree: Mapping[str, Any]) -> int:
    """Bytes of a tree of anything with `.shape` and `.dtype`."""
    return sum(num_params({k: leaf}) * leaf.dtype.itemsize for k, leaf in tree.items())


def components(key: str) -> tuple[str, ...]:
    """Path components of a key: `"a.b.weight" -> ("a", "b", "weight")`."""
    return tuple(key.split("."))


def has_component(key: str, names: Iterable[str]) -> bool:
    """True when a whole path component of `key` is in `names` (`audio` does not match `audio_proj`)."""
    return not set(components(key)).isdisjoint(names)
