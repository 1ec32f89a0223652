"""Sets: rows are what the models give, parts survive interruption, ranks share them, records refuse what differs."""

import json
import os
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from set_cases import BUCKETS, WORDS, moving, write_clips

from core.errors import UserError
from core.geometry import to_video
from infer import encoders
from infer.autoencoders import load_vae
from infer.encoders import load_image_encoder, load_text_encoder
from infer.media import read_video, write_video
from infer.prompts import read_prompts
from nn import patch_codec
from nn.wan_i2v import condition_clip
from train.components import beside
from train.config import Encode
from train.data import Reader, open_dataset
from train.preprocess import Settings, Sources, preprocess
from train.preprocess.__main__ import device_of, main, ranks
from train.preprocess.models import find_sources, open_models
from train.preprocess.parts import Part, parts_of
from train.preprocess.record import check_models, fingerprint, recorded_folders
from train.preprocess.run import encoder as encoder_of
from train.recipe_data import check_models as check_recipe_models
from train.rows import I2V, ROW_TYPES, T2V, decode_row
from train.setup import prepare

CPU = torch.device("cpu")


@pytest.fixture
def make(data, fitted):
    """`make(out, **changes)`: a set of two clips to a part, with the models of `fitted`."""

    def make(out, metadata=data, sources=Sources(fitted / "vae", fitted / "text_encoder"), how=None, **changes):
        changes = {"buckets": BUCKETS, "clips_per_file": 2, **changes}
        return preprocess(metadata, out, Settings(**changes), sources, **({} if how is None else how))

    return make


