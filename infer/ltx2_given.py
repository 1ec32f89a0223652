"""What an LTX-2 clip is given besides text: files read, checked against its size, and encoded.

Everything is read before anything is encoded, so that a bad file is told before the text encoder is read.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import raise_faults
from core.geometry import to_video
from infer.autoencoders import AudioVae
from infer.ltx2_folder import LTX2Pipeline
from infer.ltx2_sampling import Given, LTX2Sampling, geometry_of, shapes_of, tokens_of
from infer.media import read_video
from infer.sound import Sound, read_sound
from nn.ltx2_condition_kinds import Condition, FirstFrame, Keyframe, Reference, check_conditions
from nn.ltx2_lora import LoraInfo

ORIGINAL_RATE = 48_000  # Hz of a given sound in the clip


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
    """What was read for clips of one size.

    Args:
        conditions: with the pixels `[1, 3, T, H, W]` in [-1, 1] that each shows.
        video: frames uint8 `[T, H, W, 3]` that are the whole video.
        sound, original: the whole sound at the audio VAE's rate, and as the clip has it.
    """

    conditions: Sequence[tuple[Condition, Tensor]] = ()
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


def check_places(args: argparse.Namespace, pipe: LTX2Pipeline, image: Path | None, sampling: LTX2Sampling) -> None:
    """Refuses keyframes after the clip's end, and a prompt's picture where no video is made."""
    last, faults = sampling.num_frames - 1, []
    if image is not None and ("video" not in pipe.streams or args.video is not None):
        why = f"the model is {pipe.cfg.modality}" if args.video is None else "its video is given by --video"
        faults.append(f"image {image}: {why}")
    faults += [
        f"keyframe {path}@{frame}: the clip has frames 0 to {last}" for path, frame, _ in args.keyframe if frame > last
    ]
    first = [f"{path}@0" for path, frame, _ in args.keyframe if frame == 0] + ([] if image is None else [str(image)])
    faults += [] if len(first) < 2 else [f"more than one picture at frame 0: {', '.join(first)}"]
    raise_faults("pictures that cannot be shown", faults)


def check_files(pipe: LTX2Pipeline, files: Files, sampling: LTX2Sampling) -> None:
    """Refuses conditions that do not fit the clip, before anything is encoded: by the latents' shapes alone."""
    if not files.conditions:
        return
    t, s, channels = pipe.vae.temporal, pipe.vae.spatial, pipe.vae.latent_channels
    shape = lambda x: (1, channels, (x.shape[2] - 1) // t + 1, x.shape[3] // s, x.shape[4] // s)  # noqa: E731
    extras = {c.latents: torch.empty(shape(pixels), device="meta") for c, pixels in files.conditions}
    whole = shapes_of(pipe, sampling)["video"]
    clean = tokens_of(pipe, "video", torch.empty(1, *whole, device="meta"))
    check_conditions(clean, geometry_of(pipe, "video", whole, sampling.fps), [c for c, _ in files.conditions], extras)


# --- reading --------------------------------------------------------------------------------------------------


def _pixels(path: Path, sampling: LTX2Sampling, *, count: int, scale: int = 1, **how: Any) -> Tensor:
    """Frames of a file as a video `[1, 3, T, H, W]` of the clip's size, `scale` times smaller; see `read_video`."""
    size = (sampling.height // scale, sampling.width // scale)
    return to_video(read_video(path, num_frames=count, size=size, **how).frames)[None]


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
    condition = Reference("reference", downscale=down, temporal=every, attention=args.reference_attention)
    how = {"scale": down, "fps": sampling.fps, "stride": stride * every}
    video = _pixels(Path(args.reference), sampling, count=sampling.num_frames, **how)
    return condition, torch.cat([video[:, :, :1], video[:, :, 1::every]], dim=2)


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
    conditions: list[tuple[Condition, Tensor]] = []
    if image is not None:
        conditions.append((FirstFrame("image"), _pixels(image, sampling, count=1)))
    for i, (path, frame, strength) in enumerate(args.keyframe):
        conditions.append((_shown(f"keyframe {i}", frame, strength), _pixels(path, sampling, count=1)))
    if args.reference is not None and info is not None:
        conditions.append(_reference(args, sampling, info, pipe.vae.temporal))
    video, sound, original = None, None, None
    if args.video is not None:
        size = (sampling.height, sampling.width)
        how = {"size": size, "fps": sampling.fps, "stride": pipe.vae.temporal}
        video = read_video(args.video, num_frames=sampling.num_frames, **how).frames
    if args.sound is not None:
        sound = _heard(Path(args.sound), sampling, pipe.sound)
        original = read_sound(args.sound, rate=ORIGINAL_RATE, seconds=sampling.seconds)
    return Files(conditions, video, sound, original)


def _heard(path: Path, sampling: LTX2Sampling, vae: AudioVae) -> Sound:
    """The beginning of a sound, long enough for the clip's latents (with silence after a shorter one)."""
    least = (vae.latent_frames(sampling.seconds) + 1) / vae.latents_per_second
    return read_sound(path, rate=vae.input_rate, seconds=max(sampling.seconds, least))


# --- encoding -------------------------------------------------------------------------------------------------


def encode_files(pipe: LTX2Pipeline, files: Files, sampling: LTX2Sampling) -> Given:
    """Latents of what was read, on the CPU."""
    extras = {c.latents: pipe.vae.encode(pixels).float().cpu() for c, pixels in files.conditions}
    streams: dict[str, Tensor] = {}
    originals: dict[str, Tensor | Sound] = {}
    if files.video is not None:
        streams["video"] = pipe.vae.encode(to_video(files.video)[None]).float().cpu()
        originals["video"] = files.video
    if files.sound is not None:
        count = pipe.sound.latent_frames(sampling.seconds)
        streams["audio"] = pipe.sound.encode(files.sound.waveform[None])[:, :, :count].float().cpu()
        originals["audio"] = files.original
    conditions = {"video": [c for c, _ in files.conditions]} if files.conditions else {}
    return Given(streams, conditions, extras, originals)
