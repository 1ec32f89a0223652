"""The command line of `python -m infer`, and what it says: prompts and sampling."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from core.errors import raise_faults
from core.files import text_fault
from core.geometry import geometry_rule
from core.scan import compiled, scan
from infer.folder import Defaults
from infer.generate import Sampling
from infer.idle import idle_beside_prompts, idle_flags
from infer.ltx2_schedules import LTX2_SAMPLERS
from infer.media import CRF
from infer.prompts import Prompt, read_prompts
from infer.samplers import SAMPLERS
from kernels import Attention
from kernels.attention import BACKENDS
from nn.ltx2_config import MODALITIES
from nn.run import Run
from nn.wan_inputs import CHANNELS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OVER_DEFAULTS = ("num_frames", "height", "width", "steps", "guidance_scale", "sampler", "flow_shift")
SIZES = ("num_frames", "height", "width")
POLICIES = ("keep", "zero", "drop")
TOGETHER = "these flags do not go together:"


def _policy(text: str) -> tuple[str, str]:
    """`image=zero` -> `("image", "zero")`."""
    channel, _, action = text.partition("=")
    if channel not in CHANNELS or action not in POLICIES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected CHANNEL=POLICY of {CHANNELS} and {POLICIES}")
    return channel, action


def _what_to_show(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("what to show (exactly one of --prompt, --prompt-file and --prompt-embeds)")
    g.add_argument("--prompt", help="needs a text encoder in the folder")
    g.add_argument("--prompt-file", metavar="FILE", help='JSON {"data": [{"caption": ..., "image"?, '
                   '"negative_prompt"?, "seed"?, "num_frames"?, "height"?, "width"?}]}: one video each')  # fmt: skip
    g.add_argument("--prompt-embeds", metavar="FILE", help="safetensors with prompt_embeds [L, D] and, for guidance, "
                   "negative_prompt_embeds [L, D]; of LTX-2 video_prompt_embeds, audio_prompt_embeds, "
                   "negative_video_prompt_embeds, negative_audio_prompt_embeds")  # fmt: skip
    g.add_argument("--negative-prompt", default="", help='what to avoid (default: "", the unconditional prompt)')
    g.add_argument("--image", metavar="FILE", help="first frame (PNG, JPEG, or the first frame of a video); scaled to "
                   "cover the video's size, bicubic, and cropped to its centre")  # fmt: skip
    g.add_argument("--clip-feature", metavar="FILE", help="safetensors with clip_feature [M, D] of the image, for "
                   "models that need it in a folder without image encoder")  # fmt: skip
    g.add_argument("--video", metavar="FILE", help="Wan: start from this video, noised to --strength; LTX-2: that "
                   "whose sound is made, or with --mask a part. Its first frames, scaled like --image")  # fmt: skip
    g.add_argument("--strength", type=float, default=0.8, help="part of the steps that is run on --video, above 0 to "
                   "1: the larger, the less is left of it (default: %(default)s)")  # fmt: skip
    g.add_argument("--samples-per-prompt", type=int, default=1, metavar="N", help="videos of each prompt, with seeds "
                   "seed, seed + 1, ... (default: 1)")  # fmt: skip


def _what_to_write(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("what to write")
    g.add_argument("--output", default="sample.mp4", metavar="FILE", help="MP4 to write (default: %(default)s), "
                   "sound alone also as .wav or .m4a; several videos get the numbers of prompt and sample: "
                   "sample-003-1.mp4")  # fmt: skip
    g.add_argument("--contact-sheet", metavar="FILE", help="PNG of evenly spaced frames (default: beside the MP4)")
    g.add_argument("--preview-every", type=int, metavar="N", help="every N steps decode the current estimate of the "
                   "video to OUTPUT.preview.png")  # fmt: skip
    g.add_argument("--save-embeds", metavar="FILE", help="write the embeddings of the prompt (and clip_feature of the "
                   "image) as safetensors for --prompt-embeds and --clip-feature, and stop")  # fmt: skip
    g.add_argument("--num-frames", type=int, help=f"default: the folder's; Wan: {geometry_rule(4, 16)}; LTX-2: "
                   f"{geometry_rule(8, 32)}, of 64 with --two-stage")  # fmt: skip
    g.add_argument("--height", type=int, help="pixels (default: the folder's)")
    g.add_argument("--width", type=int, help="pixels (default: the folder's)")
    g.add_argument("--fps", type=float, help="frames per second (default: the folder's, else 16; LTX-2: 24)")


def _how_to_sample(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("how to sample")
    g.add_argument("--steps", type=int, help="denoising steps (default: the folder's, else 50; LTX-2: 40)")
    g.add_argument("--sampler", choices=sorted({*SAMPLERS, *LTX2_SAMPLERS}), help="default: the folder's")
    g.add_argument("--flow-shift", type=float, help="shift of the noise schedule (default: the folder's)")
    g.add_argument("--guidance-scale", type=float, help="uncond + scale * (cond - uncond); "
                   "1 turns guidance off (default: the folder's, else 5; LTX-2: 3, of the video)")  # fmt: skip
    g.add_argument("--guidance-rescale", type=float, help="0..1, Lin et al. 2023 (default: the folder's, else 0)")
    g.add_argument("--unconditional", type=_policy, action="append", default=[], metavar="CHANNEL=POLICY",
                   help="what the unconditional branch does with a channel (text, image, ...): keep, zero or "
                   "drop; by default text is the negative prompt's and the rest is kept; may be repeated")  # fmt: skip
    g.add_argument("--two-pass-guidance", action="store_true", help="a call for each pass of guidance instead of one "
                   "batch")  # fmt: skip
    g.add_argument("--seed", type=int, default=0, help="the same seed gives the same video (default: 0)")
    g.add_argument("--device", help="cuda, cuda:1, mps, cpu (default: the best there is)")
    g.add_argument("--dtype", choices=DTYPES, help="compute dtype (default: bf16 on a GPU, fp32 elsewhere)")
    g.add_argument("--vae-dtype", choices=DTYPES, default="fp32", help="dtype of the autoencoders (default: "
                   "%(default)s)")  # fmt: skip
    g.add_argument("--vae-strips", type=int, default=1, metavar="N", help="decode in N strips of the picture: the same "
                   "video in less memory and a little more time, for Wan's VAE (default: 1)")  # fmt: skip
    g.add_argument("--attention-backend", default="auto", type=lambda text: text.strip().lower(),
                   choices=["auto", *(b.name for b in BACKENDS)],
                   help="attention kernel (default: auto)")  # fmt: skip
    g.add_argument("--compile", action="store_true", help="compile the transformer's block, once for all of them and "
                   "for each size: a minute or so first, then faster steps (on a CPU with a C++ compiler)")  # fmt: skip


def _numbered(text: str, word: str, least: int) -> tuple[Path, int, float]:
    """`picture.png@40` or `picture.png@40:0.8` -> the file, the number and the strength; `word` says what it counts."""
    file, at, place = text.rpartition("@")
    frame, _, strength = place.partition(":")
    try:
        found = Path(file), int(frame), float(strength) if strength else 1.0
    except ValueError:
        found = None
    if found is None or not at or not file or found[1] < least or not 0 < found[2] <= 1:
        form = f"FILE@{word}"
        raise argparse.ArgumentTypeError(f"{text!r}: expected {form} or {form}:STRENGTH, strength above 0 to 1")
    return found


def _keyframe(text: str) -> tuple[Path, int, float]:
    """A picture, the pixel frame where it is seen, and its strength."""
    return _numbered(text, "FRAME", 0)


def _part(text: str) -> tuple[Path, int, float]:
    """A video, how many of its frames are given, and their strength."""
    return _numbered(text, "FRAMES", 1)


def _crf(text: str) -> int:
    """A constant rate factor, 0 to 51."""
    if not text.isdecimal() or int(text) not in CRF:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer from {CRF[0]} (as it is) to {CRF[-1]}")
    return int(text)


def _adapter(text: str) -> tuple[Path, float]:
    """`file.safetensors` or `file.safetensors:0.7` -> the file and its strength."""
    file, colon, strength = text.rpartition(":")
    try:
        return (Path(file), float(strength)) if colon and file else (Path(text), 1.0)
    except ValueError:
        return Path(text), 1.0


def _blocks(text: str) -> tuple[int, ...] | None:
    """`28,29` -> `(28, 29)`; `all` -> None."""
    if text.strip().lower() == "all":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of blocks with commas, or all") from None


def _ltx2(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("LTX-2: what to make, and of what")
    g.add_argument("--modality", choices=tuple(MODALITIES), help="streams to make of a model with both (default: all)")
    g.add_argument("--sound", metavar="FILE", help="audio to video: the sound, from its beginning")
    g.add_argument("--keyframe", type=_keyframe, action="append", default=[], metavar="FILE@FRAME[:STRENGTH]",
                   help="a picture that is seen at a frame (at 0 as --image); may be repeated")  # fmt: skip
    g.add_argument("--image-crf", type=_crf, metavar="N", help="quality of H.264 to which pictures of --image, "
                   "--keyframe and prompt files are compressed first, as the models were trained; 0: as they are "
                   "(default: 33; LTX-2.5: 18)")  # fmt: skip
    g.add_argument("--prefix", type=_part, metavar="FILE@FRAMES[:STRENGTH]", help="go on from a video: its last FRAMES "
                   "frames, and their sound if it has any, are the beginning")  # fmt: skip
    g.add_argument("--suffix", type=_part, metavar="FILE@FRAMES[:STRENGTH]", help="lead to a video: its first FRAMES "
                   "frames but the very first are the end, without their sound")  # fmt: skip
    g.add_argument("--mask", metavar="FILE", help="inpainting: what is white in this picture or video is made anew in "
                   "--video, the rest is kept")  # fmt: skip
    g.add_argument("--reference", metavar="FILE", help="reference video of an IC-LoRA, which is the first --lora")
    g.add_argument("--reference-attention", type=float, metavar="A", help="how much of it is seen, 0..1 (default: all)")
    g.add_argument("--reference-strength", type=float, metavar="S", help="how much of its tokens is kept, 0..1: the "
                   "rest is noise (default: 1)")  # fmt: skip
    g.add_argument("--reference-sound", metavar="FILE", help="reference sound, all of it, for an adapter (--lora) that "
                   "was trained with one")  # fmt: skip
    g.add_argument("--lora", type=_adapter, action="append", default=[], metavar="FILE[:STRENGTH]",
                   help="adapter beside the weights; may be repeated")  # fmt: skip
    g.add_argument("--two-stage", action="store_true", help="at half the size first, then larger with the folder's "
                   "latent_upsampler/ and refined by distilled weights")  # fmt: skip
    g.add_argument("--refine-lora", type=_adapter, action="append", default=[], metavar="FILE[:STRENGTH]",
                   help="the distilled adapter of the second stage, where the weights are not distilled")  # fmt: skip
    g.add_argument("--distilled", action="store_true", help="the weights are distilled, though the folder does not say")
    g = p.add_argument_group("LTX-2: guidance (defaults: the folder's, else the official recipe's of a public model, "
                             "else none of it; --audio-...: of the sound)")  # fmt: skip
    g.add_argument("--audio-guidance-scale", type=float, metavar="S", help="(default: the folder's, else 7)")
    g.add_argument("--stg-scale", type=float, metavar="S", help="by skipped self-attention; 0 turns it off")
    g.add_argument("--audio-stg-scale", type=float, metavar="S", help="(default: that of --stg-scale)")
    g.add_argument("--stg-blocks", type=_blocks, default=(), metavar="N,N", help="in which blocks it is, or all")
    g.add_argument("--modality-scale", type=float, metavar="S", help="by each stream alone; 1 turns it off")
    g.add_argument("--audio-modality-scale", type=float, metavar="S", help="(default: that of --modality-scale)")
    g.add_argument("--audio-guidance-rescale", type=float, metavar="R", help="(default: that of --guidance-rescale)")
    g.add_argument("--skip-step", type=int, default=0, metavar="K", help="guide every (K + 1)-th step (default: 0)")
    g.add_argument("--max-batch", type=int, metavar="N", help="largest batch of guidance passes (default: no limit)")
    g.add_argument("--cuda-graph", action="store_true", help="record the model as a CUDA graph (on a GPU)")
    g.add_argument("--vae-tile", type=int, metavar="N", help="decode pictures in tiles of N latent pixels a side")


def run_of(args: argparse.Namespace) -> Run:
    """How the model runs: with which attention, its blocks compiled or not."""
    how = compiled(scan) if args.compile else scan
    return Run(attention=Attention(args.attention_backend), scan=how)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m infer",
        description="Sample videos with a Wan or LTX-2 pipeline in Diffusers' layout: from text, a picture, a video, "
        "or sound; LTX-2 makes the sound as well.",
        epilog='example: python -m infer --model outputs/demo/export --prompt "a rabbit in a meadow" '
        "--output rabbit.mp4",
    )
    p.add_argument("--model", required=True, metavar="DIR|ID", help="pipeline folder, as python -m train.export writes "
                   "it, or a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers")  # fmt: skip
    _what_to_show(p)
    _what_to_write(p)
    _how_to_sample(p)
    _ltx2(p)
    return p


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, and in `given` the names of the flags that are on it, whatever their values."""
    args, unset = parser().parse_args(argv), []  # a list: --unconditional appends to a copy of it
    marked = parser().parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), unset)))
    args.given = frozenset(name for name, value in vars(marked).items() if value is not unset)
    return args


