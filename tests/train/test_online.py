"""Encoding on the fly gives to the bit the batches of a preprocessed set, in the same order, through resumes."""

import itertools
import json
import shutil

import pytest
import torch
from set_cases import BUCKETS, moving, write_clips
from test_run import assert_same_end, course

from core import keys
from core.errors import UserError
from infer import encoders
from infer.media import write_video
from train.config import Encode
from train.data import batches, first_fps, open_dataset, where
from train.online import open_online
from train.preprocess import Settings, Sources, preprocess
from train.recipe_data import fingerprint
from train.rows import I2V, ROW_TYPES, T2V
from train.run import train

CPU, KEY = torch.device("cpu"), keys.key(3)
STUDENT = "models.student.config"


@pytest.fixture(scope="module")
def sets(real, data, fitted, tmp_path_factory):
    """`sets(kind, models) -> (folder of the set, Encode)` with the same settings, each made once."""
    made = {}

    def make(kind: str, models: str):
        root = real if models == "wan" else fitted
        vae, text = root / "vae", root / "text_encoder"
        image = real / "image_encoder" if models == "wan" and kind == "i2v" else None
        if (kind, models) not in made:
            made[kind, models] = tmp_path_factory.mktemp("set") / "set"
            how = Settings(buckets=BUCKETS, fps=7.5, row_type=kind, clips_per_file=2)
            preprocess(data, made[kind, models], how, Sources(vae, text, image))
        given = {"vae": vae, "text_encoder": text, "image_encoder": image}
        given = {name: None if folder is None else str(folder) for name, folder in given.items()}
        return made[kind, models], Encode(buckets=BUCKETS, fps=7.5, **given)

    return make


def same(a, b) -> bool:
    """Whether two batches are equal to the bit."""
    assert (a.names, a.indices, a.text_lens) == (b.names, b.indices, b.text_lens)
    pairs = [(x[k], y[k]) for x, y in ((a.targets, b.targets), (a.conditions, b.conditions)) for k in x | y]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("models", ["wan", "codec"])
@pytest.mark.parametrize("kind", ["t2v", "i2v"])
@pytest.mark.parametrize("start", [0, 4])
def test_batches_are_those_of_the_preprocessed_set(sets, data, kind, models, start):
    """Over two epochs and from the middle of one; with one row a batch and with two."""
    folder, encode = sets(kind, models)
    stored = open_dataset(folder, ROW_TYPES[kind])
    online = open_online(data, ROW_TYPES[kind], encode, CPU)
    assert online.signatures == stored.signatures and (online.buckets == stored.buckets).all()
    assert len(online) == len(stored) == 5 and first_fps(online) == first_fps(stored) == 7.5
    for size in (1, 2):
        how = {"key": KEY, "batch_size": size, "start": start}
        pairs = zip(batches(stored, **how), batches(online, **how), strict=False)
        seen = list(itertools.islice(pairs, 2 * len(stored)))
        assert all(same(a, b) for a, b in seen)
        channels = {"text"} | ({"first_frame"} if kind == "i2v" else set())
        channels |= {"image"} if kind == "i2v" and models == "wan" else set()
        assert all(b.conditions.keys() == channels for _, b in seen)
        assert len({b.latents.shape for _, b in seen}) > 1


def test_opening_encodes_nothing_and_encoders_are_read_once(sets, data, monkeypatch):
    _, encode = sets("i2v", "wan")  # the first test that asks for a set makes it
    reads, read_model = [], encoders.read_model
    monkeypatch.setattr(encoders, "read_model", lambda name, *a: reads.append(name) or read_model(name, *a))
    with monkeypatch.context() as patch:
        patch.setattr("nn.wan_vae.load", lambda *a, **k: pytest.fail("the VAE was read"))
        patch.setattr("train.preprocess.encode.read_video", lambda *a, **k: pytest.fail("a clip was decoded"))
        online = open_online(data, I2V, encode, CPU)
    assert reads == []
    list(itertools.islice(batches(online, key=KEY, batch_size=1), 7))
    assert reads == ["UMT5EncoderModel", "CLIPVisionModel"]


