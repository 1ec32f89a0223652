"""Validation: videos from a prompt file, sampled with the weights in training."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import devices
from core.errors import named, raise_faults
from core.trees import Params
from infer.folder import Pipeline
from infer.generate import Progress, Sampling, generate, latent_shape
from infer.jobs import Job, check_jobs, embed_pictures, embed_texts, make_jobs, moved
from infer.ltx2_generate import Clip
from infer.media import contact_sheet, write_video
from infer.prompts import SIZES, Prompt, read_prompts
from infer.samplers import SAMPLERS
from infer.sound import spectrogram, write_sound
from infer.words import counted
from nn.run import Run
from parallel.sequence import sequence_parallel
from train import ltx2_validate
from train.config import Validation, sampler_of
from train.optim import holding
from train.setup import Setup
from train.signals import stopping
from train.state import TrainState

DEFAULT_SEED = 0


def check_prompts(setup: Setup) -> list[Any]:
    """The prompts of the recipe's validation, checked and encoded as the kind of model needs. None configured: none.

    Raises:
        UserError: one message with every entry that cannot be used, or whose size (its own, the recipe's or the
            data's), picture or models cannot be sampled; before any encoder is read. One for sizes in the recipe
            that every prompt has itself.
    """
    v = setup.recipe.callbacks.validation
    if v is None:
        return []
    with named("callbacks.validation.dataset_file"):
        prompts = read_prompts(v.dataset_file)
    given = [name for name in SIZES if getattr(v, name) is not None]
    idle = [name for name in given if all(getattr(prompt, name) is not None for prompt in prompts)]
    why = f"would do nothing: every prompt of {v.dataset_file} has its own"
    raise_faults("sizes that no prompt takes", [f"callbacks.validation.{name} {why} {name}" for name in idle])
    return KINDS[setup.family.name].prepare(setup, prompts)


def live_weights(setup: Setup, state: TrainState) -> Params:
    """The run's current weights: the averaged ones when there are any and the recipe wants them."""
    use_ema = state.ema is not None and setup.recipe.callbacks.validation.use_ema
    return state.ema if use_ema else state.params


def own_weights(setup: Setup, state: TrainState) -> Params:
    """`live_weights` for a pipeline; {} where they are sharded: the call that samples gathers them."""
    weights = {} if state.sharded is not None else live_weights(setup, state)
    return {k: p.detach() for k, p in weights.items()}


class Interrupted(Exception):
    """Validation was asked to stop between two denoising steps."""


@torch.no_grad()
def validate(
    setup: Setup, state: TrainState, jobs: Sequence[Job], log: Callable[[str], None], stop: Sequence[int] = ()
) -> list[Path]:
    """Samples every prompt with every step count; writes MP4s and one contact sheet below `samples/`.

    Collective over the run's processes: all sample, the first one writes. The layers run eagerly, so that validation
    never adds graphs to the compile cache of training. Raises Interrupted, on all processes, after the denoising step
    during which `stop` (the signals received) became non-empty on any.
    """

    def progress(done: int, total: int) -> None:
        if stopping(stop, setup.mesh):
            raise Interrupted

    v: Validation = setup.recipe.callbacks.validation
    folder = Path(setup.recipe.training.checkpoint.output_dir) / "samples"
    fps = next(f for f in (v.fps, setup.defaults.fps, 16.0) if f is not None)
    clips, paths, sample = [], [], KINDS[setup.family.name].sample
    weights, own = live_weights(setup, state), own_weights(setup, state)
    swap = state.sharded is not None and weights is not state.params
    with holding(state.params, weights) if swap else contextlib.nullcontext():
        for i, job in enumerate(jobs):
            for steps in v.sampling_steps:
                clip = sample(setup, state, own, job, steps, progress)
                kind = "wav" if clip.frames is None else "mp4"
                path = folder / f"step-{state.step:06d}-prompt{i}-{steps}steps.{kind}"
                if setup.mesh.leader:
                    write_clip(path, clip, fps)
                clips.append((f"{job.prompt.caption} ({counted(steps, 'step')})", clip))
                paths.append(path)
    devices.empty_cache(setup.device)  # blocks of the VAE's sizes are of no use to training
    sheet = folder / f"step-{state.step:06d}.png"
    if setup.mesh.leader:
        write_sheets(sheet, clips, f"step {state.step}")
    what = "video" if any(clip.frames is not None for _, clip in clips) else "sound"
    log(f"validated at step {state.step}: {counted(len(paths), what)}, contact sheet {sheet}")
    return paths


def write_clip(path: Path, clip: Clip, fps: float) -> None:
    """An MP4 with what sound there is, or a sound alone."""
    if clip.frames is None:
        write_sound(path, clip.sound)
    else:
        write_video(path, clip.frames, fps, clip.sound)


def write_sheets(path: Path, clips: Sequence[tuple[str, Clip]], title: str) -> None:
    """One contact sheet of all pictures, and one of all spectrograms: beside it, or in its place."""
    shown = [(caption, clip.frames) for caption, clip in clips if clip.frames is not None]
    heard = [(caption, clip.sound) for caption, clip in clips if clip.sound is not None]
    if shown:
        contact_sheet(shown, path, title=title)
    if heard:
        spectrogram(heard, path.with_name(f"{path.stem}-sound.png") if shown else path, title=title)


# --- Wan ------------------------------------------------------------------------------------------------------


def sampling_for(setup: Setup, prompt: Prompt, steps: int) -> Sampling:
    """Size from the prompt, else the recipe's validation, else the data; the rest from the recipe."""
    v = setup.recipe.callbacks.validation
    pick = lambda name: next(  # noqa: E731
        x for x in (getattr(prompt, name), getattr(v, name), getattr(setup.defaults, name)) if x is not None
    )
    return Sampling(
        num_frames=pick("num_frames"),
        height=pick("height"),
        width=pick("width"),
        steps=steps,
        sampler=sampler_of(setup.recipe),
        flow_shift=setup.recipe.pipeline.flow_shift,
        guidance_scale=v.guidance_scale,
    )


def prepare_jobs(setup: Setup, prompts: Sequence[Prompt]) -> list[Job]:
    """Text and pictures of prompts encoded, on the CPU: they stay the same for the whole run.

    One call for all: UMT5 and CLIP are read once each, and before the state of training takes the device's memory.
    Raises UserError as `check_prompts`.
    """
    v, pipe = setup.recipe.callbacks.validation, pipeline_of(setup, {})
    for steps in v.sampling_steps:
        SAMPLERS[sampler_of(setup.recipe)].schedule(steps, setup.recipe.pipeline.flow_shift)
    title = f"callbacks.validation: prompts of {v.dataset_file} that cannot be sampled"
    first = lambda prompt: sampling_for(setup, prompt, v.sampling_steps[0])  # noqa: E731
    samplings, images = check_jobs(pipe, prompts, first, title=title)
    avoid = ["" if p.negative_prompt is None else p.negative_prompt for p in prompts]
    with named("callbacks.validation"):
        texts = embed_texts(pipe, [p.caption for p in prompts], None if v.guidance_scale == 1.0 else avoid)
        jobs = make_jobs(pipe, prompts, samplings, texts, images, embed_pictures(pipe, images))
    return [moved(job, "cpu") for job in jobs]


def pipeline_of(setup: Setup, params: Params) -> Pipeline:
    """Weights as a pipeline with the run's models around them; captions are cut and padded as in training."""
    parts = setup.components
    return Pipeline(
        params,
        setup.cfg,
        parts.vae,
        parts.text,
        setup.defaults,
        setup.device,
        setup.compute,
        image=parts.models.get("image_encoder"),
        **setup.notes,
    )


def sampled(setup: Setup, state: TrainState, weights: Params, job: Job, steps: int, progress: Progress) -> Clip:
    """A job's video, of `steps` denoising steps. Collective over the run's processes; `weights`: see `own_weights`."""
    job, pipe = moved(job, setup.device), pipeline_of(setup, weights)
    sampling = dataclasses.replace(job.sampling, steps=steps)
    tokens = math.prod(latent_shape(pipe, sampling)[1:]) // math.prod(setup.cfg.patch_size)
    run = sequence_parallel(Run(attention=setup.run.attention, tp=setup.run.tp), setup.mesh, tokens)
    seed = DEFAULT_SEED if job.prompt.seed is None else job.prompt.seed

    def work(params) -> list[Tensor]:
        own = dataclasses.replace(pipe, params=params)
        given = {"conditions": job.conditions, "run": run, "progress": progress}
        return generate(own, sampling, job.text, job.negative, [seed], **given)

    (frames,) = work(pipe.params) if state.sharded is None else state.sharded(work)
    return Clip(frames, None)


# --- kinds of models ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a kind of model is sampled: `prepare(setup, prompts)` gives jobs, each with its `prompt`, that
    `sample(setup, state, weights, job, steps, progress)` makes a clip of.
    """

    prepare: Callable[[Setup, Sequence[Prompt]], list[Any]]
    sample: Callable[[Setup, TrainState, Params, Any, int, Progress], Clip]


KINDS = {
    "wan": Kind(prepare_jobs, sampled),
    "ltx2": Kind(ltx2_validate.prepare_jobs, ltx2_validate.sampled),
}
