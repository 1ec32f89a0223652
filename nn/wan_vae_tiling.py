"""Wan's VAEs on overlapping tiles of the picture, blended with weights that sum to one.

Memory is that of one tile besides the result. A tile does not see what lies beyond its border, so results
differ from the untiled ones: near cuts through the convolutions, everywhere a little through the attention in
the middle, which spans the tile instead of the picture. Sizes are counted in latent pixels.
"""

import dataclasses
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
    """One tile along one axis: units `start` to `stop`, and how far it overlaps the tile before and after."""

    start: int
    stop: int
    before: int
    after: int


def windows(size: int, tile: int, overlap: int) -> list[Window]:
    """The fewest tiles of `tile` units that cover `size` and overlap by at least `overlap`, evenly spread.

    One tile of `size` units when `tile` is no shorter than that.
    """
    if tile >= size:
        return [Window(0, size, 0, 0)]
    gaps = -(-(size - tile) // (tile - overlap))
    starts = [i * (size - tile) // gaps for i in range(gaps + 1)]
    shared = [a + tile - b for a, b in itertools.pairwise(starts)]
    return [
        Window(start, start + tile, before, after)
        for start, before, after in zip(starts, [0, *shared], [*shared, 0], strict=True)
    ]


def blend_weights(size: int, tile: int, overlap: int, *, scale: int = 1, dtype=torch.float32, device="cpu"):
    """Weights of each tile of `windows` along one axis, `[tile * scale]` each: linear ramps over the overlaps.

    At every pixel the weights of all tiles that hold it sum to one. `scale` is output pixels per unit.
    """
    tiles = windows(size, tile, overlap)
    raw = [torch.ones((w.stop - w.start) * scale, dtype=dtype, device=device) for w in tiles]
    for weights, w in zip(raw, tiles, strict=True):
        up, down = (_ramp(n * scale, dtype, device) for n in (w.before, w.after))
        weights[: len(up)] *= up
        weights[len(weights) - len(down) :] *= down.flip(0)
    # Two ramps add up to one; where evenly spread tiles meet by three, dividing by the sum makes it so.
    total = torch.zeros(size * scale, dtype=dtype, device=device)
    for weights, w in zip(raw, tiles, strict=True):
        total[w.start * scale : w.stop * scale] += weights
    return [weights / total[w.start * scale : w.stop * scale] for weights, w in zip(raw, tiles, strict=True)]


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


def _blended(code: Callable[[Tensor], Tensor], x: Tensor, size, tile, overlap, scale_in: int, scale_out: int) -> Tensor:
    """Sum over tiles of `code(tile of x)` times its weights; `size`, `tile`, `overlap` in latent pixels (h, w).

    Weights are float32 or wider, the sum has the dtype of what `code` gives.
    """
    axes = [
        list(zip(windows(*a), blend_weights(*a, scale=scale_out, dtype=wide(x), device=x.device), strict=True))
        for a in zip(size, tile, overlap, strict=True)
    ]
    total = None
    for (row, row_weights), (column, column_weights) in itertools.product(*axes):
        cut = [slice(w.start * scale_in, w.stop * scale_in) for w in (row, column)]
        part = code(x[..., cut[0], cut[1]])
        if total is None:
            total = part.new_zeros(*part.shape[:3], *(n * scale_out for n in size))
        paste = [slice(w.start * scale_out, w.stop * scale_out) for w in (row, column)]
        total[..., paste[0], paste[1]] += part * (row_weights[:, None] * column_weights)
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
    video = _blended(decode, latents, latents.shape[-2:], tile, overlap, 1, cfg.scale_factor_spatial)
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
    return _blended(encode, video, size, tile, overlap, scale, 1)
