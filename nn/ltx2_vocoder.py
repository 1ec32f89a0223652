"""LTX-2's vocoders as pure functions: log-mel spectrograms to waveforms.

LTX-2 has one generator (24 kHz). LTX-2.3 has one at 16 kHz, and a second one that sees the mel spectrogram of the
first one's waveform and adds what a resampled waveform lacks at 48 kHz. Key names and numbers are those of Diffusers'
`LTX2Vocoder` and `LTX2VocoderWithBWE`.

All arithmetic is float32 or wider whatever the dtypes of weights and input: some hundred convolutions in a row lose
audible detail in half precision. A weight is cast where it is used, so no second copy of the weights is held.
"""

import contextlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from core import keys, specs
from core.errors import UserError
from core.specs import ParamSpec, Specs
from core.trees import Params
from nn.layers import wide
from nn.ltx2_audio_mel import MelConfig, causal_log_mel, fourier_basis, mel_filters
from nn.ltx2_vocoder_config import PRESETS, AnyVocoderConfig, BweVocoderConfig, VocoderConfig
from nn.ltx2_vocoder_filters import downsample, hann_upsample, kaiser_sinc, kaiser_upsample
from nn.wan_vae_blocks import conv_specs

__all__ = ["PRESETS", "BweVocoderConfig", "VocoderConfig", "constants", "init", "param_specs", "vocode"]

SNAKE_EPS = 1e-9
FINAL_SLOPE = 0.01  # of the last leaky ReLU, whatever the config says of the others
PARTS = ("vocoder", "bwe_generator")
"""Prefixes of the two generators with bandwidth extension."""


# --- parameters -------------------------------------------------------------------------------------------------


def _snake_specs(name: str, dim: int, *, beta: bool) -> Specs:
    """A period per channel and with `beta` a size, as logarithms."""
    return {f"{name}.{leaf}": ParamSpec((dim,)) for leaf in (("alpha", "beta") if beta else ("alpha",))}


def _activation_specs(name: str, dim: int, cfg: VocoderConfig, *, antialias: bool, beta: bool) -> Specs:
    """The parameters of one activation; the two filters around it are leaves of the public files."""
    if not cfg.snake:
        return {}
    if not antialias:
        return _snake_specs(name, dim, beta=beta)
    taps = ParamSpec((1, 1, cfg.antialias_kernel_size))
    filters = {f"{name}.{part}.filter": taps for part in ("upsample", "downsample")}
    return _snake_specs(f"{name}.act", dim, beta=beta) | filters


def _resnet_specs(name: str, dim: int, kernel: int, count: int, cfg: VocoderConfig) -> Specs:
    out: Specs = {}
    for i in range(count):
        for j in (1, 2):
            out |= conv_specs(f"{name}.convs{j}.{i}", dim, dim, kernel)
            beta = cfg.act_fn == "snakebeta"
            out |= _activation_specs(f"{name}.acts{j}.{i}", dim, cfg, antialias=cfg.antialias, beta=beta)
    return out


def _transposed_specs(name: str, n_in: int, n_out: int, kernel: int) -> Specs:
    """A transposed convolution's `weight [n_in, n_out, kernel]` and `bias [n_out]`, PyTorch's default."""
    start = specs.fan_in(n_out * kernel)
    bias = ParamSpec((n_out,), init=start)
    return {f"{name}.weight": ParamSpec((n_in, n_out, kernel), init=start), f"{name}.bias": bias}


def _generator_specs(cfg: VocoderConfig) -> Specs:
    widths, last = cfg.widths, cfg.widths[-1]
    out = conv_specs("conv_in", cfg.in_channels, widths[0], 7)
    for i, kernel in enumerate(cfg.upsample_kernel_sizes):
        out |= _transposed_specs(f"upsamplers.{i}", widths[i], widths[i + 1], kernel)
        for j, (size, dilations) in enumerate(zip(cfg.resnet_kernel_sizes, cfg.resnet_dilations, strict=True)):
            name = f"resnets.{i * len(cfg.resnet_kernel_sizes) + j}"
            out |= _resnet_specs(name, widths[i + 1], size, len(dilations), cfg)
    out |= _activation_specs("act_out", last, cfg, antialias=True, beta=True)
    out |= conv_specs("conv_out", last, cfg.out_channels, 7)
    return out if cfg.final_bias else {k: v for k, v in out.items() if k != "conv_out.bias"}


