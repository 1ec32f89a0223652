import dataclasses
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from core.scan import recompute, scan
from core.specs import ParamSpec
from nn import ltx2_flops, wan
from nn.ltx2_config import PRESETS as LTX2_PRESETS
from nn.ltx2_config import LTX2Config
from parallel import costs, inventory, rules, traffic
from parallel.inventory import PRESETS, ltx2_model, wan_model
from parallel.job import Job
from parallel.mesh import build_mesh, infer_sizes
from parallel.rules import Rules
from parallel.units import ShardOptions, shard
from tests.parallel.traced import DEVICE, Traced, fake_inputs, fake_params, fused_norms, kept_bytes, run_of, step
from train.flops import forward_flops as flops_of_wan

pytest.importorskip("triton", reason="what the fused kernels keep is traced through their shape rules")

GRID = (4, 8, 8)
CFG = wan.WanConfig(
    num_attention_heads=8, attention_head_dim=64, ffn_dim=1280, num_layers=2, in_channels=4, out_channels=4, text_dim=8,
    freq_dim=16,
)  # fmt: skip
IMAGE = dataclasses.replace(CFG, image_dim=16, added_kv_proj_dim=CFG.dim)


def _sizes(**sizes):
    return infer_sizes(math.prod(sizes.values()), sizes)


def model_of(cfg):
    return ltx2_model("tiny", cfg) if isinstance(cfg, LTX2Config) else wan_model("tiny", cfg)


def _job(cfg=CFG, grid=GRID, **changes):
    sizes = _sizes(**{k: changes.pop(k) for k in list(changes) if k in ("dp_replicate", "dp_shard", "sp", "tp")})
    others = {"text": 32, "image": 16, "audio": 32, "video_text": 16, "audio_text": 16}
    lengths = {"video": grid[0] * grid[1] * grid[2], **others}
    return Job(sizes, {k: n for k, n in lengths.items() if k in model_of(cfg).widths}, **changes)


# --- inventories and arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", inventory.LTX2)
def test_arithmetic_of_ltx2_is_that_of_its_own_count(name):
    model, cfg = PRESETS[name](), LTX2_PRESETS[name.removesuffix("-video")]
    if name.endswith("-video"):
        cfg = dataclasses.replace(cfg, modality="video")
    tokens, text = {"video": 4290, "audio": 84}, {"video": 1024, "audio": 1024}
    lengths = {"video": 4290, **model.lengths}
    inside, every = (inventory.forward_flops(model, lengths, layers_only=only) for only in (True, False))
    assert inside == ltx2_flops.block_flops(cfg, tokens, text)
    assert every - inside == ltx2_flops.root_flops(cfg, tokens, text)[0]


@pytest.mark.parametrize("name", wan.PRESETS)
def test_arithmetic_of_wan_is_that_of_the_trainer_and_of_a_count_by_hand(name):
    model, cfg = PRESETS[name](), wan.PRESETS[name]
    ours = inventory.forward_flops(model, {"video": 32760, **model.lengths})
    image = model.lengths.get("image", 0)
    assert flops_of_wan(cfg, 32760, 512, image) == ours
    d, n, context = cfg.dim, 32760, 512 + image
    products = n * d * d * (4 + 2) + 2 * context * d * d + 2 * n * d * cfg.ffn_dim
    attention = 2 * n * n * d + 2 * n * context * d
    ends = n * d * math.prod(cfg.patch_size) * (cfg.in_channels + cfg.out_channels) + 512 * d * (cfg.text_dim + d)
    by_hand = 2 * (cfg.num_layers * (products + attention) + ends)
    # It leaves out the embedders of timesteps and pictures.
    assert by_hand <= ours <= by_hand * 1.00001


