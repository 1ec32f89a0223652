"""Validation: videos from a prompt file, sampled with the weights in training."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core import devices
from core.errors import named, raise_faults
from core.trees import Params
from infer.folder import Pipeline
from infer.generate import Progress, Sampling, generate, latent_shape
from infer.jobs import Job, check_jobs, embed_pictures, embed_texts, make_jobs, moved
from infer.media import contact_sheet, write_video
from infer.prompts import SIZES, Prompt, read_prompts
from infer.samplers import SAMPLERS
from infer.words import counted
from nn.run import Run
from parallel.sequence import sequence_parallel
from train.config import Validation
from train.optim import holding
from train.setup import Setup
from train.signals import stopping
from train.state import TrainState

DEFAULT_SEED = 0


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
        sampler=v.sampler,
        flow_shift=setup.recipe.pipeline.flow_shift,
        guidance_scale=v.guidance_scale,
    )


def check_prompts(setup: Setup) -> list[Job]:
    """The prompts of the recipe's validation, checked and encoded as in `prepare_jobs`. None configured: none.

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
    return prepare_jobs(setup, prompts)


def prepare_jobs(setup: Setup, prompts: Sequence[Prompt]) -> list[Job]:
    """Text and pictures of prompts encoded, on the CPU: they stay the same for the whole run.

    One call for all: UMT5 and CLIP are read once each, and before the state of training takes the device's memory.
    Raises UserError as `check_prompts`.
    """
    v, pipe = setup.recipe.callbacks.validation, pipeline_of(setup, {})
    for steps in v.sampling_steps:
        SAMPLERS[v.sampler].schedule(steps, setup.recipe.pipeline.flow_shift)
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
        image=parts.image,
        expand_timesteps=parts.expand_timesteps,
    )


def live_weights(setup: Setup, state: TrainState) -> Params:
    """The run's current weights: the averaged ones when there are any and the recipe wants them."""
    use_ema = state.ema is not None and setup.recipe.callbacks.validation.use_ema
    return state.ema if use_ema else state.params


def live_pipeline(setup: Setup, state: TrainState) -> Pipeline:
    """`live_weights` as a pipeline; of sharded ones the call that samples gathers them."""
    weights = {} if state.sharded is not None else live_weights(setup, state)
    return pipeline_of(setup, {k: p.detach() for k, p in weights.items()})


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
    rows, paths = [], []
    pipe, weights = live_pipeline(setup, state), live_weights(setup, state)
    swap = state.sharded is not None and weights is not state.params
    with holding(state.params, weights) if swap else contextlib.nullcontext():
        for i, job in enumerate(jobs):
            job = moved(job, setup.device)
            for steps in v.sampling_steps:
                frames = sampled(setup, state, pipe, job, steps, progress)
                path = folder / f"step-{state.step:06d}-prompt{i}-{steps}steps.mp4"
                if setup.mesh.leader:
                    write_video(path, frames, fps)
                rows.append((f"{job.prompt.caption} ({counted(steps, 'step')})", frames))
                paths.append(path)
    devices.empty_cache(setup.device)  # blocks of the VAE's sizes are of no use to training
    sheet = folder / f"step-{state.step:06d}.png"
    if setup.mesh.leader:
        contact_sheet(rows, sheet, title=f"step {state.step}")
    log(f"validated at step {state.step}: {counted(len(paths), 'video')}, contact sheet {sheet}")
    return paths


def sampled(setup: Setup, state: TrainState, pipe: Pipeline, job: Job, steps: int, progress: Progress) -> Tensor:
    """The frames `[T, H, W, 3]` of a job's video, of `steps` denoising steps. Collective over the run's processes."""
    sampling = dataclasses.replace(job.sampling, steps=steps)
    tokens = math.prod(latent_shape(pipe, sampling)[1:]) // math.prod(setup.cfg.patch_size)
    run = sequence_parallel(Run(attention=setup.run.attention, tp=setup.run.tp), setup.mesh, tokens)
    seed = DEFAULT_SEED if job.prompt.seed is None else job.prompt.seed

    def work(params) -> list[Tensor]:
        own = dataclasses.replace(pipe, params=params)
        given = {"conditions": job.conditions, "run": run, "progress": progress}
        return generate(own, sampling, job.text, job.negative, [seed], **given)

    (frames,) = work(pipe.params) if state.sharded is None else state.sharded(work)
    return frames
