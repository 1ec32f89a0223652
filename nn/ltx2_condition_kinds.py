"""The kinds of conditions of an LTX-2 stream, and what of them does not fit a video or a sound.

What they do is in `nn.ltx2_conditions`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from core.errors import UserError, raise_faults
from nn.ltx2_config import LTX2Config
from nn.ltx2_inputs import latent_faults, video_grid

Extras = Mapping[str, Tensor]


# --- what there is ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class VideoGeometry:
    """The video stream of one call. `grid`: tokens along time, height, width; `fps`: a number or `[B]`."""

    cfg: LTX2Config
    grid: tuple[int, int, int]
    fps: float | Tensor
    stream: str = dataclasses.field(default="video", init=False)


@dataclasses.dataclass(frozen=True)
class AudioGeometry:
    """The audio stream of one call, with `count` tokens."""

    cfg: LTX2Config
    count: int
    stream: str = dataclasses.field(default="audio", init=False)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens along time alone."""
        return self.count, 1, 1


Geometry = VideoGeometry | AudioGeometry


@dataclasses.dataclass(frozen=True)
class Condition:
    """What all share.

    Args:
        latents: which entry of `extras` holds the given latents, video `[B or 1, C, t, h, w]` or audio
            `[B or 1, C, t, mel]`. None, where allowed: the clean latents of the sample itself, as in training.
        strength: 1 keeps the given latents, 0 ignores them, between them the tokens are noised to (1 - strength) sigma.
        probability: how often it applies; drawn per sample, for appended tokens once for the batch.
    """

    latents: str | None = None
    strength: float = 1.0
    probability: float = 1.0


@dataclasses.dataclass(frozen=True)
class FirstFrame(Condition):
    """The first latent frame is given. Video only."""


@dataclasses.dataclass(frozen=True)
class Prefix(Condition):
    """The first `count` latent frames, or audio steps, are given."""

    count: int = 1


@dataclasses.dataclass(frozen=True)
class Suffix(Condition):
    """The last `count` latent frames, or audio steps, are given."""

    count: int = 1


@dataclasses.dataclass(frozen=True)
class LatentFrames(Condition):
    """`count` latent frames from `index` on are given; a negative index counts from the end."""

    index: int = 0
    count: int = 1


@dataclasses.dataclass(frozen=True)
class SpatialCrop(Condition):
    """The pixels `(top, left, bottom, right)` of every frame are given: rounded down to tokens. Video only."""

    region: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Mask(Condition):
    """What `extras[mask]` marks is given: `[B or 1, t, h, w]` of video, `[B or 1, t]` of audio, 1 given, 0 generated.

    Values between them blend. `threshold`: above it counts as 1, else 0.
    """

    mask: str = "mask"
    threshold: float | None = None


@dataclasses.dataclass(frozen=True)
class Keyframe(Condition):
    """Appended tokens that show what is to be seen at pixel frame `frame`. Video only.

    `single`: the latents encode one picture, which lasts one frame; else a clip that begins there.
    """

    frame: int = 0
    single: bool = True


@dataclasses.dataclass(frozen=True)
class Reference(Condition):
    """Appended tokens of a reference video (IC-LoRA). Video only.

    Args:
        downscale: how many times smaller it is than the video. temporal: S, where it keeps frame 0 and then every
            S-th from frame 1 on. Both as the adapter was trained with.
        attention: how much noisy tokens and these see of each other, in [0, 1]: a number, or which entry of `extras`
            has it per token, `[B or 1, M]`. None everywhere: attention has no mask.
    """

    downscale: int = 1
    temporal: int = 1
    attention: float | str | None = None


@dataclasses.dataclass(frozen=True)
class ReferenceAudio(Condition):
    """Appended tokens of a reference sound, which starts where the sound does. Audio only."""


VIDEO_ONLY, AUDIO_ONLY = (FirstFrame, SpatialCrop, Keyframe, Reference), (ReferenceAudio,)
APPENDED = (Keyframe, Reference, ReferenceAudio)
"""In the order in which their tokens follow the stream's own."""


# --- where they write ---------------------------------------------------------------------------------------------


