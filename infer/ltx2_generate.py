"""Text and conditions to pictures and sound, as functions over an LTX-2 pipeline.

A stream is generated, or given as a whole: the sound of an audio-to-video model, the video of a video-to-audio one. A
given stream is clean at every step and no part of what the sampler moves. Conditions (`nn.ltx2_conditions`) give parts
of a stream that is generated.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from core import keys
from core.capture import replayed
from core.errors import UserError, raise_faults
from infer.autoencoders import decode_frames
from infer.ltx2_folder import LTX2Pipeline
from infer.ltx2_guidance import guided_velocity, pack_streams, unpack_streams
from infer.ltx2_sampling import (
    Given,
    LTX2Sampling,
    check_given,
    check_sampling,
    geometry_of,
    latents_of,
    schedule_of,
    shapes_of,
    tokens_of,
)
from infer.ltx2_schedules import LTX2_SAMPLERS
from infer.samplers import VelocityFn
from infer.schedules import Schedule
from infer.sound import Sound
from infer.words import counted
from nn import ltx2
from nn.ltx2_conditions import (
    Geometry,
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
Preview = Callable[[int, Streams], None]
GIVEN = "given"  # suffix of the channel that holds a given stream's clean tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """What was made: frames uint8 `[T, H, W, 3]` and sound, on the CPU; None for a stream that the model lacks."""

    frames: Tensor | None
    sound: Sound | None


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


def _stacked(parts: Sequence[Written]) -> Written:
    """The samples of a batch, each written by itself, as one; positions are those of all."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    joined = lambda name: torch.cat([getattr(part, name) for part in parts])  # noqa: E731
    optional = {n: None if getattr(first, n) is None else joined(n) for n in ("denoise", "strengths")}
    return first._replace(latent=joined("latent"), clean=joined("clean"), noise=joined("noise"), **optional)


def _written(
    pipe: LTX2Pipeline, geometry: Geometry, clean: Tensor, given: Given, seeds: Sequence[int]
) -> Written:  # fmt: skip
    """A stream's conditions, drawn for each sample from its own seed: it depends on no other of the batch."""
    conditions = given.conditions.get(geometry.stream, ())
    extras = {k: v.to(pipe.device) for k, v in given.extras.items()}
    row = lambda v, i: v if v.shape[0] == 1 else v[i : i + 1]  # noqa: E731
    parts = [
        write_conditions(
            keys.key(seed), clean[i : i + 1], geometry, conditions, {k: row(v, i) for k, v in extras.items()}
        )  # fmt: skip
        for i, seed in enumerate(seeds)
    ]
    return _stacked(parts)


def start_of(
    pipe: LTX2Pipeline, shapes: Mapping[str, Sequence[int]], noise: Streams, given: Given, fps: float,
    seeds: Sequence[int], *, latents: Mapping[str, Tensor] | None = None,
) -> Start:  # fmt: skip
    """Conditions written into the streams that are generated.

    Args:
        noise, latents: `[B, ...]` in the shape of latents; `latents` is what refinement starts from, else zeros.
        seeds: one a sample, of the noise of given tokens with a strength below 1.
    """
    written, rows = {}, {}
    for name, shape in shapes.items():
        if name in given.streams:
            continue
        rows[name] = tokens_of(pipe, name, noise[name]).to(pipe.device)
        clean = torch.zeros_like(rows[name])
        if latents is not None:
            clean = tokens_of(pipe, name, latents[name]).to(clean)
        written[name] = _written(pipe, geometry_of(pipe, name, shape, fps), clean, given, seeds)
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


def _watched(velocity: VelocityFn, schedule: Schedule, show: Callable[[int, Tensor], None]) -> VelocityFn:
    """`velocity`, which also shows the x0 that it implies at each level of the schedule, with the step's number."""
    steps = {sigma: i + 1 for i, sigma in enumerate(schedule.sigmas.tolist()[:-1])}  # samplers pass these floats on

    def watched(packed: Tensor, sigma: float, timestep: Tensor) -> Tensor:
        v = velocity(packed, sigma, timestep)
        if sigma in steps:
            show(steps[sigma], packed.to(v.dtype) - sigma * v)
        return v

    return watched


