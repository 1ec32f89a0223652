"""Scan and its wrappers: equal results, one legal order, a counted number of graphs."""

import functools
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy

import core.scan as scan_module
from core.errors import UserError
from core.offload import Host
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
    "recompute every third": recompute(scan, nth=3),
    "recompute offloaded": recompute(scan, every=2, nth=2, offload=True),
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


@pytest.mark.parametrize("every, nth, again", [(1, 2, 3), (2, 2, 3), (2, 3, 2), (1, 9, 1)])
def test_only_every_nth_group_is_recomputed(every, nth, again):
    calls = []
    run = recompute(scan, every=every, nth=nth)
    leaves = {k: v.requires_grad_() for k, v in params().items()}
    counting = lambda p, c, _: (calls.append(1) or c + (c @ p["a"]).tanh(), None)  # noqa: E731
    y, _ = run(counting, inputs()[0][0], stack(leaves, "blocks"))
    y.sum().backward()
    assert len(calls) == LAYERS + again


def test_carries_and_nothing_else_go_to_the_host(monkeypatch):
    """What a recomputed group starts from, also in tuples; not its weights, nor what other groups keep."""
    saved = []

    class Recorded(Host):
        def saving(self):
            keep = lambda t: saved.append(t.clone()) or t * 1.0  # noqa: E731
            return torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)

    monkeypatch.setattr(scan_module, "Host", Recorded)
    expected = gradients(unrolled)
    got = gradients(recompute(scan, every=2, nth=2, offload=True))
    assert all(torch.equal(expected[k], got[k]) for k in expected)
    carry, xs = inputs()
    carries = [carry, unrolled(block, carry, stack(params(), "blocks")[:4], xs[:4])[0]]
    assert len(saved) == 4 and all(torch.equal(s, c) for s, c in zip(saved, sum(carries, ()), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_its_carries_back():
    """Bit-equal gradients through several rounds, with less memory between forward and backward."""
    rows, width, layers = 4096, 1024, 8
    leaves = {k: v.repeat(171, 171)[:width, :width].float().cuda().mul_(0.1).requires_grad_() for k, v in
              params(layers=layers).items()}  # fmt: skip
    x, held, found = torch.randn(rows, width, device="cuda"), {}, {}
    for name, how in (("kept", recompute(scan)), ("offloaded", recompute(scan, offload=True))):
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y, _ = how(lambda p, c, _: (c + (c @ p["a"]).tanh() @ p["b"], None), x, stack(leaves, "blocks"))
            torch.cuda.synchronize()
            held[name] = torch.cuda.memory_allocated() - before
            found[name] = torch.autograd.grad(y.square().mean(), list(leaves.values()))
            del y
    assert all(torch.equal(a, b) for a, b in zip(found["kept"], found["offloaded"], strict=True))
    assert held["offloaded"] < held["kept"] - (layers - 3) * x.nbytes


def test_what_is_on_the_cpu_stays():
    x = torch.randn(4, 4, requires_grad=True)
    with Host().saving():
        y = (x * x).sum()
    assert y.grad_fn.next_functions[0][0]._saved_self is not None
    y.backward()
    assert torch.equal(x.grad, 2 * x)


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


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("name", ["every", "nth"])
def test_every_and_nth_must_be_positive(name, number):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        recompute(scan, **{name: number})


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5])
def test_memory_budget_range(budget):
    with pytest.raises(ValueError, match="memory_budget"):
        compiled(scan, memory_budget=budget)
    with pytest.raises(ValueError, match="max_graphs must be at least 1"):
        compiled(scan, max_graphs=0)


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
    elif case == "three lengths":
        for length in (3, 4, 5, 4, 3):
            train(grads, torch.randn(length, WIDTH, dtype=torch.float64).requires_grad_())
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
    cases = {"train", "frozen embedding", "validation", "train and validation", "three lengths", "adapters on a subset"}
    assert set(table) == cases
    assert {case: graphs(case, layers) for case in table} == table


def test_one_graph_too_many_is_an_error_that_says_why():
    """More than PyTorch's own limit of 8 are made before it."""
    torch._dynamo.reset()
    leaves, many = params(layers=1), compiled(scan, backend="eager", max_graphs=9)
    run = lambda n: many(simple_block, torch.ones(n, WIDTH, dtype=torch.float64), stack(leaves, "blocks"))  # noqa: E731
    for n in range(2, 11):
        run(n)
    with pytest.raises(UserError, match="9 graphs and would need one more: each combination of lengths"):
        run(11)
    run(2)  # those that are there serve on
