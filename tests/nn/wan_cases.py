"""Random tiny Wan models and inputs, and the Diffusers model that holds the same weights."""

import dataclasses

import torch
from hypothesis import strategies as st

from core import keys, specs
from nn.wan import WanConfig, param_specs
from nn.wan_formats import to_json


@st.composite
def configs(draw, image: bool = False, channels=(2, 4)):
    """Tiny configs with odd head counts, head sizes that do not divide by 6, and odd widths."""
    out, heads = draw(st.sampled_from(channels)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([8, 10, 12, 16]))
    extra = draw(st.sampled_from([0, 3])) if image else 0
    return WanConfig(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        ffn_dim=draw(st.integers(3, 24)),
        num_layers=draw(st.integers(1, 3)),
        in_channels=out + extra,
        out_channels=out,
        patch_size=draw(st.sampled_from([(1, 2, 2), (1, 1, 1), (2, 1, 2)])),
        text_dim=draw(st.integers(4, 9)),
        freq_dim=draw(st.sampled_from([8, 16, 256])),
        cross_attn_norm=draw(st.booleans()),
        image_dim=6 if image else None,
        added_kv_proj_dim=heads * head_dim if image else None,
    )


def random_params(cfg: WanConfig, seed: int, dtype=torch.float32):
    """Every leaf random, so that no zero-initialised layer hides a fault."""
    k = keys.key(seed)
    out = {}
    for name, s in param_specs(cfg).items():
        noise = keys.normal(keys.fold_in(k, name), s.shape) * (0.3 / max(1, s.shape[-1]) ** 0.5)
        out[name] = (noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)).to(dtype)
    return out


def diffusers_model(cfg: WanConfig, params=None, device=None):
    """Diffusers' transformer of the same config, with the same weights when given."""
    from diffusers import WanTransformer3DModel

    body = {k: v for k, v in to_json(cfg).items() if not k.startswith("_")}
    if device is not None:
        with torch.device(device):
            return WanTransformer3DModel(**body)
    model = WanTransformer3DModel(**body)
    if params is not None:
        model.load_state_dict(params, strict=True)
    return model.eval()


def random_inputs(cfg: WanConfig, seed: int, *, batch=2, grid=(2, 2, 3), text_len=5, image_len=0, dtype=torch.float32):
    """Noisy latents, timesteps and conditions of one call; `grid` counts tokens."""
    k = keys.key(seed)
    draw = lambda name, *shape: keys.normal(keys.fold_in(k, name), shape, dtype=dtype)  # noqa: E731
    size = [n * p for n, p in zip(grid, cfg.patch_size, strict=True)]
    conditions = {"text": draw("text", batch, text_len, cfg.text_dim)}
    if cfg.image_dim is not None:
        conditions["image"] = draw("image", batch, image_len, cfg.image_dim)
    if cfg.condition_channels:
        conditions["first_frame"] = draw("first_frame", batch, cfg.condition_channels, *size)
    noisy = draw("noisy", batch, cfg.out_channels, *size)
    timestep = keys.uniform(keys.fold_in(k, "timestep"), (batch,), dtype=dtype) * 1000
    return noisy, timestep, conditions


def tiny_config(**changes) -> WanConfig:
    """One small config for tests that need no search."""
    base = WanConfig(
        num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=4, in_channels=4, out_channels=4,
        text_dim=8, freq_dim=16,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def tiny_params(cfg: WanConfig, seed: int = 0):
    """Freshly initialised parameters of a tiny config."""
    return specs.init(param_specs(cfg), keys.key(seed))
