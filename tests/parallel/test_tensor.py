import dataclasses

import pytest
import torch

from core.errors import UserError
from core.scan import compiled, recompute, scan
from core.transforms import apply, invert
from nn import wan
from nn.run import Run, TensorParallel
from nn.wan_inputs import model_inputs
from parallel import rules
from parallel.mesh import infer_sizes, single
from parallel.rules import Rules
from parallel.tensor import GroupTensorParallel, check_heads, tensor_parallel
from tests.nn.wan_cases import random_inputs, random_params, tiny_config
from tests.parallel.pool import mesh_of
from tests.parallel.sequence_cases import Counted

F64 = torch.float64
# Sums over heads and width are cut into `tp` partial sums: a few units in the last place of float64.
EXACT = {"rtol": 1e-11, "atol": 1e-12}
LAYERS = 3


def _config(image: bool):
    cfg = tiny_config(num_attention_heads=4, num_layers=LAYERS)
    if image:
        cfg = dataclasses.replace(cfg, in_channels=7, image_dim=6, added_kv_proj_dim=cfg.dim)
    return cfg


def _inputs(cfg):
    noisy, timestep, conditions = random_inputs(cfg, 1, image_len=3, dtype=F64)
    return model_inputs(cfg, noisy, timestep, conditions, dtype=F64)


def _loss(cfg, leaves, run):
    out = wan.forward(leaves, cfg, _inputs(cfg), run=run)
    return out, (out * torch.linspace(-1, 1, out.numel(), dtype=F64).reshape(out.shape)).sum()


def _gradients(cfg, params, run):
    """Output and gradients of all leaves."""
    leaves = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    out, loss = _loss(cfg, leaves, run)
    loss.backward()
    return out.detach(), {k: p.grad for k, p in leaves.items()}


SCANS = {
    "plain": scan,
    "recompute": recompute(scan, every=2),
    "compiled": compiled(scan, backend="aot_eager"),
    "recompute, compiled": recompute(compiled(scan, backend="aot_eager")),
}


def _local(tree, model, mesh):
    return {k: t[rules.part(model[k], mesh.sizes, Rules(), rules.place_of(mesh))] for k, t in tree.items()}


