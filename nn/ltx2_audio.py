"""LTX-2's audio VAE as pure functions: log-mel spectrograms to latents at a quarter of the frames and bands, and back.

Key names, config fields and numbers are those of Diffusers' `AutoencoderKLLTX2Audio`. Spectrograms are
`[B, channels, T, mel]`, as `nn.ltx2_audio_mel.log_mel` makes them, latents `[B, C, t, mel / 4]`. Latents are normalised
here and nowhere else; `nn.ltx2_inputs.audio_tokens` makes tokens of them. Every layer is causal in time: latent frame k
sees spectrogram frames up to 4k, and T = 4k + 1 frames are k + 1 latent frames.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core import specs
from core.errors import UserError, raise_faults
from core.specs import ParamSpec, Specs
from core.trees import Params
from nn.layers import wide
from nn.ltx2_audio_mel import MelConfig
from nn.wan_vae_blocks import conv_specs

CLASS_NAME = "AutoencoderKLLTX2Audio"
FIXED = {  # entries of the public config that have one value in every released VAE
    "norm_type": "pixel",
    "causality_axis": "height",
    "is_causal": True,
    "attn_resolutions": None,
    "mid_block_add_attention": False,
    "double_z": True,
    "dropout": 0.0,
}
FACTOR = 4
"""Spectrogram frames and bands to one of the latents'."""

NORM_EPS = 1e-6
LOGVAR_RANGE = (-30.0, 20.0)  # as Diffusers clamps it


@dataclasses.dataclass(frozen=True)
class AudioVaeConfig:
    """Architecture; field names are those of a Diffusers `audio_vae/config.json`.

    `resolution` is kept for the file's sake: it matters to variants with attention only.
    """

    base_channels: int = 128
    output_channels: int = 2
    ch_mult: tuple[int, ...] = (1, 2, 4)
    num_res_blocks: int = 2
    in_channels: int = 2
    resolution: int = 256
    latent_channels: int = 8
    sample_rate: int = 16000
    mel_hop_length: int = 160
    mel_bins: int = 64

    def __post_init__(self):
        object.__setattr__(self, "ch_mult", tuple(self.ch_mult))
        raise_faults("AudioVaeConfig", _config_faults(self))

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, from the spectrogram's size down."""
        return tuple(self.base_channels * m for m in self.ch_mult)

    @property
    def latent_mel_bins(self) -> int:
        """Bands of the latents."""
        return self.mel_bins // FACTOR

    @property
    def mel(self) -> MelConfig:
        """The front end whose spectrograms this VAE encodes: bands up to half the sampling rate."""
        return MelConfig(
            sampling_rate=self.sample_rate, hop_length=self.mel_hop_length, n_mels=self.mel_bins,
            f_max=self.sample_rate / 2,
        )  # fmt: skip

    @property
    def latents_per_second(self) -> float:
        """Latent frames that a second of sound becomes."""
        return self.sample_rate / self.mel_hop_length / FACTOR


def _config_faults(cfg: AudioVaeConfig) -> list[str]:
    sizes = [f.name for f in dataclasses.fields(cfg) if f.type is int]
    faults = [f"{n} must be at least 1, got {getattr(cfg, n)}" for n in sizes if getattr(cfg, n) < 1]
    if len(cfg.ch_mult) != 3 or min(cfg.ch_mult) < 1:
        faults.append(f"ch_mult must be three positive integers (two halvings), got {list(cfg.ch_mult)}")
    if cfg.mel_bins % FACTOR:
        faults.append(f"mel_bins must be a multiple of {FACTOR}, got {cfg.mel_bins}")
    if cfg.base_channels != (width := cfg.latent_channels * cfg.latent_mel_bins):
        # Diffusers gives the statistics base_channels entries; they belong to a token's features.
        faults.append(f"base_channels {cfg.base_channels} must equal latent_channels * mel_bins / {FACTOR} = {width}")
    return faults


PRESETS = {"ltx-2": AudioVaeConfig()}
"""One audio VAE serves LTX-2 and LTX-2.3."""


# --- parameters -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Level:
    """Residual blocks at one size, `(name, channels in, channels out)`, then the key of a change of size or None."""

    resnets: tuple[tuple[str, int, int], ...]
    resample: str | None


def _resnets(at: str, count: int, n_in: int, n_out: int) -> tuple[tuple[str, int, int], ...]:
    return tuple((f"{at}.block.{j}", n_in if j == 0 else n_out, n_out) for j in range(count))


def encoder_levels(cfg: AudioVaeConfig) -> Iterator[Level]:
    """From the spectrogram's size down, with a halving after all but the last."""
    before = cfg.base_channels
    for i, width in enumerate(cfg.widths):
        at = f"encoder.down.{i}"
        resample = f"{at}.downsample.conv" if i < len(cfg.widths) - 1 else None
        yield Level(_resnets(at, cfg.num_res_blocks, before, width), resample)
        before = width