def test_unusable_clips_are_refused_at_the_start_or_left_out(sets, tmp_path):
    _, encode = sets("t2v", "codec")
    data = write_clips(tmp_path, extra=["gone.mp4", "tiny.mp4"])
    write_video(tmp_path / "tiny.mp4", moving(0, 9, 8, 8), 8)
    with pytest.raises(UserError) as error:
        open_online(data, T2V, encode, CPU)
    lines = str(error.value).splitlines()
    assert "2 of 7 clips cannot be used (training.data.encode.skip_unusable: true leaves them out)" in lines[0]
    assert "row 1: gone.mp4: no such file" in lines[1] and "row 2: tiny.mp4: misshapen" in lines[2]
    said = []
    online = open_online(data, T2V, encode.model_copy(update={"skip_unusable": True}), CPU, said.append)
    assert len(said) == 1 and "gone.mp4: no such file" in said[0] and "tiny.mp4" in said[0]
    rows = [row for row in json.loads(data.read_text()) if row["path"] not in ("gone.mp4", "tiny.mp4")]
    (tmp_path / "whole.json").write_text(json.dumps(rows))
    whole = open_online(tmp_path / "whole.json", T2V, encode, CPU)
    pairs = zip(*(batches(d, key=KEY, batch_size=2) for d in (online, whole)), strict=False)
    assert all(same(a, b) for a, b in itertools.islice(pairs, 6))
    assert fingerprint(online) == fingerprint(whole) and where(online, 1) == f"{data}, row 3 (1.mp4)"
    (tmp_path / "none.json").write_text(json.dumps([{"path": "gone.mp4", "caption": ""}]))
    with pytest.raises(UserError, match="1 of 1 clip cannot be used"):
        open_online(tmp_path / "none.json", T2V, encode.model_copy(update={"skip_unusable": True}), CPU)


def test_a_clip_that_goes_away_during_training_is_named(sets, tmp_path):
    _, encode = sets("t2v", "codec")
    online = open_online(write_clips(tmp_path), T2V, encode, CPU)
    (tmp_path / "1.mp4").unlink()
    with pytest.raises(UserError, match=r"1\.mp4: no such file"):
        list(itertools.islice(batches(online, key=KEY, batch_size=1), 5))


def test_a_clip_that_changes_during_training_is_named(sets, data, tmp_path):
    """Not one that is only touched or copied."""
    _, encode = sets("t2v", "codec")
    copied = shutil.copytree(data.parent, tmp_path / "clips")
    online = open_online(copied / data.name, T2V, encode, CPU)
    shutil.copyfile(copied / "1.mp4", copied / "copy")
    (copied / "copy").replace(copied / "1.mp4")
    list(itertools.islice(batches(online, key=KEY, batch_size=1), 5))
    write_video(copied / "1.mp4", moving(8, 6, 48, 32), 8)
    with pytest.raises(UserError, match=r"1\.mp4: changed since training began"):
        list(itertools.islice(batches(online, key=KEY, batch_size=1), 5))


def test_a_run_does_not_resume_with_an_edited_clip(recipe, sets, data, tmp_path):
    copied = shutil.copytree(data.parent, tmp_path / "clips")
    _, online = changes_of(*sets("t2v", "codec"), copied / data.name, "t2v")
    train(recipe(tmp_path / "run", {**online, "training.loop.max_train_steps": 1}))
    write_video(copied / "1.mp4", moving(8, 6, 48, 32), 8)
    with pytest.raises(UserError, match="cannot be resumed(.|\n)*fingerprint"):
        train(recipe(tmp_path / "run", {**online, "training.checkpoint.resume_from_checkpoint": "latest"}))


