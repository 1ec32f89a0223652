"""A linear codec of sound with the interface of an audio VAE, fitted in closed form; the demos' stand-in for one.

Log-mel frames of LTX-2's front end (16 kHz, 64 bands, 100 frames a second) are cut into blocks: four frames of all
channels by neighbouring bands, which become one latent vector. Each place along the bands has a basis of principal
components of the sounds that the codec was fitted on. As LTX-2's audio VAE it gives 25 latents a second.

A mel spectrogram has no phases: decoding makes up a waveform whose spectrogram it is, by Griffin and Lim's iterations
from phases of a fixed key. That is deterministic, and sounds like the original, but is not its waveform.
"""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from core import keys, specs
from core.errors import UserError, raise_faults
from core.trees import Params
from nn.config_files import open_model, save_model
from nn.layers import wide
from nn.ltx2_audio_mel import FLOOR, MelConfig, log_mel, mel_filters

CLASS_NAME = "LatentreeMelCodec"
# A hundredth of a neper is 0.09 dB, which nobody hears: a weaker component is not blown up to unit variance.
STD_FLOOR = 0.01
MOMENTUM = 0.99  # of phases (Perraudin, Balazs and Søndergaard, 2013)
START = 10  # multiplicative steps from bands to a first spectrum
PHASES = "phases"  # name of the key's branch that the first phases are drawn from


@dataclasses.dataclass(frozen=True)
class MelCodecConfig:
    """`latent_channels` per block of `frames` frames by `mel_bins / latent_bins` bands of all `channels`.

    `rate`, `n_fft`, `hop_length` and `mel_bins` are the mel front end's, see `nn.ltx2_audio_mel.MelConfig`;
    `iterations` are those of phase recovery.
    """

    latent_channels: int = 8
    latent_bins: int = 16
    frames: int = 4
    channels: int = 2
    rate: int = 16000
    n_fft: int = 1024
    hop_length: int = 160
    mel_bins: int = 64
    iterations: int = 64

    def __post_init__(self):
        raise_faults("MelCodecConfig", _config_faults(self))

    @property
    def mel(self) -> MelConfig:
        """The front end: bands up to half the sampling rate."""
        return MelConfig(self.rate, self.n_fft, self.hop_length, self.mel_bins, f_max=self.rate / 2)

    @property
    def block(self) -> int:
        """Values that one latent vector stands for."""
        return self.channels * self.frames * self.mel_bins // self.latent_bins

    @property
    def samples(self) -> int:
        """Samples of one latent frame."""
        return self.frames * self.hop_length

    @property
    def latents_per_second(self) -> float:
        """Latent frames that a second of sound becomes."""
        return self.rate / self.samples


def _config_faults(cfg: MelCodecConfig) -> list[str]:
    sizes = [field.name for field in dataclasses.fields(cfg)]
    faults = [f"{n} must be at least 1, got {getattr(cfg, n)}" for n in sizes if getattr(cfg, n) < 1]
    if faults:
        return faults
    if cfg.mel_bins % cfg.latent_bins:
        near = ", ".join(str(n) for n in range(1, cfg.mel_bins + 1) if cfg.mel_bins % n == 0)
        faults.append(f"latent_bins is {cfg.latent_bins}, must divide the {cfg.mel_bins} mel_bins: {near}")
    elif cfg.latent_channels > cfg.block:
        faults.append(f"latent_channels is {cfg.latent_channels}, a block of {cfg.block} values has no more")
    if cfg.n_fft % 2 or not cfg.hop_length <= cfg.n_fft // 2 < cfg.samples:
        limit = f"even, at least {2 * cfg.hop_length} and less than {2 * cfg.samples}"
        faults.append(f"n_fft is {cfg.n_fft}, must be {limit} (two hops, two latent frames)")
    return faults


def param_specs(cfg: MelCodecConfig) -> specs.Specs:
    """Per place along the bands: `mean [F, D]`, orthonormal rows `basis [F, C, D]`, `std [F, C]`; float32."""
    place = (cfg.latent_bins,)
    return {
        "mean": specs.ParamSpec((*place, cfg.block), keep_fp32=True),
        "basis": specs.ParamSpec(
            (*place, cfg.latent_channels, cfg.block), init=specs.normal(cfg.block**-0.5), keep_fp32=True
        ),
        "std": specs.ParamSpec((*place, cfg.latent_channels), init=specs.ONES, keep_fp32=True),
    }


