"""LTX-2's video VAEs on overlapping tiles of picture and time, blended with weights that sum to one.

Memory is that of one tile besides the result. A tile does not see what lies beyond its border, so results differ from
the untiled ones near cuts. Along time alone `chunk=` of `nn.ltx2_vae` saves memory without a difference; tiles over
time are for decoders that are not causal, whose streams hold frames back.
"""

from collections.abc import Sequence

from torch import Tensor

from core.errors import UserError
from core.trees import Params
from nn import ltx2_vae
from nn.layers import wide
from nn.ltx2_vae_blocks import VaeRun
from nn.ltx2_vae_config import LTX2VaeConfig
from nn.wan_vae_tiling import Part, blended, check_tiles, parts_along, span_weights, windows


def frame_parts(size: int, tile: int, overlap: int, factor: int, like: Tensor) -> list[Part]:
    """Tiles of `tile` latent frames along time; `factor` frames are one latent frame.

    Latent frames a to b give frames `factor * a` to `factor * (b - 1)`: the first of a tile stands for one frame only.
    Neighbours share `factor * (n - 1) + 1` frames of n latent ones. Raises UserError for an overlap that is not 1 to
    half a tile, if there is more than one tile.
    """
    if tile < size and not 1 <= overlap <= tile // 2:
        raise UserError(f"overlap in time is {overlap}, expected 1 to {tile // 2}, half of a tile of {tile}")
    held = windows(size, tile, overlap)
    spans = [(factor * w.start, factor * (w.stop - 1) + 1) for w in held]
    weights = span_weights(spans, dtype=wide(like), device=like.device)
    return [Part(slice(w.start, w.stop), slice(*s), weight) for w, s, weight in zip(held, spans, weights, strict=True)]


def tiled_decode(
    params: Params,
    cfg: LTX2VaeConfig,
    latents: Tensor,
    *,
    tile: Sequence[int],
    overlap: Sequence[int],
    chunk: int | None = None,
    causal: bool | None = None,
    timestep: Tensor | None = None,
    clamp: bool = True,
    run: VaeRun = VaeRun(),
) -> Tensor:
    """`ltx2_vae.decode` on tiles of `tile` latent frames, rows and columns that share `overlap` of each.

    Args:
        latents: `[B, C, t, h, w]`, normalised.
        tile, overlap: (time, height, width); of the picture at most half a tile, of time at least 1 as well.
        chunk: streams each tile along time, without a further difference.
        causal, timestep, clamp, run: as in `ltx2_vae.decode`.

    Returns:
        As `ltx2_vae.decode`; equal to it when one tile covers everything.

    Raises:
        UserError: as `ltx2_vae.decode`, of configs with `decoder_inject_noise` too; tiles that cannot be used.
    """
    ltx2_vae.check_latents(cfg, latents)
    check_tiles(tile[1:], overlap[1:])
    frames = frame_parts(latents.shape[2], tile[0], overlap[0], cfg.factor_t, latents)
    sizes = zip(latents.shape[3:], tile[1:], overlap[1:], strict=True)
    axes = [frames, *(parts_along(*size, 1, cfg.factor_s, latents) for size in sizes)]
    options = {"chunk": chunk, "causal": causal, "timestep": timestep, "clamp": False, "run": run}
    video = blended(lambda z: ltx2_vae.decode(params, cfg, z, **options), latents, axes)
    return video.clamp(-1.0, 1.0) if clamp else video


def tiled_encode(
    params: Params,
    cfg: LTX2VaeConfig,
    video: Tensor,
    *,
    tile: Sequence[int],
    overlap: Sequence[int],
    chunk: int | None = None,
    causal: bool | None = None,
    run: VaeRun = VaeRun(),
) -> Tensor:
    """`ltx2_vae.encode` on tiles of the picture; `tile` and `overlap` (height, width) count latent pixels.

    Along time `chunk` takes the place of tiles. Raises UserError as `ltx2_vae.encode`, and for tiles that cannot be
    used.
    """
    ltx2_vae.check_video(cfg, video)
    check_tiles(tile, overlap)
    scale = cfg.factor_s
    sizes = zip((n // scale for n in video.shape[3:]), tile, overlap, strict=True)
    axes = [parts_along(*size, scale, 1, video) for size in sizes]
    options = {"chunk": chunk, "causal": causal, "run": run}
    return blended(lambda part: ltx2_vae.encode(params, cfg, part, **options), video, axes)
