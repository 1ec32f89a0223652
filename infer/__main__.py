"""`python -m infer`: text, pictures, videos and sound to videos, with a pipeline folder or a hub id."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from core import devices
from core.errors import UserError, exit_status, raise_faults
from core.files import check_target
from core.geometry import to_video
from infer import ltx2_command
from infer.conditions import pad_prompts, read_clip_feature, read_embeddings, save_embeddings
from infer.flags import DTYPES, parse, prompts_of, run_of, sampling_of
from infer.folder import Pipeline, open_pipeline, with_weights
from infer.generate import Sampling, generate, start_step
from infer.hub import PARTS, resolve_index, resolve_model
from infer.idle import check_idle, check_kind
from infer.jobs import Job, Place, Texts, check_jobs, embed_pictures, embed_texts, make_jobs
from infer.ltx2_folder import kind_of_pipeline
from infer.ltx2_schedules import LTX2_SAMPLERS
from infer.media import contact_sheet, frame_rate, read_video, write_video
from infer.previews import preview_of, previewer
from infer.progress import progress
from infer.prompts import Prompt, Wanted, plan
from infer.samplers import SAMPLERS
from infer.words import counted

FALLBACK_FPS = 16.0  # Wan's own rate


def outputs_of(args: argparse.Namespace, wanted: Sequence[Wanted]) -> list[Path]:
    """All that is to be written, the contact sheet last. Raises UserError for names with another ending."""
    if args.save_embeds is not None:
        return [Path(args.save_embeds)]
    output = Path(args.output)
    sheet = output.with_suffix(".png") if args.contact_sheet is None else Path(args.contact_sheet)
    for flag, path, suffix in (("--output", output, ".mp4"), ("--contact-sheet", sheet, ".png")):
        if path.suffix.lower() != suffix:
            raise UserError(f"{flag} {path}: expected a name ending in {suffix}")
    previews = [] if args.preview_every is None else [preview_of(w.output) for w in wanted]
    return [*(w.output for w in wanted), *previews, sheet]


def check_outputs(args: argparse.Namespace, wanted: Sequence[Wanted], outputs: Sequence[Path]) -> None:
    """Raises UserError for what cannot be written, or would replace what is read."""
    inputs = {Path(p).resolve() for p in (args.video, *(w.prompt.image for w in wanted)) if p is not None}
    for path in outputs:
        check_target(path)
    clashes = [str(path) for path in dict.fromkeys(outputs) if path.resolve() in inputs]
    raise_faults("these outputs would replace what is read; choose other names (--output, --contact-sheet):", clashes)


def texts_of(args: argparse.Namespace, pipe: Pipeline, prompts: Sequence[Prompt], guidance: bool) -> list[Texts]:
    """Text and, with guidance, negative text of every prompt; all are embedded in one call."""
    guidance = guidance and "text" not in dict(args.unconditional)
    if args.prompt_embeds is not None:
        found = read_embeddings(args.prompt_embeds, guidance)
        rows = [pad_prompts(pipe, [v], [f"{args.prompt_embeds}: {k}"]) for k, v in found.items()]
        return [(rows[0], rows[1] if guidance else None)]
    negatives = [args.negative_prompt if p.negative_prompt is None else p.negative_prompt for p in prompts]
    return embed_texts(pipe, [p.caption for p in prompts], negatives if guidance else None)


def features_of(args: argparse.Namespace, pipe: Pipeline, images: Mapping[Place, Tensor]) -> dict[Place, Tensor | None]:
    """CLIP features of every picture: those of `--clip-feature`, else the encoder's."""
    if args.clip_feature is not None:
        return dict.fromkeys(images, read_clip_feature(args.clip_feature))
    return embed_pictures(pipe, images)


def read_starts(args: argparse.Namespace, samplings: Sequence[Sampling], stride: int) -> dict[Sampling, Tensor]:
    """The first frames of `--video`, uint8 `[T, H, W, 3]`, for every size that is asked for; empty without it.

    `stride`: frames per latent frame of the VAE.
    """
    if args.video is None:
        return {}
    return {
        s: read_video(args.video, num_frames=s.num_frames, size=(s.height, s.width), stride=stride).frames
        for s in dict.fromkeys(samplings)
    }


def prepare(args: argparse.Namespace, pipe: Pipeline, prompts: Sequence[Prompt]) -> list[Job]:
    """Everything that is encoded, before the transformer is read: one encoder at a time is in memory.

    Raises one UserError with every prompt that cannot be sampled; all files are read before the first encoder is.
    """
    title = None if args.prompt_file is None else f"{args.prompt_file}: prompts that cannot be sampled"
    sampled = lambda prompt: sampling_of(args, pipe.defaults, prompt)  # noqa: E731
    given = [] if args.video is None else ["video"]
    samplings, images = check_jobs(pipe, prompts, sampled, title=title, given=given)
    check_idle(args, pipe, samplings[0].guidance_scale, samplings[0].steps)
    if args.video is not None:
        start_step(samplings[0].steps, args.strength)
    clips = read_starts(args, samplings, pipe.vae.temporal)
    texts = texts_of(args, pipe, prompts, samplings[0].guidance_scale != 1.0)
    features = features_of(args, pipe, images)
    videos = {s: pipe.vae.encode(to_video(frames)[None]) for s, frames in clips.items()}
    return make_jobs(pipe, prompts, samplings, texts, images, features, videos)