def param_specs(cfg: AnyVocoderConfig) -> Specs:
    """Specs of every leaf, keys and shapes as in the Diffusers checkpoint.

    Some leaves are constants that files hold, see `constants`; `mel_stft.stft_fn.inverse_basis` takes no part.
    """
    if isinstance(cfg, VocoderConfig):
        return _generator_specs(cfg)
    out: Specs = {}
    for part, generator in zip(PARTS, (cfg.vocoder, cfg.bwe), strict=True):
        out |= {f"{part}.{k}": v for k, v in _generator_specs(generator).items()}
    rows = cfg.filter_length + 2
    out |= {f"mel_stft.stft_fn.{k}_basis": ParamSpec((rows, 1, cfg.filter_length)) for k in ("forward", "inverse")}
    return out | {"mel_stft.mel_basis": ParamSpec((cfg.num_mel_channels, rows // 2))}


def constants(cfg: AnyVocoderConfig) -> Params:
    """The leaves that formulas give, float32: anti-aliasing filters, and the mel front end of bandwidth extension."""
    generators = [cfg] if isinstance(cfg, VocoderConfig) else [cfg.vocoder, cfg.bwe]
    prefixes = [""] if isinstance(cfg, VocoderConfig) else [f"{part}." for part in PARTS]
    out: Params = {}
    for prefix, generator in zip(prefixes, generators, strict=True):
        taps = kaiser_sinc(generator.antialias_ratio, generator.antialias_kernel_size).float().view(1, 1, -1)
        names = [k for k in _generator_specs(generator) if k.endswith(".filter")]
        out |= {prefix + name: taps.clone() for name in names}
    if isinstance(cfg, BweVocoderConfig):
        rate = cfg.vocoder.output_sampling_rate
        mel = MelConfig(rate, cfg.filter_length, cfg.hop_length, cfg.num_mel_channels, f_max=rate / 2)
        out["mel_stft.stft_fn.forward_basis"] = fourier_basis(cfg.filter_length).float()
        out["mel_stft.mel_basis"] = mel_filters(mel).float()
    return out


def init(cfg: AnyVocoderConfig, k: keys.Key, *, device="cpu") -> Params:
    """Fresh parameters with the constants in place."""
    fixed = {name: leaf.to(device) for name, leaf in constants(cfg).items()}
    return {**specs.init(param_specs(cfg), k, device=device), **fixed}


# --- one generator ----------------------------------------------------------------------------------------------


def _conv(p: Mapping[str, Tensor], name: str, x: Tensor, **options) -> Tensor:
    """1-D convolution in x's dtype, of equal length."""
    bias = p.get(f"{name}.bias")
    bias = None if bias is None else bias.to(x.dtype)
    return F.conv1d(x, p[f"{name}.weight"].to(x.dtype), bias, padding="same", **options)


def _upsampled(p: Mapping[str, Tensor], name: str, x: Tensor, factor: int) -> Tensor:
    """Transposed convolution `[B, C, T] -> [B, C', factor * T]`."""
    weight, bias = p[f"{name}.weight"].to(x.dtype), p[f"{name}.bias"].to(x.dtype)
    return F.conv_transpose1d(x, weight, bias, stride=factor, padding=(weight.shape[-1] - factor) // 2)


def snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """`x + sin(a x)^2 / b` with `a = exp(alpha)`, `b = exp(beta)` per channel of `[B, C, T]` (Ziyin et al., 2020)."""
    a, b = (t.to(x.dtype).exp()[:, None] for t in (alpha, beta))
    return x + (a * x).sin().square() / (b + SNAKE_EPS)


def _activate(p: Mapping[str, Tensor], name: str, x: Tensor, cfg: VocoderConfig, slope: float) -> Tensor:
    """One activation; where the tree has filters for it, at a higher rate, so that new frequencies do not alias."""
    if not cfg.snake:
        return F.leaky_relu(x, slope)
    filtered = f"{name}.upsample.filter" in p
    act = f"{name}.act" if filtered else name
    alpha = p[f"{act}.alpha"]
    x = kaiser_upsample(x, p[f"{name}.upsample.filter"], cfg.antialias_ratio) if filtered else x
    x = snake(x, alpha, p.get(f"{act}.beta", alpha))
    return downsample(x, p[f"{name}.downsample.filter"], cfg.antialias_ratio) if filtered else x


def _resnet(p: Mapping[str, Tensor], name: str, x: Tensor, dilations: tuple[int, ...], cfg: VocoderConfig) -> Tensor:
    slope = cfg.leaky_relu_negative_slope
    for i, dilation in enumerate(dilations):
        h = _conv(p, f"{name}.convs1.{i}", _activate(p, f"{name}.acts1.{i}", x, cfg, slope), dilation=dilation)
        x = x + _conv(p, f"{name}.convs2.{i}", _activate(p, f"{name}.acts2.{i}", h, cfg, slope))
    return x


def _generate(p: Mapping[str, Tensor], cfg: VocoderConfig, mel: Tensor) -> Tensor:
    """`[B, channels, T, bands] -> [B, out_channels, factor * T]`, channels and bands together being `in_channels`."""
    x = _conv(p, "conv_in", mel.mT.flatten(1, 2))
    count = len(cfg.resnet_dilations)
    for i, factor in enumerate(cfg.upsample_factors):
        x = x if cfg.snake else F.leaky_relu(x, cfg.leaky_relu_negative_slope)
        x = _upsampled(p, f"upsamplers.{i}", x, factor)
        x = sum(_resnet(p, f"resnets.{i * count + j}", x, d, cfg) for j, d in enumerate(cfg.resnet_dilations)) / count
    x = _conv(p, "conv_out", _activate(p, "act_out", x, cfg, FINAL_SLOPE))
    if cfg.final_act_fn == "tanh":
        return x.tanh()
    return x.clamp(-1, 1) if cfg.final_act_fn == "clamp" else x


# --- the whole --------------------------------------------------------------------------------------------------


def _part(params: Mapping[str, Tensor], name: str) -> Params:
    """The leaves of one generator under their own names."""
    return {k.removeprefix(f"{name}."): v for k, v in params.items() if k.startswith(f"{name}.")}


def _extended(params: Mapping[str, Tensor], cfg: BweVocoderConfig, mel: Tensor) -> Tensor:
    """The low-rate waveform, resampled, plus what the second generator makes of its mel spectrogram."""
    low = _generate(_part(params, PARTS[0]), cfg.vocoder, mel)
    samples = low.shape[-1]
    low = F.pad(low, (0, -samples % cfg.hop_length))
    basis, filters = params["mel_stft.stft_fn.forward_basis"], params["mel_stft.mel_basis"]
    bands = causal_log_mel(low.flatten(0, 1), basis, filters, cfg.hop_length).unflatten(0, low.shape[:2])
    residual = _generate(_part(params, PARTS[1]), cfg.bwe, bands.mT)
    return (residual + hann_upsample(low, cfg.ratio))[..., : samples * cfg.ratio]


def _no_autocast(device: str) -> contextlib.AbstractContextManager:
    """Keeps a surrounding autocast from rounding; nothing to do on devices that have none (meta)."""
    available = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else contextlib.nullcontext()


def check_mel(cfg: AnyVocoderConfig, mel: Tensor) -> None:
    """Raises UserError for anything but floating `[B, channels, T, bands]` that makes `in_channels` together."""
    if mel.ndim != 4 or mel.shape[1] * mel.shape[3] != cfg.in_channels or min(mel.shape) < 1:
        expected = f"[B, channels, T, bands] with channels * bands = {cfg.in_channels}"
        raise UserError(f"mel spectrogram has shape {list(mel.shape)}, expected {expected}")
    if not mel.dtype.is_floating_point:
        raise UserError(f"mel spectrogram has dtype {mel.dtype}, expected a floating dtype")


def vocode(params: Params, cfg: AnyVocoderConfig, mel: Tensor, *, clamp: bool = True) -> Tensor:
    """Log-mel spectrogram -> waveform at `cfg.output_sampling_rate`.

    Args:
        params: leaves of `param_specs(cfg)` in any dtype; the arithmetic is float32, or float64 for float64 input,
            also under autocast.
        mel: `[B, channels, T, bands]` as the audio VAE decodes it.
        clamp: to [-1, 1], after the cast. A loss needs False: the clamp has no gradient outside.

    Returns:
        `[B, out_channels, cfg.factor * T]` in the spectrogram's dtype.

    Raises:
        UserError: another shape or dtype.
    """
    check_mel(cfg, mel)
    x = mel.to(wide(mel))
    with _no_autocast(mel.device.type):
        y = _generate(params, cfg, x) if isinstance(cfg, VocoderConfig) else _extended(params, cfg, x)
    y = y.to(mel.dtype)
    return y.clamp(-1, 1) if clamp else y
