"""Samplers: pure functions that integrate `dx / dsigma = velocity(x, sigma)` along a schedule.

Each is a loop over a pure single step, so that a pipeline may instead drive the steps itself (to save and resume,
stream, or swap models on the way). Solver arithmetic is float32 (float64 for float64 latents), whatever the model's
dtype; coefficients are computed in float64 on the CPU.

A velocity function is `velocity_fn(x, sigma, timestep) -> velocity`: x and velocity `[B, ...]`, sigma a float,
timestep a 0-d float32 tensor on x's device. `progress(done, total)`, if given, is called after every step.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.errors import UserError, nearest_names, raise_faults
from infer.schedules import SIGMA_MARGIN, Schedule, flow_euler, flow_unipc, is_int

VelocityFn = Callable[[Tensor, float, Tensor], Tensor]
Progress = Callable[[int, int], None]
State = dict[str, Any]

SOLVER_TYPES = ("bh1", "bh2")
MAX_ORDER = 3


# --- Euler ---------------------------------------------------------------------------------------------------------


def euler_step(x: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """`x + (sigma_next - sigma) * velocity` in float32 at least; x and velocity `[B, ...]` of equal shape.

    From sigma = 1 to 0 this is the prediction of x0. Raises UserError for unequal shapes.
    """
    x, velocity = _solver_pair(x, velocity)
    return x + (sigma_next - sigma) * velocity


def euler(
    velocity_fn: VelocityFn, x: Tensor, schedule: Schedule, *, start: int = 0, progress: Progress | None = None
) -> Tensor:
    """Flow-matching Euler from `x` at `schedule.sigmas[start]` to 0: `[B, ...]` -> `[B, ...]` in float32 at least.

    Raises UserError for a start outside 0..N-1, for latents that are not floating point and for a velocity of
    another shape.
    """
    _check_start(start, schedule)
    x = _solver_tensor(x)
    sigmas, timesteps = schedule.sigmas.tolist(), schedule.timesteps.to(x.device)
    for i in range(start, schedule.steps):
        x = euler_step(x, velocity_fn(x, sigmas[i], timesteps[i]), sigmas[i], sigmas[i + 1])
        if progress is not None:
            progress(i + 1 - start, schedule.steps - start)
    return x


# --- UniPC ---------------------------------------------------------------------------------------------------------


def unipc(
    velocity_fn: VelocityFn,
    x: Tensor,
    schedule: Schedule,
    *,
    order: int = 2,
    lower_order_final: bool = True,
    solver_type: str = "bh2",
    predict_x0: bool = True,
    disable_corrector: Iterable[int] = (),
    start: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """UniPC from `x` at `schedule.sigmas[start]` to 0: `[B, ...]` -> `[B, ...]` in float32 at least.

    One model evaluation a step. Options and errors as in `unipc_init` and `unipc_step`.
    """
    state = unipc_init(
        x,
        schedule,
        order=order,
        lower_order_final=lower_order_final,
        solver_type=solver_type,
        predict_x0=predict_x0,
        disable_corrector=disable_corrector,
        start=start,
    )
    sigmas, timesteps = schedule.sigmas.tolist(), schedule.timesteps.to(x.device)
    for i in range(start, schedule.steps):
        state = unipc_step(state, velocity_fn(state["x"], sigmas[i], timesteps[i]))
        if progress is not None:
            progress(i + 1 - start, schedule.steps - start)
    return state["x"]


def unipc_init(
    x: Tensor,
    schedule: Schedule,
    *,
    order: int = 2,
    lower_order_final: bool = True,
    solver_type: str = "bh2",
    predict_x0: bool = True,
    disable_corrector: Iterable[int] = (),
    start: int = 0,
) -> State:
    """The state of UniPC before its first step: a dict of tensors, ints and tuples of them (a tree to save).

    `state["x"]` is the sample `[B, ...]` at `schedule.sigmas[state["step"]]`, where the model is evaluated next.

    Args:
      x: [B, ...] latents at `schedule.sigmas[start]`.
      order: 1..3; the order of the predictor once enough evaluations are known (the corrector adds one).
      lower_order_final: count the order down over the last steps. Without it only the step onto sigma = 0 is
        first order: there every higher order diverges.
      solver_type: "bh1" (B(h) = h) or "bh2" (B(h) = e^h - 1).
      predict_x0: extrapolate x0 predictions (else noise predictions, which are ill-conditioned near sigma = 1).
      disable_corrector: steps after whose predictor the corrector is left out.
      start: index of the first step.

    Source: Zhao et al. 2023, UniPC (arXiv 2302.04867). Raises UserError listing every bad option.
    """
    skipped = tuple(disable_corrector)
    _check_start(start, schedule)
    _check_options(order, solver_type, skipped, {"lower_order_final": lower_order_final, "predict_x0": predict_x0})
    x = _solver_tensor(x)
    sigmas = schedule.sigmas.clamp(max=1.0 - SIGMA_MARGIN)
    if start + 1 < schedule.steps and sigmas[start] <= sigmas[start + 1]:
        raise UserError(
            f"sigmas[{start + 1}] is {float(schedule.sigmas[start + 1])}: UniPC needs every sigma "
            f"after the first below {1.0 - SIGMA_MARGIN}"
        )
    return {
        "x": x,
        "x_before": x,  # the sample that the last predictor started from
        "predictions": (),  # of x0 (or noise) at the last steps, newest first, at most `order`
        "sigmas": sigmas,
        "step": start,
        "start": start,
        "order": order,
        "lower_order_final": int(lower_order_final),
        "bh": 1 + SOLVER_TYPES.index(solver_type),
        "predict_x0": int(predict_x0),
        "disable_corrector": skipped,
    }


def unipc_step(state: State, velocity: Tensor) -> State:
    """The state one step on, given the velocity `[B, ...]` at `state["x"]`; `state` itself is not changed.

    Corrects the sample with the new evaluation, then predicts the next one. Raises UserError when the state has
    reached sigma = 0 and for a velocity of another shape.
    """
    sigmas, i = state["sigmas"].tolist(), state["step"]
    if i + 1 >= len(sigmas):
        raise UserError(f"step {i}: this state has reached sigma = 0 after its {len(sigmas) - 1} steps")
    x, velocity = _solver_pair(state["x"], velocity)
    weight = -sigmas[i] if state["predict_x0"] else 1.0 - sigmas[i]
    new = x + weight * velocity
    old = state["predictions"]
    if old and i - 1 not in state["disable_corrector"]:
        known = [(sigmas[i - 1 - k], old[k]) for k in range(1, _order_at(state, i - 1))]
        x = _advance(state, state["x_before"], (sigmas[i - 1], old[0]), [*known, (sigmas[i], new)], sigmas[i])
    known = [(sigmas[i - k], old[k - 1]) for k in range(1, _order_at(state, i))]
    x_next = _advance(state, x, (sigmas[i], new), known, sigmas[i + 1])
    return state | {"x": x_next, "x_before": x, "predictions": (new, *old)[: state["order"]], "step": i + 1}


def _order_at(state: State, i: int) -> int:
    """Order of the predictor of step i: limited by the evaluations known, and by those left to do."""
    left = len(state["sigmas"]) - 1 - i
    if left == 1:
        return 1
    order = min(state["order"], i - state["start"] + 1)
    return min(order, left) if state["lower_order_final"] else order


def _advance(
    state: State, x: Tensor, base: tuple[float, Tensor], known: list[tuple[float, Tensor]], sigma_next: float
) -> Tensor:
    """Exponential integrator from `base` to sigma_next; predictor and corrector differ only in what is `known`.

    base: (sigma, prediction) where `x` stands; known: further (sigma, prediction) pairs, for the corrector also the
    one at sigma_next. With (a, b) = (sigma, alpha) for x0 predictions and (alpha, sigma) for noise predictions, UniC
    (Theorem 3.1), UniP (Corollary 3.2) and their x0 forms in the appendix all read

        x' = (a'/a) x + (b' - b a'/a) m - b' sum_k w_k (m_k - m) / r_k,  r_k = (lambda_k - lambda) / (lambda' - lambda)

    The coefficient of m is `-b' (e^z - 1)` with z = -h or h, written so that it stays finite at sigma' = 0.
    """
    sigma, m = base
    a, b, a_next, b_next = sigma, 1.0 - sigma, sigma_next, 1.0 - sigma_next
    if not state["predict_x0"]:
        a, b, a_next, b_next = b, a, b_next, a_next
    out = (a_next / a) * x + (b_next - b * a_next / a) * m
    if known:
        h = _log_snr(sigma_next) - _log_snr(sigma)
        nodes = [(_log_snr(s) - _log_snr(sigma)) / h for s, _ in known]
        weights = _difference_weights(nodes, -h if state["predict_x0"] else h, state["bh"])
        for node, weight, (_, other) in zip(nodes, weights, known, strict=True):
            out = out - (b_next * weight / node) * (other - m)
    return out


def _log_snr(sigma: float) -> float:
    """Half log signal-to-noise ratio `lambda = log(alpha / sigma)` with alpha = 1 - sigma, for 0 < sigma < 1."""
    return math.log1p(-sigma) - math.log(sigma)


def _difference_weights(nodes: list[float], z: float, bh: int) -> list[float]:
    """B(z) times UniPC's a_k: the w with `sum_k w_k nodes_k^i = (i + 1)! z phi_{i+2}(z)` for i = 0..n-1.

    One node takes the paper's fixed a_1 = 1/2, the only place where the choice of B(z) matters.
    """
    if len(nodes) == 1:
        return [0.5 * (z if bh == 1 else math.expm1(z))]
    powers = np.vander(nodes, increasing=True).T
    moments = [math.factorial(i + 1) * z * _phi(i + 2, z) for i in range(len(nodes))]
    return np.linalg.solve(powers, np.array(moments)).tolist()


def _phi(k: int, z: float) -> float:
    """`phi_k(z) = sum_j z^j / (j + k)!`, k >= 1; phi_1 = (e^z - 1) / z and phi_{k+1} = (phi_k - 1/k!) / z.

    The recurrence cancels for small z, the series for large z.
    """
    if abs(z) < 1.0:
        return math.fsum(z**j / math.factorial(j + k) for j in range(18))
    value = math.expm1(z) / z
    for n in range(1, k):
        value = (value - 1.0 / math.factorial(n)) / z
    return value


# --- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampler:
    """`schedule(steps, shift) -> Schedule` and `run(velocity_fn, x, schedule, *, start=0, progress=None) -> x`."""

    schedule: Callable[[int, float], Schedule]
    run: Callable[..., Tensor]


SAMPLERS = {"euler": Sampler(flow_euler, euler), "unipc": Sampler(flow_unipc, unipc)}


def sample(
    name: str,
    velocity_fn: VelocityFn,
    x: Tensor,
    steps: int,
    shift: float,
    progress: Progress | None = None,
    *,
    start: int = 0,
) -> Tensor:
    """Runs the sampler `name` with its default schedule from `x` `[B, ...]` at step `start`; float32 at least.

    Raises UserError for an unknown name and what the schedule and the sampler raise.
    """
    sampler, schedule = schedule_of(name, steps, shift)
    return sampler.run(velocity_fn, x, schedule, start=start, progress=progress)


def schedule_of(name: str, steps: int, shift: float) -> tuple[Sampler, Schedule]:
    """The sampler `name` and its default schedule. Raises UserError for an unknown name or a bad schedule."""
    if name not in SAMPLERS:
        raise UserError(
            f"unknown sampler {name!r}{nearest_names(str(name), SAMPLERS)}; allowed: {', '.join(sorted(SAMPLERS))}"
        )
    return SAMPLERS[name], SAMPLERS[name].schedule(steps, shift)


# --- checks --------------------------------------------------------------------------------------------------------


def _solver_tensor(x: Tensor) -> Tensor:
    """`x` in the solver's dtype: float64 stays, other floating types become float32."""
    if not x.is_floating_point():
        raise UserError(f"latents: expected a floating-point tensor, got {x.dtype}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _solver_pair(x: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    if velocity.shape != x.shape:
        raise UserError(f"velocity has shape {list(velocity.shape)}, the latents have {list(x.shape)}")
    x = _solver_tensor(x)
    return x, velocity.to(x.dtype)


def _check_start(start: Any, schedule: Schedule) -> None:
    if not is_int(start) or not 0 <= start < schedule.steps:
        raise UserError(f"start is {start!r}, allowed is a step index 0..{schedule.steps - 1}")


def _check_options(order: Any, solver_type: Any, skipped: tuple, switches: dict[str, Any]) -> None:
    faults = [f"{k} is {v!r}, allowed: True, False" for k, v in switches.items() if not isinstance(v, bool)]
    if not is_int(order) or not 1 <= order <= MAX_ORDER:
        faults.append(f"order is {order!r}, allowed is an integer 1..{MAX_ORDER}")
    if solver_type not in SOLVER_TYPES:
        hint = nearest_names(str(solver_type), SOLVER_TYPES)
        faults.append(f"solver_type is {solver_type!r}{hint}, allowed: {', '.join(SOLVER_TYPES)}")
    faults += [
        f"disable_corrector[{k}] is {step!r}, allowed is a step index >= 0"
        for k, step in enumerate(skipped)
        if not is_int(step) or step < 0
    ]
    raise_faults("UniPC cannot run with these options:", faults)
