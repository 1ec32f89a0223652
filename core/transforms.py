"""Transforms: rules bound to specs, alike for tensors, specs and lazy checkpoints.

A transform takes specs and gives a `Bound`: which leaves go into which, and the specs of the result. All
that can be wrong is found there, before anything is read or computed. `apply` then runs the rules on a
tree of tensors, or wraps a lazy tree so that reading a leaf reads only the sources of its rule.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from core.checkpoint import LazyLeaf, LazyTree, Pass, unknown
from core.errors import raise_faults
from core.specs import ParamSpec, Specs, check
from core.trees import Params

Tree = TypeVar("Tree", Params, LazyTree)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Source leaves that become target leaves; `specs` are the targets'.

    `forward(*sources)` gives a tuple, one tensor per target; `inverse` the other way, None where the rule
    loses something. A rule without targets drops its sources. `rowwise` says that `forward` maps one leaf
    to one and treats the rows of dimension 0 apart, so that rows of the target need only those of the source.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    specs: tuple[ParamSpec, ...]
    forward: Callable[..., tuple[Tensor, ...]]
    inverse: Callable[..., tuple[Tensor, ...]] | None = None
    name: str = "rule"
    rowwise: bool = False


@dataclasses.dataclass(frozen=True)
class Bound:
    """A transform bound to `source`; `specs` are those of the result. Made by `bind_rules`."""

    source: Specs
    rules: tuple[Rule, ...]
    specs: Specs
    name: str = "transform"


@dataclasses.dataclass(frozen=True)
class Chain:
    """Bound transforms one after the other: each is bound to the result of the one before."""

    source: Specs
    stages: tuple[Bound, ...]
    specs: Specs


Binding = Bound | Chain
Transform = Callable[[Specs], Binding]


def identity(leaf: Tensor) -> tuple[Tensor, ...]:
    """The forward and inverse of leaves that only change their key, or nothing."""
    return (leaf,)


def move(source: str, target: str, spec: ParamSpec, name: str) -> Rule:
    """A rule that gives one leaf another key."""
    return Rule((source,), (target,), (spec,), identity, identity, name, rowwise=True)


def bind_rules(specs: Specs, rules: Sequence[Rule], what: str, faults: Iterable[str] = ()) -> Bound:
    """Binds `rules` to `specs`; leaves that no rule touches stay as they are.

    `companions` and `alias_of` in the rules' specs are keys of `specs` (or new targets of the same rule);
    they follow their leaves to the new keys. The result is ordered by each rule's first source. Raises one
    UserError that lists `faults` and every missing or overlapping source, duplicate target, companion or
    tied leaf that lost its other half.
    """
    place = {k: i for i, k in enumerate(specs)}
    used = {s for r in rules for s in r.sources}
    rules = [*rules, *(move(k, k, s, "untouched") for k, s in specs.items() if k not in used)]
    rules.sort(key=lambda r: min((place[s] for s in r.sources if s in place), default=len(place)))
    faults = [*faults, *_structure_faults(specs, rules)]
    home = {s: r for r in rules for s in r.sources}
    rules = [_relinked(rule, home, faults) for rule in rules]
    raise_faults(f"{what}: {len(faults)} faults", faults)
    result = {target: spec for r in rules for target, spec in zip(r.targets, r.specs, strict=True)}
    return Bound(dict(specs), tuple(rules), result, what)


def _structure_faults(specs: Specs, rules: Sequence[Rule]) -> list[str]:
    """Missing and overlapping sources, duplicate targets, computations on tied leaves."""
    faults: list[str] = []
    takers: dict[str, list[Rule]] = {}
    makers: dict[str, list[Rule]] = {}
    for rule in rules:
        for source in rule.sources:
            takers.setdefault(source, []).append(rule)
        for target in rule.targets:
            makers.setdefault(target, []).append(rule)
        tied = [s for s in rule.sources if s in specs and specs[s].alias_of is not None]
        if tied and (len(rule.sources) > 1 or any(s.alias_of is None for s in rule.specs) or len(rule.specs) > 1):
            faults += [f"{rule.name}: {s} is tied to {specs[s].alias_of} and not stored" for s in tied]
    missing = [k for k in takers if k not in specs]
    hints = zip(missing, unknown(missing, specs), strict=True)
    faults += [f"{takers[k][0].name}: missing source {hint}" for k, hint in hints]
    for key, group in takers.items():
        if len(group) > 1:
            faults.append(f"overlapping rules: {key} is a source of {' and of '.join(r.name for r in group)}")
    for key, group in makers.items():
        if len(group) > 1:
            origins = " and from ".join(", ".join(r.sources) + f" ({r.name})" for r in group)
            faults.append(f"duplicate target {key}: from {origins}")
    return faults


def _relinked(rule: Rule, home: Mapping[str, Rule], faults: list[str]) -> Rule:
    """`rule` with the keys in its specs replaced by where those leaves went; adds to `faults`."""
    specs = []
    for i, (target, spec) in enumerate(zip(rule.targets, rule.specs, strict=True)):
        companions: list[str] = []
        for ref in spec.companions:
            went = _went(ref, i, rule, home)
            if not went and home[ref] is not rule:
                faults.append(f"{target} needs its companion {ref}, which is dropped")
            companions += [k for k in went if k not in companions and k != target]
        alias = spec.alias_of
        if alias is not None:
            went = _went(alias, 0, rule, home)
            if len(went) != 1 or (alias in home and len(home[alias].sources) > 1):
                faults.append(f"{target} is tied to {alias}, which is no leaf of its own any more")
            alias = went[0] if went else alias
        specs.append(dataclasses.replace(spec, companions=tuple(companions), alias_of=alias))
    return dataclasses.replace(rule, specs=tuple(specs))


def _went(ref: str, index: int, rule: Rule, home: Mapping[str, Rule]) -> tuple[str, ...]:
    """Where the leaf `ref`, which target `index` of `rule` refers to, is after all rules."""
    if ref not in home or (len(rule.targets) > 1 and ref in rule.targets):
        return (ref,)  # not part of these specs, or made by this very rule
    there = home[ref]
    if there is rule:
        return ()  # consumed together with the leaf
    # A leaf and its companion that are split in n: the i-th piece of one belongs to the i-th of the other.
    return (there.targets[index],) if len(there.targets) == len(rule.targets) else there.targets


def compose(*transforms: Transform) -> Transform:
    """One transform that applies `transforms` in this order, each bound to the result of the one before."""

    def bind(specs: Specs) -> Chain:
        stages: list[Bound] = []
        result = specs
        for transform in transforms:
            bound = transform(result)
            stages += _stages(bound)
            result = bound.specs
        return Chain(dict(specs), tuple(stages), dict(result))

    return bind


def _stages(bound: Binding) -> tuple[Bound, ...]:
    return bound.stages if isinstance(bound, Chain) else (bound,)


def history(bound: Binding) -> tuple[str, ...]:
    """Names of the transforms in `bound`, in their order, for a checkpoint's metadata."""
    return tuple(stage.name for stage in _stages(bound))


