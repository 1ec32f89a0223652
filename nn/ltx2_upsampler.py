"""LTX-2's latent upsamplers as a pure function: more height and width, or more frames, between two sampling stages.

They work on latents as the video VAE's encoder gives them, NOT normalised. Key names, config fields and numbers are
those of Diffusers' `LTX2LatentUpsamplerModel`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from core import keys, specs
from core.errors import UserError, raise_faults
from core.specs import ParamSpec, Specs
from core.trees import Params
from nn.layers import affine_specs
from nn.wan_vae_blocks import conv_specs

CLASS_NAME = "LTX2LatentUpsamplerModel"
SCALES = {0.75: (3, 4), 1.5: (3, 2), 2.0: (2, 1), 4.0: (4, 1)}
"""Spatial scales of the rational form: times as many pixels, then every n-th of them."""

BLUR = "upsampler.blur_down.kernel"
BLUR_TAPS = 5
GROUPS = 32
NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class UpsamplerConfig:
    """Architecture; field names are those of a Diffusers `latent_upsampler/config.json`.

    `dims` 2 sees each frame alone. `use_rational_resampler` takes `rational_spatial_scale`; without it, and together
    with `temporal_upsample`, height and width double.
    """

    in_channels: int = 128
    mid_channels: int = 1024
    num_blocks_per_stage: int = 4
    dims: int = 3
    spatial_upsample: bool = True
    temporal_upsample: bool = False
    rational_spatial_scale: float = 2.0
    use_rational_resampler: bool = True

    def __post_init__(self):
        raise_faults("UpsamplerConfig", _config_faults(self))

    @property
    def rational(self) -> tuple[int, int] | None:
        """Numerator and denominator of the rational form; None for the others."""
        if self.temporal_upsample or not self.use_rational_resampler:
            return None
        return SCALES[self.rational_spatial_scale]

    @property
    def factors(self) -> tuple[int, int, int]:
        """Times as many frames, rows and columns that the middle convolution gives as channels."""
        space = 1 if not self.spatial_upsample else 2 if self.rational is None else self.rational[0]
        return 2 if self.temporal_upsample else 1, space, space


def _config_faults(cfg: UpsamplerConfig) -> list[str]:
    sizes = ("in_channels", "mid_channels", "num_blocks_per_stage")
    faults = [f"{n} must be at least 1, got {getattr(cfg, n)}" for n in sizes if getattr(cfg, n) < 1]
    if cfg.mid_channels % GROUPS:
        faults.append(f"mid_channels must be a multiple of {GROUPS}, got {cfg.mid_channels}")
    if cfg.dims not in (2, 3):
        faults.append(f"dims must be 2 or 3, got {cfg.dims}")
    if cfg.dims == 2 and cfg.temporal_upsample:
        faults.append("temporal_upsample needs dims 3")
    if not (cfg.spatial_upsample or cfg.temporal_upsample):
        faults.append("spatial_upsample or temporal_upsample must be true")
    if cfg.use_rational_resampler and not cfg.temporal_upsample and cfg.rational_spatial_scale not in SCALES:
        allowed = ", ".join(str(scale) for scale in SCALES)
        faults.append(f"rational_spatial_scale is {cfg.rational_spatial_scale}, must be one of {allowed}")
    return faults


PRESETS = {
    "ltx-2-spatial-x2": UpsamplerConfig(),
    "ltx-2.3-spatial-x2": UpsamplerConfig(use_rational_resampler=False),
    "ltx-2.3-spatial-x1.5": UpsamplerConfig(rational_spatial_scale=1.5),
    "ltx-2-temporal-x2": UpsamplerConfig(mid_channels=512, spatial_upsample=False, temporal_upsample=True),
}


# --- parameters -------------------------------------------------------------------------------------------------


def _blocks(cfg: UpsamplerConfig, stage: str) -> list[str]:
    return [f"{stage}.{i}" for i in range(cfg.num_blocks_per_stage)]


def _block_specs(name: str, dim: int, kernel: tuple[int, ...]) -> Specs:
    out: Specs = {}
    for i in (1, 2):
        out |= conv_specs(f"{name}.conv{i}", dim, dim, *kernel)
        out |= affine_specs(f"{name}.norm{i}", dim, axis=None, keep_fp32=False)
    return out


def _middle(cfg: UpsamplerConfig) -> str:
    """Key of the convolution that makes new pixels or frames."""
    return "upsampler.0" if cfg.rational is None else "upsampler.conv"


def param_specs(cfg: UpsamplerConfig) -> Specs:
    """Specs of every leaf, keys and shapes as in the Diffusers checkpoint; the blur's kernel is a constant."""
    dim, kernel = cfg.mid_channels, (3,) * cfg.dims
    out = conv_specs("initial_conv", cfg.in_channels, dim, *kernel)
    out |= affine_specs("initial_norm", dim, axis=None, keep_fp32=False)
    for stage in ("res_blocks", "post_upsample_res_blocks"):
        for name in _blocks(cfg, stage):
            out |= _block_specs(name, dim, kernel)
    middle = (3, 3, 3) if cfg.temporal_upsample else (3, 3)
    out |= conv_specs(_middle(cfg), dim, math.prod(cfg.factors) * dim, *middle)
    if cfg.rational is not None:
        out[BLUR] = ParamSpec((1, 1, BLUR_TAPS, BLUR_TAPS))
    return out | conv_specs("final_conv", dim, cfg.in_channels, *kernel)


