"""How Wan is shown pictures: the two forms of image-to-video, as pure functions on latents.

Wan2.1 takes extra channels beside the noisy latents: which frames are known, and the latents of a clip of full
length that is zero in [-1, 1] (grey) where nothing is known. Wan2.2's 5B model keeps its channels: the first
latent frame is put in clean and its tokens get timestep 0. Both layouts are those of Diffusers'
`WanImageToVideoPipeline.prepare_latents`.
"""

import torch
from einops import rearrange, repeat
from torch import Tensor

from core.errors import UserError
from nn.wan import WanConfig


def condition_clip(image: Tensor, num_frames: int) -> Tensor:
    """A first frame `[B, 3, H, W]` in [-1, 1] -> the clip to encode, `[B, 3, num_frames, H, W]`, 0 after frame 0."""
    clip = image.new_zeros(*image.shape[:2], num_frames, *image.shape[2:])
    clip[:, :, 0] = image
    return clip


def first_frame_known(num_frames: int) -> Tensor:
    """Which frames of a video are known when its first one is given: bool `[num_frames]`."""
    return torch.arange(num_frames) == 0


def frame_mask(known: Tensor, temporal: int) -> Tensor:
    """Known frames, bool `[T]` with T = temporal * k + 1 -> float32 `[temporal, k + 1]`.

    Column j says of latent frame j which of its frames are known. The first latent frame stands for one frame,
    which fills its column.
    """
    if known.ndim != 1 or (len(known) - 1) % temporal:
        raise UserError(f"known frames have shape {list(known.shape)}, expected [{temporal}k+1]")
    filled = torch.cat([known[:1].expand(temporal), known[1:]])
    return rearrange(filled, "(t f) -> f t", f=temporal).float()


def first_frame_channels(latents: Tensor, known: Tensor, temporal: int) -> Tensor:
    """The condition `first_frame` of `nn.wan_inputs.model_inputs`.

    Args:
        latents: normalised latents of `condition_clip`, `[B, C, t, h, w]`.
        known: bool `[T]`, see `frame_mask`.

    Returns:
        `[B, temporal + C, t, h, w]`: the mask, then the latents.
    """
    b, _, t, h, w = latents.shape
    mask = frame_mask(known.to(latents.device), temporal).to(latents.dtype)
    if mask.shape[1] != t:
        raise UserError(f"{len(known)} known frames make {mask.shape[1]} latent frames, the condition has {t}")
    return torch.cat([repeat(mask, "f t -> b f t h w", b=b, h=h, w=w), latents], dim=1)


def with_clean_frame(latents: Tensor, clean: Tensor) -> Tensor:
    """`latents` `[B, C, t, h, w]` whose first frames are those of `clean` `[B, C, k, h, w]`."""
    return torch.cat([clean.to(latents), latents[:, :, clean.shape[2] :]], dim=2)


def token_timesteps(cfg: WanConfig, timestep: Tensor, latents: Tensor, clean_frames: int) -> Tensor:
    """Timesteps `[B]` -> per token `[B, N]`: 0 for the tokens of the first `clean_frames` latent frames.

    N counts the patches of `latents` `[B, C, t, h, w]` in the order in which the model reads them. Raises
    UserError for patches that would mix clean and noisy frames.
    """
    t, h, w = (n // p for n, p in zip(latents.shape[2:], cfg.patch_size, strict=True))
    if clean_frames % cfg.patch_size[0]:
        raise UserError(f"{clean_frames} clean latent frames do not fill patches of {cfg.patch_size[0]} frames")
    noisy = torch.arange(t, device=latents.device) >= clean_frames // cfg.patch_size[0]
    per_frame = timestep[:, None] * noisy
    return repeat(per_frame, "b t -> b (t h w)", h=h, w=w)
