"""Flags of `python -m infer` that would do nothing for an LTX-2 pipeline: each is an error that says why."""

import argparse
from collections.abc import Mapping

import torch

from core.errors import raise_faults
from infer.idle import NOT_EMBEDDED, check_compiler, flags_of, idle
from infer.ltx2_guidance import Guidance, plan_steps
from infer.schedules import Schedule
from nn.ltx2_config import LTX2Config

TITLE = "flags that would do nothing:"
# Guidance of a stream by itself, and all that is of one stream.
OF_GUIDANCE = {
    "video": ("guidance_scale",),
    "audio": ("audio_guidance_scale", "audio_stg_scale", "audio_guidance_rescale"),
}
OF_REFERENCE = ("reference", "reference_attention", "reference_strength")
OF_STREAM = {
    "video": (
        "image", "keyframe", "image_crf", "prefix", "suffix", "mask", *OF_REFERENCE, "video", "two_stage",
        "refine_lora", "contact_sheet", "preview_every", "height", "width", "vae_tile", *OF_GUIDANCE["video"],
    ),
    "audio": ("sound", "reference_sound", *OF_GUIDANCE["audio"]),
}  # fmt: skip
# By stream the flag that gives all of it, and what then has nothing to act on.
IN_PLACE = {
    "video": ("--video", *OF_GUIDANCE["video"]),
    "audio": ("--sound", "reference_sound", *OF_GUIDANCE["audio"]),
}
OF_BOTH = ("modality_scale", "audio_modality_scale")
# What --save-embeds has no use for besides `infer.idle.NOT_EMBEDDED`.
NOT_OF_TEXT = (
    "image", "height", "width", "sound", "keyframe", "image_crf", "prefix", "suffix", "mask", *OF_REFERENCE,
    "reference_sound", "lora", "two_stage", "refine_lora", "stg_scale", "audio_stg_scale", "stg_blocks", *OF_BOTH,
    "audio_guidance_rescale", "skip_step", "max_batch", "cuda_graph", "vae_tile",
)  # fmt: skip


def given_streams(args: argparse.Namespace) -> list[str]:
    """The streams that are given as a whole; of a video with a mask a part is made."""
    whole = {"video": args.video is not None and args.mask is None, "audio": args.sound is not None}
    return [name for name, found in whole.items() if found]


def check_ltx2_flags(args: argparse.Namespace, cfg: LTX2Config, device: torch.device, pictured: bool) -> None:
    """Refuses flags that this model, or the flags beside them, leave nothing to do: one UserError for all of them.

    Args:
        pictured: whether some prompt has a picture, of its own or that of `--image`.
    """
    check_compiler(args, device)
    given, faults, streams = args.given, [], {s.name for s in cfg.streams}
    if args.save_embeds is not None:
        names = [name for name in NOT_OF_TEXT if name not in NOT_EMBEDDED]
        faults += idle(names, given, "beside --save-embeds, which writes embeddings and stops")
        raise_faults(TITLE, faults)
    for name, flags in OF_STREAM.items():
        faults += [] if name in streams else idle(flags, given, f"here: the model is {cfg.modality}")
    faults += [] if cfg.crossed else idle(OF_BOTH, given, f"here: the model is {cfg.modality}, of one stream")
    for name, (flag, *names) in IN_PLACE.items():
        if name in streams and name in given_streams(args):
            faults += idle(names, given, f"beside {flag}: its {name} is given, not made")
    if args.video is not None and args.mask is None:
        names = ("image", "keyframe", "prefix", "suffix", "reference", "two_stage", "preview_every")
        faults += idle(names, given, "beside --video, which is kept as it is")
    elif args.video is not None:
        faults += idle(("prefix", "suffix"), given, "beside --video with --mask, which says what is kept")
    faults += [] if args.video is not None else idle(["mask"], given, "without --video")
    faults += [] if args.reference is not None else idle(OF_REFERENCE[1:], given, "without --reference")
    if "video" in streams and not pictured and not args.keyframe:
        faults += idle(["image_crf"], given, "without a picture")
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
