import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from core.errors import UserError
from core.scan import compiled, recompute, scan
from parallel import rules, zero3
from parallel.mesh import single
from parallel.tensor import tensor_parallel
from tests.parallel import toy
from tests.parallel.pool import mesh_of

RELATIVE = 1e-11  # float64, re-associated: sums over ranks in another order
LAYOUTS = [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4}, {"sp": 2, "dp_shard": 2}]


def placed(mesh, seed=0):
    tree = toy.params(toy.specs(), seed)
    return tree, rules.place(tree, toy.specs(), mesh)


def worst(found, expected):
    """Largest relative error, each leaf by its own largest value."""
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
    return max(((whole(found[k].detach()) - e).abs().max() / e.abs().max()).item() for k, e in expected.items())


def data_of(mesh):
    i, n = mesh.index("dp_replicate", "dp_shard"), mesh.size("dp_replicate", "dp_shard")
    return i, toy.samples(n)


def _gradients(sizes, every, compile_):
    mesh = mesh_of(**sizes)
    i, batches = data_of(mesh)
    tree, leaves = placed(mesh)
    for leaf in leaves.values():
        leaf.requires_grad_()
    torch._dynamo.reset()  # the pool's processes have compiled the same block for other layouts
    inner = compiled(scan, backend="aot_eager") if compile_ else scan
    run = {"scan": recompute(inner, every=every) if every else inner, "tp": tensor_parallel(mesh)}
    value = toy.loss(zero3.gathered(leaves, toy.STACKS), batches[i], **run)
    grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    assert all(g.placements == leaves[k].placements for k, g in grads.items())
    return worst(grads, toy.reference(tree, batches))


@pytest.mark.parametrize(
    "sizes, every, compile_",
    [
        *((sizes, every, False) for sizes in (*LAYOUTS, {"tp": 2, "dp_shard": 2}, {"tp": 4}) for every in (0, 2)),
        ({"tp": 2, "dp_shard": 2}, 1, True),
    ],
    ids=str,
)
def test_gradients_of_autograd_grad(pool, sizes, every, compile_):
    assert max(pool.run(_gradients, sizes, every, compile_)) < RELATIVE


def _second_derivatives(sizes, order):
    """Products of the Hessian (order 2) or of the third derivative (order 3) with vectors."""
    mesh = mesh_of(**sizes)
    i, batches = data_of(mesh)
    tree, leaves = placed(mesh)
    directions = [placed(mesh, seed) for seed in range(1, order)]

    def product(params, value, vectors):
        for p in params.values():
            p.requires_grad_()
        out = torch.autograd.grad(value(params), list(params.values()), create_graph=True)
        for vector in vectors:
            out = torch.autograd.grad(out, list(params.values()), [vector[k] for k in params], create_graph=True)
        return dict(zip(params, out, strict=True))

    found = product(leaves, lambda p: toy.loss(zero3.gathered(p, toy.STACKS), batches[i]), [v for _, v in directions])
    mean = lambda p: sum(toy.loss(p, x) for x in batches) / len(batches)  # noqa: E731
    return worst(found, product(tree, mean, [v for v, _ in directions]))


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_products_with_second_and_third_derivatives(pool, sizes, order):
    assert max(pool.run(_second_derivatives, sizes, order)) < RELATIVE


def _adapters(sizes):
    """A frozen sharded base, and adapters of the middle layer that every process holds whole."""
    mesh = mesh_of(**sizes)
    i, batches = data_of(mesh)
    tree, leaves = placed(mesh)
    g = torch.Generator().manual_seed(7)
    added = {f"blocks.2.{k}": torch.randn(toy.DIM, 3, generator=g, dtype=torch.float64) for k in ("down", "up")}
    copies = [Replicate()] * mesh.device_mesh.ndim
    own = {k: DTensor.from_local(v, mesh.device_mesh, copies).requires_grad_() for k, v in added.items()}

    def loss(params, x):
        def block(p, x, _):
            x = x + torch.tanh(x) * p["table"][0]
            return (x + x @ p["down"] @ p["up"].T if "down" in p else x), None

        x, _ = scan(block, torch.nn.functional.linear(x, params["embed.weight"]), toy.stack(params, "blocks"))
        return x.square().mean()

    value = loss(zero3.gathered({**leaves, **own}, toy.STACKS), batches[i])
    grads = dict(zip(own, torch.autograd.grad(value, list(own.values())), strict=True))
    plain = {k: v.clone().requires_grad_() for k, v in added.items()}
    mean = sum(loss({**tree, **plain}, x) for x in batches) / len(batches)
    expected = dict(zip(plain, torch.autograd.grad(mean, list(plain.values())), strict=True))
    return worst(grads, expected), [g.placements == tuple(copies) for g in grads.values()]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_adapters_with_their_own_placement(pool, sizes):
    for error, placements in pool.run(_adapters, sizes):
        assert error < RELATIVE and all(placements)


def _lone():
    _, leaves = placed(mesh_of(dp_shard=4))
    leaves["blocks.0.gain"] = torch.ones((), dtype=torch.float64, requires_grad=True)
    zero3.gathered(leaves, toy.STACKS)


def test_a_trainable_leaf_of_this_process_alone_is_refused(pool):
    with pytest.raises(UserError, match="must be DTensors too.*\n  - blocks.0.gain"):
        pool.run(_lone)


def test_plain_trees_pass_as_they_are():
    tree, leaves = placed(single())
    x = toy.samples(1)[0]
    assert torch.equal(toy.loss(zero3.gathered(leaves, toy.STACKS), x), toy.loss(tree, x))
