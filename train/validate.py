"""Validation: videos from a prompt file, sampled with the weights in training."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from core import devices
from core.errors import named
from core.trees import Params
from infer.folder import Pipeline
from infer.generate import Sampling, generate
from infer.jobs import Job, check_jobs, embed_pictures, embed_texts, make_jobs, moved
from infer.media import contact_sheet, write_video
from infer.prompts import Prompt, read_prompts
from infer.samplers import SAMPLERS
from nn.run import Run
from train.config import Validation
from train.setup import Setup
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
            data's), picture or models cannot be sampled; before any encoder is read.
    """
    v = setup.recipe.callbacks.validation
    if v is None:
        return []
    with named("callbacks.validation.dataset_file"):
        prompts = read_prompts(v.dataset_file)
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


def live_pipeline(setup: Setup, state: TrainState) -> Pipeline:
    """The run's current weights as a pipeline: the averaged ones when there are any and the recipe wants them."""
    use_ema = state.ema is not None and setup.recipe.callbacks.validation.use_ema
    params = state.ema if use_ema else state.params
    return pipeline_of(setup, {k: p.detach() for k, p in params.items()})


class Interrupted(Exception):
    """Validation was asked to stop between two denoising steps."""


@torch.no_grad()
def validate(
    setup: Setup, state: TrainState, jobs: Sequence[Job], log: Callable[[str], None], stop: Sequence[int] = ()
) -> list[Path]:
    """Samples every prompt with every step count; writes MP4s and one contact sheet below `samples/`.

    The layers run eagerly, so that validation never adds graphs to the compile cache of training. Raises
    Interrupted after the denoising step during which `stop` (the signals received) became non-empty.
    """

    def progress(done: int, total: int) -> None:
        if stop:
            raise Interrupted

    v: Validation = setup.recipe.callbacks.validation
    pipe, folder = live_pipeline(setup, state), Path(setup.recipe.training.checkpoint.output_dir) / "samples"
    run = Run(attention=setup.run.attention)
    fps = next(f for f in (v.fps, setup.defaults.fps, 16.0) if f is not None)
    rows, paths = [], []
    for i, job in enumerate(jobs):
        seed = DEFAULT_SEED if job.prompt.seed is None else job.prompt.seed
        job = moved(job, setup.device)
        for steps in v.sampling_steps:
            sampling = dataclasses.replace(job.sampling, steps=steps)
            (frames,) = generate(
                pipe, sampling, job.text, job.negative, [seed], conditions=job.conditions, run=run, progress=progress
            )
            path = folder / f"step-{state.step:06d}-prompt{i}-{steps}steps.mp4"
            write_video(path, frames, fps)
            rows.append((f"{job.prompt.caption} ({steps} step{'s' if steps > 1 else ''})", frames))
            paths.append(path)
    devices.empty_cache(setup.device)  # blocks of the VAE's sizes are of no use to training
    sheet = folder / f"step-{state.step:06d}.png"
    contact_sheet(rows, sheet, title=f"step {state.step}")
    log(f"validated at step {state.step}: {len(paths)} videos, contact sheet {sheet}")
    return paths
