"""`python -m train.preprocess`: the command line of preprocessing."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

import torch
from pydantic.fields import FieldInfo

from core import devices
from core.config import validate
from core.errors import UserError, exit_status, raise_faults
from core.geometry import geometry_rule
from infer.words import counted
from nn.ltx2_config import MODALITIES
from train.preprocess.adopt import adopt
from train.preprocess.finish import Outcome, listed
from train.preprocess.job import How
from train.preprocess.models import find_sources
from train.preprocess.run import preprocess
from train.preprocess.settings import Settings
from train.preprocess.stop import Stopped, ignore_signals, stop_signals

RULE = """buckets: a clip is resampled to --fps by nearest timestamp and its frames are counted. Of the buckets with at
most so many frames it gets one of those with the most, of these the nearest in aspect ratio, of these the largest. Its
first frames are scaled until they cover the bucket, and the centre is cropped. A clip with fewer frames than the
shortest bucket, or more than --max-crop of whose area would be lost, or that would be enlarged more than --max-upscale
times, is not used; report.json says why.

Run again, it goes on where it was stopped; a clip whose contents have changed since is encoded again, with its part.
Under torchrun every process makes its share of the parts.

exit status: 0: every clip was used; 1: some were not; 2: an error; 143, 130: stopped by SIGTERM, SIGINT (Ctrl-C).

example: python -m train.preprocess --data videos.csv --output data/mine --num-frames 33 --height 96 --width 160
example: python -m train.preprocess --data videos.csv --output data/wan --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
         --buckets 832x480x81,480x832x81 --fps 16
example: python -m train.preprocess --data videos.csv --output data/av --row-type t2va --num-frames 33 --height 96
         --width 160
example: python -m train.preprocess --precomputed clips/.precomputed --output data/ltx2 --model LTX-2-FOLDER
"""

PRECOMPUTED = ("modality", "without_conditions", "skip_unusable")
"""Flags of `.precomputed` folders only."""

CHOICES = {"row_type": ("t2v", "i2v", "t2va"), "dtype": ("fp32", "bf16"), "vae_dtype": ("fp32", "bf16")}


def _help(field: FieldInfo) -> str:
    text, _, unset = field.description.rstrip(".").partition("; null: ")
    default = unset if field.default is None else field.default
    return text if default == "" else f"{text} (default: {default})"


def parser() -> argparse.ArgumentParser:
    """The command line; the settings, their defaults and meanings are those of `Settings`."""
    p = argparse.ArgumentParser(
        prog="python -m train.preprocess",
        description="Encode videos, pictures (PNG, JPEG), their sound and captions into a Parquet set for training. "
        "Without a model, latents come from a linear patch codec fitted on the clips, those of sound from a linear "
        "codec over log-mel frames, and prompt embeddings from hashing words: that needs no downloads. "
        f"{geometry_rule(4, 8)} for the patch codec and Wan2.1's VAE (16 for Wan2.2's); a model with patches of 2 "
        f"(Wan) needs twice that. For LTX-2's VAE {geometry_rule(8, 32)}.",
        epilog=RULE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--data", metavar="FILE", help="CSV, JSON or JSONL with path (or video) and caption per row; paths "
                   "are relative to the file's folder. With --precomputed: the captions of its samples")  # fmt: skip
    p.add_argument("--output", required=True, metavar="DIR", help="folder of the set")
    g = p.add_argument_group("models")
    g.add_argument("--model", metavar="DIR|ID", help="Wan or LTX-2 pipeline folder or hub id: its VAE, text encoder "
                   "and, for i2v, image encoder, for t2va audio VAE")  # fmt: skip
    kinds = {"vae": "VAE", "text-encoder": "text encoder", "image-encoder": "image encoder, for i2v"}
    for name, text in {**kinds, "audio-vae": "audio VAE, for t2va"}.items():
        g.add_argument(f"--{name}", metavar="DIR", help=f"folder of the {text} (default: the model's)")
    g.add_argument("--device", help="cuda, cuda:1, mps, cpu (default: the best there is)")
    g = p.add_argument_group("settings")
    for name, field in Settings.model_fields.items():
        choices = CHOICES.get(name)
        kind = {"fps": float, "max_crop": float, "max_upscale": float}.get(name, int)
        how = {"type": str if choices or name == "buckets" else kind, "choices": choices}
        how = {"action": "store_true"} if field.annotation is bool else how
        g.add_argument(_flag(name), default=field.default, help=_help(field), **how)
    g = p.add_argument_group("folders of the public LTX trainer")
    g.add_argument("--precomputed", metavar="DIR", help=".precomputed folder to make a set of, with the connectors of "
                   "--model; the files are read without running code of theirs")  # fmt: skip
    g.add_argument("--modality", choices=tuple(MODALITIES), help="what to take of it (default: all that there is)")
    g.add_argument("--without-conditions", action="store_true", help="leave out its masks and references")
    g.add_argument("--skip-unusable", action="store_true", help="leave out its samples that cannot be used")
    g = p.add_argument_group("what to do with what is there")
    g.add_argument("--overwrite", action="store_true", help="replace a set in the output folder that is complete, or "
                   "of other settings, models or metadata (an unfinished one of the same is gone on with)")  # fmt: skip
    g.add_argument("--strict", action="store_true", help="a clip that cannot be used is an error; nothing is encoded")
    g.add_argument("--retry-unusable", action="store_true", help="make the parts again that have unusable clips")
    return p


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of a command line. Raises UserError for values that are none."""
    values = {name: getattr(args, name) for name in Settings.model_fields}
    if values["buckets"] is not None:
        values["buckets"] = [text.strip() for text in values["buckets"].split(",")]
    return validate(Settings, values, "command line")


