"""The one place where LTX-2's inputs are built: training, validation and inference all call it.

Latents are tokens `[B, N, C]`. Flow matching with `x_sigma = (1 - sigma) x0 + sigma noise`, velocity target
`noise - x0`, timestep `1000 sigma`; sigma belongs to a sample (`[B, 1]`) or to each token (`[B, N]`).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from einops import rearrange
from torch import Tensor

from core.errors import UserError, nearest_names, raise_faults
from core.geometry import nearest_valid
from nn.layers import patchify, wide
from nn.ltx2 import SKIPS
from nn.ltx2_config import LTX2Config, Stream


@dataclasses.dataclass(frozen=True)
class StreamInputs:
    """One stream's part of a call of the model.

    Args:
        latents: noisy tokens `[B, N, C]`, float32 or wider.
        timestep: noise level in 0..1000, `[B]` or `[B, 1]`, or per token `[B, N]`.
        positions: `[1 or B, axes, N, 2]`, see `nn.ltx2_rope`.
        text: `[B, L, text_dim]` as the text connector gives it. text_mask: bool `[B, L]`, True where text is real.
        level: the sample's noise level `[B]` beside timesteps per token; what text and the other stream see of it.
        strengths: how much video token i sees of token j, `[B, N, N]` in [0, 1]; see `extend_strengths`.
        keyframes: bool `[B, N]`, video tokens that encode a single frame (LTX-2.5).
    """

    latents: Tensor
    timestep: Tensor
    positions: Tensor
    text: Tensor
    text_mask: Tensor | None = None
    level: Tensor | None = None
    strengths: Tensor | None = None
    keyframes: Tensor | None = None


# --- latents and tokens -------------------------------------------------------------------------------------------


def latent_faults(cfg: LTX2Config, shape: Sequence[int]) -> list[str]:
    """Faults of a video latent's shape `[C, T, H, W]` against a config; empty when it fits."""
    if len(shape) != 4:
        return [f"shape {list(shape)} of one video, expected [C, T, H, W]"]
    patches = (cfg.patch_size_t, cfg.patch_size, cfg.patch_size)
    channels = cfg.in_channels // (cfg.patch_size_t * cfg.patch_size**2)
    faults = [] if shape[0] == channels else [f"{shape[0]} video latent channels, the model takes {channels}"]
    for name, n, p in zip(("frames", "height", "width"), shape[1:], patches, strict=True):
        if n < 1 or n % p:
            near = " or ".join(str(v) for v in nearest_valid(n, p))
            faults.append(f"latent {name} {n} must be a multiple of {p}: nearest valid {near}")
    return faults


def video_grid(cfg: LTX2Config, shape: Sequence[int]) -> tuple[int, int, int]:
    """Tokens along time, height and width of latents `[..., T, H, W]`."""
    t, h, w = shape[-3:]
    return t // cfg.patch_size_t, h // cfg.patch_size, w // cfg.patch_size


def video_tokens(cfg: LTX2Config, latents: Tensor) -> Tensor:
    """`[B, C, T, H, W] -> [B, N, C']` in (t, h, w) order. Raises UserError for a shape that does not fit."""
    raise_faults("video latents do not fit the model", latent_faults(cfg, latents.shape[1:]))
    return patchify(latents, (cfg.patch_size_t, cfg.patch_size, cfg.patch_size))


