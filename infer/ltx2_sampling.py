"""How an LTX-2 clip is sampled and what it is given: sizes, schedules, and what of them cannot be."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from core.errors import UserError, raise_faults
from core.geometry import check_geometry
from infer.ltx2_folder import LTX2Pipeline
from infer.ltx2_guidance import Guidance, StreamGuidance
from infer.ltx2_schedules import LTX2_SAMPLERS, distilled_schedule, shifted_schedule
from infer.schedules import Schedule, is_int, is_number
from infer.sound import Sound
from infer.words import counted
from nn import ltx2_inputs
from nn.ltx2_conditions import AudioGeometry, Condition, Geometry, VideoGeometry
from nn.ltx2_config import LTX2Config
from nn.ltx2_lora import version_of

IMAGE_CRF = {"2.0": 33, "2.3": 33, "2.5": 18}  # by version; the numbers are those of Diffusers' pipelines


@dataclasses.dataclass(frozen=True)
class LTX2Sampling:
    """Geometry in frames, pixels and frames per second, and how it is sampled.

    Args:
        video, audio: guidance of each stream.
        distilled: the fixed schedule of distilled models in place of `steps`, which then must be its length.
        batched_guidance: the passes of guidance as one batch. max_batch: samples of a call; None: all.
        cuda_graph: record the model as a CUDA graph and replay it (on a GPU).
    """

    num_frames: int
    height: int
    width: int
    fps: float = 24.0
    steps: int = 40
    sampler: str = "euler"
    video: Guidance = StreamGuidance()
    audio: Guidance = StreamGuidance()
    distilled: bool = False
    batched_guidance: bool = True
    max_batch: int | None = None
    cuda_graph: bool = False

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.num_frames / self.fps


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """What is given besides text.

    Args:
        streams: latents of streams that are given as a whole: video `[1 or B, C, t, h, w]`, audio `[1 or B, C, T, F]`.
        conditions: by stream, parts that are given; each applies to every sample. extras: tensors that conditions
            name, of one sample or of B.
        originals: what clips have of whole streams instead of their decoded latents: frames uint8 `[T, H, W, 3]` of
            `"video"`, the `Sound` of `"audio"`.
    """

    streams: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    conditions: Mapping[str, Sequence[Condition]] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    originals: Mapping[str, Tensor | Sound] = dataclasses.field(default_factory=dict)


def image_crf(cfg: LTX2Config) -> int:
    """The H.264 quality of pictures that a model of this version was trained on, see `infer.media.recompressed`."""
    return IMAGE_CRF[version_of(cfg)]


# --- geometry -------------------------------------------------------------------------------------------------


def shapes_of(pipe: LTX2Pipeline, sampling: LTX2Sampling) -> dict[str, tuple[int, ...]]:
    """Latents of one sample by stream: video `(C, t, h, w)`, audio `(C, T, F)`."""
    cfg, (frames, high, wide), out = pipe.cfg, pipe.cfg.vae_scale_factors, {}
    if "video" in pipe.streams:
        channels = cfg.in_channels // (cfg.patch_size_t * cfg.patch_size**2)
        size = ((sampling.num_frames - 1) // frames + 1, sampling.height // high, sampling.width // wide)
        out["video"] = (channels, *size)
    if "audio" in pipe.streams:
        out["audio"] = (pipe.sound.latent_channels, pipe.sound.latent_frames(sampling.seconds), pipe.sound.latent_bins)
    return out


def tokens_of(pipe: LTX2Pipeline, name: str, latents: Tensor) -> Tensor:
    """A stream's latents `[B, ...]` as tokens `[B, N, C]`."""
    return (ltx2_inputs.video_tokens if name == "video" else ltx2_inputs.audio_tokens)(pipe.cfg, latents)


