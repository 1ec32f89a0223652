"""Constructors of lossless and lossy transforms: rename, cast, pack, unpack, select, drop.

Names of parts of a key (`to_q`, `audio`) are whole path components, never substrings.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from core.checkpoint import unknown
from core.errors import UserError, raise_faults
from core.specs import ParamSpec, Specs
from core.transforms import Bound, Rule, Transform, bind_rules, move
from core.trees import components, has_component

Scope = Callable[[str], bool] | Sequence[str] | None


def rename(table: Mapping[str, str], *, partial: bool = False) -> Transform:
    """Gives the leaf `old` the key `new` for each `old: new` of `table`; other leaves keep theirs.

    Binding raises UserError for table keys that match no leaf (not when `partial`) and for two leaves that
    get one key.
    """
    table = dict(table)
    what = f"rename {len(table)} keys"

    def bind(specs: Specs) -> Bound:
        missing = [] if partial else [k for k in table if k not in specs]
        faults = [f"no leaf {k}" for k in unknown(missing, specs)]
        rules = [move(old, new, specs[old], f"rename {old}") for old, new in table.items() if old in specs]
        return bind_rules(specs, rules, what, faults)

    return bind


def rename_regex(table: Sequence[tuple[str, str]], *, partial: bool = False) -> Transform:
    """Rewrites each key by the first `(pattern, replacement)` that is found in it, as `re.sub` once does.

    Binding raises UserError for patterns that change no key, because they match none or only such that an
    earlier pattern takes (not when `partial`), and for two leaves that get one key.
    """
    patterns = [(re.compile(pattern), replacement) for pattern, replacement in table]
    what = f"rename by {len(patterns)} patterns"

    def bind(specs: Specs) -> Bound:
        rules: list[Rule] = []
        idle = set(range(len(patterns)))
        for key, spec in specs.items():
            first = next((i for i, (pattern, _) in enumerate(patterns) if pattern.search(key)), None)
            if first is None:
                continue
            idle.discard(first)
            pattern, replacement = patterns[first]
            rules.append(move(key, pattern.sub(replacement, key, count=1), spec, f"rename {key}"))
        faults = [f"pattern {i} {table[i][0]!r} is the first to match no key" for i in sorted(idle) if not partial]
        return bind_rules(specs, rules, what, faults)

    return bind


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """True when every number of the floating dtype `source` is one of `target` (NaN payloads aside)."""
    a, b = torch.finfo(source), torch.finfo(target)
    # Precision, largest number and smallest subnormal (the spacing at the bottom) all at least as good.
    return b.eps <= a.eps and b.max >= a.max and b.smallest_normal * b.eps <= a.smallest_normal * a.eps


def cast(dtype: torch.dtype, keep_fp32: Callable[[str], bool] = lambda key: False) -> Transform:
    """Casts floating leaves to `dtype`; leaves whose spec or key says `keep_fp32` become float32.

    Integer leaves stay, as do quantised ones (8-bit floats) with their companions: these are codes and
    scales, not numbers of a precision. Lossless where it widens. Raises UserError for a `dtype` that is
    not a floating one of 16 bits or more.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise UserError(f"cast to {dtype}: must be a floating dtype of 16 bits or more; quantising needs scales")
    what = f"cast {_dtype_name(dtype)}"

    def bind(specs: Specs) -> Bound:
        codes = {k for k, s in specs.items() if s.dtype.is_floating_point and s.dtype.itemsize < 2}
        codes |= {c for k in codes for c in specs[k].companions}
        rules = []
        for key, spec in specs.items():
            to = torch.float32 if spec.keep_fp32 or keep_fp32(key) else dtype
            if spec.dtype.is_floating_point and key not in codes and to != spec.dtype:
                rules.append(_cast_rule(key, spec, to))
        return bind_rules(specs, rules, what)

    return bind


def _cast_rule(key: str, spec: ParamSpec, dtype: torch.dtype) -> Rule:
    def to(leaf: Tensor) -> tuple[Tensor, ...]:
        return (leaf.to(dtype),)

    def back(leaf: Tensor) -> tuple[Tensor, ...]:
        return (leaf.to(spec.dtype),)

    name = f"cast {_dtype_name(spec.dtype)} to {_dtype_name(dtype)}"
    inverse = back if widens(spec.dtype, dtype) else None
    return Rule((key,), (key,), (dataclasses.replace(spec, dtype=dtype),), to, inverse, name, rowwise=bool(spec.shape))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PACKED = "packed "  # in front of the logical axis of joined rows


