"""`python -m infer`: text-to-video from a pipeline folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from core import devices
from core.checkpoint import open_checkpoint
from core.errors import UserError, exit_status, raise_faults
from core.files import check_target
from core.geometry import geometry_rule
from infer.folder import Defaults, Pipeline, load_pipeline
from infer.generate import Sampling, check_sampling, encode_prompts, pad_prompts, text_to_video
from infer.media import contact_sheet, frame_rate, write_video
from infer.progress import progress
from infer.samplers import SAMPLERS
from kernels import Attention
from kernels.attention import BACKENDS
from nn.run import Run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OVER_DEFAULTS = ("num_frames", "height", "width", "steps", "guidance_scale", "sampler", "flow_shift")
FALLBACK_FPS = 16.0  # Wan's own rate


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m infer",
        description="Sample a video from a prompt with a Wan pipeline folder (Diffusers layout).",
        epilog='example: python -m infer --model outputs/demo/export --prompt "a rabbit in a meadow" '
        "--output rabbit.mp4",
    )
    p.add_argument("--model", required=True, metavar="DIR", help="pipeline folder, as python -m train.export writes it")
    p.add_argument("--prompt", help="what to show; needs a text encoder in the folder")
    p.add_argument("--negative-prompt", default="", help='what to avoid (default: "", the unconditional prompt)')
    p.add_argument("--prompt-embeds", metavar="FILE", help="safetensors with prompt_embeds [L, D] and, for guidance, "
                   "negative_prompt_embeds [L, D], instead of --prompt")  # fmt: skip
    p.add_argument("--output", default="sample.mp4", metavar="FILE", help="MP4 to write (default: %(default)s)")
    p.add_argument("--contact-sheet", metavar="FILE", help="PNG of evenly spaced frames (default: beside the MP4)")
    p.add_argument("--num-frames", type=int, help=f"default: the folder's; {geometry_rule(4, 16)}")
    p.add_argument("--height", type=int, help="pixels (default: the folder's)")
    p.add_argument("--width", type=int, help="pixels (default: the folder's)")
    p.add_argument("--fps", type=float, help="frames per second of the MP4 (default: the folder's, else 16)")
    p.add_argument("--steps", type=int, help="denoising steps (default: the folder's, else 50)")
    p.add_argument("--sampler", choices=sorted(SAMPLERS), help="default: the folder's scheduler")
    p.add_argument("--flow-shift", type=float, help="shift of the noise schedule (default: the folder's)")
    p.add_argument("--guidance-scale", type=float, help="uncond + scale * (cond - uncond); "
                   "1 turns guidance off (default: the folder's, else 5)")  # fmt: skip
    p.add_argument("--guidance-rescale", type=float, default=0.0, help="0..1, Lin et al. 2023 (default: 0)")
    p.add_argument("--two-pass-guidance", action="store_true", help="two calls per step instead of a doubled batch")
    p.add_argument("--seed", type=int, default=0, help="the same seed gives the same video (default: 0)")
    p.add_argument("--device", help="cuda, cuda:1, mps, cpu (default: the best there is)")
    p.add_argument("--dtype", choices=DTYPES, help="compute dtype (default: bf16 on a GPU, fp32 elsewhere)")
    p.add_argument("--attention-backend", default="auto", choices=["auto", *(b.name for b in BACKENDS)],
                   help="attention kernel (default: auto)")  # fmt: skip
    return p


def sampling_of(args: argparse.Namespace, defaults: Defaults) -> Sampling:
    """The command line over the folder's defaults. Raises UserError naming every flag that is still missing."""
    given = {k: getattr(args, k) for k in OVER_DEFAULTS}
    values = {k: getattr(defaults, k) if v is None else v for k, v in given.items()}
    missing = [f"--{k.replace('_', '-')}" for k, v in values.items() if v is None]
    raise_faults("the folder has no default for these, so they must be given:", missing)
    return Sampling(
        **values,
        guidance_rescale=args.guidance_rescale,
        batched_guidance=not args.two_pass_guidance,
    )