def test_ranks_share_the_arithmetic_of_a_sample():
    model = PRESETS["wan2.1-t2v-1.3b"]()
    of = lambda text=512, recompute=0, **axes: traffic.step_flops(  # noqa: E731
        model, Job(_sizes(**axes), {"video": 32760, "text": text}, recompute=recompute)
    )
    assert of(dp_shard=8) == of() and of(recompute=1) == of() * 4 / 3
    # Every rank of `sp` projects the text for itself, and every rank of `tp` what lies outside the layers.
    assert of(sp=4) == pytest.approx(of() / 4, rel=0.02) and of(sp=4) > of() / 4
    assert of(tp=4) == pytest.approx(of() / 4, rel=0.01) and of(tp=4) > of() / 4
    assert of(sp=4, text=1) == pytest.approx(of(text=1) / 4, rel=1e-4)


# --- leaves -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3), st.lists(st.integers(1, 9), max_size=3),
    st.lists(st.sampled_from([None, "heads"]), min_size=3, max_size=3),
)  # fmt: skip
def test_bytes_are_those_of_the_rank_that_holds_most(numbers, shape, names):
    sizes = _sizes(**dict(zip(("dp_shard", "sp", "tp"), numbers, strict=True)))
    spec = ParamSpec(tuple(shape), axes=tuple(names[: len(shape)]))
    if rules.leaf_faults(spec, sizes, Rules()):
        return
    dims = rules.mesh_dims(sizes)
    places = [dict(zip(dims, at, strict=True)) for at in itertools.product(*map(range, dims.values()))]
    parts = [math.prod(s.stop - s.start for s in rules.part(spec, sizes, Rules(), at)) for at in places]
    job = Job(sizes, {})
    assert costs.shard_numel(spec, job) == max(parts)
    assert costs.gathered_numel(spec, job) >= math.prod(rules.local_shape(spec, sizes, Rules()))


