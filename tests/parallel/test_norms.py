import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.specs import ParamSpec
from parallel import rules
from parallel.norms import clip_, local, total_norm
from tests.parallel import toy
from tests.parallel.pool import mesh_of

LAYOUTS = [
    {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}, {"tp": 4}, {"dp_replicate": 4},
]  # fmt: skip
RELATIVE = 1e-12  # float64, re-associated


def norm_of(tree):
    return torch.cat([t.double().flatten() for t in tree.values()]).norm()


def _both(sizes, max_norm, ranks=None):
    """`(norm found, true norm, largest error of the clipped gradients, their norm)`."""
    mesh = mesh_of(ranks, **sizes)
    if mesh is None:
        return None
    tree = toy.params(toy.specs())
    grads = rules.place(tree, toy.specs(), mesh)
    tree["plain"] = torch.linspace(-1, 1, 5, dtype=torch.float64)  # a copy on every process
    grads["plain"] = tree["plain"].clone()
    true = norm_of(tree).item()
    found, storage = clip_(grads, max_norm), [local(g).data_ptr() for g in grads.values()]
    assert found.shape == () and [local(g).data_ptr() for g in grads.values()] == storage
    factor = min(1.0, max_norm / (true + 1e-6)) if max_norm > 0 else 1.0
    full = {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in grads.items()}
    worst = max((full[k] - factor * tree[k]).abs().max().item() for k in tree)
    return found.item(), true, worst, total_norm(grads).item(), factor


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("max_norm", [1.0, 1e9, 0.0])
def test_norm_and_clipping_are_those_of_the_whole_gradients(pool, sizes, max_norm):
    # DIM is 6 and MLP 8: of four shards of a leaf some are uneven, one is empty; tables under tp are copies.
    results = pool.run(_both, sizes, max_norm)
    assert len({result[0] for result in results}) == 1, "equal on all processes, to the bit"
    for found, true, worst, after, factor in results:
        assert found == pytest.approx(true, rel=RELATIVE) and worst < 1e-14
        assert after == pytest.approx(factor * true, rel=RELATIVE)


def test_over_some_of_the_ranks(pool):
    results = pool.run(_both, {"dp_shard": 2}, 1.0, (1, 2))
    assert results[0] is None and results[3] is None
    assert results[1][0] == results[2][0] == pytest.approx(results[1][1], rel=RELATIVE)


def _drawn(shapes, sizes, cuts):
    mesh = mesh_of(**sizes)
    axes = lambda shape, cut: tuple("mlp" if d == cut else None for d in range(len(shape)))  # noqa: E731
    model = {
        str(i): ParamSpec(shape, torch.float64, axes=axes(shape, cut))
        for i, (shape, cut) in enumerate(zip(shapes, cuts, strict=True))
    }
    tree = toy.params(model)
    return total_norm(rules.place(tree, model, mesh)).item(), norm_of(tree).item()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_any_shapes_and_cuts(pool, data):
    sizes = data.draw(st.sampled_from(LAYOUTS))
    shapes, cuts = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
        cut = data.draw(st.sampled_from([None, *range(len(shape))]))
        if cut is not None:
            shape[cut] *= 4
        shapes.append(tuple(shape))
        cuts.append(cut)
    for found, true in pool.run(_drawn, shapes, sizes, cuts):
        assert found == pytest.approx(true, rel=RELATIVE)


class Watched(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op._schema.name.split("::")[1])
        return op(*args, **(kwargs or {}))


def _operators(sizes, dtype):
    model = {k: dataclasses.replace(s, dtype=dtype) for k, s in toy.specs().items()}
    grads = rules.place(toy.params(model), model, mesh_of(**sizes))
    with Watched() as seen:
        norm = clip_(grads, 1.0)
    return seen.names, norm.dtype, norm.device.type


@pytest.mark.parametrize(
    "sizes, reductions", [({"dp_shard": 4}, 1), ({"tp": 2, "dp_shard": 2}, 2), ({"dp_replicate": 4}, 0)], ids=str
)
def test_one_all_reduce_per_axis_multi_tensor_kernels_and_no_copy_to_the_host(pool, sizes, reductions):
    for names, dtype, device in pool.run(_operators, sizes, torch.float64):
        assert names.count("allreduce_") == reductions
        assert names.count("_foreach_norm") <= 4 and names.count("_foreach_mul_") == 1
        assert not {"_local_scalar_dense", "item", "is_nonzero", "_to_copy"} & set(names)
        assert names.count("mul") == 1 and "mul_" not in names, "the factor itself; leaves are not scaled one by one"
        assert dtype == torch.float64 and device == "cpu"


def _sixteen_bits():
    """300 x 300 gradients of 1 in bfloat16: their squares add up to 90000, which bfloat16 cannot count to."""
    mesh = mesh_of(dp_shard=4)
    ones = torch.ones(300, 300, dtype=torch.bfloat16)
    grads = {k: distribute_tensor(ones.clone(), mesh.device_mesh) for k in ("a", "b")}
    norm = clip_(grads, 150.0)
    return norm.item(), norm.dtype, grads["a"].full_tensor().unique().tolist(), grads["a"].dtype


def test_16_bit_gradients_are_summed_in_float32(pool):
    for norm, dtype, values, kept in pool.run(_sixteen_bits):
        assert norm == pytest.approx(300 * 2**0.5, rel=1e-6) and dtype == torch.float32
        assert values == [pytest.approx(150 / norm, rel=2**-8)] and kept == torch.bfloat16


def _not_finite(value):
    mesh = mesh_of(dp_shard=4)
    grad = torch.ones(8, dtype=torch.float64)
    grad[-1] = value
    return total_norm({"a": distribute_tensor(grad, mesh.device_mesh)}).item()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_on_one_process_is_seen_by_all(pool, value):
    assert all(not torch.isfinite(torch.tensor(norm)) for norm in pool.run(_not_finite, value))


def _partial():
    mesh = mesh_of(dp_shard=4)
    with pytest.raises(ValueError, match="holds partial sums"):
        total_norm({"a": DTensor.from_local(torch.ones(2), mesh.device_mesh, [Partial()])})


def test_partial_sums_have_no_norm(pool):
    pool.run(_partial)


def _local():
    mesh = mesh_of(dp_shard=4)
    leaf = distribute_tensor(torch.arange(8.0), mesh.device_mesh).requires_grad_()
    part = local(leaf)
    with torch.no_grad():
        part.mul_(2)
    copies = DTensor.from_local(torch.ones(3), mesh.device_mesh, [Replicate()])
    return part.requires_grad, leaf.detach().full_tensor().tolist(), local(copies).tolist()


def test_local_shares_memory(pool):
    for grad, values, copies in pool.run(_local):
        assert not grad and values == [2.0 * i for i in range(8)] and copies == [1.0] * 3
    plain = torch.ones(2)
    assert local(plain) is plain and total_norm({}).item() == 0.0
