import dataclasses
import functools
import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from core import checkpoint, compat
from core.errors import UserError
from core.scan import compiled, recompute, scan
from core.specs import ParamSpec
from core.trees import layered, stack
from nn import wan
from nn.run import Run
from parallel import rules, units
from parallel.mesh import single
from parallel.norms import local
from parallel.tensor import tensor_parallel
from parallel.units import ShardOptions, fill, local_slices, shard
from tests.parallel import toy
from tests.parallel.pool import mesh_of

# float64 is only re-associated by layouts: sums over ranks and over matrix columns in another order.
RELATIVE = 1e-11


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def error(sharded, expected):
    """Largest relative error of the gradients, each leaf by its own largest value."""
    worst = [(whole(p.grad) - expected[k]).abs().max() / expected[k].abs().max() for k, p in sharded.params.items()]
    return max(worst).item()


def how(mesh, every=0, compile_=False):
    """How the toy runs: recomputation of every n-th layer, compilation, tensor parallelism."""
    inner = compiled(scan, backend="aot_eager") if compile_ else scan
    return {"scan": recompute(inner, every=every) if every else inner, "tp": tensor_parallel(mesh)}


def build(mesh, *, dtype=torch.float64, options=None, layers=toy.LAYERS, **rest):
    """`(the toy's leaves, the toy sharded and filled with them)`; memory that was not filled would show as NaN."""
    model = toy.specs(dtype, layers)
    tree = toy.params(model)
    sharded = shard(model, mesh, stacks=toy.STACKS, options=ShardOptions(**(options or {})), **rest)
    with torch.no_grad():
        for p in sharded.params.values():
            local(p).fill_(torch.nan)
    fill(sharded.params, tree)
    return tree, sharded


def data_of(mesh):
    return mesh.index("dp_replicate", "dp_shard"), mesh.size("dp_replicate", "dp_shard")