def idle(args: argparse.Namespace) -> list[str]:
    """Flags that say nothing to clips, or to a `.precomputed` folder, and those that are missing."""
    if args.precomputed is None:
        faults = [] if args.data is not None else ["--data is needed, or --precomputed"]
        given = [name for name in PRECOMPUTED if getattr(args, name)]
        return faults + [f"{_flag(name)}: needs --precomputed" for name in given]
    faults = [] if args.model is not None else ["--model is needed with --precomputed: the LTX-2 pipeline's folder"]
    given = [name for name in ("vae", "text_encoder", "image_encoder", "audio_vae", "strict") if getattr(args, name)]
    given += ["row_type"] if args.row_type != Settings.model_fields["row_type"].default else []
    return faults + [f"{_flag(name)}: does nothing with --precomputed" for name in given]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def ranks(env: Mapping[str, str]) -> tuple[int, int, int]:
    """torchrun's rank, number of processes, and rank on this machine. Raises UserError for what is no such set."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    try:
        rank, world, local = (int(env.get(name, default)) for name, default in names.items())
    except ValueError:
        seen = ", ".join(f"{name}={env.get(name)}" for name in names)
        raise UserError(f"the environment has {seen}, expected integers, as torchrun sets them") from None
    if not 0 <= rank < world:
        raise UserError(f"the environment has RANK={rank} and WORLD_SIZE={world}, expected a rank below it")
    return rank, world, local


def device_of(asked: str | None, world: int, local: int) -> torch.device:
    """The device of a process: of several, each takes its own GPU."""
    device = devices.resolve(asked)
    if device.type == "cuda" and world > 1:
        return devices.resolve(f"cuda:{local}")
    return device


def report(args: argparse.Namespace, done: Outcome, rank: int) -> int:
    """Says what was made, and returns the exit status."""
    clips = counted(done.clips, "clip")
    if not done.complete:
        are = "is" if done.clips == 1 else "are"
        print(f"rank {rank}: its {clips} {are} done; {args.output} is complete when the other ranks' are")
        return 0  # another status would make torchrun end the ranks that are at work
    quality = "" if done.psnr is None else f" (the codec rebuilds the clips at {done.psnr:.1f} dB)"
    print(f"wrote {args.output}: {counted(done.rows, 'row')} of {clips}{quality}")
    if done.unusable:
        were = "was" if len(done.unusable) == 1 else "were"
        print(f"{len(done.unusable)} of {clips} {were} not used:", file=sys.stderr)
        print("".join(f"  - {line}\n" for line in listed(done.unusable)), end="", file=sys.stderr)
    return 1 if done.unusable else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr. For the exit status see `RULE`."""
    args, status, prefix = parser().parse_args(argv), [], []

    def work() -> None:
        rank, world, local = ranks(os.environ)
        prefix.extend([f"rank {rank}: "] if world > 1 else [])
        settings, device = settings_of(args), device_of(args.device, world, local)
        how = {name: getattr(args, name) for name in ("overwrite", "strict", "retry_unusable")}
        how |= {"rank": rank, "world": world, "stop": received}
        raise_faults("flags that do nothing here, or are missing", idle(args))
        if args.precomputed is not None:
            taken = {name: getattr(args, name) for name in PRECOMPUTED}
            done = adopt(args.precomputed, args.output, args.model, settings, captions=args.data, device=device,
                         how=How(**how), **taken)  # fmt: skip
        else:
            folders = (args.model, args.vae, args.text_encoder, args.image_encoder, args.audio_vae)
            sources = find_sources(*folders, row_type=settings.row_type)
            done = preprocess(args.data, args.output, settings, sources, device=device, **how)
        status.append(report(args, done, rank))

    with stop_signals() as received:
        try:
            failed = exit_status(work)
        except Stopped as stopped:
            print("".join(prefix) + stopped.message(args.output), file=sys.stderr, flush=True)
            return 128 + stopped.number
    return failed if failed else status[0]


if __name__ == "__main__":
    code = main()
    if code > 128:
        ignore_signals()
    sys.exit(code)