def decoder_levels(cfg: AudioVaeConfig) -> Iterator[Level]:
    """From the latents' size up; levels are numbered by their size, so from last to first."""
    before = cfg.widths[-1]
    for i, width in reversed(list(enumerate(cfg.widths))):
        at = f"decoder.up.{i}"
        resample = f"{at}.upsample.conv.conv" if i > 0 else None
        yield Level(_resnets(at, cfg.num_res_blocks + 1, before, width), resample)
        before = width


def _resnet_specs(name: str, n_in: int, n_out: int) -> Specs:
    out = conv_specs(f"{name}.conv1.conv", n_in, n_out, 3, 3) | conv_specs(f"{name}.conv2.conv", n_out, n_out, 3, 3)
    return out if n_in == n_out else out | conv_specs(f"{name}.nin_shortcut.conv", n_in, n_out, 1, 1)


def _half_specs(part: str, levels: Iterator[Level], middle: int, ends: tuple[int, int, int, int]) -> Specs:
    """Specs of encoder or decoder; `ends`: channels into and out of its first and its last convolution."""
    out = conv_specs(f"{part}.conv_in.conv", *ends[:2], 3, 3) | conv_specs(f"{part}.conv_out.conv", *ends[2:], 3, 3)
    for name in ("block_1", "block_2"):
        out |= _resnet_specs(f"{part}.mid.{name}", middle, middle)
    for level in levels:
        for resnet in level.resnets:
            out |= _resnet_specs(*resnet)
        if level.resample is not None:
            width = level.resnets[-1][2]
            out |= conv_specs(level.resample, width, width, 3, 3)
    return out


def param_specs(cfg: AudioVaeConfig) -> Specs:
    """Specs of every leaf, keys and shapes as in the Diffusers checkpoint, with the latents' statistics."""
    deep, z = cfg.widths[-1], cfg.latent_channels
    out = {
        "latents_mean": ParamSpec((cfg.base_channels,), keep_fp32=True),
        "latents_std": ParamSpec((cfg.base_channels,), init=specs.ONES, keep_fp32=True),
    }
    out |= _half_specs("encoder", encoder_levels(cfg), deep, (cfg.in_channels, cfg.base_channels, deep, 2 * z))
    return out | _half_specs("decoder", decoder_levels(cfg), deep, (z, deep, cfg.widths[0], cfg.output_channels))


# --- layers -----------------------------------------------------------------------------------------------------


def _conv(p: Mapping[str, Tensor], name: str, x: Tensor, padding: tuple[int, int, int, int], stride: int = 1) -> Tensor:
    """2-D convolution of `[B, C, T, mel]`; zeros `(mel before, mel after, time before, time after)` around it."""
    weight, bias = p[f"{name}.weight"].to(x.dtype), p[f"{name}.bias"].to(x.dtype)
    return F.conv2d(F.pad(x, padding), weight, bias, stride)


