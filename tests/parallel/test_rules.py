import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from core.checkpoint import open_checkpoint
from core.errors import UserError
from core.rules import pack
from core.save import save_file
from core.specs import ParamSpec
from parallel import rules
from parallel.mesh import infer_sizes, single
from parallel.rules import Rules
from tests.parallel.pool import mesh_of

MODEL = {
    "patch.weight": ParamSpec((8, 6), axes=("embed", None)),
    "patch.bias": ParamSpec((8,), axes=("embed",)),
    "scale": ParamSpec(()),
    **{
        f"blocks.{i}.{key}": spec
        for i in range(2)
        for key, spec in {
            "table": ParamSpec((1, 6, 8), axes=(None, None, "embed")),
            "to_q.weight": ParamSpec((16, 8), axes=("heads", "embed")),
            "to_q.bias": ParamSpec((16,), axes=("heads",)),
            "to_out.weight": ParamSpec((8, 16), axes=("embed", "heads")),
            "odd": ParamSpec((5, 7)),
        }.items()
    },
}


def _tree():
    g = torch.Generator().manual_seed(0)
    return {k: torch.randn(s.shape, generator=g) for k, s in MODEL.items()}


def _sizes(**sizes):
    return infer_sizes(math.prod(sizes.values()), sizes)


def _places(sizes):
    """Every place of a mesh: `{dimension: index}`."""
    dims = rules.mesh_dims(sizes)
    return [dict(zip(dims, at, strict=True)) for at in itertools.product(*map(range, dims.values()))]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=4, max_size=4),
    st.lists(st.integers(0, 9), max_size=3),
    st.lists(st.sampled_from([None, "heads", "mlp"]), min_size=3, max_size=3),
)
def test_parts_cover_a_leaf_once_per_replica(numbers, shape, names):
    sizes = _sizes(**dict(zip(("dp_replicate", "dp_shard", "sp", "tp"), numbers, strict=True)))
    spec = ParamSpec(tuple(shape), axes=tuple(names[: len(shape)]))
    if rules.leaf_faults(spec, sizes, Rules()):
        return
    seen = torch.zeros(spec.shape, dtype=torch.int64)
    for at in _places(sizes):
        where = rules.part(spec, sizes, Rules(), at)
        seen[where] += 1
        assert seen[where].shape == tuple(s.stop - s.start for s in where)
    copies = math.prod(
        n for name, n in rules.mesh_dims(sizes).items() if rules.layout(spec, sizes, Rules())[name] == Replicate()
    )
    assert bool((seen == copies).all())


def test_layouts_by_hand():
    of = lambda key, **sizes: list(rules.layout(MODEL[key], _sizes(**sizes), Rules()).items())  # noqa: E731
    assert of("blocks.0.to_q.weight", tp=2) == [("tp", Shard(0))]
    assert of("blocks.0.to_out.weight", tp=2) == [("tp", Shard(1))]
    assert of("blocks.0.to_out.weight", dp_shard=2, sp=2, tp=2) == [("shard", Shard(0)), ("tp", Shard(1))]
    assert of("patch.weight", dp_replicate=3, dp_shard=2) == [("dp_replicate", Replicate()), ("shard", Shard(0))]
    assert of("blocks.0.table", dp_shard=3) == [("shard", Shard(1))], "the first dimension that divides"
    assert of("blocks.0.odd", dp_shard=2) == [("shard", Shard(0))], "none divides: the first, unevenly"
    assert of("scale", dp_shard=2, tp=2) == [("shard", Replicate()), ("tp", Replicate())]


def test_further_axes_cut_leaves_too():
    spec = ParamSpec((4, 8, 6), axes=("experts", "mlp", None))
    own = Rules({"experts": "ep", "mlp": "tp"})
    sizes = _sizes(dp_shard=2, tp=2, ep=2)
    assert list(rules.layout(spec, sizes, own)) == ["shard", "tp", "ep"]
    assert rules.local_shape(spec, sizes, own) == (2, 4, 6)
    assert rules.part(spec, sizes, own, {"shard": 0, "tp": 1, "ep": 1}) == (slice(2, 3), slice(4, 8), slice(0, 6))


def test_all_faults_are_said_at_once_with_equal_layers_as_one():
    sizes = _sizes(tp=3)
    with pytest.raises(UserError) as caught:
        rules.check(MODEL, sizes, Rules({"heads": "tp", "embed": "tpp", "mlp": "dp_shard"}))
    said = str(caught.value)
    assert "embed -> tpp" in said and "did you mean 'tp'" in said and "mlp -> dp_shard" in said
    assert "blocks.*.to_q.weight: dimension 0 of [16, 8] (heads) is not divisible by tp 3 (2 leaves)" in said
    assert "blocks.*.to_q.bias" in said and "blocks.*.to_out.weight: dimension 1" in said and said.count("\n") == 5
    with pytest.raises(UserError, match="tp cuts more than one dimension: heads, mlp"):
        rules.check({"w": ParamSpec((4, 4), axes=("heads", "mlp"))}, _sizes(tp=2), Rules())


