"""`python -m infer`: text-to-video from a pipeline folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from core import devices
from core.checkpoint import open_checkpoint
from core.errors import UserError, raise_faults
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
        epilog='example: python -m infer --model outputs/demo/export --prompt "a rabbit in a meadow" --output rabbit.mp4',
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


def read_embeddings(path: str | Path, guidance: bool) -> tuple[Tensor, Tensor | None]:
    """`prompt_embeds` and `negative_prompt_embeds` `[L, D]` of a safetensors file, float32."""
    tree = open_checkpoint(path)
    needed = ["prompt_embeds", *(["negative_prompt_embeds"] if guidance else [])]
    raise_faults(f"{path}: it has {', '.join(tree) or 'no keys'}", [f"missing {k}" for k in needed if k not in tree])
    faults = [f"{k} is {list(tree[k].shape)}, expected [L, D]" for k in needed if len(tree[k].shape) not in (2, 3)]
    raise_faults(str(path), faults)
    read = lambda key: tree[key].read().float().reshape(-1, tree[key].shape[-1])  # noqa: E731
    return read("prompt_embeds"), read("negative_prompt_embeds") if guidance else None


def conditions(args: argparse.Namespace, pipe: Pipeline, guidance: bool) -> tuple[Tensor, Tensor | None]:
    """Text and, with guidance, negative text `[1, L, D]`."""
    if (args.prompt is None) == (args.prompt_embeds is None):
        raise UserError("give exactly one of --prompt and --prompt-embeds")
    if args.prompt_embeds is not None:
        text, negative = read_embeddings(args.prompt_embeds, guidance)
        return pad_prompts(pipe, [text]), None if negative is None else pad_prompts(pipe, [negative])
    return encode_prompts(pipe, [args.prompt]), encode_prompts(pipe, [args.negative_prompt]) if guidance else None


def run(args: argparse.Namespace) -> tuple[Path, Path]:
    """Samples one video and writes the MP4 and the contact sheet; returns their paths."""
    device = devices.resolve(args.device)
    output = Path(args.output)
    if output.suffix.lower() != ".mp4":
        raise UserError(f"--output {output}: expected a name ending in .mp4")
    sheet = output.with_suffix(".png") if args.contact_sheet is None else Path(args.contact_sheet)
    dtype = devices.default_compute_dtype(device) if args.dtype is None else DTYPES[args.dtype]
    pipe = load_pipeline(args.model, device=device, dtype=dtype)
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
    write_video(output, frames, fps)
    label = args.prompt if args.prompt is not None else Path(args.prompt_embeds).name
    contact_sheet([(label, frames)], sheet)
    print(f"wrote {output} ({sampling.num_frames} frames, {sampling.width}x{sampling.height}, {fps:g} fps) and {sheet}")
    return output, sheet


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2."""
    args = parser().parse_args(argv)
    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
