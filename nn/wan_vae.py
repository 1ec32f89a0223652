"""Wan's video VAEs (2.1: 16 channels at 1/8 size; 2.2: 48 channels at 1/16) as pure functions.

Key names, config fields and numbers are those of Diffusers' `AutoencoderKLWan`. Latents are normalised here
and nowhere else: `encode` returns and `decode` takes zero mean and unit variance per channel. The first frame
stands alone, so 4k+1 frames are k+1 latent frames; every later latent frame is four frames.

A video goes through whole, or in chunks with a cache that goes in and comes out. Both run the same code and
give the same numbers, since every layer is causal in time.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from core.checkpoint import LazyTree
from core.errors import UserError
from core.geometry import check_geometry
from core.trees import Params
from nn import wan_vae_blocks as blocks
from nn.config_files import open_model, save_model
from nn.layers import wide
from nn.wan_vae_blocks import Cache, Stream, VaeRun
from nn.wan_vae_config import PRESETS, Stage, WanVaeConfig, decoder_stages, encoder_stages, param_specs

__all__ = ["PRESETS", "Cache", "VaeRun", "WanVaeConfig", "param_specs"]

CLASS_NAME = "AutoencoderKLWan"
# Fields of the public config that have one value in every released VAE: no attention beside the middle, and
# no dropout, which has no part in a pure function.
FIXED = {"attn_scales": [], "dropout": 0.0}
LOGVAR_RANGE = (-30.0, 20.0)  # as Diffusers clamps it


# --- latents and pixels ---------------------------------------------------------------------------------------


def _statistics(cfg: WanVaeConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per latent channel, `[C, 1, 1, 1]`, float32 or wider."""
    columns = (cfg.latents_mean, cfg.latents_std)
    mean, std = (torch.tensor(c, dtype=wide(x), device=x.device).view(-1, 1, 1, 1) for c in columns)
    return mean, std


def normalise(cfg: WanVaeConfig, raw: Tensor) -> Tensor:
    """What the encoder gives, `[B, C, t, h, w]` -> latents of zero mean and unit variance, in its dtype."""
    mean, std = _statistics(cfg, raw)
    return ((raw - mean) / std).to(raw.dtype)


def denormalise(cfg: WanVaeConfig, latents: Tensor) -> Tensor:
    """Inverse of `normalise`: what the decoder takes."""
    mean, std = _statistics(cfg, latents)
    return (latents * std + mean).to(latents.dtype)


def fold_pixels(cfg: WanVaeConfig, video: Tensor) -> Tensor:
    """Squares of `patch_size` pixels to channels, ordered (colour, column, row) as 2.2 has it."""
    return rearrange(video, "b c t (h p) (w q) -> b (c q p) t h w", p=cfg.patch, q=cfg.patch)


def unfold_pixels(cfg: WanVaeConfig, x: Tensor) -> Tensor:
    """Inverse of `fold_pixels`."""
    return rearrange(x, "b (c q p) t h w -> b c t (h p) (w q)", p=cfg.patch, q=cfg.patch)


# --- one chunk through encoder and decoder ---------------------------------------------------------------------


def _stream(cache: Cache, keep: bool, run: VaeRun) -> Stream:
    """A pass that uses `cache` up ({} at the start of a video) and fills the next one if it is to `keep` it."""
    return Stream(cache if cache else None, {} if keep else None, run)


def _future(stream: Stream) -> Cache:
    return {} if stream.future is None else stream.future


def _down(params: Params, stage: Stage, x: Tensor, stream: Stream) -> Tensor:
    h = x
    for name in stage.resnets:
        h = blocks.resnet(params, name, h, stream)
    if stage.resample is not None:
        h = blocks.per_frame(lambda frames: blocks.halve_size(params, f"{stage.resample}.resample.1", frames), h)
    if stage.temporal:
        h = blocks.halve_frames(params, f"{stage.resample}.time_conv", h, stream)
    if not stage.shortcut:
        return h
    return h + blocks.average_down(x, stage.widths[1], stage.factor_t, stage.factor_s, first=stream.first)


