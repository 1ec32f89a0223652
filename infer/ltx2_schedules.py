"""LTX-2's noise schedules, and the samplers of its recipes that `infer.samplers` does not have.

The full model's schedule is shifted by how many tokens there are and stretched to end at 0.1; distilled models have
fixed ones. Samplers fit the seam of `infer.samplers`: `run(velocity_fn, x, schedule, *, start=0, progress=None)`.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.errors import UserError, nearest_names, raise_faults
from infer.samplers import Progress, VelocityFn, euler, euler_step
from infer.schedules import Schedule, from_sigmas, is_int, is_number, shift

TOKENS, SHIFTS, TERMINAL = (1024, 4096), (0.95, 2.05), 0.1
"""Token counts with the exponents of their shifts, and the last sigma before 0, as the public models are used."""

DISTILLED_SIGMAS = {
    "one": (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875),
    "two": (0.909375, 0.725, 0.421875),
}
"""Sigmas of distilled models by stage: from noise, and after the latents were made larger."""


# --- schedules ----------------------------------------------------------------------------------------------------


def shift_exponent(tokens: int) -> float:
    """The mu of the shift `e^mu`: linear in the token count through `TOKENS` and `SHIFTS`, also outside them."""
    (low, high), (least, most) = TOKENS, SHIFTS
    slope = (most - least) / (high - low)
    return tokens * slope + (least - slope * low)


def _check_request(steps: Any, tokens: Any, terminal: Any) -> None:
    faults = [
        f"{name} is {value!r}, allowed is an integer >= 1"
        for name, value in (("steps", steps), ("tokens", tokens))
        if not is_int(value) or value < 1
    ]
    if terminal is not None and (not is_number(terminal) or not 0 < terminal < 1):
        faults.append(f"terminal is {terminal!r}, allowed is a number between 0 and 1, or None for no stretching")
    raise_faults("this LTX-2 schedule cannot be made:", faults)


def shifted_schedule(steps: int, tokens: int | None = None, *, terminal: float | None = TERMINAL) -> Schedule:
    """The full model's schedule: `steps` equal steps from 1, shifted by `e^mu`, stretched to end at `terminal`.

    Equal to Diffusers' FlowMatchEulerDiscreteScheduler with dynamic exponential shifting and `shift_terminal`. One
    step has its only sigma at 1.

    Args:
        steps: model evaluations. tokens: video tokens of a sample (of audio alone, its own); None for 4096, which the
            official one-stage recipes take whatever the size. terminal: the last sigma before 0; None keeps it.

    Raises:
        UserError: every number out of range.
    """
    tokens = TOKENS[1] if tokens is None else tokens
    _check_request(steps, tokens, terminal)
    grid = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
    sigmas = shift(grid, np.float32(math.exp(shift_exponent(tokens))))
    if terminal is not None and steps > 1:
        clean = 1 - sigmas
        sigmas = 1 - clean * ((1 - terminal) / float(clean[-1]))
    return from_sigmas(torch.from_numpy(sigmas.astype(np.float32)).clamp(max=1.0))


def distilled_schedule(stage: str = "one") -> Schedule:
    """The fixed schedule of distilled models: eight steps from noise, or the three of stage "two".

    Stage two begins at its first sigma: latents of stage one, made larger, are noised to it.
    """
    if stage not in DISTILLED_SIGMAS:
        hint, allowed = nearest_names(str(stage), DISTILLED_SIGMAS), ", ".join(DISTILLED_SIGMAS)
        raise UserError(f"distilled stage is {stage!r}{hint}, allowed: {allowed}")
    return from_sigmas(DISTILLED_SIGMAS[stage])


# --- samplers -----------------------------------------------------------------------------------------------------


def _indices(schedule: Schedule, start: Any) -> range:
    if not is_int(start) or not 0 <= start < schedule.steps:
        raise UserError(f"start is {start!r}, allowed is a step index 0..{schedule.steps - 1}")
    return range(start, schedule.steps)


def _report(progress: Progress | None, i: int, steps: range) -> None:
    if progress is not None:
        progress(i + 1 - steps.start, len(steps))


def gradient_estimation(
    velocity_fn: VelocityFn, x: Tensor, schedule: Schedule, *, gamma: float = 2.0, start: int = 0,
    progress: Progress | None = None,
) -> Tensor:  # fmt: skip
    """Euler along `gamma v_i + (1 - gamma) v_{i-1}`: with 2, some 20 to 30 steps do for 40.

    `[B, ...]` -> `[B, ...]` in float32 at least, one model evaluation a step. The first step has no velocity before
    it and the one onto 0 must end at the model's own x0: these are plain. `gamma=1` is Euler.

    Source: Permenter and Yuan 2024 (arXiv 2306.04848), section 5. Raises UserError for a bad gamma, start or shape.
    """
    if not is_number(gamma):
        raise UserError(f"gamma is {gamma!r}, allowed is a number (1 is Euler, 2 the usual choice)")
    steps, sigmas, timesteps = _indices(schedule, start), schedule.sigmas.tolist(), schedule.timesteps.to(x.device)
    before = None
    for i in steps:
        velocity = velocity_fn(x, sigmas[i], timesteps[i])
        plain = before is None or sigmas[i + 1] == 0.0
        used = velocity if plain else gamma * velocity + (1 - gamma) * before
        x, before = euler_step(x, used, sigmas[i], sigmas[i + 1]), velocity
        _report(progress, i, steps)
    return x


def res_2s(
    velocity_fn: VelocityFn, x: Tensor, schedule: Schedule, *, start: int = 0, progress: Progress | None = None
) -> Tensor:
    """Second-order exponential Runge-Kutta with its middle stage at half the step of `-log sigma`.

    `[B, ...]` -> `[B, ...]` in float32 at least; two model evaluations a step, one for the step onto 0. With
    `s = -log sigma` the flow is `dx/ds = -x + x0(x)`, so for a step h

        x_m = e^(-h/2) x + (1 - e^(-h/2)) D,    x' = e^(-h) x + (1 - e^(-h)) D + 2 (1 - (1 - e^(-h)) / h) (D_m - D)

    with D, D_m the x0 of the two evaluations: exact for an x0 that is linear in s. No noise is added.

    Source: Hochbruck and Ostermann 2005, eq. 5.3 with c2 = 1/2; Zhang et al. 2023 (arXiv 2308.02157).
    Raises UserError for a bad start or shape.
    """
    steps, sigmas, timesteps = _indices(schedule, start), schedule.sigmas.tolist(), schedule.timesteps.to(x.device)
    for i in steps:
        velocity = velocity_fn(x, sigmas[i], timesteps[i])
        if sigmas[i + 1] == 0.0:
            x = euler_step(x, velocity, sigmas[i], 0.0)
        else:
            x = _two_stages(velocity_fn, x, velocity, sigmas[i], sigmas[i + 1], timesteps[i])
        _report(progress, i, steps)
    return x


def _two_stages(
    velocity_fn: VelocityFn, x: Tensor, velocity: Tensor, sigma: float, sigma_next: float, timestep: Tensor
) -> Tensor:
    """One step of `res_2s` to a sigma above 0. Euler's step is its first-order part, exactly."""
    middle = math.sqrt(sigma * sigma_next)
    x0 = euler_step(x, velocity, sigma, 0.0)
    x_middle = euler_step(x, velocity, sigma, middle)
    at_middle = velocity_fn(x_middle, middle, timestep * (middle / sigma))
    x0_middle = euler_step(x_middle, at_middle, middle, 0.0)
    h = math.log(sigma / sigma_next)
    weight = 2 * (1 + math.expm1(-h) / h)
    return euler_step(x, velocity, sigma, sigma_next) + weight * (x0_middle - x0)


LTX2_SAMPLERS = {"euler": euler, "gradient_estimation": gradient_estimation, "res_2s": res_2s}
"""The samplers of LTX-2's recipes, each to be run on a schedule of this module."""
