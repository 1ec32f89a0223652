import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UserError
from parallel import collectives
from parallel.mesh import AXES, build_mesh, infer_sizes, single
from tests.parallel.pool import mesh_of


def test_what_is_left_goes_to_the_open_axis():
    assert infer_sizes(8, {"dp_shard": -1, "tp": 2}) == {"dp_replicate": 1, "dp_shard": 4, "sp": 1, "tp": 2}
    assert infer_sizes(1, {}) == dict.fromkeys(AXES, 1)
    assert infer_sizes(4, {"dp_shard": 2, "ep": 2})["ep"] == 2


@given(st.integers(1, 64), st.lists(st.sampled_from([-2, -1, 0, 1, 2, 3, 4]), min_size=4, max_size=4))
def test_sizes_multiply_to_the_world_or_are_refused_with_all_numbers(world, numbers):
    given_ = dict(zip(AXES, numbers, strict=True))
    try:
        sizes = infer_sizes(world, given_)
    except UserError as error:
        assert all(f"{name} {n}" in str(error) for name, n in given_.items())
    else:
        assert math.prod(sizes.values()) == world
        assert all(n in (-1, sizes[name]) for name, n in given_.items())


@pytest.mark.parametrize(
    "sizes, said",
    [
        ({"dp_shard": -1, "sp": 3}, "8 processes are not divisible by 3"),
        ({"dp_shard": 3}, "needs 3 processes, there are 8"),
        ({"dp_shard": -1, "tp": -1}, "only one axis can be -1"),
        ({"sp": 0}, "sp is 0"),
    ],
)
def test_sizes_that_do_not_fit(sizes, said):
    with pytest.raises(UserError, match=said):
        infer_sizes(8, sizes)


def test_a_process_alone_has_no_groups():
    mesh = single()
    assert mesh.world == 1 and mesh.leader and mesh.device_mesh is None
    assert mesh.group(*AXES) is None and mesh.index(*AXES) == 0
    assert build_mesh({}, "cpu").groups == {}
    with pytest.raises(UserError, match="dp_shard 2"):
        build_mesh({"dp_shard": 2}, "cpu")


def _places(sizes, ranks):
    made, new_group = [], dist.new_group

    def counted(members, **rest):
        made.append(tuple(members))
        return new_group(members, **rest)

    dist.new_group = counted
    try:
        mesh = build_mesh(sizes, "cpu", ranks=ranks)
    finally:
        dist.new_group = new_group
    if mesh is None:
        return None, made
    total = {}
    for axis in mesh.sizes:
        group = collectives.as_group(mesh.group(axis))
        x = torch.tensor([float(mesh.rank)])
        total[axis] = (
            collectives.all_sum(x, group).item(), mesh.coordinate(axis), None if group is None else group.rank
        )  # fmt: skip
    names = None if mesh.device_mesh is None else mesh.device_mesh.mesh_dim_names
    return (total, names, mesh.index("dp_shard", "sp"), mesh.leader), made


def test_axes_are_groups_of_the_ranks_that_differ_along_them(pool):
    out = pool.run(_places, {"dp_shard": 2, "tp": 2}, None)
    for rank, (place, made) in enumerate(out):
        totals, names, index, leader = place
        dp, tp = divmod(rank, 2)
        assert totals["tp"] == (4 * dp + 1, tp, tp) and totals["dp_shard"] == (2 * tp + 2, dp, dp)
        assert totals["sp"] == (rank, 0, None)
        assert names == ("shard", "tp") and index == dp and leader == (rank == 0)
        assert sorted(made) == [(0, 1), (0, 2), (1, 3), (2, 3)], "one group per set of ranks, none of one rank"


def test_a_mesh_over_some_of_the_ranks(pool):
    out = pool.run(_places, {"sp": 2}, [1, 2])
    assert [place for place, _ in out if place is None] == [None, None]
    for rank in (1, 2):
        totals, names, index, leader = out[rank][0]
        assert totals["sp"] == (3.0, rank - 1, rank - 1) and index == rank - 1 and leader == (rank == 1)
        assert names == ("shard",)


