"""The only loop over equal transformer blocks, and the two ways to wrap it.

`block(tree, carry, x) -> (carry, y)` runs once per layer. Carry and outputs are a Tensor, or tuples, lists
or dicts of Tensors; never views of a parameter and never changed in place. Constants that all layers share
are closed over.

The one legal nesting order, outermost first, is `recompute(compiled(scan))`: recomputation must lie
outside the call of a layer, since a layer may fetch or gather its weights there.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from core.compat import compiling
from core.offload import Host
from core.trees import Layer, flatten

Block = Callable[..., tuple[Any, Any]]
Scan = Callable[..., tuple[Any, list[Any]]]


def call_layer(layer: Layer, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(tree, *args)` for a tree; a callable layer is handed `fn` and supplies its own tree."""
    return layer(fn, *args) if callable(layer) else fn(layer, *args)


def scan(block: Block, carry: Any, layers: Sequence[Layer], xs: Sequence[Any] | None = None) -> tuple[Any, list[Any]]:
    """Runs `block` over `layers`, threading `carry`.

    Args:
        block: `(tree, carry, x) -> (carry, y)`.
        carry: input of the first layer.
        layers: trees with block-local keys, or callables (see `core.trees.Layered`).
        xs: None, or one tree per layer (KV caches, keep-masks, seeds).

    Returns:
        The last carry and the list of per-layer outputs.

    Raises:
        ValueError: `xs` has another length than `layers`.
    """
    if xs is not None and len(xs) != len(layers):
        raise ValueError(f"scan: {len(xs)} per-layer inputs for {len(layers)} layers")
    ys = []
    for i, layer in enumerate(layers):
        carry, y = call_layer(layer, block, carry, None if xs is None else xs[i])
        ys.append(y)
    return carry, ys


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A scan with a wrapper's name, so that the order of wrappers can be checked."""

    name: str
    inner: Scan
    run: Scan

    def __call__(self, block, carry, layers, xs=None):
        return self.run(block, carry, layers, xs)


def wrappers(s: Scan) -> tuple[str, ...]:
    """Names of the wrappers around a scan, outermost first."""
    return (s.name, *wrappers(s.inner)) if isinstance(s, Wrapped) else ()


def _refuse(name: str, inner: Scan, allowed: tuple[str, ...]) -> None:
    found = [w for w in wrappers(inner) if w not in allowed]
    if found:
        raise ValueError(
            f"{name}() cannot wrap a scan that is already {' inside '.join(found)}: "
            "the nesting order is recompute(compiled(scan)), each at most once"
        )


def _run_group(layers: Sequence[Layer], block: Block, carry: Any, xs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Consecutive layers, one after another."""
    ys = []
    for layer, x in zip(layers, xs, strict=True):
        carry, y = call_layer(layer, block, carry, x)
        ys.append(y)
    return carry, ys


def _group(layers: Sequence[Layer], policy, host: Host | None) -> Callable[..., Any]:
    """Consecutive layers as one callable layer whose activations are recomputed in the backward pass."""
    extra = {} if policy is None else {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}

    def layer(block, carry, xs):
        if not torch.is_grad_enabled():
            return _run_group(layers, block, carry, xs)
        # Apart, since a checkpoint saves those of its arguments that are tensors, not what tuples and dicts hold.
        parts, rebuild = flatten(carry)

        def run(*parts):
            return _run_group(layers, block, rebuild(parts), xs)

        with contextlib.nullcontext() if host is None else host.saving():
            # Blocks draw no random numbers, so no generator state is saved and restored. Stopping early would save
            # nothing (a compiled block is one node) and be done by an exception thrown through compiled code.
            return checkpoint(run, *parts, use_reentrant=False, preserve_rng_state=False, early_stop=False, **extra)

    return layer


def recompute(
    inner: Scan = scan,
    *,
    every: int = 1,
    policy: Callable[..., Any] | None = None,
    nth: int = 1,
    offload: bool = False,
) -> Scan:
    """A scan that keeps only the carry at the border of each group of `every` layers.

    Args:
        inner: `scan` or `compiled(scan)`.
        every: consecutive layers per checkpoint; the last group may be shorter.
        policy: a selective-checkpoint policy `(ctx, op, *args, **kw) -> CheckpointPolicy`. It sees the
            operators of uncompiled blocks only.
        nth: only groups 0, `nth`, 2 `nth`, ... are recomputed; the others keep their activations.
        offload: keep the carries in host memory until the backward pass, where they are on a GPU.

    Raises:
        ValueError: `every` or `nth` < 1, or `inner` already recomputes.
    """
    for name, value in (("every", every), ("nth", nth)):
        if value < 1:
            raise ValueError(f"recompute: {name} must be at least 1, got {value}")
    _refuse("recompute", inner, allowed=("compiled",))

    def run(block, carry, layers, xs=None):
        if xs is not None and len(xs) != len(layers):
            raise ValueError(f"scan: {len(xs)} per-layer inputs for {len(layers)} layers")
        rows, host = list(xs) if xs is not None else [None] * len(layers), Host() if offload else None
        starts = range(0, len(layers), every)
        groups = [
            _group(layers[i : i + every], policy, host)
            if number % nth == 0
            else functools.partial(_run_group, layers[i : i + every])
            for number, i in enumerate(starts)
        ]
        carry, ys = inner(block, carry, groups, [rows[i : i + every] for i in starts])
        return carry, [y for group in ys for y in group]

    return Wrapped("recompute", inner, run)


def compiled(
    inner: Scan = scan,
    *,
    backend: Any = "inductor",
    memory_budget: float | None = None,
    max_graphs: int = 64,
    **options: Any,
) -> Scan:
    """A scan whose `block` is compiled once and reused by every layer of equal signature.

    Layers with equal keys, shapes, dtypes, requires_grad and grad mode share one graph; docs/compile.md
    lists which graphs a run makes. Every shape has a graph of its own: tracing LTX-2's block with symbols for sizes
    takes minutes.

    Args:
        inner: `scan`.
        backend: a `torch.compile` backend.
        memory_budget: fraction in (0, 1] of the activations that the compiled block's backward may keep;
            less means that the partitioner recomputes the cheapest operators first. None: its default.
        max_graphs: how many graphs of a block a process may make.
        options: further arguments of `torch.compile` (`mode`, ...); `fullgraph` defaults to True, `dynamic` to False.

    Raises:
        ValueError: `inner` is already wrapped, `memory_budget` or `max_graphs` is out of range.
        UserError: by a call that would make one graph too many.
    """
    _refuse("compiled", inner, allowed=())
    if memory_budget is not None and not 0 < memory_budget <= 1:
        raise ValueError(f"compiled: memory_budget must be in (0, 1], got {memory_budget}")
    if max_graphs < 1:
        raise ValueError(f"compiled: max_graphs must be at least 1, got {max_graphs}")
    options = {"fullgraph": True, "dynamic": False, **options}

    def run(block, carry, layers, xs=None):
        fast = torch.compile(block, backend=backend, **options)
        with compiling(max_graphs, memory_budget):
            return inner(fast, carry, layers, xs)

    return Wrapped("compiled", inner, run)
