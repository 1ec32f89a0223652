"""`python -m train.preprocess`: videos and captions -> latents and prompt embeddings in Parquet.

Needs no downloaded weights: the latents come from the patch codec fitted on the clips themselves, the prompt
embeddings from the hash text embedder. The output folder holds `data/*.parquet`, `vae/`, `text_encoder/`,
`preprocess.json` (settings and versions) and `validation.json` (prompts for `python -m infer` and training).
"""

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from core.errors import UserError, exit_status, raise_faults
from core.files import atomic_file, atomic_folder, check_target, read_json, write_json
from core.geometry import check_geometry, geometry_rule, to_frames, to_video
from core.save import describe
from core.trees import Params
from infer.media import Video, frame_rate, psnr, read_video
from infer.progress import tracked
from nn import patch_codec, text_hash
from train.rows import T2V, encode_row

MANIFEST = "preprocess.json"
PATH_KEYS = ("path", "video")
NUM_VALIDATION_PROMPTS = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the contents of a preprocessed set, apart from the videos."""

    num_frames: int
    height: int
    width: int
    fps: float | None = None
    latent_channels: int = 32
    text_dim: int = 64
    text_max_length: int = 32
    rows_per_group: int = 8


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the metadata file: `name` as written there, `path` resolved against the file's folder."""

    name: str
    path: Path
    caption: str


# --- metadata -------------------------------------------------------------------------------------------------


def _parse_jsonl(path: Path) -> list[Any]:
    rows, faults = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                faults.append(f"line {number}: not valid JSON: {error}")
    raise_faults(f"{path}: cannot be read", faults)
    return rows


def _parse_json(path: Path) -> list[Any]:
    data = read_json(path)
    rows = data.get("data") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise UserError(f'{path}: expected a list of rows or {{"data": [...]}}, it holds a {type(data).__name__}')
    return rows


def _parse_csv(path: Path) -> list[Any]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


PARSERS = {".csv": _parse_csv, ".json": _parse_json, ".jsonl": _parse_jsonl}


def _entry(row: Any, folder: Path) -> Entry | str:
    """A metadata row as an Entry, or what is wrong with it."""
    if not isinstance(row, dict):
        return f"is {type(row).__name__}, expected an object with path and caption"
    names = [key for key in PATH_KEYS if row.get(key) not in (None, "")]
    if len(names) != 1:
        seen = ", ".join(str(key) for key in row)
        return f"needs one of {' or '.join(PATH_KEYS)} and has {len(names)} (its keys: {seen})"
    name, caption = row[names[0]], row.get("caption")
    if not isinstance(name, str) or not isinstance(caption, str):
        return f"{names[0]} is {name!r} and caption is {caption!r}, expected two strings"
    return Entry(name, folder / name, caption)


