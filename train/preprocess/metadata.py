"""Metadata files: which clips there are, and what is said of them."""

import csv
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import UserError, raise_faults
from core.files import read_json, text_fault
from infer.words import counted

PATH_KEYS = ("path", "video")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the metadata file: `name` as written there, `path` resolved against the file's folder."""

    name: str
    path: Path
    caption: str


def _parse_jsonl(path: Path) -> list[Any]:
    rows, faults = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
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
        reader = csv.DictReader(file)
        rows = list(reader)
    names = list(reader.fieldnames or [])
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    raise_faults(f"{path}: the header has columns twice", twice)
    long = [f"row {i} has more fields than the header's {len(names)}" for i, row in enumerate(rows) if None in row]
    raise_faults(f"{path}: a text with commas needs quotes", long)
    return rows


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
    if (fault := text_fault(caption)) is not None:
        return f"has a caption that {fault}"
    return Entry(name, folder / name, caption)


def read_metadata(path: str | Path) -> list[Entry]:
    """Rows with `path` (or `video`) and `caption` from a CSV, JSON or JSONL file; paths are relative to its folder.

    An empty caption is allowed. Raises one UserError that lists every row that lacks something.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected a metadata file ({', '.join(PARSERS)}) that lists its clips")
    if path.suffix.lower() not in PARSERS:
        raise UserError(f"{path}: the metadata file must end in {', '.join(PARSERS)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        entries = [_entry(row, path.parent) for row in PARSERS[path.suffix.lower()](path)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    faults = [f"row {number} {entry}" for number, entry in enumerate(entries) if isinstance(entry, str)]
    raise_faults(f"{path}: {len(faults)} of {counted(len(entries), 'row')} cannot be used", faults)
    if not entries:
        raise UserError(f"{path}: no rows")
    return entries


def digest(entries: Sequence[Entry]) -> str:
    """Changes when a name, a caption or their order does; not with the format or the place of the file."""
    text = json.dumps([(entry.name, entry.caption) for entry in entries])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
