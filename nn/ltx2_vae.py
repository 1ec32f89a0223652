"""LTX-2's video VAEs (2.0, 2.3, 2.5: 128 channels, 8 frames of 32x32 pixels to one) as pure functions.

Key names, config fields and numbers are those of Diffusers' `AutoencoderKLLTX2Video`. Latents are normalised here and
nowhere else: `encode` returns and `decode` takes zero mean and unit variance per channel, by the leaves `latents_mean`
and `latents_std`. The first frame stands alone, so 8k+1 frames are k+1 latent frames.

Encoders are causal in time and take a video whole or in chunks. Decoders are causal or not; the published ones are
not: a frame then depends on later ones, and in chunks frames come out once those have been seen (`frames_ready`).
In chunks or whole, the numbers are the same.
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
from core.keys import Key
from core.trees import Params
from nn import ltx2_vae_blocks as blocks
from nn.config_files import open_model, save_model
from nn.layers import wide
from nn.ltx2_vae_blocks import REACH, Stream, VaeRun
from nn.ltx2_vae_config import PRESETS, LTX2VaeConfig, decoder_blocks, encoder_blocks, param_specs
from nn.wan_vae import LOGVAR_RANGE, split
from nn.wan_vae_blocks import Cache

__all__ = ["PRESETS", "Cache", "LTX2VaeConfig", "VaeRun", "param_specs"]

CLASS_NAME = "AutoencoderKLLTX2Video"


# --- latents and pixels ---------------------------------------------------------------------------------------


def _statistics(params: Params, cfg: LTX2VaeConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of what the encoder gives, `[C, 1, 1, 1]`, float32 or wider."""
    mean, std = (params[k].to(x.device, wide(x)).view(-1, 1, 1, 1) for k in ("latents_mean", "latents_std"))
    return mean, std / cfg.scaling_factor


def normalise(params: Params, cfg: LTX2VaeConfig, raw: Tensor) -> Tensor:
    """What the encoder gives, `[B, C, t, h, w]` -> latents of zero mean and unit variance, in its dtype."""
    mean, std = _statistics(params, cfg, raw)
    return ((raw - mean) / std).to(raw.dtype)


def denormalise(params: Params, cfg: LTX2VaeConfig, latents: Tensor) -> Tensor:
    """Inverse of `normalise`: what the decoder takes."""
    mean, std = _statistics(params, cfg, latents)
    return (latents * std + mean).to(latents.dtype)


def fold_pixels(cfg: LTX2VaeConfig, video: Tensor) -> Tensor:
    """Squares of `patch_size` pixels to channels, ordered (colour, column, row)."""
    return rearrange(video, "b c t (h p) (w q) -> b (c q p) t h w", p=cfg.patch_size, q=cfg.patch_size)


def unfold_pixels(cfg: LTX2VaeConfig, x: Tensor) -> Tensor:
    """Inverse of `fold_pixels`."""
    return rearrange(x, "b (c q p) t h w -> b c t (h p) (w q)", p=cfg.patch_size, q=cfg.patch_size)


# --- checks ---------------------------------------------------------------------------------------------------


def check_video(cfg: LTX2VaeConfig, video: Tensor, *, continues: bool = False) -> None:
    """Raises UserError, with the nearest valid sizes, for a video that cannot be encoded.

    A chunk that `continues` a video has a multiple of `cfg.factor_t` frames, a first one that plus 1.
    """
    if video.ndim != 5 or video.shape[1] != cfg.in_channels:
        raise UserError(f"video has shape {list(video.shape)}, expected [B, {cfg.in_channels}, T, H, W]")
    if not video.dtype.is_floating_point:
        raise UserError(f"video has dtype {video.dtype}, expected a floating dtype with values in [-1, 1]")
    frames, height, width = video.shape[2:]
    factor = cfg.factor_t
    if continues and (frames < 1 or frames % factor):
        raise UserError(f"a chunk that continues a video has {frames} frames, expected a multiple of {factor}")
    check_geometry(frames + continues, height, width, temporal=factor, spatial=cfg.factor_s)
    _check_size("video", video, cfg.encoder_spatial_padding_mode, cfg.factor_s)