def read_embeddings(path: str | Path, guidance: bool) -> dict[str, Tensor]:
    """`prompt_embeds` and, for guidance, `negative_prompt_embeds` of a safetensors file as `[L, D]`, float32.

    They may be stored as `[L, D]` or `[1, L, D]`. Raises UserError naming what is missing or has another shape.
    """
    tree = open_checkpoint(path)
    needed = ["prompt_embeds", *(["negative_prompt_embeds"] if guidance else [])]
    raise_faults(f"{path}: it has {', '.join(tree) or 'no keys'}", [f"missing {k}" for k in needed if k not in tree])
    shapes = {k: tree[k].shape for k in needed}
    bad = [k for k, shape in shapes.items() if len(shape) != 2 and not (len(shape) == 3 and shape[0] == 1)]
    raise_faults(str(path), [f"{k} is {list(shapes[k])}, expected [L, D] or [1, L, D]" for k in bad])
    return {k: v.float().reshape(shapes[k][-2:]) for k, v in tree.read(needed).items()}


def conditions(args: argparse.Namespace, pipe: Pipeline, guidance: bool) -> list[Tensor | None]:
    """Text and, with guidance, negative text `[1, L, D]`."""
    if args.prompt_embeds is not None:
        found = read_embeddings(args.prompt_embeds, guidance)
        texts = [pad_prompts(pipe, [v], [f"{args.prompt_embeds}: {k}"]) for k, v in found.items()]
    else:
        prompts = [args.prompt, *([args.negative_prompt] if guidance else [])]
        texts = [encode_prompts(pipe, [prompt]) for prompt in prompts]
    return texts if guidance else [*texts, None]


def targets(args: argparse.Namespace) -> tuple[Path, Path]:
    """The MP4 and the contact sheet to write. Raises UserError for what cannot be written."""
    output = Path(args.output)
    sheet = output.with_suffix(".png") if args.contact_sheet is None else Path(args.contact_sheet)
    for flag, path, suffix in (("--output", output, ".mp4"), ("--contact-sheet", sheet, ".png")):
        if path.suffix.lower() != suffix:
            raise UserError(f"{flag} {path}: expected a name ending in {suffix}")
        check_target(path)
    return output, sheet


def run(args: argparse.Namespace) -> tuple[Path, Path]:
    """Samples one video and writes the MP4 and the contact sheet; returns their paths."""
    if (args.prompt is None) == (args.prompt_embeds is None):
        raise UserError("give exactly one of --prompt and --prompt-embeds")
    output, sheet = targets(args)
    device = devices.resolve(args.device)
    dtype = devices.default_compute_dtype(device) if args.dtype is None else DTYPES[args.dtype]
    needs = ["vae", *(["text_encoder"] if args.prompt is not None else [])]
    pipe = load_pipeline(args.model, device=device, dtype=dtype, needs=needs)
    sampling = sampling_of(args, pipe.defaults)
    check_sampling(pipe, sampling)
    fps = next(f for f in (args.fps, pipe.defaults.fps, FALLBACK_FPS) if f is not None)
    frame_rate(fps)
    text, negative = conditions(args, pipe, sampling.guidance_scale != 1.0)
    how = Run(attention=Attention(args.attention_backend))
    with progress("sampling", sampling.steps, "steps") as update:
        (frames,) = text_to_video(
            pipe, sampling, text, negative, [args.seed], run=how, progress=lambda done, total: update(done)
        )
    label = args.prompt if args.prompt is not None else Path(args.prompt_embeds).name
    try:
        write_video(output, frames, fps)
        contact_sheet([(label, frames)], sheet)
    except OSError as error:
        raise UserError(f"the video could not be written: {error}") from None
    print(f"wrote {output} ({sampling.num_frames} frames, {sampling.width}x{sampling.height}, {fps:g} fps) and {sheet}")
    return output, sheet


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
