"""Learning-rate schedules as pure functions of the 0-based optimiser step.

With warmup w, total n, floor r and u = clamp((step - w) / max(1, n - w), 0, 1):

    step < w    step / w
    constant    1
    linear      r + (1 - r) (1 - u)
    cosine      r + (1 - r) (1 + cos(pi u)) / 2        (Loshchilov and Hutter, 2017, without restarts)

At r = 0 these are the schedules of `diffusers.optimization` and `transformers` with the same names.
"""

import math

from core.errors import UserError, nearest_names

SHAPES = {
    "constant": lambda u: 1.0,
    "linear": lambda u: 1.0 - u,
    "cosine": lambda u: 0.5 * (1.0 + math.cos(math.pi * u)),
}


def lr_factor(
    step: int, *, scheduler: str, total_steps: int, warmup_steps: int = 0, min_lr_ratio: float = 0.0
) -> float:
    """The factor on the peak learning rate at the 0-based optimiser step `step`.

    The update of step s uses the factor of s, so a warmup starts at 0 and a decay would reach the floor at
    s = total_steps, after which it stays there. Raises UserError for an unknown scheduler.
    """
    if scheduler not in SHAPES:
        hint = nearest_names(scheduler, SHAPES)
        raise UserError(f"lr_scheduler {scheduler!r} is unknown{hint}; allowed: {', '.join(SHAPES)}")
    if step < warmup_steps:
        return step / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * SHAPES[scheduler](done)


def learning_rate(step: int, peak: float, **schedule) -> float:
    """`peak * lr_factor(step, **schedule)`."""
    return peak * lr_factor(step, **schedule)
