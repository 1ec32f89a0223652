"""What an LTX-2 clip is given besides text: files read, checked against its size, and encoded.

Everything is read before anything is encoded, so that a bad file is told before the text encoder is read.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from core.errors import UserError, named, raise_faults
from core.geometry import nearest_valid, to_video
from infer.autoencoders import AudioVae, Vae
from infer.ltx2_folder import LTX2Pipeline
from infer.ltx2_sampling import Given, LTX2Sampling, geometry_of, image_crf, shapes_of, tokens_of
from infer.media import probe, read_video, recompressed, resize_cover
from infer.sound import Sound, has_sound, read_sound
from infer.words import counted
from nn.ltx2_condition_kinds import (
    Condition,
    Extras,
    FirstFrame,
    Keyframe,
    Mask,
    Prefix,
    Reference,
    ReferenceAudio,
    Suffix,
    check_conditions,
)
from nn.ltx2_lora import LoraInfo

ORIGINAL_RATE = 48_000  # Hz of a given sound in the clip


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
    """What was read for clips of one size.

    Args:
        conditions: of the video, with the pixels `[1, 3, T, H, W]` in [-1, 1] that each shows.
        masks: by the names that conditions have for them.
        heard: conditions of the sound, each with a sound at the audio VAE's rate and how many of its latents it has.
        video: frames uint8 `[T, H, W, 3]` that are the whole video.
        sound, original: the whole sound at the audio VAE's rate, and as the clip has it.
    """

    conditions: Sequence[tuple[Condition, Tensor]] = ()
    masks: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    heard: Sequence[tuple[Condition, Sound, int]] = ()
    video: Tensor | None = None
    sound: Sound | None = None
    original: Sound | None = None


# --- checking -------------------------------------------------------------------------------------------------


def reference_info(args: argparse.Namespace, loras: Sequence[LoraInfo]) -> LoraInfo:
    """What `--reference` is read by: the factors of the first adapter.

    Raises UserError where another one has factors, or they are no sizes.
    """
    if args.reference is None:
        return LoraInfo()
    factors = [(info.reference_downscale_factor, info.reference_temporal_scale_factor) for info in loras]
    files = [(str(path), found) for (path, _), found in zip(args.lora, factors, strict=True)]
    faults = [f"{file}: factors of its references are {f}, expected at least 1" for file, f in files if min(f) < 1]
    faults += [
        f"{file}: it was trained with references of factors {f}: make it the first --lora"
        for file, f in files[1:]
        if f not in ((1, 1), factors[0])
    ]
    raise_faults(f"--reference {args.reference} cannot be used", faults)
    return loras[0] if loras else LoraInfo()


def _part_faults(args: argparse.Namespace, temporal: int, num_frames: int) -> list[str]:
    """What is wrong with the counts of `--prefix` and `--suffix`, the latter's first frame not being shown."""
    faults, left = [], num_frames
    for name, found, least in (("prefix", args.prefix, 1), ("suffix", args.suffix, temporal + 1)):
        if found is None:
            continue
        path, frames, _ = found
        if frames < least or (frames - 1) % temporal:
            near = " or ".join(str(n) for n in nearest_valid(max(frames, least), temporal, 1))
            faults.append(f"{name} {path}@{frames}: expected {temporal}k+1 frames: nearest valid {near}")
        left -= frames if name == "prefix" else frames - 1
    if left < 1 and not faults:
        faults.append(f"--prefix and --suffix leave nothing to make of {counted(num_frames, 'frame')}")
    return faults


