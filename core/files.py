"""Files that are either whole or absent: write to a temporary name, fsync, rename."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import UserError


def fsync_path(path: Path) -> None:
    """Flushes a file's or a folder's contents to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on a clean exit it replaces `path`, else it is removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        fsync_path(part)
        os.replace(part, path)
        fsync_path(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on a clean exit it becomes `path`, else it is removed.

    An existing `path` is replaced only after the new folder is complete.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        for entry in [*part.rglob("*"), part]:
            fsync_path(entry)
        if path.exists():
            os.replace(path, old)
        os.replace(part, path)
        fsync_path(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_json(path: str | Path, data: Any) -> None:
    """Writes JSON atomically, indented, with a final newline."""
    with atomic_file(path) as part:
        part.write_text(json.dumps(data, indent=2) + "\n")


def read_json(path: str | Path) -> Any:
    """Reads JSON. Raises UserError naming the file when it is missing or malformed."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
