"""`python -m infer.convert`: an official single file of LTX-2 to a pipeline folder that `python -m infer` takes."""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import UserError, exit_status
from core.files import atomic_folder, check_unused
from infer.folder import copy_files
from infer.ltx2_folder import write_index, write_scheduler
from infer.ltx2_text import load_ltx2_text
from nn.ltx2_config import PRESETS, LTX2Config
from nn.ltx2_formats import open_single_models

TOKENIZER_FILES = ("tokenizer*", "*tokens*.json", "chat_template*")


def _tokenizer_of(text_encoder: Path) -> Path:
    """The folder with a text encoder's tokenizer: `tokenizer` beside it, else the same one, as Gemma is published."""
    beside = text_encoder.parent / "tokenizer"
    found = next((place for place in (beside, text_encoder) if (place / "tokenizer_config.json").is_file()), None)
    if found is None:
        raise UserError(f"{text_encoder}: neither it nor {beside} has a tokenizer_config.json")
    return found


def _place(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copies a folder's files that match into one of a pipeline, in the place of a link."""
    target.unlink()
    if "*" in patterns:
        return copy_files(source, target)
    target.mkdir()
    for file in sorted({file for pattern in patterns for file in source.glob(pattern) if file.is_file()}):
        shutil.copyfile(file, target / file.name)


def _add_text(part: Path, cfg: LTX2Config, text_encoder: Path, link: bool) -> None:
    """Adds a text encoder and its tokenizer to a folder with connectors, once they are seen to fit these."""
    tokenizer = _tokenizer_of(text_encoder)
    sources = {"text_encoder": (text_encoder, ("*",)), "tokenizer": (tokenizer, ("*",))}
    if tokenizer == text_encoder:
        sources["tokenizer"] = (tokenizer, TOKENIZER_FILES)
    for name, (source, _) in sources.items():
        (part / name).symlink_to(source.resolve(), target_is_directory=True)
    try:
        load_ltx2_text(part, cfg)
    except UserError as error:
        raise UserError(f"{text_encoder}: {str(error).replace(f'{part}/', '')}") from None
    for name, (source, patterns) in sources.items() if not link else ():
        _place(source, part / name, patterns)


def convert_single_file(
    path: str | Path,
    folder: str | Path,
    *,
    text_encoder: str | Path | None = None,
    upsampler: str | Path | None = None,
    distilled: bool = False,
    link: bool = False,
    configs: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Writes a pipeline folder in Diffusers' layout with the models of a single file; it appears whole or not at all.

    Args:
        text_encoder: folder of Gemma 3, with its tokenizer in it or beside it. None: prompts must then be embedded
            elsewhere.
        distilled: notes that the weights are distilled ones, which the file does not say.
        link: links to the text encoder instead of copying it.
        upsampler, configs: see `nn.ltx2_formats.open_single_models`.

    Returns:
        The names of the models written.

    Raises:
        UserError: as `open_single_models`; a file without a transformer, a text encoder that does not fit the
            connectors, a folder in use.
    """
    target = Path(folder)
    check_unused(target)
    models = open_single_models(path, upsampler=upsampler, configs=configs)
    needed = ["transformer", *([] if text_encoder is None else ["connectors"])]
    missing = [name for name in needed if name not in models]
    if missing:
        raise UserError(f"{path}: holds no {' and no '.join(missing)}, only {', '.join(models)}")
    cfg = models["transformer"].cfg
    with atomic_folder(target) as part:
        for name in [name for name in models if name != "transformer"]:
            models[name].save(part / name)
        if text_encoder is not None:  # before the transformer, which is most of the bytes
            _add_text(part, cfg, Path(text_encoder), link)
        models["transformer"].save(part / "transformer")
        write_scheduler(part, distilled)
        write_index(part, cfg)
    return tuple(models)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m infer.convert",
        description="Make a pipeline folder of an official LTX-2 single file: transformer, autoencoders, vocoder and "
        "connectors, read and written leaf by leaf in their dtype.",
        epilog="example: python -m infer.convert ltx-2-19b-dev.safetensors models/ltx-2 --text-encoder "
        "models/gemma-3-12b-it --upsampler ltx-2-spatial-upscaler-x2-1.0.safetensors",
    )
    p.add_argument("file", metavar="FILE", help="the single file, as Lightricks publishes it or ComfyUI repacks it")
    p.add_argument("folder", metavar="DIR", help="pipeline folder to write: new, or empty")
    p.add_argument("--text-encoder", metavar="DIR", help="folder of Gemma 3 with its tokenizer (default: none; prompts "
                   "are then given as --prompt-embeds)")  # fmt: skip
    p.add_argument("--upsampler", metavar="FILE", help="file of a latent upsampler, for two stages")
    p.add_argument("--distilled", action="store_true", help="the weights are distilled ones: fixed sigmas, no guidance")
    p.add_argument("--link", action="store_true", help="link to the text encoder instead of copying it")
    p.add_argument("--preset", choices=PRESETS, help="the transformer's architecture, where the file's header has none")
    return p


def run(args: argparse.Namespace) -> None:
    """Converts the file of the command line."""
    if args.link and args.text_encoder is None:
        raise UserError("--link would do nothing without --text-encoder")
    found = convert_single_file(
        args.file, args.folder, text_encoder=args.text_encoder, upsampler=args.upsampler, distilled=args.distilled,
        link=args.link, configs=None if args.preset is None else {"transformer": PRESETS[args.preset]},
    )  # fmt: skip
    print(f"wrote {args.folder} ({', '.join(found)}{'' if args.text_encoder is None else ', text_encoder, tokenizer'})")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
