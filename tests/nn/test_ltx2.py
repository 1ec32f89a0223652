"""Laws of LTX-2's transformer: sizes, packing, timesteps, guidance masks, and every way to run its layers."""

import dataclasses
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_cases import configs, random_case, random_params, tiny_config

from core import specs
from core.rules import cast
from core.scan import compiled, recompute, scan
from core.transforms import apply, invert
from core.trees import num_params, stack
from kernels import Attention
from nn import ltx2
from nn.ltx2_config import PRESETS
from nn.ltx2_inputs import keep_masks, model_inputs
from nn.ltx2_specs import block_specs, pack_projections, param_specs
from nn.run import Run, TensorParallel, Tokens


def only(name: str, modality: str):
    return dataclasses.replace(PRESETS[name], modality=modality)


def inputs_of(cfg, seed=0, *, keep=None, dtype=None, **options):
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    return model_inputs(cfg, random_case(cfg, seed, dtype=drawn, **options).streams, keep=keep, dtype=dtype)


def outputs_and_gradients(cfg, params, inputs, run=Run(), loss=None):
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    out = ltx2.forward(leaves, cfg, inputs, run=run)
    sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum() for y in out.values()).backward()
    return {k: v.detach() for k, v in out.items()}, {k: v.grad for k, v in leaves.items()}