def _placed(sizes, ranks, path):
    mesh = mesh_of(ranks=ranks, **sizes)
    if mesh is None:
        return None
    tree = _tree()
    eager, lazy = (rules.place(t, MODEL, mesh) for t in (tree, open_checkpoint(path)))
    assert all(torch.equal(eager[k].to_local(), lazy[k].to_local()) for k in tree)
    wrong = [k for k in tree if not torch.equal(eager[k].full_tensor(), tree[k])]
    parts = {k: rules.part(MODEL[k], mesh.sizes, Rules(), rules.place_of(mesh)) for k in tree}
    wrong += [k for k in tree if not torch.equal(eager[k].to_local(), tree[k][parts[k]])]
    own = all(t.to_local().untyped_storage().nbytes() == t.to_local().numel() * 4 for t in eager.values())
    return wrong, own, {k: t.placements for k, t in eager.items()}


@pytest.mark.parametrize(
    "sizes, ranks",
    [({"dp_shard": 2, "tp": 2}, None), ({"dp_replicate": 2, "dp_shard": 2}, None), ({"sp": 2, "dp_shard": 2}, None),
     ({"tp": 4}, None), ({"dp_shard": 4}, None), ({"dp_replicate": 4}, None), ({"tp": 2}, (1, 2))],
)  # fmt: skip
def test_placed_leaves_are_whole_again_when_gathered(pool, tmp_path, sizes, ranks):
    save_file(tmp_path / "model.safetensors", _tree(), {})
    for out in pool.run(_placed, sizes, ranks, tmp_path / "model.safetensors"):
        if out is not None:
            wrong, own, where = out
            assert wrong == [] and own, "a shard keeps no more memory than its own"
            full = _sizes(**sizes)
            assert where == {k: tuple(rules.layout(s, full, Rules()).values()) for k, s in MODEL.items()}


def test_a_process_alone_keeps_plain_tensors():
    tree = _tree()
    out = rules.place(tree, MODEL, single())
    assert all(type(out[k]) is torch.Tensor and torch.equal(out[k], tree[k]) for k in tree)
    with pytest.raises(UserError, match="missing scale"):
        rules.place({k: v for k, v in tree.items() if k != "scale"}, MODEL, single())


def _fsdp(sizes):
    """Placements, local shards and meshes of FSDP2 on leaves that are cut over tp, and those of `place`."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(**sizes)
    tree = {k: v for k, v in _tree().items() if v.ndim}
    model = {k: MODEL[k] for k in tree}
    module, cut = torch.nn.Module(), {}
    for i, (key, leaf) in enumerate(tree.items()):
        if "tp" in mesh.device_mesh.mesh_dim_names:
            dim = rules.cut_dims(model[key], Rules()).get("tp")
            place = Replicate() if dim is None else Shard(dim)
            local = leaf if dim is None else leaf.chunk(sizes["tp"], dim)[mesh.coordinate("tp")].contiguous()
            leaf = DTensor.from_local(local, mesh.device_mesh["tp"], [place], run_check=False)
        cut[f"p{i}"] = key
        module.register_parameter(f"p{i}", torch.nn.Parameter(leaf))
    dims = [n for n in mesh.device_mesh.mesh_dim_names if n != "tp"]
    where = {id(p): rules.layout(model[cut[n]], mesh.sizes, Rules())["shard"] for n, p in module.named_parameters()}
    fully_shard(
        module, mesh=mesh.device_mesh[tuple(dims)] if len(dims) > 1 else mesh.device_mesh[dims[0]],
        shard_placement_fn=lambda p: Shard(where[id(p)].dim),
    )  # fmt: skip
    placed = rules.place(tree, model, mesh)
    out = {}
    for name, theirs in module.named_parameters():
        ours = placed[cut[name]]
        same = ours.device_mesh.mesh_dim_names == theirs.device_mesh.mesh_dim_names
        out[cut[name]] = theirs.placements, ours.placements, same and torch.equal(theirs.to_local(), ours.to_local())
    return out


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4}])
def test_fsdp2_makes_the_same_shards(pool, sizes):
    for out in pool.run(_fsdp, sizes):
        for key, (theirs, ours, equal) in out.items():
            assert theirs == ours and equal, key


def test_leaves_packed_before_the_cut_are_refused():
    """Rows of q, k, v one after another: half of them would be q and half of k."""
    split = {f"attn1.to_{x}.weight": ParamSpec((8, 4), axes=("heads", "embed")) for x in "qkv"}
    packed = pack("to_qkv", ("to_q", "to_k", "to_v"))(split).specs
    sizes = infer_sizes(2, {"tp": 2})
    with pytest.raises(UserError, match="attn1.to_qkv.weight: tp 2 would cut across packed parts"):
        rules.check(packed, sizes, Rules())
    rules.check(packed, infer_sizes(2, {"dp_shard": 2}), Rules())
    assert pack("to_qkv", ("to_q", "to_k", "to_v"))(rules.local_specs(split, sizes, Rules())).specs
