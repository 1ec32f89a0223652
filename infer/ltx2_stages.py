"""LTX-2 in two stages: a clip of half the size, its latents made larger, and a few steps of distilled weights on them.

Also the adapters that change a pipeline's weights between stages or for references (LoRA, IC-LoRA).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core.errors import UserError
from core.trees import Params
from infer.folder import with_weights
from infer.ltx2_folder import LTX2Pipeline
from infer.ltx2_generate import (
    Clip,
    Preview,
    Progress,
    Streams,
    Texts,
    check_finite,
    decode,
    generate_latents,
    initial_noise,
    sample_streams,
    start_of,
)
from infer.ltx2_guidance import StreamGuidance
from infer.ltx2_sampling import Given, LTX2Sampling, check_sampling, shapes_of
from infer.ltx2_schedules import distilled_schedule
from nn.ltx2_lora import LoraInfo, open_lora
from nn.run import Run

SCALE = 2  # how many times smaller the first stage is


# --- adapters -------------------------------------------------------------------------------------------------


def joined(parts: Sequence[Mapping[str, Tensor]]) -> Params:
    """Adapters of several files as one: their ranks one after another, the scales taken into B."""
    names = dict.fromkeys(k.removesuffix(".lora_A") for part in parts for k in part if k.endswith(".lora_A"))
    out: Params = {}
    for name in names:
        own = [part for part in parts if f"{name}.lora_A" in part]
        scale = lambda part, name=name: part[f"{name}.lora_scale"].to(part[f"{name}.lora_B"].dtype)  # noqa: E731
        out[f"{name}.lora_A"] = torch.cat([part[f"{name}.lora_A"] for part in own])
        out[f"{name}.lora_B"] = torch.cat([part[f"{name}.lora_B"] * scale(part) for part in own], dim=1)
        out[f"{name}.lora_scale"] = torch.ones((), device=out[f"{name}.lora_A"].device)
    return out


def read_loras(
    pipe: LTX2Pipeline, files: Sequence[tuple[Path, float]]
) -> tuple[list[Params], list[LoraInfo]]:  # fmt: skip
    """Each file's adapters for a pipeline's layers on its device, times its strength, and what it says of itself.

    Raises UserError for adapters of another model or version, before any is read.
    """
    opened = [open_lora(path, pipe.cfg) for path, _ in files]
    parts = []
    for (tree, _), (_, strength) in zip(opened, files, strict=True):
        leaves = tree.read(device=pipe.device)
        parts.append({k: v * strength if k.endswith(".lora_scale") else v.to(pipe.dtype) for k, v in leaves.items()})
    return parts, [info for _, info in opened]


def adapted(pipe: LTX2Pipeline, parts: Sequence[Mapping[str, Tensor]]) -> LTX2Pipeline:
    """The pipeline with adapters beside its weights, which are read for it and shared with the one without."""
    pipe = with_weights(pipe)
    return dataclasses.replace(pipe, params={**pipe.params, **joined(parts)}) if parts else pipe


# --- two stages -----------------------------------------------------------------------------------------------


def all_steps(sampling: LTX2Sampling) -> int:
    """Steps of both stages."""
    return sampling.steps + distilled_schedule("two").steps


def _stage(run: Run, progress: Progress | None, preview: Preview | None, before: int, sampling: LTX2Sampling) -> dict:
    """How a stage runs after `before` steps: what it tells counts the steps of both."""
    told = None if progress is None else lambda done, total: progress(before + done, all_steps(sampling))
    shown = None if preview is None else lambda step, x0: preview(before + step, x0)
    return {"run": run, "progress": told, "preview": shown}


def half(sampling: LTX2Sampling) -> LTX2Sampling:
    """The first of two stages."""
    return dataclasses.replace(sampling, height=sampling.height // SCALE, width=sampling.width // SCALE)


def check_stages(
    pipe: LTX2Pipeline,
    sampling: LTX2Sampling,
    *,
    refined: bool,
    given: Sequence[str] = (),
    down: int = 1,
    every: int = 1,
) -> None:
    """Refuses what two stages cannot do, as `check_sampling` one.

    Args:
        refined: whether the second stage has weights of its own. given: streams that are given as a whole.
        down, every: factors of a reference of the first stage.
    """
    if "video" not in pipe.streams:
        raise UserError(f"two stages make a larger video: the model is {pipe.cfg.modality}")
    if "video" in given:
        raise UserError("two stages make a larger video: here the video is given")
    if pipe.upsampler is None:
        raise UserError(f"two stages: {pipe.absent.get('latent_upsampler', 'the pipeline has no latent_upsampler')}")
    if not refined and not pipe.defaults.distilled:
        raise UserError("two stages: the second one needs distilled weights: give a refiner (the distilled adapter)")
    if pipe.vae is None or pipe.vae.denormalise is None:
        raise UserError("two stages: this vae has no latents that an upsampler takes; LTX-2's has")
    check_sampling(pipe, sampling, given=given, scale=SCALE * down, every=every)


def enlarged(pipe: LTX2Pipeline, latents: Tensor) -> Tensor:
    """Video latents `[B, C, t, h, w]` of twice the height and width."""
    return pipe.vae.normalise(pipe.upsampler(pipe.vae.denormalise(latents))).float()


@torch.no_grad()
def refine(
    pipe: LTX2Pipeline, sampling: LTX2Sampling, latents: Streams, texts: Texts, seeds: Sequence[int], *,
    given: Given = Given(), run: Run = Run(), progress: Progress | None = None, preview: Preview | None = None,
) -> Streams:  # fmt: skip
    """The second stage: latents noised to its first level, and denoised by distilled weights without guidance."""
    plain = dataclasses.replace(sampling, video=StreamGuidance(), audio=StreamGuidance())
    schedule, shapes = distilled_schedule("two"), shapes_of(pipe, sampling)
    noise = initial_noise(shapes, seeds, branch="refine")
    start = start_of(pipe, shapes, noise, given, sampling.fps, seeds, latents=latents)
    out = sample_streams(
        pipe, plain, schedule, start, shapes, texts, None, given, run=run, progress=progress, preview=preview
    )
    check_finite(pipe, out)
    return out


@torch.no_grad()
def generate_two_stage(
    pipe: LTX2Pipeline,
    sampling: LTX2Sampling,
    texts: Texts,
    negative: Texts | None,
    seeds: Sequence[int],
    *,
    given: Given = Given(),
    small: Given = Given(),
    refiner: LTX2Pipeline | None = None,
    run: Run = Run(),
    progress: Progress | None = None,
    preview: Preview | None = None,
) -> list[Clip]:
    """One clip per seed, as `generate`, made at half the height and width first.

    Args:
        given, small: what is given, with latents of the size of the second and of the first stage.
        refiner: the pipeline of the second stage; None: `pipe`, whose weights must then be distilled.
        progress, preview: as `generate`; they count the steps of both stages.

    Raises:
        UserError: as `generate`; sizes that have no half; models that are missing.
    """
    check_stages(pipe, sampling, refined=refiner is not None, given=list(given.streams))
    first, second = (_stage(run, progress, preview, before, sampling) for before in (0, sampling.steps))
    latents = generate_latents(pipe, half(sampling), texts, negative, seeds, given=small, **first)
    latents["video"] = enlarged(pipe, latents["video"])
    last = pipe if refiner is None else refiner
    made = refine(last, sampling, latents, texts, seeds, given=given, **second)
    return decode(pipe, made, given, sampling.fps, sampling.num_frames)
