"""Whole models under sequence parallelism: Wan, and a toy with a second stream that all processes hold."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from core.scan import compiled, recompute, scan
from kernels import Attention, BlockCausal, QatAttention, plan_attention
from nn import wan
from nn.layers import linear, split_heads
from nn.run import Run
from nn.wan_inputs import model_inputs
from parallel import collectives
from parallel.sequence import sequence_parallel
from tests.nn.wan_cases import random_inputs, random_params, tiny_config
from tests.parallel.pool import mesh_of
from tests.parallel.sequence_cases import (
    EXACT,
    BlockCausalAttention,
    Counted,
    difference,
    differences,
    drawn,
    gradients,
    sp_mesh,
)

SCANS = {
    "plain": lambda: scan,
    "recompute": lambda: recompute(scan, every=2),
    "compiled": lambda: recompute(compiled(scan, backend="aot_eager"), every=2),
}


def _config(image: bool = False, heads: int = 12, head_dim: int = 6, **changes):
    more = {"image_dim": 6, "added_kv_proj_dim": heads * head_dim, "in_channels": 6} if image else {}
    return tiny_config(num_attention_heads=heads, attention_head_dim=head_dim, num_layers=3, **more, **changes)


def _inputs(cfg, grid, seed, *, per_token=False, masked=False, dtype=torch.float64):
    image_len = 3 if cfg.image_dim is not None else 0
    noisy, timestep, conditions = random_inputs(cfg, seed, grid=grid, image_len=image_len, dtype=dtype)
    if per_token:
        timestep = drawn(seed, t=(2, math.prod(grid)))["t"].abs() * 300
    if masked:
        conditions["text_mask"] = torch.arange(10).reshape(2, 5) % 5 < 3
    return model_inputs(cfg, noisy, timestep, conditions)


def _wan(sp, grid, seed, per_token, masked, image, how, attention):
    """Differences of loss and parameter gradients to one process without any wrapper around `scan`."""
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    cfg = _config(image)
    params = random_params(cfg, seed, torch.float64)
    inputs = _inputs(cfg, grid, seed, per_token=per_token, masked=masked)
    loss_of = lambda run: lambda p: wan.forward(p, cfg, inputs, run=run).square().sum()  # noqa: E731
    plain = gradients(loss_of(Run(attention=attention)), params)
    run = sequence_parallel(Run(attention=attention, scan=SCANS[how]()), mesh, math.prod(grid))
    loss, found = gradients(loss_of(run), params, mesh)
    return difference(loss, plain[0]), differences(found, plain[1])


def _agree(results, tolerance=EXACT):
    results = [r for r in results if r is not None]
    assert results
    for loss, grads in results:
        worst = max(grads, key=grads.get)
        assert loss < tolerance and grads[worst] < tolerance, (loss, worst, grads[worst])


@given(
    sp=st.sampled_from([2, 3, 4]), grid=st.tuples(*[st.integers(1, 3)] * 3), seed=st.integers(0, 99),
    per_token=st.booleans(), masked=st.booleans(), image=st.booleans(), how=st.sampled_from(["plain", "recompute"]),
)  # fmt: skip
@example(sp=4, grid=(1, 1, 1), seed=0, per_token=True, masked=False, image=False, how="plain")
@example(sp=4, grid=(1, 3, 3), seed=0, per_token=True, masked=True, image=True, how="recompute")
def test_wan_equals_one_process(pool, sp, grid, seed, per_token, masked, image, how):
    """Loss and every gradient, whatever the grid: nothing need be divisible, and some processes may hold padding only.
    """
    _agree(pool.run(_wan, sp, grid, seed, per_token, masked, image, how, Attention("reference")))


def test_wan_compiled(pool):
    """Another length, without padding, may make another graph, and that is right too."""
    for grid in ((1, 3, 3), (1, 5, 2)):
        _agree(pool.run(_wan, 2, grid, 1, True, True, False, "compiled", Attention("sdpa"), timeout=240))


@pytest.mark.parametrize("how", ["plain", "recompute"])
def test_wan_with_block_causal_attention(pool, how):
    mask = BlockCausal(3, 3, 1, local_attn_size=2, sink_size=1)
    planned = plan_attention(mask, head_dim=6, dtype=torch.float64, device="cpu", backend="reference")
    _agree(pool.run(_wan, 4, (3, 1, 3), 2, False, False, False, how, BlockCausalAttention(planned)))


def _inference(sp, grid, inner):
    """bfloat16 output against float64 and against bfloat16 of one process, and the collectives of one block."""
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    cfg = _config(heads=4, head_dim=16)
    params, inputs = random_params(cfg, 3), _inputs(cfg, grid, 3, dtype=torch.float32)
    half = {k: x.bfloat16() if k != "timestep" else x for k, x in inputs.items()}
    run = sequence_parallel(Run(attention=inner), mesh, math.prod(grid))
    with torch.no_grad():
        single = wan.forward(params, cfg, half, run=Run(attention=inner))
        with Counted() as seen:
            out = wan.forward(params, cfg, half, run=run)
    relative = ((out - single).float().norm() / single.float().norm()).item()
    return out, relative, dict(seen.counts), cfg.num_layers


@pytest.mark.parametrize("inner", [Attention(), QatAttention(backend="reference")])
def test_inference_in_bfloat16(pool, inner):
    """All processes return the same whole output; per block two exchanges, one gather per call.

    Matrix products over other numbers of rows may round differently: 2e-2 is five roundings of bfloat16 (2^-8).
    """
    results = [r for r in pool.run(_inference, 2, (3, 1, 3), inner) if r is not None]
    for out, relative, counts, layers in results:
        assert out.dtype == torch.bfloat16 and torch.equal(out, results[0][0])
        assert relative < 2e-2
        assert counts == {"all_to_all_single": 2 * layers, "all_gather_into_tensor": 1}


def _two_axes(grid):
    """dp_shard 2 x sp 2: every data-parallel process has its own sample; gradients are averaged over all four."""
    mesh = mesh_of(dp_shard=2, sp=2)
    cfg = _config(heads=2)
    params = random_params(cfg, 4, torch.float64)
    samples = [_inputs(cfg, grid, seed) for seed in (5, 6)]
    run = sequence_parallel(Run(), mesh, math.prod(grid))
    loss_of = lambda p, inputs, run: wan.forward(p, cfg, inputs, run=run).square().mean()  # noqa: E731
    _, plain = gradients(lambda p: sum(loss_of(p, s, Run()) for s in samples) / 2, params)
    _, found = gradients(lambda p: loss_of(p, samples[mesh.coordinate("dp_shard")], run), params)
    group = collectives.as_group(mesh.group("dp_shard", "sp"))
    return differences({k: collectives.all_sum(g, group) / 4 for k, g in found.items()}, plain)


def test_gradients_are_averaged_over_data_and_sequence_alike(pool):
    for grads in pool.run(_two_axes, (3, 1, 3)):
        assert max(grads.values()) < EXACT


# --- two streams ------------------------------------------------------------------------------------------------------

HEADS, HEAD_DIM = 4, 6
WIDTH = HEADS * HEAD_DIM
# site -> (stream of the queries, stream of the keys); the text is held by all processes.
SITES = {
    "self": ("video", "video"),
    "cross_text": ("video", "text"),
    "audio_self": ("audio", "audio"),
    "audio_text": ("audio", "text"),
    "a2v": ("video", "audio"),
    "v2a": ("audio", "video"),
}


def _two_stream_params(layers: int):
    shapes = {}
    for i in range(layers):
        for site in SITES:
            shapes |= {f"{i}.{site}.{part}.weight": (WIDTH, WIDTH) for part in ("q", "k", "v", "out")}
            shapes[f"{i}.{site}.out.bias"] = (WIDTH,)
        for stream in ("video", "audio"):
            shapes[f"{i}.{stream}.weight"], shapes[f"{i}.{stream}.bias"] = (WIDTH, WIDTH), (WIDTH,)
    shapes["text.weight"] = (WIDTH, WIDTH)
    return {k: x * 0.4 * WIDTH**-0.5 for k, x in drawn(11, **shapes).items()}


def _two_streams(p, layers: int, video, audio, text, lens, run: Run):
    """Toy of a video model with audio: per block every site in turn, then an MLP per stream."""
    state = {"video": run.tokens.split(video, 1), "audio": audio, "text": linear(p, "text", text)}
    for i in range(layers):
        for site, (to, source) in SITES.items():
            q, k, v = (
                split_heads(linear(p, f"{i}.{site}.{part}", state[s]), HEAD_DIM)
                for part, s in (("q", to), ("k", source), ("v", source))
            )
            out = run.attention(q, k, v, site=site, lens=lens if source == "video" else None).flatten(2)
            state[to] = state[to] + linear(p, f"{i}.{site}.out", out)
        for stream in ("video", "audio"):
            state[stream] = state[stream] + torch.tanh(linear(p, f"{i}.{stream}", state[stream]))
    return run.tokens.merge(state["video"], 1, video.shape[1]), state["audio"]


def _two_stream_case(sp, length, how):
    mesh = sp_mesh(sp)
    if mesh is None:
        return None
    layers = 1 if how == "compiled" else 2  # one is enough to compile every site
    params = _two_stream_params(layers)
    x = drawn(12, video=(2, length, WIDTH), audio=(2, 5, WIDTH), text=(2, 3, WIDTH))
    targets = drawn(13, video=(2, length, WIDTH), audio=(2, 5, WIDTH))
    lens = torch.tensor([length, max(1, length - 2)])

    def loss_of(run):
        model = _two_streams
        if how == "compiled" and run.tokens != Run().tokens:
            model = torch.compile(_two_streams, fullgraph=True, backend="aot_eager")

        def loss(p):
            video, audio = model(p, layers, x["video"], x["audio"], x["text"], lens, run)
            return (video - targets["video"]).square().mean() + (audio - targets["audio"]).square().mean()

        return loss

    run = sequence_parallel(Run(attention=Attention("reference")), mesh, length)
    plain = gradients(loss_of(Run(attention=Attention("reference"))), params)
    loss, found = gradients(loss_of(run), params, mesh)
    with torch.no_grad():
        _, audio = _two_streams(params, layers, x["video"], x["audio"], x["text"], lens, run)
    return audio, difference(loss, plain[0]), found, plain[1]


@pytest.mark.parametrize(
    "sp, length, how", [(2, 8, "plain"), (2, 7, "plain"), (4, 9, "plain"), (4, 2, "plain"), (2, 7, "compiled")]
)
def test_two_streams_equal_one_process(pool, sp, length, how):
    """Audio is bit-identical on all processes; every gradient, averaged over the group, is the single process's."""
    results = [r for r in pool.run(_two_stream_case, sp, length, how, timeout=240) if r is not None]
    for audio, loss, found, plain in results:
        assert torch.equal(audio, results[0][0])
        assert loss < EXACT
        for name, grad in plain.items():
            # Where all four stages of a gradient are small it is below the rounding of what it was summed from.
            assert torch.allclose(found[name], grad, rtol=EXACT, atol=EXACT * grad.abs().max().item() + 1e-18), name
            ratio = (found[name] * grad).sum() / grad.square().sum()
            assert abs(ratio.item() - 1) < EXACT, (name, ratio)
