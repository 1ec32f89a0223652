"""Preprocessing: videos and captions in, a set that the data loader, the codec and the embedder agree on out."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from core import keys
from core.errors import UserError
from core.geometry import to_frames, to_video
from infer.media import psnr, read_video, write_video
from nn import patch_codec, text_hash
from train.data import Reader, batches, check_latents, check_text, open_dataset
from train.preprocess import Settings, preprocess, read_metadata
from train.preprocess.__main__ import main
from train.rows import T2V

SIZE = ["--num-frames", "9", "--height", "32", "--width", "48"]


def moving(seed: int, frames: int = 13, height: int = 40, width: int = 56) -> torch.Tensor:
    """Coloured waves that move, uint8 [T, H, W, 3]."""
    t, y, x = torch.meshgrid(*(torch.arange(n).float() for n in (frames, height, width)), indexing="ij")
    waves = [torch.sin((0.2 + 0.1 * c) * x + (0.3 - 0.05 * seed) * y + 0.4 * t + c) for c in range(3)]
    return (127 + 100 * torch.stack(waves, -1)).round().to(torch.uint8)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Three clips, a metadata file in each format, and damaged clips beside them."""
    folder = tmp_path_factory.mktemp("videos")
    for i in range(3):
        write_video(folder / "clips" / f"{i}.mp4", moving(i), 20)
    write_video(folder / "short.mp4", moving(0, frames=7), 20)
    (folder / "corrupt.mp4").write_bytes((folder / "short.mp4").read_bytes()[:-200])
    rows = [{"path": f"clips/{i}.mp4", "caption": f"waves, number {i % 2}"} for i in range(3)]
    (folder / "v.json").write_text(json.dumps(rows))
    (folder / "data.json").write_text(json.dumps({"data": rows}))
    (folder / "v.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    with (folder / "v.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["video", "caption"])
        writer.writeheader()
        writer.writerows({"video": row["path"], "caption": row["caption"]} for row in rows)
    return folder


@pytest.fixture(scope="module")
def made(videos, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "set"
    assert main(["--data", str(videos / "v.csv"), "--output", str(output), *SIZE, "--rows-per-group", "2"]) == 0
    return output


def test_metadata_is_the_same_in_every_format(videos):
    entries = read_metadata(videos / "v.csv")
    assert [e.caption for e in entries] == ["waves, number 0", "waves, number 1", "waves, number 0"]
    assert entries[1].path == videos / "clips" / "1.mp4" and entries[1].name == "clips/1.mp4"
    assert all(read_metadata(videos / name) == entries for name in ("v.json", "data.json", "v.jsonl"))


def test_the_output_folder(made):
    found = sorted(str(p.relative_to(made)) for p in made.rglob("*") if p.is_file())
    assert found == [
        "data/part-00000.parquet",
        "preprocess.json",
        "report.json",
        "reports/part-00000.json",
        "text_encoder/config.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "validation.json",
    ]
    manifest = json.loads((made / "preprocess.json").read_text())
    assert manifest["settings"]["num_frames"] == 9 and manifest["clips"] == 3 and manifest["versions"]["torch"]
    assert manifest["complete"] is True and manifest["models"]["vae"]["folder"] == "vae"
    prompts = json.loads((made / "validation.json").read_text())
    size = {"num_frames": 9, "height": 32, "width": 48}
    assert prompts == {"data": [{"caption": f"waves, number {i}", **size} for i in (0, 1)]}
    file = pq.ParquetFile(made / "data" / "part-00000.parquet")
    assert file.schema_arrow.equals(T2V.schema)
    assert [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)] == [2, 1]
    encodings = {e for c in range(file.metadata.num_columns) for e in file.metadata.row_group(0).column(c).encodings}
    assert not any("DICTIONARY" in e for e in encodings)  # a page then holds a row or two