def lossy(bound: Binding) -> list[str]:
    """Names of the rules that have no inverse."""
    return [f"{r.name} ({', '.join(r.sources)})" for b in _stages(bound) for r in b.rules if r.inverse is None]


def invert(bound: Binding) -> Binding:
    """The transform back, bound to the result: keys, order, shapes, dtypes and bits are the original's.

    Raises one UserError naming every lossy rule.
    """
    raise_faults(f"{' + '.join(history(bound))}: cannot be inverted, these rules lose something", lossy(bound))
    if isinstance(bound, Bound):
        return _inverted(bound)
    return Chain(bound.specs, tuple(_inverted(b) for b in reversed(bound.stages)), bound.source)


def _inverted(bound: Bound) -> Bound:
    back = tuple(
        dataclasses.replace(
            rule,
            sources=rule.targets,
            targets=rule.sources,
            specs=tuple(bound.source[k] for k in rule.sources),
            forward=rule.inverse,
            inverse=rule.forward,
            name=_back(rule.name),
        )
        for rule in bound.rules
    )
    return Bound(bound.specs, back, bound.source, _back(bound.name))


def _back(name: str) -> str:
    return name.removeprefix("inverse of ") if name.startswith("inverse of ") else f"inverse of {name}"


def apply(tree: Tree, bound: Binding) -> Tree:
    """Runs `bound` on a tree of tensors, or wraps a lazy tree; the result has exactly the bound specs.

    Of a lazy tree nothing is read now. Reading a leaf reads the sources of its rule and no others; a rule
    with several targets runs once per pass (`LazyTree.read`). Raises one UserError when keys, shapes or
    dtypes of `tree` are not those that `bound` was bound to.
    """
    check(tree, bound.source, what=f"apply {' + '.join(history(bound))}", dtypes=True)
    for stage in _stages(bound):
        tree = _lazy(tree, stage) if isinstance(tree, LazyTree) else _eager(tree, stage)
    return tree


def _computed(bound: Bound) -> list[Rule]:
    """Rules with something to compute: not those that drop a leaf or rename one that is tied to another."""
    return [r for r in bound.rules if r.targets and r.specs[0].alias_of is None]


def _run(rule: Rule, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The rule's outputs. RuntimeError when they are not what the rule promised: an error of ours."""
    outputs = tuple(rule.forward(*sources))
    got = [(tuple(t.shape), t.dtype) for t in outputs]
    promised = [(s.shape, s.dtype) for s in rule.specs]
    if got != promised:
        raise RuntimeError(f"{rule.name}: gave {got} for {rule.targets}, its specs say {promised}")
    return outputs


def _eager(tree: Mapping[str, Tensor], bound: Bound) -> Params:
    out: Params = {}
    for rule in _computed(bound):
        out.update(zip(rule.targets, _run(rule, [tree[s] for s in rule.sources]), strict=True))
    return {k: out[k] for k in bound.specs if k in out}


def _lazy(tree: LazyTree, bound: Bound) -> LazyTree:
    leaves = {k: leaf for rule in _computed(bound) for k, leaf in _lazy_leaves(rule, tree).items()}
    return LazyTree({k: leaves[k] for k in bound.specs if k in leaves}, tree.metadata, tree.files)


def _lazy_leaves(rule: Rule, tree: LazyTree) -> dict[str, LazyLeaf]:
    """The targets of one rule over a lazy tree. They share one computation per pass."""
    sources = [tree[s] for s in rule.sources]
    waiting = object()

    def load(index: int, memo: Pass) -> Tensor:
        outputs: dict[int, Tensor] = memo.setdefault(waiting, {})
        if index not in outputs:
            outputs.update(enumerate(_run(rule, [s.load(memo) for s in sources])))
        return outputs.pop(index)  # handed out once: the pass keeps only what nobody asked for yet

    def rows(start: int, stop: int) -> Tensor:
        return rule.forward(sources[0].read_rows(start, stop))[0]

    return {
        target: LazyLeaf(spec.shape, spec.dtype, lambda memo, i=i: load(i, memo), rows if rule.rowwise else None)
        for i, (target, spec) in enumerate(zip(rule.targets, rule.specs, strict=True))
    }
