"""Scan and its wrappers: equal results, one legal order, a counted number of graphs."""

import functools
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy

from core.scan import compiled, recompute, scan, wrappers
from core.trees import Layered, layered, stack

LAYERS, WIDTH = 5, 6


def params(seed=0, layers=LAYERS):
    g = torch.Generator().manual_seed(seed)
    return {
        f"blocks.{i}.{k}": torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64) * 0.4
        for i in range(layers)
        for k in ("a", "b")
    }


def block(p, carry, x):
    """Two streams, a per-layer input and a per-layer output that carries gradient."""
    u, v = carry
    keep, cache = x
    u = u + keep * torch.tanh(torch.cat([cache, u]) @ p["a"])[1:]
    v = v + (u @ p["b"]).sin()
    return (u, v), u * v


def inputs():
    g = torch.Generator().manual_seed(1)
    carry = tuple(torch.randn(3, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    xs = [
        (torch.tensor(float(i != 2), dtype=torch.float64), torch.randn(1, WIDTH, generator=g, dtype=torch.float64))
        for i in range(LAYERS)
    ]
    return carry, xs


def gradients(run, layers_of=lambda p: stack(p, "blocks")):
    leaves = {k: v.requires_grad_() for k, v in params().items()}
    carry, xs = inputs()
    (u, v), ys = run(block, carry, layers_of(leaves), xs)
    (u.square().sum() + v.sum() + sum((i + 1) * y.sum() for i, y in enumerate(ys))).backward()
    assert len(ys) == LAYERS
    return {k: leaf.grad for k, leaf in leaves.items()}


def unrolled(block_, carry, layers, xs):
    """The definition, written out."""
    ys = []
    for layer, x in zip(layers, xs, strict=True):
        carry, y = block_(layer, carry, x)
        ys.append(y)
    return carry, ys


LEGAL = {
    "scan": scan,
    "recompute": recompute(scan),
    "recompute every 2": recompute(scan, every=2),
    "recompute every 9": recompute(scan, every=9),
    "recompute with policy": recompute(scan, policy=lambda ctx, op, *a, **k: CheckpointPolicy.PREFER_RECOMPUTE),
    "compiled": compiled(scan, backend="aot_eager"),
    "recompute compiled": recompute(compiled(scan, backend="aot_eager"), every=2),
}


@pytest.mark.parametrize("name", LEGAL)
def test_every_legal_nesting_gives_bit_equal_gradients(name):
    expected, got = gradients(unrolled), gradients(LEGAL[name])
    assert all(torch.equal(expected[k], got[k]) for k in expected)


def test_callable_layers_and_layered_trees():
    def as_callables(p):
        return [functools.partial(lambda tree, fn, *a: fn(tree, *a), tree) for tree in stack(p, "blocks")]

    expected = gradients(unrolled)
    for layers_of in (as_callables, lambda p: stack(layered(p, ["blocks"]), "blocks")):
        got = gradients(recompute(compiled(scan, backend="aot_eager")), layers_of)
        assert all(torch.equal(expected[k], got[k]) for k in expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda: compiled(recompute(scan)),
        lambda: recompute(recompute(scan)),
        lambda: compiled(compiled(scan)),
        lambda: recompute(recompute(compiled(scan))),
        lambda: compiled(recompute(compiled(scan))),
    ],
)
def test_illegal_nestings_raise(build):
    with pytest.raises(ValueError, match=r"recompute\(compiled\(scan\)\)"):
        build()


def test_recompute_really_recomputes_and_only_once_per_group():
    calls = []

    def counting(p, carry, x):
        calls.append(1)
        return carry + (carry @ p["a"]).tanh(), None

    leaves = {k: v.requires_grad_() for k, v in params().items()}
    x = inputs()[0][0]
    y, _ = recompute(scan, every=2)(counting, x, stack(leaves, "blocks"))
    assert len(calls) == LAYERS
    y.sum().backward()
    assert len(calls) == 2 * LAYERS
    with torch.no_grad():
        recompute(scan)(counting, x, stack(leaves, "blocks"))
    assert len(calls) == 3 * LAYERS


def test_recompute_fetches_each_layer_again():
    """A layer that fetches its weights is called again in the backward pass, not read from a stale slot."""
    source = stack(params(), "blocks")
    slot = {k: torch.empty_like(v) for k, v in source[0].items()}

    def fetched(i):
        def layer(fn, *args):
            for k in slot:
                slot[k].data.copy_(source[i][k])
            return fn(slot, *args)

        return layer

    def grad_of_input(layers, run):
        x = inputs()[0][0].requires_grad_()
        y, _ = run(lambda p, c, _: (c + (c @ p["a"]).tanh() @ p["b"], None), x, layers)
        y.square().sum().backward()
        return x.grad

    expected = grad_of_input(source, scan)
    got = grad_of_input([fetched(i) for i in range(LAYERS)], recompute(scan))
    assert torch.equal(expected, got)


@pytest.mark.parametrize("run", [scan, recompute(scan), compiled(scan, backend="eager")])
def test_xs_of_another_length(run):
    carry, xs = inputs()
    with pytest.raises(ValueError, match="4 per-layer inputs for 5 layers"):
        run(block, carry, stack(params(), "blocks"), xs[:-1])


@pytest.mark.parametrize("every", [0, -1])
def test_every_must_be_positive(every):
    with pytest.raises(ValueError, match="at least 1"):
        recompute(scan, every=every)


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5])
def test_memory_budget_range(budget):
    with pytest.raises(ValueError, match="memory_budget"):
        compiled(scan, memory_budget=budget)