def read_metadata(path: str | Path) -> list[Entry]:
    """Rows with `path` (or `video`) and `caption` from a CSV, JSON or JSONL file; paths are relative to its folder.

    An empty caption is allowed. Raises one UserError that lists every row that lacks something.
    """
    path = Path(path)
    if path.suffix.lower() not in PARSERS:
        raise UserError(f"{path}: the metadata file must end in {', '.join(PARSERS)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        entries = [_entry(row, path.parent) for row in PARSERS[path.suffix.lower()](path)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    faults = [f"row {number} {entry}" for number, entry in enumerate(entries) if isinstance(entry, str)]
    raise_faults(f"{path}: {len(faults)} of {len(entries)} rows cannot be used", faults)
    if not entries:
        raise UserError(f"{path}: no rows")
    return entries


# --- the passes -----------------------------------------------------------------------------------------------


def read_clip(entry: Entry, settings: Settings) -> Video:
    """The frames of one entry at the size and rate of the settings."""
    size = (settings.height, settings.width)
    return read_video(entry.path, num_frames=settings.num_frames, fps=settings.fps, size=size)


def fit_codec(entries: Sequence[Entry], settings: Settings) -> tuple[Params, patch_codec.PatchCodecConfig]:
    """Decodes every clip once, which also validates it, and fits the codec on all of them.

    One clip is in memory at a time. Raises one UserError that lists every clip that cannot be used.
    """
    cfg = patch_codec.PatchCodecConfig(latent_channels=settings.latent_channels)
    faults: list[str] = []

    def clips() -> Iterator[Tensor]:
        for entry in tracked(entries, "reading clips", "clips"):
            try:
                yield read_clip(entry, settings).frames
            except UserError as error:
                faults.append(str(error))
        raise_faults(f"{len(faults)} of {len(entries)} clips cannot be used", faults)

    return patch_codec.fit(cfg, clips()), cfg


def encode_entry(
    entry: Entry, settings: Settings, params: Params, cfg: patch_codec.PatchCodecConfig
) -> tuple[dict[str, Any], float]:
    """One Parquet row, and the PSNR in dB between the clip and its latents decoded again."""
    video = read_clip(entry, settings)
    latents = patch_codec.encode(params, cfg, to_video(video.frames)[None])
    rebuilt = to_frames(patch_codec.decode(params, cfg, latents)[0])
    text_cfg = text_hash.HashTextConfig(settings.text_dim, settings.text_max_length)
    sample = {
        "id": entry.name,
        "vae_latent": latents[0],
        "text_embedding": text_hash.embed(text_cfg, [entry.caption])[0],
        "file_name": entry.path.name,
        "caption": entry.caption,
        "media_type": "video",
        "width": settings.width,
        "height": settings.height,
        "num_frames": settings.num_frames,
        "duration_sec": settings.num_frames / video.fps,
        "fps": video.fps,
    }
    return encode_row(T2V, sample), psnr(rebuilt, video.frames)


def write_rows(path: Path, rows: Iterable[dict[str, Any]], rows_per_group: int) -> None:
    """Writes Parquet in row groups of `rows_per_group`, holding one group in memory; whole or absent."""
    with atomic_file(path) as part, pq.ParquetWriter(part, T2V.schema) as writer:
        group: list[dict[str, Any]] = []
        for row in rows:
            group.append(row)
            if len(group) == rows_per_group:
                writer.write_table(pa.Table.from_pylist(group, T2V.schema))
                group = []
        if group:
            writer.write_table(pa.Table.from_pylist(group, T2V.schema))


def _check_settings(settings: Settings) -> None:
    codec = patch_codec.PatchCodecConfig(latent_channels=settings.latent_channels)
    text_hash.HashTextConfig(settings.text_dim, settings.text_max_length)
    check_geometry(settings.num_frames, settings.height, settings.width, temporal=codec.temporal, spatial=codec.spatial)
    if settings.fps is not None:
        frame_rate(settings.fps)
    if settings.rows_per_group < 1:
        raise UserError(f"rows_per_group is {settings.rows_per_group}, expected at least 1")


def check_output(folder: Path, overwrite: bool) -> None:
    """Refuses a place that cannot be written, and a folder that holds anything; with `overwrite`, but a set."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return check_target(folder / MANIFEST)
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder}: already exists and is not a preprocessed set; give another --output")
    if not overwrite:
        raise UserError(f"{folder}: already holds a preprocessed set; give another --output or --overwrite")


def preprocess(data: str | Path, output: str | Path, settings: Settings, *, overwrite: bool = False) -> float:
    """Encodes every clip of the metadata file `data` into the folder `output`, which appears at once.

    Returns the mean PSNR in dB of the clips rebuilt from their latents. Everything is checked before the
    first clip is encoded; on any UserError nothing is written, and an older set stays as it was.
    """
    output = Path(output)
    check_output(output, overwrite)
    _check_settings(settings)
    entries = read_metadata(data)
    params, cfg = fit_codec(entries, settings)
    quality: list[float] = []

    def rows() -> Iterator[dict[str, Any]]:
        for entry in tracked(entries, "encoding", "clips"):
            row, db = encode_entry(entry, settings, params, cfg)
            quality.append(db)
            yield row

    with atomic_folder(output) as part:
        write_rows(part / "data" / "part-00000.parquet", rows(), settings.rows_per_group)
        patch_codec.save(part / "vae", params, cfg)
        text_cfg = text_hash.HashTextConfig(settings.text_dim, settings.text_max_length)
        text_hash.save(part / "text_encoder", text_cfg)
        captions = list(dict.fromkeys(entry.caption for entry in entries))[:NUM_VALIDATION_PROMPTS]
        write_json(part / "validation.json", {"data": [{"caption": caption} for caption in captions]})
        mean_psnr = sum(quality) / len(quality)
        write_json(part / MANIFEST, _manifest(settings, len(entries), mean_psnr))
    return mean_psnr


def _manifest(settings: Settings, clips: int, mean_psnr: float) -> dict[str, Any]:
    return {
        "row_type": T2V.name,
        "clips": clips,
        "codec_psnr_db": round(mean_psnr, 2),
        "settings": dataclasses.asdict(settings),
        "versions": {
            "latentree": describe(T2V.name, {})["project_version"],
            "torch": str(torch.__version__),
            "av": av.__version__,
        },
    }


# --- command line ---------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line; defaults are those of `Settings`."""
    p = argparse.ArgumentParser(
        prog="python -m train.preprocess",
        description="Encode videos and captions into a Parquet set for training: latents by a linear patch codec "
        "fitted on the clips, prompt embeddings by hashing words. Needs no downloaded weights.",
        epilog="example: python -m train.preprocess --data videos.csv --output data/mine "
        "--num-frames 33 --height 96 --width 160",
    )
    rule = geometry_rule(4, 8)
    p.add_argument("--data", required=True, metavar="FILE", help="CSV, JSON or JSONL with path (or video) and caption "
                   "per row; paths are relative to the file's folder")  # fmt: skip
    p.add_argument("--output", required=True, metavar="DIR", help="folder to create; it appears when all is done")
    p.add_argument("--num-frames", type=int, required=True, help=f"frames taken from the start of each clip; {rule}")
    p.add_argument("--height", type=int, required=True, help="pixels; clips are scaled to cover, "
                   "the centre is kept; a model with patches of 2 (Wan) needs multiples of 16")  # fmt: skip
    p.add_argument("--width", type=int, required=True, help="pixels")
    p.add_argument("--fps", type=float, default=Settings.fps, help="resample to this rate by nearest timestamp "
                   "(default: each clip's own rate)")  # fmt: skip
    for name, text in (
        ("latent_channels", "channels of the latents"),
        ("text_dim", "values per word of the prompt embedding"),
        ("text_max_length", "words of a caption that are kept"),
        ("rows_per_group", "clips per Parquet row group"),
    ):
        flag = "--" + name.replace("_", "-")
        p.add_argument(flag, type=int, default=getattr(Settings, name), help=f"{text} (default: %(default)s)")
    p.add_argument("--overwrite", action="store_true", help="replace a preprocessed set in the output folder")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2."""
    args = parser().parse_args(argv)
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})

    def work() -> None:
        db = preprocess(args.data, args.output, settings, overwrite=args.overwrite)
        print(f"wrote {args.output} (the codec rebuilds the clips at {db:.1f} dB)")

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
