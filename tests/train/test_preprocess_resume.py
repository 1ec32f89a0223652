"""What happens between two runs of preprocessing, or ends one: edited videos, signals, full disks, wrong paths."""

import errno
import json
import os
import shutil
import signal
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from set_cases import BUCKETS, moving

from core.errors import UserError
from infer.media import ClipInfo, read_video, write_video
from train.data import open_dataset
from train.preprocess import Settings, Sources, preprocess
from train.preprocess import run as run_module
from train.preprocess.__main__ import main
from train.preprocess.buckets import Bucket, survey
from train.preprocess.metadata import Entry
from train.preprocess.settings import Encoding
from train.preprocess.stamps import BLOCK, BLOCKS, changed, stamp
from train.preprocess.stop import Stopped, stop_signals
from train.rows import I2V, T2V
from train.setup import prepare


@pytest.fixture
def videos(data, tmp_path):
    """A copy of the videos, times included: their metadata file."""
    return shutil.copytree(data.parent, tmp_path / "clips") / data.name


@pytest.fixture
def make(videos, fitted):
    """`make(out, **options)`: a set of two clips to a part, with the models of `fitted`."""

    def make(out, row_type="t2v", **options):
        how = Settings(buckets=BUCKETS, clips_per_file=2, row_type=row_type)
        return preprocess(videos, out, how, Sources(fitted / "vae", fitted / "text_encoder"), **options)

    return make


