"""Random tiny Wan VAEs and their inputs, and the Diffusers model that holds the same weights."""

import math

import torch
from hypothesis import strategies as st

from core import keys
from nn.wan_vae import WanVaeConfig, param_specs, to_json

# Widths of 2.2 must divide at each of its shortcuts; 2.1 takes any.
RESIDUAL_MULTS = [(1, 2, 2), (4, 4, 4), (1, 1), (1, 2, 4, 4), (2, 2, 1), (2, 1, 1)]


@st.composite
def configs(draw):
    """Both kinds, odd widths and multipliers, one to three changes of size, any of which change frames too.

    At least three channels everywhere: the norm divides by a pixel's length, which is near zero now and then
    when there are only one or two, and then blows rounding errors up.
    """
    residual = draw(st.booleans())
    mults = st.lists(st.integers(1, 3), min_size=2, max_size=4).map(tuple)
    dim_mult = draw(st.sampled_from(RESIDUAL_MULTS) if residual else mults)
    temporal = draw(st.tuples(*[st.booleans()] * (len(dim_mult) - 1)).filter(lambda t: sum(t) <= 2))
    return vae_config(
        residual=residual,
        base_dim=draw(st.sampled_from([5, 6, 8])),
        decoder_base_dim=draw(st.sampled_from([None, 6, 7])),
        z_dim=draw(st.integers(1, 3)),
        dim_mult=dim_mult,
        num_res_blocks=draw(st.integers(1, 2)),
        temperal_downsample=temporal,
        patch_size=draw(st.sampled_from([None, 2])),
    )


def vae_config(residual=False, **fields) -> WanVaeConfig:
    """A tiny config of either kind whose dependent fields are filled in."""
    kind = {"base_dim": 6, "z_dim": 2, "dim_mult": (1, 2, 2), "num_res_blocks": 1, "temperal_downsample": (True, True)}
    fields = kind | {"patch_size": 2 if residual else None} | fields
    z, patch = fields["z_dim"], fields["patch_size"] if fields["patch_size"] is not None else 1
    return WanVaeConfig(
        is_residual=residual,
        in_channels=3 * patch**2,
        out_channels=3 * patch**2,
        latents_mean=tuple(0.3 * i - 0.2 for i in range(z)),
        latents_std=tuple(0.6 + 0.5 * i for i in range(z)),
        scale_factor_temporal=2 ** sum(fields["temperal_downsample"]),
        scale_factor_spatial=2 ** (len(fields["dim_mult"]) - 1) * patch,
        **fields,
    )


def random_params(cfg: WanVaeConfig, seed: int, dtype=torch.float32):
    """Every leaf random; the last layer is scaled so that outputs lie inside [-1, 1], where the clamp is idle."""
    k, out = keys.key(seed), {}
    for name, spec in param_specs(cfg).items():
        noise = keys.normal(keys.fold_in(k, name), spec.shape)
        noise = noise * (0.1 if name.endswith((".bias", ".gamma")) else math.prod(spec.shape[1:]) ** -0.5)
        if name.startswith("decoder.conv_out"):
            noise = 0.3 * noise
        out[name] = (noise + (1.0 if name.endswith(".gamma") else 0.0)).to(dtype)
    return out


def diffusers_vae(cfg: WanVaeConfig, params=None, device="cpu", dtype=torch.float32):
    """Diffusers' VAE of the same config, with the same weights when given."""
    from diffusers import AutoencoderKLWan

    body = {k: v for k, v in to_json(cfg).items() if k not in ("_class_name", "clip_output")}
    with torch.device(device):
        model = AutoencoderKLWan(**body)
    model = model if dtype == torch.float32 else model.to(dtype)
    if params is not None:
        model.load_state_dict(params, strict=True)
    return model.eval()


def random_video(cfg: WanVaeConfig, seed: int, *, batch=1, frames=5, size=(1, 2), dtype=torch.float32):
    """A video in [-1, 1] of `frames` frames; `size` counts latent pixels."""
    height, width = (n * cfg.scale_factor_spatial for n in size)
    noise = keys.normal(keys.fold_in(keys.key(seed), "video"), (batch, 3, frames, height, width))
    return noise.clamp(-1, 1).to(dtype)


def random_latents(cfg: WanVaeConfig, seed: int, *, batch=1, frames=2, size=(1, 2), dtype=torch.float32):
    """Normalised latents of `frames` latent frames."""
    return keys.normal(keys.fold_in(keys.key(seed), "latents"), (batch, cfg.z_dim, frames, *size), dtype=dtype)