def _check_size(what: str, x: Tensor, padding: str, unit: int) -> None:
    """A border of reflected pixels needs a second one to reflect."""
    if padding == "reflect" and min(x.shape[3:]) < 2 * unit:
        raise UserError(f"{what} of {x.shape[3]}x{x.shape[4]}: reflected borders need at least {2 * unit} each way")


def check_latents(cfg: LTX2VaeConfig, latents: Tensor) -> None:
    """Raises UserError for anything but floating latents `[B, C, t, h, w]` that the decoder's borders allow."""
    if latents.ndim != 5 or latents.shape[1] != cfg.latent_channels or min(latents.shape) < 1:
        raise UserError(f"latents have shape {list(latents.shape)}, expected [B, {cfg.latent_channels}, t, h, w]")
    if not latents.dtype.is_floating_point:
        raise UserError(f"latents have dtype {latents.dtype}, expected a floating dtype")
    _check_size("latents", latents, cfg.decoder_spatial_padding_mode, 1)


def _check_conditions(cfg: LTX2VaeConfig, batch: int, timestep: Tensor | None, noise: Key | None) -> None:
    """Timestep and noise go with configs that have them, and only with those."""
    if (timestep is not None) != cfg.timestep_conditioning:
        raise UserError(f"timestep is {timestep}, but timestep_conditioning is {cfg.timestep_conditioning}")
    if timestep is not None and timestep.shape not in ((), (1,), (batch,)):
        raise UserError(f"timestep has shape {list(timestep.shape)}, expected [] or [{batch}], one per video")
    if (noise is not None) != any(cfg.decoder_inject_noise):
        raise UserError(f"noise is {noise}, but decoder_inject_noise is {list(cfg.decoder_inject_noise)}")


def _check_cache(cache: Cache, stream: Stream, first: str) -> None:
    """A cache is empty or of the same function and kind of convolution."""
    if cache and stream.entry(first) not in cache:
        raise UserError(
            f"cache has no entry {stream.entry(first)}: pass on what the chunk before returned, of the same function "
            "and equally causal, or {} at the start"
        )


# --- encoding -------------------------------------------------------------------------------------------------


def _encoder_stream(cfg: LTX2VaeConfig, cache: Cache, last: bool, causal: bool | None, run: VaeRun) -> Stream:
    causal = cfg.encoder_causal if causal is None else causal
    return Stream(cache, causal, last, cfg.encoder_spatial_padding_mode, cfg.resnet_norm_eps, run=run)


def _check_chunked(stream: Stream) -> None:
    if not stream.causal:
        raise UserError("an encoder that is not causal takes a video at once: leave chunk out, or set causal=True")


def _encode(params: Params, cfg: LTX2VaeConfig, frames: Tensor, stream: Stream) -> Tensor:
    """Frames of one chunk -> means and one log variance, `[B, C + 1, t, h, w]`, not normalised."""
    x = blocks.conv(params, "encoder.conv_in", fold_pixels(cfg, frames), stream)
    for block in encoder_blocks(cfg):
        x = blocks.down(params, block, x, stream)
    return blocks.conv(params, "encoder.conv_out", stream.run.activate(x), stream)


