"""LTX-2's input builder: tokens, flow matching, masks, and every misfit in one message."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_cases import configs, random_case, random_params, tiny_config

from core.errors import UserError
from nn import ltx2, ltx2_inputs
from nn.ltx2_config import PRESETS, LTX2Config
from nn.ltx2_inputs import StreamInputs, extend_strengths, keep_masks, model_inputs, noised, strength_bias, timestep_of
from nn.ltx2_rope import video_positions
from nn.wan_inputs import velocity_target


def faults(error) -> list[str]:
    return str(error.value).split("\n  - ")[1:]


# --- config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes,fault",
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"attention_head_dim": 7, "cross_attention_dim": 14}, "attention_head_dim must be even, got 7"),
        ({"cross_attention_dim": 20}, "cross_attention_dim 20 must equal the video stream's width 16"),
        ({"audio_num_attention_heads": 3}, "audio_cross_attention_dim 12 must equal the audio stream's width 18"),
        ({"rope_type": "half"}, "rope_type is 'half', must be one of interleaved, split"),
        ({"modality": "sound"}, "modality is 'sound', must be one of audio_video, video, audio"),
        ({"patch_size": 3}, "in_channels 4 is not divisible by the 9 positions of a patch"),
        ({"vae_scale_factors": (8, 32)}, "vae_scale_factors must be three positive integers, got (8, 32)"),
        ({"audio_num_attention_heads": 3, "audio_cross_attention_dim": 18}, "needs num_attention_heads =="),
    ],
)
def test_configs_that_cannot_be(changes, fault):
    with pytest.raises(UserError) as error:
        tiny_config(**changes)
    assert fault in str(error.value)


def test_one_stream_does_not_care_about_the_others_heads():
    cfg = tiny_config(modality="video", audio_num_attention_heads=3, audio_cross_attention_dim=18)
    assert [s.name for s in cfg.streams] == ["video"] and not cfg.crossed


# --- tokens -------------------------------------------------------------------------------------------------------


@given(
    grid=st.tuples(*[st.integers(1, 3)] * 3), patch=st.integers(1, 2), patch_t=st.integers(1, 2),
    batch=st.integers(1, 2),
)  # fmt: skip
def test_video_tokens(grid, patch, patch_t, batch):
    """Tokens in (t, h, w) order, features in (channel, t, h, w) order of the patch, and back bit by bit."""
    cfg = tiny_config(patch_size=patch, patch_size_t=patch_t, in_channels=3 * patch**2 * patch_t)
    shape = (grid[0] * patch_t, grid[1] * patch, grid[2] * patch)
    latents = torch.randn(batch, 3, *shape)
    tokens = ltx2_inputs.video_tokens(cfg, latents)
    cut = latents.unfold(2, patch_t, patch_t).unfold(3, patch, patch).unfold(4, patch, patch)
    for n, (t, h, w) in enumerate(itertools.product(*map(range, grid))):
        assert torch.equal(tokens[:, n], cut[:, :, t, h, w].flatten(1))
    assert ltx2_inputs.video_grid(cfg, latents.shape) == grid
    assert video_positions(cfg, grid, 24.0).shape[2] == tokens.shape[1]
    assert torch.equal(ltx2_inputs.video_latents(cfg, tokens, grid), latents)


def test_audio_tokens():
    cfg, latents = tiny_config(audio_in_channels=6), torch.randn(2, 2, 5, 3)
    tokens = ltx2_inputs.audio_tokens(cfg, latents)
    assert all(torch.equal(tokens[:, t], latents[:, :, t].flatten(1)) for t in range(5))
    assert torch.equal(ltx2_inputs.audio_latents(tokens, 3), latents)
    with pytest.raises(UserError, match=r"\[2, 2, 5, 4\], expected \[B, C, T, mel\] with C \* mel = 6"):
        ltx2_inputs.audio_tokens(cfg, torch.zeros(2, 2, 5, 4))


def test_latents_that_do_not_fit():
    cfg = tiny_config(patch_size=2, in_channels=8)
    assert ltx2_inputs.latent_faults(cfg, (2, 1, 4, 6)) == []
    assert ltx2_inputs.latent_faults(cfg, (3, 0, 3, 6)) == [
        "3 video latent channels, the model takes 2",
        "latent frames 0 must be a multiple of 1: nearest valid 1",
        "latent height 3 must be a multiple of 2: nearest valid 2 or 4",
    ]
    with pytest.raises(UserError, match="latent width 5"):
        ltx2_inputs.video_tokens(cfg, torch.zeros(1, 2, 1, 4, 5))


@given(seed=st.integers(0, 10**6), per_token=st.booleans())
@settings(max_examples=8)
def test_noise_per_sample_and_per_token(seed, per_token):
    """x0 at 0, noise at 1, slope `noise - x0` between; in float32 for half-precision latents and levels."""
    g = torch.Generator().manual_seed(seed)
    clean, noise = (torch.randn(2, 5, 3, generator=g, dtype=torch.float64) for _ in range(2))
    sigma = torch.rand(2, 5 if per_token else 1, generator=g, dtype=torch.float64)
    x, slope = torch.func.jvp(lambda s: noised(clean, noise, s), (sigma,), (torch.ones_like(sigma),))
    torch.testing.assert_close(slope, velocity_target(clean, noise), rtol=0, atol=1e-14)
    torch.testing.assert_close(x - sigma[..., None] * slope, clean, rtol=0, atol=1e-14)
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    x = noised(clean, noise, ends)
    assert torch.equal(x[0], clean[0]) and torch.equal(x[1], noise[1])
    assert noised(clean.bfloat16(), noise.bfloat16(), sigma.bfloat16()).dtype == torch.float32
    assert timestep_of(tiny_config(), sigma.bfloat16()).dtype == torch.float32


# --- masks --------------------------------------------------------------------------------------------------------


def test_keep_masks_and_their_faults():
    cfg = tiny_config(num_layers=3)
    keep = keep_masks(cfg, [{}, {"self": [1]}, {"a2v": None, "v2a": [0, 2]}])
    assert keep.shape == (4, 3, 3) and keep[..., 0].all() and keep.dtype == torch.bool
    assert (~keep).nonzero().tolist() == [[0, 1, 1], [2, 0, 2], [2, 1, 2], [2, 2, 2], [3, 0, 2], [3, 2, 2]]
    with pytest.raises(UserError) as error:
        keep_masks(cfg, [{"video": None}, {"self": [3, -1]}])
    assert faults(error) == [
        "sample 0: site 'video' is none of self, audio_self, a2v, v2a",
        "sample 1: self in block 3, blocks are 0 to 2",
        "sample 1: self in block -1, blocks are 0 to 2",
    ]


def test_who_sees_whom_with_references():
    """Two references after three noisy tokens: each and the noisy ones by its strength, itself wholly, others not."""
    one = extend_strengths(None, 3, torch.tensor([[0.5, 0.25]]))
    both = extend_strengths(one, 3, torch.tensor([[1.0]]))
    assert both.tolist() == [[
        [1, 1, 1, 0.5, 0.25, 1],
        [1, 1, 1, 0.5, 0.25, 1],
        [1, 1, 1, 0.5, 0.25, 1],
        [0.5, 0.5, 0.5, 1, 1, 0],
        [0.25, 0.25, 0.25, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]]  # fmt: skip


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=8)
def test_a_strength_multiplies_attention_weights(seed, dtype):
    """softmax(s + log m) is the weights times m, normalised again; 0 hides, 1 changes nothing."""
    g = torch.Generator().manual_seed(seed)
    scores, m = torch.randn(2, 4, 4, generator=g, dtype=dtype), torch.rand(2, 4, 4, generator=g, dtype=dtype)
    m = torch.where(m < 0.3, 0, m) + torch.eye(4, dtype=dtype)
    bias = strength_bias(m.clamp(max=1), dtype)
    assert bias.shape == (2, 1, 4, 4) and (bias[:, 0][m == 0] == torch.finfo(dtype).min).all()
    weights = m.clamp(max=1) * scores.softmax(-1)
    torch.testing.assert_close((scores + bias[:, 0]).softmax(-1), weights / weights.sum(-1, keepdim=True))


def test_a_reference_of_strength_zero_is_not_there():
    """The noisy tokens' velocities are those without the reference; with strength 1 they are not."""
    cfg = tiny_config(modality="video")
    params, given_ = random_params(cfg, 0), random_case(cfg, 0).streams["video"]
    plain = ltx2.forward(params, cfg, model_inputs(cfg, {"video": given_}))["video"]
    count = plain.shape[1]
    found = {}
    for strength in (0.0, 1.0):
        more = dataclasses.replace(
            given_,
            latents=torch.cat([given_.latents, torch.randn(2, 4, cfg.in_channels)], 1),
            positions=torch.cat([given_.positions, given_.positions[:, :, :4]], 2),
            strengths=extend_strengths(None, count, torch.full((2, 4), strength)),
        )
        found[strength] = ltx2.forward(params, cfg, model_inputs(cfg, {"video": more}))["video"][:, :count]
    torch.testing.assert_close(found[0.0], plain, rtol=1e-5, atol=1e-6)
    assert (found[1.0] - plain).abs().max() > 1e-3


