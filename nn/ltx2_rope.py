"""Rotary embedding of LTX-2: where tokens are, in seconds and pixels, and the angles of every head.

A token covers an interval along each axis, `[B, axes, N, 2]` with start and end: seconds, and for video also pixels.
The middle of it, as a fraction f of the longest extent (20 s, 2048 pixels), turns channel pairs by `(2 f - 1) w`,
with frequencies `w = theta^u pi/2` for u in [0, 1]. Frequencies are spread over the stream's whole width, so every
head has a table of its own.
"""

import math

import torch
from torch import Tensor

from core.devices import highest_float
from nn.ltx2_config import LTX2Config, Stream
from nn.rope import Rope
from nn.run import TensorParallel


def _number(value: float | Tensor, device) -> Tensor:
    """A divisor, float32 `[1]`, or `[B]` for a tensor of numbers, made on the device.

    Division by a Python number would be a product with its rounded inverse on a GPU.
    """
    if isinstance(value, Tensor):
        return value.to(device, torch.float32)
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _bounds(count: int, patch: int, device) -> Tensor:
    """Start and end of patches along one axis, float32 `[count, 2]` in latent steps."""
    start = torch.arange(count, dtype=torch.float32, device=device) * patch
    return torch.stack([start, start + patch], dim=-1)


def _causal(bounds: Tensor, factor: int, offset: int) -> Tensor:
    """Latent steps as frames: the first latent frame stands for `offset` frames, each other one for `factor`."""
    return (bounds * factor + offset - factor).clamp(min=0)


def video_positions(cfg: LTX2Config, grid: tuple[int, int, int], fps: float | Tensor, *, device="cpu") -> Tensor:
    """Intervals of video tokens in (t, h, w) order, float32 `[1, 3, N, 2]`, or `[B, 3, N, 2]` for fps `[B]`.

    Args:
        grid: tokens along time, height and width. fps: frames per second, which put time into seconds.
    """
    t, h, w = grid
    patches = (cfg.patch_size_t, cfg.patch_size, cfg.patch_size)
    time, *space = (_bounds(n, p, device) for n, p in zip(grid, patches, strict=True))
    time = _causal(time, cfg.vae_scale_factors[0], cfg.causal_offset)
    rows, columns = (b * factor for b, factor in zip(space, cfg.vae_scale_factors[1:], strict=True))
    rate = _number(fps, device).reshape(-1, 1, 1)
    axes = [
        (time / rate)[:, :, None, None].expand(-1, t, h, w, 2),
        rows[None, None, :, None].expand(rate.shape[0], t, h, w, 2),
        columns[None, None, None, :].expand(rate.shape[0], t, h, w, 2),
    ]
    return torch.stack(axes, dim=1).flatten(2, 4)


def audio_positions(cfg: LTX2Config, count: int, *, shift: int = 0, device="cpu") -> Tensor:
    """Intervals of audio tokens in seconds, float32 `[1, 1, count, 2]`; `shift` latent steps come before the first."""
    steps = _bounds(count, cfg.audio_patch_size_t, device) + shift
    frames = _causal(steps, cfg.audio_scale_factor, cfg.causal_offset)
    return (frames * cfg.audio_hop_length / _number(cfg.audio_sampling_rate, device))[None, None]


def frequencies(cfg: LTX2Config, count: int, device) -> Tensor:
    """`theta^u pi/2` for `count` values of u from 0 to 1, float32 `[count]`; see `rope_double_precision`.

    In double precision they are float64 before their one rounding. Angles are float32 products: so the public
    models were trained, and at the highest frequency (2 f - 1) w is rounded to some 1e-3.
    """
    wide = torch.float64 if cfg.rope_double_precision else torch.float32
    place = device if highest_float(device) == torch.float64 else "cpu"
    exponents = torch.linspace(0, 1, count, dtype=wide, device=place)
    return (cfg.rope_theta**exponents * (math.pi / 2)).float().to(device)


def rope_table(cfg: LTX2Config, positions: Tensor, extents: tuple[int, ...], heads: int, head_dim: int) -> Rope:
    """Cosines and sines, float32 `[B, N, heads, head_dim / 2]`.

    Args:
        positions: `[B, axes, N, 2]`. extents: the length of each axis that counts as 1.

    Channel pairs that the axes do not share evenly come first and are not turned.
    """
    width = heads * head_dim
    longest = torch.stack([_number(extent, positions.device) for extent in extents])
    middle = positions.float().mean(-1) / longest
    turns = frequencies(cfg, width // (2 * len(extents)), positions.device)
    angles = ((2 * middle - 1)[..., None] * turns).permute(0, 2, 3, 1).flatten(2)
    still = angles.new_zeros(*angles.shape[:2], width // 2 - angles.shape[-1])
    angles = torch.cat([still, angles], dim=-1).unflatten(-1, (heads, head_dim // 2))
    return angles.cos(), angles.sin()


def self_rope(cfg: LTX2Config, s: Stream, positions: Tensor) -> Rope:
    """The table of a stream's attention to itself, from its positions; see `rope_table`."""
    if s.name == "video":
        extents = (cfg.pos_embed_max_pos, cfg.base_height, cfg.base_width)
    else:
        extents = (cfg.audio_pos_embed_max_pos,)
    return rope_table(cfg, positions, extents, s.heads, s.head_dim)


def cross_rope(cfg: LTX2Config, positions: Tensor) -> Rope:
    """The table of a stream's attention to the other one: time alone, and the audio stream's heads in both."""
    longest = max(cfg.pos_embed_max_pos, cfg.audio_pos_embed_max_pos)
    audio = cfg.stream("audio")
    return rope_table(cfg, positions[:, :1], (longest,), audio.heads, audio.head_dim)


def own_heads(table: Rope, tp: TensorParallel) -> Rope:
    """The part of a table `[B, N, heads, D / 2]` that belongs to the heads of this tensor-parallel rank."""
    group = getattr(tp, "group", None)
    if group is None:
        return table
    share = table[0].shape[2] // group.size
    cos, sin = (t.narrow(2, group.rank * share, share) for t in table)
    return cos, sin