def _up(params: Params, stage: Stage, x: Tensor, stream: Stream) -> Tensor:
    h = x
    for name in stage.resnets:
        h = blocks.resnet(params, name, h, stream)
    if stage.temporal:
        h = blocks.double_frames(params, f"{stage.resample}.time_conv", h, stream)
    if stage.resample is not None:
        h = blocks.per_frame(lambda frames: blocks.double_size(params, f"{stage.resample}.resample.1", frames), h)
    if not stage.shortcut:
        return h
    return h + blocks.repeat_up(x, stage.resampled, stage.factor_t, stage.factor_s, first=stream.first)


def _encode(params: Params, cfg: WanVaeConfig, frames: Tensor, stream: Stream) -> Tensor:
    """Frames of one chunk -> means and log variances side by side, `[B, 2C, t, h, w]`, not normalised."""
    x = blocks.causal_conv(params, "encoder.conv_in", fold_pixels(cfg, frames), stream)
    for stage in encoder_stages(cfg):
        x = _down(params, stage, x, stream)
    x = blocks.middle(params, "encoder.mid_block", x, stream)
    x = blocks.causal_conv(params, "encoder.conv_out", x, stream, norm="encoder.norm_out")
    return blocks.conv(params, "quant_conv", x)


def lowest(params: Params, cfg: WanVaeConfig, latents: Tensor, stream: Stream) -> Tensor:
    """The decoder up to its first stage: everything at the latents' size, `[B, C, t, h, w]`."""
    x = blocks.conv(params, "post_quant_conv", denormalise(cfg, latents))
    x = blocks.causal_conv(params, "decoder.conv_in", x, stream)
    return blocks.middle(params, "decoder.mid_block", x, stream)


def raised(params: Params, cfg: WanVaeConfig, x: Tensor, stream: Stream, cut: Callable | None = None) -> Tensor:
    """From there to frames `[B, 3, T, H, W]`, not clamped; `cut(i, x)` may narrow what leaves stage i."""
    for i, stage in enumerate(decoder_stages(cfg)):
        x = _up(params, stage, x, stream)
        x = x if cut is None else cut(i, x)
    x = blocks.causal_conv(params, "decoder.conv_out", x, stream, norm="decoder.norm_out")
    return unfold_pixels(cfg, x)


def _decode(params: Params, cfg: WanVaeConfig, latents: Tensor, stream: Stream) -> Tensor:
    """Latents of one chunk -> its frames `[B, 3, T, H, W]`, not clamped."""
    return raised(params, cfg, lowest(params, cfg, latents, stream), stream)


def _clamped(video: Tensor, clamp: bool) -> Tensor:
    return video.clamp(-1.0, 1.0) if clamp else video


# --- checks ---------------------------------------------------------------------------------------------------


def check_video(cfg: WanVaeConfig, video: Tensor, *, continues: bool = False) -> None:
    """Raises UserError, with the nearest valid sizes, for a video that cannot be encoded.

    A chunk that `continues` a video has a multiple of the temporal factor of frames, a first one that plus 1.
    """
    channels = cfg.in_channels // cfg.patch**2
    if video.ndim != 5 or video.shape[1] != channels:
        raise UserError(f"video has shape {list(video.shape)}, expected [B, {channels}, T, H, W]")
    if not video.dtype.is_floating_point:
        raise UserError(f"video has dtype {video.dtype}, expected a floating dtype with values in [-1, 1]")
    frames, height, width = video.shape[2:]
    factor = cfg.scale_factor_temporal
    if continues and (frames < 1 or frames % factor):
        raise UserError(f"a chunk that continues a video has {frames} frames, expected a multiple of {factor}")
    check_geometry(frames + continues, height, width, temporal=factor, spatial=cfg.scale_factor_spatial)