def pack(target: str, parts: Sequence[str], *, under: Scope = None) -> Transform:
    """Joins leaves along dimension 0: `x.to_q.weight, x.to_k.weight, ... -> x.to_qkv.weight`.

    `parts` are path components in the order of the rows; every leaf below them is joined (weight, bias,
    scales), with unequal row counts if need be. `under` restricts it to keys with one of these components,
    or to keys that satisfy a function. The inverse splits at the rows seen when bound. Binding raises
    UserError for incomplete groups, mixed ones (packed and split leaves both there), parts of inconsistent
    trailing dimensions or dtypes, scalars, and when nothing matches.
    """
    parts = _parts("pack", target, parts)
    what = f"pack {target} <- {', '.join(parts)}"

    def bind(specs: Specs) -> Bound:
        inside, faults = _scope(under, specs)
        groups: dict[str, dict[str, str]] = {}
        for key in filter(inside, specs):
            if (part := _last_component(key, parts)) is not None:
                groups.setdefault(_swap(key, part, target), {})[part] = key
        faults += [] if groups else [f"no leaf below {' or '.join(parts)}" + _already(specs, target)]
        rules = []
        for packed, group in groups.items():
            found = _pack_faults(packed, group, parts, specs)
            faults += found
            rules += [] if found else [_pack_rule(packed, [group[p] for p in parts], specs)]
        return bind_rules(specs, rules, what, faults)

    return bind


def _pack_faults(packed: str, group: Mapping[str, str], parts: Sequence[str], specs: Specs) -> list[str]:
    """What keeps the leaves of one group from being joined."""
    faults = []
    some_part, some_key = next(iter(group.items()))
    missing = [_swap(some_key, some_part, p) for p in parts if p not in group]
    adapters = [k for k in group.values() if any(c.startswith("lora_") for c in components(k))]
    if adapters:
        faults.append(f"adapters do not join by rows, merge them before packing: {', '.join(adapters)}")
    if missing:
        faults.append(f"incomplete {packed}: {', '.join(group.values())} there, {', '.join(missing)} missing")
    if packed in specs:
        faults.append(f"mixed: {packed} is there beside {', '.join(group.values())}")
    leaves = [specs[key] for key in group.values()]
    if any(not s.shape for s in leaves):
        faults.append(f"scalars cannot be joined: {', '.join(k for k in group.values() if not specs[k].shape)}")
    elif len({(s.shape[1:], s.dtype) for s in leaves}) > 1:
        seen = (f"{k} {list(specs[k].shape)} {_dtype_name(specs[k].dtype)}" for k in group.values())
        faults.append(f"inconsistent trailing dimensions or dtypes: {', '.join(seen)}")
    return faults


def _pack_rule(packed: str, sources: Sequence[str], specs: Specs) -> Rule:
    leaves = [specs[k] for k in sources]
    rows = tuple(s.shape[0] for s in leaves)
    spec = dataclasses.replace(
        leaves[0],
        shape=(sum(rows), *leaves[0].shape[1:]),
        axes=_packed_axes(leaves[0].axes) if len({s.axes for s in leaves}) == 1 else None,
        keep_fp32=any(s.keep_fp32 for s in leaves),
        companions=tuple(c for s in leaves for c in s.companions),
    )
    return Rule(tuple(sources), (packed,), (spec,), _join, _splitter(rows), f"pack {packed}")


def _packed_axes(axes: tuple[str | None, ...] | None) -> tuple[str | None, ...] | None:
    """Axes of joined leaves. Their rows get a name of their own: a cut of them would not be one of each part."""
    return axes if not axes or axes[0] is None else (PACKED + axes[0], *axes[1:])


def _join(*leaves: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat(leaves),)