def causal_conv(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Convolution that sees a frame and those before it, and bands on both sides; sizes stay."""
    reach = p[f"{name}.weight"].shape[-1] - 1
    return _conv(p, name, x, (reach // 2, reach // 2, reach, 0))


def activate(x: Tensor) -> Tensor:
    """`silu(x / rms(x))`, with the root mean square over channels in float32 or wider."""
    scale = torch.rsqrt(x.to(wide(x)).square().mean(1, keepdim=True) + NORM_EPS)
    return F.silu(x * scale.to(x.dtype))


def _resnet(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    h = causal_conv(p, f"{name}.conv1.conv", activate(x))
    h = causal_conv(p, f"{name}.conv2.conv", activate(h))
    shortcut = f"{name}.nin_shortcut.conv"
    return h + (causal_conv(p, shortcut, x) if f"{shortcut}.weight" in p else x)


def _middle(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return _resnet(p, f"{name}.block_2", _resnet(p, f"{name}.block_1", x))


def _halve(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """`[B, C, T, mel] -> [B, C, ceil(T / 2), mel / 2]`, causal in time."""
    return _conv(p, name, x, (0, 1, 2, 0), stride=2)


def _double(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """`[B, C, T, mel] -> [B, C, 2T - 1, 2 mel]`: the first frame stays alone, as it was encoded."""
    return causal_conv(p, name, F.interpolate(x, scale_factor=2.0, mode="nearest"))[:, :, 1:]


# --- latents ----------------------------------------------------------------------------------------------------


def _statistics(params: Mapping[str, Tensor], cfg: AudioVaeConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel and band, `[C, 1, mel]`, float32 or wider; stored in a token's order."""
    shape = (cfg.latent_channels, 1, cfg.latent_mel_bins)
    mean, std = (params[name].to(x.device, wide(x)).view(shape) for name in ("latents_mean", "latents_std"))
    return mean, std


def normalise(params: Mapping[str, Tensor], cfg: AudioVaeConfig, raw: Tensor) -> Tensor:
    """What the encoder gives, `[B, C, t, mel]` -> latents of zero mean and unit variance, in its dtype."""
    mean, std = _statistics(params, cfg, raw)
    return ((raw - mean) / std).to(raw.dtype)


def denormalise(params: Mapping[str, Tensor], cfg: AudioVaeConfig, latents: Tensor) -> Tensor:
    """Inverse of `normalise`: what the decoder takes."""
    mean, std = _statistics(params, cfg, latents)
    return (latents * std + mean).to(latents.dtype)


def latent_frames(frames: int) -> int:
    """Latent frames of a spectrogram of `frames`."""
    return -(-frames // FACTOR)


def decoded_frames(latent: int) -> int:
    """Spectrogram frames that `latent` latent frames are decoded to."""
    return FACTOR * (latent - 1) + 1


def _check(x: Tensor, what: str, channels: int, bins: int) -> None:
    """Raises UserError for anything but floating `[B, channels, T, bins]` with at least one frame."""
    if x.ndim != 4 or (x.shape[1], x.shape[3]) != (channels, bins) or min(x.shape) < 1:
        raise UserError(f"{what}: shape {list(x.shape)}, expected [B, {channels}, T, {bins}]")
    if not x.dtype.is_floating_point:
        raise UserError(f"{what}: dtype {x.dtype}, expected a floating dtype")


# --- encoding and decoding --------------------------------------------------------------------------------------


def encode_moments(params: Params, cfg: AudioVaeConfig, mel: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance of the posterior, each `[B, C, t, mel / 4]`, NOT normalised; see `encode`."""
    _check(mel, "mel spectrogram", cfg.in_channels, cfg.mel_bins)
    x = causal_conv(params, "encoder.conv_in.conv", mel)
    for level in encoder_levels(cfg):
        for name, _, _ in level.resnets:
            x = _resnet(params, name, x)
        x = x if level.resample is None else _halve(params, level.resample, x)
    x = activate(_middle(params, "encoder.mid", x))
    mean, logvar = causal_conv(params, "encoder.conv_out.conv", x).chunk(2, dim=1)
    return mean, logvar.clamp(*LOGVAR_RANGE)


def encode(params: Params, cfg: AudioVaeConfig, mel: Tensor) -> Tensor:
    """Log-mel spectrogram -> normalised latents, the posterior's mean.

    Args:
        params: leaves of `param_specs(cfg)`, used in the spectrogram's dtype.
        mel: `[B, in_channels, T, mel_bins]`, any T from 1.

    Returns:
        `[B, latent_channels, latent_frames(T), mel_bins / 4]` in the spectrogram's dtype.

    Raises:
        UserError: another shape or dtype.
    """
    return normalise(params, cfg, encode_moments(params, cfg, mel)[0])


def sample_latents(params: Params, cfg: AudioVaeConfig, mean: Tensor, logvar: Tensor, noise: Tensor) -> Tensor:
    """A draw `mean + exp(logvar / 2) * noise` from the posterior of `encode_moments`, normalised."""
    return normalise(params, cfg, mean + torch.exp(0.5 * logvar) * noise)


def decode(params: Params, cfg: AudioVaeConfig, latents: Tensor) -> Tensor:
    """Normalised latents -> log-mel spectrogram.

    Args:
        params: leaves of `param_specs(cfg)`, used in the latents' dtype.
        latents: `[B, latent_channels, t, mel_bins / 4]`.

    Returns:
        `[B, output_channels, 4 (t - 1) + 1, mel_bins]` in the latents' dtype.

    Raises:
        UserError: another shape or dtype.
    """
    _check(latents, "audio latents", cfg.latent_channels, cfg.latent_mel_bins)
    x = causal_conv(params, "decoder.conv_in.conv", denormalise(params, cfg, latents))
    x = _middle(params, "decoder.mid", x)
    for level in decoder_levels(cfg):
        for name, _, _ in level.resnets:
            x = _resnet(params, name, x)
        x = x if level.resample is None else _double(params, level.resample, x)
    return causal_conv(params, "decoder.conv_out.conv", activate(x))


def to_json(cfg: AudioVaeConfig) -> dict[str, Any]:
    """`config.json` of a Diffusers audio VAE folder; read it back with `config_files.read_config` and `FIXED`."""
    return {"_class_name": CLASS_NAME, **dataclasses.asdict(cfg), "ch_mult": list(cfg.ch_mult), **FIXED}
