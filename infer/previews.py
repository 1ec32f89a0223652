"""Pictures of a video while it is sampled: what the model takes the clean video to be, every few steps."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from infer.autoencoders import Vae, decode_frames
from infer.media import contact_sheet


def preview_of(output: Path) -> Path:
    """Where the previews of a video are written, each over the one before: `a.mp4` -> `a.preview.png`."""
    return output.with_suffix(".preview.png")


def previewer(every: int, vae: Vae, output: Path, caption: str, steps: int) -> Callable[[int, Tensor], None]:
    """What writes the estimate `[1, C, t, h, w]` of a video's latents in steps that `every` divides."""

    def show(step: int, x0: Tensor) -> None:
        if step % every == 0:
            (frames,) = decode_frames(vae, x0)
            contact_sheet([(f"{caption} (step {step} of {steps})", frames)], preview_of(output))

    return show