def test_groups_hold_every_leaf_once():
    model = wan_model("tiny", dataclasses.replace(CFG, num_layers=5))
    for g, sizes in itertools.product((1, 2, 3, 9), (_sizes(), _sizes(dp_shard=4, tp=2))):
        job = Job(sizes, {}, options=ShardOptions(modules_per_group=g))
        found = costs.groups(model, job)
        assert sorted(k for group in found for k in group.keys) == sorted(model.specs)
        assert len(found) == 1 + -(-5 // g)
        stored = sum(costs.shard_numel(s, job) * 4 for s in model.specs.values())
        assert sum(group.stored for group in found) == stored


# --- memory against traces ------------------------------------------------------------------------------------------

TINY = {
    "num_attention_heads": 4, "attention_head_dim": 64, "cross_attention_dim": 256, "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 32, "audio_cross_attention_dim": 128, "num_layers": 1, "caption_channels": 48,
}  # fmt: skip
LTX2, LTX23 = (dataclasses.replace(LTX2_PRESETS[name], **TINY) for name in ("ltx-2-19b", "ltx-2.3-22b"))

KEPT = {
    "plain": (CFG, {}),
    "batch": (CFG, {"batch": 3}),
    "image": (IMAGE, {}),
    "timesteps per token": (CFG, {"token_timesteps": True}),
    "float32": (CFG, {"compute": torch.float32}),
    "tp": (CFG, {"tp": 4}),
    "tp, image": (IMAGE, {"tp": 2}),
    "sp": (CFG, {"sp": 4}),
    "sp, uneven": (CFG, {"sp": 8, "grid": (3, 3, 5)}),
    "sp and tp, image": (IMAGE, {"sp": 2, "tp": 2}),
    "ltx2": (LTX2, {"batch": 2}),
    "ltx2, video": (dataclasses.replace(LTX2, modality="video"), {"token_timesteps": True}),
    "ltx2, tp and sp": (LTX2, {"tp": 2, "sp": 2}),
    "ltx2.3": (LTX23, {}),
    "ltx2.3, tp": (LTX23, {"tp": 4}),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_what_the_formula_says_to_the_byte(name, monkeypatch):
    cfg, changes = KEPT[name]
    grid = changes.get("grid", GRID)
    job = _job(cfg, **changes)
    kept = []
    with fused_norms(monkeypatch):
        for layers in (1, 2):
            one = dataclasses.replace(cfg, num_layers=layers)
            kept.append(kept_bytes(model_of(one), one, job, grid, scan))
    found = kept[1] - kept[0]
    if name == "sp, uneven":  # what attention sees is without the padding
        assert 0.95 * costs.layer_activations(model_of(cfg), job) < found
    else:
        assert found == costs.layer_activations(model_of(cfg), job)


PEAKS = {
    "all kept": ({}, scan),
    "recompute": ({"recompute": 1}, recompute(scan)),
    "recompute 2": ({"recompute": 2}, recompute(scan, every=2)),
    "tp, recompute": ({"tp": 2, "recompute": 1}, recompute(scan)),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_step_without_fsdp(name, monkeypatch):
    """The largest Wan2.1 that one GPU trains, at full size, with fewer layers."""
    (changes, how), cfg = PEAKS[name], dataclasses.replace(wan.PRESETS["wan2.1-t2v-1.3b"], num_layers=4)
    grid = (21, 30, 52)
    job = _job(cfg, grid, **changes)
    model = wan_model("short", cfg)
    with fused_norms(monkeypatch), torch._subclasses.FakeTensorMode(), Traced() as trace:
        params = fake_params(model, job)
        inputs = fake_inputs(cfg, job, grid)
        plan = costs.memory(model, job)
        assert trace.now - sum(t.nbytes for t in inputs.values()) == plan.held["weights"]
        step(trace, lambda: wan.forward(params, cfg, inputs, run=run_of(job, how)))
    predicted = plan.held["weights"] + max(sum(plan.begin.values()), sum(plan.end.values()))
    # Left out: gradients of single operators, rotary tables, inputs.
    assert trace.peak == pytest.approx(predicted, rel=0.03)


FSDP, HSDP = {"dp_shard": 8}, {"dp_replicate": 2, "dp_shard": 4}
STEPS = {
    "fsdp": (FSDP, 1, ShardOptions()),
    "fsdp, whole gradients": (FSDP, 2, ShardOptions(modules_per_group=2)),
    "fsdp, gathered weights stay": (FSDP, 2, ShardOptions(reshard_after_forward=False, accumulate="sharded")),
    "hsdp, sharded gradients": (HSDP, 2, ShardOptions(accumulate="sharded", reduce_dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_fsdp(name, monkeypatch):
    """Memory and traffic of FSDP2 itself, as one of eight ranks that no other answers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    (layout, micro, options), cfg, grid = STEPS[name], dataclasses.replace(CFG, num_layers=3), (2, 4, 4)
    job = _job(cfg, grid, recompute=1, microbatches=micro, options=options, **layout)
    model = wan_model("tiny", cfg)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = build_mesh(layout, DEVICE)
        with fused_norms(monkeypatch), torch._subclasses.FakeTensorMode(), Traced() as trace:
            compute = {k: costs.compute_of(s, job) for k, s in model.specs.items()}
            sharded = shard(model.specs, mesh, stacks=model.stacks, compute=compute, options=options)
            inputs = fake_inputs(cfg, job, grid)
            before = trace.now
            for i in range(micro):
                sharded.microbatch(i == micro - 1)
                trace.peak = 0
                run = run_of(job, recompute(scan))
                step(trace, lambda run=run: sharded(lambda p: wan.forward(p, cfg, inputs, run=run)))
    finally:
        dist.destroy_process_group()
    plan = costs.memory(model, job)
    assert sum(p.to_local().nbytes for p in sharded.params.values()) == plan.held["weights"]
    predicted = max(sum(plan.begin.values()), sum(plan.end.values()))
    # Here a reduction ends before the next layer begins, so its buffer is not there at the peak.
    less = plan.begin["gradients of two groups"]
    assert 0.97 * (predicted - less) <= trace.peak - before <= 1.03 * predicted
    sent = {f.kind: (f.calls, f.payload) for f in traffic.traffic(model, job)}
    names = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}
    assert {names[k]: (trace.calls[k], trace.sent[k]) for k in trace.calls} == sent