def check_latents(cfg: WanVaeConfig, latents: Tensor) -> None:
    """Raises UserError for anything but floating latents `[B, z_dim, t, h, w]` with at least one frame and pixel."""
    if latents.ndim != 5 or latents.shape[1] != cfg.z_dim or min(latents.shape) < 1:
        raise UserError(f"latents have shape {list(latents.shape)}, expected [B, {cfg.z_dim}, t, h, w]")
    if not latents.dtype.is_floating_point:
        raise UserError(f"latents have dtype {latents.dtype}, expected a floating dtype")


def split(x: Tensor, chunk: int | None, factor: int) -> Sequence[Tensor]:
    """Parts of `chunk` latent frames along time; of a video (`factor` > 1) the first part has its lone frame too."""
    if chunk is None:
        return [x]
    if chunk < 1:
        raise UserError(f"chunk is {chunk}, expected at least 1 latent frame")
    sizes, left = [], (x.shape[2] - 1) // factor + 1
    while left > 0:
        sizes.append(min(chunk, left) * factor)
        left -= chunk
    return x.split([sizes[0] - factor + 1, *sizes[1:]], dim=2)


def in_a_row(step: Callable[[Tensor, Stream], Tensor], parts: Sequence[Tensor], run: VaeRun) -> Tensor:
    """Parts in a row with one cache, which each step uses up; the results joined along time."""
    out, cache = [], {}
    for i, part in enumerate(parts):
        stream = _stream(cache, i + 1 < len(parts), run)
        out.append(step(part, stream))
        cache = _future(stream)
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


# --- encoding -------------------------------------------------------------------------------------------------


def encode_moments(
    params: Params, cfg: WanVaeConfig, video: Tensor, *, chunk: int | None = None, run: VaeRun = VaeRun()
) -> tuple[Tensor, Tensor]:
    """Mean and log variance of the posterior, each `[B, C, t, h, w]`, NOT normalised; see `encode`.

    Log variances are clamped to `LOGVAR_RANGE`.
    """
    check_video(cfg, video)
    parts = split(video, chunk, cfg.scale_factor_temporal)
    moments = in_a_row(lambda part, stream: _encode(params, cfg, part, stream), parts, run)
    mean, logvar = moments.chunk(2, dim=1)
    return mean, logvar.clamp(*LOGVAR_RANGE)


def encode(
    params: Params, cfg: WanVaeConfig, video: Tensor, *, chunk: int | None = None, run: VaeRun = VaeRun()
) -> Tensor:
    """Video in [-1, 1] -> normalised latents, the posterior's mean.

    Args:
        params: leaves of `param_specs(cfg)`, used in the video's dtype.
        video: `[B, 3, T, H, W]`, T = 4k + 1, H and W multiples of `cfg.scale_factor_spatial`.
        chunk: latent frames at a time, to save memory; None takes the whole video at once. Equal results.
        run: how layers run.

    Returns:
        `[B, z_dim, k + 1, H / s, W / s]` in the video's dtype.

    Raises:
        UserError: with the nearest valid sizes.
    """
    return normalise(cfg, encode_moments(params, cfg, video, chunk=chunk, run=run)[0])


def sample_latents(cfg: WanVaeConfig, mean: Tensor, logvar: Tensor, noise: Tensor) -> Tensor:
    """A draw `mean + exp(logvar / 2) * noise` from the posterior of `encode_moments`, normalised."""
    return normalise(cfg, mean + torch.exp(0.5 * logvar) * noise)


def encode_chunk(
    params: Params, cfg: WanVaeConfig, frames: Tensor, cache: Cache, *, last: bool = False, run: VaeRun = VaeRun()
) -> tuple[Tensor, Cache]:
    """The next frames of a video -> their normalised latents, and the cache for the chunk after.

    Args:
        frames: `[B, 3, T, H, W]`; T = 4k + 1 in the first chunk, 4k in later ones.
        cache: `{}` for the first chunk, else what the call before returned; it is left as it is.
        last: no chunk follows: nothing is kept and the cache that comes out is `{}`.

    Raises:
        UserError: sizes as in `encode`; a cache of another size or another function.
    """
    check_video(cfg, frames, continues=bool(cache))
    stream = _stream(dict(cache), not last, run)
    mean = _encode(params, cfg, frames, stream)[:, : cfg.z_dim]
    return normalise(cfg, mean), _future(stream)


