"""LTX-2's latent upsamplers against Diffusers' LTX2LatentUpsamplerModel, in all their variants."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_side_cases import compare, draw, loaded, random_leaves

from core import keys, specs
from core.errors import UserError
from core.trees import num_params
from nn import ltx2_upsampler as up
from nn.config_files import read_config
from nn.ltx2_upsampler import UpsamplerConfig

# Some ten convolutions of up to 900 terms in another order, and group norms: a few ulp (1.2e-7, 2.2e-16) per layer.
TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-12}
VARIANTS = {
    "x0.75": {"rational_spatial_scale": 0.75},
    "x1.5": {"rational_spatial_scale": 1.5},
    "x2": {"rational_spatial_scale": 2.0},
    "x4": {"rational_spatial_scale": 4.0},
    "plain": {"use_rational_resampler": False},
    "frames": {"spatial_upsample": False, "temporal_upsample": True, "rational_spatial_scale": 1.0},
    "both": {"temporal_upsample": True},
    "pictures": {"dims": 2, "rational_spatial_scale": 1.5},
    "plain pictures": {"dims": 2, "use_rational_resampler": False},
}


def tiny(variant, **changes) -> UpsamplerConfig:
    base = {"in_channels": 3, "mid_channels": 64, "num_blocks_per_stage": 1}
    return UpsamplerConfig(**base | VARIANTS[variant] | changes)


def diffusers_model(cfg):
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    return LTX2LatentUpsamplerModel(**{k: v for k, v in up.to_json(cfg).items() if k != "_class_name"})


def compare_with_diffusers(cfg, seed, shape, dtype):
    params = random_leaves(up.param_specs(cfg), seed, dtype, up.constants(cfg))
    model = loaded(lambda: diffusers_model(cfg), params, dtype)
    latents = draw(seed, "latents", shape[0], cfg.in_channels, *shape[1:], dtype=dtype)
    ours = lambda p, x: [up.upsample(p, cfg, x)]
    compare(ours, lambda x: [model(x)], params, model, [latents], TOLERANCE[dtype])
    with torch.no_grad():
        assert up.upsample(params, cfg, latents).shape[2:] == up.upsampled_shape(cfg, *shape[1:])


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    seed=st.integers(0, 10**6), channels=st.integers(1, 4), blocks=st.integers(1, 2),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(3, 4), st.integers(3, 5)),
)  # fmt: skip
@settings(max_examples=4)
def test_outputs_and_gradients_equal_diffusers(variant, seed, channels, blocks, shape):
    """Not too small: a group norm over two pixels that are nearly equal blows rounding errors up."""
    cfg = tiny(variant, in_channels=channels, num_blocks_per_stage=blocks)
    compare_with_diffusers(cfg, seed, shape, torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_equals_diffusers(variant):
    compare_with_diffusers(tiny(variant), 1, (2, 2, 3, 2), torch.float64)


@pytest.mark.parametrize("variant", ["x1.5", "x2"])
def test_the_constant_is_diffusers(variant):
    cfg = tiny(variant)
    fresh = up.init(cfg, keys.key(0))
    specs.check(fresh, up.param_specs(cfg))
    assert torch.equal(fresh[up.BLUR], diffusers_model(cfg).state_dict()[up.BLUR])


# The bytes of public spatial (plain form) and temporal files less their headers: bfloat16, two bytes each.
@pytest.mark.parametrize("name,count", [("ltx-2.3-spatial-x2", 497_867_904), ("ltx-2-temporal-x2", 130_968_192)])
def test_parameters_of_the_public_files(name, count):
    assert num_params(up.param_specs(up.PRESETS[name])) == count


@pytest.mark.parametrize("name", up.PRESETS)
def test_full_configs_key_by_key(name):
    with torch.device("meta"):
        theirs = diffusers_model(up.PRESETS[name]).state_dict()
    specs.check(theirs, up.param_specs(up.PRESETS[name]))


def test_defaults_are_diffusers():
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    with torch.device("meta"):
        theirs = dict(LTX2LatentUpsamplerModel().config)
    ours = up.to_json(UpsamplerConfig())
    assert {k: v for k, v in ours.items() if k[0] != "_"} == {k: v for k, v in theirs.items() if k[0] != "_"}


def test_pictures_do_not_see_each_other():
    cfg = tiny("pictures")
    params = random_leaves(up.param_specs(cfg), 2, constants=up.constants(cfg))
    latents = draw(2, "latents", 1, 3, 2, 4, 4)
    whole = up.upsample(params, cfg, latents)
    alone = torch.cat([up.upsample(params, cfg, f) for f in latents.split(1, dim=2)], dim=2)
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-5)


def test_config_files_and_errors(tmp_path):
    cfg, path = tiny("x1.5"), tmp_path / "config.json"
    path.write_text(json.dumps(up.to_json(cfg)))
    assert read_config(UpsamplerConfig, path, "_class_name", up.CLASS_NAME) == cfg
    with pytest.raises(UserError) as error:
        UpsamplerConfig(mid_channels=48, rational_spatial_scale=3.0, dims=4)
    for part in ("multiple of 32, got 48", "must be one of 0.75, 1.5, 2.0, 4.0", "dims must be 2 or 3"):
        assert part in str(error.value)
    with pytest.raises(UserError, match="temporal_upsample needs dims 3"):
        UpsamplerConfig(dims=2, temporal_upsample=True)
    with pytest.raises(UserError, match="spatial_upsample or temporal_upsample must be true"):
        UpsamplerConfig(spatial_upsample=False)
    with pytest.raises(UserError, match=r"expected \[B, 3, T, H, W\]"):
        up.upsample({}, cfg, torch.zeros(1, 4, 1, 2, 2))
    with pytest.raises(UserError, match="floating"):
        up.upsample({}, cfg, torch.zeros(1, 3, 1, 2, 2, dtype=torch.int32))


def test_bfloat16_stays():
    cfg = tiny("x2")
    params = random_leaves(up.param_specs(cfg), 2, constants=up.constants(cfg))
    latents = draw(2, "latents", 1, 3, 2, 4, 4)
    half = up.upsample(params, cfg, latents.bfloat16())
    assert half.dtype == torch.bfloat16
    exact = up.upsample(params, cfg, latents)
    # 4e-3 per rounding through some ten layers
    assert (half - exact).abs().max() < 0.1 * exact.abs().max()