class Collectives(TorchDispatchMode):
    """Counts collectives by name, in forward and backward."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            self.counts[name.split("::")[1]] = self.counts.get(name.split("::")[1], 0) + 1
        return op(*args, **(kwargs or {}))

    @property
    def gathers(self):
        return self.counts.get("_allgather_base_", 0)

    @property
    def scatters(self):
        return self.counts.get("_reduce_scatter_base_", 0)


# --- gradients are those of a single process -------------------------------------------------------------------------


def _gradients(sizes, ranks, options, variants):
    mesh = mesh_of(ranks, **sizes) if sizes is not None else single()
    if mesh is None:
        return None
    i, n = data_of(mesh)
    batches, out = toy.samples(n), []
    torch._dynamo.reset()  # the pool's processes have compiled the same block for other layouts
    for every, compile_ in variants:
        tree, sharded = build(mesh, options=options)
        expected = toy.reference(tree, batches)
        before = {k: id(p) for k, p in sharded.params.items()}
        sharded(toy.loss, batches[i], **how(mesh, every, compile_)).backward()
        assert list(sharded.params) == list(tree), "the flat keys, in the order of the specs"
        assert {k: id(p) for k, p in sharded.root.named_parameters()} == before, "compiled or not, the same leaves"
        assert all(torch.equal(whole(p.detach()), tree[k]) for k, p in sharded.params.items())
        assert all(p.grad.placements == p.placements for p in sharded.params.values() if isinstance(p, DTensor))
        out.append(error(sharded, expected))
    return out


def check_gradients(pool, sizes, options, variants, ranks=None):
    for rank, errors in enumerate(pool.run(_gradients, sizes, ranks, options, variants)):
        assert (errors is None) == (ranks is not None and rank not in ranks)
        assert errors is None or max(errors) < RELATIVE, errors


@pytest.mark.parametrize("g", [1, 2, 3])
def test_fsdp_with_recompute_and_compile(pool, g):
    variants = list(itertools.product((0, 1, 2), (False, True)))
    check_gradients(pool, {"dp_shard": 4}, {"modules_per_group": g}, variants)


@pytest.mark.parametrize(
    "sizes, options, variants",
    [
        ({"dp_replicate": 2, "dp_shard": 2}, {"modules_per_group": 2}, [(0, True), (2, False)]),
        ({"tp": 2, "dp_shard": 2}, {}, [(0, False), (1, True)]),
        ({"tp": 2, "dp_shard": 2}, {"modules_per_group": 3, "reshard_after_forward": False}, [(2, False)]),
        ({"sp": 2, "dp_shard": 2}, {"prefetch": 2}, [(0, False)]),
        ({"tp": 2, "sp": 2}, {"prefetch": 0}, [(3, False)]),
        ({"dp_replicate": 4}, {"modules_per_group": 2}, [(0, False), (1, False)]),
        ({"tp": 2, "dp_replicate": 2}, {}, [(0, False), (2, True)]),
        ({"tp": 4}, {}, [(0, False), (1, True)]),
        ({"dp_shard": 4}, {"cpu_offload": True, "reshard_after_forward": False}, [(0, False), (2, False)]),
        (None, {}, [(2, True)]),
        (None, {"solo": True}, [(0, False), (2, True)]),
        ({"tp": 4}, {"solo": True}, [(1, False)]),
    ],
    ids=str,
)
def test_other_layouts(pool, sizes, options, variants):
    check_gradients(pool, sizes, options, variants)


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}], ids=str)
def test_a_mesh_over_some_of_the_ranks(pool, sizes):
    check_gradients(pool, sizes, {}, [(1, False)], ranks=(1, 2))


def _two_stacks(g):
    mesh = mesh_of(dp_shard=4)
    i, n = data_of(mesh)
    matrix = ParamSpec((4, 4), torch.float64)
    model = {f"{name}.{j}.w": matrix for name, count in (("late", 3), ("early", 2)) for j in range(count)}
    tree, batches = toy.params(model), toy.samples(n)[..., :4]

    def loss(params, x):
        for name in ("early", "late"):
            x, _ = scan(lambda p, x, _: (torch.tanh(x @ p["w"]), None), x, stack(params, name))
        return x.square().mean()

    sharded = shard(model, mesh, stacks=["early", "late"], options=ShardOptions(modules_per_group=g))
    fill(sharded.params, tree)
    sharded(loss, batches[i]).backward()
    plain = {k: v.clone().requires_grad_() for k, v in tree.items()}
    (sum(loss(plain, x) for x in batches) / n).backward()
    return error(sharded, {k: v.grad for k, v in plain.items()}), [len(units) for units in sharded.root.order]


def test_groups_end_with_their_stack(pool):
    for g, sizes in ((1, [1, 1, 1, 1, 1, 1]), (2, [1, 2, 2, 1]), (4, [1, 2, 3])):
        for worst, found in pool.run(_two_stacks, g):
            assert worst < RELATIVE and found == sizes


def _wan(sizes, options):
    mesh = mesh_of(**sizes)
    cfg = wan.WanConfig(
        num_attention_heads=4, attention_head_dim=12, num_layers=3, ffn_dim=32, text_dim=16, freq_dim=16,
        in_channels=4, out_channels=4,
    )  # fmt: skip
    model = {k: dataclasses.replace(s, dtype=torch.float64) for k, s in wan.param_specs(cfg).items()}
    tree = {k: 0.1 * t + (1 if "norm" in k and k.endswith("weight") else 0) for k, t in toy.params(model).items()}
    i, n = data_of(mesh)
    g = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(n, *shape, generator=g, dtype=torch.float64)  # noqa: E731
    inputs = {"latents": draw(1, 4, 1, 4, 4), "timestep": draw(1).abs() * 500, "text": draw(1, 5, 16)}

    def loss(params, part, run):
        return wan.forward(params, cfg, {k: t[part] for k, t in inputs.items()}, run=run).square().mean()

    sharded = shard(model, mesh, stacks=wan.STACKS, options=ShardOptions(**options))
    fill(sharded.params, tree)
    sharded(loss, i, Run(scan=recompute(), tp=tensor_parallel(mesh))).backward()
    plain = {k: v.clone().requires_grad_() for k, v in tree.items()}
    (sum(loss(plain, part, Run()) for part in range(n)) / n).backward()
    return error(sharded, {k: v.grad for k, v in plain.items()})


@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, {"tp": 2, "dp_shard": 2}], ids=str)
def test_wan(pool, sizes):
    # Norms over few tokens divide by small numbers, which leaves a digit less.
    assert max(pool.run(_wan, sizes, {"modules_per_group": 2})) < 10 * RELATIVE


# --- weights that a call sees ----------------------------------------------------------------------------------------


def _steps(options):
    """Three steps, with the averaged weights swapped in for a look at a loss between them."""
    mesh = mesh_of(dp_shard=4)
    i, n = data_of(mesh)
    batches = toy.samples(n)
    tree, sharded = build(mesh, options=options)
    plain = {k: v.clone().requires_grad_() for k, v in tree.items()}
    seen, expected = [], []
    for _ in range(3):
        sharded(toy.loss, batches[i]).backward()
        (sum(toy.loss(plain, x) for x in batches) / n).backward()
        with torch.no_grad():
            for k in plain:
                plain[k] -= 0.1 * plain[k].grad
                sharded.params[k].sub_(sharded.params[k].grad, alpha=0.1)
                plain[k].grad = sharded.params[k].grad = None
            expected.append(toy.loss({k: 0.5 * v for k, v in plain.items()}, batches[i]))
            for p in sharded.params.values():
                local(p).mul_(0.5)
            seen.append(sharded(toy.loss, batches[i]))
            for p in sharded.params.values():
                local(p).mul_(2.0)
    return max(abs(a - b).item() for a, b in zip(seen, expected, strict=True)), max(
        (whole(p.detach()) - plain[k].detach()).abs().max().item() for k, p in sharded.params.items()
    )


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False, "prefetch": 2}], ids=str)
def test_every_call_sees_what_the_leaves_hold(pool, options):
    assert max(max(errors) for errors in pool.run(_steps, options)) < 1e-13


def _partial(options):
    """A call that leaves out layers fetched ahead for it, then other weights, then a whole call."""
    mesh = mesh_of(dp_shard=4)
    i, n = data_of(mesh)
    batches = toy.samples(n)
    tree, sharded = build(mesh, options=options)
    sharded(lambda p, x: toy.F.linear(x, p["embed.weight"]).sum(), batches[i]).backward()
    with torch.no_grad():
        sharded(lambda p, x: stack(p, "blocks")[0](lambda tree, h: h * tree["table"][0, 0], x), batches[i])
        assert all(isinstance(p, DTensor) for p in sharded.root.parameters()), "nothing stays gathered"
        fill(sharded.params, {k: 2 * v for k, v in tree.items()})
        seen = sharded(toy.loss, batches[i])
        assert abs(seen - toy.loss({k: 2 * v for k, v in tree.items()}, batches[i])) < RELATIVE
        assert all(isinstance(p, DTensor) for p in sharded.root.parameters()), "nothing stays gathered"
        fill(sharded.params, tree)

    def without_second(params, x):
        layers = stack(params, "blocks")
        return toy.loss(type(params)(params.root, {"blocks": [layers[0], *layers[2:]]}), x)

    for p in sharded.params.values():
        p.grad = None
    sharded(without_second, batches[i]).backward()
    plain = {k: v.clone().requires_grad_() for k, v in tree.items()}
    (sum(without_second(layered(plain, toy.STACKS), x) for x in batches) / n).backward()
    skipped = max(
        (whole(p.grad) - plain[k].grad).abs().max().item() for k, p in sharded.params.items() if p.grad is not None
    )
    assert skipped < RELATIVE, skipped
    sharded(toy.loss, batches[i])  # its result is dropped: no backward pass frees the root's leaves
    fill(sharded.params, {k: -v for k, v in tree.items()})
    for p in sharded.params.values():
        p.grad = None
    out = sharded(toy.loss, batches[i]) + sharded(toy.loss, batches[(i + 1) % n])  # two calls, one backward
    out.backward()
    return error(sharded, {k: 2 * g for k, g in toy.reference({k: -v for k, v in tree.items()}, batches).items()})


@pytest.mark.parametrize(
    "options", [{"prefetch": 2}, {"modules_per_group": 2, "reshard_after_forward": False}], ids=str
)
def test_weights_fetched_for_layers_that_did_not_run_are_dropped(pool, options):
    assert max(pool.run(_partial, options)) < RELATIVE


def _after_an_error():
    mesh = mesh_of(dp_shard=4)
    i, n = data_of(mesh)
    batches = toy.samples(n)
    tree, sharded = build(mesh)

    def broken(params, x):
        def bad(p, carry, _):
            raise ArithmeticError("a fault of a block")

        h = toy.F.linear(x, params["embed.weight"])
        layers = stack(params, "blocks")
        (h, _), _ = scan(functools.partial(toy.block, tp=toy.TensorParallel()), (h, h.sum()), layers[:1], [1.0])
        return scan(bad, h, layers[1:])

    with pytest.raises(ArithmeticError, match="a fault"):
        sharded(broken, batches[i])
    fill(sharded.params, {k: -v for k, v in tree.items()})
    sharded(toy.loss, batches[i]).backward()
    return error(sharded, toy.reference({k: -v for k, v in tree.items()}, batches))


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="PyTorch cannot start afresh")
def test_after_an_error_the_next_call_starts_afresh(pool):
    assert max(pool.run(_after_an_error)) < RELATIVE


def _inference():
    _, sharded = build(mesh_of(dp_shard=4))
    with torch.inference_mode():
        sharded(toy.loss, toy.samples(1)[0])


def test_inference_mode_is_refused(pool):
    with pytest.raises(UserError, match="no_grad"):
        pool.run(_inference)


# --- dtypes ----------------------------------------------------------------------------------------------------------


def _dtypes(sizes):
    mesh = mesh_of(**sizes)
    i, n = data_of(mesh)
    model = {**toy.specs(torch.float32), "blocks.0.up.gain": ParamSpec((), torch.float32)}
    if compat.fsdp_takes(torch.int8):
        model["blocks.1.codes"] = ParamSpec((8, 3), torch.int8)
    tree = toy.params(model)
    compute = {k: torch.bfloat16 for k, s in model.items() if not s.keep_fp32 and s.dtype == torch.float32}
    sharded = shard(model, mesh, stacks=toy.STACKS, compute=compute, trainable=lambda k: not k.endswith("gain"))
    fill(sharded.params, tree)
    seen = {}

    def loss(params, x):
        seen.update({k: t.dtype for k, t in params.items()} | {"x": x.dtype})
        for j, layer in enumerate(stack(params, "blocks")):
            layer(lambda p, h: seen.update({f"blocks.{j}.{k}": t.dtype for k, t in p.items()} | {"h": h.dtype}), x)  # noqa: B023
        return x.sum()

    batches = toy.samples(n, torch.float32)
    with torch.no_grad():
        sharded(loss, batches[i])
    sharded(toy.loss, batches[i].bfloat16(), **how(mesh)).float().backward()
    grads = {k: whole(p.grad) for k, p in sharded.params.items() if p.grad is not None}
    plain = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in tree.items()}
    cast = {k: v.to(compute.get(k, v.dtype)) for k, v in plain.items()}
    (sum(toy.loss(cast, x.bfloat16()).float() for x in batches) / n).backward()
    expected = {k: v.grad for k, v in plain.items() if v.grad is not None and k in grads}
    worst = max(((grads[k] - g).abs().max() / g.abs().max()).item() for k, g in expected.items())
    return seen, {k: g.dtype for k, g in grads.items()}, sorted(expected) == sorted(grads), worst, dict(compute)


@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 4}], ids=str)
def test_blocks_see_each_leaf_in_its_compute_dtype_and_float32_leaves_are_reduced_too(pool, sizes):
    for seen, grads, same_keys, worst, compute in pool.run(_dtypes, sizes):
        assert seen.pop("x") == seen.pop("h") == torch.float32, "inputs are left as they are"
        assert seen.pop("blocks.1.codes", torch.int8) == torch.int8
        assert all(dtype == compute.get(k, torch.float32) for k, dtype in seen.items()) and len(seen) == len(grads) + 1
        assert set(grads.values()) == {torch.float32} and same_keys
        # Gradients of bfloat16 leaves have 8 bits; tensor-parallel partial sums are rounded on each rank.
        assert worst < 2**-5


def _sums(reduce_dtype, accumulate):
    """A microbatch of weight 256 and then 32 of weight 1, in bfloat16, against 288 times its gradient."""
    mesh = mesh_of(dp_shard=4)
    i, n = data_of(mesh)
    model = toy.specs(torch.float32, 1)
    compute = {k: torch.bfloat16 for k, s in model.items() if not s.keep_fp32}
    _, sharded = build(
        mesh, dtype=torch.float32, layers=1, compute=compute,
        options={"reduce_dtype": reduce_dtype, "accumulate": accumulate},
    )  # fmt: skip
    x = toy.samples(n, torch.bfloat16)[i]

    def run(weights):
        for p in sharded.params.values():
            p.grad = None
        for j, weight in enumerate(weights):
            sharded.microbatch(last=j == len(weights) - 1)
            (sharded(toy.loss, x).float() * weight).backward()
        return {k: whole(p.grad) for k, p in sharded.params.items()}

    one, many = run([1]), run([256] + [1] * 32)
    rounded = [k for k in model if torch.equal(one[k], one[k].bfloat16().float())]
    assert rounded == (sorted(compute, key=list(model).index) if reduce_dtype == torch.bfloat16 else [])
    return max(((many[k] / 288 - one[k]).abs().max() / one[k].abs().max()).item() for k in one)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", ["last", "sharded"])
def test_microbatches_add_up_in_float32_whatever_the_reduction(pool, reduce_dtype, accumulate):
    # A sum in bfloat16 has 8 digits: each of the 32 would be lost beside the first and the error be 0.11. Reduced in
    # bfloat16, four ranks' terms are rounded before and while they are averaged, both in the sum and in the term that
    # it is compared with; gradients themselves differ in nothing, their weights being powers of 2.
    limit = 1e-6 if reduce_dtype == torch.float32 else 2**-6
    assert max(pool.run(_sums, reduce_dtype, accumulate)) < limit


# --- microbatches: flags and collectives -----------------------------------------------------------------------------


def _flags(options, trainable):
    _, sharded = build(mesh_of(dp_shard=4), options=options, trainable=lambda key: trainable)
    calls = []
    for name in ("set_requires_gradient_sync", "set_reshard_after_backward", "set_is_last_backward"):
        setattr(sharded.root, name, lambda flag, name=name: calls.append((name.split("_")[1], flag)))
    for last in (False, True):
        sharded.microbatch(last)
    return calls


def test_flags_of_microbatches(pool):
    for calls in pool.run(_flags, {}, True):
        assert calls == [("requires", False), ("is", False), ("requires", True), ("is", True)]
    for calls in pool.run(_flags, {"reshard_after_forward": False}, True):
        assert calls == [(n, last) for last in (False, True) for n in ("requires", "reshard", "is")]
    for calls in pool.run(_flags, {"accumulate": "sharded", "reshard_after_forward": False}, True):
        assert calls == [("reshard", False), ("reshard", True)]
    for options in ({}, {"reshard_after_forward": False}):
        assert pool.run(_flags, options, False) == [[]] * 4, "a frozen model is left alone"


def _counted(options, microbatches):
    """All-gathers and reduce-scatters of each microbatch of two steps, and the error of the second step's sum."""
    mesh = mesh_of(dp_shard=4)
    i, n = data_of(mesh)
    tree, sharded = build(mesh, options=options)
    batches = toy.samples(n * microbatches).unflatten(0, (microbatches, n))
    for _ in range(2):
        counts = []
        for p in sharded.params.values():
            p.grad = None
        for j in range(microbatches):
            sharded.microbatch(last=j == microbatches - 1)
            with Collectives() as seen:
                sharded(toy.loss, batches[j, i]).backward()
            counts.append((seen.gathers, seen.scatters))
    expected = {k: microbatches * g for k, g in toy.reference(tree, batches.flatten(0, 1)).items()}
    return counts, error(sharded, expected)