def constants(cfg: UpsamplerConfig) -> Params:
    """The leaf that a formula gives: the binomial blur of the rational form, of sum 1, float32 `[1, 1, 5, 5]`."""
    if cfg.rational is None:
        return {}
    row = torch.tensor([math.comb(BLUR_TAPS - 1, i) for i in range(BLUR_TAPS)], dtype=torch.float64)
    square = torch.outer(row, row)
    return {BLUR: (square / square.sum()).float()[None, None]}


def init(cfg: UpsamplerConfig, k: keys.Key, *, device="cpu") -> Params:
    """Fresh parameters with the constant in place."""
    fixed = {name: leaf.to(device) for name, leaf in constants(cfg).items()}
    return {**specs.init(param_specs(cfg), k, device=device), **fixed}


# --- forward ----------------------------------------------------------------------------------------------------


def _per_frame(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies a function of pictures `[N, C, H, W]` to every frame of `[B, C, T, H, W]`."""
    y = fn(rearrange(x, "b c t h w -> (b t) c h w"))
    return rearrange(y, "(b t) c h w -> b c t h w", b=x.shape[0])


def _conv(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """2-D or 3-D convolution by the rank of its weight, sizes stay: zeros around, in time too."""
    weight, bias = p[f"{name}.weight"].to(x.dtype), p[f"{name}.bias"].to(x.dtype)
    return (F.conv2d if weight.ndim == 4 else F.conv3d)(x, weight, bias, padding=1)


def _norm(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, p[f"{name}.weight"].to(x.dtype), p[f"{name}.bias"].to(x.dtype), NORM_EPS)


def _block(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    h = F.silu(_norm(p, f"{name}.norm1", _conv(p, f"{name}.conv1", x)))
    return F.silu(x + _norm(p, f"{name}.norm2", _conv(p, f"{name}.conv2", h)))


def _spread(p: Mapping[str, Tensor], cfg: UpsamplerConfig, x: Tensor) -> Tensor:
    """More pixels of pictures `[N, C, H, W]`; in the rational form blurred, and every n-th of them kept."""
    _, factor, _ = cfg.factors
    x = _conv(p, _middle(cfg), x)
    x = rearrange(x, "n (c p q) h w -> n c (h p) (w q)", p=factor, q=factor)
    if cfg.rational is None or cfg.rational[1] == 1:
        return x
    kernel = p[BLUR].to(x.dtype).expand(x.shape[1], -1, -1, -1)
    return F.conv2d(x, kernel, stride=cfg.rational[1], padding=BLUR_TAPS // 2, groups=x.shape[1])


def _spread_frames(p: Mapping[str, Tensor], cfg: UpsamplerConfig, x: Tensor) -> Tensor:
    """`[B, C, T, H, W] -> [B, C, 2T - 1, ...]`: a video's first latent frame stands for one frame and stays alone."""
    r, s, _ = cfg.factors
    x = rearrange(_conv(p, _middle(cfg), x), "b (c r p q) t h w -> b c (t r) (h p) (w q)", r=r, p=s, q=s)
    return x[:, :, 1:]


def _whole(p: Mapping[str, Tensor], cfg: UpsamplerConfig, x: Tensor, spread: Callable[[Tensor], Tensor]) -> Tensor:
    x = F.silu(_norm(p, "initial_norm", _conv(p, "initial_conv", x)))
    for name in _blocks(cfg, "res_blocks"):
        x = _block(p, name, x)
    x = spread(x)
    for name in _blocks(cfg, "post_upsample_res_blocks"):
        x = _block(p, name, x)
    return _conv(p, "final_conv", x)


def upsampled_shape(cfg: UpsamplerConfig, frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Latent frames, height and width that come out."""
    up, down = cfg.factors[1], 1 if cfg.rational is None else cfg.rational[1]
    size = lambda n: -(-n * up // down)  # noqa: E731
    return 2 * frames - 1 if cfg.temporal_upsample else frames, size(height), size(width)


def upsample(params: Params, cfg: UpsamplerConfig, latents: Tensor) -> Tensor:
    """Latents -> latents of `upsampled_shape`.

    Args:
        params: leaves of `param_specs(cfg)`, used in the latents' dtype.
        latents: `[B, in_channels, T, H, W]`, NOT normalised.

    Raises:
        UserError: another shape or dtype.
    """
    if latents.ndim != 5 or latents.shape[1] != cfg.in_channels or min(latents.shape) < 1:
        raise UserError(f"latents have shape {list(latents.shape)}, expected [B, {cfg.in_channels}, T, H, W]")
    if not latents.dtype.is_floating_point:
        raise UserError(f"latents have dtype {latents.dtype}, expected a floating dtype")
    spread = lambda x: _spread(params, cfg, x)  # noqa: E731
    if cfg.dims == 2:
        return _per_frame(lambda x: _whole(params, cfg, x, spread), latents)
    if cfg.temporal_upsample:
        return _whole(params, cfg, latents, lambda x: _spread_frames(params, cfg, x))
    return _whole(params, cfg, latents, lambda x: _per_frame(spread, x))


def to_json(cfg: UpsamplerConfig) -> dict[str, Any]:
    """`config.json` of a Diffusers upsampler folder; read it back with `config_files.read_config`."""
    return {"_class_name": CLASS_NAME, **dataclasses.asdict(cfg)}
