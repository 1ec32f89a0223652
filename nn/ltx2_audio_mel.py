"""The mel front end of LTX-2's audio: waveforms to log-mel spectrograms, from the formulas.

The public configs say: 16 kHz, windows and transforms of 1024 samples every 160, 64 bands from 0 to 8000 Hz. Bands are
Slaney's: linear below 1000 Hz, logarithmic above, triangles of equal area.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import UserError, raise_faults
from nn.layers import wide

FLOOR = 1e-5
"""Magnitudes below it count as it, before the logarithm."""

LINEAR_HZ = 200 / 3  # width of a band of the mel scale below the break
BREAK_HZ = 1000.0
LOG_STEP = math.log(6.4) / 27  # 27 bands from 1000 to 6400 Hz


@dataclasses.dataclass(frozen=True)
class MelConfig:
    """A mel front end: samples per second, samples of a transform and between two, bands and their extent in Hz."""

    sampling_rate: int = 16000
    n_fft: int = 1024
    hop_length: int = 160
    n_mels: int = 64
    f_min: float = 0.0
    f_max: float = 8000.0

    def __post_init__(self):
        sizes = ("sampling_rate", "n_fft", "hop_length", "n_mels")
        faults = [f"{n} must be at least 1, got {getattr(self, n)}" for n in sizes if getattr(self, n) < 1]
        if self.n_fft % 2:
            faults.append(f"n_fft must be even, got {self.n_fft}")
        if not 0 <= self.f_min < self.f_max <= self.sampling_rate / 2:
            limit = f"0 <= f_min < f_max <= {self.sampling_rate / 2:g}"
            faults.append(f"f_min is {self.f_min:g} and f_max {self.f_max:g}, expected {limit}")
        raise_faults("MelConfig", faults)

    @property
    def n_freqs(self) -> int:
        """Frequencies of a transform, from 0 to half the sampling rate."""
        return self.n_fft // 2 + 1


def hz_to_mel(hz: Tensor) -> Tensor:
    """Slaney's scale (Auditory Toolbox, 1998): `3 f / 200` up to 1000 Hz, then `15 + 27 log(f / 1000) / log 6.4`."""
    above = BREAK_HZ / LINEAR_HZ + (hz.clamp(min=BREAK_HZ) / BREAK_HZ).log() / LOG_STEP
    return torch.where(hz < BREAK_HZ, hz / LINEAR_HZ, above)


def mel_to_hz(mel: Tensor) -> Tensor:
    """Inverse of `hz_to_mel`."""
    at_break = BREAK_HZ / LINEAR_HZ
    return torch.where(mel < at_break, mel * LINEAR_HZ, BREAK_HZ * ((mel - at_break) * LOG_STEP).exp())


def mel_filters(cfg: MelConfig) -> Tensor:
    """Triangles over the frequencies of a transform, each of area 1 Hz, float64 `[n_mels, n_fft / 2 + 1]` on the CPU.

    Their corners are equally far apart on the mel scale; a triangle's feet are its neighbours' peaks.
    """
    ends = hz_to_mel(torch.tensor([cfg.f_min, cfg.f_max], dtype=torch.float64))
    corners = mel_to_hz(torch.linspace(*ends.tolist(), cfg.n_mels + 2, dtype=torch.float64))[:, None]
    hz = torch.linspace(0, cfg.sampling_rate / 2, cfg.n_freqs, dtype=torch.float64)
    low, peak, high = corners[:-2], corners[1:-1], corners[2:]
    triangles = torch.minimum((hz - low) / (peak - low), (high - hz) / (high - peak)).clamp(min=0)
    return triangles * 2 / (high - low)


def fourier_basis(n_fft: int) -> Tensor:
    """The windowed transform as a convolution's kernel, float64 `[2 (n_fft / 2 + 1), 1, n_fft]` on the CPU.

    First the real parts `w_n cos(2 pi k n / N)`, then the imaginary ones `-w_n sin(2 pi k n / N)`, with the periodic
    Hann window w.
    """
    n = torch.arange(n_fft, dtype=torch.float64)
    angles = 2 * math.pi / n_fft * torch.outer(n[: n_fft // 2 + 1], n)
    window = torch.hann_window(n_fft, dtype=torch.float64)
    return (torch.cat([angles.cos(), -angles.sin()]) * window)[:, None]


def log_bands(magnitude: Tensor, filters: Tensor) -> Tensor:
    """Magnitudes `[..., n_freqs, T]` -> the logarithm of each band, not below log `FLOOR`, `[..., n_mels, T]`."""
    return (filters.to(magnitude.dtype) @ magnitude).clamp(min=FLOOR).log()


def causal_log_mel(waveform: Tensor, basis: Tensor, filters: Tensor, hop: int) -> Tensor:
    """Log-mel frames of which each sees its own `hop` samples and those before; silence comes before the first.

    Args:
        waveform: `[N, samples]`, float32 or wider. basis: `[2 n_freqs, 1, n_fft]`, see `fourier_basis`.
        filters: `[n_mels, n_freqs]`.

    Returns:
        `[N, n_mels, samples // hop]`.
    """
    padded = F.pad(waveform[:, None], (basis.shape[-1] - hop, 0))
    real, imaginary = F.conv1d(padded, basis.to(waveform.dtype), stride=hop).chunk(2, dim=1)
    # A complex number's size has a gradient of zero at zero, so silence does not give NaN.
    return log_bands(torch.complex(real, imaginary).abs(), filters)


def log_mel(cfg: MelConfig, waveform: Tensor) -> Tensor:
    """What the audio VAE encodes: the log-mel spectrogram of a waveform.

    Frames are centred on every `hop_length`-th sample and the waveform is mirrored at its ends.

    Args:
        waveform: `[B, channels, samples]` at `cfg.sampling_rate`, in [-1, 1].

    Returns:
        `[B, channels, 1 + samples // hop_length, n_mels]` in the waveform's dtype; the arithmetic is float32 or wider.

    Raises:
        UserError: another rank or dtype, or fewer samples than a mirrored half window needs.
    """
    if waveform.ndim != 3 or not waveform.dtype.is_floating_point:
        found = f"{list(waveform.shape)} of {waveform.dtype}"
        raise UserError(f"waveform is {found}, expected floating [B, channels, samples]")
    if waveform.shape[-1] <= cfg.n_fft // 2:
        raise UserError(f"waveform has {waveform.shape[-1]} samples, expected at least {cfg.n_fft // 2 + 1}")
    x = waveform.to(wide(waveform))
    window = torch.hann_window(cfg.n_fft, dtype=x.dtype, device=x.device)
    spectrum = torch.stft(
        x.flatten(0, 1), cfg.n_fft, cfg.hop_length, window=window, center=True, pad_mode="reflect", return_complex=True
    )
    bands = log_bands(spectrum.abs(), mel_filters(cfg).to(x.dtype).to(x.device))
    return bands.mT.unflatten(0, waveform.shape[:2]).to(waveform.dtype)
