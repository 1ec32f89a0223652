"""Autoencoders of pipeline folders behind one interface: Wan's VAEs, and the demos' patch codec."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from core.errors import UserError
from core.geometry import to_frames
from core.trees import Params
from infer.encoders import kind_of, read_mapping
from nn import patch_codec, wan_vae
from nn.wan_vae_strips import decode_strips

# Latent frames that are decoded or encoded at a time. The cache of the causal layers makes the result that of one
# pass over everything; fewer save memory, more save launches of kernels.
CHUNK = 4


@dataclasses.dataclass(frozen=True)
class Vae:
    """An autoencoder with its weights bound.

    `decode(latents [B,C,t,h,w]) -> video [B,3,T,H,W]` in [-1, 1] and `encode`, its inverse for T = temporal * k + 1,
    take and return normalised latents. `decode_chunks` yields the video of `decode` in parts along time, so that
    the whole of it is never in the device's memory. Both are None where the model has none.
    """

    decode: Callable[[Tensor], Tensor]
    latent_channels: int
    spatial: int
    temporal: int
    encode: Callable[[Tensor], Tensor] | None = None
    decode_chunks: Callable[[Tensor], Iterator[Tensor]] | None = None


def _codec_chunks(params: Params, cfg: patch_codec.PatchCodecConfig, latents: Tensor) -> Iterator[Tensor]:
    for i, part in enumerate(latents.split(CHUNK, dim=2)):
        yield patch_codec.decode(params, cfg, part, first=i == 0)


def _codec(folder: Path, device: torch.device) -> Vae:
    params, cfg = patch_codec.load(folder, device=device)
    return Vae(
        lambda z: patch_codec.decode(params, cfg, z),
        cfg.latent_channels,
        cfg.spatial,
        cfg.temporal,
        encode=lambda video: patch_codec.encode(params, cfg, video),
        decode_chunks=lambda z: _codec_chunks(params, cfg, z),
    )


def _wan_chunks(params: Params, cfg: wan_vae.WanVaeConfig, latents: Tensor) -> Iterator[Tensor]:
    cache, parts = {}, latents.split(CHUNK, dim=2)
    for i, part in enumerate(parts):
        frames, cache = wan_vae.decode_chunk(params, cfg, part, cache, last=i + 1 == len(parts))
        yield frames


def _wan_vae(
    cfg: wan_vae.WanVaeConfig, read: Callable[[], Params], device: torch.device, dtype: torch.dtype, strips: int
) -> Vae:
    """`read()` gives the weights for one call."""

    def encode(video: Tensor) -> Tensor:
        return wan_vae.encode(read(), cfg, video.to(device, dtype), chunk=CHUNK).float()

    def decode(latents: Tensor) -> Tensor:
        z = latents.to(device, dtype)
        if strips == 1:
            return wan_vae.decode(read(), cfg, z, chunk=CHUNK)
        return decode_strips(read(), cfg, z, strips=min(strips, max(z.shape[3:])), chunk=2)

    return Vae(
        decode,
        cfg.z_dim,
        cfg.scale_factor_spatial,
        cfg.scale_factor_temporal,
        encode=encode,
        decode_chunks=None if strips > 1 else lambda z: _wan_chunks(read(), cfg, z.to(device, dtype)),
    )


def load_vae(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    keep: bool = True,
    strips: int = 1,
) -> Vae:
    """The autoencoder of a `vae/` folder: Wan's VAE in `dtype`, or the patch codec, which stays in float32.

    Args:
        keep: read Wan's weights now and hold them; False reads them at every call and frees them after it.
        strips: into how many strips of the picture decoding is cut, with equal results, to save memory
            (see `nn.wan_vae_strips`); no more than the longer side has latent pixels are used.

    Raises:
        UserError: another class, by name; keys and shapes that do not fit the config, before any tensor is read;
            strips or a dtype for the patch codec, which has no use for them.
    """
    folder, device = Path(folder), torch.device(device)
    if strips < 1:
        raise UserError(f"the vae's strips are {strips}, expected at least 1")
    config = read_mapping(folder / "config.json")
    name = config.get("_class_name")
    if name == patch_codec.CLASS_NAME:
        if strips > 1:
            raise UserError(f"{folder}: {name!r} is decoded at once, strips would do nothing")
        if dtype != torch.float32:
            raise UserError(f"{folder}: {name!r} stays in float32, a vae_dtype of {dtype} would do nothing")
        return _codec(folder, device)
    if name != wan_vae.CLASS_NAME:
        seen, ours = kind_of(config, "_class_name"), f"{patch_codec.CLASS_NAME!r} and {wan_vae.CLASS_NAME!r}"
        raise UserError(f"{folder}: _class_name {seen} cannot be run as a VAE by this version, only {ours}")
    _, cfg = wan_vae.open_folder(folder)
    if not keep:
        return _wan_vae(cfg, lambda: _read_wan_vae(folder, device, dtype), device, dtype, strips)
    params = _read_wan_vae(folder, device, dtype)
    return _wan_vae(cfg, lambda: params, device, dtype, strips)


def _read_wan_vae(folder: Path, device: torch.device, dtype: torch.dtype) -> Params:
    params, _ = wan_vae.load(folder, device=device, dtype=dtype)
    return wan_vae.channels_last(params) if device.type == "cuda" else params


def decode_frames(vae: Vae, latents: Tensor) -> list[Tensor]:
    """Latents `[B, C, t, h, w]` -> one video per row, uint8 `[T, H, W, 3]` on the CPU.

    With `decode_chunks` only a few frames at a time are floats, and on the device.
    """
    chunks = [vae.decode(latents)] if vae.decode_chunks is None else vae.decode_chunks(latents)
    parts = [[to_frames(video.cpu()) for video in chunk] for chunk in chunks]
    return [torch.cat(frames) for frames in zip(*parts, strict=True)]