def same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        if a[name] is None or b[name] is None:
            assert a[name] is b[name] is None, name
        elif tolerance:
            torch.testing.assert_close(a[name], b[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)
        else:
            assert torch.equal(a[name], b[name]), name


# --- sizes --------------------------------------------------------------------------------------------------------


def test_published_sizes():
    """The whole 19B model, its video stream alone (split and packed), and the leaves that are kept in float32."""
    whole = param_specs(PRESETS["ltx-2-19b"])
    assert num_params(whole) == 18_876_174_592
    tables = {k: s for k, s in whole.items() if s.keep_fp32}
    assert (len(tables), num_params(tables)) == (194, 3_256_320)
    video = param_specs(only("ltx-2-19b", "video"))
    packed = pack_projections(only("ltx-2-19b", "video"))(video).specs
    assert (len(video), len(packed)) == (1215, 927)
    assert num_params(video) == num_params(packed) == 13_041_520_768
    assert num_params(block_specs(PRESETS["ltx-2-19b"])) == 386_074_624
    assert num_params(block_specs(PRESETS["ltx-2.3-22b"])) == 386_695_360
    parts = lambda name: sum(f".{name}." in k for k in packed)  # noqa: E731
    assert (parts("attn1.to_qkv"), parts("attn2.to_kv")) == (96, 96)
    assert not any(parts(f"{a}.{p}") for a, p in (("attn1", "to_q"), ("attn1", "to_v"), ("attn2", "to_k")))
    assert parts("attn2.to_q") == 96


@pytest.mark.parametrize("name", PRESETS)
def test_streams_alone_share_no_leaf_and_have_none_that_is_not_the_whole_models(name):
    whole, video, audio = (set(param_specs(only(name, m))) for m in ("audio_video", "video", "audio"))
    assert video | audio < whole and not video & audio
    between = whole - video - audio
    marks = ("audio_to_video", "video_to_audio", "a2v", "v2a", "av_cross")
    assert all(any(mark in k for mark in marks) for k in between)
    assert ("audio_caption_projection.linear_1.weight" in audio) == (name == "ltx-2-19b")


# --- layouts of the weights ---------------------------------------------------------------------------------------


@given(cfg=configs(), seed=st.integers(0, 10**6), modality=st.sampled_from(["audio_video", "video", "audio"]))
@settings(max_examples=6)
def test_packed_projections(cfg, seed, modality):
    """Same outputs and gradients (float64: sums in another order, 1e-10), and split again bit by bit."""
    cfg = dataclasses.replace(cfg, modality=modality)
    params = random_params(cfg, seed, torch.float64)
    bound = pack_projections(cfg)(specs.specs_of(params))
    packed = apply(params, bound)
    same(apply(packed, invert(bound)), params)
    inputs = inputs_of(cfg, seed, dtype=torch.float64)
    out, grads = outputs_and_gradients(cfg, params, inputs)
    packed_out, packed_grads = outputs_and_gradients(cfg, packed, inputs)
    same(packed_out, out, rtol=1e-10, atol=1e-12)
    zeros = {k: torch.zeros_like(packed[k]) if g is None else g for k, g in packed_grads.items()}
    split = apply(zeros, invert(bound))
    for name, grad in grads.items():
        wanted = torch.zeros_like(params[name]) if grad is None else grad
        torch.testing.assert_close(split[name], wanted, rtol=1e-9, atol=1e-10)


def test_bfloat16_weights_beside_float32_tables():
    cfg = tiny_config()
    params = random_params(cfg, 0)
    half = apply(params, cast(torch.bfloat16)(param_specs(cfg)))
    kept = {k for k, v in half.items() if v.dtype == torch.float32}
    assert kept == {k for k in half if k.endswith("scale_shift_table")}
    out = ltx2.forward(half, cfg, inputs_of(cfg, dtype=torch.bfloat16))
    whole = ltx2.forward(params, cfg, inputs_of(cfg))
    for name, y in out.items():
        assert y.dtype == torch.bfloat16 and (y - whole[name]).abs().max() / whole[name].abs().max() < 4e-2


# --- timesteps and positions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["2.0", "2.3"])
@pytest.mark.parametrize("dtype,tolerance,gradients", [(torch.float32, 1e-6, 2e-6), (torch.float64, 1e-12, 1e-12)])
def test_a_timestep_per_sample_or_per_token(family, dtype, tolerance, gradients):
    """[B, 1], and the same numbers as [B, N]: sums over tokens come in another order, a few ulp."""
    cfg = tiny_config(family=family)
    params, inputs = random_params(cfg, 0, dtype), inputs_of(cfg, dtype=dtype)
    streams = ("video", "audio")
    spread = {f"{n}_timestep": inputs[f"{n}_timestep"].expand(-1, inputs[n].shape[1]).contiguous() for n in streams}
    one, one_grads = outputs_and_gradients(cfg, params, inputs)
    many, many_grads = outputs_and_gradients(cfg, params, {**inputs, **spread})
    for name in one:
        assert (one[name] - many[name]).abs().max() < tolerance
    norm = lambda grads: torch.cat([g.flatten() for g in grads]).norm()  # noqa: E731
    apart = norm([one_grads[k] - many_grads[k] for k in one_grads])
    assert apart / norm(one_grads.values()) < gradients


def test_the_frame_rate_reaches_the_rotary_positions():
    cfg = tiny_config()
    params = random_params(cfg, 0)
    a, b = (ltx2.forward(params, cfg, inputs_of(cfg, fps=fps)) for fps in (24.0, 12.0))
    for name in a:  # audio sees it through its attention to video
        assert (a[name] - b[name]).abs().max() > 1e-4


def test_theta_comes_from_the_config():
    for modality in ("video", "audio"):
        a, b = (tiny_config(modality=modality, rope_theta=theta) for theta in (10000.0, 5000.0))
        params, inputs = random_params(a, 0), inputs_of(a, audio=6)
        one, other = ltx2.forward(params, a, inputs)[modality], ltx2.forward(params, b, inputs)[modality]
        assert (one - other).abs().max() > 1e-5


@given(seed=st.integers(0, 10**6), per_token=st.booleans())
@settings(max_examples=5)
def test_x0_from_the_velocity(seed, per_token):
    """`x - sigma v` of the true velocity is the clean latent, with each token's sigma, and float32 for bf16 latents."""
    cfg = tiny_config()
    inputs = inputs_of(cfg, seed, per_token=per_token, dtype=torch.float64)
    clean = {n: torch.rand_like(inputs[n]) for n in ("video", "audio")}
    noise = {n: torch.randn_like(inputs[n]) for n in clean}
    sigma = {n: inputs[f"{n}_timestep"][..., None] / 1000 for n in clean}
    noisy = {n: (1 - sigma[n]) * clean[n] + sigma[n] * noise[n] for n in clean}
    found = ltx2.clean_estimates(cfg, {**inputs, **noisy}, {n: noise[n] - clean[n] for n in clean})
    same(found, clean, rtol=0, atol=1e-12)
    half = {k: v.bfloat16() if k in clean else v for k, v in inputs.items()}
    assert ltx2.clean_estimates(cfg, half, {n: half[n] for n in clean})["video"].dtype == torch.float32


# --- guidance passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site,changed",
    [("self", ("video", "audio")), ("audio_self", ("video", "audio")), ("a2v", ("video",)), ("v2a", ("audio",))],
)
def test_each_row_skips_its_attention(site, changed):
    """Only in the samples that skip. In the last block a skip between streams changes one of them only."""
    cfg = tiny_config()
    params = random_params(cfg, 0)
    plain = ltx2.forward(params, cfg, inputs_of(cfg, batch=3))
    none = ltx2.forward(params, cfg, inputs_of(cfg, batch=3, keep=keep_masks(cfg, [{}] * 3)))
    same(none, plain)
    keep = keep_masks(cfg, [{}, {site: [1]}, {}])
    out = ltx2.forward(params, cfg, inputs_of(cfg, batch=3, keep=keep))
    for name, y in out.items():
        moved = (y - plain[name]).abs().amax((1, 2)) > 1e-5
        assert moved.tolist() == [False, name in changed, False], name


