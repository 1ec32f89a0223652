"""The law of layouts: on any mesh a model trains as on one process.

Forward, loss, every gradient and three optimiser steps of a small Wan in float64, for layout x recompute x compile x
packed projections: in `quick` a selection that holds every pair of choices, in `slow` the whole product.
"""

import dataclasses
import functools
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from core import keys
from core.scan import compiled, recompute, scan
from core.transforms import apply, invert
from nn import wan
from nn.run import Run
from nn.wan_inputs import model_inputs
from parallel.norms import clip_, local
from parallel.sequence import sequence_parallel
from parallel.tensor import tensor_parallel
from parallel.units import ShardOptions, fill, shard
from tests.parallel.pool import mesh_of
from train.optim import AdamW, adamw_init, adamw_update

CFG = wan.WanConfig(
    num_attention_heads=4, attention_head_dim=6, ffn_dim=20, num_layers=3, in_channels=2, out_channels=2,
    text_dim=5, freq_dim=8,
)  # fmt: skip
GRID, BATCH, STEPS = (3, 3, 1), 4, 3  # 9 tokens, which 2 and 4 processes share unevenly


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, over some of the ranks or all, and how its units communicate."""

    sizes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] | None = None
    options: ShardOptions = ShardOptions()


def _layout(ranks=None, **sizes) -> Layout:
    options = {k: sizes.pop(k) for k in list(sizes) if k not in ("dp_replicate", "dp_shard", "sp", "tp")}
    return Layout(tuple(sizes.items()), ranks, ShardOptions(**options))


LAYOUTS = {
    "fsdp 4": _layout(dp_shard=4),
    "fsdp 2, groups of 2": _layout(dp_shard=2, ranks=(0, 1), modules_per_group=2),
    "fsdp 2, groups of 3": _layout(dp_shard=2, ranks=(0, 1), modules_per_group=3),
    "fsdp 2, kept": _layout(dp_shard=2, ranks=(1, 3), reshard_after_forward=False),
    "hsdp 2x2": _layout(dp_replicate=2, dp_shard=2),
    "replicas 2": _layout(dp_replicate=2, ranks=(0, 1)),
    "tp 2": _layout(tp=2, ranks=(0, 1)),
    "tp 4": _layout(tp=4),
    "sp 2": _layout(sp=2, ranks=(1, 2)),
    "sp 4": _layout(sp=4),
    "sp 2, fsdp 2": _layout(dp_shard=2, sp=2, prefetch=0),
    "tp 2, fsdp 2": _layout(dp_shard=2, tp=2, modules_per_group=2),
    "tp 2, sp 2": _layout(sp=2, tp=2),
}
RECOMPUTE = (0, 1, 2)  # layers per checkpoint; 0: none
AXES = (tuple(LAYOUTS), RECOMPUTE, (False, True), (False, True))
Case = tuple[str, int, bool, bool]


def allowed(case: Case) -> bool:
    """Packed leaves are not cut by tensor parallelism: those are packed on local shards (test_tensor.py)."""
    return not (case[3] and "tp" in dict(LAYOUTS[case[0]].sizes))


def pairs(case: Case) -> set:
    return set(itertools.combinations(enumerate(case), 2))


def every_pair(cases: list[Case]) -> list[Case]:
    """Cases that between them hold every pair of choices that any case holds; greedy, so not the fewest."""
    left, chosen = set().union(*map(pairs, cases)), []
    while left:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & left)))
        left -= pairs(chosen[-1])
    return chosen


ALL = [case for case in itertools.product(*AXES) if allowed(case)]
SLOW = os.environ.get("HYPOTHESIS_PROFILE") == "slow"
CASES = ALL if SLOW else every_pair(ALL)


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """Every leaf random, in float64."""
    draw = lambda k, s: keys.normal(keys.fold_in(keys.key(5), k), s.shape, dtype=torch.float64)  # noqa: E731
    return {k: draw(k, s) * 0.2 + ("norm" in k and k.endswith("weight")) for k, s in wan.param_specs(CFG).items()}


def inputs_of(step: int, samples: slice) -> tuple[dict, torch.Tensor]:
    """Inputs and target of some samples of a global batch: each depends on its number alone."""
    size = [n * p for n, p in zip(GRID, CFG.patch_size, strict=True)]
    draw = lambda name, *shape: torch.stack([  # noqa: E731
        keys.normal(keys.fold_in(keys.fold_in(keys.key(step), name), i), shape, dtype=torch.float64)
        for i in range(BATCH)[samples]
    ])  # fmt: skip
    timestep = 500 + 100 * draw("t").clamp(-4, 4)
    inputs = model_inputs(CFG, draw("x", 2, *size), timestep, {"text": draw("text", 4, CFG.text_dim)})
    return inputs, draw("target", 2, *size)


def loss_of(params, inputs, target, run):
    return (wan.forward(params, CFG, inputs, run=run) - target).square().sum()


def how_to_scan(every: int, compile_it: bool):
    how = compiled(scan, backend="aot_eager", dynamic=False) if compile_it else scan
    return recompute(how, every=every) if every else how


def run_steps(call, params, run, mesh, after) -> dict:
    """Three steps: the losses, the first step's gradients and norms, and the weights after the last step."""
    data = ("dp_replicate", "dp_shard")
    share, state, out = BATCH // mesh.size(*data), adamw_init({k: local(p) for k, p in params.items()}), {"losses": []}
    samples = slice(mesh.index(*data) * share, (mesh.index(*data) + 1) * share)
    for step in range(STEPS):
        inputs, target = inputs_of(step, samples)
        loss = call(loss_of, inputs, target, run) / target[0].numel() / share
        loss.backward()
        total = loss.detach().clone()
        if (group := mesh.group(*data)) is not None:
            dist.all_reduce(total, group=group)
        out["losses"].append(float(total) / mesh.size(*data))
        grads = {k: p.grad for k, p in params.items()}
        if step == 0:
            out["grads"] = after({k: whole(g) for k, g in grads.items()})
        out["norm"] = float(clip_(grads, 0.5))
        adamw_update(AdamW(), {k: local(g) for k, g in grads.items()}, state, {k: local(p) for k, p in params.items()},
                     1e-2)  # fmt: skip
        for p in params.values():
            p.grad = None
    return {**out, "params": after({k: whole(p) for k, p in params.items()})}