def _shards(tp, ranks, image):
    """The mesh, config and local tree of this rank."""
    mesh = mesh_of(ranks=ranks, tp=tp) if ranks is not None or tp == 4 else mesh_of(dp_replicate=4 // tp, tp=tp)
    if mesh is None:
        return None
    cfg = _config(image)
    return mesh, cfg, _local(random_params(cfg, 0, F64), wan.param_specs(cfg), mesh)


def _on_ranks(tp, ranks, image, how):
    if (here := _shards(tp, ranks, image)) is None:
        return None
    mesh, cfg, leaves = here
    torch._dynamo.reset()
    return mesh.coordinate("tp"), *_gradients(cfg, leaves, Run(scan=SCANS[how], tp=tensor_parallel(mesh)))


def _collectives(image, how):
    """Counts of the forward and of the backward pass."""
    mesh, cfg, leaves = _shards(4, None, image)
    leaves = {k: p.requires_grad_() for k, p in leaves.items()}
    with Counted() as forward:
        _, loss = _loss(cfg, leaves, Run(scan=SCANS[how], tp=tensor_parallel(mesh)))
    with Counted() as backward:
        loss.backward()
    return forward.counts, backward.counts


CASES = [
    (2, None, True, "plain"), (4, None, False, "plain"), (4, None, True, "recompute"),
    (2, (1, 2), True, "recompute, compiled"), (2, (1, 2), False, "compiled"),
]  # fmt: skip


@pytest.mark.parametrize("tp, ranks, image, how", CASES)
def test_forward_and_every_gradient_equal_the_single_process(pool, tp, ranks, image, how):
    cfg = _config(image)
    model, sizes = wan.param_specs(cfg), infer_sizes(tp, {"tp": tp})
    want, want_grads = _gradients(cfg, random_params(cfg, 0, F64), Run())
    ranks_out = [out for out in pool.run(_on_ranks, tp, ranks, image, how) if out is not None]
    whole = {}
    for at, got, grads in ranks_out:
        torch.testing.assert_close(got, want, **EXACT)
        for key, grad in grads.items():
            cut = want_grads[key][rules.part(model[key], sizes, Rules(), {"tp": at})]
            torch.testing.assert_close(grad, cut, **EXACT, msg=lambda m, key=key: f"{key}: {m}")
            if not rules.cut_dims(model[key], Rules()):
                # Norms, modulation tables, row-parallel biases, everything outside the blocks: not only close.
                assert torch.equal(whole.setdefault(key, grad), grad), f"{key} differs between ranks"
    assert {"blocks.0.scale_shift_table", "blocks.1.norm2.weight", "blocks.2.ffn.net.2.bias"} <= set(whole)
    assert not any("to_q" in k or "norm_k" in k for k in whole)


@pytest.mark.parametrize("image", [False, True])
def test_all_reduces_of_a_block(pool, image):
    """Self-attention: a sum and two norms, forward and backward. Cross-attention: the same, and the gradient of the
    text; an image adds a norm both ways and its gradient. MLP: one sum each way."""
    ahead, back = (7, 8) if not image else (8, 10)
    for how, again in {"plain": 0, "recompute": ahead}.items():
        for forward, backward in pool.run(_collectives, image, how):
            assert forward == {"all_reduce": LAYERS * ahead}
            assert backward == {"all_reduce": LAYERS * (back + again)}


# --- packed projections -------------------------------------------------------------------------------------------


def _packed(tp):
    """On one rank: gradients of the split and of the packed local tree, and leaves that are not back when unpacked."""
    mesh, cfg, split = _shards(tp, None, False)
    model = {k: dataclasses.replace(s, dtype=F64) for k, s in wan.param_specs(cfg).items()}
    bound = wan.pack_projections()(rules.local_specs(model, mesh.sizes, Rules()))
    packed, run = apply(split, bound), Run(tp=tensor_parallel(mesh))
    assert packed["blocks.0.attn1.to_qkv.weight"].shape == (3 * cfg.dim // tp, cfg.dim)
    (out, grads), (again, packed_grads) = (_gradients(cfg, tree, run) for tree in (split, packed))
    torch.testing.assert_close(again, out, **EXACT)
    back = {k: rules.as_dtensor(t, model[k], mesh) for k, t in apply(packed, invert(bound)).items()}
    wrong = [k for k, leaf in random_params(cfg, 0, F64).items() if not torch.equal(back[k].full_tensor(), leaf)]
    return grads, apply(packed_grads, invert(bound)), wrong


def test_packing_runs_on_local_shards_and_keys_and_shapes_stay_global(pool):
    for split, packed, wrong in pool.run(_packed, 4):
        assert wrong == [], "unpacked shards are those of the global leaves, under the keys of the checkpoint"
        for key in split:
            torch.testing.assert_close(packed[key], split[key], **EXACT)


# --- refusals, and a mesh without tp ------------------------------------------------------------------------------


def test_heads_are_never_cut():
    with pytest.raises(UserError) as caught:
        check_heads(8, {"num_attention_heads": 12, "kv_heads": 4})
    said = str(caught.value)
    assert "num_attention_heads 12 is not divisible by tp 8" in said and "kv_heads 4 is not divisible" in said
    assert "tp can be 1, 2, 4" in said
    # Its rows are divisible, which is why heads are checked apart.
    cfg = tiny_config(num_attention_heads=2, attention_head_dim=16)
    rules.check(wan.param_specs(cfg), infer_sizes(4, {"tp": 4}), Rules())
    with pytest.raises(UserError, match="num_attention_heads 2"):
        check_heads(4, {"num_attention_heads": cfg.num_attention_heads})
    check_heads(4, {"num_attention_heads": 40, "kv_heads": 8})


def test_without_tp_nothing_is_wrapped():
    assert tensor_parallel(single()) == TensorParallel()
    assert dataclasses.is_dataclass(GroupTensorParallel) and issubclass(GroupTensorParallel, TensorParallel)
