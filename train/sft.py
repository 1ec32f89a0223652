"""Supervised flow matching: noise, timesteps and the loss of one microbatch, as pure functions.

Noise and timestep of sample i of step s depend only on (seed, s, i), i counted over the whole optimiser
step, so they are the same however the step is cut into microbatches.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from core import keys
from infer.schedules import shift
from nn import wan
from nn.run import Run
from nn.wan_i2v import first_frame_channels, first_frame_known
from nn.wan_inputs import clean_estimate, model_inputs, noised, timestep_of, velocity_target
from train.rows import Batch

# Keeps the weight 1 / sigma^2 finite at sigma = 0; the density of sigmas below it is under 0.1 %.
SIGMA_FLOOR = 1e-3

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "sigma_sqrt": lambda sigma: sigma.clamp(min=SIGMA_FLOOR) ** -2,
    # Esser et al. 2024 (arXiv 2403.03206), equation of the cosine map's density ratio.
    "cosmap": lambda sigma: 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2)),
}


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is drawn and how errors count; fields as in `training.model` and `pipeline` of a recipe."""

    weighting_scheme: str = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    flow_shift: float = 1.0
    loss_weighting: str = "none"
    precondition_outputs: bool = False
    caption_dropout: float = 0.0

    @property
    def weights(self) -> dict[str, float]:
        """What the loss of each stream counts."""
        return {"video": 1.0}


@dataclasses.dataclass(frozen=True)
class Draws:
    """Random parts of a microbatch: noise `[B, C, T, H, W]`, sigma `[B]`, and which captions are dropped `[B]`."""

    noise: Tensor
    sigma: Tensor
    dropped: Tensor

    @property
    def sigmas(self) -> dict[str, Tensor]:
        """Noise levels `[B]` by stream."""
        return {"video": self.sigma}

    def to(self, device: torch.device | str) -> "Draws":
        """The same on a device."""
        return Draws(self.noise.to(device), self.sigma.to(device), self.dropped.to(device))


def draw_sigma(objective: Objective, k: keys.Key) -> Tensor:
    """One noise level in [0, 1], 0-d float32: the scheme's density, then the shift.

    `uniform`: u; `logit_normal`: sigmoid(mean + std n) (Esser et al. 2024, section 3.1).
    """
    if objective.weighting_scheme == "logit_normal":
        sigma = torch.sigmoid(objective.logit_mean + objective.logit_std * keys.normal(k, ()))
    else:
        sigma = keys.uniform(k)
    return shift(sigma, objective.flow_shift)


def draw(objective: Objective, k: keys.Key, step: int, first: int, shape: tuple[int, ...]) -> Draws:
    """The draws of samples `first`, `first` + 1, ... of a step, on the CPU in float32.

    Args:
        shape: of the latents, `[B, C, T, H, W]`.
    """
    own = [keys.fold_in(keys.fold_in(k, step), first + i) for i in range(shape[0])]
    noise = torch.stack([keys.normal(keys.fold_in(o, "noise"), shape[1:]) for o in own])
    sigma = torch.stack([draw_sigma(objective, keys.fold_in(o, "sigma")) for o in own])
    uniform = torch.stack([keys.uniform(keys.fold_in(o, "caption")) for o in own])
    return Draws(noise, sigma, uniform < objective.caption_dropout)


def image_channels(cfg: wan.WanConfig) -> tuple[str, ...]:
    """The conditions beside text that a model takes."""
    wanted = {"image": cfg.image_dim is not None, "first_frame": cfg.condition_channels > 0}
    return tuple(k for k, takes in wanted.items() if takes)


def training_inputs(
    cfg: wan.WanConfig,
    clean: Tensor,
    conditions: Mapping[str, Tensor],
    empty: Tensor,
    draws: Draws,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The model's inputs of a microbatch, through the same builder as inference. Dropping captions keeps images.

    Args:
        clean: latents `[B, C, T, H, W]`.
        conditions: `text` `[B, L, D]`, and what else the model takes: `image` `[B, M, D']`, `first_frame`
            `[B, C, T, H, W]` without masks.
        empty: `[L, D]`, the empty caption.
    """
    given = dict(conditions)
    given["text"] = torch.where(draws.dropped[:, None, None], empty, given["text"])
    if "first_frame" in given:
        latents = given["first_frame"]
        temporal = cfg.condition_channels - latents.shape[1]
        known = first_frame_known(temporal * (latents.shape[2] - 1) + 1)
        given["first_frame"] = first_frame_channels(latents, known, temporal)
    noisy = noised(clean, draws.noise, draws.sigma)
    return model_inputs(cfg, noisy, timestep_of(draws.sigma), given, dtype=dtype)


def sample_errors(objective: Objective, velocity: Tensor, clean: Tensor, draws: Draws) -> Tensor:
    """Weighted squared error of every sample, summed over its elements: `[B]`, float32.

    With `precondition_outputs` the clean latents that the velocity implies are compared instead, which
    multiplies an error by sigma.
    """
    if objective.precondition_outputs:
        noisy = noised(clean, draws.noise, draws.sigma)
        error = clean_estimate(noisy, velocity.float(), draws.sigma) - clean
    else:
        error = velocity.float() - velocity_target(clean, draws.noise)
    return WEIGHTS[objective.loss_weighting](draws.sigma) * error.square().flatten(1).sum(1)


def loss(
    params: Mapping[str, Tensor],
    cfg: wan.WanConfig,
    objective: Objective,
    clean: Tensor,
    conditions: Mapping[str, Tensor],
    empty: Tensor,
    draws: Draws,
    *,
    dtype: torch.dtype,
    run: Run = Run(),
) -> Tensor:
    """Weighted squared error `[B]` of every sample, summed over its elements; the caller divides by the tokens.

    At random initialisation (a zero head) the error per element is E|noise - x0|^2: 2 for latents of unit
    variance. Arguments as in `training_inputs`.
    """
    inputs = training_inputs(cfg, clean, conditions, empty, draws, dtype)
    return sample_errors(objective, wan.forward(params, cfg, inputs, run=run), clean, draws)


# --- a microbatch of rows -------------------------------------------------------------------------------------


def fit_text(text: Tensor, length: int) -> Tensor:
    """Text embeddings `[B, L, D]` padded with zeros, or cut, to `[B, length, D]`."""
    return torch.nn.functional.pad(text[:, :length], (0, 0, 0, max(0, length - text.shape[1])))


def draw_batch(cfg: wan.WanConfig, objective: Objective, k: keys.Key, step: int, first: int, batch: Batch) -> Draws:
    """`draw` for the latents of a batch."""
    return draw(objective, k, step, first, tuple(batch.latents.shape))


def batch_loss(
    params: Mapping[str, Tensor],
    cfg: wan.WanConfig,
    objective: Objective,
    batch: Batch,
    empty: Mapping[str, Tensor],
    draws: Draws,
    *,
    dtype: torch.dtype,
    run: Run = Run(),
) -> dict[str, Tensor]:
    """`loss` of a batch's rows, `{"video": [B]}`; text is padded to the length of `empty["text"]` `[L, D]`."""
    given = {k: batch.conditions[k] for k in ("text", *image_channels(cfg))}
    given["text"] = fit_text(given["text"], empty["text"].shape[0])
    return {"video": loss(params, cfg, objective, batch.latents, given, empty["text"], draws, dtype=dtype, run=run)}