def test_padding_that_is_masked_changes_nothing():
    cfg = tiny_config()
    params, case = random_params(cfg, 0), random_case(cfg, 0)
    plain = ltx2.forward(params, cfg, model_inputs(cfg, case.streams))
    padded = {
        name: dataclasses.replace(
            s,
            text=torch.cat([s.text, torch.full((2, 3, s.text.shape[2]), 9.0)], 1),
            text_mask=torch.arange(s.text.shape[1] + 3).expand(2, -1) < s.text.shape[1],
        )
        for name, s in case.streams.items()
    }
    masked = ltx2.forward(params, cfg, model_inputs(cfg, padded))
    bare = {name: dataclasses.replace(s, text_mask=None) for name, s in padded.items()}
    unmasked = ltx2.forward(params, cfg, model_inputs(cfg, bare))
    for name, y in plain.items():
        torch.testing.assert_close(masked[name], y, rtol=1e-5, atol=1e-5)
        assert (unmasked[name] - y).abs().max() > 1e-3


# --- the builder --------------------------------------------------------------------------------------------------


@given(
    cfg=configs(), seed=st.integers(0, 10**6), dtype=st.sampled_from([None, torch.bfloat16]), per_token=st.booleans(),
    modality=st.sampled_from(["audio_video", "video", "audio"]),
)  # fmt: skip
def test_what_is_built_fits_the_model(cfg, seed, dtype, per_token, modality):
    cfg = dataclasses.replace(cfg, modality=modality)
    case = random_case(cfg, seed, per_token=per_token, masks=True, strengths=True)
    inputs = model_inputs(cfg, case.streams, dtype=dtype)
    wanted = torch.float32 if dtype is None else dtype
    for key, value in inputs.items():
        wide = key.endswith(("_timestep", "_level", "_positions"))
        mask = key.endswith("_mask") or key == "keyframes"
        assert value.dtype == (torch.float32 if wide else torch.bool if mask else wanted), key
    params = {k: v.to(wanted) for k, v in random_params(cfg, seed).items()}
    for name, out in ltx2.forward(params, cfg, inputs).items():
        channels = cfg.stream(name).out_channels
        assert out.shape == (*inputs[name].shape[:2], channels) and out.dtype == wanted and out.isfinite().all()


