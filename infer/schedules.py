"""Noise schedules of flow-matching samplers: which sigma and which model timestep each step uses.

Convention everywhere: `x_sigma = (1 - sigma) * x0 + sigma * noise`, `velocity = noise - x0`, and the model is
conditioned on `timestep = sigma * num_train_timesteps`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.errors import UserError, raise_faults

# Multistep solvers need log((1 - sigma) / sigma); the first sigma therefore stays this far below 1.
SIGMA_MARGIN = 1e-6
# A shifted 1 may come out one float32 rounding above 1.
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Schedule:
    """Where a sampler evaluates the model, noisiest first.

    Args:
      sigmas: [N + 1] float32 on the CPU, strictly decreasing in [0, 1]; the last is 0.
      timesteps: [N] float32 on the CPU; what the model is given at `sigmas[:N]`; never increasing.

    Raises UserError, listing every fault with its index, for anything else.
    """

    sigmas: Tensor
    timesteps: Tensor

    def __post_init__(self) -> None:
        raise_faults("this is no sampling schedule:", _layout_faults(self))
        raise_faults("this is no sampling schedule:", _value_faults(self))

    @property
    def steps(self) -> int:
        """Number of model evaluations N."""
        return len(self.timesteps)


def _layout_faults(schedule: Schedule) -> list[str]:
    faults = []
    for name in ("sigmas", "timesteps"):
        value = getattr(schedule, name)
        if not isinstance(value, Tensor):
            faults.append(f"{name}: expected a tensor, got {type(value).__name__}")
        elif value.ndim != 1 or value.dtype != torch.float32 or value.device.type != "cpu":
            faults.append(
                f"{name}: expected 1-D float32 on the CPU, got {list(value.shape)} {value.dtype} on {value.device}"
            )
    if not faults and (len(schedule.timesteps) < 1 or len(schedule.sigmas) != len(schedule.timesteps) + 1):
        faults.append(
            f"expected N >= 1 timesteps and N + 1 sigmas, got {len(schedule.timesteps)} and {len(schedule.sigmas)}"
        )
    return faults


def _value_faults(schedule: Schedule) -> list[str]:
    sigmas, timesteps = schedule.sigmas.tolist(), schedule.timesteps.tolist()
    faults = [
        f"sigmas[{i}] is {s}, allowed is 0..1" for i, s in enumerate(sigmas) if not 0.0 <= s <= 1.0 + _ROUNDING
    ]
    faults += [f"timesteps[{i}] is {t}, allowed are finite values" for i, t in enumerate(timesteps) if not is_number(t)]
    faults += [
        f"sigmas[{i + 1}] is {b} after sigmas[{i}] = {a}: sigmas must decrease (fewer steps or a smaller shift?)"
        for i, (a, b) in enumerate(zip(sigmas, sigmas[1:], strict=False))
        if b >= a
    ]
    faults += [
        f"timesteps[{i + 1}] is {b} after timesteps[{i}] = {a}: timesteps must not increase"
        for i, (a, b) in enumerate(zip(timesteps, timesteps[1:], strict=False))
        if b > a
    ]
    if sigmas[-1] != 0.0:
        faults.append(f"sigmas[{len(sigmas) - 1}] is {sigmas[-1]}, the last sigma must be 0")
    return faults


def is_int(value: Any) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True for a finite int or float that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_request(steps: Any, s: Any, num_train_timesteps: Any) -> None:
    faults = [
        f"{name} is {value!r}, allowed is an integer >= 1"
        for name, value in (("steps", steps), ("num_train_timesteps", num_train_timesteps))
        if not is_int(value) or value < 1
    ]
    if not is_number(s) or s <= 0:
        faults.append(f"shift is {s!r}, allowed is a number > 0 (1 leaves the schedule unshifted)")
    raise_faults("this schedule cannot be made:", faults)


def shift(sigma: Any, s: float) -> Any:
    """`s * sigma / (1 + (s - 1) * sigma)`: spends more of the steps at high noise for s > 1.

    Keeps 0 and 1 fixed; the inverse is `shift(., 1 / s)`. `sigma` is a float, an array or a tensor of any shape.
    Source: Esser et al. 2024 (arXiv 2403.03206), eq. 23, with s = sqrt(m / n).
    """
    return s * sigma / (1 + (s - 1) * sigma)


def _shifted_ends(s: float, num_train_timesteps: int) -> tuple[float, float]:
    """Largest and smallest shifted training sigma, rounded to float32 as a table of them would hold."""
    ends = shift(torch.tensor([num_train_timesteps, 1.0]) / num_train_timesteps, s).tolist()
    return ends[0], ends[1]


def _shifted(grid: np.ndarray, s: float) -> np.ndarray:
    """`shift` for functions whose parameter of that name hides it."""
    return shift(grid, s)


def _with_zero(sigmas: np.ndarray | Tensor) -> Tensor:
    return torch.cat([torch.as_tensor(sigmas).to(torch.float32), torch.zeros(1)])


def flow_euler(steps: int, shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """The schedule of Diffusers' FlowMatchEulerDiscreteScheduler(shift=shift).set_timesteps(steps), equal to the bit.

    The training table is already shifted and the grid between its ends is shifted once more: the last sigma before
    0 is therefore `shift(shift(1 / num_train_timesteps))`, which published models are used with.
    Raises UserError for steps or num_train_timesteps < 1 or not an int, and shift <= 0.
    """
    _check_request(steps, shift, num_train_timesteps)
    high, low = _shifted_ends(shift, num_train_timesteps)
    grid = np.linspace(high * num_train_timesteps, low * num_train_timesteps, steps) / num_train_timesteps
    sigmas = _with_zero(_shifted(grid, shift))
    return Schedule(sigmas, sigmas[:-1] * num_train_timesteps)


def flow_unipc(steps: int, flow_shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """The schedule of Diffusers' UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=flow_shift), to the bit.

    The first sigma is 1 - 1e-6, since the solver needs log(1 - sigma). The timesteps are whole numbers, rounded
    towards zero (the first is 999): pipelines feed the model an integer there. Kept as float32, which is exact.
    Raises UserError for steps or num_train_timesteps < 1 or not an int, and flow_shift <= 0.
    """
    _check_request(steps, flow_shift, num_train_timesteps)
    grid = _shifted(np.linspace(1.0, 1.0 / num_train_timesteps, steps + 1)[:-1], flow_shift)
    if abs(grid[0] - 1.0) < SIGMA_MARGIN:
        grid[0] -= SIGMA_MARGIN
    timesteps = torch.from_numpy(np.trunc(grid * num_train_timesteps)).to(torch.float32)
    return Schedule(_with_zero(grid), timesteps)


def from_sigmas(sigmas: Sequence[float] | Tensor, num_train_timesteps: int = 1000) -> Schedule:
    """A schedule of explicit sigmas in (0, 1], as distilled models publish; the final 0 is appended if it is absent.

    Timesteps are `sigma * num_train_timesteps`. Raises UserError for an empty list or values that do not decrease.
    """
    _check_request(1, 1.0, num_train_timesteps)
    values = _vector("sigmas", sigmas)
    values = values if values[-1] == 0.0 else _with_zero(values)
    return Schedule(values, values[:-1] * num_train_timesteps)


def from_timesteps(timesteps: Sequence[float] | Tensor, num_train_timesteps: int = 1000) -> Schedule:
    """A schedule of explicit model timesteps in (0, num_train_timesteps], kept as given; sigma is their fraction.

    Raises UserError for an empty list or values that do not decrease.
    """
    _check_request(1, 1.0, num_train_timesteps)
    values = _vector("timesteps", timesteps)
    return Schedule(_with_zero(values / num_train_timesteps), values)


def _vector(name: str, values: Sequence[float] | Tensor) -> Tensor:
    try:
        vector = torch.as_tensor(values, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name}: expected a list of numbers, got {values!r}") from error
    if vector.ndim != 1 or len(vector) == 0:
        raise UserError(f"{name}: expected a non-empty list of numbers, got {values!r}")
    return vector