def _gradients(name):
    """The operator and its gradient on each rank, for a loss that weighs each rank's result differently."""
    mesh = mesh_of(sp=4)
    group = collectives.as_group(mesh.group("sp"))
    x = (torch.arange(4.0) + 10 * mesh.rank).requires_grad_()
    y = getattr(collectives, name)(x, group)
    (y * (mesh.rank + 1)).sum().backward()
    return y.detach(), x.grad


def test_collectives_and_their_gradients(pool):
    x = torch.stack([torch.arange(4.0) + 10 * r for r in range(4)])
    weights = torch.arange(1.0, 5.0)
    for rank, (y, grad) in enumerate(pool.run(_gradients, "exchange")):
        assert torch.equal(y, x[:, rank]) and torch.equal(grad, weights)
    for y, grad in pool.run(_gradients, "gather"):
        assert torch.equal(y, x.flatten()) and torch.equal(grad, torch.full((4,), 10.0))
    for rank, (y, grad) in enumerate(pool.run(_gradients, "copy")):
        assert torch.equal(y, x[rank]) and torch.equal(grad, torch.full((4,), 10.0))
    for rank, (y, grad) in enumerate(pool.run(_gradients, "all_sum")):
        assert torch.equal(y, x.sum(0)) and torch.equal(grad, torch.full((4,), rank + 1.0))


def _second(name):
    """d/dx of <d/dx sum over ranks of (w . op(x))^2 / 2, v> on each rank, where every rank holds the same sum."""
    mesh = mesh_of(sp=4)
    group = collectives.as_group(mesh.group("sp"))
    op = lambda x: getattr(collectives, name)(x, group)  # noqa: E731
    x = (torch.arange(4.0, dtype=torch.float64) + 10 * mesh.rank).requires_grad_()
    total = lambda t: collectives.all_sum(t, group)  # noqa: E731
    loss = total((op(x) ** 3 * (mesh.rank + 1)).sum())
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(total((first * torch.cos(x)).sum()), x)
    return first.detach(), second


def _whole(name, xs):
    return list(torch.stack(xs).T) if name == "exchange" else [torch.cat(xs)] * 4


@pytest.mark.parametrize("name", ["exchange", "gather"])
def test_second_derivatives_of_collectives(pool, name):
    """Against autograd over all ranks' x at once, in one process."""
    xs = [(torch.arange(4.0, dtype=torch.float64) + 10 * r).requires_grad_() for r in range(4)]
    loss = sum(((r + 1) * y**3).sum() for r, y in enumerate(_whole(name, xs)))
    first = torch.autograd.grad(loss, xs, create_graph=True)
    second = torch.autograd.grad(sum((f * torch.cos(x)).sum() for f, x in zip(first, xs, strict=True)), xs)
    for rank, (f, s) in enumerate(pool.run(_second, name)):
        torch.testing.assert_close(f, first[rank].detach())
        torch.testing.assert_close(s, second[rank])


def _region(x, weights, group):
    """A tensor-parallel region: every rank has its own weights."""
    return collectives.all_sum(torch.tanh(collectives.copy(x, group) * weights) * weights, group)


def _hessian_product():
    mesh = mesh_of(tp=4)
    group = collectives.as_group(mesh.group("tp"))
    x = torch.linspace(-1, 1, 3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(_region(x, float(mesh.rank + 1), group).pow(2).sum(), x, create_graph=True)
    return torch.autograd.grad((first * torch.cos(x)).sum(), x)[0]


def test_second_derivatives_of_a_tensor_parallel_region(pool):
    x = torch.linspace(-1, 1, 3, dtype=torch.float64, requires_grad=True)
    y = sum(torch.tanh(x * w) * w for w in range(1, 5))
    (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.cos(x)).sum(), x)
    for got in pool.run(_hessian_product):
        torch.testing.assert_close(got, second)
