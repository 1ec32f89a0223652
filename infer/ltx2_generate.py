"""Text and conditions to pictures and sound, as functions over an LTX-2 pipeline.

A stream is generated, or given as a whole: the sound of an audio-to-video model, the video of a video-to-audio one. A
given stream is clean at every step and no part of what the sampler moves. Conditions (`nn.ltx2_conditions`) give parts
of a stream that is generated.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from core import keys
from core.capture import replayed
from core.errors import UserError, raise_faults
from core.geometry import check_geometry
from infer.autoencoders import decode_frames
from infer.ltx2_folder import LTX2Pipeline
from infer.ltx2_guidance import Guidance, StreamGuidance, guided_velocity, pack_streams, unpack_streams
from infer.ltx2_schedules import LTX2_SAMPLERS, distilled_schedule, shifted_schedule
from infer.schedules import Schedule, is_int, is_number
from infer.sound import Sound
from infer.words import counted
from nn import ltx2, ltx2_inputs
from nn.ltx2_conditions import (
    AudioGeometry,
    Condition,
    Geometry,
    VideoGeometry,
    Written,
    noise_latents,
    own_positions,
    stream_inputs,
    write_conditions,
    written_channels,
)
from nn.ltx2_inputs import StreamInputs, model_inputs
from nn.run import Run

Streams = dict[str, Tensor]
Texts = Mapping[str, Tensor]  # `[B, L, D]` by stream
Progress = Callable[[int, int], None]
GIVEN = "given"  # suffix of the channel that holds a given stream's clean tokens


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
        conditions: by stream, parts that are given. extras: tensors that conditions name.
    """

    streams: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    conditions: Mapping[str, Sequence[Condition]] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """What was made: frames uint8 `[T, H, W, 3]` and sound, on the CPU; None for a stream that the model lacks."""

    frames: Tensor | None
    sound: Sound | None


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


def check_sampling(pipe: LTX2Pipeline, sampling: LTX2Sampling, *, given: Sequence[str] = (), scale: int = 1) -> None:
    """Refuses what cannot be sampled: models that are missing, settings, and sizes, with the nearest valid ones.

    Args:
        given: streams that are given as a whole.
        scale: how many times smaller the first of two stages is.
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
    raise_faults("this pipeline cannot be sampled so", faults)
    frames, pixels, _ = pipe.cfg.vae_scale_factors
    size = (sampling.num_frames, sampling.height, sampling.width) if "video" in pipe.streams else (1, pixels, pixels)
    check_geometry(*size, temporal=frames * pipe.cfg.patch_size_t, spatial=pixels * pipe.cfg.patch_size * scale)


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


# --- sampling -------------------------------------------------------------------------------------------------


def initial_noise(shapes: Mapping[str, Sequence[int]], seeds: Sequence[int], branch: str = "latents") -> Streams:
    """Standard normal latents `[B, ...]` by stream, float32 on the CPU; a sample's noise depends on its seed alone."""
    draw = lambda seed, name, shape: keys.normal(keys.fold_in(keys.fold_in(keys.key(seed), branch), name), shape)  # noqa: E731
    return {name: torch.stack([draw(seed, name, shape) for seed in seeds]) for name, shape in shapes.items()}


def _given_inputs(pipe: LTX2Pipeline, name: str, channels: Mapping[str, Tensor]) -> StreamInputs:
    """A stream that is given as a whole: clean, at noise level 0."""
    clean = channels[f"{name}_{GIVEN}"]
    level = clean.new_zeros(clean.shape[0])
    return StreamInputs(clean, level, channels[f"{name}_positions"], channels[f"{name}_text"])


