"""Validation: videos from a prompt file, sampled with the weights in training."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from core.errors import UserError, named, raise_faults
from core.trees import Params
from infer.conditions import encode_prompts
from infer.folder import Pipeline, TextEncoder
from infer.generate import Sampling, check_sampling, generate
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


def check_prompts(setup: Setup) -> list[Prompt]:
    """The prompts of the recipe's validation, each tried against what sampling refuses. None configured: no prompts.

    Raises:
        UserError: one message with every entry whose size (its own, the recipe's or the data's) or models
            cannot be sampled.
    """
    v = setup.recipe.callbacks.validation
    if v is None:
        return []
    with named("callbacks.validation.dataset_file"):
        prompts = read_prompts(v.dataset_file)
    pipe, faults = pipeline_of(setup, {}), []
    for steps in v.sampling_steps:
        SAMPLERS[v.sampler].schedule(steps, setup.recipe.pipeline.flow_shift)
    for i, prompt in enumerate(prompts):
        if prompt.image is not None:
            faults.append(f"data[{i}]: image: this model takes text only")
        try:
            check_sampling(pipe, sampling_for(setup, prompt, v.sampling_steps[0]))
        except UserError as error:
            faults.append(f"data[{i}]: {error}")
    raise_faults(f"callbacks.validation: prompts of {v.dataset_file} that cannot be sampled", faults)
    return prompts


def pipeline_of(setup: Setup, params: Params) -> Pipeline:
    """Weights as a pipeline with the run's models around them; captions are cut and padded as in training."""
    embed, length = setup.components.text.embed, setup.text_length
    text = TextEncoder(lambda prompts: [e[:length] for e in embed(prompts)], length)
    return Pipeline(params, setup.cfg, setup.components.vae, text, setup.defaults, setup.device, setup.compute)


def live_pipeline(setup: Setup, state: TrainState) -> Pipeline:
    """The run's current weights as a pipeline: the averaged ones when there are any and the recipe wants them."""
    use_ema = state.ema is not None and setup.recipe.callbacks.validation.use_ema
    params = state.ema if use_ema else state.params
    return pipeline_of(setup, {k: p.detach() for k, p in params.items()})


class Interrupted(Exception):
    """Validation was asked to stop between two denoising steps."""


@torch.no_grad()
def validate(
    setup: Setup, state: TrainState, prompts: list[Prompt], log: Callable[[str], None], stop: Sequence[int] = ()
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
    # One call for all captions: a large text encoder is read for each call.
    avoid = ["" if p.negative_prompt is None else p.negative_prompt for p in prompts]
    embedded = encode_prompts(pipe, [*(p.caption for p in prompts), *avoid]).split(1)
    pairs = zip(embedded[: len(prompts)], embedded[len(prompts) :], strict=True)
    for i, (prompt, (text, negative)) in enumerate(zip(prompts, pairs, strict=True)):
        seed = DEFAULT_SEED if prompt.seed is None else prompt.seed
        for steps in v.sampling_steps:
            sampling = sampling_for(setup, prompt, steps)
            (frames,) = generate(pipe, sampling, text, negative, [seed], run=run, progress=progress)
            path = folder / f"step-{state.step:06d}-prompt{i}-{steps}steps.mp4"
            write_video(path, frames, fps)
            rows.append((f"{prompt.caption} ({steps} step{'s' if steps > 1 else ''})", frames))
            paths.append(path)
    sheet = folder / f"step-{state.step:06d}.png"
    contact_sheet(rows, sheet, title=f"step {state.step}")
    log(f"validated at step {state.step}: {len(paths)} videos, contact sheet {sheet}")
    return paths