def latents_of(pipe: LTX2Pipeline, name: str, tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """Inverse of `tokens_of` for the shape of one sample."""
    if name == "audio":
        return ltx2_inputs.audio_latents(tokens, mel_bins=shape[-1])
    return ltx2_inputs.video_latents(pipe.cfg, tokens, ltx2_inputs.video_grid(pipe.cfg, shape))


def geometry_of(pipe: LTX2Pipeline, name: str, shape: Sequence[int], fps: float) -> Geometry:
    """Where the tokens of a stream are, for latents of one sample."""
    if name == "audio":
        return AudioGeometry(pipe.cfg, shape[1])
    return VideoGeometry(pipe.cfg, ltx2_inputs.video_grid(pipe.cfg, shape), fps)


def check_sampling(
    pipe: LTX2Pipeline, sampling: LTX2Sampling, *, given: Sequence[str] = (), scale: int = 1, every: int = 1
) -> None:
    """Refuses what cannot be sampled: models that are missing, settings, and sizes, with the nearest valid ones.

    Args:
        given: streams that are given as a whole.
        scale: how many times smaller the smallest video is that goes along: a first stage, a reference.
        every: of how many frames after the first a reference has one.
    """
    parts = {"video": (pipe.vae, "vae"), "audio": (pipe.sound, "audio_vae")}
    faults = []
    for name in pipe.streams:
        model, part = parts[name]
        if model is None:
            faults.append(f"{name}: {pipe.absent.get(part, f'the pipeline has no {part}')}")
        elif name == "audio" and name not in given and model.decode is None:
            faults.append("audio: the pipeline has no vocoder to make sound of spectrograms")
    faults += [f"{name} is given to a model that is {pipe.cfg.modality}" for name in given if name not in pipe.streams]
    if set(given) == set(pipe.streams):
        faults.append("every stream is given: there is nothing to make")
    if not is_int(sampling.steps) or sampling.steps < 1:
        faults.append(f"steps is {sampling.steps!r}, expected an integer of at least 1")
    if not is_number(sampling.fps) or sampling.fps <= 0:
        faults.append(f"fps is {sampling.fps!r}, expected a number above 0")
    if sampling.sampler not in LTX2_SAMPLERS:
        faults.append(f"sampler is {sampling.sampler!r}, allowed: {', '.join(LTX2_SAMPLERS)}")
    faults += _block_faults(pipe, sampling)
    raise_faults("this pipeline cannot be sampled so", faults)
    if "video" not in pipe.streams:
        return check_geometry(sampling.num_frames, 1, 1, temporal=1, spatial=1)
    frames, pixels = (n * p for n, p in zip(pipe.cfg.vae_scale_factors, (pipe.cfg.patch_size_t, pipe.cfg.patch_size)))
    size = (sampling.num_frames, sampling.height, sampling.width)
    return check_geometry(*size, temporal=frames * every, spatial=pixels * scale)


def _block_faults(pipe: LTX2Pipeline, sampling: LTX2Sampling) -> list[str]:
    """Blocks of spatio-temporal guidance that the model does not have."""
    faults = []
    for name in pipe.streams:
        guidance: Guidance = getattr(sampling, name)
        parts = [guidance] if isinstance(guidance, StreamGuidance) else [part for _, part in guidance.bins]
        named = {block for part in parts for block in part.stg_blocks or ()}
        outside = sorted(block for block in named if not 0 <= block < pipe.cfg.num_layers)
        faults += [f"{name}: stg_blocks has {b}, allowed 0 to {pipe.cfg.num_layers - 1}" for b in outside]
    return faults


def schedule_of(pipe: LTX2Pipeline, sampling: LTX2Sampling) -> Schedule:
    """The noise levels: distilled models' own, else shifted by the tokens of the video (of audio alone by its own).

    Raises UserError for a schedule of the other kind than the weights are for, or another number of steps.
    """
    if sampling.distilled != pipe.defaults.distilled:
        kinds = ("full", "distilled")
        raise UserError(
            f"the schedule of a {kinds[sampling.distilled]} model was asked for, these weights are "
            f"{kinds[pipe.defaults.distilled]}"
        )
    if sampling.distilled:
        schedule = distilled_schedule("one")
        if sampling.steps != schedule.steps:
            raise UserError(f"steps is {sampling.steps}, a distilled model takes {schedule.steps}")
        return schedule
    shape = next(iter(shapes_of(pipe, sampling).values()))
    count = shape[1] if "video" not in pipe.streams else math.prod(ltx2_inputs.video_grid(pipe.cfg, shape))
    return shifted_schedule(sampling.steps, count)


def check_given(shapes: Mapping[str, Sequence[int]], given: Given, batch: int) -> None:
    """Refuses latents of other shapes, or for another number of samples, and conditions that would not apply."""
    faults = [
        f"{name}: latents {list(v.shape)}, expected {[f'1 or {batch}', *shapes[name]]}"
        for name, v in given.streams.items()
        if v.shape[0] not in (1, batch) or tuple(v.shape[1:]) != tuple(shapes[name])
    ]
    faults += [
        f"extras {name!r}: {counted(v.shape[0], 'row')} for {counted(batch, 'sample')}"
        for name, v in given.extras.items()
        if v.shape[0] not in (1, batch)
    ]
    rare = [c for found in given.conditions.values() for c in found if c.probability != 1]
    faults += [f"{type(c).__name__}: probability is {c.probability}, expected 1" for c in rare]
    names = {name for name in given.conditions if name not in shapes or name in given.streams}
    faults += [f"conditions of {name}, which is not generated" for name in sorted(names)]
    raise_faults("what is given does not fit", faults)