def encode_moments(
    params: Params,
    cfg: LTX2VaeConfig,
    video: Tensor,
    *,
    chunk: int | None = None,
    causal: bool | None = None,
    run: VaeRun = VaeRun(),
) -> tuple[Tensor, Tensor]:
    """Mean and log variance of the posterior, each `[B, C, t, h, w]`, NOT normalised; see `encode`.

    All channels share one log variance (a view), clamped to `LOGVAR_RANGE`.
    """
    check_video(cfg, video)
    parts = split(video, chunk, cfg.factor_t)
    cache, out = {}, []
    for i, part in enumerate(parts):
        stream = _encoder_stream(cfg, cache, i + 1 == len(parts), causal, run)
        if len(parts) > 1:
            _check_chunked(stream)
        out.append(_encode(params, cfg, part, stream))
    moments = out[0] if len(out) == 1 else torch.cat(out, dim=2)
    mean, logvar = moments.split([cfg.latent_channels, 1], dim=1)
    return mean, logvar.clamp(*LOGVAR_RANGE).expand_as(mean)


def encode(
    params: Params,
    cfg: LTX2VaeConfig,
    video: Tensor,
    *,
    chunk: int | None = None,
    causal: bool | None = None,
    run: VaeRun = VaeRun(),
) -> Tensor:
    """Video in [-1, 1] -> normalised latents, the posterior's mean.

    Args:
        params: leaves of `param_specs(cfg)`, used in the video's dtype.
        video: `[B, 3, T, H, W]`, T = factor_t * k + 1, H and W multiples of `cfg.factor_s`.
        chunk: latent frames at a time, to save memory; None takes the whole video at once. Equal results.
        causal: None as the config says. Diffusers cannot make a causal model not causal; False here does.
        run: how layers run.

    Returns:
        `[B, C, k + 1, H / s, W / s]` in the video's dtype.

    Raises:
        UserError: with the nearest valid sizes; a `chunk` for an encoder that is not causal.
    """
    return normalise(params, cfg, encode_moments(params, cfg, video, chunk=chunk, causal=causal, run=run)[0])


def sample_latents(params: Params, cfg: LTX2VaeConfig, mean: Tensor, logvar: Tensor, noise: Tensor) -> Tensor:
    """A draw `mean + exp(logvar / 2) * noise` from the posterior of `encode_moments`, normalised."""
    return normalise(params, cfg, mean + torch.exp(0.5 * logvar) * noise)


def encode_chunk(
    params: Params,
    cfg: LTX2VaeConfig,
    frames: Tensor,
    cache: Cache,
    *,
    last: bool = False,
    causal: bool | None = None,
    run: VaeRun = VaeRun(),
) -> tuple[Tensor, Cache]:
    """The next frames of a video -> their normalised latents, and the cache for the chunk after.

    Args:
        frames: `[B, 3, T, H, W]`; T = factor_t * k + 1 in the first chunk, factor_t * k in later ones.
        cache: `{}` for the first chunk, else what the call before returned; it is left as it is.
        last: no chunk follows: nothing is kept and the cache that comes out is `{}`.

    Raises:
        UserError: sizes as in `encode`; an encoder that is not causal; a cache of another size or another function.
    """
    check_video(cfg, frames, continues=bool(cache))
    stream = _encoder_stream(cfg, dict(cache), last, causal, run)
    _check_chunked(stream)
    _check_cache(cache, stream, "encoder.conv_in")
    mean = _encode(params, cfg, frames, stream)[:, : cfg.latent_channels]
    return normalise(params, cfg, mean), stream.cache


# --- decoding -------------------------------------------------------------------------------------------------


def _sections(cfg: LTX2VaeConfig) -> list[tuple[Callable[[Params, Tensor, Stream], Tensor], int]]:
    """The decoder from latents to pixels, and after each section the frames per latent frame."""
    middle, *ups = decoder_blocks(cfg)

    def low(params, x, stream):
        x = blocks.conv(params, "decoder.conv_in", denormalise(params, cfg, x), stream)
        return blocks.block(params, middle, x, stream)

    def top(params, x, stream):
        pair = None
        if cfg.timestep_conditioning:
            embedded = blocks.embed(params, "decoder.time_embedder", stream, x.dtype)
            pair = blocks.modulations(params["decoder.scale_shift_table"], embedded)[0]
        return unfold_pixels(cfg, blocks.conv(params, "decoder.conv_out", stream.run.activate(x, pair), stream))

    out, factor = [(low, 1)], 1
    for block in ups:
        factor *= 1 if block.change is None else block.change.factor_t
        out.append((lambda params, x, stream, block=block: blocks.up(params, block, x, stream), factor))
    return [*out, (top, factor)]


