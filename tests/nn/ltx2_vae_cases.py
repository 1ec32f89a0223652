"""Random tiny LTX-2 VAEs and their inputs, the Diffusers model of the same weights, and a count of live elements."""

import contextlib
import math
import weakref
from unittest import mock

import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from core import keys
from nn.ltx2_vae import LTX2VaeConfig, param_specs, to_json

# Orders of changes that make the same factors of encoder and decoder: (down, up).
ORDERS = [
    (("spatial",), ("spatial",)),
    (("temporal",), ("temporal",)),
    (("spatiotemporal",), ("spatiotemporal",)),
    (("conv",), ("spatiotemporal",)),
    (("spatial", "temporal"), ("temporal", "spatial")),
    (("temporal", "spatial"), ("spatiotemporal", None)),
    (("spatiotemporal", None), (None, "spatiotemporal")),
    (("spatial", "conv"), ("spatiotemporal", "spatial")),
    (("spatial", "temporal", "spatiotemporal"), ("spatiotemporal", "spatiotemporal")),
]


def vae_config(down=("spatial", "temporal"), up=("temporal", "spatial"), **fields) -> LTX2VaeConfig:
    """A tiny config with the changes `down` and `up` (None: a block without one), whose other lists fit them."""
    lists = {
        "block_out_channels": (4,) * len(down),
        "decoder_block_out_channels": (8,) * len(up),
        "layers_per_block": (1,) * (len(down) + 1),
        "decoder_layers_per_block": (1,) * (len(up) + 1),
        "decoder_inject_noise": (False,) * (len(up) + 1),
        "upsample_residual": (False,) * len(up),
        "upsample_factor": (1,) * len(up),
    }
    return LTX2VaeConfig(
        **({"latent_channels": 4, "patch_size": 2, "decoder_causal": False} | lists | fields),
        down_block_types=("LTX2VideoDownBlock3D",) * len(down),
        downsample_type=tuple("spatial" if d is None else d for d in down),
        spatio_temporal_scaling=tuple(d is not None for d in down),
        upsample_type=tuple("spatial" if u is None else u for u in up),
        decoder_spatio_temporal_scaling=tuple(u is not None for u in reversed(up)),
    )


@st.composite
def encoder_widths(draw, down, z):
    """Channels after each block: any that cells divide and that divide what comes in, folded."""
    widths, width = [], z
    for kind in down:
        cells = {"spatial": 4, "temporal": 2, "spatiotemporal": 8}.get(kind)
        fits = [width] if cells is None else [n for n in (4, 8, 16) if n % cells == 0 and width * cells % n == 0]
        width = draw(st.sampled_from(fits))
        widths.append(width)
    return tuple(widths)


@st.composite
def decoder_lists(draw, up, plain):
    """From the pixels: widths, factors, shortcuts. Where the factor is 1, all blocks but the first may change the width
    (`plain`: none does)."""
    width = draw(st.sampled_from([8, 16]))
    widths, factors, shortcuts = [], [], []
    for i, kind in enumerate(up):
        factor = 1 if kind is None else draw(st.sampled_from([1, 2]))
        n = width if factor > 1 or plain or i == 0 else draw(st.sampled_from([width, 8]))
        shortcut = n % {"spatial": 4, "temporal": 2, "spatiotemporal": 8}.get(kind, 1) == 0 and draw(st.booleans())
        widths, factors, shortcuts = [n, *widths], [factor, *factors], [shortcut, *shortcuts]
        width = n // factor
    return tuple(widths), tuple(factors), tuple(shortcuts)


@st.composite
def configs(draw, noise=False, timed=None):
    """Every kind of block, all kinds of borders, one to three changes of size.

    At least four channels: with one or two a pixel is near zero now and then, and its norm blows rounding errors up.
    """
    down, up = draw(st.sampled_from(ORDERS))
    timed = draw(st.booleans()) if timed is None else timed
    z = draw(st.sampled_from([4, 8]))
    widths, factors, shortcuts = draw(decoder_lists(up, plain=timed or noise))
    noisy = tuple(draw(st.booleans()) for _ in range(len(up))) + (True,) if noise else (False,) * (len(up) + 1)
    layers = lambda n: tuple(draw(st.integers(1, 2)) for _ in range(n))  # noqa: E731
    return vae_config(
        down,
        up,
        latent_channels=z,
        block_out_channels=draw(encoder_widths(down, z)),
        decoder_block_out_channels=widths,
        layers_per_block=layers(len(down) + 1),
        decoder_layers_per_block=layers(len(up) + 1),
        decoder_inject_noise=noisy,
        upsample_factor=factors,
        upsample_residual=shortcuts,
        timestep_conditioning=timed,
        patch_size=draw(st.sampled_from([1, 2])),
        scaling_factor=draw(st.sampled_from([1.0, 0.5])),
        encoder_spatial_padding_mode=draw(st.sampled_from(["zeros", "reflect"])),
        decoder_spatial_padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate"])),
        encoder_causal=draw(st.booleans()),
        decoder_causal=draw(st.booleans()),
    )