def test_the_identity_changes_when_samples_would(sets, data, fitted, tmp_path):
    _, encode = sets("t2v", "codec")
    base = fingerprint(open_online(data, T2V, encode, CPU))
    copied = shutil.copytree(data.parent, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    assert fingerprint(open_online(copied / data.name, T2V, encode, CPU)) == base
    rows = json.loads(data.read_text())
    changed = data.parent / "other.json"
    changed.write_text(json.dumps([rows[0] | {"caption": "another"}, *rows[1:]]))
    others = [open_online(changed, T2V, encode, CPU)]
    write_video(copied / "3.mp4", moving(9, 5, 56, 40), 8)  # the same name, size and length, other contents
    others.append(open_online(copied / data.name, T2V, encode, CPU))
    for change in ({"fps": 7.6}, {"max_crop": 0.6}, {"buckets": BUCKETS[:2] + ("32x32",)}):
        others.append(open_online(data, T2V, encode.model_copy(update=change), CPU))
    assert len({base, *map(fingerprint, others)}) == 1 + len(others)
    assert fingerprint(open_online(data, T2V, encode, CPU)) == base


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vae": None}, "models that encode needs\n  - vae: give its folder, or model"),
        ({"vae": None, "text_encoder": None}, "text_encoder: give its folder, or model"),
        ({"text_encoder": "nothing"}, "nothing/config.json: no such file"),
        ({"buckets": None}, "num_frames, height, width missing"),
        ({"buckets": ("48x36x9",)}, "height is 36, expected a multiple of 8"),
        ({"image_encoder": "x"}, "image_encoder: t2v rows have no image features"),
    ],
)
def test_bad_settings_are_refused_before_a_clip_is_read(sets, data, monkeypatch, change, message):
    encode = sets("t2v", "codec")[1].model_copy(update=change)  # the first test that asks for a set makes it
    monkeypatch.setattr("train.preprocess.buckets.probe", lambda *a: pytest.fail("read a clip"))
    with pytest.raises(UserError, match=message):
        open_online(data, T2V, encode, CPU)


# --- whole runs -----------------------------------------------------------------------------------------------


def changes_of(folder, encode, data, kind) -> list[dict]:
    """The changes of the shared recipe that train on a set, and on the same clips encoded on the fly."""
    base = {"training.data.preprocessed_data_type": kind, "training.data.train_batch_size": 1}
    if kind == "i2v":
        base |= {f"{STUDENT}.in_channels": 12}
    if encode.image_encoder is not None:
        base |= {f"{STUDENT}.image_dim": 16, f"{STUDENT}.added_kv_proj_dim": 24}
    if "fitted" not in str(encode.vae):
        base |= {f"{STUDENT}.text_dim": 32}
    own = {"training.data.data_path": str(data), "training.data.encode": encode.model_dump(mode="json")}
    return [{**base, "training.data.data_path": str(folder)}, {**base, **own}]


@pytest.mark.parametrize("kind, models", [("t2v", "codec"), ("i2v", "wan")])
def test_runs_on_both_are_one_run_and_resume(recipe, sets, data, tmp_path, kind, models):
    folder, encode = sets(kind, models)
    stored, online = changes_of(folder, encode, data, kind)
    total, resume = "training.loop.max_train_steps", "training.checkpoint.resume_from_checkpoint"
    train(recipe(tmp_path / "stored", stored))
    train(recipe(tmp_path / "cut", {**online, total: 5}))
    train(recipe(tmp_path / "cut", {**online, resume: "latest"}))
    assert course(tmp_path / "cut") == course(tmp_path / "stored") and len(course(tmp_path / "cut")) == 8
    assert_same_end(tmp_path / "cut", tmp_path / "stored", 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"training.data.dataloader_type": "streaming"}, "dataloader_type must be map with encode"),
        ({"training.data.dataloader_num_workers": 2}, "dataloader_num_workers must be 0 with encode, got 2"),
        ({"training.data.data_path": "folder"}, "data_path must be one metadata file .*.csv, .json, .jsonl. with"),
        ({"training.data.data_path": ["a.json", "b.json"]}, r"data_path must be one metadata file .*\[\"a.json\""),
        ({"training.data.encode.bucket": "1x1"}, "encode.bucket is not a known key .did you mean 'buckets'"),
    ],
)
def test_recipes_that_cannot_be_are_refused(recipe, sets, data, tmp_path, change, message):
    _, online = changes_of(*sets("t2v", "codec"), data, "t2v")
    with pytest.raises(UserError, match=message):
        recipe(tmp_path / "run", {**online, **change})