def denoiser(pipe: LTX2Pipeline, run: Run, *, replay: bool) -> Callable[..., Streams]:
    """What guidance calls: x0 estimates of the streams that are generated; see `infer.ltx2_guidance`."""
    model = lambda inputs: ltx2.forward(pipe.params, pipe.cfg, inputs, run=run)  # noqa: E731
    model = replayed(model) if replay else model

    def denoise(x: Mapping[str, Tensor], sigma: float, timestep: Tensor, channels, keep) -> Streams:
        streams = {}
        for name in pipe.streams:
            if name in x:
                level = torch.full((x[name].shape[0],), sigma, device=x[name].device)
                streams[name] = stream_inputs(pipe.cfg, name, x[name], level, channels)
            else:
                streams[name] = _given_inputs(pipe, name, channels)
        inputs = model_inputs(pipe.cfg, streams, keep=keep, dtype=pipe.dtype)
        velocities = model(inputs)
        estimates = ltx2.clean_estimates(pipe.cfg, {**inputs, **x}, velocities)
        return {name: estimates[name] for name in x}

    return denoise


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Where sampling begins: by stream what conditions wrote, and noise `[B, N, C]` of its own tokens."""

    written: Mapping[str, Written]
    noise: Streams

    def at(self, pipe: LTX2Pipeline, sigma: float) -> Streams:
        """Tokens at a noise level, on the pipeline's device."""
        level = lambda w: torch.full((w.latent.shape[0],), sigma, device=w.latent.device)  # noqa: E731
        noisy = {n: noise_latents(pipe.cfg, w, self.noise[n], level(w)) for n, w in self.written.items()}
        return {name: found.latent for name, found in noisy.items()}


def start_of(
    pipe: LTX2Pipeline, shapes: Mapping[str, Sequence[int]], noise: Streams, given: Given, fps: float, seed: int,
    *, latents: Mapping[str, Tensor] | None = None,
) -> Start:  # fmt: skip
    """Conditions written into the streams that are generated.

    Args:
        noise, latents: `[B, ...]` in the shape of latents; `latents` is what refinement starts from, else zeros.
    """
    written, rows = {}, {}
    for name, shape in shapes.items():
        if name in given.streams:
            continue
        rows[name] = tokens_of(pipe, name, noise[name]).to(pipe.device)
        clean = torch.zeros_like(rows[name])
        if latents is not None:
            clean = tokens_of(pipe, name, latents[name]).to(clean)
        extras = {k: v.to(pipe.device) for k, v in given.extras.items()}
        geometry, conditions = geometry_of(pipe, name, shape, fps), given.conditions.get(name, ())
        written[name] = write_conditions(keys.key(seed), clean, geometry, conditions, extras)
    return Start(written, rows)


def _channels(pipe: LTX2Pipeline, shapes, start: Start, given: Given, texts: Texts, fps: float) -> Streams:
    """Everything that the model sees besides latents, `[B, ...]`."""
    batch = next(iter(start.noise.values())).shape[0]
    found = {f"{name}_text": texts[name].to(pipe.device) for name in pipe.streams}
    for name, written in start.written.items():
        found |= written_channels(name, written)
    for name, latents in given.streams.items():
        tokens = tokens_of(pipe, name, latents.float()).to(pipe.device)
        found[f"{name}_{GIVEN}"] = tokens.expand(batch, -1, -1)
        positions = own_positions(geometry_of(pipe, name, shapes[name], fps), pipe.device)
        found[f"{name}_positions"] = positions.expand(batch, *positions.shape[1:])
    return found


@torch.no_grad()
def sample_streams(
    pipe: LTX2Pipeline, sampling: LTX2Sampling, schedule: Schedule, start: Start, shapes: Mapping[str, Sequence[int]],
    texts: Texts, negative: Texts | None, given: Given, *, run: Run = Run(), progress: Progress | None = None,
) -> Streams:  # fmt: skip
    """Latents `[B, ...]` in float32 of every stream that is generated.

    Args:
        start: tokens are noised to the schedule's first sigma.
        texts, negative: `[B, L, D]` by stream; `negative` is needed where some guidance is by text.
    """
    channels = _channels(pipe, shapes, start, given, texts, sampling.fps)
    uncond = None if negative is None else {f"{name}_text": negative[name].to(pipe.device) for name in pipe.streams}
    guidance = {"video": sampling.video, "audio": sampling.audio}
    guidance = {k: v for k, v in guidance.items() if k in start.written}
    x = start.at(pipe, float(schedule.sigmas[0]))
    sizes = {name: tuple(v.shape[1:]) for name, v in x.items()}
    velocity = guided_velocity(
        pipe.cfg, denoiser(pipe, run, replay=sampling.cuda_graph), guidance, schedule, sizes, channels, uncond,
        written=start.written, batched=sampling.batched_guidance, max_batch=sampling.max_batch, device=pipe.device,
    )  # fmt: skip
    packed = LTX2_SAMPLERS[sampling.sampler](velocity, pack_streams(x), schedule, progress=progress)
    out = {}
    for name, tokens in unpack_streams(packed, sizes).items():
        own = tokens[:, : start.written[name].noisy]
        out[name] = latents_of(pipe, name, own, shapes[name])
    return out


