"""Files and folders are whole or absent, whatever fails, and dead processes leave nothing for long."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core import files
from core.errors import UserError
from core.files import atomic_file, atomic_folder, check_target, clean_up, read_json, remove_folder, write_json

ROOT = Path(__file__).parents[2]


class Boom(Exception):
    pass


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def write_folder(path: Path, text: str) -> None:
    with atomic_folder(path) as part:
        (part / "sub").mkdir()
        (part / "sub" / "a").write_text(text)


def content(path: Path) -> str:
    return (path / "sub" / "a").read_text()


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic_file(path) as part:
        part.write_text("one")
        assert not path.exists() and part.parent == path.parent
    with atomic_file(path) as part:
        part.write_text("two")
        assert path.read_text() == "one"
    assert path.read_text() == "two" and names(path.parent) == ["a.txt"]


def test_a_folder_appears_whole_and_replaces_all_of_the_old_one(tmp_path):
    path = tmp_path / "new" / "run"
    write_folder(path, "one")
    (path / "extra").write_text("goes with the old folder")
    with atomic_folder(path) as part:
        (part / "b").write_text("two")
        assert content(path) == "one"
    assert names(path) == ["b"] and names(path.parent) == ["run"]


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_exception_leaves_the_old_content_and_nothing_else(tmp_path, error):
    (tmp_path / "a").write_text("old")
    write_folder(tmp_path / "run", "old")
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind), atomic_file(tmp_path / "a") as part:
        part.write_text("half")
        raise error
    with pytest.raises(kind), atomic_folder(tmp_path / "run") as part:
        (part / "half").write_text("half")
        raise error
    with pytest.raises(kind), atomic_folder(tmp_path / "other") as part:
        raise error
    assert (tmp_path / "a").read_text() == "old" and content(tmp_path / "run") == "old"
    assert names(tmp_path) == ["a", "run"]


def test_a_block_that_writes_no_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "a"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_rename_puts_the_old_folder_back(tmp_path, monkeypatch, failing):
    """The first puts the old folder aside, the second brings the new one in its place."""
    path, rename, calls = tmp_path / "run", os.replace, []
    write_folder(path, "old")

    def replace(source, target):
        calls.append((Path(source).suffix, Path(target).suffix))
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(OSError, match="Input/output"):
        write_folder(path, "new")
    assert content(path) == "old" and names(tmp_path) == ["run"]
    write_folder(path, "new")
    assert content(path) == "new" and names(tmp_path) == ["run"]


@pytest.mark.parametrize("broken", ["file", "folder"])
def test_a_failing_fsync_leaves_the_old_content(tmp_path, monkeypatch, broken):
    (tmp_path / "a").write_text("old")
    write_folder(tmp_path / "run", "old")

    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "a", {}) if broken == "file" else write_folder(tmp_path / "run", "new")
    assert (tmp_path / "a").read_text() == "old" and content(tmp_path / "run") == "old"
    assert names(tmp_path) == ["a", "run"]


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    synced, rename = [], os.replace
    monkeypatch.setattr(files, "fsync_path", lambda p: synced.append(Path(p).name))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (synced.append("rename"), rename(a, b)))
    write_folder(tmp_path / "run", "x")
    assert set(synced[: synced.index("rename")]) == {f".run.{os.getpid()}.part", "sub", "a"}
    assert synced[synced.index("rename") :] == ["rename", tmp_path.name]


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(tmp_path, dead_pid):
    live = os.getppid()
    for pid in (dead_pid, live):
        (tmp_path / f".a.{pid}.part").write_text("half")
        (tmp_path / f".run.{pid}.part" / "sub").mkdir(parents=True)
    for other in (f".b.{dead_pid}.part", f".a.{dead_pid}.part.txt", f"a.{dead_pid}.part", ".a.x.part"):
        (tmp_path / other).write_text("another name's")
    kept = set(names(tmp_path)) - {f".a.{dead_pid}.part", f".run.{dead_pid}.part"}
    write_json(tmp_path / "a", 1)
    assert f".run.{dead_pid}.part" in names(tmp_path), "leftovers of another name are not touched"
    write_folder(tmp_path / "run", "new")
    assert set(names(tmp_path)) == kept | {"a", "run"}


def test_a_folder_put_aside_by_a_killed_process_comes_back(tmp_path, dead_pid):
    """Killed between the two renames: the old content is the only one, and a failing write must not lose it."""
    path = tmp_path / "run"
    write_folder(path, "old")
    path.rename(tmp_path / f".run.{dead_pid}.old")
    with pytest.raises(Boom), atomic_folder(path):
        raise Boom
    assert content(path) == "old" and names(tmp_path) == ["run"]
    path.rename(tmp_path / f".run.{dead_pid}.old")
    write_folder(path, "new")
    assert content(path) == "new" and names(tmp_path) == ["run"]


def test_a_killed_process_leaves_the_old_content_and_the_next_write_cleans_up(tmp_path):
    """kill -9 in the middle of a write, for real."""
    write_folder(tmp_path / "run", "old")
    code = (
        "import os, signal, sys\nfrom core.files import atomic_folder\n"
        "with atomic_folder(sys.argv[1]) as part:\n"
        "    (part / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=ROOT)
    assert process.returncode == -signal.SIGKILL
    assert content(tmp_path / "run") == "old" and len(names(tmp_path)) == 2
    write_folder(tmp_path / "run", "new")
    assert content(tmp_path / "run") == "new" and names(tmp_path) == ["run"]


def test_what_killed_processes_left_of_any_of_the_names_goes(tmp_path, dead_pid):
    live = os.getppid()
    (tmp_path / f".step-2.{dead_pid}.part").mkdir()
    (tmp_path / f".step-2.{live}.part").mkdir()
    (tmp_path / f".notes.{dead_pid}.part").mkdir()
    (tmp_path / f".step-3.{dead_pid}.old").mkdir()
    (tmp_path / "step-1").mkdir()
    clean_up(tmp_path, re.compile(r"step-\d+"))
    assert names(tmp_path) == [f".notes.{dead_pid}.part", f".step-2.{live}.part", "step-1", "step-3"]
    clean_up(tmp_path / "none", re.compile("a"))


def test_a_folder_is_never_half_there_while_it_is_removed(tmp_path, monkeypatch):
    write_folder(tmp_path / "run", "old")
    seen = []
    monkeypatch.setattr(files.shutil, "rmtree", lambda path, **_: seen.append(Path(path).name))
    remove_folder(tmp_path / "run")
    assert names(tmp_path) == seen == [f".run.{os.getpid()}.part"]
    monkeypatch.undo()
    clean_up(tmp_path, re.compile("run"))
    assert names(tmp_path) == []


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    write_folder(tmp_path / "disk" / "run", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    write_folder(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and content(tmp_path / "disk" / "run") == "new"
    assert names(tmp_path) == ["disk", "link"] and names(tmp_path / "disk") == ["run"]


def test_a_folder_does_not_replace_a_file(tmp_path):
    (tmp_path / "run").write_text("old")
    with pytest.raises(UserError, match="run: a file stands where the folder should be"):
        write_folder(tmp_path / "run", "new")
    assert (tmp_path / "run").read_text() == "old" and names(tmp_path) == ["run"]


def test_a_file_does_not_replace_a_folder(tmp_path):
    write_folder(tmp_path / "run", "old")
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "run", 1)
    assert content(tmp_path / "run") == "old" and names(tmp_path) == ["run"]


def test_check_target(tmp_path):
    (tmp_path / "file").write_text("")
    check_target(tmp_path / "file")
    check_target(tmp_path / "new" / "folders" / "a.mp4")
    assert names(tmp_path) == ["file"]
    with pytest.raises(UserError, match="a folder stands where the file should be"):
        check_target(tmp_path)
    with pytest.raises(UserError, match="file is not a folder"):
        check_target(tmp_path / "file" / "new" / "a.mp4")


def test_no_permission_is_seen_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="no permission to write"):
        check_target(tmp_path / "a")


def test_json_round_trip_and_what_is_no_json(tmp_path):
    data = {"b": [1, 2.5, None, True], "a": "ü"}
    write_json(tmp_path / "a.json", data)
    assert read_json(tmp_path / "a.json") == data and list(read_json(tmp_path / "a.json")) == ["b", "a"]
    assert (tmp_path / "a.json").read_text().endswith("}\n")
    (tmp_path / "foreign.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    assert read_json(tmp_path / "foreign.json") == data
    for name, text in [("cut", b'{"a": '), ("empty", b""), ("binary", b"\xff\xfe"), ("deep", b"[" * 10**6)]:
        (tmp_path / name).write_bytes(text)
        with pytest.raises(UserError, match=f"{name}: not valid JSON"):
            read_json(tmp_path / name)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="no such file"):
            read_json(path)