def test_rows_are_what_codec_and_embedder_give(videos, made):
    dataset = open_dataset(made, T2V)
    check_latents(dataset, 32, (1, 2, 2), (32, 3, 4, 6))
    check_text(dataset, 64)
    params, cfg = patch_codec.load(made / "vae")
    text_cfg = text_hash.load(made / "text_encoder")
    rebuilt_db = []
    for i in range(3):
        row = Reader(dataset).sample(i)
        clip = read_video(videos / "clips" / f"{i}.mp4", num_frames=9, size=(32, 48))
        assert torch.equal(row["vae_latent"], patch_codec.encode(params, cfg, to_video(clip.frames)[None])[0])
        assert torch.equal(row["text_embedding"], text_hash.embed(text_cfg, [row["caption"]])[0])
        assert (row["id"], row["file_name"]) == (f"clips/{i}.mp4", f"{i}.mp4")
        assert (row["width"], row["height"], row["num_frames"], row["fps"]) == (48, 32, 9, 20.0)
        assert row["duration_sec"] == pytest.approx(9 / 20)
        rebuilt = to_frames(patch_codec.decode(params, cfg, row["vae_latent"][None])[0])
        rebuilt_db.append(psnr(rebuilt, clip.frames))
    assert min(rebuilt_db) > 30  # waves need few components
    manifest = json.loads((made / "preprocess.json").read_text())
    assert manifest["codec_psnr_db"] == pytest.approx(sum(rebuilt_db) / 3, abs=0.01)
    batch = next(batches(dataset, key=keys.key(0), batch_size=3))
    assert batch.latents.shape == (3, 32, 3, 4, 6) and batch.text.shape == (3, 3, 64)


def test_a_second_run_gives_the_same_set(videos, made, tmp_path):
    again = tmp_path / "again"
    assert main(["--data", str(videos / "v.json"), "--output", str(again), *SIZE, "--rows-per-group", "2"]) == 0
    for name in ("data/part-00000.parquet", "preprocess.json", "validation.json"):
        assert (again / name).read_bytes() == (made / name).read_bytes()
    one, two = patch_codec.load(made / "vae")[0], patch_codec.load(again / "vae")[0]
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_fps_resamples_and_reaches_the_rows(videos, tmp_path):
    settings = Settings(num_frames=5, height=32, width=48, fps=10.0, latent_channels=8)
    preprocess(videos / "v.csv", tmp_path / "set", settings)
    row = Reader(open_dataset(tmp_path / "set", T2V)).sample(0)
    assert row["fps"] == 10 and row["vae_latent"].shape == (8, 2, 4, 6) and row["duration_sec"] == 0.5
    params, cfg = patch_codec.load(tmp_path / "set" / "vae")
    clip = read_video(videos / "clips" / "0.mp4", size=(32, 48)).frames[:9:2]
    assert torch.equal(row["vae_latent"], patch_codec.encode(params, cfg, to_video(clip)[None])[0])


def failing(capsys, *args) -> str:
    """Runs the command, which must fail with status 2 and write nothing; returns what it said."""
    output = Path(args[args.index("--output") + 1])
    before = sorted(output.parent.rglob("*"))
    assert main([str(a) for a in args]) == 2
    assert sorted(output.parent.rglob("*")) == before
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    return text


BAD = ["nothing.mp4: no such file", "corrupt.mp4: cannot be decoded", "short.mp4: too short: it has 7 frames; the "
       "shortest bucket takes 9", "v.csv: cannot be decoded"]  # fmt: skip


@pytest.fixture(scope="module")
def bad(videos):
    data = videos / "bad.jsonl"
    names = ["clips/0.mp4", "nothing.mp4", "corrupt.mp4", "short.mp4", "v.csv"]
    data.write_text("\n".join(json.dumps({"path": n, "caption": "x"}) for n in names))
    return data


def test_with_strict_every_bad_clip_is_listed_and_nothing_is_written(bad, tmp_path, capsys):
    text = failing(capsys, "--data", bad, "--output", tmp_path / "out", *SIZE, "--strict")
    assert "4 of 5 clips cannot be used" in text and all(part in text for part in BAD)