def state(folder) -> dict:
    """Contents and times of every file of a set."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def contents(folder) -> dict:
    return {name: data for name, (data, _) in state(folder).items()}


# --- rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_rows_are_what_the_models_of_a_folder_give(real, data, tmp_path, kind, monkeypatch):
    reads, read_model = [], encoders.read_model
    monkeypatch.setattr(encoders, "read_model", lambda name, *a: reads.append(name) or read_model(name, *a))
    argv = ["--data", str(data), "--output", str(tmp_path / "set"), "--model", str(real), "--row-type", kind]
    assert main([*argv, "--buckets", ",".join(BUCKETS), "--device", "cpu", "--clips-per-file", "2"]) == 0
    assert reads == ["UMT5EncoderModel", *(["CLIPVisionModel"] if kind == "i2v" else [])]  # once, for five clips
    vae, text = load_vae(real / "vae"), load_text_encoder(real / "text_encoder", keep=True)
    image = load_image_encoder(real / "image_encoder", keep=True)
    row_type, found = ROW_TYPES[kind], []
    for path in sorted((tmp_path / "set" / "data").iterdir()):
        found += [decode_row(row_type, row, "here") for row in pq.read_table(path).to_pylist()]
    buckets = [(32, 48, 9), (48, 32, 5), (32, 48, 9), (48, 32, 5), (32, 48, 1)]
    for row, (height, width, frames), words in zip(found, buckets, WORDS, strict=True):
        path = data.parent / row["id"]
        clip = read_video(path, num_frames=frames, size=(height, width))
        pixels = to_video(clip.frames)[None]
        assert torch.equal(row["vae_latent"], vae.encode(pixels)[0])
        assert torch.equal(row["text_embedding"], text.embed([words])[0])
        assert (row["width"], row["height"], row["num_frames"], row["fps"]) == (width, height, frames, clip.fps)
        assert row["media_type"] == ("image" if frames == 1 else "video") and row["caption"] == words
        if kind == "i2v":
            grey = torch.zeros_like(pixels)
            grey[:, :, 0] = pixels[:, :, 0]
            assert torch.equal(row["first_frame_latent"], vae.encode(grey)[0])
            assert torch.equal(row["clip_feature"], image.embed([clip.frames[0]])[0])
            assert torch.equal(row["pil_image"], clip.frames[0].permute(2, 0, 1))
    record = json.loads((tmp_path / "set" / "preprocess.json").read_text())
    assert record["models"]["vae"] == {
        "class": "AutoencoderKLWan", "folder": str(real / "vae"), "fingerprint": fingerprint(real / "vae")
    }  # fmt: skip
    prompts = read_prompts(tmp_path / "set" / "validation.json")
    assert [p.caption for p in prompts] == ["a red ball", "the green meadow", "", "a dog's blue cube"]
    if kind == "i2v":
        first = read_video(data.parent / "0.mp4", num_frames=9, size=(32, 48)).frames[0]
        assert torch.equal(read_video(prompts[0].image).frames[0], first)
    else:
        assert all(p.image is None for p in prompts)


def test_i2v_rows_without_an_image_encoder_have_no_feature(make, tmp_path):
    make(tmp_path / "set", row_type="i2v")
    dataset = open_dataset(tmp_path / "set", I2V)
    assert Reader(dataset).sample(0)["clip_feature"] is None and len(dataset.signatures) == 3


def test_two_first_frames_differ_and_so_do_their_conditions(data, fitted):
    """Not a stub: the condition depends on the first frame and on nothing else of the clip."""
    models = open_models(Sources(fitted / "vae", fitted / "text_encoder"), Settings(), CPU)
    one, other = (to_video(moving(i, 9, 32, 48))[None] for i in (0, 1))
    still = condition_clip(one[:, :, 0], 9)
    mixed = torch.cat([one[:, :, :1], other[:, :, 1:]], 2)
    assert torch.equal(condition_clip(mixed[:, :, 0], 9), still)
    assert not torch.equal(models.vae.encode(still), models.vae.encode(condition_clip(other[:, :, 0], 9)))


# --- parts ----------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 70))
def test_parts_are_consecutive_rows(clips, per_file):
    parts = parts_of(clips, per_file)
    assert [row for p in parts for row in range(p.first, p.stop)] == list(range(clips))
    assert all(p.stop - p.first == per_file for p in parts[:-1])
    assert [p.number for p in parts] == list(range(len(parts)))
    assert Part(12, 0, 1).name == "part-00012"


class Killed(BaseException):
    pass


def stop_after(monkeypatch, count: int):
    """Kills the process, so to speak, when clip `count` is to be encoded."""
    seen = []

    def failing(*args):
        encode = encoder_of(*args)

        def one(clip):
            seen.append(clip.row)
            if len(seen) > count:
                raise Killed
            return encode(clip)

        return one

    monkeypatch.setattr("train.preprocess.run.encoder", failing)
    return seen


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_run_that_was_killed_goes_on_and_gives_the_same_set(make, tmp_path, monkeypatch, done):
    """Finished parts keep their bytes and times, and their clips are neither read nor encoded again."""
    make(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, done)
        with pytest.raises(Killed):
            make(tmp_path / "set")
    before = state(tmp_path / "set")
    assert len([name for name in before if name.endswith(".parquet")]) == done // 2
    if done >= 2:
        with pytest.raises(UserError, match=r"not finished .run the same `python -m train.preprocess` again"):
            open_dataset(tmp_path / "set" / "data", T2V)
    seen = stop_after(monkeypatch, 99)
    make(tmp_path / "set")
    assert seen == list(range(done // 2 * 2, 5))
    after = state(tmp_path / "set")
    assert all(after[name] == before[name] for name in before if name.startswith(("data/", "reports/")))
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")
    make(tmp_path / "set")
    assert state(tmp_path / "set") == after and len(seen) == 5 - done // 2 * 2


def test_parts_that_are_missing_or_damaged_are_made_again_and_no_others(make, tmp_path):
    make(tmp_path / "set")
    before = state(tmp_path / "set")
    (tmp_path / "set" / "reports" / "part-00000.json").write_text("{")
    path = tmp_path / "set" / "data" / "part-00002.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=f"not finished.*\n  - {tmp_path / 'set'}: part-00000, part-00002$"):
        open_dataset(tmp_path / "set", T2V)
    make(tmp_path / "set")
    assert len(open_dataset(tmp_path / "set", T2V)) == 5
    after = state(tmp_path / "set")
    assert {n: d for n, (d, _) in after.items()} == {n: d for n, (d, _) in before.items()}
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {f"{d}/part-0000{i}.{e}" for i in (0, 2) for d, e in (("data", "parquet"), ("reports", "json"))
                       } | {"preprocess.json"}  # fmt: skip


def test_damage_found_by_decoding_is_reported_and_does_not_stop_the_run(make, tmp_path, monkeypatch):
    data = write_clips(tmp_path / "clips", extra=["damaged.mp4"])
    write_video(data.parent / "damaged.mp4", torch.randint(0, 255, (9, 40, 56, 3), dtype=torch.uint8), 8)
    content = bytearray((data.parent / "damaged.mp4").read_bytes())
    for i in range(len(content) * 2 // 3, len(content), 5):
        content[i] ^= 0x5A
    (data.parent / "damaged.mp4").write_bytes(content)
    done = make(tmp_path / "set", data)
    assert done.rows == 5 and [(u.row, u.name) for u in done.unusable] == [(1, "damaged.mp4")]
    assert done.unusable[0].reason.startswith("cannot be decoded as video")
    report = json.loads((tmp_path / "set" / "report.json").read_text())
    assert report["unusable_clips"] == 1 and report["unusable"][0]["row"] == 1
    assert [Reader(open_dataset(tmp_path / "set", T2V)).sample(i)["id"] for i in range(2)] == ["0.mp4", "1.mp4"]
    with pytest.raises(UserError, match="damaged.mp4: cannot be decoded"):
        make(tmp_path / "strict", data, how={"strict": True})


def test_a_repaired_clip_is_taken_only_when_asked(make, tmp_path):
    data = write_clips(tmp_path / "clips", extra=["late.mp4"])
    assert [u.reason for u in make(tmp_path / "set", data).unusable] == ["no such file"]
    before = state(tmp_path / "set")
    write_video(data.parent / "late.mp4", moving(7, 9, 32, 48), 8)
    make(tmp_path / "set", data)
    assert state(tmp_path / "set") == before
    assert make(tmp_path / "set", data, how={"retry_unusable": True}).unusable == ()
    after = state(tmp_path / "set")
    assert all(after[n] == before[n] for n in before if "part-00001" in n or "part-00002" in n)
    assert [Reader(open_dataset(tmp_path / "set", T2V)).sample(i)["id"] for i in range(2)] == ["0.mp4", "late.mp4"]


def test_a_part_without_a_usable_clip_has_no_rows(make, tmp_path):
    data = write_clips(tmp_path / "clips", extra=["a.mp4", "b.mp4", "c.mp4"])
    assert make(tmp_path / "set", data).rows == 5
    names = sorted(p.name for p in (tmp_path / "set" / "data").iterdir())
    assert names == ["part-00000.parquet", "part-00002.parquet", "part-00003.parquet"]
    before = state(tmp_path / "set")
    make(tmp_path / "set", data)
    assert state(tmp_path / "set") == before and len(open_dataset(tmp_path / "set", T2V)) == 5


# --- ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1)])
def test_ranks_in_any_order_make_the_set_of_one_process(make, tmp_path, order):
    make(tmp_path / "whole")
    for n, rank in enumerate(order, start=1):
        done = make(tmp_path / "set", how={"rank": rank, "world": len(order)})
        assert done.complete == (n == len(order))
        if n < len(order):
            with pytest.raises(UserError, match="not finished"):
                open_dataset(tmp_path / "set", T2V)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_a_rank_without_parts_or_without_usable_clips_does_not_stop_the_others(make, tmp_path):
    data = write_clips(tmp_path / "clips", extra=[f"{i}.avi" for i in range(5)])  # rows 1 to 5: part 1 and 2 have none
    make(tmp_path / "whole", data)
    for rank in (1, 2, 7, 6, 5, 4, 3, 0):
        done = make(tmp_path / "set", data, how={"rank": rank, "world": 8})
    assert done.complete and done.rows == 5 and len(done.unusable) == 5
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_the_command_under_torchrun(data, fitted, tmp_path, monkeypatch, capsys):
    argv = ["--data", str(data), "--output", str(tmp_path / "set"), "--buckets", ",".join(BUCKETS), "--device", "cpu",
            "--clips-per-file", "2", "--vae", str(fitted / "vae")]  # fmt: skip
    for rank, says in (("1", "rank 1: its 2 clips are done"), ("0", f"wrote {tmp_path / 'set'}: 5 rows of 5 clips")):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        assert main(argv) == 0 and says in capsys.readouterr().out
    assert len(open_dataset(tmp_path / "set", T2V)) == 5
    assert main([*argv, "--overwrite"]) == 2 and "2 processes cannot replace a set" in capsys.readouterr().err
    assert main([*argv[:-2], "--output", str(tmp_path / "fit")]) == 2
    assert "fit the codec once" in capsys.readouterr().err and not (tmp_path / "fit").exists()
    monkeypatch.setenv("RANK", "2")
    assert main(argv) == 2 and "RANK=2 and WORLD_SIZE=2" in capsys.readouterr().err


def test_where_ranks_come_from(monkeypatch):
    assert ranks({}) == (0, 1, 0) and ranks({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (5, 8, 1)
    with pytest.raises(UserError, match="RANK=a, WORLD_SIZE=None"):
        ranks({"RANK": "a"})
    monkeypatch.setattr("core.devices.available", lambda: ["cuda:0", "cuda:1", "cpu"])
    assert device_of("cuda", 8, 1) == torch.device("cuda:1") and device_of("cpu", 8, 1) == CPU
    assert device_of("cuda", 1, 0) == torch.device("cuda")
    with pytest.raises(UserError, match="cuda:5"):
        device_of(None, 8, 5)


# --- records --------------------------------------------------------------------------------------------------


def test_a_set_is_not_continued_with_anything_else(make, data, fitted, tmp_path):
    """All that differs comes in one message; --overwrite replaces the set."""
    make(tmp_path / "set")
    before = state(tmp_path / "set")
    other = write_clips(tmp_path / "clips", extra=["x.mp4"])
    codec = shutil.copytree(fitted / "vae", tmp_path / "codec")
    tree = load_file(codec / "diffusion_pytorch_model.safetensors")
    tree["first.mean"][3] += 1e-3
    text = json.loads((codec / "config.json").read_text())
    patch_codec.save(codec, tree, patch_codec.load(fitted / "vae")[1])
    assert json.loads((codec / "config.json").read_text()) == text
    with pytest.raises(UserError) as error:
        make(tmp_path / "set", other, Sources(codec, fitted / "text_encoder"), fps=4.0, row_type="i2v")
    for part in ("row_type: recorded 't2v', now 'i2v'", "settings.fps: recorded None, now 4.0",
                 "metadata.clips: recorded 5, now 6", "metadata.digest: recorded", "models.vae: recorded Latentree",
                 "give another --output, or --overwrite"):  # fmt: skip
        assert part in str(error.value)
    assert "models.text_encoder" not in str(error.value) and state(tmp_path / "set") == before
    moved = shutil.copytree(fitted, tmp_path / "moved")
    make(tmp_path / "set", sources=Sources(moved / "vae", moved / "text_encoder"))  # the same models elsewhere
    assert state(tmp_path / "set") == before
    make(tmp_path / "set", fps=4.0, how={"overwrite": True})
    assert json.loads((tmp_path / "set" / "preprocess.json").read_text())["settings"]["fps"] == 4.0


def test_overwrite_goes_on_with_an_unfinished_set_of_the_same_kind(make, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Killed):
            make(tmp_path / "set")
    before = state(tmp_path / "set")
    make(tmp_path / "set", how={"overwrite": True})
    after = state(tmp_path / "set")
    assert after["data/part-00000.parquet"] == before["data/part-00000.parquet"] and len(after) > len(before)


def test_a_fitted_codec_is_not_fitted_again(data, tmp_path, monkeypatch):
    how = Settings(buckets=BUCKETS, latent_channels=4, clips_per_file=2)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Killed):
            preprocess(data, tmp_path / "set", how)
    monkeypatch.setattr("train.preprocess.run.fit", lambda *a: pytest.fail("fitted again"))
    done = preprocess(data, tmp_path / "set", how)
    assert done.complete and done.psnr > 15


def test_fingerprints_tell_models_apart_and_copies_not(real, fitted, tmp_path):
    copy = shutil.copytree(real, tmp_path / "copy")
    for name in ("vae", "text_encoder", "image_encoder"):
        assert fingerprint(copy / name) == fingerprint(real / name)
        (weights,) = (copy / name).glob("*.safetensors")
        tree = load_file(weights)
        key = sorted(tree)[0]
        tree[key].view(-1)[0] += 1
        save_file(tree, weights, metadata={"format": "pt", "note": "another header"})
        changed = fingerprint(copy / name)
        assert changed != fingerprint(real / name)
        save_file(tree, weights, metadata={"format": "pt"})
        assert fingerprint(copy / name) == changed  # notes of the writer do not count
    prints = {fingerprint(copy / "text_encoder")}
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    prints.add(fingerprint(copy / "text_encoder"))
    config = json.loads((copy / "text_encoder" / "config.json").read_text())
    (copy / "text_encoder" / "config.json").write_text(json.dumps(config | {"num_layers": 1}))
    prints.add(fingerprint(copy / "text_encoder"))
    assert len(prints) == 3
    assert fingerprint(fitted / "text_encoder") != fingerprint(real / "text_encoder")  # a model without weights


def test_fingerprints_of_large_files_sample_them(tmp_path):
    """Size, header, and blocks at both ends and between; read in part only."""
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(3 << 20, dtype=torch.uint8), "b": torch.zeros(1 << 20, dtype=torch.uint8)}, path)
    first = fingerprint(tmp_path)
    content = path.read_bytes()
    for at in (len(content) - 1, len(content) - (4 << 20), len(content) - (4 << 20) + ((4 << 20) - (1 << 16)) // 15):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert fingerprint(tmp_path) != first, at
    path.write_bytes(content[:4])
    with pytest.raises(UserError, match="m.safetensors: not a safetensors file, or cut short"):
        fingerprint(tmp_path)


def test_runs_refuse_sets_of_other_models(make, fitted, tmp_path):
    make(tmp_path / "a")
    other = shutil.copytree(fitted, tmp_path / "other")
    config = json.loads((other / "text_encoder" / "config.json").read_text())
    (other / "text_encoder" / "config.json").write_text(json.dumps(config | {"position_scale": 0.5}))
    make(tmp_path / "b", sources=Sources(other / "vae", other / "text_encoder"))
    roots = [tmp_path / "a", tmp_path / "b" / "data" / "part-00000.parquet"]
    assert recorded_folders(roots, "vae") == [fitted / "vae", other / "vae"]
    check_models(roots[:1], {"vae": fitted / "vae", "text_encoder": fitted / "text_encoder", "image_encoder": None})
    with pytest.raises(UserError) as error:
        check_models(roots, {"vae": other / "vae", "text_encoder": None})
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and f"text_encoder: {tmp_path / 'b'} records latentree-hash" in lines[1]
    assert f"but {tmp_path / 'a'} records latentree-hash" in lines[1]
    with pytest.raises(UserError, match=f"{tmp_path / 'a'} records .*, but the run uses latentree-.*other/text_enc"):
        check_models(roots[:1], {"text_encoder": other / "text_encoder"})
    with pytest.raises(UserError, match="made with other models"):
        check_models([tmp_path], {})  # both sets below one folder
    published = tmp_path / "published"
    published.mkdir()
    check_models([published], {"vae": fitted / "vae"})


def test_training_finds_the_recorded_models_and_refuses_others(make, fitted, tmp_path, recipe):
    make(tmp_path / "set")
    assert beside([tmp_path / "set"], None, "vae") == fitted / "vae"
    changes = {"training.data.data_path": str(tmp_path / "set")}
    setup = prepare(recipe(tmp_path / "run", changes))
    found = setup.components.folders
    assert (found["vae"], found["text_encoder"]) == (fitted / "vae", fitted / "text_encoder")
    other = shutil.copytree(fitted / "vae", tmp_path / "vae")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"temporal": 4, "_note": "other"}))
    with pytest.raises(UserError, match=r"(?s)made with other models.*vae: .*set records .*but the run uses"):
        prepare(recipe(tmp_path / "run", changes | {"pipeline.vae": str(other)}))
    assert not (tmp_path / "run").exists()


def test_data_of_other_latents_than_the_base_model_are_refused(make, fitted, tmp_path, recipe):
    """What comes with init_from counts before the data's own; naming pipeline.vae says that it is on purpose."""
    make(tmp_path / "set")
    base = shutil.copytree(fitted / "vae", tmp_path / "base" / "vae").parent
    config = json.loads((base / "vae" / "config.json").read_text())
    (base / "vae" / "config.json").write_text(json.dumps(config | {"_note": "other"}))

    def based(changes, **data):
        made = recipe(tmp_path / "run", {"training.data.data_path": str(tmp_path / "set")} | changes)
        components = prepare(made).components
        student = made.models.student.model_copy(update={"init_from": str(base)})
        training = made.training.model_copy(update={"data": made.training.data.model_copy(update=data)})
        models = made.models.model_copy(update={"student": student})
        check_recipe_models(made.model_copy(update={"models": models, "training": training}), components)

    recorded = f"made with other models\n  - vae: {tmp_path / 'set'} records .*{base / 'vae'}"
    with pytest.raises(UserError, match=recorded):
        based({})
    encode = Encode(vae=str(fitted / "vae"), text_encoder=str(fitted / "text_encoder"))
    with pytest.raises(UserError, match=f"encode uses other models.*\n  - vae: {fitted / 'vae'}, not {base / 'vae'}"):
        based({}, encode=encode)
    for data in ({}, {"encode": encode}):
        based({"pipeline.vae": str(fitted / "vae")}, **data)