# --- decoding -------------------------------------------------------------------------------------------------


def decode(
    params: Params,
    cfg: WanVaeConfig,
    latents: Tensor,
    *,
    chunk: int | None = None,
    clamp: bool = True,
    run: VaeRun = VaeRun(),
) -> Tensor:
    """Normalised latents -> video.

    Args:
        params: leaves of `param_specs(cfg)`, used in the latents' dtype.
        latents: `[B, z_dim, t, h, w]`.
        chunk: latent frames at a time, to save memory; None takes all at once. Equal results.
        clamp: to [-1, 1], as Diffusers does. A loss needs False: the clamp has no gradient outside.
        run: how layers run.

    Returns:
        `[B, 3, 4 (t - 1) + 1, s h, s w]` in the latents' dtype.
    """
    check_latents(cfg, latents)
    step = lambda part, stream: _clamped(_decode(params, cfg, part, stream), clamp)  # noqa: E731
    return in_a_row(step, split(latents, chunk, 1), run)


def decode_chunk(
    params: Params,
    cfg: WanVaeConfig,
    latents: Tensor,
    cache: Cache,
    *,
    last: bool = False,
    clamp: bool = True,
    run: VaeRun = VaeRun(),
) -> tuple[Tensor, Cache]:
    """The next latents of a video -> their frames, and the cache for the chunk after.

    Args:
        latents: `[B, z_dim, t, h, w]`, normalised, any t >= 1.
        cache: `{}` for the first chunk, else what the call before returned; it is left as it is.
        last: no chunk follows: nothing is kept and the cache that comes out is `{}`.

    Returns:
        `[B, 3, 4 t, H, W]`, 3 frames fewer for the first chunk, and the cache: the last input frames of
        every causal layer by its key.

    Raises:
        UserError: latents of another shape; a cache of another size or another function.
    """
    check_latents(cfg, latents)
    stream = _stream(dict(cache), not last, run)
    return _clamped(_decode(params, cfg, latents, stream), clamp), _future(stream)


# --- layout and files -----------------------------------------------------------------------------------------


def channels_last(params: Params) -> Params:
    """The same values with convolution weights laid out channels-last, which activations then follow.

    Worth it on CUDA, where cuDNN's half-precision convolutions otherwise transpose in and out.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return {
        k: v.contiguous(memory_format=formats[v.ndim]) if k.endswith(".weight") else v for k, v in params.items()
    }


def to_json(cfg: WanVaeConfig) -> dict[str, Any]:
    """`config.json` of a Diffusers VAE folder."""
    fields = json.loads(json.dumps(dataclasses.asdict(cfg)))
    return {"_class_name": CLASS_NAME, **fields, **FIXED}


def save(folder: str | Path, params: Params, cfg: WanVaeConfig) -> None:
    """Writes `config.json` and safetensors that Diffusers' `AutoencoderKLWan.from_pretrained` reads too.

    Raises UserError for parameters that do not fit the config, before anything is written.
    """
    save_model(folder, params, param_specs(cfg), to_json(cfg))


def open_folder(folder: str | Path) -> tuple[LazyTree, WanVaeConfig]:
    """A VAE folder in Diffusers' form, its leaves not read yet.

    Raises one UserError naming the file and every fault of config, keys and shapes.
    """
    return open_model(folder, WanVaeConfig, CLASS_NAME, param_specs, fixed=FIXED)


def load(folder: str | Path, *, device="cpu", dtype: torch.dtype | None = None) -> tuple[Params, WanVaeConfig]:
    """`open_folder`, read to `device` in `dtype` (None: as stored)."""
    tree, cfg = open_folder(folder)
    return {k: leaf.read().to(device, dtype) for k, leaf in tree.items()}, cfg