def sampling_of(args: argparse.Namespace, defaults: Defaults, prompt: Prompt = Prompt("")) -> Sampling:
    """The prompt's sizes over the command line over the folder's defaults.

    Raises UserError naming every flag that is still missing.
    """
    given = {k: getattr(args, k) for k in OVER_DEFAULTS}
    given |= {k: getattr(prompt, k) for k in SIZES if getattr(prompt, k) is not None}
    values = {k: getattr(defaults, k) if v is None else v for k, v in given.items()}
    missing = [f"--{k.replace('_', '-')}" for k, v in values.items() if v is None]
    raise_faults("the folder has no default for these, so they must be given:", missing)
    return Sampling(
        **values,
        guidance_rescale=0.0 if args.guidance_rescale is None else args.guidance_rescale,
        batched_guidance=not args.two_pass_guidance,
        policy=tuple(args.unconditional),
    )


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """What the flags ask for. Raises UserError for flags that do not go together."""
    ways = {"--prompt": args.prompt, "--prompt-file": args.prompt_file, "--prompt-embeds": args.prompt_embeds}
    faults = []
    if sum(v is not None for v in ways.values()) != 1:
        faults.append(f"give exactly one of {', '.join(ways)}")
    texts = {"--prompt": args.prompt, "--negative-prompt": args.negative_prompt}
    faults += [f"{flag} {fault}" for flag, v in texts.items() if v is not None and (fault := text_fault(v)) is not None]
    if args.image is not None and args.video is not None:
        faults.append("give --image or --video, not both")
    if args.clip_feature is not None and (args.image is None or args.prompt_file is not None):
        faults.append("--clip-feature is that of --image, with a single prompt")
    if args.save_embeds is not None and args.prompt is None:
        faults.append("--save-embeds is for a single --prompt")
    if args.preview_every is not None and args.preview_every < 1:
        faults.append(f"--preview-every is {args.preview_every}, expected at least 1")
    raise_faults(TOGETHER, faults + idle_flags(args))
    image = None if args.image is None else Path(args.image)
    if args.prompt_file is None:
        label = args.prompt if args.prompt is not None else Path(args.prompt_embeds).name
        return [Prompt(label, image=image)]
    found = read_prompts(args.prompt_file)
    raise_faults(TOGETHER, idle_beside_prompts(args, found))
    return [dataclasses.replace(p, image=image) if p.image is None else p for p in found]