def write_embeddings(args: argparse.Namespace, pipe: Pipeline, prompts: Sequence[Prompt]) -> None:
    """What `--save-embeds` asks for: the text, with guidance the negative text, and CLIP features of `--image`.

    Raises UserError as `prepare`; sizes matter to a picture alone, which CLIP sees as the video begins with it.
    """
    scale, images = pipe.defaults.guidance_scale if args.guidance_scale is None else args.guidance_scale, {}
    check_idle(args, pipe, scale)
    if args.image is not None:
        one = argparse.Namespace(**{**vars(args), "num_frames": 1})
        _, images = check_jobs(pipe, prompts, lambda prompt: sampling_of(one, pipe.defaults, prompt), title=None)
    ((text, negative),) = texts_of(args, pipe, prompts, scale != 1.0)
    features = embed_pictures(pipe, images)
    save_embeddings(args.save_embeds, text, negative, next((f.float()[None] for f in features.values()), None))
    print(f"wrote {args.save_embeds}")


def make(args: argparse.Namespace, pipe: Pipeline, job: Job, one: Wanted, label: str) -> Tensor:
    """Frames uint8 `[T, H, W, 3]` of one video."""
    steps, every = job.sampling.steps, args.preview_every
    preview = None if every is None else previewer(every, pipe.vae, one.output, one.prompt.caption, steps)
    with progress(label, steps if job.video is None else steps - start_step(steps, args.strength), "steps") as update:
        (frames,) = generate(
            pipe,
            job.sampling,
            job.text,
            job.negative,
            [one.seed],
            conditions=job.conditions,
            video=job.video,
            strength=args.strength,
            run=run_of(args),
            progress=lambda done, total: update(done),
            preview=preview,
        )
    return frames


def write_all(
    args: argparse.Namespace, pipe: Pipeline, jobs: Sequence[Job], wanted: Sequence[Wanted], sheet: Path, fps: float
) -> None:
    """Makes and writes the videos one after another, then the contact sheet of all of them."""
    rows = []
    for i, one in enumerate(wanted):
        label = "sampling" if len(wanted) == 1 else f"sampling {i + 1} of {len(wanted)}"
        frames = make(args, pipe, jobs[i // args.samples_per_prompt], one, label)
        # Of many videos the sheet shows few frames, so that they are not all kept.
        rows.append((one.prompt.caption, frames if len(wanted) == 1 else frames[:: -(-len(frames) // 6)].clone()))
        write_video(one.output, frames, fps)
        if len(wanted) > 1:
            print(f"wrote {one.output} (seed {one.seed})")
    contact_sheet(rows, sheet)


def needs_of(args: argparse.Namespace, prompts: Sequence[Prompt]) -> list[str]:
    """The models around the transformer that the flags call for."""
    pictured = any(p.image is not None for p in prompts)
    wanted = {"vae": args.save_embeds is None or pictured, "text_encoder": args.prompt_embeds is None}
    wanted["image_encoder"] = pictured and args.clip_feature is None
    return [name for name, needed in wanted.items() if needed]


def run(args: argparse.Namespace) -> None:
    """Samples with a folder of either kind."""
    prompts = prompts_of(args)
    wanted = plan(prompts, Path(args.output), args.samples_per_prompt, args.seed)
    parts = [name for name in (*needs_of(args, prompts), *ltx2_command.parts_of(args)) if name in PARTS]
    if kind_of_pipeline(resolve_index(args.model, list(dict.fromkeys(parts)))) == "ltx2":
        check_kind(args, "LTX-2", LTX2_SAMPLERS)
        return ltx2_command.run(args, prompts, wanted)
    check_kind(args, "Wan", SAMPLERS)
    return run_wan(args, prompts, wanted)


def run_wan(args: argparse.Namespace, prompts: Sequence[Prompt], wanted: Sequence[Wanted]) -> None:
    """Samples the videos and writes the MP4s and the contact sheet, or with `--save-embeds` the embeddings alone.

    The transformer stays in memory while its videos are decoded, a few frames at a time.
    """
    outputs = outputs_of(args, wanted)
    check_outputs(args, wanted, outputs)
    device = devices.resolve(args.device)
    dtype = devices.default_compute_dtype(device) if args.dtype is None else DTYPES[args.dtype]
    needs = needs_of(args, prompts)
    folder = resolve_model(args.model, [name for name in needs if name in PARTS])
    vae = {"vae_dtype": DTYPES[args.vae_dtype], "vae_strips": args.vae_strips}
    pipe = open_pipeline(folder, device=device, dtype=dtype, needs=needs, **vae)
    if args.save_embeds is not None:
        return write_embeddings(args, pipe, prompts)
    fps = next(f for f in (args.fps, pipe.defaults.fps, FALLBACK_FPS) if f is not None)
    frame_rate(fps)
    jobs, sheet = prepare(args, pipe, prompts), outputs[-1]
    try:
        write_all(args, with_weights(pipe), jobs, wanted, sheet, fps)
    except OSError as error:
        raise UserError(f"the video could not be written: {error}") from None
    s = jobs[-1].sampling
    if len(wanted) == 1:
        frames = counted(s.num_frames, "frame")
        print(f"wrote {wanted[0].output} ({frames}, {s.width}x{s.height}, {fps:g} fps) and {sheet}")
    else:
        print(f"wrote {len(wanted)} videos and {sheet}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2."""
    args = parse(argv)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
