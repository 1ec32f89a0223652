"""What an LTX-2 stream is conditioned on besides text: pure functions that training and inference both call.

A condition writes clean latents and a denoise mask (1: generated, 0: given), never the noisy latents: `noise_latents`
mixes them afterwards in float32, and each token gets a timestep of its own. Overwriting conditions put latents in the
place of the stream's own tokens; `Keyframe` and the references append tokens with positions of their own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from core import keys
from core.errors import UserError
from core.keys import Key
from nn.layers import wide
from nn.ltx2_condition_kinds import (
    APPENDED,
    AudioGeometry,
    Condition,
    Extras,
    FirstFrame,
    Geometry,
    Keyframe,
    LatentFrames,
    Mask,
    Prefix,
    Reference,
    ReferenceAudio,
    SpatialCrop,
    Suffix,
    VideoGeometry,
    check_conditions,
    crop_tokens,
    frame_span,
)
from nn.ltx2_config import LTX2Config
from nn.ltx2_inputs import StreamInputs, audio_tokens, extend_strengths, timestep_of, video_grid, video_tokens
from nn.ltx2_rope import audio_positions, video_positions

__all__ = [
    "AudioGeometry", "Conditioned", "FirstFrame", "Keyframe", "LatentFrames", "Mask", "Prefix", "Reference",
    "ReferenceAudio", "SpatialCrop", "Suffix", "VideoGeometry", "Written", "apply_conditions", "keep_given",
    "noise_latents", "own_positions", "stream_inputs", "write_conditions", "written_channels",
]  # fmt: skip


# --- results ------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A stream after its conditions, before noise; its own N tokens first, then the appended ones.

    Args:
        latent: what is noised, `[B, N', C]`: the clean latents, of appended tokens the given ones.
        clean: what `1 - denoise` of a token is held at, `[B, N', C]`.
        denoise: `[B, N']` in float32 or wider; None where no condition applies.
        positions: `[1 or B, axes, N', 2]`.
        strengths: `[B, N', N']` for `StreamInputs`; None where attention has no mask.
        noise: of the appended tokens, `[B, N' - N, C]`. noisy: N.
    """

    latent: Tensor
    clean: Tensor
    denoise: Tensor | None
    positions: Tensor
    strengths: Tensor | None
    noise: Tensor
    noisy: int


class Conditioned(NamedTuple):
    """A stream as the model and the loss take it.

    Args:
        latent: `[B, N', C]`. timesteps: in 0..1000, `[B, N']`, or `[B, 1]` where no condition applies.
        loss_mask: bool `[B, N']`, True for tokens that are wholly generated.
        positions: `[1 or B, axes, N', 2]`. target: velocity `noise - latents`, `[B, N', C]`.
    """

    latent: Tensor
    timesteps: Tensor
    loss_mask: Tensor
    positions: Tensor
    target: Tensor


# --- overwriting --------------------------------------------------------------------------------------------------