@pytest.mark.parametrize(
    "options, expected",
    [
        # Root and five layers: 6 gathers forward; the layers again backward.
        ({}, [(11, 0), (11, 0), (11, 6)]),
        ({"modules_per_group": 2}, [(7, 0), (7, 0), (7, 4)]),
        ({"accumulate": "sharded"}, [(11, 6)] * 3),
        # Kept from the first forward to the last backward.
        ({"reshard_after_forward": False}, [(6, 0), (0, 0), (0, 6)]),
        ({"reshard_after_forward": False, "accumulate": "sharded", "modules_per_group": 3}, [(3, 3), (0, 3), (0, 3)]),
    ],
    ids=str,
)
def test_collectives_of_microbatches(pool, options, expected):
    for counts, worst in pool.run(_counted, options, 3):
        assert counts == expected and worst < RELATIVE


def _gathers(options, every, grad):
    mesh = mesh_of(dp_shard=4)
    _, sharded = build(mesh, options=options)
    with Collectives() as seen, torch.set_grad_enabled(grad):
        out = sharded(toy.loss, toy.samples(1)[0], **how(mesh, every))
        if grad:
            out.backward()
    return seen.gathers


def test_fetching_ahead_costs_no_collective(pool):
    for prefetch, every in itertools.product((0, 1, 3), (0, 1, 2)):
        assert pool.run(_gathers, {"prefetch": prefetch}, every, True) == [11] * 4, (prefetch, every)
        assert pool.run(_gathers, {"prefetch": prefetch}, every, False) == [6] * 4


