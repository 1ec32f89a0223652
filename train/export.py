"""`python -m train.export`: a checkpoint of a run -> a pipeline folder in Diffusers' layout."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.checkpoint import open_checkpoint
from core.errors import UserError, exit_status, named, raise_faults
from core.files import check_target
from core.rules import cast
from core.specs import check
from core.transforms import apply, history
from infer.folder import INDEX
from train import state as states
from train.families import Family, family_of_class
from train.packing import repacked
from train.precision import FLOATS

MODELS = {
    "vae": "the VAE",
    "text_encoder": "the text encoder",
    "image_encoder": "the image encoder",
    "audio_vae": "the audio VAE",
    "vocoder": "the vocoder",
}
"""The models around a transformer, and what messages call them."""


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder itself, or the newest one of a run's output folder."""
    path = Path(path)
    if (path / states.RECORD).is_file():
        return path
    found = states.checkpoints(path)
    if not found:
        raise UserError(f"{path}: neither a checkpoint nor a run with checkpoints/")
    return found[-1]


def check_output(output: Path, overwrite: bool) -> None:
    """Refuses a place that cannot be written, and a folder that holds anything; with `overwrite`, but a pipeline."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return check_target(output / INDEX)
    if not (output / INDEX).is_file():
        raise UserError(f"{output}: already exists and is no pipeline folder; choose another --output")
    if not overwrite:
        raise UserError(f"{output}: already holds a pipeline; choose another --output or give --overwrite")


def component_folders(
    folder: Path, record: Mapping[str, Any], given: Mapping[str, str | Path | None]
) -> dict[str, Path | None]:
    """The folders of the models around: those given, else those the checkpoint notes (None: it has none).

    Checkpoints from before an entry was noted have none of it. Raises UserError for what is not there.
    """
    chosen = {k: record.get(k) if v is None else v for k, v in given.items()}
    parts = {k: None if v is None else Path(v) for k, v in chosen.items()}
    gone = [f"{k}: {p}; give {flag(k)}" for k, p in parts.items() if p is not None and not p.is_dir()]
    raise_faults(f"{folder}: models it was trained with are not there", gone)
    return parts


def note_missing(output: Path, parts: Mapping[str, Path | None], places: Mapping[str, str | None]) -> None:
    """Says on the terminal which models the pipeline is written without."""
    missing = [k for k in parts if parts[k] is None and places[k] is None]
    if missing:
        flags = ", ".join(map(flag, missing))
        print(f"note: {output} is without {', '.join(missing)}, since none is known; {flags} would add it")


def flag(name: str) -> str:
    """The flag that names a model around the transformer."""
    return f"--{name.replace('_', '-')}"


def check_given(family: Family, places: Mapping[str, str | None], given: Mapping[str, Any]) -> None:
    """Refuses models that the pipeline has no place for."""
    reasons = {name: places.get(name, f"a pipeline of {family.name} has none") for name in given}
    wrong = [f"{flag(k)} {v}: {reasons[k]}" for k, v in given.items() if v is not None and reasons[k] is not None]
    raise_faults("models without a place", wrong)


def export(
    source: str | Path,
    output: str | Path,
    *,
    ema: bool = False,
    dtype: str = "fp32",
    overwrite: bool = False,
    merge_base: str | Path | None = None,
    **models: str | Path | None,
) -> Path:
    """Writes the weights of a checkpoint as a pipeline folder; memory holds one leaf at a time, whatever it was
    sharded over.

    Args:
        source: a checkpoint folder, or a run's output folder (its newest checkpoint is taken).
        ema: the averaged weights instead of the trained ones.
        dtype: `fp32` or `bf16`; tables that stay in float32 do.
        merge_base: pipeline folder whose other stream, untouched, completes a model of one stream.
        models: folders of those around the transformer (see `MODELS`), where the run knew none or they have moved.

    Raises:
        UserError: before anything is written; a pipeline folder at `output` is replaced only with `overwrite`,
            and nothing else ever is.
    """
    folder, output = find_checkpoint(source), Path(output)
    check_output(output, overwrite)
    record = states.read_record(folder)
    name, where = "ema" if ema else "params", str(folder / states.RECORD)
    if not (folder / name).is_dir():
        raise UserError(f"{folder}: no {name}/ in this checkpoint" + (" (the run kept no average)" if ema else ""))
    family = family_of_class(states.model_type(record), where)
    cfg = family.from_json(record["config"], where)
    model_specs = family.param_specs(cfg)
    tree = repacked(open_checkpoint(folder / name), model_specs)
    check(tree, model_specs, what=str(folder / name))
    bound = cast(FLOATS[dtype], keep_fp32=lambda k: model_specs[k].keep_fp32)(tree.specs)
    changed = any(bound.specs[k].dtype != leaf.dtype for k, leaf in tree.items())
    tree, transforms = apply(tree, bound), history(bound) if changed else []
    if merge_base is not None:
        with named(f"--merge-base {merge_base}"):
            tree, cfg = family.merge_base(tree, cfg, Path(merge_base), FLOATS[dtype])
    places = family.parts(cfg)
    check_given(family, places, models)
    parts = component_folders(folder, record, {k: models.get(k) for k in places})
    if merge_base is not None:  # the run knew none of what belongs to the other stream
        base = {k: Path(merge_base) / k for k in parts if (Path(merge_base) / k).is_dir()}
        parts |= {k: base.get(k) for k in parts if parts[k] is None}
    family.save(output, tree, cfg, record, parts, transforms)
    note_missing(output, parts, places)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2."""
    p = argparse.ArgumentParser(
        prog="python -m train.export",
        description="Write a checkpoint as a pipeline folder that python -m infer samples from; its transformer/ "
        "loads in Diffusers.",
    )
    p.add_argument("source", metavar="CHECKPOINT", help="a checkpoint, or a run's folder (its newest checkpoint)")
    p.add_argument("--output", required=True, metavar="DIR", help="folder to create; it appears when all is done")
    p.add_argument("--ema", action="store_true", help="the averaged weights")
    p.add_argument("--dtype", choices=FLOATS, default="fp32", help="dtype of the weights (default: %(default)s)")
    p.add_argument("--merge-base", metavar="DIR", help="LTX-2 pipeline that completes a model of one stream")
    for name, what in MODELS.items():
        p.add_argument(flag(name), metavar="DIR", help=f"{what}'s folder (default: where the run found it)")
    p.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    args = p.parse_args(argv)
    return exit_status(lambda: print(f"wrote {args.output} from {export(**vars(args))}"))


if __name__ == "__main__":
    sys.exit(main())
