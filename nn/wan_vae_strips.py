"""Wan's VAE decoder strip by strip: the result of decoding at once, in a fraction of its memory.

Behind the attention of its middle the decoder only convolves, so what a strip of the picture needs is itself and a
margin. The middle runs over the whole picture, at the latents' size where it is small; the stages then run over one
strip after another, whose margins are cut down as the picture grows. The feature caches of the causal layers, which
dominate the memory of a streamed decode, are those of one strip.
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from core.errors import UserError
from core.trees import Params
from nn import wan_vae
from nn.wan_vae_blocks import VaeRun
from nn.wan_vae_config import Stage, WanVaeConfig, decoder_stages


@dataclasses.dataclass(frozen=True)
class Range:
    """Pixels `start` to `stop` along the axis that is cut, at one resolution."""

    start: int
    stop: int


def margins(stages: Sequence[Stage]) -> list[int]:
    """Pixels that each stage needs beside a strip at its own input, and last those that the last convolution does.

    A residual block has two 3x3 convolutions, each with a reach of one pixel. Of m pixels beside the strip after
    doubling the size, an odd outermost one needs (m + 1) / 2 pixels before it, an even one m / 2 and one more.
    """
    out = [1]
    for stage in reversed(stages):
        after = out[0] if stage.resample is None else out[0] // 2 + 1
        out.insert(0, after + 2 * len(stage.resnets))
    return out


def ranges(stages: Sequence[Stage], strip: Range, size: int) -> list[Range]:
    """What to hold at the input of each stage, and last at that of the last convolution, for `strip` of `size`."""
    out, scale = [], 1
    factors = [1, *(stage.factor_s for stage in stages)]
    for margin, factor in zip(margins(stages), factors, strict=True):
        scale *= factor
        out.append(Range(max(0, strip.start * scale - margin), min(size * scale, strip.stop * scale + margin)))
    return out


def decode_strips(
    params: Params,
    cfg: WanVaeConfig,
    latents: Tensor,
    *,
    strips: int,
    chunk: int | None = 1,
    clamp: bool = True,
    run: VaeRun = VaeRun(),
) -> Tensor:
    """`wan_vae.decode`, with equal results, in strips across the longer side of the picture.

    Args:
        latents: `[B, z_dim, t, h, w]`, normalised.
        strips: how many; more take less memory and, since margins are decoded twice, more time.
        chunk: latent frames at a time; None takes all of a strip's at once.
        clamp, run: as in `wan_vae.decode`.

    Raises:
        UserError: as `wan_vae.decode`; fewer than one strip, or more than the longer side has latent pixels.
    """
    wan_vae.check_latents(cfg, latents)
    axis = 3 if latents.shape[3] > latents.shape[4] else 4
    size = latents.shape[axis]
    if not 1 <= strips <= size:
        raise UserError(f"strips is {strips}, expected 1 to {size}, the longer side of the latents")
    stages, scale = decoder_stages(cfg), cfg.scale_factor_spatial
    low = wan_vae.in_a_row(
        lambda part, stream: wan_vae.lowest(params, cfg, part, stream), wan_vae.split(latents, chunk, 1), run
    )
    video = None
    for i in range(strips):
        strip = Range(i * size // strips, (i + 1) * size // strips)
        part = _decode_strip(params, cfg, low, ranges(stages, strip, size), axis, chunk, run)
        # What is left beside the strip is the margin of the last convolution.
        start = min(strip.start * scale, cfg.patch)
        part = part.narrow(axis, start, (strip.stop - strip.start) * scale)
        if video is None:
            shape = list(part.shape)
            shape[axis] = size * scale
            video = part.new_empty(shape)
        video.narrow(axis, strip.start * scale, part.shape[axis]).copy_(part.clamp(-1.0, 1.0) if clamp else part)
    return video


def _decode_strip(params, cfg, low: Tensor, held: Sequence[Range], axis: int, chunk, run) -> Tensor:
    """One strip and the margin of the last convolution, `[B, 3, T, H, W]` with the strip's size along `axis`."""
    stages = decoder_stages(cfg)

    def cut(i: int, x: Tensor) -> Tensor:
        before, after, factor = held[i], held[i + 1], stages[i].factor_s
        return x.narrow(axis, after.start - before.start * factor, after.stop - after.start)

    first = low.narrow(axis, held[0].start, held[0].stop - held[0].start)
    parts = wan_vae.split(first, chunk, 1)
    return wan_vae.in_a_row(lambda part, stream: wan_vae.raised(params, cfg, part, stream, cut), parts, run)