def test_wrapper_names():
    assert wrappers(recompute(compiled(scan))) == ("recompute", "compiled")
    assert wrappers(scan) == ()
    assert isinstance(layered(params(), ["blocks"]), Layered)


# The graphs of one process, counted in order; docs/compile.md holds the same table for users.
def table_in_docs():
    text = (Path(__file__).parents[2] / "docs" / "compile.md").read_text()
    rows = [line.strip("| \n").split("|") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): int(cells[1]) for cells in rows}


def simple_block(p, carry, _):
    y = carry @ p["a"]
    if "lora" in p:
        y = y + carry @ p["lora"]
    return carry + torch.tanh(y) @ p["b"], None


def graphs(case, layers):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(scan, backend=counter)
    leaves = params(layers=layers)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    train = lambda p, carry: run(simple_block, carry, stack(p, "blocks"))[0].sum().backward()  # noqa: E731
    grads = {k: v.clone().requires_grad_() for k, v in leaves.items()}
    if case == "train":
        for _ in range(2):
            train(grads, x.clone().requires_grad_())
    elif case == "frozen embedding":
        for _ in range(2):
            train(grads, x)
    elif case == "validation":
        with torch.no_grad():
            run(simple_block, x, stack(grads, "blocks"))
            run(simple_block, x, stack(grads, "blocks"))
    elif case == "train and validation":
        for _ in range(2):
            train(grads, x.clone().requires_grad_())
            with torch.no_grad():
                run(simple_block, x, stack(grads, "blocks"))
    elif case == "adapters on a subset":
        adapted = dict(leaves)
        for i in (1, 3):
            adapted[f"blocks.{i}.lora"] = torch.zeros(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            train(adapted, x)
    else:
        raise AssertionError(f"docs/compile.md names a case that this test does not run: {case}")
    return counter.frame_count


@pytest.mark.parametrize("layers", [4, 7])
def test_graphs_match_the_committed_table(layers):
    """Whatever the number of layers."""
    table = table_in_docs()
    assert set(table) == {"train", "frozen embedding", "validation", "train and validation", "adapters on a subset"}
    assert {case: graphs(case, layers) for case in table} == table
