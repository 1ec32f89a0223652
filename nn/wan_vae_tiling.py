"""Wan's VAEs on overlapping tiles of the picture, blended with weights that sum to one.

Memory is that of one tile besides the result. A tile does not see what lies beyond its border, so results
differ from the untiled ones: near cuts through the convolutions, everywhere a little through the attention in
the middle, which spans the tile instead of the picture. Sizes are counted in latent pixels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.errors import raise_faults
from core.trees import Params
from nn import wan_vae
from nn.layers import wide
from nn.wan_vae_blocks import VaeRun
from nn.wan_vae_config import WanVaeConfig


@dataclasses.dataclass(frozen=True)
class Window:
    """One tile along one axis: units `start` to `stop`."""

    start: int
    stop: int


def windows(size: int, tile: int, overlap: int) -> list[Window]:
    """The fewest tiles of `tile` units that cover `size` and overlap by at least `overlap`, evenly spread.

    One tile of `size` units when `tile` is no shorter than that.
    """
    if tile >= size:
        return [Window(0, size)]
    gaps = -(-(size - tile) // (tile - overlap))
    starts = [i * (size - tile) // gaps for i in range(gaps + 1)]
    return [Window(start, start + tile) for start in starts]


def blend_weights(size: int, tile: int, overlap: int, *, scale: int = 1, dtype=torch.float32, device="cpu"):
    """Weights of each tile of `windows` along one axis, `[tile * scale]` each: linear ramps over the overlaps.

    At every pixel the weights of all tiles that hold it sum to one. `scale` is output pixels per unit.
    """
    spans = [(w.start * scale, w.stop * scale) for w in windows(size, tile, overlap)]
    return span_weights(spans, dtype=dtype, device=device)


def span_weights(spans: Sequence[tuple[int, int]], *, dtype=torch.float32, device="cpu") -> list[Tensor]:
    """`blend_weights` of tiles from `start` to `stop` each, in order and without gaps, in output pixels."""
    raw = [torch.ones(stop - start, dtype=dtype, device=device) for start, stop in spans]
    for (before, after), (left, right) in zip(itertools.pairwise(spans), itertools.pairwise(raw), strict=True):
        ramp = _ramp(before[1] - after[0], dtype, device)
        left[len(left) - len(ramp) :] *= ramp.flip(0)
        right[: len(ramp)] *= ramp
    # Two ramps add up to one; where evenly spread tiles meet by three, dividing by the sum makes it so.
    total = torch.zeros(spans[-1][1], dtype=dtype, device=device)
    for weights, (start, stop) in zip(raw, spans, strict=True):
        total[start:stop] += weights
    return [weights / total[start:stop] for weights, (start, stop) in zip(raw, spans, strict=True)]


def _ramp(n: int, dtype, device) -> Tensor:
    """`n` values from just above 0 to just below 1, symmetric about one half."""
    return (torch.arange(n, dtype=dtype, device=device) + 0.5) / max(n, 1)


def check_tiles(tile: Sequence[int], overlap: Sequence[int]) -> None:
    """Raises UserError unless `0 <= overlap <= tile / 2` and `tile >= 1` on both axes."""
    faults = []
    for name, t, o in zip(("height", "width"), tile, overlap, strict=True):
        if t < 1:
            faults.append(f"tile {name} is {t}, expected at least 1 latent pixel")
        elif not 0 <= o <= t // 2:
            faults.append(f"overlap in {name} is {o}, expected 0 to {t // 2}, half of a tile of {t}")
    raise_faults("these tiles cannot be used", faults)


@dataclasses.dataclass(frozen=True)
class Part:
    """One tile along one axis: what it takes of the input, where it goes in the output, and its weights there."""

    source: slice
    target: slice
    weights: Tensor


def parts_along(size: int, tile: int, overlap: int, scale_in: int, scale_out: int, like: Tensor) -> list[Part]:
    """The tiles of one axis of the picture; sizes in latent pixels, weights float32 or wider on `like`'s device."""
    weights = blend_weights(size, tile, overlap, scale=scale_out, dtype=wide(like), device=like.device)
    return [
        Part(*(slice(w.start * scale, w.stop * scale) for scale in (scale_in, scale_out)), weight)
        for w, weight in zip(windows(size, tile, overlap), weights, strict=True)
    ]


def blended(code: Callable[[Tensor], Tensor], x: Tensor, axes: Sequence[Sequence[Part]]) -> Tensor:
    """Sum over tiles of `code(tile of x)` times its weights, along the last `len(axes)` axes.

    Weights are float32 or wider, the sum has the dtype of what `code` gives.
    """
    total = None
    for tile in itertools.product(*axes):
        part = code(x[(..., *(axis.source for axis in tile))])
        if total is None:
            lead = part.shape[: part.ndim - len(axes)]
            total = part.new_zeros(*lead, *(axis[-1].target.stop for axis in axes))
        weights = functools.reduce(lambda a, b: a[..., None] * b, (axis.weights for axis in tile))
        total[(..., *(axis.target for axis in tile))] += part * weights
    return total


def _pair(overlap: int | tuple[int, int]) -> tuple[int, int]:
    return (overlap, overlap) if isinstance(overlap, int) else tuple(overlap)


def tiled_decode(
    params: Params,
    cfg: WanVaeConfig,
    latents: Tensor,
    *,
    tile: tuple[int, int],
    overlap: int | tuple[int, int],
    chunk: int | None = None,
    clamp: bool = True,
    run: VaeRun = VaeRun(),
) -> Tensor:
    """`wan_vae.decode` on tiles of `tile` (height, width) latent pixels that share `overlap`.

    `chunk` streams each tile along time too. A tile at least as large as the picture gives the untiled
    result. Raises UserError for an overlap beyond half a tile.
    """
    wan_vae.check_latents(cfg, latents)
    overlap = _pair(overlap)
    check_tiles(tile, overlap)
    decode = lambda z: wan_vae.decode(params, cfg, z, chunk=chunk, clamp=False, run=run)  # noqa: E731
    scale = cfg.scale_factor_spatial
    axes = [parts_along(*a, 1, scale, latents) for a in zip(latents.shape[-2:], tile, overlap, strict=True)]
    video = blended(decode, latents, axes)
    return video.clamp(-1.0, 1.0) if clamp else video


def tiled_encode(
    params: Params,
    cfg: WanVaeConfig,
    video: Tensor,
    *,
    tile: tuple[int, int],
    overlap: int | tuple[int, int],
    chunk: int | None = None,
    run: VaeRun = VaeRun(),
) -> Tensor:
    """`wan_vae.encode` on tiles; `tile` (height, width) and `overlap` in latent pixels, as in `tiled_decode`."""
    wan_vae.check_video(cfg, video)
    overlap = _pair(overlap)
    check_tiles(tile, overlap)
    scale = cfg.scale_factor_spatial
    size = [n // scale for n in video.shape[-2:]]
    encode = lambda part: wan_vae.encode(params, cfg, part, chunk=chunk, run=run)  # noqa: E731
    return blended(encode, video, [parts_along(*a, scale, 1, video) for a in zip(size, tile, overlap, strict=True)])
