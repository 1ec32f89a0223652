"""`python -m infer` with an LTX-2 pipeline: from the command line to clips with sound."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from core import devices
from core.errors import UserError, raise_faults
from core.files import check_target
from core.trees import Params
from infer.flags import DTYPES, SIZES, run_of
from infer.folder import with_weights
from infer.hub import PARTS, resolve_model
from infer.idle import preview_faults
from infer.ltx2_folder import LTX2Defaults, LTX2Pipeline, open_ltx2
from infer.ltx2_generate import Clip, generate
from infer.ltx2_given import check_files, check_places, encode_files, read_files, reference_info
from infer.ltx2_guidance import StreamGuidance
from infer.ltx2_idle import TITLE, check_ltx2_flags, check_ltx2_guidance, given_streams
from infer.ltx2_sampling import Given, LTX2Sampling, check_sampling, schedule_of
from infer.ltx2_schedules import DISTILLED_SIGMAS
from infer.ltx2_stages import adapted, all_steps, check_stages, generate_two_stage, half, read_loras
from infer.ltx2_text import read_texts, save_texts
from infer.media import contact_sheet, frame_rate, write_video
from infer.previews import preview_of, previewer
from infer.progress import progress
from infer.prompts import Prompt, Wanted
from infer.sound import spectrogram, write_sound
from infer.words import counted
from nn.ltx2_lora import LoraInfo

Texts = dict[str, Tensor]  # `[1, L, D]` by stream
SHOWN = 6  # frames of a clip that are kept for the contact sheet of many


@dataclasses.dataclass(frozen=True, eq=False)
class LTX2Job:
    """All that the clips of one prompt need besides the transformer.

    `given` is for the whole size; with two stages `small` is for the first one, else the same.
    """

    prompt: Prompt
    sampling: LTX2Sampling
    texts: Texts
    negative: Texts | None
    given: Given
    small: Given


# --- what the flags say ---------------------------------------------------------------------------------------


def sampling_of(args: argparse.Namespace, pipe: LTX2Pipeline, prompt: Prompt) -> LTX2Sampling:
    """The prompt's sizes over the command line over the folder's defaults. Raises UserError for what is missing."""
    defaults, places = pipe.defaults, (prompt, args, pipe.defaults)
    pick = lambda name: next((v for p in places if (v := getattr(p, name, None)) is not None), None)  # noqa: E731
    sizes = {name: pick(name) for name in SIZES}
    if "video" not in pipe.streams:  # sound has no height and no width
        sizes |= {"height": 0, "width": 0}
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
    """Guidance of one stream, from its own flags, those of both, and the defaults: none for distilled weights."""
    own = "" if name == "video" else "audio_"
    folder = LTX2Defaults(guidance_scale=1.0, audio_guidance_scale=1.0) if defaults.distilled else defaults
    pick = lambda *found: next(v for v in found if v is not None)  # noqa: E731
    either = lambda key: pick(getattr(args, f"{own}{key}"), getattr(args, key), getattr(folder, key))  # noqa: E731
    return StreamGuidance(
        cfg_scale=pick(getattr(args, f"{own}guidance_scale"), getattr(folder, f"{own}guidance_scale")),
        stg_scale=either("stg_scale"),
        stg_blocks=folder.stg_blocks if args.stg_blocks == () else args.stg_blocks,
        modality_scale=either("modality_scale"),
        rescale=either("guidance_rescale"),
        skip_step=args.skip_step,
    )


def steps_of(args: argparse.Namespace, sampling: LTX2Sampling) -> int:
    """Steps of all stages."""
    return all_steps(sampling) if args.two_stage else sampling.steps


def by_text(guidance: Sequence[StreamGuidance]) -> bool:
    """Whether some stream is guided by text, which needs a negative prompt."""
    return any(one.cfg_scale != 1 for one in guidance)


def needs_of(args: argparse.Namespace) -> list[str]:
    """The models around the transformer that the flags call for."""
    wanted = {"text_encoder": args.prompt_embeds is None}
    if args.save_embeds is None:
        wanted["latent_upsampler"] = args.two_stage
        wanted["audio_vae"] = any((args.sound, args.reference_sound))
        wanted["vae"] = any((args.video, args.image, args.keyframe, args.prefix, args.suffix, args.reference))
    without = {"video": ("audio_vae",), "audio": ("vae", "latent_upsampler")}.get(args.modality, ())  # told of later
    return [name for name, needed in wanted.items() if needed and name not in without]


def parts_of(args: argparse.Namespace) -> list[str]:
    """The models to fetch from the hub, of `infer.hub.PARTS`: those that are needed, and what makes sound audible."""
    needs = needs_of(args)
    if args.save_embeds is None and args.modality != "video":
        needs.append("audio_vae")
    return [name for name in PARTS if name in needs]


# --- what is encoded before the transformer is read -----------------------------------------------------------


def embedded(args: argparse.Namespace, pipe: LTX2Pipeline, prompts: Sequence[Prompt], guided: bool) -> list[tuple]:
    """`(text, negative)` of every prompt, `[1, L, D]` by stream; each distinct text is embedded once."""
    row = lambda texts: {name: texts[name][None] for name in pipe.streams}  # noqa: E731
    if args.prompt_embeds is not None:
        widths = {s.name: s.text_dim for s in pipe.cfg.streams}
        text, negative = read_texts(args.prompt_embeds, pipe.streams, guided, widths=widths)
        return [(row(text), None if negative is None else row(negative))]
    avoided = [args.negative_prompt if p.negative_prompt is None else p.negative_prompt for p in prompts]
    order = list(dict.fromkeys([*(p.caption for p in prompts), *(avoided if guided else ())]))
    found = dict(zip(order, pipe.text.embed(order), strict=True))
    return [(row(found[p.caption]), row(found[n]) if guided else None) for p, n in zip(prompts, avoided, strict=True)]


def checked(args: argparse.Namespace, pipe: LTX2Pipeline, prompt: Prompt, info: LoraInfo) -> LTX2Sampling:
    """How a prompt is sampled. Raises UserError where it cannot be."""
    sampling, given = sampling_of(args, pipe, prompt), given_streams(args)
    down, every = info.reference_downscale_factor, info.reference_temporal_scale_factor
    if args.two_stage:
        check_stages(pipe, sampling, refined=bool(args.refine_lora), given=given, down=down, every=every)
    else:
        check_sampling(pipe, sampling, given=given, scale=down, every=every)
    frame_rate(sampling.fps)
    check_places(args, pipe, prompt.image, sampling)
    guidance = {name: getattr(sampling, name) for name in pipe.streams if name not in given}
    check_ltx2_guidance(args, pipe.cfg, guidance, schedule_of(pipe, sampling))
    raise_faults(TITLE, preview_faults(args.preview_every, 0, steps_of(args, sampling)))
    return sampling


def stages_of(args: argparse.Namespace, sampling: LTX2Sampling, info: LoraInfo) -> list[tuple]:
    """Size and reference of each stage: with two of them the first alone sees references."""
    return [(half(sampling), info), (sampling, None)] if args.two_stage else [(sampling, info)]


def _each(args: argparse.Namespace, prompts: Sequence[Prompt], work: Callable[[int, Prompt], object]) -> list:
    """`work` for every prompt; one UserError with the faults of all, by their place in the prompt file."""
    done, faults = [], []
    for i, prompt in enumerate(prompts):
        try:
            done.append(work(i, prompt))
        except UserError as error:
            if args.prompt_file is None:
                raise
            faults.append(f"data[{i}]: {error}")
    raise_faults(f"{args.prompt_file}: prompts that cannot be sampled", faults)
    return done


def prepare(
    args: argparse.Namespace, pipe: LTX2Pipeline, prompts: Sequence[Prompt], loras: Sequence[LoraInfo]
) -> list[LTX2Job]:
    """Everything that is encoded, before the transformer is read: one encoder at a time is in memory.

    Raises one UserError with every prompt that cannot be sampled; all files are read before the first encoder is.
    """
    info = reference_info(args, loras)
    samplings = _each(args, prompts, lambda i, prompt: checked(args, pipe, prompt, info))
    files = {}  # by what they depend on: prompts of one size and picture share them

    def read(i: int, prompt: Prompt) -> None:
        for size, seen in stages_of(args, samplings[i], info):
            if (prompt.image, size) not in files:
                files[prompt.image, size] = read_files(args, prompt.image, size, seen, pipe)
                check_files(pipe, files[prompt.image, size], size)

    _each(args, prompts, read)
    made = [name for name in pipe.streams if name not in given_streams(args)]
    texts = embedded(args, pipe, prompts, any(by_text([getattr(s, name) for name in made]) for s in samplings))
    encoded = {place: encode_files(pipe, found, place[1]) for place, found in files.items()}
    jobs = []
    for prompt, sampling, (text, negative) in zip(prompts, samplings, texts, strict=True):
        given = [encoded[prompt.image, size] for size, _ in stages_of(args, sampling, info)]
        jobs.append(LTX2Job(prompt, sampling, text, negative, given[-1], given[0]))
    return jobs


def with_adapters(
    args: argparse.Namespace, pipe: LTX2Pipeline, loras: Sequence[Params], refining: Sequence[Params]
) -> tuple[LTX2Pipeline, LTX2Pipeline | None]:
    """The pipeline with `--lora`, and that of the second stage where its adapters are others.

    The second stage has the adapters of `--refine-lora` besides, and not that of the references, which it does not see.
    """
    pipe = with_weights(pipe)
    kept = loras if args.reference is None else loras[1:]
    changed = args.two_stage and (bool(refining) or len(kept) < len(loras))
    return adapted(pipe, loras), adapted(pipe, [*kept, *refining]) if changed else None


# --- the command ----------------------------------------------------------------------------------------------


def outputs_of(args: argparse.Namespace, streams: Sequence[str]) -> dict[str, Path]:
    """The pictures beside the clips: the contact sheet, and with sound the spectrogram.

    Raises UserError for names with another ending.
    """
    output = Path(args.output)
    allowed = (".mp4",) if "video" in streams else (".mp4", ".m4a", ".wav")
    if output.suffix.lower() not in allowed:
        raise UserError(f"--output {output}: expected a name ending in {' or '.join(allowed)}")
    out = {}
    if "video" in streams:
        out["sheet"] = output.with_suffix(".png") if args.contact_sheet is None else Path(args.contact_sheet)
        if out["sheet"].suffix.lower() != ".png":
            raise UserError(f"--contact-sheet {out['sheet']}: expected a name ending in .png")
    if "audio" in streams:
        out["spectrogram"] = output.with_suffix(".spectrogram.png")
    return out


def check_targets(args: argparse.Namespace, wanted: Sequence[Wanted], outputs: Mapping[str, Path]) -> None:
    """Raises UserError for what cannot be written, or would replace what is read."""
    placed = [found[0] for found in (*args.keyframe, args.prefix, args.suffix) if found is not None]
    read = [args.video, args.mask, args.sound, args.reference, args.reference_sound, *placed]
    read += [w.prompt.image for w in wanted]
    inputs = {Path(p).resolve() for p in read if p is not None}
    previews = [] if args.preview_every is None else [preview_of(w.output) for w in wanted]
    targets = [*(w.output for w in wanted), *previews, *outputs.values()]
    for path in targets:
        check_target(path)
    clashes = [str(p) for p in dict.fromkeys(targets) if p.resolve() in inputs]
    raise_faults("these outputs would replace what is read; choose other names (--output, --contact-sheet):", clashes)


def make(pipe: LTX2Pipeline, refiner: LTX2Pipeline | None, args, job: LTX2Job, one: Wanted, label: str) -> Clip:
    """One clip."""
    steps, every = steps_of(args, job.sampling), args.preview_every
    show = None if every is None else previewer(every, pipe.vae, one.output, one.prompt.caption, steps)
    with progress(label, steps, "steps") as update:
        shared = {"given": job.given, "run": run_of(args), "progress": lambda done, total: update(done)}
        shared["preview"] = None if show is None else lambda step, x0: show(step, x0["video"])
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
    sounds = [(label, clip.sound) for label, clip in rows if clip.sound is not None]
    if "spectrogram" in outputs and sounds:
        spectrogram(sounds, outputs["spectrogram"])


def _few(clip: Clip) -> Clip:
    """The clip with as many frames as a contact sheet of many clips shows."""
    if clip.frames is None:
        return clip
    return dataclasses.replace(clip, frames=clip.frames[:: -(-len(clip.frames) // SHOWN)].clone())


def write_all(
    args: argparse.Namespace,
    pipe: LTX2Pipeline,
    refiner: LTX2Pipeline | None,
    jobs: Sequence[LTX2Job],
    wanted: Sequence[Wanted],
    outputs: Mapping[str, Path],
) -> None:
    """Makes and writes the clips one after another, then the pictures of all of them."""
    rows = []
    for i, one in enumerate(wanted):
        label = "sampling" if len(wanted) == 1 else f"sampling {i + 1} of {len(wanted)}"
        job = jobs[i // args.samples_per_prompt]
        clip = make(pipe, refiner, args, job, one, label)
        write(one.output, clip, job.sampling.fps)
        rows.append((one.prompt.caption, clip if len(wanted) == 1 else _few(clip)))
        if len(wanted) > 1:
            print(f"wrote {one.output} (seed {one.seed})")
    write_pictures(outputs, rows)


def summary(pipe: LTX2Pipeline, sampling: LTX2Sampling, wanted: Sequence[Wanted], outputs: Mapping[str, Path]) -> str:
    """What was written, in words."""
    size = f"{counted(sampling.num_frames, 'frame')}, {sampling.width}x{sampling.height}, {sampling.fps:g} fps"
    what = size if "video" in pipe.streams else f"{sampling.seconds:.2f} s"
    clips = f"{wanted[0].output} ({what})" if len(wanted) == 1 else f"{len(wanted)} clips"
    return f"wrote {' and '.join([clips, *map(str, outputs.values())])}"


def write_embeddings(args: argparse.Namespace, pipe: LTX2Pipeline, prompts: Sequence[Prompt]) -> None:
    """What `--save-embeds` asks for: the text, and with guidance by text the negative text."""
    guided = by_text([guidance_of(args, pipe.defaults, name) for name in pipe.streams])
    ((text, negative),) = embedded(args, pipe, prompts, guided)
    rows = lambda texts: None if texts is None else {name: v[0] for name, v in texts.items()}  # noqa: E731
    save_texts(args.save_embeds, rows(text), rows(negative))
    print(f"wrote {args.save_embeds}")


def opened(args: argparse.Namespace, folder: Path, prompts: Sequence[Prompt]) -> LTX2Pipeline:
    """The pipeline of the flags, its transformer not read. Raises UserError for flags that it has no use for."""
    device = devices.resolve(args.device)
    dtype = devices.default_compute_dtype(device) if args.dtype is None else DTYPES[args.dtype]
    pipe = open_ltx2(
        folder, device=device, dtype=dtype, needs=needs_of(args), modality=args.modality,
        vae_dtype=DTYPES[args.vae_dtype], vae_tile=args.vae_tile,
    )  # fmt: skip
    if args.distilled:
        pipe = dataclasses.replace(pipe, defaults=dataclasses.replace(pipe.defaults, distilled=True))
    check_ltx2_flags(args, pipe.cfg, device, pictured=any(p.image is not None for p in prompts))
    return pipe


def run(args: argparse.Namespace, prompts: Sequence[Prompt], wanted: Sequence[Wanted]) -> None:
    """Samples the clips and writes them with their pictures, or with `--save-embeds` the embeddings alone.

    The transformer stays in memory while its clips are decoded, pictures a few at a time.
    """
    pipe = opened(args, resolve_model(args.model, parts_of(args)), prompts)
    if args.save_embeds is not None:
        check_target(Path(args.save_embeds))
        return write_embeddings(args, pipe, prompts)
    outputs = outputs_of(args, pipe.streams)
    check_targets(args, wanted, outputs)
    (loras, infos), (refining, others) = read_loras(pipe, args.lora), read_loras(pipe, args.refine_lora)
    for (path, _), info in zip([*args.lora, *args.refine_lora], [*infos, *others], strict=True):
        if info.text_layers:
            layers = counted(info.text_layers, "layer")
            print(f"note: {path} also adapts {layers} of the text connectors, which stay as they are")
    jobs = prepare(args, pipe, prompts, infos)
    pipe, refiner = with_adapters(args, pipe, loras, refining)
    try:
        write_all(args, pipe, refiner, jobs, wanted, outputs)
    except OSError as error:
        raise UserError(f"the clip could not be written: {error}") from None
    print(summary(pipe, jobs[-1].sampling, wanted, outputs))