def test_where_models_come_from(real, fitted, tmp_path):
    none = (None, None, None)
    assert find_sources(None, *none, row_type="t2v") == Sources()
    assert find_sources(str(real), *none, row_type="t2v") == Sources(real / "vae", real / "text_encoder")
    expected = Sources(fitted / "vae", real / "text_encoder", real / "image_encoder")
    assert find_sources(str(real), fitted / "vae", None, None, row_type="i2v") == expected
    bare = shutil.copytree(real, tmp_path / "bare", ignore=shutil.ignore_patterns("image_*"))
    assert find_sources(str(bare), *none, row_type="i2v").image_encoder is None
    shutil.rmtree(bare / "vae")
    with pytest.raises(UserError, match=r"bare/vae/config.json: no such file"):
        find_sources(str(bare), *none, row_type="t2v")


def test_settings_that_a_given_model_decides_are_refused(make, tmp_path):
    with pytest.raises(UserError) as error:
        make(tmp_path / "set", latent_channels=8, text_dim=32)
    assert "latent_channels is 8, but" in str(error.value) and "text_dim is 32, but" in str(error.value)
    assert not (tmp_path / "set").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(make, tmp_path, monkeypatch):
    monkeypatch.setattr("train.preprocess.buckets.probe", lambda *a: pytest.fail("read a clip"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        make(tmp_path / "file" / "set")
    assert os.listdir(tmp_path) == ["file"]
