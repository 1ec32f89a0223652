"""Supervised flow matching of LTX-2: noise, noise levels and the loss of each stream, as pure functions.

Streams have noise and a noise level of their own. As in `train.sft` they depend only on (seed, step, the sample's place
in the step, stream): not on how the step is cut, nor on which other stream there is. A stream that is *given* is seen
clean, at noise level 0, and has no loss: a video's sound from the video, or the reverse.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from core import keys
from infer.ltx2_schedules import TOKENS, shift_exponent
from nn import ltx2
from nn.ltx2_conditions import (
    AudioGeometry,
    Conditioned,
    Geometry,
    VideoGeometry,
    apply_conditions,
    stream_inputs,
)
from nn.ltx2_config import LTX2Config
from nn.ltx2_inputs import audio_tokens, model_inputs, video_grid, video_tokens
from nn.run import Run
from train.rows import Batch
from train.sft import WEIGHTS

DEFAULT_FPS = 24.0
"""Frames per second of samples that note none."""
FLOOR = 1e-3
"""The least noise level that is drawn: what the stretched density has below it is reflected."""
TAILS = (2.5758, 3.0902)
"""Standard normal quantiles of 99.5 % and 99.9 %: between those of the density it is stretched to [0, 1]."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is drawn and how errors count; fields as in `training.model` of a recipe.

    `weights` has the streams with a loss and what each counts, `given` the stream without one.
    """

    weights: Mapping[str, float]
    given: str | None = None
    weighting_scheme: str = "shifted_logit_normal"
    logit_std: float = 1.0
    timestep_uniform_prob: float = 0.1
    loss_weighting: str = "none"
    precondition_outputs: bool = False
    caption_dropout: float = 0.0


@dataclasses.dataclass(frozen=True)
class Draws:
    """Random parts of a microbatch, by stream: noise in the latents' shape and sigma `[B]`; and which captions are
    dropped, `[B]`, on the CPU."""

    noise: Mapping[str, Tensor]
    sigmas: Mapping[str, Tensor]
    dropped: Tensor

    def to(self, device: torch.device | str) -> "Draws":
        """The same on a device."""
        moved = lambda channels: {k: v.to(device) for k, v in channels.items()}  # noqa: E731
        return Draws(moved(self.noise), moved(self.sigmas), self.dropped)


# --- draws ----------------------------------------------------------------------------------------------------


def stretched(normal: Tensor, tokens: int, std: float) -> Tensor:
    """Standard normal numbers as noise levels in [0, 1], of the density that is shifted by the number of tokens.

    `u = sigmoid(mu + std n)` with the `mu` of the official schedule (at most that of 4,096 tokens), stretched linearly
    so that its 0.5 % and 99.9 % quantiles become 0 and 1. What falls below `FLOOR` is reflected at it; then all is
    clamped. Source: the public LTX-2 trainer's behaviour.
    """
    mu = shift_exponent(min(tokens, TOKENS[1]))
    low, high = (1 / (1 + math.exp(-(mu + x * std))) for x in (-TAILS[0], TAILS[1]))
    t = (torch.sigmoid(mu + std * normal) - low) / (high - low)
    return torch.where(t < FLOOR, 2 * FLOOR - t, t).clamp(0.0, 1.0)


def draw_sigma(objective: Objective, k: keys.Key, tokens: int) -> Tensor:
    """One noise level, 0-d float32: of the stretched density, or with `timestep_uniform_prob` (and always with
    `uniform`) uniform in [FLOOR, 1].
    """
    share = 1.0 if objective.weighting_scheme == "uniform" else objective.timestep_uniform_prob
    if keys.uniform(keys.fold_in(k, "mixture")) < share:
        return FLOOR + (1 - FLOOR) * keys.uniform(keys.fold_in(k, "uniform"))
    return stretched(keys.normal(keys.fold_in(k, "normal"), ()), tokens, objective.logit_std)


def token_count(cfg: LTX2Config, name: str, shape: Sequence[int]) -> int:
    """Tokens of a stream whose latents have this shape: `[..., T, H, W]` of video, `[B, C, T, F]` of audio."""
    return math.prod(video_grid(cfg, shape)) if name == "video" else shape[2]


def draw(
    cfg: LTX2Config, objective: Objective, k: keys.Key, step: int, first: int, shapes: Mapping[str, Sequence[int]]
) -> Draws:
    """The draws of samples `first`, `first` + 1, ... of a step, on the CPU in float32.

    Args:
        shapes: of the latents by stream, `[B, ...]`. A stream that is given has noise level 0.
    """
    count = next(iter(shapes.values()))[0]
    own = [keys.fold_in(keys.fold_in(k, step), first + i) for i in range(count)]
    noise, sigmas = {}, {}
    for name, shape in shapes.items():
        key = [keys.fold_in(o, name) for o in own]
        noise[name] = torch.stack([keys.normal(keys.fold_in(o, "noise"), tuple(shape[1:])) for o in key])
        tokens = token_count(cfg, name, shape)
        drawn = torch.stack([draw_sigma(objective, keys.fold_in(o, "sigma"), tokens) for o in key])
        sigmas[name] = torch.zeros(count) if name == objective.given else drawn
    dropped = torch.stack([keys.uniform(keys.fold_in(o, "caption")) for o in own]) < objective.caption_dropout
    return Draws(noise, sigmas, dropped)


def draw_batch(cfg: LTX2Config, objective: Objective, k: keys.Key, step: int, first: int, batch: Batch) -> Draws:
    """`draw` for the latents of a batch."""
    return draw(cfg, objective, k, step, first, {s.name: batch.targets[s.name].shape for s in cfg.streams})


# --- the model's inputs ---------------------------------------------------------------------------------------


def rate_of(fps: Sequence[float | None], device: torch.device) -> float | Tensor:
    """Frames per second of a batch: a number where all samples have the same, else `[B]`."""
    rates = [DEFAULT_FPS if rate is None else rate for rate in fps]
    several = len(set(rates)) > 1
    return torch.tensor(rates, device=device) if several else rates[0] if rates else DEFAULT_FPS


def geometry_of(cfg: LTX2Config, name: str, batch: Batch) -> Geometry:
    """Where the tokens of a stream are."""
    latents = batch.targets[name]
    if name == "audio":
        return AudioGeometry(cfg, token_count(cfg, name, latents.shape))
    return VideoGeometry(cfg, video_grid(cfg, latents.shape), rate_of(batch.fps, latents.device))


def text_of(name: str, batch: Batch) -> tuple[Tensor, list[int]]:
    """The text `[B, L, D]` of a stream and its lengths: the video's serves both where the sound has none of its own."""
    if name == "audio" and "audio_text" in batch.conditions:
        return batch.conditions["audio_text"], batch.audio_text_lens
    return batch.conditions["text"], batch.text_lens