# --- coding ---------------------------------------------------------------------------------------------------


def _blocks(cfg: MelCodecConfig, mel: Tensor) -> Tensor:
    """`[B, channels, frames * T, mel_bins]` -> `[B, T, F, D]`."""
    return rearrange(mel, "b s (t f) (n k) -> b t n (s f k)", f=cfg.frames, n=cfg.latent_bins)


def _frames(cfg: MelCodecConfig, waveform: Tensor) -> Tensor:
    """The log-mel frames of whole latents, `[B, channels, frames * T, mel_bins]`; silence fills the last one."""
    if waveform.ndim != 3 or waveform.shape[1] != cfg.channels or waveform.shape[2] < 1:
        raise UserError(f"waveform has shape {list(waveform.shape)}, expected [B, {cfg.channels}, samples]")
    if not waveform.dtype.is_floating_point:
        raise UserError(f"waveform has dtype {waveform.dtype}, expected a floating dtype with values in [-1, 1]")
    x = F.pad(waveform, (0, -waveform.shape[2] % cfg.samples))
    # The last frame stands on the sample after the end: it begins the latent after.
    return log_mel(cfg.mel, x.to(wide(x)))[:, :, :-1]


def encode(params: Params, cfg: MelCodecConfig, waveform: Tensor) -> Tensor:
    """Waveform `[B, channels, N]` in [-1, 1] -> latents `[B, C, ceil(N / cfg.samples), F]`, in its dtype.

    Every channel has, at each place, zero mean and unit variance over the sounds that the codec was fitted on.
    """
    blocks = _blocks(cfg, _frames(cfg, waveform))
    mean, basis, std = (params[name].to(blocks) for name in ("mean", "basis", "std"))
    latents = torch.einsum("b t n d, n c d -> b c t n", blocks - mean, basis) / std.mT[:, None]
    return latents.to(waveform.dtype)


def decode_mel(params: Params, cfg: MelCodecConfig, latents: Tensor) -> Tensor:
    """Latents `[B, C, T, F]` -> log-mel frames `[B, channels, frames * T, mel_bins]`, float32 or wider."""
    expected = f"[B, {cfg.latent_channels}, T, {cfg.latent_bins}]"
    fits = latents.ndim == 4 and (latents.shape[1], latents.shape[3]) == (cfg.latent_channels, cfg.latent_bins)
    if not fits or not latents.dtype.is_floating_point or latents.shape[2] < 1:
        raise UserError(f"audio latents are {latents.dtype} {list(latents.shape)}, expected floating {expected}")
    x = latents.to(wide(latents))
    mean, basis, std = (params[name].to(x) for name in ("mean", "basis", "std"))
    blocks = torch.einsum("b c t n, n c d -> b t n d", x * std.mT[:, None], basis) + mean
    return rearrange(blocks, "b t n (s f k) -> b s (t f) (n k)", s=cfg.channels, f=cfg.frames)


def decode(params: Params, cfg: MelCodecConfig, latents: Tensor) -> Tensor:
    """Latents `[B, C, T, F]` -> waveform `[B, channels, T * cfg.samples]` in [-1, 1], in their dtype.

    Its log-mel spectrogram is about what the latents say; phases are made up, see `recover`.
    """
    waveform = recover(cfg, decode_mel(params, cfg, latents))
    return waveform.clamp(-1, 1).to(latents.dtype)


# --- phases ---------------------------------------------------------------------------------------------------


def _toward(filters: Tensor, spectrum: Tensor, bands: Tensor) -> Tensor:
    """A spectrum `[..., n_freqs, T]` whose bands are nearer to `bands` and whose fine structure stays.

    One multiplicative step down the Kullback-Leibler divergence of the bands (Lee and Seung, 2001).
    """
    ratio = bands / (filters @ spectrum).clamp(min=FLOOR**2)
    return spectrum * (filters.mT @ ratio) / filters.sum(0)[:, None].clamp(min=FLOOR**2)