def _splitter(rows: tuple[int, ...]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda leaf: torch.split(leaf, rows)


def unpack(target: str, parts: Mapping[str, int] | Sequence[str], *, under: Scope = None) -> Transform:
    """Splits leaves along dimension 0, for checkpoints that arrive packed; the converse of `pack`.

    `parts` maps path components to their rows, in the order of the rows; without row counts the split is
    even. Binding raises UserError for row counts that do not sum to the leaf's rows, rows that do not
    divide evenly, mixed groups (packed and split leaves both there), scalars, and when nothing matches.
    """
    rows = dict(parts) if isinstance(parts, Mapping) else None
    names = _parts("unpack", target, parts)
    bad = [f"{p} has {n!r} rows" for p, n in rows.items() if type(n) is not int or n < 1] if rows is not None else []
    raise_faults(f"unpack {target}: row counts must be integers above 0", bad)
    what = f"unpack {target} -> {', '.join(names)}"

    def bind(specs: Specs) -> Bound:
        inside, faults = _scope(under, specs)
        packed = [key for key in filter(inside, specs) if has_component(key, (target,))]
        faults += [] if packed else [f"no leaf below {target}"]
        rules = []
        for key in packed:
            targets = [_swap(key, target, p) for p in names]
            found = _unpack_faults(key, specs[key].shape, targets, rows, specs)
            faults += found
            rules += [] if found else [_unpack_rule(key, targets, rows, specs[key])]
        return bind_rules(specs, rules, what, faults)

    return bind


def _unpack_faults(
    key: str, shape: tuple[int, ...], targets: Sequence[str], rows: Mapping[str, int] | None, specs: Specs
) -> list[str]:
    """What keeps one packed leaf from being split."""
    there = [t for t in targets if t in specs]
    faults = [f"mixed: {key} is there beside {', '.join(there)}"] if there else []
    if not shape:
        faults.append(f"{key} is a scalar and cannot be split")
    elif rows is None and shape[0] % len(targets):
        faults.append(f"{key} has {shape[0]} rows, which do not divide evenly by {len(targets)}: give row counts")
    elif rows is not None and sum(rows.values()) != shape[0]:
        counts = " + ".join(map(str, rows.values()))
        faults.append(f"inconsistent rows: {key} has {shape[0]}, the parts {counts} = {sum(rows.values())}")
    return faults


def _unpack_rule(key: str, targets: Sequence[str], rows: Mapping[str, int] | None, spec: ParamSpec) -> Rule:
    counts = (spec.shape[0] // len(targets),) * len(targets) if rows is None else tuple(rows.values())
    specs = tuple(dataclasses.replace(spec, shape=(n, *spec.shape[1:])) for n in counts)
    return Rule((key,), tuple(targets), specs, _splitter(counts), _join, f"unpack {key}")


def select(names: Sequence[str]) -> Transform:
    """Keeps the leaves with one of the path components `names`, and their companions; drops the others.

    Binding raises UserError for a name that matches no leaf.
    """
    names = _names(names)

    def bind(specs: Specs) -> Bound:
        kept = _with_companions([k for k in specs if has_component(k, names)], specs)
        rules = [_drop_rule(k) for k in specs if k not in kept]
        return bind_rules(specs, rules, f"select {', '.join(names)}", _unmatched(names, specs))

    return bind


def drop(names: Sequence[str]) -> Transform:
    """Drops the leaves with one of the path components `names`, and their companions.

    Binding raises UserError for a name that matches no leaf, and for a companion or a tied leaf's
    original that would go while the leaf that needs it stays.
    """
    names = _names(names)

    def bind(specs: Specs) -> Bound:
        gone = _with_companions([k for k in specs if has_component(k, names)], specs)
        rules = [_drop_rule(k) for k in specs if k in gone]
        return bind_rules(specs, rules, f"drop {', '.join(names)}", _unmatched(names, specs))

    return bind


def _drop_rule(key: str) -> Rule:
    return Rule((key,), (), (), lambda leaf: (), None, "drop")


def _with_companions(keys: Iterable[str], specs: Specs) -> set[str]:
    """`keys` and, transitively, those of their companions that are in `specs`."""
    out: set[str] = set()
    todo = list(keys)
    while todo:
        key = todo.pop()
        if key not in out and key in specs:
            out.add(key)
            todo += specs[key].companions
    return out


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Path components as a tuple; a single one may be given bare."""
    return (names,) if isinstance(names, str) else tuple(names)


def _parts(verb: str, target: str, parts: Iterable[str]) -> tuple[str, ...]:
    """The parts of a packed component. Raises UserError for too few, duplicates and dotted names."""
    names = _names(parts)
    faults = [f"{n!r} is not one path component" for n in (target, *names) if not n or "." in n]
    faults += [f"duplicate part {n}" for n in sorted({n for n in names if names.count(n) > 1})]
    faults += [f"{target} cannot be a part of itself"] if target in names else []
    faults += [] if len(names) > 1 else [f"at least two parts are needed, got {list(names)}"]
    raise_faults(f"{verb} {target}", faults)
    return names


def _scope(under: Scope, specs: Specs) -> tuple[Callable[[str], bool], list[str]]:
    """The predicate on keys that `under` means, and faults for its names that match nothing."""
    if under is None:
        return lambda key: True, []
    if callable(under):
        return under, []
    names = _names(under)
    return lambda key: has_component(key, names), _unmatched(names, specs)


def _unmatched(names: Sequence[str], specs: Specs) -> list[str]:
    """Faults for names that are no path component of any key."""
    present = {c for key in specs for c in components(key)}
    missing = [n for n in names if n not in present]
    faults = [f"no key has the path component {n}" for n in unknown(missing, present)]
    return faults if names else ["no path component was given"]


def _last_component(key: str, names: Sequence[str]) -> str | None:
    return next((c for c in reversed(components(key)) if c in names), None)


def _swap(key: str, old: str, new: str) -> str:
    """`key` with its last component `old` replaced by `new`."""
    parts = list(components(key))
    at = len(parts) - 1 - parts[::-1].index(old)
    parts[at] = new
    return ".".join(parts)


def _already(specs: Specs, target: str) -> str:
    packed = [k for k in specs if has_component(k, (target,))]
    return f": already packed, {packed[0]} is there" if packed else ""
