"""One clip and its caption as a sample: the same function makes the rows of a set and the batches of a run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError
from core.geometry import to_video
from infer.autoencoders import AudioVae
from infer.media import Video, read_video
from infer.sound import Sound, has_sound, read_sound
from nn.wan_i2v import condition_clip
from train.preprocess.buckets import Bucket
from train.preprocess.metadata import Entry
from train.preprocess.models import Models
from train.preprocess.settings import Encoding
from train.rows import AUDIO, AUDIO_TEXT, TEXT, VIDEO, RowType

CHANNELS = 2  # of sound: models take it in stereo


def read_clip(entry: Entry, bucket: Bucket, settings: Encoding) -> Video:
    """The first frames of a clip at the settings' rate and the bucket's size: scaled to cover it, the centre kept."""
    size = (bucket.height, bucket.width)
    return read_video(entry.path, num_frames=bucket.frames, fps=settings.fps, size=size)


def read_span(entry: Entry, seconds: float, rate: int, settings: Encoding) -> Sound:
    """The sound of a clip's first `seconds`, `[2, round(seconds * rate)]`, with silence where it is shorter.

    Raises UserError for a clip without sound, unless the settings take it as silent.
    """
    if settings.allow_silent and not has_sound(entry.path):
        return Sound(torch.zeros(CHANNELS, round(seconds * rate)), rate)
    return read_sound(entry.path, rate=rate, seconds=seconds)


def encode_sound(sound: Sound, vae: AudioVae, seconds: float) -> Tensor:
    """Latents `[C, T, F]` of `seconds` of sound, T = `vae.latent_frames(seconds)`.

    The transform that a latent is made of reaches beyond the end, so a VAE may give one more: it is left out.
    """
    latents, count = vae.encode(sound.waveform[None])[0].cpu(), vae.latent_frames(seconds)
    if latents.shape[1] < count:
        raise UserError(f"{seconds:g} s of sound are {latents.shape[1]} latents, expected {count}")
    return latents[:, :count].contiguous()


def texts(models: Models, caption: str, row_type: RowType) -> dict[str, Tensor | None]:
    """The embeddings of a caption that rows hold; the sound's is None where it is the video's, or is not read."""
    (found,) = models.text.embed([caption])
    by = {name: x.cpu() for name, x in (found if isinstance(found, Mapping) else {"video": found}).items()}
    first = next(iter(by.values()))
    sole = {TEXT.stem: by.get("video", first)}
    if all(column.stem != AUDIO_TEXT.stem for column in row_type.channels):
        return sole
    own = by.get("audio")
    same = own is None or (own.shape == sole[TEXT.stem].shape and torch.equal(own, sole[TEXT.stem]))
    return {**sole, AUDIO_TEXT.stem: None if same else own}


def encode_video(
    entry: Entry, video: Video, models: Models, row_type: RowType, sound: Sound | None = None
) -> dict[str, Any]:
    """The sample of frames and sound that are read: latents, text embedding and notes, see `train.rows`.

    Rows of type i2v also get the first frame (`pil_image`), the latents of a clip that is grey after it
    (`first_frame_latent`) and, with an image encoder, its `clip_feature`; those of type t2va the latents of the sound.
    Only tensors that the type has as channels are made.
    """
    frames, (count, height, width, _) = video.frames, video.frames.shape
    stems, sample = {column.stem for column in row_type.channels}, {"id": entry.name}
    with torch.no_grad():
        if VIDEO.stem in stems:
            pixels = to_video(frames)[None]
            sample["vae_latent"] = models.vae.encode(pixels)[0].cpu()
        if sound is not None:
            sample["audio_latent"] = encode_sound(sound, models.sound, count / video.fps)
            sample["audio_sample_rate"] = sound.rate
        sample |= texts(models, entry.caption, row_type)
        if row_type.name == "i2v":
            grey = condition_clip(pixels[:, :, 0], count)
            sample["first_frame_latent"] = models.vae.encode(grey)[0].cpu()
            sample["clip_feature"] = None if models.image is None else models.image.embed([frames[0]])[0].cpu()
            sample["pil_image"] = frames[0].permute(2, 0, 1).contiguous()
    return sample | {
        "file_name": entry.path.name,
        "caption": entry.caption,
        "media_type": "image" if count == 1 else "video",
        "width": width,
        "height": height,
        "num_frames": count,
        "duration_sec": count / video.fps,
        "fps": video.fps,
    }


def sound_of(entry: Entry, video: Video, models: Models, settings: Encoding, row_type: RowType) -> Sound | None:
    """The sound of a clip whose frames are read, for the time that they are shown; None for rows without it."""
    if all(column.stem != AUDIO.stem for column in row_type.channels):
        return None
    return read_span(entry, len(video.frames) / video.fps, models.sound.input_rate, settings)


def encode_clip(
    entry: Entry, bucket: Bucket, settings: Encoding, models: Models, row_type: RowType
) -> dict[str, Any]:
    """The sample of a clip in a bucket. Raises UserError for a clip that cannot be decoded."""
    video = read_clip(entry, bucket, settings)
    return encode_video(entry, video, models, row_type, sound_of(entry, video, models, settings, row_type))