def _rise(params: Params, sections: Sequence, x: Tensor, stream: Stream, chunk: int | None) -> list[Tensor]:
    """`x` through the sections, `chunk` latent frames' worth of frames at a time: what a section gives is taken up in
    parts by the next, so that what the low ones held back until the end does not fill the high ones at once."""
    if not sections:
        return [x]
    (section, factor), *rest = sections
    y = section(params, x, stream)
    parts = [y] if chunk is None else y.split(chunk * factor, dim=2)
    out = []
    for i, part in enumerate(parts):
        last = stream.last and i + 1 == len(parts)
        if last or part.shape[2] > 0:
            out += _rise(params, rest, part, dataclasses.replace(stream, last=last), chunk)
    return out


def _decoder_stream(params, cfg: LTX2VaeConfig, latents: Tensor, cache: Cache, last, timestep, causal, noise, run):
    """A pass of the decoder, its conditions checked."""
    _check_conditions(cfg, len(latents), timestep, noise)
    if timestep is not None:
        # Diffusers' arithmetic: angles are of the scaled timestep.
        scaled = timestep.to(latents.device) * params["decoder.timestep_scale_multiplier"].to(wide(timestep))
        timestep = scaled.expand(len(latents)) if scaled.ndim == 0 else scaled
    causal = cfg.decoder_causal if causal is None else causal
    mode = cfg.decoder_spatial_padding_mode
    return Stream(cache, causal, last, mode, cfg.resnet_norm_eps, timestep, noise, run)


def _decode(params: Params, cfg: LTX2VaeConfig, latents: Tensor, stream: Stream, chunk: int | None, clamp: bool):
    """Latents of one chunk -> the frames that are ready, `[B, 3, T, H, W]`."""
    parts = _rise(params, _sections(cfg), latents, stream, chunk)
    if not parts:
        batch, scale = len(latents), cfg.factor_s
        return latents.new_zeros(batch, cfg.out_channels, 0, *(n * scale for n in latents.shape[3:]))
    video = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return video.clamp(-1.0, 1.0) if clamp else video


