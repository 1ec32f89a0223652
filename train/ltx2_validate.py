"""Validation of LTX-2: clips with pictures, sound or both, from the prompts of a run.

A prompt's `image` is the clip's first frame. With a frozen stream there is no validation: it is given in training, and
prompts cannot give it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError, named, raise_faults
from core.geometry import to_video
from core.trees import Params
from infer.ltx2_folder import LTX2Pipeline
from infer.ltx2_generate import Clip, Progress, generate
from infer.ltx2_guidance import StreamGuidance
from infer.ltx2_sampling import Given, LTX2Sampling, check_sampling, schedule_of, shapes_of
from infer.media import read_video
from infer.prompts import Prompt
from nn.ltx2_conditions import FirstFrame
from nn.ltx2_inputs import video_grid
from nn.run import Run
from parallel.sequence import sequence_parallel
from train.config import sampler_of
from train.ltx2_family import guidance
from train.ltx2_sft import DEFAULT_FPS
from train.setup import Setup
from train.state import TrainState

PICTURE = "picture"


@dataclasses.dataclass(frozen=True, eq=False)
class LTX2Job:
    """All that the clip of one prompt needs besides the transformer; texts `[1, L, D]` by stream, on the CPU."""

    prompt: Prompt
    sampling: LTX2Sampling
    text: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None
    given: Given


def pipeline_of(setup: Setup, params: Params) -> LTX2Pipeline:
    """Weights as a pipeline with the run's models around them."""
    parts = setup.components
    return LTX2Pipeline(
        params, setup.cfg, parts.vae, parts.sound, parts.text, setup.defaults, setup.device, setup.compute
    )


def sampling_for(setup: Setup, prompt: Prompt, steps: int) -> LTX2Sampling:
    """Size from the prompt, else the recipe's validation, else the data; the rest from the recipe.

    Raises UserError for a size that none of them says.
    """
    v, found = setup.recipe.callbacks.validation, {}
    for name in ("num_frames", "height", "width"):
        said = (getattr(prompt, name), getattr(v, name), getattr(setup.defaults, name))
        found[name] = next((x for x in said if x is not None), None)
    if "video" not in {s.name for s in setup.cfg.streams}:  # sound has no height and no width
        found |= {"height": 0, "width": 0}
    missing = [f"callbacks.validation.{name}: give it, the data have none" for name, x in found.items() if x is None]
    raise_faults("sizes that nothing says", missing)
    scales = guidance(v)
    return LTX2Sampling(
        **found,
        fps=next(x for x in (v.fps, setup.defaults.fps, DEFAULT_FPS) if x is not None),
        steps=steps,
        sampler=sampler_of(setup.recipe),
        video=StreamGuidance(cfg_scale=scales["guidance_scale"]),
        audio=StreamGuidance(cfg_scale=scales["audio_guidance_scale"]),
        distilled=setup.defaults.distilled,
    )


# --- before the run -------------------------------------------------------------------------------------------


def prepare_jobs(setup: Setup, prompts: Sequence[Prompt]) -> list[LTX2Job]:
    """Texts and pictures of prompts encoded, on the CPU: they stay the same for the whole run.

    Raises UserError for a frozen stream, and with every prompt that cannot be sampled, before any encoder is read.
    """
    if (frozen := setup.recipe.models.student.frozen) is not None:
        raise UserError(
            f"callbacks.validation: models.student.frozen: {frozen} is given in training, and prompts cannot give it; "
            "leave validation out, and sample from exports"
        )
    v, pipe = setup.recipe.callbacks.validation, pipeline_of(setup, {})
    title = f"callbacks.validation: prompts of {v.dataset_file} that cannot be sampled"
    samplings, pictures = _checked(setup, pipe, prompts, title)
    names, scales = list(pipe.streams), guidance(v)
    guided = any(scales[k] != 1.0 for k in _scale_names(names))
    avoid = ["" if p.negative_prompt is None else p.negative_prompt for p in prompts] if guided else []
    captions = [p.caption for p in prompts]
    with named("callbacks.validation"):
        texts = _embedded(pipe, list(dict.fromkeys([*captions, *avoid])))
        given = [_given(pipe, picture) for picture in pictures]
    found = zip(prompts, samplings, captions, avoid if guided else [None] * len(prompts), given, strict=True)
    return [LTX2Job(p, s, texts[c], None if n is None else texts[n], g) for p, s, c, n, g in found]


def _scale_names(streams: Sequence[str]) -> list[str]:
    return [{"video": "guidance_scale", "audio": "audio_guidance_scale"}[name] for name in streams]


def _checked(
    setup: Setup, pipe: LTX2Pipeline, prompts: Sequence[Prompt], title: str
) -> tuple[list[LTX2Sampling], list[Tensor | None]]:
    """How each prompt is sampled, and its picture, uint8 `[1, H, W, 3]`, scaled and cropped."""
    v, samplings, pictures, faults = setup.recipe.callbacks.validation, [], [], []
    for i, prompt in enumerate(prompts):
        try:
            sampling = sampling_for(setup, prompt, v.sampling_steps[0])
            check_sampling(pipe, sampling)
            for steps in v.sampling_steps:
                schedule_of(pipe, dataclasses.replace(sampling, steps=steps))
            samplings.append(sampling)
            pictures.append(_read(pipe, prompt.image, sampling))
        except UserError as error:
            faults.append(f"data[{i}]: {error}")
    raise_faults(title, faults)
    return samplings, pictures


def _read(pipe: LTX2Pipeline, path: Path | None, sampling: LTX2Sampling) -> Tensor | None:
    if path is None:
        return None
    if pipe.vae is None or pipe.vae.encode is None:
        raise UserError(f"image {path}: the model takes no picture, since it makes no video or its vae has no encoder")
    return read_video(path, num_frames=1, size=(sampling.height, sampling.width)).frames


def _embedded(pipe: LTX2Pipeline, captions: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """The texts of captions, `[1, L, D]` by stream, from one reading of the encoder."""
    rows = [{name: row[name][None].cpu() for name in pipe.streams} for row in pipe.text.embed(captions)]
    return dict(zip(captions, rows, strict=True))


def _given(pipe: LTX2Pipeline, picture: Tensor | None) -> Given:
    if picture is None:
        return Given()
    latents = pipe.vae.encode(to_video(picture)[None]).float().cpu()
    return Given(conditions={"video": [FirstFrame(PICTURE)]}, extras={PICTURE: latents})


# --- during the run -------------------------------------------------------------------------------------------


def sampled(
    setup: Setup, state: TrainState, weights: Params, job: LTX2Job, steps: int, progress: Progress
) -> Clip:
    """A job's clip, of `steps` denoising steps. Collective over the run's processes.

    `weights` are whole ones; {} where the state's are sharded, and gathered here.
    """
    sampling, pipe = dataclasses.replace(job.sampling, steps=steps), pipeline_of(setup, weights)
    run = Run(attention=setup.run.attention, tp=setup.run.tp)
    if setup.family.cut(setup.cfg):
        tokens = math.prod(video_grid(setup.cfg, shapes_of(pipe, sampling)["video"]))
        run = sequence_parallel(run, setup.mesh, tokens)
    seed = 0 if job.prompt.seed is None else job.prompt.seed

    @torch.no_grad()
    def work(params: Any) -> list[Clip]:
        own = dataclasses.replace(pipe, params=params)
        return generate(own, sampling, job.text, job.negative, [seed], given=job.given, run=run, progress=progress)

    (clip,) = work(weights) if state.sharded is None else state.sharded(work)
    return clip