@torch.no_grad()
def sample_streams(
    pipe: LTX2Pipeline, sampling: LTX2Sampling, schedule: Schedule, start: Start, shapes: Mapping[str, Sequence[int]],
    texts: Texts, negative: Texts | None, given: Given, *, run: Run = Run(), progress: Progress | None = None,
    preview: Preview | None = None,
) -> Streams:  # fmt: skip
    """Latents `[B, ...]` in float32 of every stream that is generated.

    Args:
        start: tokens are noised to the schedule's first sigma.
        texts, negative: `[B, L, D]` by stream; `negative` is needed where some guidance is by text.
        preview: called in each step with its number (1 is the first) and the current estimate of these latents.
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

    def unpacked(packed: Tensor) -> Streams:
        own = {k: tokens[:, : start.written[k].noisy] for k, tokens in unpack_streams(packed, sizes).items()}
        return {name: latents_of(pipe, name, tokens, shapes[name]) for name, tokens in own.items()}

    if preview is not None:
        velocity = _watched(velocity, schedule, lambda step, x0: preview(step, unpacked(x0)))
    return unpacked(LTX2_SAMPLERS[sampling.sampler](velocity, pack_streams(x), schedule, progress=progress))


def check_finite(pipe: LTX2Pipeline, latents: Mapping[str, Tensor]) -> None:
    """Refuses latents that would become black frames or noise without a word."""
    if not all(bool(v.isfinite().all()) for v in latents.values()):
        raise UserError(
            f"sampling in {pipe.dtype} gave NaN or infinite latents: the weights or embeddings hold such values, "
            "or the dtype overflows (try bfloat16 or float32)"
        )


def decode(pipe: LTX2Pipeline, latents: Mapping[str, Tensor], given: Given, fps: float, frames: int) -> list[Clip]:
    """Latents of the generated and the given streams as pictures and sound, one sample after another.

    Originals of given streams stay as they are. Sound that is made lasts as long as pictures do, `frames / fps`.
    """
    batch = next(iter(latents.values())).shape[0]
    decoded = {name: v for name, v in given.streams.items() if name not in given.originals}
    whole = {**latents, **{k: v.expand(batch, *v.shape[1:]) for k, v in decoded.items()}}
    pictures, sounds = ([given.originals.get(name)] * batch for name in ("video", "audio"))
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
    preview: Preview | None = None,
) -> list[Clip]:
    """One clip per seed, in one stage.

    Args:
        texts, negative: `[B, L, D]` by stream, one row a seed.
        progress: called with (done, total) after each step. preview: see `sample_streams`.

    Raises:
        UserError: settings, sizes or conditions that do not fit, before any work; latents that are not finite.
    """
    how = {"run": run, "progress": progress, "preview": preview}
    latents = generate_latents(pipe, sampling, texts, negative, seeds, given=given, **how)
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
    given: Given = Given(), run: Run = Run(), progress: Progress | None = None, preview: Preview | None = None,
) -> Streams:  # fmt: skip
    """The latents of `generate`."""
    check_sampling(pipe, sampling, given=list(given.streams))
    rows = {name: v.shape[0] for name, v in texts.items() if v.shape[0] != len(seeds)}
    raise_faults("texts", [f"{k}: {counted(n, 'row')} for {counted(len(seeds), 'seed')}" for k, n in rows.items()])
    texts, negative = as_long(texts, negative)
    schedule, shapes = schedule_of(pipe, sampling), shapes_of(pipe, sampling)
    check_given(shapes, given, len(seeds))
    start = start_of(pipe, shapes, initial_noise(shapes, seeds), given, sampling.fps, seeds)
    latents = sample_streams(
        pipe, sampling, schedule, start, shapes, texts, negative, given, run=run, progress=progress, preview=preview
    )
    check_finite(pipe, latents)
    return latents