def test_a_level_per_sample_is_the_timestep_where_there_is_one():
    cfg = tiny_config()
    case = random_case(cfg, 0)
    bare = {n: dataclasses.replace(s, level=None, timestep=s.timestep[:, 0]) for n, s in case.streams.items()}
    built, same = model_inputs(cfg, bare), model_inputs(cfg, case.streams)
    assert all(torch.equal(built[k], same[k]) for k in same) and built.keys() == same.keys()
    old = tiny_config(family="2.0")  # needs no level, so none is asked for
    case = random_case(old, 0, per_token=True)
    bare = {n: dataclasses.replace(s, level=None) for n, s in case.streams.items()}
    assert "video_level" not in model_inputs(old, bare)


def test_everything_that_does_not_fit_is_in_one_message():
    cfg = tiny_config()
    with pytest.raises(UserError) as error:
        model_inputs(
            cfg,
            {
                "video": StreamInputs(
                    torch.zeros(2, 6, 5), torch.zeros(2, 4), torch.zeros(1, 1, 6, 2), torch.zeros(2, 3, 9),
                    text_mask=torch.ones(2, 4), strengths=torch.zeros(2, 6), keyframes=torch.zeros(2, 6).bool(),
                ),
                "audio": StreamInputs(
                    torch.zeros(3, 4, 6), torch.zeros(3, 4), torch.zeros(3, 1, 4, 2), torch.zeros(3, 3, 12),
                    strengths=torch.zeros(3, 4, 4),
                ),
                "sound": StreamInputs(*[torch.zeros(2, 1, 1)] * 4),
            },
            keep=torch.ones(4, 3, 2),
        )  # fmt: skip
    assert faults(error) == [
        "video latents: [2, 6, 5], expected [2, 6, 4]",
        "video timestep: [2, 4], expected [2] or [2, 1] or [2, 6]",
        "video positions: [1, 1, 6, 2], expected [1, 3, 6, 2] or [2, 3, 6, 2]",
        "video text: [2, 3, 9], expected [2, 3, 16]",
        "video text_mask: [2, 4], expected [2, 3]",
        "video strengths: [2, 6], expected [2, 6, 6]",
        "video text_mask: dtype torch.float32, expected torch.bool",
        "video level: missing, this model needs it beside timesteps per token, [2]",
        "video keyframes: given to a model that has no embedding for them",
        "audio level: missing, this model needs it beside timesteps per token, [3]",
        "audio strengths: only video attention takes them",
        "sound: given to a model that is audio_video",
        "batches differ: video has 2, audio has 3, sound has 2",
        "keep: [4, 3, 2] torch.float32, expected [4, 2, 2] torch.bool",
    ]


def test_a_modality_that_the_model_lacks():
    cfg = tiny_config(modality="video")
    case = random_case(tiny_config(), 0)
    with pytest.raises(UserError) as error:
        model_inputs(cfg, case.streams)
    assert faults(error) == ["audio: given to a model that is video"]
    with pytest.raises(UserError) as error:
        model_inputs(tiny_config(), {"video": case.streams["video"]})
    assert faults(error) == ["audio: missing, the model is audio_video"]
    with pytest.raises(UserError, match=r"video latents: \[2, 3\], expected \[B, N, 4\]"):
        model_inputs(cfg, {"video": dataclasses.replace(case.streams["video"], latents=torch.zeros(2, 3))})


def test_text_widths_of_the_families():
    """3840 before the projection of 2.0; 4096 and 2048 from the connectors of 2.3."""
    width = lambda name: [s.text_dim for s in PRESETS[name].streams]  # noqa: E731
    assert width("ltx-2-19b") == [3840, 3840] and width("ltx-2.3-22b") == width("ltx-2.5") == [4096, 2048]
    assert isinstance(PRESETS["ltx-2.5"], LTX2Config)
