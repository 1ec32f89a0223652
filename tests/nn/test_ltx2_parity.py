"""LTX-2 against Diffusers' transformer: outputs and every gradient over all flags, and full configs key by key."""

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_cases import configs, diffusers_model, random_case, random_params, tiny_config

from core import specs
from nn import ltx2, ltx2_rope
from nn.ltx2_config import PRESETS, LTX2Config
from nn.ltx2_formats import to_json
from nn.ltx2_inputs import keep_masks, model_inputs
from nn.ltx2_specs import param_specs

# Float32 on both sides with sums of up to ~50 terms in another order: a few ulp (1.2e-7) per operation through
# two blocks leaves some 1e-6; 2e-5 of the largest entry is ten times that. In float64 Diffusers still turns queries and
# keys in float32 (some 1e-7 of their gradients); its norms, in float32 too, are replaced (see `exact`).
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-6}


def close(ours, theirs, what, dtype, floor=1e-3):
    error = (ours - theirs).abs().max().item() / max(theirs.abs().max().item(), floor)
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


@contextlib.contextmanager
def exact(model):
    """Diffusers' own RMS norms reduce in float32 whatever the dtype; in float64 they get PyTorch's in their place."""
    from diffusers.models.normalization import RMSNorm

    for module in model.modules():
        if isinstance(module, RMSNorm):
            width, weight, eps = module.dim, module.weight, module.eps
            module.forward = lambda x, w=width, g=weight, e=eps: torch.nn.functional.rms_norm(x, w, g, e)
    yield model


def compare(cfg, case, *, keep=None, dtype=torch.float32, seed=0, **theirs):
    """Outputs of the streams that `cfg` has, and gradients of all parameters, latents and texts."""
    params = random_params(cfg, seed, dtype)
    model = diffusers_model(cfg, params, dtype)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    inputs = model_inputs(cfg, case.streams, keep=keep)
    ours_in = {k: v.clone().requires_grad_() for k, v in inputs.items() if k in ("video", "audio") or "_text" == k[5:]}
    kwargs = {**case.theirs, **theirs}
    names = {"video": "hidden_states", "audio": "audio_hidden_states", "video_text": "encoder_hidden_states"}
    names["audio_text"] = "audio_encoder_hidden_states"
    theirs_in = {k: kwargs[names[k]].clone().requires_grad_() for k in ours_in}
    ours = ltx2.forward(leaves, cfg, {**inputs, **ours_in})
    with exact(model) if dtype == torch.float64 else contextlib.nullcontext():
        out = model(**{**kwargs, **{names[k]: v for k, v in theirs_in.items()}})
    found = dict(zip(("video", "audio"), out, strict=True))
    loss, reference = 0, 0
    for name, y in ours.items():
        close(y.detach(), found[name].detach(), f"{name} output", dtype)
        weight = torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape)
        loss, reference = loss + (y * weight).sum(), reference + (found[name] * weight).sum()
    loss.backward()
    reference.backward()
    zero = torch.zeros(())
    grads = {k: zero if v.grad is None else v.grad for k, v in model.named_parameters()}
    # Each gradient against its own size; below a hundredth of the largest one cancellation rules.
    floor = 1e-2 * max(grads[k].abs().max().item() for k in leaves)
    for name, leaf in leaves.items():
        mine = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        close(mine, grads[name], f"gradient of {name}", dtype, floor)
    for name, value in ours_in.items():
        other = theirs_in[name].grad
        close(value.grad, torch.zeros_like(value) if other is None else other, f"gradient of {name}", dtype, floor)


@given(
    cfg=configs(), seed=st.integers(0, 10**6), grid=st.tuples(*[st.integers(1, 3)] * 3), per_token=st.booleans(),
    masks=st.booleans(), strengths=st.booleans(), batch=st.integers(1, 3), audio=st.integers(1, 6),
)  # fmt: skip
def test_outputs_and_gradients(cfg, seed, grid, per_token, masks, strengths, batch, audio):
    case = random_case(
        cfg, seed, batch=batch, grid=grid, audio=audio, per_token=per_token, masks=masks, strengths=strengths, fps=17.5
    )
    compare(cfg, case, seed=seed)


@pytest.mark.parametrize("family", ["2.0", "2.3"])
@pytest.mark.parametrize("rope_type", ["split", "interleaved"])
def test_float64(family, rope_type):
    cfg = tiny_config(family=family, rope_type=rope_type)
    case = random_case(cfg, 1, per_token=True, masks=True, strengths=True, dtype=torch.float64)
    compare(cfg, case, dtype=torch.float64)


@pytest.mark.parametrize("family", ["2.0", "2.3"])
def test_bfloat16(family):
    """8 bits of mantissa, 4e-3 per rounding, some ten roundings deep."""
    cfg = tiny_config(family=family)
    params = random_params(cfg, 0)
    case = random_case(cfg, 1)
    model = diffusers_model(cfg, params).to(torch.bfloat16)
    half = lambda v: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v  # noqa: E731
    theirs = model(**{k: v if "sigma" in k or "timestep" in k else half(v) for k, v in case.theirs.items()})
    ours = ltx2.forward(params, cfg, model_inputs(cfg, case.streams, dtype=torch.bfloat16))
    for mine, other in zip(ours.values(), theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - other).abs().max() / other.abs().max() < 4e-2


