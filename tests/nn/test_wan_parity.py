"""Wan against Diffusers' transformer: outputs and every gradient, and full configs key by key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wan_cases import configs, diffusers_model, random_inputs, random_params

from core import specs
from nn import wan
from nn.wan_inputs import model_inputs

# Float32 on both sides with sums of up to ~300 terms in another order: a few ulp (1.2e-7) per operation
# through at most 3 blocks leaves a relative error of some 1e-6; 2e-5 of the largest entry is ten times that.
TOLERANCE = 2e-5


def close(ours, theirs, what, scale=None):
    scale = max(theirs.abs().max().item(), 1e-3) if scale is None else scale
    error = (ours - theirs).abs().max().item() / scale
    assert error < TOLERANCE, f"{what}: relative error {error:.2e}"


def compare(cfg, params, inputs):
    """Outputs, and gradients with respect to all parameters and the latents."""
    model = diffusers_model(cfg, params)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    latents = inputs["latents"].clone().requires_grad_()
    ours = wan.forward(leaves, cfg, {**inputs, "latents": latents})
    theirs_latents = inputs["latents"].clone().requires_grad_()
    text = inputs["text"]
    theirs = model(theirs_latents, inputs["timestep"], text, inputs.get("image"), return_dict=False)[0]
    close(ours.detach(), theirs.detach(), "output")
    weight = torch.linspace(-1, 1, ours.numel()).reshape(ours.shape)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    close(latents.grad, theirs_latents.grad, "gradient of the latents")
    theirs_grads = {k: v.grad for k, v in model.named_parameters()}
    assert set(theirs_grads) == set(leaves)
    # Each gradient against its own size; below a hundredth of the largest one cancellation rules.
    floor = 1e-2 * max(g.abs().max().item() for g in theirs_grads.values())
    for name, leaf in leaves.items():
        own = max(theirs_grads[name].abs().max().item(), floor)
        close(leaf.grad, theirs_grads[name], f"gradient of {name}", scale=own)


@given(cfg=configs(), seed=st.integers(0, 10**6), grid=st.tuples(*[st.integers(1, 3)] * 3), batch=st.integers(1, 3))
def test_text_to_video(cfg, seed, grid, batch):
    noisy, timestep, conditions = random_inputs(cfg, seed, batch=batch, grid=grid, text_len=1 + seed % 7)
    compare(cfg, random_params(cfg, seed), model_inputs(cfg, noisy, timestep, conditions))


@given(cfg=configs(image=True), seed=st.integers(0, 10**6))
@settings(max_examples=8)
def test_image_to_video(cfg, seed):
    """Diffusers takes the last 512 context tokens as text, so the text length is 512 here."""
    noisy, timestep, conditions = random_inputs(cfg, seed, text_len=512, image_len=1 + seed % 5)
    compare(cfg, random_params(cfg, seed), model_inputs(cfg, noisy, timestep, conditions))


@given(cfg=configs(), seed=st.integers(0, 10**6), grid=st.tuples(*[st.integers(1, 3)] * 3))
def test_per_token_timesteps(cfg, seed, grid):
    """The 5B form: one timestep per token."""
    noisy, _, conditions = random_inputs(cfg, seed, grid=grid)
    tokens = grid[0] * grid[1] * grid[2]
    timestep = 1000 * torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed))
    compare(cfg, random_params(cfg, seed), model_inputs(cfg, noisy, timestep, conditions))


def test_first_and_last_frame_image_embedding():
    """`pos_embed_seq_len`: two images' features are laid side by side."""
    cfg = wan.WanConfig(
        num_attention_heads=2, attention_head_dim=8, ffn_dim=8, num_layers=1, in_channels=2, out_channels=2,
        text_dim=4, freq_dim=8, image_dim=6, added_kv_proj_dim=16, pos_embed_seq_len=6,
    )  # fmt: skip
    params = random_params(cfg, 3)
    noisy, timestep, conditions = random_inputs(cfg, 3, batch=1, text_len=512, image_len=3)
    two = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    compare(cfg, params, model_inputs(cfg, noisy, timestep, {**conditions, "image": two}))


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 4e-2), (torch.float64, 3e-6)])
def test_other_dtypes(dtype, tolerance):
    """bf16 has 8 bits of mantissa (4e-3 per rounding, some ten roundings deep). In float64 Diffusers' norms
    still compute in float32, which bounds the agreement at about 1e-6."""
    cfg = wan.WanConfig(
        num_attention_heads=2, attention_head_dim=12, ffn_dim=24, num_layers=2, in_channels=4, out_channels=4,
        text_dim=8, freq_dim=16,
    )  # fmt: skip
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    params = random_params(cfg, 0, drawn)
    noisy, timestep, conditions = random_inputs(cfg, 1, dtype=drawn)
    inputs = model_inputs(cfg, noisy, timestep, conditions, dtype=dtype)
    model = diffusers_model(cfg, {k: v.float() for k, v in params.items()}).to(dtype)
    if dtype == torch.float64:
        model.load_state_dict(params)
    theirs = model(inputs["latents"], inputs["timestep"], inputs["text"], return_dict=False)[0]
    ours = wan.forward(params, cfg, inputs)
    assert ours.dtype == dtype
    assert (ours - theirs).abs().max() / theirs.abs().max() < tolerance


@pytest.mark.parametrize("name", wan.PRESETS)
def test_full_configs_key_by_key(name):
    """Every key and shape of the public models, without allocating them."""
    cfg = wan.PRESETS[name]
    theirs = dict(diffusers_model(cfg, device="meta").state_dict())
    ours = specs.abstract(wan.param_specs(cfg))
    specs.check(theirs, wan.param_specs(cfg))
    assert list(sorted(ours)) == sorted(theirs)


def test_parameter_counts_are_the_published_ones():
    """1.3B, 14B, 16.4B with the image branch, and 5B, exactly."""
    counts = {n: sum(s_numel(s) for s in wan.param_specs(c).values()) for n, c in wan.PRESETS.items()}
    assert counts == {
        "wan2.1-t2v-1.3b": 1_418_996_800,
        "wan2.1-t2v-14b": 14_288_491_584,
        "wan2.1-i2v-14b": 16_394_878_784,
        "wan2.2-ti2v-5b": 4_999_787_712,
    }


def s_numel(spec):
    n = 1
    for size in spec.shape:
        n *= size
    return n
