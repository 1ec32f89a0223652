"""Classifier-free guidance: `uncond + scale * (cond - uncond)`, with optional rescaling.

Conditions are dicts of named channels (`{"text": [B, L, D], "image": [B, N, D], ...}`); the unconditional branch has
the same channels with other contents.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from infer.schedules import is_number

Conditions = Mapping[str, Tensor]
ConditionedFn = Callable[[Tensor, float, Tensor, Conditions], Tensor]


def guide(cond: Tensor, uncond: Tensor, scale: float, rescale: float = 0.0) -> Tensor:
    """`uncond + scale * (cond - uncond)` of two velocities `[B, ...]`, in float32 (float64 stays float64).

    Source: Ho and Salimans 2022 (arXiv 2207.12598), with scale = 1 + w. `rescale` in 0..1 then moves each sample's
    standard deviation towards that of `cond`: Lin et al. 2023 (arXiv 2305.08891), eq. 15 and 16.
    Raises UserError for unequal shapes.
    """
    if cond.shape != uncond.shape:
        raise UserError(f"guidance: cond has shape {list(cond.shape)}, uncond has {list(uncond.shape)}")
    cond, uncond = _wide(cond), _wide(uncond)
    out = uncond + scale * (cond - uncond)
    return out if rescale == 0.0 else _rescaled(out, cond, rescale)


def _rescaled(out: Tensor, cond: Tensor, rescale: float) -> Tensor:
    """Lin et al. 2023, eq. 15 and 16; statistics per sample over everything but the batch."""
    each = (-1,) + (1,) * (out.ndim - 1)
    wanted, found = (t.flatten(1).std(dim=1, correction=0).view(each) for t in (cond, out))
    # A constant field has nothing to match; dividing by its zero deviation would give NaN.
    ratio = torch.where(found > 0, wanted / found, 1.0)
    return rescale * (out * ratio) + (1.0 - rescale) * out


def guided(
    velocity_fn: ConditionedFn,
    cond: Conditions,
    uncond: Conditions,
    scale: float,
    *,
    batched: bool,
    rescale: float = 0.0,
) -> Callable[[Tensor, float, Tensor], Tensor]:
    """A sampler's `velocity_fn(x, sigma, timestep)` out of one that also takes conditions.

    Args:
      velocity_fn: `(x [B, ...], sigma, timestep, conditions) -> velocity [B, ...]`.
      cond, uncond: channels `[B, ...]` with equal names; with `batched` also of equal shapes and dtypes.
      scale: guidance scale. At exactly 1.0 the unconditional branch has no weight: it is neither checked nor run.
      batched: one call with both branches on the batch axis (`[2B, ...]`, conditional first), else two calls.
      rescale: 0..1, see `guide`.

    The result is float32 (float64 for a float64 model). Raises UserError listing every channel that does not fit,
    here for cond against uncond and at the call for the batch size of x.
    """
    _check_numbers(scale, rescale)
    if scale == 1.0:
        return lambda x, sigma, timestep: _wide(velocity_fn(x, sigma, timestep, cond))
    _check_channels(cond, uncond, batched)
    if not batched:
        return lambda x, sigma, timestep: guide(
            velocity_fn(x, sigma, timestep, cond), velocity_fn(x, sigma, timestep, uncond), scale, rescale
        )
    both = {name: torch.cat([cond[name], uncond[name]]) for name in cond}

    def one_call(x: Tensor, sigma: float, timestep: Tensor) -> Tensor:
        _check_batch(x, both)
        velocity = velocity_fn(torch.cat([x, x]), sigma, timestep, both)
        if velocity.shape[0] != 2 * x.shape[0]:
            raise UserError(f"guidance: velocity has batch {velocity.shape[0]}, expected 2 x {x.shape[0]}")
        return guide(*velocity.chunk(2), scale, rescale)

    return one_call


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _check_numbers(scale: Any, rescale: Any) -> None:
    faults = []
    for name, value, top in (("scale", scale, math.inf), ("rescale", rescale, 1.0)):
        if not is_number(value) or not 0.0 <= value <= top:
            faults.append(f"{name} is {value!r}, allowed is a number " + (">= 0" if top == math.inf else "0..1"))
    raise_faults("guidance cannot run:", faults)


def _check_channels(cond: Conditions, uncond: Conditions, batched: bool) -> None:
    faults = [f"channel {k!r}: only in uncond" for k in uncond if k not in cond]
    for name, a in cond.items():
        if name not in uncond:
            faults.append(f"channel {name!r}: only in cond")
        elif batched and (b := uncond[name]).shape != a.shape:
            faults.append(
                f"channel {name!r}: cond has shape {list(a.shape)}, uncond {list(b.shape)}; "
                "pad them to one shape (with a key mask) or use batched=False"
            )
        elif batched and (a.dtype, a.device) != (b.dtype, b.device):
            faults.append(f"channel {name!r}: cond is {a.dtype} on {a.device}, uncond {b.dtype} on {b.device}")
    raise_faults("the two guidance branches do not fit together:", faults)


def _check_batch(x: Tensor, both: Conditions) -> None:
    raise_faults(
        f"guidance: the latents have batch {x.shape[0]}, these channels do not:",
        [f"channel {k!r}: batch {t.shape[0] // 2}" for k, t in both.items() if t.shape[0] != 2 * x.shape[0]],
    )