def recover(cfg: MelCodecConfig, mel: Tensor) -> Tensor:
    """A waveform whose log-mel spectrogram is as good as `mel`, by fast Griffin-Lim iterations.

    Each makes a waveform of the spectrum, takes that waveform's spectrum, which is one that a sound can have, keeps
    its phases, with momentum, and moves its magnitudes towards the asked bands (Griffin and Lim, 1984; Perraudin et
    al., 2013). Channels begin with the same random phases of a fixed key, so that equal ones stay equal.

    Args:
        mel: `[B, channels, T, mel_bins]`, float32 or float64.

    Returns:
        `[B, channels, T * hop_length]` in its dtype, not clamped.
    """
    bands = torch.cat([mel, mel[:, :, -1:]], dim=2).flatten(0, 1).mT.exp()
    filters, window = mel_filters(cfg.mel).to(bands), torch.hann_window(cfg.n_fft).to(bands)
    how = {"n_fft": cfg.n_fft, "hop_length": cfg.hop_length, "window": window, "center": True}
    samples = mel.shape[2] * cfg.hop_length
    spectrum = filters.mT @ bands
    for _ in range(START):
        spectrum = _toward(filters, spectrum, bands)
    turns = keys.uniform(keys.fold_in(keys.key(0), PHASES), spectrum.shape[1:]).to(bands)
    phases, before = torch.polar(torch.ones_like(turns), 2 * math.pi * turns), None
    for _ in range(cfg.iterations):
        waveform = torch.istft(spectrum * phases, length=samples, **how)
        found = torch.stft(waveform, pad_mode="reflect", return_complex=True, **how)
        ahead = found if before is None else found + MOMENTUM * (found - before)
        phases, before = ahead / ahead.abs().clamp(min=FLOOR**2), found
        spectrum = _toward(filters, found.abs(), bands)
    return torch.istft(spectrum * phases, length=samples, **how).unflatten(0, mel.shape[:2])


# --- fitting --------------------------------------------------------------------------------------------------


def fit(cfg: MelCodecConfig, waveforms: Iterable[Tensor]) -> Params:
    """Fits the codec on waveforms `[channels, N]` at `cfg.rate` in one pass (an iterator will do), float64 inside.

    Principal components are the linear code of blocks with the least squared error, of logarithms. Raises UserError
    when there is no waveform, or not more latent frames than channels.
    """
    count, total, square = 0, 0.0, 0.0
    for waveform in waveforms:
        blocks = _blocks(cfg, _frames(cfg, waveform[None].double().cpu()))[0].transpose(0, 1)  # [F, T, D]
        count, total = count + blocks.shape[1], total + blocks.sum(1)
        square = square + blocks.mT @ blocks
    if count <= (few := cfg.latent_channels):
        need = f"at least {few + 1} are needed, {(few + 1) / cfg.latents_per_second:g} s"
        raise UserError(f"mel codec: {count} latent frames of sound to fit {few} channels on: {need}")
    mean = total / count
    covariance = square / count - mean[:, :, None] * mean[:, None]
    basis = torch.linalg.eigh(covariance).eigenvectors.flip(2)[:, :, : cfg.latent_channels].mT
    basis = basis * basis.gather(2, basis.abs().argmax(dim=2, keepdim=True)).sign()
    std = ((basis @ covariance) * basis).sum(2).clamp(min=STD_FLOOR**2).sqrt()
    return {k: v.float().contiguous() for k, v in (("mean", mean), ("basis", basis), ("std", std))}


# --- files ----------------------------------------------------------------------------------------------------


def save(folder: str | Path, params: Params, cfg: MelCodecConfig) -> None:
    """Writes `config.json` and `diffusion_pytorch_model.safetensors`, the form of a Diffusers VAE folder."""
    save_model(folder, params, param_specs(cfg), {"_class_name": CLASS_NAME, **dataclasses.asdict(cfg)})


def load(folder: str | Path, *, device="cpu") -> tuple[Params, MelCodecConfig]:
    """Reads what `save` wrote. Raises UserError naming the file for another class, key, shape or damage."""
    tree, cfg = open_model(folder, MelCodecConfig, CLASS_NAME, param_specs)
    return tree.read(device=device), cfg