@given(cfg=configs(), seed=st.integers(0, 10**6), batch=st.integers(1, 3))
@settings(max_examples=8)
def test_spatio_temporal_guidance(cfg, seed, batch):
    """Self-attention of chosen samples in chosen blocks gives their values; both streams at once, as Diffusers can."""
    cfg = dataclasses.replace(cfg, perturbed_attn=True)
    blocks = [b for b in range(cfg.num_layers) if (seed >> b) % 2 == 0]
    skipped = [(seed >> (4 + i)) % 2 == 0 for i in range(batch)]
    keep = keep_masks(cfg, [{"self": blocks, "audio_self": blocks} if skip else {} for skip in skipped])
    mask = torch.tensor([0.0 if skip else 1.0 for skip in skipped])
    compare(
        cfg, random_case(cfg, seed, batch=batch), keep=keep, seed=seed, spatio_temporal_guidance_blocks=blocks,
        perturbation_mask=mask,
    )  # fmt: skip


@given(cfg=configs(), seed=st.integers(0, 10**6))
@settings(max_examples=6)
def test_isolated_modalities(cfg, seed):
    keep = keep_masks(cfg, [{"a2v": None, "v2a": None}] * 2)
    compare(cfg, random_case(cfg, seed), keep=keep, seed=seed, isolate_modalities=True)


@given(cfg=configs(), seed=st.integers(0, 10**6), modality=st.sampled_from(["video", "audio"]), per_token=st.booleans())
@settings(max_examples=12)
def test_one_stream_alone(cfg, seed, modality, per_token):
    """A build of one stream is the whole model whose streams do not see each other."""
    cfg = dataclasses.replace(cfg, modality=modality)
    case = random_case(cfg, seed, per_token=per_token, masks=True, strengths=True)
    compare(cfg, case, seed=seed, isolate_modalities=True)


@given(cfg=configs(), grid=st.tuples(*[st.integers(1, 4)] * 3), fps=st.floats(1, 120), audio=st.integers(1, 9))
def test_positions_and_tables_bit_by_bit(cfg, grid, fps, audio):
    model = diffusers_model(cfg)
    cpu = torch.device("cpu")
    video, sound = ltx2_rope.video_positions(cfg, grid, fps), ltx2_rope.audio_positions(cfg, audio)
    assert torch.equal(video, model.rope.prepare_video_coords(1, *grid, cpu, fps=fps))
    assert torch.equal(sound, model.audio_rope.prepare_audio_coords(1, audio, cpu))
    assert torch.equal(
        ltx2_rope.audio_positions(cfg, audio, shift=3), model.audio_rope.prepare_audio_coords(1, audio, cpu, shift=3)
    )
    pairs = [
        (ltx2_rope.self_rope(cfg, cfg.stream("video"), video), model.rope(video)),
        (ltx2_rope.self_rope(cfg, cfg.stream("audio"), sound), model.audio_rope(sound)),
        (ltx2_rope.cross_rope(cfg, video), model.cross_attn_rope(video[:, :1])),
        (ltx2_rope.cross_rope(cfg, sound), model.cross_attn_audio_rope(sound)),
    ]
    for ours, theirs in pairs:
        for mine, other in zip(ours, theirs, strict=True):
            if cfg.rope_type == "split":
                other = other.transpose(1, 2)
            else:
                other = other[..., ::2].reshape(mine.shape)
            assert torch.equal(mine, other)


@given(batch=st.integers(1, 3), seed=st.integers(0, 100))
@settings(max_examples=5)
def test_a_rate_per_sample(batch, seed):
    cfg = tiny_config()
    fps = 10 + 5 * torch.arange(batch) + seed
    whole = ltx2_rope.video_positions(cfg, (2, 1, 2), fps)
    rows = [ltx2_rope.video_positions(cfg, (2, 1, 2), float(f)) for f in fps]
    assert torch.equal(whole, torch.cat(rows))


@pytest.mark.parametrize("name", PRESETS)
def test_full_configs_key_by_key(name):
    """Every key and shape of the public models, without allocating them."""
    theirs = dict(diffusers_model(PRESETS[name], device="meta").state_dict())
    specs.check(theirs, param_specs(PRESETS[name]))


def test_defaults_are_diffusers():
    from diffusers import LTX2VideoTransformer3DModel

    with torch.device("meta"):
        theirs = dict(LTX2VideoTransformer3DModel(num_layers=1).config)
    ours = dataclasses.asdict(LTX2Config(num_layers=1))
    assert {k for k in theirs if not k.startswith("_")} == {k for k in to_json(LTX2Config()) if k != "_class_name"}
    assert {k: v for k, v in ours.items() if k not in ("modality", "use_cross_timestep")} == {
        k: v for k, v in theirs.items() if k in ours
    }