def random_params(cfg: LTX2VaeConfig, seed: int, dtype=torch.float32):
    """Every leaf random; the last layer is scaled so that outputs lie inside [-1, 1], where the clamp is idle."""
    k, out = keys.key(seed), {}
    for name, spec in param_specs(cfg).items():
        noise = keys.normal(keys.fold_in(k, name), spec.shape)
        noise = noise * (math.prod(spec.shape[1:]) ** -0.5 if len(spec.shape) > 1 and "scale" not in name else 0.1)
        if name.startswith("decoder.conv_out"):
            noise = 0.2 * noise
        offset = 1.0 if name.endswith(("norm3.weight", "latents_std")) else 0.0
        out[name] = (noise + (10.0 if name.endswith("multiplier") else offset)).to(dtype)
    return out


def diffusers_vae(cfg: LTX2VaeConfig, params=None, device="cpu", dtype=torch.float32, **changes):
    """Diffusers' VAE of the same config, with the same weights when given."""
    from diffusers import AutoencoderKLLTX2Video

    body = {k: v for k, v in to_json(cfg).items() if k != "_class_name"}
    with torch.device(device):
        model = AutoencoderKLLTX2Video(**(body | changes))
    model = model if dtype == torch.float32 else model.to(dtype)
    if params is not None:
        model.load_state_dict(params, strict=True)
    return model.eval()


def conditions(cfg: LTX2VaeConfig, batch=1, seed=0, dtype=torch.float32):
    """The timestep and the noise key that `cfg` asks for, as arguments of `decode`."""
    timestep = torch.linspace(0.05, 0.4, batch, dtype=dtype) if cfg.timestep_conditioning else None
    return {"timestep": timestep, "noise": keys.key(seed) if any(cfg.decoder_inject_noise) else None}


@contextlib.contextmanager
def same_noise(k: keys.Key, cfg: LTX2VaeConfig):
    """Diffusers draws its noise from torch.randn in the order of the layers: it gets ours instead."""
    names = iter([n for n in param_specs(cfg) if "per_channel_scale" in n])

    def draw(shape, dtype, **_):
        return keys.normal(keys.fold_in(k, next(names)), shape, dtype=dtype)

    with mock.patch("diffusers.models.autoencoders.autoencoder_kl_ltx2.torch.randn", draw):
        yield
    assert next(names, None) is None


def random_video(cfg: LTX2VaeConfig, seed: int, *, batch=1, groups=1, size=(2, 2), dtype=torch.float32):
    """A video in [-1, 1] of `groups` latent frames after the first; `size` counts latent pixels."""
    shape = (batch, cfg.in_channels, cfg.factor_t * groups + 1, *(n * cfg.factor_s for n in size))
    return keys.normal(keys.fold_in(keys.key(seed), "video"), shape).clamp(-1, 1).to(dtype)


def random_latents(cfg: LTX2VaeConfig, seed: int, *, batch=1, frames=2, size=(2, 2), dtype=torch.float32):
    """Normalised latents of `frames` latent frames."""
    shape = (batch, cfg.latent_channels, frames, *size)
    return keys.normal(keys.fold_in(keys.key(seed), "latents"), shape, dtype=dtype)


class Live(TorchDispatchMode):
    """The most elements that tensors made inside held at any time, each memory counted once."""

    def __init__(self):
        super().__init__()
        self.peak, self.now, self.users = 0, 0, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self._held(t)
        return out

    def _held(self, t: torch.Tensor) -> None:
        place, elements = t.untyped_storage()._cdata, t.untyped_storage().nbytes() // t.element_size()
        if place not in self.users:
            self.now += elements
        self.users[place] = self.users.get(place, 0) + 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(t, self._left, place, elements)

    def _left(self, place: int, elements: int) -> None:
        self.users[place] -= 1
        if self.users[place] == 0:
            del self.users[place]
            self.now -= elements