def check_places(args: argparse.Namespace, pipe: LTX2Pipeline, image: Path | None, sampling: LTX2Sampling) -> None:
    """Refuses keyframes after the clip's end, parts that do not fit into it, and a prompt's picture without a place."""
    last, faults = sampling.num_frames - 1, []
    if "video" in pipe.streams:
        faults += _part_faults(args, pipe.vae.temporal, sampling.num_frames)
    if image is not None and ("video" not in pipe.streams or args.video is not None):
        why = f"the model is {pipe.cfg.modality}" if args.video is None else "its video is given by --video"
        faults.append(f"image {image}: {why}")
    faults += [
        f"keyframe {path}@{frame}: the clip has frames 0 to {last}" for path, frame, _ in args.keyframe if frame > last
    ]
    first = [f"{path}@0" for path, frame, _ in args.keyframe if frame == 0] + ([] if image is None else [str(image)])
    first += [] if args.prefix is None else [f"the prefix {args.prefix[0]}"]
    faults += [] if len(first) < 2 else [f"more than one picture at frame 0: {', '.join(first)}"]
    raise_faults("pictures that cannot be shown", faults)


def check_files(pipe: LTX2Pipeline, files: Files, sampling: LTX2Sampling) -> None:
    """Refuses conditions that do not fit the clip, before anything is encoded: by the latents' shapes alone."""
    nothing, shapes = functools.partial(torch.empty, device="meta"), shapes_of(pipe, sampling)
    if files.conditions:
        t, s, channels = pipe.vae.temporal, pipe.vae.spatial, pipe.vae.latent_channels
        shape = lambda x: (1, channels, (x.shape[2] - 1) // t + 1, x.shape[3] // s, x.shape[4] // s)  # noqa: E731
        extras = {c.latents: _taken(c, nothing(shape(pixels))) for c, pixels in files.conditions} | dict(files.masks)
        _check(pipe, "video", shapes["video"], sampling.fps, [c for c, _ in files.conditions], extras)
    if files.heard:
        channels, bins = pipe.sound.latent_channels, pipe.sound.latent_bins
        extras = {c.latents: nothing(1, channels, count, bins) for c, _, count in files.heard}
        _check(pipe, "audio", shapes["audio"], sampling.fps, [c for c, _, _ in files.heard], extras)


def _check(
    pipe: LTX2Pipeline, name: str, shape: Sequence[int], fps: float, conditions: list[Condition], extras: Extras
) -> None:
    """Refuses conditions of a stream whose latents have this shape."""
    clean = tokens_of(pipe, name, torch.empty(1, *shape, device="meta"))
    check_conditions(clean, geometry_of(pipe, name, shape, fps), conditions, extras)


def _taken(c: Condition, latents: Tensor) -> Tensor:
    """What a condition takes of its latents: a suffix goes on from what its first frame stands for."""
    return latents[:, :, 1:] if isinstance(c, Suffix) else latents


# --- reading --------------------------------------------------------------------------------------------------


def _pixels(path: Path, sampling: LTX2Sampling, *, count: int, scale: int = 1, **how: Any) -> Tensor:
    """Frames of a file as a video `[1, 3, T, H, W]` of the clip's size, `scale` times smaller; see `read_video`."""
    size = (sampling.height // scale, sampling.width // scale)
    return to_video(read_video(path, num_frames=count, size=size, **how).frames)[None]


def _picture(path: Path, sampling: LTX2Sampling, crf: int) -> Tensor:
    """A picture, or a video's first frame, as `[1, 3, 1, H, W]`: compressed in its own size, then of the clip's."""
    frame = read_video(path, num_frames=1).frames[0]
    with named(str(path)):
        frame = recompressed(frame, crf)
    return to_video(resize_cover(frame[None], (sampling.height, sampling.width)))[None]


def _shown(name: str, frame: int, strength: float) -> Condition:
    """A picture at a frame: in place of the video's own first latents, or appended for any other frame."""
    if frame == 0:
        return FirstFrame(name, strength=strength)
    return Keyframe(name, strength=strength, frame=frame)


def _reference(
    args: argparse.Namespace, sampling: LTX2Sampling, info: LoraInfo, stride: int
) -> tuple[Condition, Tensor]:
    """The reference with its pixels, at the clip's rate: frame 0, then every S-th from frame 1 on."""
    down, every = info.reference_downscale_factor, info.reference_temporal_scale_factor
    strength = 1.0 if args.reference_strength is None else args.reference_strength
    factors = {"downscale": down, "temporal": every}
    condition = Reference("reference", strength=strength, attention=args.reference_attention, **factors)
    how = {"scale": down, "fps": sampling.fps, "stride": stride * every}
    video = _pixels(Path(args.reference), sampling, count=sampling.num_frames, **how)
    return condition, torch.cat([video[:, :, :1], video[:, :, 1::every]], dim=2)


def _parts(
    args: argparse.Namespace, sampling: LTX2Sampling, pipe: LTX2Pipeline
) -> tuple[list[tuple[Condition, Tensor]], list[tuple[Condition, Sound, int]]]:
    """What `--prefix` and `--suffix` give of the video, and of the sound."""
    shown, heard, stride = [], [], pipe.vae.temporal
    latent = lambda frames: (frames - 1) // stride  # noqa: E731
    how = {"fps": sampling.fps, "stride": stride}
    if args.prefix is not None:
        path, frames, strength = args.prefix
        start = max(0, probe(path, sampling.fps).frames - frames)
        condition = Prefix("prefix", strength=strength, count=latent(frames) + 1)
        shown.append((condition, _pixels(path, sampling, count=frames, start=start, **how)))
        if "audio" in pipe.streams and args.sound is None and has_sound(path):
            heard += _sound_of(path, frames / sampling.fps, start / sampling.fps, strength, pipe.sound)
    if args.suffix is not None:
        path, frames, strength = args.suffix
        condition = Suffix("suffix", strength=strength, count=latent(frames))
        shown.append((condition, _pixels(path, sampling, count=frames, **how)))
    return shown, heard


def _sound_of(
    path: Path, seconds: float, start: float, strength: float, vae: AudioVae
) -> list[tuple[Condition, Sound, int]]:
    """The sound of a prefix: as many latents as see nothing of what comes after it, so perhaps none."""
    count = math.floor(seconds * vae.latents_per_second)
    condition = Prefix("prefix sound", strength=strength, count=count)
    return [(condition, _heard(path, seconds, vae, start), count)] if count else []


def _reference_sound(path: Path, vae: AudioVae) -> tuple[Condition, Sound, int]:
    """A reference sound, all of it."""
    seconds = read_sound(path, rate=vae.input_rate).seconds
    return ReferenceAudio("reference sound"), _heard(path, seconds, vae), vae.latent_frames(seconds)


def _kept(args: argparse.Namespace, sampling: LTX2Sampling, vae: Vae) -> Tensor:
    """What `--mask` keeps, `[1, t, h, w]` of latents: 1 where none of the pixels that one stands for is white, else 0.

    A picture holds for all frames. Raises UserError for a mask of another shape than the video, and for one that
    keeps nothing or all.
    """
    path, frames = Path(args.mask), sampling.num_frames
    mask, video = probe(path), probe(args.video)
    if mask.height * video.width != mask.width * video.height:
        sizes = [f"{one.width}x{one.height}" for one in (mask, video)]
        raise UserError(f"{path}: the mask is {sizes[0]}, {args.video} {sizes[1]}: they must be of one shape")
    still = mask.frames == 1
    how = {} if still else {"fps": sampling.fps, "stride": vae.temporal}
    levels = _pixels(path, sampling, count=1 if still else frames, **how).mean(dim=1)
    white = max_pool2d((levels > 0).float(), vae.spatial)
    white = white.expand(-1, frames, -1, -1)
    later = white[:, 1:].unflatten(1, ((frames - 1) // vae.temporal, vae.temporal)).amax(dim=2)
    white = torch.cat([white[:, :1], later], dim=1)
    if not white.any():
        raise UserError(f"{path}: nothing of the mask is white: nothing of {args.video} would be made anew")
    if white.all():
        cell = f"{vae.spatial} x {vae.spatial} pixels of {counted(vae.temporal, 'frame')}"
        raise UserError(f"{path}: the mask has white in every {cell}: nothing of {args.video} would be kept")
    return 1 - white


def read_files(
    args: argparse.Namespace, image: Path | None, sampling: LTX2Sampling, info: LoraInfo | None, pipe: LTX2Pipeline
) -> Files:
    """The files of the flags, and a prompt's `image`, for one size.

    Args:
        info: of `reference_info`; None leaves the reference out.
        pipe: with the autoencoders that will encode what is read.

    Raises:
        UserError: naming the file that is missing, cannot be decoded, or is too short.
    """
    conditions, masks, heard = [], {}, []
    if args.mask is not None:
        masks["mask"] = _kept(args, sampling, pipe.vae)
    if "video" in pipe.streams:
        conditions, heard = _parts(args, sampling, pipe)
    crf = image_crf(pipe.cfg) if args.image_crf is None else args.image_crf
    if image is not None:
        conditions.append((FirstFrame("image"), _picture(image, sampling, crf)))
    for i, (path, frame, strength) in enumerate(args.keyframe):
        conditions.append((_shown(f"keyframe {i}", frame, strength), _picture(path, sampling, crf)))
    if args.reference is not None and info is not None:
        conditions.append(_reference(args, sampling, info, pipe.vae.temporal))
    if args.reference_sound is not None:
        heard.append(_reference_sound(Path(args.reference_sound), pipe.sound))
    video, sound, original = None, None, None
    if args.video is not None:
        size = (sampling.height, sampling.width)
        how = {"size": size, "fps": sampling.fps, "stride": pipe.vae.temporal}
        video = read_video(args.video, num_frames=sampling.num_frames, **how).frames
    if masks:
        conditions.insert(0, (Mask("video", mask="mask"), to_video(video)[None]))
        video = None
    if args.sound is not None:
        sound = _heard(Path(args.sound), sampling.seconds, pipe.sound)
        original = read_sound(args.sound, rate=ORIGINAL_RATE, seconds=sampling.seconds)
    return Files(conditions, masks, heard, video, sound, original)


def _heard(path: Path, seconds: float, vae: AudioVae, start: float = 0.0) -> Sound:
    """A part of a sound, long enough for the latents of so many seconds (with silence after a shorter one).

    Raises UserError where nothing makes latents of it.
    """
    if vae.no_encoder is not None:
        raise UserError(f"{path}: {vae.no_encoder}")
    least = (vae.latent_frames(seconds) + 1) / vae.latents_per_second
    return read_sound(path, rate=vae.input_rate, start=start, seconds=max(seconds, least))


# --- encoding -------------------------------------------------------------------------------------------------


def encode_files(pipe: LTX2Pipeline, files: Files, sampling: LTX2Sampling) -> Given:
    """Latents of what was read, on the CPU."""
    extras = {c.latents: _taken(c, pipe.vae.encode(pixels)).float().cpu() for c, pixels in files.conditions}
    latents = lambda sound, count: pipe.sound.encode(sound.waveform[None])[:, :, :count].float().cpu()  # noqa: E731
    extras |= {c.latents: latents(sound, count) for c, sound, count in files.heard} | dict(files.masks)
    streams: dict[str, Tensor] = {}
    originals: dict[str, Tensor | Sound] = {}
    if files.video is not None:
        streams["video"] = pipe.vae.encode(to_video(files.video)[None]).float().cpu()
        originals["video"] = files.video
    if files.sound is not None:
        streams["audio"] = latents(files.sound, pipe.sound.latent_frames(sampling.seconds))
        originals["audio"] = files.original
    conditions = {"video": [c for c, _ in files.conditions], "audio": [c for c, _, _ in files.heard]}
    return Given(streams, {name: found for name, found in conditions.items() if found}, extras, originals)