def stream_text(name: str, batch: Batch, empty: Mapping[str, Tensor], dropped: Tensor) -> tuple[Tensor, Tensor | None]:
    """Text `[B, L, D]` of a stream with dropped captions replaced, and bool `[B, L]`, True where it is real.

    The mask is None where all of it is: then attention needs none.
    """
    text, lens = text_of(name, batch)
    if name in empty:
        instead = empty[name].to(text)
        longest = max(text.shape[1], len(instead))
        fit = lambda t: F.pad(t, (0, 0, 0, longest - t.shape[-2]))  # noqa: E731
        text = torch.where(dropped.to(text.device)[:, None, None], fit(instead), fit(text))
        lens = [len(instead) if gone else n for n, gone in zip(lens, dropped.tolist(), strict=True)]
    if min(lens) == text.shape[1]:
        return text, None
    return text, torch.arange(text.shape[1], device=text.device) < torch.tensor(lens, device=text.device)[:, None]


def conditioned(cfg: LTX2Config, name: str, batch: Batch, draws: Draws) -> Conditioned:
    """A stream's noisy tokens, timesteps, positions and target, through what inference calls too."""
    tokens = video_tokens if name == "video" else audio_tokens
    clean, noise = tokens(cfg, batch.targets[name]), tokens(cfg, draws.noise[name])
    key = keys.key(0)  # without conditions nothing is drawn from it
    return apply_conditions(key, clean, noise, draws.sigmas[name], geometry_of(cfg, name, batch), [], {})


def training_inputs(
    cfg: LTX2Config, batch: Batch, empty: Mapping[str, Tensor], draws: Draws, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Conditioned]]:
    """The model's inputs of a batch, and by stream what the loss needs.

    Args:
        empty: by stream the empty caption `[L, D]` that takes the place of dropped ones; {}: none are.
    """
    streams, found = {}, {}
    for name in (s.name for s in cfg.streams):
        given = found[name] = conditioned(cfg, name, batch, draws)
        text, mask = stream_text(name, batch, empty, draws.dropped)
        channels = {f"{name}_positions": given.positions, f"{name}_text": text}
        channels |= {} if mask is None else {f"{name}_text_mask": mask}
        made = stream_inputs(cfg, name, given.latent, draws.sigmas[name], channels)
        streams[name] = dataclasses.replace(made, timestep=given.timesteps)
    return model_inputs(cfg, streams, dtype=dtype), found


# --- the loss -------------------------------------------------------------------------------------------------


def sample_errors(objective: Objective, velocity: Tensor, given: Conditioned, sigma: Tensor) -> Tensor:
    """Weighted squared error of every sample: `[B]`, float32, the mean over tokens with a loss times all elements.

    With `precondition_outputs` the clean latents that the velocity implies are compared instead, which multiplies
    an error by sigma.

    Args:
        velocity: `[B, N', C]`. sigma: `[B]`.
    """
    error = velocity.float() - given.target
    if objective.precondition_outputs:
        error = error * sigma[:, None, None]
    mask = given.loss_mask[..., None].to(error.dtype)
    share = mask.flatten(1).mean(1).clamp(min=1e-8)
    weight = WEIGHTS[objective.loss_weighting](sigma)
    return weight * (mask * error.square()).flatten(1).sum(1) / share


def batch_loss(
    params: Mapping[str, Tensor],
    cfg: LTX2Config,
    objective: Objective,
    batch: Batch,
    empty: Mapping[str, Tensor],
    draws: Draws,
    *,
    dtype: torch.dtype,
    run: Run = Run(),
) -> dict[str, Tensor]:
    """`sample_errors` `[B]` of every stream with a loss.

    At random initialisation (a zero head) the error per element is E|noise - x0|^2: 2 for latents of unit variance.
    """
    inputs, found = training_inputs(cfg, batch, empty, draws, dtype)
    velocities = ltx2.forward(params, cfg, inputs, run=run)
    return {k: sample_errors(objective, velocities[k], found[k], draws.sigmas[k]) for k in objective.weights}