def test_bad_clips_are_reported_and_the_rest_is_encoded(bad, tmp_path, capsys):
    assert main(["--data", str(bad), "--output", str(tmp_path / "out"), *SIZE]) == 1
    text = capsys.readouterr().err
    assert "4 of 5 clips were not used" in text and all(part in text for part in BAD)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["clips"], report["rows"], report["unusable_clips"], report["buckets"]) == (5, 1, 4, {"48x32x9": 1})
    assert [(u["row"], u["name"]) for u in report["unusable"]] == [
        (1, "nothing.mp4"), (2, "corrupt.mp4"), (3, "short.mp4"), (4, "v.csv")
    ]  # fmt: skip
    assert all(f"{u['name']}: {u['reason']}".startswith(part) for u, part in zip(report["unusable"], BAD, strict=True))
    assert [Reader(open_dataset(tmp_path / "out", T2V)).sample(i)["id"] for i in range(1)] == ["clips/0.mp4"]


def test_when_no_clip_can_be_used_nothing_is_written(bad, tmp_path, capsys):
    (bad.parent / "none.jsonl").write_text("\n".join(bad.read_text().splitlines()[1:]))
    text = failing(capsys, "--data", bad.parent / "none.jsonl", "--output", tmp_path / "out", *SIZE)
    assert "4 of 4 clips cannot be used" in text and all(part in text for part in BAD)


