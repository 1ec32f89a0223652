"""Flags of `python -m infer` that would do nothing for an LTX-2 pipeline: each is an error that says why."""

import argparse
from collections.abc import Mapping

import torch

from core.errors import raise_faults
from infer.idle import NOT_EMBEDDED, flags_of, idle
from infer.ltx2_guidance import Guidance, plan_steps
from infer.schedules import Schedule
from nn.ltx2_config import LTX2Config

TITLE = "flags that would do nothing:"
# Guidance of a stream by itself, and all that is of one stream.
OF_GUIDANCE = {
    "video": ("guidance_scale",),
    "audio": ("audio_guidance_scale", "audio_stg_scale", "audio_guidance_rescale"),
}
OF_STREAM = {
    "video": (
        "image", "keyframe", "reference", "reference_attention", "video", "two_stage", "refine_lora", "contact_sheet",
        "preview_every", "height", "width", "vae_tile", *OF_GUIDANCE["video"],
    ),
    "audio": ("sound", *OF_GUIDANCE["audio"]),
}  # fmt: skip
OF_BOTH = ("modality_scale", "audio_modality_scale")
# What --save-embeds has no use for besides `infer.idle.NOT_EMBEDDED`.
NOT_OF_TEXT = (
    "image", "height", "width", "sound", "keyframe", "reference", "reference_attention", "lora", "two_stage",
    "refine_lora", "stg_scale", "audio_stg_scale", "stg_blocks", *OF_BOTH, "audio_guidance_rescale", "skip_step",
    "max_batch", "cuda_graph", "vae_tile",
)  # fmt: skip


def check_ltx2_flags(args: argparse.Namespace, cfg: LTX2Config, device: torch.device) -> None:
    """Refuses flags that this model, or the flags beside them, leave nothing to do: one UserError for all of them."""
    given, faults, streams = args.given, [], {s.name for s in cfg.streams}
    if args.save_embeds is not None:
        names = [name for name in NOT_OF_TEXT if name not in NOT_EMBEDDED]
        faults += idle(names, given, "beside --save-embeds, which writes embeddings and stops")
        raise_faults(TITLE, faults)
    for name, flags in OF_STREAM.items():
        faults += [] if name in streams else idle(flags, given, f"here: the model is {cfg.modality}")
    faults += [] if cfg.crossed else idle(OF_BOTH, given, f"here: the model is {cfg.modality}, of one stream")
    for name, flag, path in (("video", "--video", args.video), ("audio", "--sound", args.sound)):
        if path is not None and name in streams:
            faults += idle(OF_GUIDANCE[name], given, f"beside {flag}: its {name} is given, not made")
    if args.video is not None:
        faults += idle(("image", "keyframe", "reference", "two_stage", "preview_every"), given,
                       "beside --video, which is kept as it is")  # fmt: skip
    faults += [] if args.reference is not None else idle(["reference_attention"], given, "without --reference")
    faults += [] if args.two_stage else idle(["refine_lora"], given, "without --two-stage")
    faults += [] if device.type == "cuda" else idle(["cuda_graph"], given, f"on {device.type}: it is for GPUs")
    raise_faults(TITLE, faults)


def check_ltx2_guidance(
    args: argparse.Namespace, cfg: LTX2Config, guidance: Mapping[str, Guidance], schedule: Schedule
) -> None:
    """Refuses flags of guidance passes that no step has.

    Args:
        guidance: of the streams that are made.
    """
    given, plan = args.given, plan_steps(cfg, guidance, schedule)
    passes, most = {name for step in plan for name in step.passes}, max(len(step.passes) for step in plan)
    faults = []
    if "uncond" not in passes:
        faults += idle(["negative_prompt"], given, "here: nothing is guided by text (scale 1)")
    if "stg" not in passes and args.stg_blocks != ():
        faults += idle(["stg_blocks"], given, "without --stg-scale")
    if most == 1:
        names = ("guidance_rescale", "audio_guidance_rescale", "two_pass_guidance", "max_batch")
        faults += idle(names, given, "here: nothing is guided")
    elif args.max_batch is not None and args.two_pass_guidance:
        faults += idle(["max_batch"], given, f"beside {flags_of(['two_pass_guidance'], given)}")
    elif args.max_batch is not None and args.max_batch >= most:
        faults += idle(["max_batch"], given, f"here: there are {most} passes")
    raise_faults(TITLE, faults)
