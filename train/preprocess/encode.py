"""One clip and its caption as a sample: the same function makes the rows of a set and the batches of a run."""

from typing import Any

import torch

from core.geometry import to_video
from infer.media import Video, read_video
from nn.wan_i2v import condition_clip
from train.preprocess.buckets import Bucket
from train.preprocess.metadata import Entry
from train.preprocess.models import Models
from train.preprocess.settings import Encoding
from train.rows import RowType


def read_clip(entry: Entry, bucket: Bucket, settings: Encoding) -> Video:
    """The first frames of a clip at the settings' rate and the bucket's size: scaled to cover it, the centre kept."""
    size = (bucket.height, bucket.width)
    return read_video(entry.path, num_frames=bucket.frames, fps=settings.fps, size=size)


def encode_video(entry: Entry, video: Video, models: Models, row_type: RowType) -> dict[str, Any]:
    """The sample of frames that are read: latents, text embedding and notes, see `train.rows`.

    Rows of type i2v also get the first frame (`pil_image`), the latents of a clip that is grey after it
    (`first_frame_latent`) and, with an image encoder, its `clip_feature`.
    """
    frames, (count, height, width, _) = video.frames, video.frames.shape
    pixels = to_video(frames)[None]
    with torch.no_grad():
        sample = {
            "id": entry.name,
            "vae_latent": models.vae.encode(pixels)[0].cpu(),
            "text_embedding": models.text.embed([entry.caption])[0].cpu(),
        }
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


def encode_clip(
    entry: Entry, bucket: Bucket, settings: Encoding, models: Models, row_type: RowType
) -> dict[str, Any]:
    """The sample of a clip in a bucket. Raises UserError for a clip that cannot be decoded."""
    return encode_video(entry, read_clip(entry, bucket, settings), models, row_type)