def _check_given(pipe: LTX2Pipeline, shapes: Mapping[str, Sequence[int]], given: Given) -> None:
    faults = [
        f"{name}: latents {list(v.shape)}, expected {[1, *shapes[name]]}"
        for name, v in given.streams.items()
        if tuple(v.shape[1:]) != tuple(shapes[name])
    ]
    names = {name for name in given.conditions if name not in shapes or name in given.streams}
    faults += [f"conditions of {name}, which is not generated" for name in sorted(names)]
    raise_faults("what is given does not fit", faults)


def check_finite(pipe: LTX2Pipeline, latents: Mapping[str, Tensor]) -> None:
    """Refuses latents that would become black frames or noise without a word."""
    if not all(bool(v.isfinite().all()) for v in latents.values()):
        raise UserError(
            f"sampling in {pipe.dtype} gave NaN or infinite latents: the weights or embeddings hold such values, "
            "or the dtype overflows (try bfloat16 or float32)"
        )


def decode(pipe: LTX2Pipeline, latents: Mapping[str, Tensor], given: Given, fps: float, frames: int) -> list[Clip]:
    """Latents of the generated and the given streams as pictures and sound, one sample after another.

    Sound lasts as long as the pictures, `frames / fps` seconds.
    """
    batch = next(iter(latents.values())).shape[0]
    whole = {**latents, **{k: v.expand(batch, *v.shape[1:]) for k, v in given.streams.items()}}
    pictures, sounds = [None] * batch, [None] * batch
    if "video" in whole:
        pictures = decode_frames(pipe.vae, whole["video"])
    if "audio" in whole and pipe.sound.decode is not None:
        waves = pipe.sound.decode(whole["audio"]).float().cpu()
        count = round(frames / fps * pipe.sound.output_rate)
        sounds = [Sound(w[:, :count].clamp(-1, 1), pipe.sound.output_rate) for w in waves]
    return [Clip(p, s) for p, s in zip(pictures, sounds, strict=True)]


@torch.no_grad()
def generate(
    pipe: LTX2Pipeline,
    sampling: LTX2Sampling,
    texts: Texts,
    negative: Texts | None,
    seeds: Sequence[int],
    *,
    given: Given = Given(),
    run: Run = Run(),
    progress: Progress | None = None,
) -> list[Clip]:
    """One clip per seed, in one stage.

    Args:
        texts, negative: `[B, L, D]` by stream, one row a seed.

    Raises:
        UserError: settings, sizes or conditions that do not fit, before any work; latents that are not finite.
    """
    latents = generate_latents(pipe, sampling, texts, negative, seeds, given=given, run=run, progress=progress)
    return decode(pipe, latents, given, sampling.fps, sampling.num_frames)


def as_long(texts: Texts, negative: Texts | None) -> tuple[Texts, Texts | None]:
    """Both padded with zeros to the longer one, by stream: captions of the demos' stand-in differ in length."""
    if negative is None:
        return texts, None
    length = {name: max(texts[name].shape[1], negative[name].shape[1]) for name in texts}
    pad = lambda x, n: torch.nn.functional.pad(x, (0, 0, 0, n - x.shape[1]))  # noqa: E731
    return tuple({name: pad(x, length[name]) for name, x in rows.items()} for rows in (texts, negative))


def generate_latents(
    pipe: LTX2Pipeline, sampling: LTX2Sampling, texts: Texts, negative: Texts | None, seeds: Sequence[int], *,
    given: Given = Given(), run: Run = Run(), progress: Progress | None = None,
) -> Streams:  # fmt: skip
    """The latents of `generate`."""
    check_sampling(pipe, sampling, given=list(given.streams))
    rows = {name: v.shape[0] for name, v in texts.items() if v.shape[0] != len(seeds)}
    raise_faults("texts", [f"{k}: {counted(n, 'row')} for {counted(len(seeds), 'seed')}" for k, n in rows.items()])
    texts, negative = as_long(texts, negative)
    schedule, shapes = schedule_of(pipe, sampling), shapes_of(pipe, sampling)
    _check_given(pipe, shapes, given)
    start = start_of(pipe, shapes, initial_noise(shapes, seeds), given, sampling.fps, seeds[0])
    latents = sample_streams(
        pipe, sampling, schedule, start, shapes, texts, negative, given, run=run, progress=progress
    )  # fmt: skip
    check_finite(pipe, latents)
    return latents
