"""Which frame counts and sizes a video model takes, and the two layouts of its pixels.

One rule for messages, documentation and validation.
"""

import torch
from torch import Tensor

from core.errors import UserError, raise_faults


def nearest_valid(n: int, step: int, offset: int = 0) -> list[int]:
    """The one or two positive values of `step * k + offset` around `n` (k >= 0), in increasing order."""
    lowest = offset if offset > 0 else step
    below = max(lowest, (n - offset) // step * step + offset)
    return [below] if below >= n else [below, below + step]


def longest_valid(n: int, multiple: int = 4) -> int:
    """The largest `multiple * k + 1` that is at most `n`; 0 when n < 1."""
    return 0 if n < 1 else (n - 1) // multiple * multiple + 1


def geometry_rule(temporal: int = 4, spatial: int = 8) -> str:
    """The rule in words, for help texts, documentation and error messages."""
    frames = "any positive number" if temporal == 1 else f"{temporal}k+1 (1, {temporal + 1}, {2 * temporal + 1}, ...)"
    return f"num_frames must be {frames}; height and width must be positive multiples of {spatial}"


def _fault(name: str, value: int, step: int, offset: int) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name} is {value!r}, expected an integer"
    if value >= 1 and (value - offset) % step == 0:
        return None
    rule = f"a multiple of {step}" if offset == 0 else f"{step}k+{offset}"
    near = " or ".join(str(v) for v in nearest_valid(value, step, offset))
    return f"{name} is {value}, expected {rule}: nearest valid {near}"


def valid_num_frames(n: int, multiple: int = 4) -> int:
    """Returns `n` when it is `multiple * k + 1`; else raises UserError with the nearest valid values."""
    fault = _fault("num_frames", n, multiple, 1)
    if fault is not None:
        raise UserError(fault)
    return n


def check_geometry(num_frames: int, height: int, width: int, *, temporal: int = 4, spatial: int = 8) -> None:
    """Checks a video's size against `geometry_rule`: `temporal` and `spatial` are in frames and pixels.

    Raises one UserError that lists every fault with the nearest valid values.
    """
    faults = [
        _fault("num_frames", num_frames, temporal, 1),
        _fault("height", height, spatial, 0),
        _fault("width", width, spatial, 0),
    ]
    rule = geometry_rule(temporal, spatial)
    raise_faults(f"this video size cannot be used ({rule})", [fault for fault in faults if fault is not None])


def to_video(frames: Tensor) -> Tensor:
    """Frames uint8 `[T, H, W, 3]` -> float32 `[3, T, H, W]` in [-1, 1], what a video VAE takes."""
    return frames.permute(3, 0, 1, 2).float() / 127.5 - 1


def to_frames(video: Tensor) -> Tensor:
    """Inverse of `to_video`: `[3, T, H, W]` in [-1, 1] (clamped, rounded) -> uint8 `[T, H, W, 3]`."""
    levels = ((video.float() + 1) * 127.5).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(1, 2, 3, 0).contiguous()
