"""Low-pass filters of LTX-2's vocoder, from the formulas, and what applies them to `[B, C, T]`.

The ends of a signal are continued with its first and last sample.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ROLLOFF = 0.99  # of the lower rate's Nyquist frequency
ZERO_CROSSINGS = 6  # of the sinc on each side


def kaiser_sinc(ratio: int, taps: int) -> Tensor:
    """Half-band style low-pass for a change of rate by `ratio`, of sum 1, float64 `[taps]` on the CPU.

    A sinc that cuts at `0.5 / ratio` of the higher rate under a Kaiser window, whose beta follows from a transition
    band of `0.6 / ratio` on each side (Kaiser, 1974; as in StyleGAN3 and BigVGAN).
    """
    half = taps // 2
    attenuation = 2.285 * (half - 1) * math.pi * 4 * (0.6 / ratio) + 7.95
    if attenuation > 50:
        beta = 0.1102 * (attenuation - 8.7)
    elif attenuation >= 21:
        beta = 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    else:
        beta = 0.0
    window = torch.kaiser_window(taps, periodic=False, beta=beta, dtype=torch.float64)
    middle = half - 0.5 if taps % 2 == 0 else half
    filtered = window * torch.sinc((torch.arange(taps, dtype=torch.float64) - middle) / ratio)
    return filtered / filtered.sum()


def hann_sinc(ratio: int) -> Tensor:
    """Windowed-sinc interpolation by `ratio` (Smith's bandlimited interpolation), float64 `[14 ratio + 1]` on the CPU.

    A sinc of `ROLLOFF` times the lower rate under a squared cosine that ends after `ZERO_CROSSINGS` of it.
    """
    width = math.ceil(ZERO_CROSSINGS / ROLLOFF)
    t = (torch.arange(2 * width * ratio + 1, dtype=torch.float64) / ratio - width) * ROLLOFF
    window = torch.cos(t.clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS) * math.pi / (2 * ZERO_CROSSINGS)) ** 2
    return torch.sinc(t) * window * ROLLOFF / ratio


def _per_channel(x: Tensor, taps: Tensor) -> Tensor:
    """One filter for every channel, `[C, 1, taps]` in x's dtype and on its device."""
    return taps.to(x.device, x.dtype).reshape(1, 1, -1).expand(x.shape[1], 1, -1)


def upsample(x: Tensor, taps: Tensor, ratio: int, *, around: int, first: int) -> Tensor:
    """`ratio` times as many samples, `[B, C, T] -> [B, C, ratio * T]`: zeros between samples, then the filter.

    Args:
        around: samples that continue the signal on each side. first: which filtered sample is the first one kept.
    """
    length, channels = x.shape[-1] * ratio, x.shape[1]
    x = F.pad(x, (around, around), mode="replicate")
    y = F.conv_transpose1d(x, _per_channel(x, taps), stride=ratio, groups=channels)
    return ratio * y[..., first : first + length]


def kaiser_upsample(x: Tensor, taps: Tensor, ratio: int) -> Tensor:
    """`upsample` in phase, with a filter as `kaiser_sinc` gives it."""
    around = taps.numel() // ratio - 1
    return upsample(x, taps, ratio, around=around, first=around * ratio + (taps.numel() - ratio) // 2)


def hann_upsample(x: Tensor, ratio: int) -> Tensor:
    """`upsample` in phase, with the filter `hann_sinc(ratio)`."""
    taps = hann_sinc(ratio)
    width = math.ceil(ZERO_CROSSINGS / ROLLOFF)
    return upsample(x, taps, ratio, around=width, first=2 * width * ratio)


def downsample(x: Tensor, taps: Tensor, ratio: int) -> Tensor:
    """The filter, then every `ratio`-th sample: `[B, C, ratio * T] -> [B, C, T]`."""
    count = taps.numel()
    x = F.pad(x, (count // 2 + count % 2 - 1, count // 2), mode="replicate")
    return F.conv1d(x, _per_channel(x, taps), stride=ratio, groups=x.shape[1])
