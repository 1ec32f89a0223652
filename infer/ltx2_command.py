"""`python -m infer` with an LTX-2 pipeline: from the command line to clips with sound."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core import devices
from core.errors import UserError, raise_faults
from core.files import check_target
from core.geometry import to_video
from infer.flags import DTYPES
from infer.ltx2_folder import LTX2Defaults, LTX2Pipeline, open_ltx2, with_weights
from infer.ltx2_generate import Clip, Given, LTX2Sampling, check_sampling, generate, schedule_of
from infer.ltx2_guidance import StreamGuidance
from infer.ltx2_schedules import DISTILLED_SIGMAS
from infer.ltx2_stages import adapted, check_stages, generate_two_stage, half, read_loras
from infer.ltx2_text import read_texts, save_texts
from infer.media import contact_sheet, read_video, write_video
from infer.progress import progress
from infer.prompts import Prompt, Wanted
from infer.sound import Sound, read_sound, spectrogram, write_sound
from infer.words import counted
from kernels import Attention
from nn.ltx2_conditions import Condition, FirstFrame, Keyframe, Reference
from nn.ltx2_lora import LoraInfo
from nn.run import Run

Texts = dict[str, Tensor]  # `[1, L, D]` by stream
SIZES = ("num_frames", "height", "width")


@dataclasses.dataclass(frozen=True, eq=False)
class LTX2Job:
    """All that the clips of one prompt need besides the transformer; `small` is `given` for the first of two stages."""

    prompt: Prompt
    sampling: LTX2Sampling
    texts: Texts
    negative: Texts | None
    given: Given
    small: Given


# --- what the flags say ---------------------------------------------------------------------------------------


def sampling_of(args: argparse.Namespace, defaults: LTX2Defaults, prompt: Prompt) -> LTX2Sampling:
    """The prompt's sizes over the command line over the folder's defaults. Raises UserError for what is missing."""
    pick = lambda name: next(  # noqa: E731
        (v for v in (getattr(prompt, name, None), getattr(args, name), getattr(defaults, name)) if v is not None), None
    )
    sizes = {name: pick(name) for name in SIZES}
    missing = [f"--{k.replace('_', '-')}" for k, v in sizes.items() if v is None]
    raise_faults("the folder has no default for these, so they must be given:", missing)
    steps = args.steps
    if steps is None:
        steps = len(DISTILLED_SIGMAS["one"]) if defaults.distilled else defaults.steps
    return LTX2Sampling(
        **sizes,
        fps=pick("fps"),
        steps=steps,
        sampler=pick("sampler"),
        video=guidance_of(args, defaults, "video"),
        audio=guidance_of(args, defaults, "audio"),
        distilled=defaults.distilled,
        batched_guidance=not args.two_pass_guidance,
        max_batch=args.max_batch,
        cuda_graph=args.cuda_graph,
    )


def guidance_of(args: argparse.Namespace, defaults: LTX2Defaults, name: str) -> StreamGuidance:
    """Guidance of one stream; distilled weights have none by default."""
    field = "guidance_scale" if name == "video" else "audio_guidance_scale"
    scale = getattr(args, field)
    if scale is None:
        scale = 1.0 if defaults.distilled else getattr(defaults, field)
    return StreamGuidance(
        cfg_scale=scale,
        stg_scale=args.stg_scale,
        stg_blocks=args.stg_blocks,
        modality_scale=args.modality_scale,
        rescale=args.guidance_rescale,
        skip_step=args.skip_step,
    )


def by_text(sampling: LTX2Sampling, streams: Sequence[str]) -> bool:
    """Whether some stream is guided by text, which needs a negative prompt."""
    return any(getattr(sampling, name).cfg_scale != 1 for name in streams)


def check_flags(args: argparse.Namespace, pipe: LTX2Pipeline) -> None:
    """Refuses flags that this pipeline has no use for, all at once."""
    faults = []
    needs = {"video": ("image", "keyframe", "reference", "video", "two_stage", "contact_sheet"), "audio": ("sound",)}
    for name, flags in needs.items():
        if name not in pipe.streams:
            said = [f"--{flag.replace('_', '-')}" for flag in flags if flag in args.given]
            faults += [f"{flag}: the model is {pipe.cfg.modality}" for flag in said]
    if "audio_guidance_scale" in args.given and "audio" not in pipe.streams:
        faults.append(f"--audio-guidance-scale: the model is {pipe.cfg.modality}")
    if "modality_scale" in args.given and not pipe.cfg.crossed:
        faults.append(f"--modality-scale: the model is {pipe.cfg.modality}, so nothing is seen of another stream")
    if "refine_lora" in args.given and not args.two_stage:
        faults.append("--refine-lora does nothing without --two-stage")
    if args.video is not None and (args.image is not None or args.keyframe or args.reference is not None):
        faults.append("--video gives the whole video: leave out --image, --keyframe and --reference")
    if "reference_attention" in args.given and args.reference is None:
        faults.append("--reference-attention does nothing without --reference")
    raise_faults("flags that would do nothing:", faults)


def needs_of(args: argparse.Namespace, modality: str | None) -> list[str]:
    """The models around the transformer that the flags call for."""
    wanted = {
        "text_encoder": args.prompt_embeds is None,
        "latent_upsampler": args.two_stage,
        "audio_vae": args.sound is not None,
        "vae": args.video is not None or args.image is not None or bool(args.keyframe),
    }
    without = {"video": ("audio_vae",), "audio": ("vae", "latent_upsampler")}.get(modality, ())  # see check_flags
    return [name for name, needed in wanted.items() if needed and name not in without]


# --- what is encoded before the transformer is read -----------------------------------------------------------


def embedded(args: argparse.Namespace, pipe: LTX2Pipeline, prompts: Sequence[Prompt], guided: bool) -> list[tuple]:
    """`(text, negative)` of every prompt, `[1, L, D]` by stream; each distinct text is embedded once."""
    row = lambda texts: {name: texts[name][None] for name in pipe.streams}  # noqa: E731
    if args.prompt_embeds is not None:
        text, negative = read_texts(args.prompt_embeds, pipe.streams, guided)
        return [(row(text), None if negative is None else row(negative))]
    avoided = [args.negative_prompt if p.negative_prompt is None else p.negative_prompt for p in prompts]
    order = list(dict.fromkeys([*(p.caption for p in prompts), *(avoided if guided else ())]))
    found = dict(zip(order, pipe.text.embed(order), strict=True))
    return [(row(found[p.caption]), row(found[n]) if guided else None) for p, n in zip(prompts, avoided, strict=True)]


def _pixels(path: Path, sampling: LTX2Sampling, num_frames: int, scale: int = 1) -> Tensor:
    """Frames of a file as a video `[1, 3, T, H, W]` of the clip's size, `scale` times smaller."""
    size = (sampling.height // scale, sampling.width // scale)
    return to_video(read_video(path, num_frames=num_frames, size=size).frames)[None].float()


def given_of(
    args: argparse.Namespace, pipe: LTX2Pipeline, prompt: Prompt, sampling: LTX2Sampling, loras: Sequence[LoraInfo]
) -> Given:
    """What the flags and the prompt give besides text, encoded."""
    conditions: list[Condition] = []
    extras, streams = {}, {}
    if prompt.image is not None:
        conditions.append(FirstFrame("image"))
        extras["image"] = pipe.vae.encode(_pixels(prompt.image, sampling, 1))
    for i, (path, frame, strength) in enumerate(args.keyframe):
        conditions.append(Keyframe(f"keyframe {i}", strength=strength, frame=frame))
        extras[f"keyframe {i}"] = pipe.vae.encode(_pixels(path, sampling, 1))
    if args.reference is not None:
        info = loras[0] if loras else LoraInfo()
        down, every = info.reference_downscale_factor, info.reference_temporal_scale_factor
        conditions.append(Reference("reference", downscale=down, temporal=every, attention=args.reference_attention))
        video = _pixels(Path(args.reference), sampling, sampling.num_frames, down)
        kept = video if every == 1 else torch.cat([video[:, :, :1], video[:, :, 1::every]], dim=2)
        extras["reference"] = pipe.vae.encode(kept)
    if args.video is not None:
        streams["video"] = pipe.vae.encode(_pixels(Path(args.video), sampling, sampling.num_frames))
    if args.sound is not None:
        streams["audio"] = sound_latents(pipe, Path(args.sound), sampling)
    return Given(streams, {"video": conditions} if conditions else {}, extras)


def sound_latents(pipe: LTX2Pipeline, path: Path, sampling: LTX2Sampling) -> Tensor:
    """Latents `[1, C, T, F]` of the beginning of a sound, as long as the clip (silence where it is shorter)."""
    count = pipe.sound.latent_frames(sampling.seconds)
    seconds = max(sampling.seconds, (count + 1) / pipe.sound.latents_per_second)
    sound = read_sound(path, rate=pipe.sound.input_rate, seconds=seconds)
    return pipe.sound.encode(sound.waveform[None])[:, :, :count]


def prepare(args: argparse.Namespace, pipe: LTX2Pipeline, prompts: Sequence[Prompt], loras) -> list[LTX2Job]:
    """Everything that is encoded. Raises one UserError with every prompt that cannot be sampled, before any work."""
    samplings, faults = [], []
    whole = [name for name, path in (("video", args.video), ("audio", args.sound)) if path is not None]
    for i, prompt in enumerate(prompts):
        try:
            sampling = sampling_of(args, pipe.defaults, prompt)
            check_sampling(pipe, sampling, given=whole, scale=2 if args.two_stage else 1)
            schedule_of(pipe, sampling)
            samplings.append(sampling)
        except UserError as error:
            if args.prompt_file is None:
                raise
            faults.append(f"data[{i}]: {error}")
    raise_faults(f"{args.prompt_file}: prompts that cannot be sampled", faults)
    guided = any(by_text(s, pipe.streams) for s in samplings)
    texts = embedded(args, pipe, prompts, guided)
    jobs = []
    for prompt, sampling, (text, negative) in zip(prompts, samplings, texts, strict=True):
        given = given_of(args, pipe, prompt, sampling, loras)
        small = given_of(args, pipe, prompt, half(sampling), loras) if args.two_stage else given
        jobs.append(LTX2Job(prompt, sampling, text, negative, given, small))
    return jobs


# --- the command ----------------------------------------------------------------------------------------------


def outputs_of(args: argparse.Namespace, wanted: Sequence[Wanted], streams: Sequence[str]) -> dict[str, Path]:
    """The pictures beside the clips: the contact sheet, and with sound the spectrogram. Raises UserError for names."""
    output = Path(args.output)
    allowed = (".mp4",) if "video" in streams else (".mp4", ".m4a", ".wav")
    if output.suffix.lower() not in allowed:
        raise UserError(f"--output {output}: expected a name ending in {' or '.join(allowed)}")
    out = {}
    if "video" in streams:
        out["sheet"] = output.with_suffix(".png") if args.contact_sheet is None else Path(args.contact_sheet)
    if "audio" in streams:
        out["spectrogram"] = output.with_suffix(".spectrogram.png")
    return out


def check_targets(args: argparse.Namespace, wanted: Sequence[Wanted], outputs: Mapping[str, Path]) -> None:
    """Raises UserError for what cannot be written, or would replace what is read."""
    read = [args.video, args.sound, args.reference, *(w.prompt.image for w in wanted), *(k[0] for k in args.keyframe)]
    inputs = {Path(p).resolve() for p in read if p is not None}
    targets = [*(w.output for w in wanted), *outputs.values()]
    for path in targets:
        check_target(path)
    clashes = [str(p) for p in dict.fromkeys(targets) if p.resolve() in inputs]
    raise_faults("these outputs would replace what is read; choose other names (--output, --contact-sheet):", clashes)


def make(pipe: LTX2Pipeline, refiner: LTX2Pipeline | None, args, job: LTX2Job, one: Wanted, label: str) -> Clip:
    """One clip."""
    run = Run(attention=Attention(args.attention_backend))
    with progress(label, job.sampling.steps, "steps") as update:
        shared = {"given": job.given, "run": run, "progress": lambda done, total: update(done)}
        call = (pipe, job.sampling, job.texts, job.negative, [one.seed])
        if args.two_stage:
            (clip,) = generate_two_stage(*call, small=job.small, refiner=refiner, **shared)
        else:
            (clip,) = generate(*call, **shared)
    return clip


def write(path: Path, clip: Clip, fps: float) -> None:
    """A clip as a file."""
    if clip.frames is None:
        write_sound(path, clip.sound)
    else:
        write_video(path, clip.frames, fps, clip.sound)


def write_pictures(outputs: Mapping[str, Path], rows: Sequence[tuple[str, Clip]]) -> None:
    """The contact sheet and the spectrograms of all clips."""
    if "sheet" in outputs:
        contact_sheet([(label, clip.frames) for label, clip in rows], outputs["sheet"])
    sounds: list[tuple[str, Sound]] = [(label, clip.sound) for label, clip in rows if clip.sound is not None]
    if "spectrogram" in outputs and sounds:
        spectrogram(sounds, outputs["spectrogram"])


def run(args: argparse.Namespace, folder: Path, prompts: Sequence[Prompt], wanted: Sequence[Wanted]) -> None:
    """Samples the clips and writes them with their pictures, or with `--save-embeds` the embeddings alone."""
    device = devices.resolve(args.device)
    dtype = devices.default_compute_dtype(device) if args.dtype is None else DTYPES[args.dtype]
    pipe = open_ltx2(
        folder, device=device, dtype=dtype, needs=needs_of(args, args.modality), modality=args.modality,
        vae_dtype=DTYPES[args.vae_dtype], vae_tile=args.vae_tile,
    )  # fmt: skip
    if args.distilled:
        pipe = dataclasses.replace(pipe, defaults=dataclasses.replace(pipe.defaults, distilled=True))
    check_flags(args, pipe)
    if args.save_embeds is not None:
        ((text, negative),) = embedded(args, pipe, prompts, True)
        rows = lambda texts: {name: v[0] for name, v in texts.items()}  # noqa: E731
        save_texts(args.save_embeds, rows(text), rows(negative))
        print(f"wrote {args.save_embeds}")
        return
    outputs = outputs_of(args, wanted, pipe.streams)
    check_targets(args, wanted, outputs)
    sampling = sampling_of(args, pipe.defaults, prompts[0])
    if args.two_stage:
        check_stages(pipe, sampling, pipe if args.refine_lora else None, Given())
    adapters, infos = read_loras(pipe, args.lora)
    refining, _ = read_loras(pipe, args.refine_lora)
    jobs = prepare(args, pipe, prompts, infos)
    pipe = with_weights(pipe)
    refiner = adapted(pipe, refining) if refining else None
    pipe = adapted(pipe, adapters) if adapters else pipe
    rows = []
    for i, one in enumerate(wanted):
        label = "sampling" if len(wanted) == 1 else f"sampling {i + 1} of {len(wanted)}"
        job = jobs[i // args.samples_per_prompt]
        clip = make(pipe, refiner, args, job, one, label)
        try:
            write(one.output, clip, job.sampling.fps)
        except OSError as error:
            raise UserError(f"the clip could not be written: {error}") from None
        rows.append((one.prompt.caption, clip))
        if len(wanted) > 1:
            print(f"wrote {one.output} (seed {one.seed})")
    write_pictures(outputs, rows)
    s, also = jobs[-1].sampling, " and ".join(str(p) for p in outputs.values())
    made = f"{counted(s.num_frames, 'frame')}, {s.width}x{s.height}, {s.fps:g} fps"
    what = made if "video" in pipe.streams else f"{s.seconds:.2f} s"
    many = f"{len(wanted)} clips"
    print(f"wrote {f'{wanted[0].output} ({what})' if len(wanted) == 1 else many} and {also}")