def video_latents(cfg: LTX2Config, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Inverse of `video_tokens` for a grid of tokens: `[B, N, C'] -> [B, C, T, H, W]`."""
    t, h, w = grid
    pt, p = cfg.patch_size_t, cfg.patch_size
    return rearrange(
        tokens, "b (t h w) (c pt ph pw) -> b c (t pt) (h ph) (w pw)", t=t, h=h, w=w, pt=pt, ph=p, pw=p
    )  # fmt: skip


def audio_tokens(cfg: LTX2Config, latents: Tensor) -> Tensor:
    """`[B, C, T, mel] -> [B, T, C * mel]`, one token per latent frame. Raises UserError for another width."""
    if latents.ndim != 4 or latents.shape[1] * latents.shape[3] != cfg.audio_in_channels:
        expected = f"[B, C, T, mel] with C * mel = {cfg.audio_in_channels}"
        raise UserError(f"audio latents: {list(latents.shape)}, expected {expected}")
    return rearrange(latents, "b c t m -> b t (c m)")


def audio_latents(tokens: Tensor, mel_bins: int) -> Tensor:
    """Inverse of `audio_tokens`: `[B, T, C * mel] -> [B, C, T, mel]`."""
    return rearrange(tokens, "b t (c m) -> b c t m", m=mel_bins)


# --- flow matching ------------------------------------------------------------------------------------------------


def noised(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """`(1 - sigma) clean + sigma noise` of tokens `[B, N, C]`, sigma `[B, 1]` or `[B, N]`; float32 or wider."""
    s = sigma[..., None]
    s = s.to(wide(s))
    return (1 - s) * clean + s * noise


def timestep_of(cfg: LTX2Config, sigma: Tensor) -> Tensor:
    """The timestep that a noise level stands for, in float32 or wider."""
    return sigma.to(wide(sigma)) * cfg.timestep_scale_multiplier


# --- masks --------------------------------------------------------------------------------------------------------


def keep_masks(
    cfg: LTX2Config, skips: Sequence[Mapping[str, Sequence[int] | None]], *, device="cpu"
) -> Tensor:  # fmt: skip
    """The attentions that each sample of a guidance pass runs: bool `[4, blocks, B]`, rows in the order of `SKIPS`.

    Args:
        skips: per sample `{site: blocks to skip it in}`, None for all blocks: `{"self": [29], "audio_self": [29]}`
            for spatio-temporal guidance, `{"a2v": None, "v2a": None}` for one modality alone.

    Raises:
        UserError: every unknown site and block.
    """
    keep = torch.ones(len(SKIPS), cfg.num_layers, len(skips), dtype=torch.bool)
    faults = []
    for i, sample in enumerate(skips):
        for site, blocks in sample.items():
            if site not in SKIPS:
                faults.append(f"sample {i}: site {site!r} is none of {', '.join(SKIPS)}{nearest_names(site, SKIPS)}")
                continue
            chosen = range(cfg.num_layers) if blocks is None else blocks
            outside = [b for b in chosen if not 0 <= b < cfg.num_layers]
            faults += [f"sample {i}: {site} in block {b}, blocks are 0 to {cfg.num_layers - 1}" for b in outside]
            if not outside:
                keep[SKIPS.index(site), list(chosen), i] = False
    raise_faults("perturbations of a guidance pass", faults)
    return keep.to(device)


def extend_strengths(strengths: Tensor | None, noisy: int, new: Tensor) -> Tensor:
    """Adds reference tokens to who sees whom: `[B, N, N] -> [B, N + M, N + M]`.

    The first `noisy` tokens and the new ones see each other by `new`; new ones see each other wholly, and nothing of
    other references.

    Args:
        strengths: of the N tokens so far; None where there are only noisy ones, who see each other wholly.
        new: per new token `[B, M]` in [0, 1].
    """
    batch, added = new.shape
    strengths = new.new_ones(batch, noisy, noisy) if strengths is None else strengths
    before = strengths.shape[-1]
    out = new.new_zeros(batch, before + added, before + added)
    out[:, :before, :before] = strengths
    out[:, before:, before:] = 1
    out[:, :noisy, before:] = new[:, None]
    out[:, before:, :noisy] = new[:, :, None]
    return out


def strength_bias(strengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Strengths `[B, N, N]` in [0, 1] as what is added to attention's scores, `[B, 1, N, N]`: their logarithm.

    A strength multiplies the weight before it is normalised; 0 becomes the dtype's lowest number.
    """
    lowest = torch.finfo(dtype).min
    logs = strengths.to(wide(strengths)).clamp(min=torch.finfo(torch.float32).tiny).log()
    return torch.where(strengths > 0, logs, lowest).to(dtype)[:, None]


# --- the builder --------------------------------------------------------------------------------------------------


def _needs_level(cfg: LTX2Config) -> bool:
    """Whether text or the other stream sees the sample's noise level."""
    return (cfg.prompt_tables and cfg.use_prompt_adaln_single) or (cfg.crossed and cfg.use_cross_timestep)


def _stream_faults(cfg: LTX2Config, s: Stream, given: StreamInputs) -> list[str]:
    """What of one stream does not fit."""
    if given.latents.ndim != 3:  # without a batch and tokens nothing else can be judged
        return [f"{s.name} latents: {list(given.latents.shape)}, expected [B, N, {s.in_channels}]"]
    batch, count, _ = given.latents.shape
    length = given.text.shape[1] if given.text.ndim == 3 else "L"
    axes = 3 if s.name == "video" else 1
    expected = {
        "latents": [(batch, count, s.in_channels)],
        "timestep": [(batch,), (batch, 1), (batch, count)],
        "positions": [(1, axes, count, 2), (batch, axes, count, 2)],
        "text": [(batch, length, s.text_dim)],
        "text_mask": [(batch, length)],
        "level": [(batch,), (batch, 1)],
        "strengths": [(batch, count, count)],
        "keyframes": [(batch, count)],
    }
    faults = []
    for name, shapes in expected.items():
        value = getattr(given, name)
        if value is not None and tuple(value.shape) not in shapes:
            allowed = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
            faults.append(f"{s.name} {name}: {list(value.shape)}, expected {allowed}")
    for name in ("text_mask", "keyframes"):
        value = getattr(given, name)
        if value is not None and value.dtype != torch.bool:
            faults.append(f"{s.name} {name}: dtype {value.dtype}, expected torch.bool")
    per_token = given.timestep.ndim == 2 and given.timestep.shape[1] != 1
    if given.level is None and per_token and _needs_level(cfg):
        faults.append(f"{s.name} level: missing, this model needs it beside timesteps per token, [{batch}]")
    return faults + _missing_parts(cfg, s, given)


def _missing_parts(cfg: LTX2Config, s: Stream, given: StreamInputs) -> list[str]:
    """Inputs that the stream or the model has no part for."""
    faults = []
    if given.strengths is not None and s.name == "audio":
        faults.append("audio strengths: only video attention takes them")
    if given.keyframes is not None and (s.name == "audio" or not cfg.use_keyframes_abs_pos_embedding):
        faults.append(f"{s.name} keyframes: given to a model that has no embedding for them")
    return faults


def _check(cfg: LTX2Config, streams: Mapping[str, StreamInputs], keep: Tensor | None) -> None:
    wanted = {s.name: s for s in cfg.streams}
    faults = [f"{name}: missing, the model is {cfg.modality}" for name in wanted if name not in streams]
    for name, given in streams.items():
        if name not in wanted:
            faults.append(f"{name}: given to a model that is {cfg.modality}")
        else:
            faults += _stream_faults(cfg, wanted[name], given)
    batches = {name: given.latents.shape[0] for name, given in streams.items()}
    if len(set(batches.values())) > 1:
        faults.append("batches differ: " + ", ".join(f"{name} has {n}" for name, n in batches.items()))
    if keep is not None and (keep.dtype != torch.bool or keep.shape[:2] != (len(SKIPS), cfg.num_layers)
                             or keep.ndim != 3 or keep.shape[2] not in batches.values()):  # fmt: skip
        shape = f"[{len(SKIPS)}, {cfg.num_layers}, {next(iter(batches.values()), 'B')}]"
        faults.append(f"keep: {list(keep.shape)} {keep.dtype}, expected {shape} torch.bool")
    raise_faults("the model's inputs do not fit its config", faults)


def _column(t: Tensor) -> Tensor:
    """A noise level `[B]`, `[B, 1]` or `[B, N]` as `[B, 1]` or `[B, N]`, float32 or wider."""
    return (t[:, None] if t.ndim == 1 else t).to(wide(t))


def model_inputs(
    cfg: LTX2Config, streams: Mapping[str, StreamInputs], *, keep: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Inputs of `nn.ltx2.forward`.

    Args:
        streams: `{"video": ..., "audio": ...}`, exactly those that the model has.
        keep: bool `[4, blocks, B]`, see `keep_masks`. Guidance passes that all have one share a compiled block.
        dtype: compute dtype; default that of the first stream's latents.

    Returns:
        For each stream `name` (tokens in `dtype`), `name_timestep` `[B, 1]` or `[B, N]`, `name_level` `[B, 1]` (both
        float32 or wider), `name_positions`, `name_text` in `dtype`, and where given `name_text_mask`, `name_bias`;
        `keyframes`, `keep`.

    Raises:
        UserError: everything that does not fit the config, in one message.
    """
    _check(cfg, streams, keep)
    dtype = next(iter(streams.values())).latents.dtype if dtype is None else dtype
    inputs = {} if keep is None else {"keep": keep}
    for name in (s.name for s in cfg.streams):
        given = streams[name]
        inputs[name] = given.latents.to(dtype)
        inputs[f"{name}_timestep"] = _column(given.timestep)
        if given.level is not None:
            inputs[f"{name}_level"] = _column(given.level)
        elif inputs[f"{name}_timestep"].shape[1] == 1:
            inputs[f"{name}_level"] = inputs[f"{name}_timestep"]
        inputs[f"{name}_positions"] = given.positions.float()
        inputs[f"{name}_text"] = given.text.to(dtype)
        if given.text_mask is not None:
            inputs[f"{name}_text_mask"] = given.text_mask
        if given.strengths is not None:
            inputs[f"{name}_bias"] = strength_bias(given.strengths, dtype)
        if given.keyframes is not None:
            inputs["keyframes"] = given.keyframes
    return inputs