def _ahead(prefetch, g):
    """All-gathers that were started when each layer began to run."""
    _, sharded = build(mesh_of(dp_shard=4), options={"prefetch": prefetch, "modules_per_group": g})
    started = []
    with Collectives() as seen, torch.no_grad():

        def run(params, x):
            for layer in stack(params, "blocks"):
                layer(lambda p, x: started.append(seen.gathers), x)

        sharded(run, toy.samples(1)[0])
    return started


def test_the_next_groups_are_fetched_while_one_runs(pool):
    # The root's leaves, the running group and `prefetch` more, of five layers or of three groups.
    assert pool.run(_ahead, 0, 1) == [[2, 3, 4, 5, 6]] * 4
    assert pool.run(_ahead, 1, 1) == [[3, 4, 5, 6, 6]] * 4
    assert pool.run(_ahead, 3, 1) == [[5, 6, 6, 6, 6]] * 4
    assert pool.run(_ahead, 1, 2) == [[3, 3, 4, 4, 4]] * 4


def _quiet(options):
    mesh = single()
    _, sharded = build(mesh, options=options)
    with Collectives() as seen:
        sharded.microbatch(True)
        sharded(toy.loss, toy.samples(1)[0]).backward()
    return seen.counts, isinstance(sharded.root, FSDPModule)


