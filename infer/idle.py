"""Flags of `python -m infer` that would do nothing beside others: each is an error that names both.

Those of LTX-2 alone are in `infer.ltx2_idle`.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Collection, Sequence

import torch

from core.errors import UserError, raise_faults
from infer.conditions import takes_image
from infer.folder import Pipeline
from infer.generate import start_step
from infer.prompts import Prompt

# All that --save-embeds has no use for, whatever else is given.
NOT_EMBEDDED = (
    "output", "contact_sheet", "preview_every", "num_frames", "fps", "steps", "sampler", "flow_shift",
    "guidance_rescale", "two_pass_guidance", "seed", "samples_per_prompt", "video", "strength", "clip_feature",
    "vae_dtype", "vae_strips", "attention_backend", "compile",
)  # fmt: skip
# Flags that one kind of pipeline has no use for.
WAN_ONLY = ("clip_feature", "strength", "unconditional", "flow_shift", "vae_strips")
LTX2_ONLY = (
    "modality", "sound", "keyframe", "image_crf", "prefix", "suffix", "mask", "reference", "reference_attention",
    "reference_strength", "reference_sound", "lora", "two_stage", "refine_lora", "distilled", "audio_guidance_scale",
    "stg_scale", "audio_stg_scale", "stg_blocks", "modality_scale", "audio_modality_scale", "audio_guidance_rescale",
    "skip_step", "max_batch", "cuda_graph", "vae_tile",
)  # fmt: skip
OF_PROMPTS = ("image", "negative_prompt", "seed", "num_frames", "height", "width")  # what a prompt file may say too
OF_GUIDANCE = ("negative_prompt", "guidance_rescale", "two_pass_guidance", "unconditional")


def flags_of(names: Collection[str], given: Collection[str]) -> str:
    """The flags among `names` that are on the command line, as they are written."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if name in given)


def idle(names: Collection[str], given: Collection[str], why: str) -> list[str]:
    """The fault that flags of `names` would do nothing, if any is on the command line."""
    flags = flags_of(names, given)
    return [f"{flags} would do nothing {why}"] if flags else []


def idle_flags(args: argparse.Namespace) -> list[str]:
    """Faults of flags by themselves; `args.given` has the names of those on the command line, see `flags.parse`."""
    given, policy, faults = args.given, [channel for channel, _ in args.unconditional], []
    if args.save_embeds is not None:
        names = [*NOT_EMBEDDED, *(("height", "width") if args.image is None else ())]
        names += [] if "text" in policy else ["unconditional"]
        faults += idle(names, given, "beside --save-embeds, which writes embeddings and stops")
    elif args.video is None:
        faults += idle(["strength"], given, "without --video")
    if args.prompt_embeds is not None:
        faults += idle(["negative_prompt"], given, "beside --prompt-embeds: its negative_prompt_embeds are used")
    elif "text" in policy:
        faults += idle(["negative_prompt"], given, "beside --unconditional text=...")
    return faults + [f"--unconditional names {c} twice" for c in dict.fromkeys(policy) if policy.count(c) > 1]


def check_kind(args: argparse.Namespace, kind: str, samplers: Collection[str]) -> None:
    """Refuses flags that pipelines of this kind (`"Wan"`, `"LTX-2"`) do not have, and samplers of the other."""
    other, names = ("LTX-2", LTX2_ONLY) if kind == "Wan" else ("Wan", WAN_ONLY)
    faults = idle(names, args.given, f"for this {kind} pipeline: of {other} only")
    if args.sampler is not None and args.sampler not in samplers:
        faults.append(f"--sampler {args.sampler} is none of {kind}'s: {', '.join(sorted(samplers))}")
    raise_faults(f"{args.model} cannot be sampled so:", faults)


def idle_beside_prompts(args: argparse.Namespace, prompts: Sequence[Prompt]) -> list[str]:
    """Faults of flags that say what every prompt of `--prompt-file` says itself."""
    said = [name for name in OF_PROMPTS if all(getattr(prompt, name) is not None for prompt in prompts)]
    return idle(said, args.given, f"beside --prompt-file {args.prompt_file}: every prompt there has its own")


def check_idle(args: argparse.Namespace, pipe: Pipeline, guidance_scale: float, steps: int = 1) -> None:
    """Refuses flags that would do nothing for this model and sampling: one UserError for all of them."""
    check_compiler(args, pipe.device)
    cfg, faults = pipe.cfg, []
    if guidance_scale == 1.0 and (flags := flags_of(OF_GUIDANCE, args.given)):
        faults.append(f"guidance is off (scale 1), so {flags} would do nothing: give --guidance-scale too")
    has = {"text": True, "image": cfg.image_dim is not None, "first_frame": cfg.condition_channels > 0}
    channels = ", ".join(channel for channel in has if has[channel])
    faults += [
        f"--unconditional {channel}={action}: the transformer has no such channel; it has {channels}"
        for channel, action in args.unconditional
        if not has.get(channel, False)
    ]
    if cfg.image_dim is None:
        takes = "no features of images" if takes_image(pipe) else "text only"
        faults += idle(["clip_feature"], args.given, f"for this model: the transformer takes {takes}")
        if args.save_embeds is not None:
            faults += idle(["image"], args.given, f"beside --save-embeds: the transformer takes {takes}")
    first = 0 if args.video is None else start_step(steps, args.strength)  # the steps before it are left out
    raise_faults("flags that would do nothing:", faults + preview_faults(args.preview_every, first, steps))


def check_compiler(args: argparse.Namespace, device: torch.device) -> None:
    """Refuses `--compile` on a CPU without the C++ compiler that PyTorch calls there."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if args.compile and device.type == "cpu" and shutil.which(name) is None:
        raise UserError(f"--compile on a CPU needs a C++ compiler: there is no {name} (CXX may name another)")


def preview_faults(every: int | None, first: int, steps: int) -> list[str]:
    """The fault that no step from `first` on, counted from 0, is shown."""
    if every is None or steps // every > first // every:
        return []
    return [f"--preview-every {every} would do nothing: no multiple is among steps {first + 1} to {steps}"]