def test_a_long_list_of_bad_clips_is_cut_on_the_terminal_only(videos, tmp_path, capsys):
    rows = [{"path": "clips/0.mp4", "caption": "x"}] + [{"path": f"no{i}.mp4", "caption": "x"} for i in range(25)]
    (videos / "many.json").write_text(json.dumps(rows))
    assert main(["--data", str(videos / "many.json"), "--output", str(tmp_path / "out"), *SIZE]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 22 and "no19.mp4" in lines[20] and lines[21].endswith("and 5 more, see report.json")
    assert len(json.loads((tmp_path / "out" / "report.json").read_text())["unusable"]) == 25


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "x", "must end in .csv, .json, .jsonl"),
        ("a.csv", None, "a.csv: no such file"),
        ("a.csv", "path,text\nx.mp4,hello\n", "row 0 path is 'x.mp4' and caption is None"),
        ("a.csv", "file,caption\nx.mp4,hello\n", "row 0 needs one of path or video and has 0 (its keys: file"),
        ("a.csv", "path,caption\n", "a.csv: no rows"),
        ("a.json", "{", "a.json: not valid JSON"),
        ("a.json", '{"rows": []}', 'expected a list of rows or {"data": [...]}'),
        ("a.json", '[3, {"path": "a", "video": "b", "caption": ""}]', "2 of 2 rows cannot be used"),
        ("a.json", '[{"path": "a", "caption": 5}]', "caption is 5, expected two strings"),
        ("a.jsonl", '{"path": "a"\n{]\n', "line 2: not valid JSON"),
        ("a.csv", b"path,caption\nx.mp4,\xff\xfe\n", "cannot be read as UTF-8"),
    ],
)
def test_bad_metadata_is_named(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in failing(capsys, "--data", tmp_path / name, "--output", tmp_path / "out", *SIZE)


def test_bad_settings_are_refused_before_a_clip_is_read(videos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.preprocess.buckets.probe", lambda *a: pytest.fail("read a clip"))
    common = ["--data", videos / "v.csv", "--output", tmp_path / "out"]
    text = failing(capsys, *common, "--num-frames", 10, "--height", 30, "--width", 48)
    assert "num_frames is 10, expected 4k+1: nearest valid 9 or 13" in text
    assert "height is 30, expected a multiple of 8: nearest valid 24 or 32" in text
    for flag, value, message in (
        ("--latent-channels", 0, "latent_channels is 0, expected 1 to 192"),
        ("--text-dim", 7, "dim is 7, expected a positive even number"),
        ("--text-max-length", 0, "max_length is 0"),
        ("--rows-per-group", 0, "rows_per_group is 0"),
        ("--clips-per-file", 0, "clips_per_file is 0"),
        ("--fps", 0, "fps is 0.0, expected a positive number"),
        ("--max-crop", 1, "max_crop is 1.0, expected at least 0 and below 1"),
        ("--max-upscale", 0.5, "max_upscale is 0.5, expected at least 1"),
        ("--buckets", "48x32x9", "num_frames: give either it or buckets"),
        ("--image-encoder", videos, "image_encoder: t2v rows have no image features"),
        ("--vae", videos / "nothing", "nothing/config.json: no such file"),
    ):
        assert message in failing(capsys, *common, *SIZE, flag, value)


def test_an_older_set_is_kept_unless_told_and_other_folders_always(videos, tmp_path, capsys):
    output = tmp_path / "set"
    command = ["--data", str(videos / "v.csv"), "--output", str(output), *SIZE]
    assert main(command) == 0
    old = (output / "data" / "part-00000.parquet").read_bytes()
    text = failing(capsys, *command, "--fps", "10", "--text-dim", "32")
    assert "already holds another set" in text and "settings.fps: recorded None, now 10.0" in text
    assert "settings.text_dim: recorded 64, now 32" in text and "--overwrite" in text
    # A failed --overwrite keeps the old set.
    failing(capsys, *command, "--num-frames", "33", "--overwrite")
    assert (output / "data" / "part-00000.parquet").read_bytes() == old
    (output / "stale.txt").write_text("x")
    assert main([*command, "--latent-channels", "8", "--overwrite"]) == 0
    assert open_dataset(output, T2V).shapes == ((8, 3, 4, 6),) and not (output / "stale.txt").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    for extra in ([], ["--overwrite"]):
        text = failing(capsys, "--data", videos / "v.csv", "--output", tmp_path / "other", *SIZE, *extra)
        assert "is not a preprocessed set" in text


def test_a_failure_while_a_set_is_begun_leaves_nothing(videos, tmp_path, monkeypatch):
    def fail(*args):
        raise UserError("disk full")

    monkeypatch.setattr(text_hash, "save", fail)
    with pytest.raises(UserError, match="disk full"):
        preprocess(videos / "v.csv", tmp_path / "set", Settings(num_frames=9, height=32, width=48))
    assert not list(tmp_path.iterdir())


def test_the_command_line(videos, tmp_path):
    """As a process: help names the rule and the defaults, output is plain lines when it is not a terminal."""

    def run(*args):
        command = [sys.executable, "-m", "train.preprocess", *map(str, args)]
        root = Path(__file__).parents[2]
        env = os.environ | {"COLUMNS": "200"}
        return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)

    shown = run("--help")
    assert shown.returncode == 0
    shown_text = " ".join(shown.stdout.split())
    for part in ("num_frames must be 4k+1 (1, 5, 9, ...)", "(default: 32)", "--overwrite", "example:", "nearest in"):
        assert part in shown_text
    done = run("--data", videos / "v.csv", "--output", tmp_path / "set", *SIZE)
    assert done.returncode == 0, done.stderr
    first = [line.split("  ")[0] for line in done.stdout.splitlines()[:6]]
    assert first == [f"{what} clips: {i}/3" for what in ("probing", "reading") for i in (1, 2, 3)]
    assert "the codec rebuilds the clips at" in done.stdout and "\x1b" not in done.stdout
    again = run("--data", videos / "v.csv", "--output", tmp_path / "set", *SIZE, "--fps", "7")
    assert again.returncode == 2 and again.stderr.startswith("error: ") and "Traceback" not in again.stderr


def test_texts_that_a_spreadsheet_or_a_cut_would_spoil_are_refused(tmp_path, capsys):
    """A caption with a comma but no quotes, half of an emoji, a column twice; a byte order mark alone is no fault."""
    cases = {
        "a.csv": ("path,caption\nx.mp4,a red, big ball\n", "row 0 has more fields than the header's 2"),
        "b.csv": ("path,caption,path\nx.mp4,a,y.mp4\n", "the header has columns twice"),
        "c.json": ('[{"path": "x.mp4", "caption": "a \\ud83d"}]', "no valid Unicode text"),
        "d.json": ('\ufeff[{"path": "x.mp4", "caption": 5}]', "caption is 5"),
        "e.jsonl": ('{"path": "x.mp4", "caption": "a\u2028b"}\n{"path": "x.mp4", "caption": 5}', "row 1 path is"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert message in failing(capsys, "--data", tmp_path / name, "--output", tmp_path / "out", *SIZE), name


def test_a_time_base_is_no_rate(videos, tmp_path, capsys):
    assert "fps is 1000000000.0" in failing(
        capsys, "--data", videos / "v.csv", "--output", tmp_path / "out", *SIZE, "--fps", "1e9"
    )