def test_a_process_alone_makes_no_collective_with_or_without_fsdp(pool):
    assert pool.run(_quiet, {}) == [({}, False)] * 4
    for counts, fsdp in pool.run(_quiet, {"solo": True}):
        assert fsdp and sum(counts.values()) == 0


def test_fsdp_alone_needs_a_process_group():
    with pytest.raises(UserError, match="needs a process group"):
        build(single(), options={"solo": True})


# --- how units are wrapped -------------------------------------------------------------------------------------------


def _recorded(g, frozen_scalar=False):
    """What `fully_shard` was called with: names of leaves, list or not, explicit resharding, input casts."""
    calls, real = [], units.fully_shard

    def record(module, **rest):
        parts = module if isinstance(module, list) else [module]
        names = [[p.names for p in parts] if hasattr(parts[0], "names") else "root"]
        calls.append((*names, isinstance(module, list), rest["reshard_after_forward"], rest["mp_policy"]))
        return real(module, **rest)

    units.fully_shard = record
    try:
        build(mesh_of(dp_shard=4), dtype=torch.bfloat16, options={"modules_per_group": g})
    finally:
        units.fully_shard = real
    return [(names, listed, reshard, mp.cast_forward_inputs) for names, listed, reshard, mp in calls]


MATRICES = ["up.weight", "up.bias", "down.weight", "down.bias"]