def whole(t: torch.Tensor) -> torch.Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def train_on_a_mesh(layout: Layout, every: int, compile_it: bool, packed: bool):
    """On every process: what `run_steps` gives, of the split layout, or None outside the mesh."""
    mesh = mesh_of(ranks=layout.ranks, **dict(layout.sizes))
    if mesh is None:
        return None
    torch._dynamo.reset()
    tree, model, after = weights(), wan.param_specs(CFG), lambda grads: grads
    model = {k: dataclasses.replace(s, dtype=torch.float64) for k, s in model.items()}
    if packed:
        bound = wan.pack_projections()(model)
        tree, model, after = apply(tree, bound), bound.specs, lambda grads: apply(grads, invert(bound))
    sharded = shard(model, mesh, stacks=wan.STACKS, options=layout.options)
    fill(sharded.params, tree)
    run = sequence_parallel(Run(scan=how_to_scan(every, compile_it), tp=tensor_parallel(mesh)), mesh, 9)
    return run_steps(sharded, sharded.params, run, mesh, after)


@functools.cache
def alone() -> dict:
    """The same three steps of a flat tree on one process."""
    from parallel.mesh import single

    params = {k: v.clone().requires_grad_() for k, v in weights().items()}
    call = lambda fn, *args: fn(params, *args)  # noqa: E731
    return run_steps(call, params, Run(), single(), lambda grads: grads)


def assert_equal(got: dict, expected: dict, what: str) -> None:
    """Float64 sums in another order: 1e-11 of a tree's largest leaf for gradients; Adam divides by the root of the
    second moment, so that a relative error of a gradient is one of its step, which is at most 1e-2 of 1e-11."""
    assert got.keys() == expected.keys()
    scale = max(t.abs().max() for t in expected.values())
    for k, t in expected.items():
        error = ((got[k] - t).abs().max() / scale).item()
        assert error < 1e-11, f"{what} of {k}: {error:.1e}"


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-every {c[1]}-{'compiled' if c[2] else 'eager'}-"
                                                      f"{'packed' if c[3] else 'split'}")  # fmt: skip
def test_a_model_trains_as_on_one_process(pool, case):
    check_layout(pool, LAYOUTS[case[0]], *case[1:])


def check_layout(pool, layout: Layout, every: int, compile_it: bool, packed: bool) -> None:
    expected = alone()
    results = [r for r in pool.run(train_on_a_mesh, layout, every, compile_it, packed) if r is not None]
    assert len(results) == (4 if layout.ranks is None else len(layout.ranks))
    for got in results:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-11)
        assert got["norm"] == pytest.approx(expected["norm"], rel=1e-11)
        assert_equal(got["grads"], expected["grads"], "gradient")
        assert_equal(got["params"], expected["params"], "weights after three steps")


@st.composite
def drawn_layouts(draw) -> Layout:
    """Any mesh of two or four of the processes, and any way for its units to communicate."""
    sizes, left = {}, draw(st.sampled_from([2, 4]))
    world = left
    for axis in draw(st.permutations(["dp_replicate", "dp_shard", "sp", "tp"])):
        sizes[axis] = draw(st.sampled_from([n for n in (1, 2, 4) if left % n == 0]))
        left //= sizes[axis]
    sizes["dp_shard"] *= left
    ranks = tuple(sorted(draw(st.permutations(range(4)))[:world])) if world < 4 else None
    options = ShardOptions(
        modules_per_group=draw(st.integers(1, 4)), reshard_after_forward=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)), accumulate=draw(st.sampled_from(["last", "sharded"])),
    )  # fmt: skip
    return Layout(tuple(sizes.items()), ranks, options)


@given(drawn_layouts(), st.integers(0, 3), st.booleans())
@settings(max_examples=200 if SLOW else 8)
def test_a_model_trains_as_on_one_process_whatever_the_layout(pool, layout, every, packed):
    check_layout(pool, layout, every, False, packed and dict(layout.sizes)["tp"] == 1)


def test_the_selection_holds_every_pair():
    assert set().union(*map(pairs, every_pair(ALL))) == set().union(*map(pairs, ALL))
    assert len(every_pair(ALL)) < len(ALL) / 2
