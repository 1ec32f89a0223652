"""Files that are either whole or absent: write to a temporary name, fsync, rename.

Temporary names are `.NAME.PID.part` and, for the folder that is being replaced, `.NAME.PID.old`, beside NAME.
What a process that was killed left of them is removed by the next write of NAME.
"""

import contextlib
import json
import os
import re
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


def check_target(path: str | Path) -> None:
    """Refuses a place where no file can be written, before any work is done for it.

    Raises UserError: a folder has that name, or what stands above is a file or may not be written.
    """
    path = Path(path).absolute()
    if path.is_dir():
        raise UserError(f"{path}: a folder stands where the file should be")
    above = next(p for p in path.parents if os.path.lexists(p))
    if not above.is_dir():
        raise UserError(f"{path}: cannot be created, {above} is not a folder")
    if not os.access(above, os.W_OK):
        raise UserError(f"{path}: cannot be created, no permission to write in {above}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # another user's process, or no process id at all: not ours to judge
    return True


TEMPORARY = re.compile(r"\.(.+)\.(\d+)\.(?:part|old)")


def _leftovers(folder: Path) -> dict[str, list[Path]]:
    """`{name: its temporary names}` of processes that are dead, or of this one."""
    out: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        match = TEMPORARY.fullmatch(path.name)
        if match and (int(match[2]) == os.getpid() or not _alive(int(match[2]))):
            out.setdefault(match[1], []).append(path)
    return out


def _recover(path: Path, left: list[Path]) -> None:
    """Removes what is left of writes of `path`.

    A folder that was put aside by a process killed before the new one took its place comes back first.
    """
    aside = [p for p in left if p.suffix == ".old"]
    if aside and not os.path.lexists(path):
        os.replace(max(aside, key=lambda p: p.stat().st_mtime), path)
    for p in left:
        if p.is_dir():
            shutil.rmtree(p, ignore_errors=True)
        else:
            p.unlink(missing_ok=True)


def clean_up(folder: str | Path, names: re.Pattern[str]) -> None:
    """Removes what killed processes left of writes of all `names` in a folder; nothing when there is no such folder.

    This process must not be writing any of them.
    """
    folder = Path(folder)
    for name, left in _leftovers(folder).items() if folder.is_dir() else ():
        if names.fullmatch(name):
            _recover(folder / name, left)


def remove_folder(path: str | Path) -> None:
    """Removes a folder so that a process killed meanwhile leaves no half of it under its name."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    os.replace(path, part)
    shutil.rmtree(part)


def _prepare(path: Path) -> Path:
    """The temporary name of a write of `path`, with the folders above made and leftovers removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _recover(path, _leftovers(path.parent).get(path.name, []))
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on a clean exit it replaces `path`, else it is removed."""
    path = Path(path)
    part = _prepare(path)
    try:
        yield part
        fsync_path(part)
        os.replace(part, path)
        fsync_path(path.parent)
    finally:
        part.unlink(missing_ok=True)


def check_unused(path: str | Path) -> None:
    """Raises UserError for a path where something is, but an empty folder."""
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path}: exists already; give a new or an empty folder")


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on a clean exit it becomes `path`, else it is removed.

    An existing folder is replaced only after the new one is complete; where `path` is a link to a folder,
    that folder is. Raises UserError when `path` is a file.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: a file stands where the folder should be")
    part = _prepare(path)
    part.mkdir()
    try:
        yield part
        for entry in [*part.rglob("*"), part]:
            fsync_path(entry)
        _take_place(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _take_place(part: Path, path: Path) -> None:
    """Renames `part` to `path`; what stood there is removed afterwards, or put back when that fails."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    replaced = path.exists()
    if replaced:
        os.replace(path, old)
    try:
        os.replace(part, path)
    except BaseException:
        if replaced:
            os.replace(old, path)
        raise
    fsync_path(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: str | Path, data: Any) -> None:
    """Writes JSON atomically, indented, with a final newline."""
    with atomic_file(path) as part:
        part.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def text_fault(text: str) -> str | None:
    """What is wrong with a text that no file can hold: half of a pair of code units, as cut captions have it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is no valid Unicode text: {text[error.start]!r} at character {error.start}"
    return None


def read_json(path: str | Path) -> Any:
    """Reads JSON. Raises UserError naming the file when it is missing or malformed."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