def frame_span(c: Condition, geometry: Geometry) -> tuple[int, int] | None:
    """First and end latent frame that a condition overwrites; None for one that is no span of time."""
    frames = geometry.grid[0] * (geometry.cfg.patch_size_t if geometry.stream == "video" else 1)
    if isinstance(c, FirstFrame):
        return 0, geometry.cfg.patch_size_t
    if isinstance(c, Prefix):
        return 0, c.count
    if isinstance(c, Suffix):
        return frames - c.count, frames
    if isinstance(c, LatentFrames):
        return c.index % frames, c.index % frames + c.count
    return None


def crop_tokens(c: SpatialCrop, geometry: VideoGeometry) -> tuple[int, int, int, int]:
    """The region in tokens, clamped to the video."""
    (tall, wide_), (_, h, w) = _pixels(geometry), geometry.grid
    top, left, bottom, right = c.region
    return min(top // tall, h), min(left // wide_, w), min(bottom // tall, h), min(right // wide_, w)


# --- faults -------------------------------------------------------------------------------------------------------


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(name: str, value: object, low: int, high: int) -> list[str]:
    return [] if _is_int(value) and low <= value <= high else [f"{name} is {value!r}, allowed {low} to {high}"]


def _fraction(name: str, value: object) -> list[str]:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return [] if good else [f"{name} is {value!r}, allowed 0 to 1"]


def _frame_limit(geometry: VideoGeometry) -> int:
    """The last pixel frame."""
    frames = geometry.grid[0] * geometry.cfg.patch_size_t
    return max(0, (frames - 1) * geometry.cfg.vae_scale_factors[0] + geometry.cfg.causal_offset - 1)


def _pixels(geometry: VideoGeometry) -> tuple[int, int]:
    """Height and width of one token in pixels."""
    _, tall, wide_ = geometry.cfg.vae_scale_factors
    return tall * geometry.cfg.patch_size, wide_ * geometry.cfg.patch_size


def _region_faults(c: SpatialCrop, geometry: VideoGeometry) -> list[str]:
    tall, wide_ = (n * size for n, size in zip(geometry.grid[1:], _pixels(geometry), strict=True))
    if len(c.region) != 4 or not all(_is_int(v) and v >= 0 for v in c.region):
        return [f"region is {c.region!r}, allowed are four pixel numbers (top, left, bottom, right)"]
    top, left, bottom, right = crop_tokens(c, geometry)
    if top < bottom and left < right:
        return []
    return [f"region {c.region} holds no whole token of {_pixels(geometry)} pixels, the video is {(tall, wide_)}"]


def _setting_faults(c: Condition, geometry: Geometry) -> list[str]:
    """What is wrong with a condition's numbers for this geometry."""
    frames = geometry.grid[0] * (geometry.cfg.patch_size_t if geometry.stream == "video" else 1)
    faults = _fraction("strength", c.strength) + _fraction("probability", c.probability)
    if isinstance(c, Prefix | Suffix):
        faults += _whole("count", c.count, 1, frames)
    if isinstance(c, LatentFrames):
        wrong = _whole("index", c.index, -frames, frames - 1)
        faults += wrong if wrong else _whole("count", c.count, 1, frames - c.index % frames)
    if isinstance(c, SpatialCrop):
        faults += _region_faults(c, geometry)
    if isinstance(c, Keyframe):
        faults += _whole("frame", c.frame, 0, _frame_limit(geometry))
    if isinstance(c, Reference):
        faults += [f for name in ("downscale", "temporal") for f in _whole(name, getattr(c, name), 1, 64)]
        if c.attention is not None and not isinstance(c.attention, str):
            faults += _fraction("attention", c.attention)
    if not faults and (span := frame_span(c, geometry)) is not None and geometry.stream == "video":
        patch = geometry.cfg.patch_size_t
        faults += [f"latent frame {v} is inside a patch of {patch} frames" for v in span if v % patch]
    return faults


def _given_shape(c: Condition, geometry: Geometry) -> tuple[int | None, ...]:
    """Tokens along time, height, width of the latents that a condition takes; None for any number."""
    t, h, w = geometry.grid
    span = frame_span(c, geometry)
    if span is not None:
        patch = geometry.cfg.patch_size_t if geometry.stream == "video" else 1
        return (span[1] - span[0]) // patch, h, w
    if isinstance(c, Keyframe):
        return 1 if c.single else None, h, w
    if isinstance(c, Reference):
        return None, h // c.downscale, w // c.downscale
    return (None if isinstance(c, ReferenceAudio) else t), h, w


def _latents_faults(c: Condition, geometry: Geometry, batch: int, given: Tensor) -> list[str]:
    """What is wrong with the latents given to a condition."""
    cfg, name = geometry.cfg, f"latents {c.latents!r}"
    if geometry.stream == "video":
        if given.ndim != 5 or (wrong := latent_faults(cfg, given.shape[1:])):
            why = "; ".join(wrong) if given.ndim == 5 else "expected [B or 1, C, T, H, W]"
            return [f"{name}: {list(given.shape)}, {why}"]
        found = video_grid(cfg, given.shape)
    else:
        if given.ndim != 4 or given.shape[1] * given.shape[3] != cfg.audio_in_channels:
            return [f"{name}: {list(given.shape)}, expected [B or 1, C, T, mel] with C * mel = {cfg.audio_in_channels}"]
        found = (given.shape[2], 1, 1)
    wanted = _given_shape(c, geometry)
    faults = [] if given.shape[0] in (1, batch) else [f"{name}: batch {given.shape[0]}, allowed 1 or {batch}"]
    if any(w is not None and n != w for n, w in zip(found, wanted, strict=True)):
        allowed = " x ".join("any" if w is None else str(w) for w in wanted)
        faults.append(f"{name}: {' x '.join(map(str, found))} tokens (time x height x width), allowed {allowed}")
    limit = (geometry.grid[0] - 1) // c.temporal + 1 if isinstance(c, Reference) else None
    if limit is not None and found[0] > limit:
        faults.append(f"{name}: {found[0]} tokens along time, allowed 1 to {limit} with temporal {c.temporal}")
    return faults


def _extra_faults(c: Condition, geometry: Geometry, batch: int, extras: Extras) -> list[str]:
    """What is wrong with the tensors that a condition refers to."""
    names = [n for n in (c.latents, getattr(c, "mask", None), getattr(c, "attention", None)) if isinstance(n, str)]
    faults = [f"extras has no {n!r}, it has {', '.join(extras) or 'nothing'}" for n in names if n not in extras]
    if faults:
        return faults
    if c.latents is not None:
        faults += _latents_faults(c, geometry, batch, extras[c.latents])
    elif isinstance(c, APPENDED):
        faults.append("latents is None, allowed is the name of an entry of extras")
    if isinstance(c, Mask):
        video, p = geometry.stream == "video", geometry.cfg.patch_size
        t, h, w = geometry.grid
        shape = (t * geometry.cfg.patch_size_t, h * p, w * p) if video else (t,)
        faults += _shape_faults(f"mask {c.mask!r}", extras[c.mask], batch, shape)
    if not faults and isinstance(getattr(c, "attention", None), str):
        count = math.prod(video_grid(geometry.cfg, extras[c.latents].shape))
        faults += _shape_faults(f"attention {c.attention!r}", extras[c.attention], batch, (count,))
    return faults


def _shape_faults(name: str, given: Tensor, batch: int, shape: tuple[int, ...]) -> list[str]:
    if tuple(given.shape) in ((1, *shape), (batch, *shape)):
        return []
    return [f"{name}: {list(given.shape)}, allowed [1 or {batch}, {', '.join(map(str, shape))}]"]


def check_conditions(clean: Tensor, geometry: Geometry, conditions: Sequence[Condition], extras: Extras) -> None:
    """Raises one UserError with everything that does not fit, by condition; see `nn.ltx2_conditions`."""
    count, stream = math.prod(geometry.grid), geometry.cfg.stream(geometry.stream)
    faults = []
    if clean.ndim != 3 or clean.shape[1:] != (count, stream.in_channels):
        raise UserError(f"{stream.name} clean: {list(clean.shape)}, expected [B, {count}, {stream.in_channels}]")
    for i, c in enumerate(conditions):
        if not isinstance(c, Condition):
            faults.append(f"conditions[{i}]: {type(c).__name__} is no condition")
            continue
        other = VIDEO_ONLY if stream.name == "audio" else AUDIO_ONLY
        found = [f"not for {stream.name}"] if isinstance(c, other) else _setting_faults(c, geometry)
        found = found if found else _extra_faults(c, geometry, clean.shape[0], extras)
        faults += [f"conditions[{i}] ({type(c).__name__}): {fault}" for fault in found]
    raise_faults(f"the {stream.name} stream cannot be conditioned so", faults)