def decode(
    params: Params,
    cfg: LTX2VaeConfig,
    latents: Tensor,
    *,
    chunk: int | None = None,
    causal: bool | None = None,
    timestep: Tensor | None = None,
    noise: Key | None = None,
    clamp: bool = True,
    run: VaeRun = VaeRun(),
) -> Tensor:
    """Normalised latents -> video.

    Args:
        params: leaves of `param_specs(cfg)`, used in the latents' dtype.
        latents: `[B, C, t, h, w]`.
        chunk: latent frames at a time, to save memory; None takes all at once. Equal results.
        causal: None as the config says. Diffusers cannot make a causal model not causal; False here does.
        timestep: `[B]` or `[]` in [0, 1], for configs with `timestep_conditioning`: how noisy the latents are.
        noise: a key, for configs with `decoder_inject_noise`.
        clamp: to [-1, 1]. A loss needs False: the clamp has no gradient outside.
        run: how layers run.

    Returns:
        `[B, 3, factor_t * (t - 1) + 1, s h, s w]` in the latents' dtype.

    Raises:
        UserError: latents of another shape; a timestep or noise that the config does not have, or lacks.
    """
    check_latents(cfg, latents)
    cache, out, parts = {}, [], split(latents, chunk, 1)
    for i, part in enumerate(parts):
        last = i + 1 == len(parts)
        stream = _decoder_stream(params, cfg, part, cache, last, timestep, causal, noise, run)
        out.append(_decode(params, cfg, part, stream, chunk, clamp))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def decode_chunk(
    params: Params,
    cfg: LTX2VaeConfig,
    latents: Tensor,
    cache: Cache,
    *,
    last: bool = False,
    causal: bool | None = None,
    timestep: Tensor | None = None,
    noise: Key | None = None,
    clamp: bool = True,
    run: VaeRun = VaeRun(),
) -> tuple[Tensor, Cache]:
    """The next latents of a video -> the frames that are now ready, and the cache for the chunk after.

    Args:
        latents: `[B, C, t, h, w]`, normalised, any t >= 1.
        cache: `{}` for the first chunk, else what the call before returned; it is left as it is.
        last: no chunk follows: all frames come out, nothing is kept and the cache that comes out is `{}`.
        causal, timestep, noise, clamp, run: as in `decode`, equal for all chunks of a video.

    Returns:
        `[B, 3, T, H, W]` and the cache. A causal decoder gives factor_t * t frames, factor_t - 1 fewer for the first
        chunk. One that is not is behind by the frames it must see first: T is then the difference of `frames_ready`
        after and before, and may be 0; the last chunk brings the rest.

    Raises:
        UserError: as `decode`; a cache of another size, another function or another kind of decoder.
    """
    check_latents(cfg, latents)
    stream = _decoder_stream(params, cfg, latents, dict(cache), last, timestep, causal, noise, run)
    _check_cache(cache, stream, "decoder.conv_in")
    return _decode(params, cfg, latents, stream, latents.shape[2], clamp), stream.cache


def frames_ready(cfg: LTX2VaeConfig, latent_frames: int, *, causal: bool | None = None) -> int:
    """Frames that a stream has given once it has taken `latent_frames` and more are to come.

    For the published decoders none before the 23rd latent frame (2.0) or the 15th (2.3).
    """
    behind = 0 if (cfg.decoder_causal if causal is None else causal) else REACH // 2
    middle, *ups = decoder_blocks(cfg)
    n = latent_frames - behind * (1 + 2 * middle.layers)
    for block in ups:
        n -= 0 if block.enter is None else 2 * behind
        if block.change is not None:
            n = max(0, (n - behind) * block.change.factor_t - (block.change.factor_t - 1))
        n -= 2 * behind * block.layers
    return max(0, n - behind)


# --- layout and files -----------------------------------------------------------------------------------------


def to_json(cfg: LTX2VaeConfig) -> dict[str, Any]:
    """`config.json` of a Diffusers VAE folder."""
    return {"_class_name": CLASS_NAME, **json.loads(json.dumps(dataclasses.asdict(cfg)))}


def save(folder: str | Path, params: Params, cfg: LTX2VaeConfig) -> None:
    """Writes `config.json` and safetensors that Diffusers' `AutoencoderKLLTX2Video.from_pretrained` reads too.

    Raises UserError for parameters that do not fit the config, before anything is written.
    """
    save_model(folder, params, param_specs(cfg), to_json(cfg))


def open_folder(folder: str | Path) -> tuple[LazyTree, LTX2VaeConfig]:
    """A VAE folder in Diffusers' form, its leaves not read yet.

    Raises one UserError naming the file and every fault of config, keys and shapes.
    """
    return open_model(folder, LTX2VaeConfig, CLASS_NAME, param_specs)


def load(folder: str | Path, *, device="cpu", dtype: torch.dtype | None = None) -> tuple[Params, LTX2VaeConfig]:
    """`open_folder`, read to `device` in `dtype` (None: as stored); statistics and multiplier stay float32."""
    tree, cfg = open_folder(folder)
    kept = {k for k, spec in param_specs(cfg).items() if spec.keep_fp32}
    cast = lambda k: torch.float32 if k in kept and dtype is not None else dtype  # noqa: E731
    return {k: leaf.read().to(device, cast(k)) for k, leaf in tree.items()}, cfg
