"""Prompt files, in the form of the validation files of training, and the videos that a command line asks for."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import UserError, nearest_names, raise_faults
from core.files import read_json, text_fault
from infer.schedules import is_int

TEXTS, SIZES, NUMBERS = ("caption", "negative_prompt", "image"), ("num_frames", "height", "width"), ("seed",)
KEYS = (*TEXTS, *NUMBERS, *SIZES)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What one video shows; None leaves an entry to whoever asks. `image` is a path."""

    caption: str
    negative_prompt: str | None = None
    image: Path | None = None
    seed: int | None = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of `{"data": [{"caption", "image"?, "negative_prompt"?, "seed"?, "num_frames"?, ...}]}`.

    Images are relative to the file's folder. Raises one UserError that names the file and every entry that cannot
    be used.
    """
    path, data = Path(path), read_json(path)
    rows = data.get("data") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows:
        raise UserError(f'{path}: no prompt file: expected {{"data": [{{"caption": ...}}, ...]}}, at least one entry')
    faults = [f"data[{i}]: {fault}" for i, row in enumerate(rows) for fault in _faults(row, path.parent)]
    raise_faults(f"{path}: prompts that cannot be used", faults)
    place = lambda row: {"image": path.parent / row["image"]} if row.get("image") is not None else {}  # noqa: E731
    return [Prompt(**{**row, **place(row)}) for row in rows]


def _faults(row: Any, folder: Path) -> list[str]:
    if not isinstance(row, dict):
        return [f"is {row!r}, expected a mapping with a caption"]
    unknown = [k for k in row if k not in KEYS]
    faults = [f"unknown key {k!r}{nearest_names(k, KEYS)}; allowed: {', '.join(KEYS)}" for k in unknown]
    if not isinstance(row.get("caption"), str):
        faults.append(f"caption is {row.get('caption')!r}, expected text")
    texts = {k: row[k] for k in TEXTS if isinstance(row.get(k), str)}
    faults += [f"{k} {fault}" for k, text in texts.items() if (fault := text_fault(text)) is not None]
    for name in TEXTS[1:]:
        if row.get(name) is not None and not isinstance(row[name], str):
            faults.append(f"{name} is {row[name]!r}, expected text")
    for name in (*NUMBERS, *SIZES):
        if row.get(name) is not None and not is_int(row[name]):
            faults.append(f"{name} is {row[name]!r}, expected an integer")
    if is_int(row.get("seed")) and not -(2**63) <= row["seed"] < 2**63:
        faults.append(f"seed is {row['seed']}, expected an integer of 64 bits")
    image = row.get("image")
    if isinstance(image, str) and not (folder / image).is_file():
        what = "is a folder, expected a picture" if (folder / image).is_dir() else "no such file"
        faults.append(f"image {folder / image}: {what}")
    return faults


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One video to make: of which prompt, with which seed, and the MP4 to write."""

    prompt: Prompt
    seed: int
    output: Path


def plan(prompts: Sequence[Prompt], output: Path, samples: int, seed: int) -> list[Wanted]:
    """`samples` videos of every prompt.

    Sample j has the seed of its prompt (else `seed`) plus j, so that each can be made again alone. One video is
    `output` itself; else the names have the number of the prompt where there are several, and of the sample where
    there are several: `a-003-1.mp4`. Raises UserError for seeds outside 64 bits and fewer than one sample.
    """
    if samples < 1:
        raise UserError(f"samples per prompt is {samples}, expected at least 1")
    out = []
    for i, prompt in enumerate(prompts):
        first = seed if prompt.seed is None else prompt.seed
        for j in range(samples):
            numbers = [*([f"{i:03d}"] if len(prompts) > 1 else []), *([str(j)] if samples > 1 else [])]
            out.append(Wanted(prompt, first + j, output.with_stem("-".join([output.stem, *numbers]))))
    bad = sorted({w.seed for w in out if not -(2**63) <= w.seed < 2**63})
    raise_faults("seeds that cannot be used", [f"seed or index {n} is outside int64" for n in bad])
    return out