def test_a_skipped_stream_cannot_spread_nan():
    cfg = tiny_config()
    params, inputs = random_params(cfg, 0), inputs_of(cfg, keep=keep_masks(cfg, [{"a2v": None}] * 2))
    out = ltx2.forward(params, cfg, {**inputs, "audio": inputs["audio"] * torch.nan})
    assert out["video"].isfinite().all() and out["audio"].isnan().all()


def test_guidance_passes_share_one_graph():
    """Conditional, unconditional, spatio-temporal and single-modality passes: one compiled block."""
    cfg = tiny_config()
    params, graphs = random_params(cfg, 0), []

    def counting(graph, example):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    run = Run(scan=compiled(scan, backend=counting))
    passes = [[{}] * 2, [{"self": [1]}] * 2, [{"a2v": None, "v2a": None}, {}], [{"self": None, "audio_self": None}] * 2]
    with torch.no_grad():
        for skips in passes:
            inputs = inputs_of(cfg, keep=keep_masks(cfg, skips))
            same(ltx2.forward(params, cfg, inputs, run=run), ltx2.forward(params, cfg, inputs), rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1


# --- how layers run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family,modality", [("2.3", "audio_video"), ("2.0", "video"), ("2.3", "audio")])
def test_recompute_repeats_to_the_bit(family, modality):
    cfg = tiny_config(family=family, modality=modality, num_layers=3)
    params = random_params(cfg, 0)
    keep = keep_masks(cfg, [{"self": [0]}, {}])
    inputs = inputs_of(cfg, keep=keep, masks=True, strengths=modality != "audio")
    out, grads = outputs_and_gradients(cfg, params, inputs)
    for every in (1, 2):
        again, again_grads = outputs_and_gradients(cfg, params, inputs, Run(scan=recompute(scan, every=every)))
        same(again, out)
        same(again_grads, grads)


def test_compiled_blocks_give_equal_gradients():
    """aot_eager decomposes some operations, so a few ulp; with recomputation around it as without."""
    cfg = tiny_config()
    params, inputs = random_params(cfg, 0), inputs_of(cfg, masks=True)
    out, grads = outputs_and_gradients(cfg, params, inputs)
    torch._dynamo.reset()
    fast = compiled(scan, backend="aot_eager")
    for layers in (fast, recompute(fast)):
        quick, quick_grads = outputs_and_gradients(cfg, params, inputs, Run(scan=layers))
        same(quick, out, rtol=1e-5, atol=1e-6)
        same(quick_grads, grads, rtol=1e-4, atol=1e-5)


def test_func_grad_is_autograd():
    cfg = tiny_config(num_layers=1)
    params, inputs = random_params(cfg, 0), inputs_of(cfg)

    def loss(p):
        return sum(y.square().sum() for y in ltx2.forward(p, cfg, inputs).values())

    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    loss(leaves).backward()
    same(torch.func.grad(loss)(params), {k: v.grad for k, v in leaves.items()}, rtol=1e-6, atol=1e-7)


@dataclasses.dataclass(frozen=True)
class Backwards(Tokens):
    """Tokens in reverse order: what a layout does to one stream must be undone, and reach everything with tokens."""

    def split(self, t, dim):
        return t if t.shape[dim] == 1 else t.flip(dim)

    def merge(self, t, dim, length):
        assert t.shape[dim] == length
        return t.flip(dim)


@dataclasses.dataclass(frozen=True)
class Seeing:
    """Attention for streams in reverse order; masks count tokens in their first order."""

    tokens: Backwards = Backwards()
    inner: Attention = Attention()

    def __call__(self, q, k, v, *, site, bias=None, **options):
        return self.inner(q, k, v, site=site, bias=bias if bias is None else bias.flip(-1, -2), **options)


@given(cfg=configs(), seed=st.integers(0, 10**6), per_token=st.booleans(), strengths=st.booleans())
@settings(max_examples=6)
def test_video_tokens_go_through_the_layout(cfg, seed, per_token, strengths):
    params, inputs = random_params(cfg, seed), inputs_of(cfg, seed, per_token=per_token, strengths=strengths)
    run = Run(attention=Seeing(), tokens=Backwards())
    same(ltx2.forward(params, cfg, inputs, run=run), ltx2.forward(params, cfg, inputs), rtol=1e-4, atol=1e-5)


# --- tensor parallelism, simulated by threads in lockstep ---------------------------------------------------------


class Ranks:
    """Sums over threads that stand for ranks; each thread's calls come in the same order."""

    def __init__(self, size):
        self.size, self.barrier, self.parts = size, threading.Barrier(size), [None] * size

    def total(self, rank, x):
        self.parts[rank] = x
        self.barrier.wait()
        out = sum(self.parts[1:], self.parts[0])
        self.barrier.wait()
        return out


class Summed(torch.autograd.Function):
    """Sum forward and identity backward, or the other way round."""

    @staticmethod
    def forward(ctx, x, ranks, rank, forward):
        ctx.args = ranks, rank, forward
        return ranks.total(rank, x) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ranks, rank, forward = ctx.args
        return (grad if forward else ranks.total(rank, grad)), None, None, None


@dataclasses.dataclass(frozen=True)
class Group:
    ranks: Ranks
    size: int
    rank: int


@dataclasses.dataclass(frozen=True)
class Threaded(TensorParallel):
    group: Group

    def copy(self, x):
        return Summed.apply(x, self.group.ranks, self.group.rank, False)

    def reduce(self, x):
        return Summed.apply(x, self.group.ranks, self.group.rank, True)

    def mean_square(self, x):
        return self.copy(self.reduce(x.square().mean(-1, keepdim=True) / self.group.size))


def shard(tree, model, rank, size):
    """The part of each leaf that one rank holds: rows or columns of heads and of the MLP's width."""
    out = {}
    for key, leaf in tree.items():
        cut = [d for d, axis in enumerate(model[key].axes or ()) if axis in ("heads", "mlp")]
        out[key] = leaf.chunk(size, cut[0])[rank].contiguous() if cut else leaf
    return out


@pytest.mark.parametrize("rope_type", ["split", "interleaved"])
def test_tensor_parallel_blocks_see_their_heads(rope_type):
    """Two ranks in lockstep: outputs and gradients of every local shard are the single-process ones (float64)."""
    cfg = tiny_config(rope_type=rope_type, num_attention_heads=4, cross_attention_dim=32, audio_num_attention_heads=4,
                      audio_cross_attention_dim=24, num_layers=1, ff_bias=False)  # fmt: skip
    model, params = param_specs(cfg), random_params(cfg, 0, torch.float64)
    inputs = inputs_of(cfg, dtype=torch.float64, masks=True)
    out, grads = outputs_and_gradients(cfg, params, inputs)
    ranks, found = Ranks(2), [None, None]

    def work(rank):
        try:
            run = Run(tp=Threaded(Group(ranks, 2, rank)))
            found[rank] = outputs_and_gradients(cfg, shard(params, model, rank, 2), inputs, run)
        except Exception as error:
            ranks.barrier.abort()
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, result in enumerate(found):
        assert not isinstance(result, Exception), result
        same(result[0], out, rtol=1e-11, atol=1e-12)
        wanted = shard(grads, model, rank, 2)
        same(result[1], wanted, rtol=1e-9, atol=1e-11)


def test_block_keys_are_the_stacks():
    cfg = tiny_config()
    layers = stack(random_params(cfg, 0), ltx2.STACKS[0])
    assert len(layers) == 2 and list(layers[0]) == list(block_specs(cfg))