def _marked(c: Condition, geometry: Geometry, extras: Extras, like: Tensor) -> Tensor:
    """Which of the stream's tokens a condition overwrites, `[1 or B, N]` in [0, 1]."""
    if isinstance(c, Mask):
        mask = extras[c.mask].to(like)
        if c.threshold is not None:
            mask = (mask > c.threshold).to(like)
        if geometry.stream == "audio":
            return mask
        p, pt = geometry.cfg.patch_size, geometry.cfg.patch_size_t
        patches = rearrange(mask, "b (t pt) (h ph) (w pw) -> b (t h w) (pt ph pw)", pt=pt, ph=p, pw=p)
        return patches.amin(-1)  # a token is given only where all of its patch is
    marked = like.new_zeros(geometry.grid)
    if isinstance(c, SpatialCrop):
        top, left, bottom, right = crop_tokens(c, geometry)
        marked[:, top:bottom, left:right] = 1
    else:
        patch = geometry.cfg.patch_size_t if geometry.stream == "video" else 1
        first, end = (n // patch for n in frame_span(c, geometry))
        marked[first:end] = 1
    return marked.reshape(1, -1)


def _tokens(c: Condition, geometry: Geometry, extras: Extras, like: Tensor) -> Tensor:
    """The given latents as tokens `[1 or B, M, C]`."""
    given = extras[c.latents].to(like)
    return video_tokens(geometry.cfg, given) if geometry.stream == "video" else audio_tokens(geometry.cfg, given)


def _overwrite(
    c: Condition, key: Key, geometry: Geometry, extras: Extras, own: Tensor, clean: Tensor, denoise: Tensor
) -> tuple[Tensor, Tensor]:
    """Clean latents and denoise mask after one condition; `own` are the sample's clean latents."""
    marked = _marked(c, geometry, extras, denoise)
    tokens = own
    if c.latents is not None:
        tokens = _tokens(c, geometry, extras, clean)
        if frame_span(c, geometry) is not None:  # the latents are as long as the span; a zero elsewhere has no weight
            whole = clean.new_zeros(tokens.shape[0], *clean.shape[1:])
            whole[:, marked[0] > 0] = tokens
            tokens = whole
    if c.probability < 1:
        drawn = _drawn(c, key, own.shape[0]).to(denoise.device)
        marked = marked * drawn[:, None]
    m = marked[..., None]
    return clean * (1 - m) + tokens * m, denoise * (1 - marked) + (1 - c.strength) * marked


def _drawn(c: Condition, key: Key, count: int) -> Tensor:
    """Whether a condition applies, bool `[count]`; from its name and settings, so not from its place in the list."""
    return keys.uniform(keys.fold_in(key, repr(c)), (count,)) < c.probability


# --- appending ----------------------------------------------------------------------------------------------------


def _keyframe_positions(c: Keyframe, geometry: VideoGeometry, grid: tuple[int, int, int], device) -> Tensor:
    """At pixel frame 0 a latent frame stands for what the video's first does; elsewhere each stands for its frames."""
    cfg, fps = geometry.cfg, geometry.fps
    if c.frame != 0:
        cfg = dataclasses.replace(cfg, causal_offset=cfg.vae_scale_factors[0])
    frames = video_positions(cfg, grid, 1.0, device=device)
    time = frames[:, :1] + c.frame
    if c.single:
        time = torch.cat([time[..., :1], time[..., :1] + 1], dim=-1)
    rate = fps.to(device, time.dtype) if isinstance(fps, Tensor) else torch.full((1,), fps, device=device)
    time = time / rate.reshape(-1, 1, 1, 1)
    return torch.cat([time, frames[:, 1:].expand(time.shape[0], -1, -1, -1)], dim=1)


def _reference_positions(c: Reference, geometry: VideoGeometry, grid: tuple[int, int, int], own: Tensor) -> Tensor:
    """The reference spans what the video spans: its last token ends where the video's does.

    A later latent frame stands for S times as many frames, the first one still for one: everything is moved back by
    what that one would be too long.
    """
    where = video_positions(geometry.cfg, grid, geometry.fps / c.temporal, device=own.device)
    time, space = where[:, :1], where[:, 1:]
    if c.temporal != 1:
        time = (time - (c.temporal - 1) * own[:, :1, :1, 1:]).clamp(min=0)
    return torch.cat([time, space * c.downscale if c.downscale != 1 else space], dim=1)


def _appended_positions(c: Condition, geometry: Geometry, extras: Extras, own: Tensor) -> Tensor:
    given = extras[c.latents]
    if isinstance(c, ReferenceAudio):
        return audio_positions(geometry.cfg, given.shape[2], device=own.device)
    grid = video_grid(geometry.cfg, given.shape)
    if isinstance(c, Keyframe):
        return _keyframe_positions(c, geometry, grid, own.device)
    return _reference_positions(c, geometry, grid, own)


def _strengths(appended: Sequence[Condition], counts: Sequence[int], extras: Extras, noisy: int, like: Tensor):
    """Who sees whom, `[B, N', N']`: None where no reference says so. `like`: `[B, ...]`, the dtype and device."""
    if all(getattr(c, "attention", None) is None for c in appended):
        return None
    batch = like.shape[0]
    first = noisy + sum(n for c, n in zip(appended, counts, strict=True) if isinstance(c, Keyframe))
    strengths = like.new_ones(batch, first, first)
    for c, n in zip(appended, counts, strict=True):
        if isinstance(c, Reference):
            seen = extras[c.attention] if isinstance(c.attention, str) else c.attention
            seen = like.new_full((1, n), 1.0 if seen is None else seen) if not isinstance(seen, Tensor) else seen
            strengths = extend_strengths(strengths, noisy, seen.to(like).expand(batch, n))
    return strengths


# --- the functions ------------------------------------------------------------------------------------------------


def own_positions(geometry: Geometry, device) -> Tensor:
    """Where a stream's own tokens are, `[1 or B, axes, N, 2]`."""
    if geometry.stream == "audio":
        return audio_positions(geometry.cfg, geometry.count, device=device)
    return video_positions(geometry.cfg, geometry.grid, geometry.fps, device=device)


def write_conditions(
    key: Key, clean: Tensor, geometry: Geometry, conditions: Sequence[Condition], extras: Extras
) -> Written:
    """Clean latents, denoise mask, positions and who sees whom after `conditions`; see `Written`.

    Overwriting conditions come first, in the order of the list; then keyframes, then references are appended.

    Args:
        key: of the draws for `probability` and of noise for appended tokens with a strength below 1.
        clean: the stream's own latents `[B, N, C]`: of the sample in training, what refinement starts from, or zeros.
        extras: tensors that conditions name.

    Raises:
        UserError: everything that does not fit the geometry, by condition, with what is allowed.
    """
    check_conditions(clean, geometry, conditions, extras)
    clean = clean.to(wide(clean))
    own, denoise, noisy = clean, clean.new_ones(clean.shape[:2]), clean.shape[1]
    written = [c for c in conditions if not isinstance(c, APPENDED)]
    for c in written:
        clean, denoise = _overwrite(c, key, geometry, extras, own, clean, denoise)
    appended = [c for kind in APPENDED for c in conditions if isinstance(c, kind)]
    appended = [c for c in appended if c.probability == 1 or bool(_drawn(c, key, 1))]
    positions = own_positions(geometry, clean.device)
    tokens = [_tokens(c, geometry, extras, clean).expand(clean.shape[0], -1, -1) for c in appended]
    places = [_appended_positions(c, geometry, extras, positions) for c in appended]
    masks = [denoise.new_full(t.shape[:2], 1 - c.strength) for c, t in zip(appended, tokens, strict=True)]
    return Written(
        latent=torch.cat([own, *tokens], dim=1),
        clean=torch.cat([clean, *tokens], dim=1),
        denoise=torch.cat([denoise, *masks], dim=1) if written or appended else None,
        positions=torch.cat([positions, *places], dim=2),
        strengths=_strengths(appended, [t.shape[1] for t in tokens], extras, noisy, denoise),
        noise=torch.cat([own[:, :0], *(_noise(c, key, t) for c, t in zip(appended, tokens, strict=True))], dim=1),
        noisy=noisy,
    )


def _noise(c: Condition, key: Key, tokens: Tensor) -> Tensor:
    """Noise of appended tokens; none is drawn where it has no weight."""
    if c.strength == 1:
        return torch.zeros_like(tokens)
    return keys.normal(keys.fold_in(key, f"noise {c!r}"), tokens.shape, tokens.dtype, tokens.device)


def noise_latents(cfg: LTX2Config, written: Written, noise: Tensor, sigma: Tensor) -> Conditioned:
    """Mixes noise into conditioned latents: `(1 - m) clean + m ((1 - sigma) latent + sigma noise)`, m = `denoise`.

    In float32 or wider. A token with m = 0 is clean at every sigma and has timestep 0.

    Args:
        noise: of the stream's own tokens, `[B, N, C]`. sigma: `[B]` or `[B, 1]` in [0, 1].
    """
    noise = torch.cat([noise.to(written.latent.dtype), written.noise], dim=1)
    level = sigma.reshape(-1, 1).to(written.latent.dtype)
    latent, timesteps = torch.lerp(written.latent, noise, level[..., None]), timestep_of(cfg, level)
    loss_mask = torch.ones(latent.shape[:2], dtype=torch.bool, device=latent.device)
    if written.denoise is not None:
        m = written.denoise
        latent = torch.lerp(written.clean, latent, m[..., None])
        timesteps, loss_mask = timesteps * m, m == 1
    return Conditioned(latent, timesteps, loss_mask, written.positions, noise - written.latent)


def apply_conditions(
    key: Key, clean: Tensor, noise: Tensor, sigma: Tensor, geometry: Geometry, conditions: Sequence[Condition],
    extras: Extras,
) -> Conditioned:  # fmt: skip
    """`write_conditions`, then `noise_latents`: `(latent, timesteps, loss_mask, positions, target)`.

    An empty list is plain generation: `[B, N, C]` noised to one timestep a sample, `[B, 1]`. Raises UserError for
    what does not fit, and for references with `attention`, whose mask the five results cannot carry.
    """
    written = write_conditions(key, clean, geometry, conditions, extras)
    if written.strengths is not None:
        raise UserError("attention of a Reference: call write_conditions and noise_latents, whose strengths go along")
    return noise_latents(geometry.cfg, written, noise, sigma)


def keep_given(written: Written, estimate: Tensor) -> Tensor:
    """An x0 estimate `[B, N', C]` held at the given latents: `m estimate + (1 - m) clean`, after all guidance."""
    if written.denoise is None:
        return estimate
    return torch.lerp(written.clean, estimate.to(written.clean.dtype), written.denoise[..., None])


def written_channels(name: str, written: Written) -> dict[str, Tensor]:
    """A stream's conditions as channels `[B, ...]` beside those of its text: what guidance repeats and splits.

    `name_positions`, and where there are any `name_denoise` and `name_strengths`.
    """
    batch = written.latent.shape[0]
    found = {"positions": written.positions, "denoise": written.denoise, "strengths": written.strengths}
    return {f"{name}_{k}": v.expand(batch, *v.shape[1:]) for k, v in found.items() if v is not None}


def stream_inputs(
    cfg: LTX2Config, name: str, latent: Tensor, sigma: Tensor, channels: Mapping[str, Tensor]
) -> StreamInputs:  # fmt: skip
    """A stream of the model's inputs, with timesteps per token where something is given.

    Args:
        latent: `[B, N', C]` at `sigma` `[B]` or `[B, 1]`: from `noise_latents`, or a sampler on the way.
        channels: those of `written_channels`, `name_text` `[B, L, D]` and perhaps `name_text_mask` `[B, L]`.
    """
    level = timestep_of(cfg, sigma.reshape(-1))
    denoise = channels.get(f"{name}_denoise")
    timesteps = level[:, None] if denoise is None else level[:, None] * denoise
    optional = {k: channels.get(f"{name}_{k}") for k in ("text_mask", "strengths")}
    return StreamInputs(
        latent, timesteps, channels[f"{name}_positions"], channels[f"{name}_text"], level=level, **optional
    )