def test_parts_of_equal_dtypes_of_consecutive_layers_share_a_group(pool):
    expected = []
    for n in (2, 2, 1):
        expected += [([part] * n, n > 1, True, False) for part in (["table"], MATRICES)]
    expected += [([["embed.weight", "head.weight"]], False, False, False), ([["table"]], False, False, False)]
    expected += [("root", False, False, False)]
    for calls in pool.run(_recorded, 2):
        assert calls == expected
    for calls in pool.run(_recorded, 1):
        assert len(calls) == 5 * 2 + 3 and not any(listed for _, listed, _, _ in calls)


def _symmetric():
    calls = []
    faults, units.symmetric_faults = units.symmetric_faults, lambda *args: []
    names = {"set_force_sum_reduction_for_comms": "sum", "set_symm_mem_for_comm": "symm"}
    real = {name: getattr(FSDPModule, name, None) for name in names}
    for name, short in names.items():
        setattr(FSDPModule, name, lambda self, value, s=short: calls.append((getattr(self, "names", "root"), s, value)))
    try:
        build(mesh_of(dp_shard=4), layers=2, options={"symmetric_memory": True})
    finally:
        units.symmetric_faults = faults
        for name, fn in real.items():
            delattr(FSDPModule, name) if fn is None else setattr(FSDPModule, name, fn)
    return calls


