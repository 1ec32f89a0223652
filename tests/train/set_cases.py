"""Clips with metadata and a real pipeline folder of tiny models, to make sets from."""

import json
import sys
from pathlib import Path

import torch

from infer.media import write_video
from train.preprocess.finish import write_png

sys.path += [str(Path(__file__).parents[1] / name) for name in ("infer", "nn")]

BUCKETS = ("48x32x9", "32x48x5", "48x32")
# Height, width and frames of each clip; the last is a picture. With BUCKETS: two of the first, two of the second.
SIZES = [(40, 56, 13), (48, 32, 6), (64, 96, 9), (56, 40, 5), (40, 56, 1)]
WORDS = ["a red ball", "the green meadow", "a red ball", "", "a dog's blue cube"]


def moving(seed: int, frames: int, height: int, width: int) -> torch.Tensor:
    """Coloured waves that move, uint8 `[T, H, W, 3]`."""
    t, y, x = torch.meshgrid(*(torch.arange(n).float() for n in (frames, height, width)), indexing="ij")
    waves = [torch.sin((0.2 + 0.1 * c) * x + (0.3 - 0.05 * seed) * y + 0.4 * t + c) for c in range(3)]
    return (127 + 100 * torch.stack(waves, -1)).round().to(torch.uint8)


def write_clips(folder: Path, extra=()) -> Path:
    """The clips of SIZES and `extra` names that are not there, and their metadata file."""
    rows = []
    for i, ((height, width, frames), caption) in enumerate(zip(SIZES, WORDS, strict=True)):
        name = f"{i}.mp4" if frames > 1 else f"{i}.png"
        folder.mkdir(parents=True, exist_ok=True)
        clip = moving(i, frames, height, width)
        write_video(folder / name, clip, 8) if frames > 1 else write_png(folder / name, clip[0])
        rows.append({"path": name, "caption": caption})
    rows[1:1] = [{"path": name, "caption": "a ball"} for name in extra]
    (folder / "videos.json").write_text(json.dumps(rows))
    return folder / "videos.json"
