"""Validation: videos from a prompt file, sampled with the weights in training."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from core.errors import UserError, named, raise_faults
from core.files import read_json
from core.trees import Params
from infer.folder import Pipeline, TextEncoder
from infer.generate import Sampling, check_sampling, encode_prompts, text_to_video
from infer.media import contact_sheet, write_video
from infer.samplers import SAMPLERS
from infer.schedules import is_int
from nn.run import Run
from train.config import Validation
from train.setup import Setup
from train.state import TrainState

KEYS = ("caption", "seed", "num_frames", "height", "width")
DEFAULT_SEED = 0


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One entry of a prompt file; None leaves a size to the recipe."""

    caption: str
    seed: int = DEFAULT_SEED
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of `{"data": [{"caption", "seed"?, "num_frames"?, "height"?, "width"?}]}`.

    Raises:
        UserError: one message that names the file and every entry that cannot be used. An `image` is
            refused: text-to-video models have no place for it.
    """
    data = read_json(path)
    rows = data.get("data") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows:
        raise UserError(f'{path}: no prompt file: expected {{"data": [{{"caption": ...}}, ...]}}, at least one entry')
    faults = [f"data[{i}]: {fault}" for i, row in enumerate(rows) for fault in _entry_faults(row)]
    raise_faults(f"{path}: prompts that cannot be used", faults)
    return [Prompt(**row) for row in rows]


def _entry_faults(row: Any) -> list[str]:
    if not isinstance(row, dict):
        return [f"is {row!r}, expected a mapping with a caption"]
    faults = [f"unknown key {k!r}; allowed: {', '.join(KEYS)}" for k in row if k not in (*KEYS, "image")]
    if not isinstance(row.get("caption"), str):
        faults.append(f"caption is {row.get('caption')!r}, expected text")
    if "image" in row:
        faults.append("image: this model takes text only")
    for name in ("seed", "num_frames", "height", "width"):
        if name in row and not is_int(row[name]):
            faults.append(f"{name} is {row[name]!r}, expected an integer")
    if is_int(row.get("seed")) and not -(2**63) <= row["seed"] < 2**63:
        faults.append(f"seed is {row['seed']}, expected an integer of 64 bits")
    return faults


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
    *texts, negative = encode_prompts(pipe, [*(p.caption for p in prompts), ""]).split(1)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for steps in v.sampling_steps:
            sampling = sampling_for(setup, prompt, steps)
            (frames,) = text_to_video(pipe, sampling, text, negative, [prompt.seed], run=run, progress=progress)
            path = folder / f"step-{state.step:06d}-prompt{i}-{steps}steps.mp4"
            write_video(path, frames, fps)
            rows.append((f"{prompt.caption} ({steps} step{'s' if steps > 1 else ''})", frames))
            paths.append(path)
    sheet = folder / f"step-{state.step:06d}.png"
    contact_sheet(rows, sheet, title=f"step {state.step}")
    log(f"validated at step {state.step}: {len(paths)} videos, contact sheet {sheet}")
    return paths