def test_symmetric_memory_sums_first_root_first(pool):
    own, block = ["embed.weight", "table", "head.weight"], ["table", *MATRICES]
    expected = [(n, *call) for n in ("root", own, block, block) for call in (("sum", True), ("symm", "NCCL"))]
    for calls in pool.run(_symmetric):
        assert calls == expected


# --- what is refused -------------------------------------------------------------------------------------------------


def _refused(changes, options, stacks, rest):
    def forbidden(*args, **kwargs):
        raise AssertionError("something was wrapped")

    real, units.fully_shard = units.fully_shard, forbidden
    try:
        model = {k: s for k, s in {**toy.specs(), **changes}.items() if s is not None}
        shard(model, mesh_of(dp_shard=4), stacks=stacks, options=ShardOptions(**options), **rest)
    finally:
        units.fully_shard = real


LEAF = ParamSpec((6, 5), torch.float64)
TIED = dataclasses.replace(LEAF, alias_of="embed.weight")


@pytest.mark.parametrize(
    "changes, options, stacks, rest, said",
    [
        ({}, {"modules_per_group": 0}, ["blocks"], {}, "modules_per_group must be at least 1, got 0"),
        ({}, {"modules_per_group": True}, ["blocks"], {}, "modules_per_group must be at least 1, got True"),
        ({}, {"prefetch": -1}, ["blocks"], {}, "prefetch must be at least 0"),
        ({}, {"reduce_dtype": torch.float16}, ["blocks"], {}, "reduce_dtype must be float32 or bfloat16"),
        ({}, {"accumulate": "first"}, ["blocks"], {}, "'last' or 'sharded', got 'first'"),
        ({}, {}, [], {}, "stacks is empty"),
        ({}, {}, ["block"], {}, r"'block' has no layer \(did you mean 'blocks'\?\)"),
        ({}, {}, ["blocks", "blocks"], {}, "named twice"),
        ({f"blocks.2.{k}": None for k in ("table", *MATRICES)}, {}, ["blocks"], {}, r"have \[0, 1, 3, 4\]"),
        ({"blocks.norm": LEAF, "blocks.01.w": LEAF}, {}, ["blocks"], {}, "blocks.01.w belongs to no layer"),
        ({"out.weight": TIED}, {}, ["blocks"], {}, "tied to embed.weight"),
        ({}, {}, ["blocks"], {"compute": {"blocks.0.tabel": torch.float32}}, "did you mean 'blocks.0.table'"),
        ({"gain": ParamSpec((), torch.float64)}, {}, ["blocks"], {}, "gain has no dimension"),
        ({}, {"symmetric_memory": True}, ["blocks"], {}, "needs CUDA and NCCL, the mesh is on cpu"),
        ({}, {}, ["blocks"], {"rules": rules.Rules({"mlp": "dp_shard"})}, "mlp -> dp_shard"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_wrapped(pool, changes, options, stacks, rest, said):
    with pytest.raises(UserError, match=said):
        pool.run(_refused, changes, options, stacks, rest)


def test_all_faults_are_in_one_message():
    model = {**toy.specs(), "blocks.norm": LEAF}
    with pytest.raises(UserError) as error:
        shard(model, single(), stacks=["blocks", "layers"], compute={"x": torch.float32}, options=ShardOptions(0))
    assert str(error.value).count("\n  - ") == 4
    with pytest.raises(UserError, match="needs weights that are sharded"):
        shard(toy.specs(), single(), stacks=["blocks"], options=ShardOptions(symmetric_memory=True))


# --- filling ---------------------------------------------------------------------------------------------------------


def _placements(sizes):
    mesh = mesh_of(**sizes)
    _, sharded = build(mesh)
    planned = {k: rules.placements(s, mesh) for k, s in toy.specs().items()}
    return all(p.placements == planned[k] for k, p in sharded.params.items()), all(
        local_slices(p) == rules.part(toy.specs()[k], mesh.sizes, rules.Rules(), rules.place_of(mesh))
        for k, p in sharded.params.items()
    )


@pytest.mark.parametrize(
    "sizes", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}, {"tp": 4}], ids=str
)
def test_leaves_lie_where_the_rules_plan_them(pool, sizes):
    assert pool.run(_placements, sizes) == [(True, True)] * 4


def _slices(shape, sizes, cut):
    mesh = mesh_of(**sizes)
    spec = ParamSpec(shape, torch.float64, axes=tuple("mlp" if d == cut else None for d in range(len(shape))))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    sharded = shard({"blocks.0.w": spec}, mesh, stacks=["blocks"])
    leaf = sharded.params["blocks.0.w"]
    with torch.no_grad():
        local(leaf).fill_(torch.nan)
    fill(sharded.params, {"blocks.0.w": full})
    inside = all(0 <= s.start <= s.stop <= n for s, n in zip(local_slices(leaf), shape, strict=True))
    same = torch.equal(local(leaf), full[local_slices(leaf)])
    # A model without leaves outside its stacks has a root all the same.
    total = sharded(lambda p: stack(p, "blocks")[0](lambda tree: tree["w"].sum()))
    assert cut is not None or total == full.sum()
    return inside, same, torch.equal(whole(leaf.detach()), full)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_each_process_is_filled_with_its_own_part(pool, data):
    sizes = data.draw(st.sampled_from([{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}]))
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cut = data.draw(st.sampled_from([None, *range(len(shape))])) if "tp" in sizes else None
    if cut is not None:
        shape[cut] *= 2
    assert pool.run(_slices, tuple(shape), sizes, cut) == [(True, True, True)] * 4


def test_plain_leaves_are_whole_and_keys_are_compared():
    model = toy.specs()
    sharded = shard(model, single(), stacks=toy.STACKS)
    sharded.reshard()  # nothing to do
    assert local_slices(sharded.params["table"]) == (slice(0, toy.DIM),)
    tree = toy.params(model)
    tree["embed.weight"] = tree["embed.weight"].T
    del tree["table"]
    with pytest.raises(UserError) as error:
        fill(sharded.params, tree)
    assert "missing table" in str(error.value) and "embed.weight has shape [5, 6]" in str(error.value)


class Allocated(TorchDispatchMode):
    """The largest tensor that any operation made, in bytes, and the sum over memory that is new."""

    def __init__(self):
        super().__init__()
        self.largest, self.storages = 0, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and not isinstance(t, DTensor) and t.device.type != "meta":
                self.largest = max(self.largest, t.untyped_storage().nbytes())
                self.storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return out


def _footprint(path):
    mesh = mesh_of(dp_shard=4)
    model = {f"blocks.{i}.w": ParamSpec((64, 32), torch.float32) for i in range(4)}
    tree = checkpoint.open_checkpoint(path)
    read, real = [], os.preadv
    os.preadv = lambda *args: read.append(real(*args)) or read[-1]
    try:
        with Allocated() as seen:
            sharded = shard(model, mesh, stacks=["blocks"])
            kept = sum(seen.storages.values())
            fill(sharded.params, tree)
    finally:
        os.preadv = real
    right = all(torch.equal(local(p), tree[k].read()[local_slices(p)]) for k, p in sharded.params.items())
    return right, seen.largest, kept, sum(read)


def test_no_process_holds_or_reads_more_than_its_part(pool, tmp_path):
    leaf = 64 * 32 * 4
    save_file({f"blocks.{i}.w": torch.randn(64, 32) for i in range(4)}, tmp_path / "model.safetensors")
    for right, largest, kept, read in pool.run(_footprint, str(tmp_path / "model.safetensors")):
        assert right and largest == leaf // 4 and kept == leaf and read == leaf
