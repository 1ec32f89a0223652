"""Checkpoints of joined and of separate projections fill either kind of model: weights, moments and averages alike."""

from collections.abc import Mapping, Sequence

from core.checkpoint import LazyTree
from core.rules import pack, unpack
from core.specs import ParamSpec, Specs
from core.transforms import Transform, apply
from core.trees import components

PACKED: Mapping[str, Sequence[str]] = {"to_qkv": ("to_q", "to_k", "to_v"), "to_kv": ("to_k", "to_v")}


def repacked(tree: LazyTree, wanted: Specs) -> LazyTree:
    """`tree` with its projections joined or split by rows where `wanted` has them so; nothing is read now.

    What else differs stays as it is. A leaf that is joined or split is read with all of its sources, even when only a
    region of it is asked for. Raises UserError for row counts that do not add up.
    """
    for target, parts in PACKED.items():
        for transform in _transforms(tree.specs, wanted, target, parts):
            tree = apply(tree, transform(tree.specs))
    return tree


def _transforms(have: Specs, wanted: Specs, target: str, parts: Sequence[str]) -> list[Transform]:
    """What joins the leaves of `have` below `parts`, or splits those below `target`, as `wanted` has them."""
    joined = [k for k in _below(wanted, have, target) if all(p in have for p in _parts_of(k, target, parts))]
    split: dict[tuple[int, ...], set[str]] = {}
    for key in _below(have, wanted, target):
        into = [wanted.get(p) for p in _parts_of(key, target, parts)]
        if all(spec is not None and spec.shape for spec in into):
            split.setdefault(tuple(spec.shape[0] for spec in into), set()).add(key)
    sources = {p for k in joined for p in _parts_of(k, target, parts)}
    out = [pack(target, parts, under=sources.__contains__)] if joined else []
    return out + [
        unpack(target, dict(zip(parts, rows, strict=True)), under=keys.__contains__) for rows, keys in split.items()
    ]


def _below(tree: Mapping[str, ParamSpec], other: Mapping[str, ParamSpec], target: str) -> list[str]:
    """Keys of `tree` with the path component `target` that `other` has not."""
    return [k for k in tree if target in components(k) and k not in other]


def _parts_of(key: str, target: str, parts: Sequence[str]) -> list[str]:
    """Keys of the separate leaves that `key` joins: its last component `target` replaced by each part."""
    path = list(components(key))
    at = len(path) - 1 - path[::-1].index(target)
    return [".".join([*path[:at], part, *path[at + 1 :]]) for part in parts]