def files(folder) -> dict:
    """Contents and times of every file of a set."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in found}


# --- clips that change ----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 3 * BLOCK), st.booleans(), st.integers(0, 10**9))
def test_a_stamp_tells_contents_from_times(tmp_path_factory, size, same_time, at):
    """Small files are compared to the last byte. A copy is the same, another size always another."""
    path = tmp_path_factory.mktemp("stamp") / "a.mp4"
    path.write_bytes(bytes(i % 251 for i in range(size)))
    before, time_ = stamp(path), path.stat().st_mtime_ns
    assert not changed(path, before)
    os.utime(path, ns=(at, at))
    assert not changed(path, before)
    if size:
        content = bytearray(path.read_bytes())
        content[at % size] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(time_, time_ + 1))
        assert changed(path, before)
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path, ns=(time_, time_ if same_time else time_ + 1))
    assert changed(path, before)
    path.unlink()
    assert not changed(path, before) and stamp(path) is None


def test_a_large_file_is_read_in_part(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(os.urandom(BLOCK) * (3 * BLOCKS))
    before, content = stamp(path), bytearray(path.read_bytes())
    for at in (0, len(content) - 1):  # both ends are among the blocks
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        os.utime(path, ns=(0, 0))
        assert changed(path, before)


def test_an_edited_clip_is_encoded_again_with_its_part_alone(make, videos, tmp_path):
    """Also in a complete set, and with the picture of validation. Clips that were touched, copied or removed do not
    count, since nothing would become another.
    """
    make(tmp_path / "set", "i2v")
    before = files(tmp_path / "set")
    write_video(videos.parent / "0.mp4", moving(9, 13, 40, 56), 8)
    os.utime(videos.parent / "1.mp4")
    (videos.parent / "2.mp4").rename(videos.parent / "gone")
    said = []
    make(tmp_path / "set", "i2v", log=said.append)
    assert said == ["1 clip changed since being encoded, so 1 part will be made again: 0.mp4"]
    after = files(tmp_path / "set")
    other = {"data/part-00000.parquet", "reports/part-00000.json", "validation/000000.png"}
    assert {name for name in before if after[name][0] != before[name][0]} == other
    assert {name for name in before if after[name][1] != before[name][1]} == other | {"preprocess.json"}
    (videos.parent / "gone").rename(videos.parent / "2.mp4")
    make(tmp_path / "whole", "i2v")
    whole = files(tmp_path / "whole")
    assert all(after[name][0] == data for name, (data, _) in whole.items() if not name.startswith("reports/"))
    first = read_video(videos.parent / "0.mp4", num_frames=1, size=(32, 48)).frames[0]
    assert torch.equal(read_video(tmp_path / "set" / "validation" / "000000.png").frames[0], first)
    make(tmp_path / "set", "i2v", log=said.append)
    assert len(said) == 1 and files(tmp_path / "set") == after


def test_a_set_without_stamps_is_finished_as_it_is(make, videos, tmp_path):
    """Sets that were made before there were any are not made again."""
    make(tmp_path / "set")
    for path in (tmp_path / "set" / "reports").iterdir():
        report = json.loads(path.read_text())
        assert len(report.pop("stamps")) == report["rows"]
        path.write_text(json.dumps(report))
    before = files(tmp_path / "set")
    write_video(videos.parent / "0.mp4", moving(9, 13, 40, 56), 8)
    make(tmp_path / "set")
    assert files(tmp_path / "set") == before and len(open_dataset(tmp_path / "set", T2V)) == 5


def test_prompts_have_the_sizes_of_their_clips(make, tmp_path):
    """Of a set with several buckets, also where a clip before them could not be used."""
    make(tmp_path / "set")
    entries = json.loads((tmp_path / "set" / "validation.json").read_text())["data"]
    sizes = [(e["caption"], e["num_frames"], e["height"], e["width"]) for e in entries]
    assert sizes == [("a red ball", 9, 32, 48), ("the green meadow", 5, 48, 32), ("", 5, 48, 32),
                     ("a dog's blue cube", 1, 32, 48)]  # fmt: skip


# --- signals --------------------------------------------------------------------------------------------------


def command(videos, fitted, out, *more) -> list[str]:
    return ["--data", str(videos), "--output", str(out), "--buckets", ",".join(BUCKETS), "--clips-per-file", "2",
            "--device", "cpu", "--vae", str(fitted / "vae"), *more]  # fmt: skip


def signal_at(monkeypatch, number, clip):
    """Sends a signal to this process when clip `clip` is to be encoded."""
    read = run_module.read_clip

    def failing(entry, *args):
        if entry.name.startswith(str(clip)):
            os.kill(os.getpid(), number)
            time.sleep(5)  # cut short: the handler raises
        return read(entry, *args)

    monkeypatch.setattr(run_module, "read_clip", failing)


@pytest.mark.parametrize(
    "name, status, clip, done",
    [("SIGTERM", 143, 0, 0), ("SIGTERM", 143, 3, 2), ("SIGINT", 130, 1, 0), ("SIGINT", 130, 4, 4)],
)
def test_a_signal_ends_with_one_line_and_the_same_command_goes_on(
    videos, fitted, tmp_path, capsys, monkeypatch, name, status, clip, done
):
    argv, handlers = command(videos, fitted, tmp_path / "set"), [signal.getsignal(s) for s in (15, 2)]
    assert main(command(videos, fitted, tmp_path / "whole")) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        signal_at(patch, signal.Signals[name], clip)
        assert main(argv) == status
    said = capsys.readouterr().err.splitlines()
    assert said == [f"stopped by {name}: {done} of 5 clips are done in {tmp_path / 'set'}; run the same command again "
                    "to go on"]  # fmt: skip
    assert [signal.getsignal(s) for s in (15, 2)] == handlers
    begun = files(tmp_path / "set")
    assert not [path for path in begun if ".part" in path] and sum("data/" in path for path in begun) == done // 2
    assert main(argv) == 0
    after = files(tmp_path / "set")
    assert {k: v for k, (v, _) in after.items()} == {k: v for k, (v, _) in files(tmp_path / "whole").items()}
    assert all(after[path] == begun[path] for path in begun if "part-" in path)


def test_a_signal_before_a_set_is_begun_leaves_what_was_there(videos, fitted, tmp_path, capsys, monkeypatch):
    """No set, and the set that is to be replaced; one that is gone on with is counted."""
    out = tmp_path / "set"

    def stopped(*more) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("train.preprocess.run.survey", lambda *a: os.kill(os.getpid(), signal.SIGTERM))
            assert main(command(videos, fitted, out, *more)) == 143
        (line,) = capsys.readouterr().err.splitlines()
        return line

    nothing = f"stopped by SIGTERM before a clip was encoded, {out} is as it was; run the same command again"
    assert stopped() == nothing and not out.exists()
    assert main(command(videos, fitted, out)) == 0
    before = files(out)
    assert stopped("--fps", "4", "--overwrite") == nothing and files(out) == before
    (out / "reports" / "part-00001.json").unlink()
    counted = f"stopped by SIGTERM: 3 of 5 clips are done in {out}; run the same command again to go on"
    assert stopped() == counted
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert stopped() == f"rank 1: {counted}"


def test_a_repeated_signal_does_not_spoil_the_end(monkeypatch):
    """torchrun passes on the terminal's; a later one is a person's."""
    now = [0.0]
    monkeypatch.setattr("train.signals.time.monotonic", lambda: now[0])
    with stop_signals() as received:
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGINT]
        now[0] = 6.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_destructor_is_not_lost(videos, fitted, tmp_path, capsys, monkeypatch):
    """Python drops what is raised there; the next clip is then the end."""
    read, seen = run_module.read_clip, []

    class Late:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # cut short

    def reading(entry, *args):
        seen.append(entry.name)
        late = Late() if entry.name == "2.mp4" else None
        del late
        return read(entry, *args)

    monkeypatch.setattr(run_module, "read_clip", reading)
    assert main(command(videos, fitted, tmp_path / "set")) == 143
    assert seen == ["0.mp4", "1.mp4", "2.mp4"] and "2 of 5 clips are done" in capsys.readouterr().err


def test_a_signal_does_not_wait_for_the_clips_still_to_be_probed(tmp_path, monkeypatch):
    """200 clips of 10 ms, and a signal at the first; those that run are waited for."""
    seen = []

    def probe(path, fps):
        seen.append(path)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return ClipInfo(9, 9, 8.0, 32, 48)

    monkeypatch.setattr("train.preprocess.buckets.probe", probe)
    entries = [Entry(f"{i}.mp4", tmp_path / f"{i}.mp4", "") for i in range(200)]
    with pytest.raises(KeyboardInterrupt):
        survey(range(200), entries, [Bucket(48, 32, 9)], Encoding())
    assert len(seen) < 150  # a second of clips is left; the main thread needs no half of it, on a slow machine either


# --- disks and paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data/part-00001.parquet", "reports/part-00001.json", "report.json",
                                  "validation/000000.png", "preprocess.json"])  # fmt: skip
def test_a_full_disk_names_the_file_and_keeps_finished_parts(make, videos, tmp_path, monkeypatch, name):
    replace = os.replace

    def full(part, path):
        # preprocess.json is also there at the beginning, when nothing is to be kept yet
        if str(path).endswith(name) and (tmp_path / "set" / "data").is_dir():
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(part, path)

    with monkeypatch.context() as patch:
        patch.setattr("core.files.os.replace", full)
        with pytest.raises(UserError) as error:
            make(tmp_path / "set", "i2v")
    said = "cannot be written: No space left on device; make room; finished parts are kept"
    assert str(error.value).startswith(f"{tmp_path / 'set' / name}: {said}")
    before = files(tmp_path / "set")
    assert "data/part-00000.parquet" in before and not [path for path in before if path.endswith(".part")]
    make(tmp_path / "set", "i2v")
    after = files(tmp_path / "set")
    assert len(open_dataset(tmp_path / "set", I2V)) == 5
    assert all(after[path] == before[path] for path in before if "part-00000" in path)


def test_a_full_disk_at_the_beginning_leaves_nothing(videos, tmp_path, monkeypatch, capsys):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("core.files.os.fsync", full)
    argv = command(videos, tmp_path, tmp_path / "set")[:-2]
    assert main(argv) == 2
    assert "No space left on device" in capsys.readouterr().err and not (tmp_path / "set").exists()


def test_folders_where_files_are_expected(videos, fitted, tmp_path, capsys):
    (videos.parent / "folder.mp4").mkdir()
    rows = json.loads(videos.read_text())
    videos.write_text(json.dumps([*rows, {"path": "folder.mp4", "caption": "a"}]))
    assert main(command(videos, fitted, tmp_path / "set")) == 1
    said = capsys.readouterr()
    assert "1 of 6 clips was not used:\n  - row 5: folder.mp4: is a folder, expected a video or a picture" in said.err
    assert main(command(videos.parent, fitted, tmp_path / "set")) == 2
    assert "is a folder, expected a metadata file (.csv, .json, .jsonl)" in capsys.readouterr().err


def test_one_clip_is_no_plural(videos, fitted, tmp_path, capsys):
    videos.write_text(json.dumps([{"path": "0.mp4", "caption": "a"}]))
    assert main(command(videos, fitted, tmp_path / "set")) == 0
    assert f"wrote {tmp_path / 'set'}: 1 row of 1 clip\n" in capsys.readouterr().out
    videos.write_text(json.dumps([{"path": "gone.mp4", "caption": "a"}]))
    assert main(command(videos, fitted, tmp_path / "other")) == 2
    assert "1 of 1 clip cannot be used" in capsys.readouterr().err


def test_the_folder_of_another_kind_of_model(videos, real, fitted, tmp_path, capsys):
    """What it is and what is expected; a pipeline's folder is pointed into."""

    def refused(flag, folder) -> str:
        argv = command(videos, fitted, tmp_path / "set")[:-2]
        assert main([*argv, flag, str(folder)]) == 2 and not (tmp_path / "set").exists()
        return capsys.readouterr().err

    other = f"{real / 'transformer'}: _class_name 'WanTransformer3DModel' cannot be run as a VAE by this version"
    ours = "'LatentreePatchCodec', 'AutoencoderKLWan', 'AutoencoderKLLTX2Video'"
    assert f"{other}, only {ours}" in refused("--vae", real / "transformer")
    assert "_class_name None (model_type is 'umt5') cannot be run as a VAE" in refused("--vae", real / "text_encoder")
    assert f"{real}/config.json: no such file; did you mean {real}/vae?" in refused("--vae", real)
    said = refused("--text-encoder", real / "vae")
    assert "text encoder None (_class_name is 'AutoencoderKLWan') cannot be run" in said and "'umt5'" in said


def test_clips_in_place_of_preprocessed_data(recipe, videos, tmp_path):
    changes = {"training.data.data_path": [str(tmp_path), str(videos)]}
    with pytest.raises(UserError) as error:
        prepare(recipe(tmp_path / "run", changes))
    assert str(error.value).startswith("training.data.data_path: clips instead of preprocessed data\n")
    how = f"{videos}: lists clips: run `python -m train.preprocess --data {videos} --output DIR` and name DIR, or set"
    assert f"{how} training.data.encode" in str(error.value)


def test_copies_of_the_clips_go_on_with_a_set(videos, make, tmp_path):
    """Their times are no part of what they are."""
    make(tmp_path / "set")
    before = files(tmp_path / "set")
    videos.parent.rename(tmp_path / "first")
    shutil.copytree(tmp_path / "first", videos.parent, copy_function=shutil.copyfile)
    make(tmp_path / "set", log=lambda text: pytest.fail(text))
    assert files(tmp_path / "set") == before
