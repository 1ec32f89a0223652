"""`.precomputed` folders of the public trainer: read without running code, every fault named, our rows of them."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from ltx2_cases import tiny_config
from ltx2_side_cases import random_leaves

from core import checkpoint, keys
from core.errors import UserError
from core.files import write_json
from infer.prompts import read_prompts
from nn import ltx2_connectors
from nn.config_files import save_model
from nn.ltx2_connectors import ConnectorConfig
from nn.ltx2_formats import to_json
from train.data import Reader, open_dataset
from train.preprocess import Settings, adopt
from train.preprocess.__main__ import main
from train.preprocess.adopt import configs
from train.preprocess.precomputed import features_of, latents_of, left_padded, open_folder, read_file
from train.rows import T2A, T2V, T2VA

REGISTERS, LENGTH = 4, 1024
NAMES = ("a", "deep/b", "c")
NEW = ConnectorConfig(
    caption_channels=6, text_proj_in_factor=3, per_modality_projections=True, video_hidden_dim=16, audio_hidden_dim=12,
    video_connector_num_attention_heads=2, video_connector_attention_head_dim=8,
    audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=6,
    video_connector_num_layers=1, audio_connector_num_layers=1, rope_type="split", proj_bias=True,
    video_connector_num_learnable_registers=REGISTERS, audio_connector_num_learnable_registers=REGISTERS,
)  # fmt: skip
OLD = ConnectorConfig(
    caption_channels=8, text_proj_in_factor=3, video_connector_num_attention_heads=2,
    video_connector_attention_head_dim=4, audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=4,
    video_connector_num_layers=1, audio_connector_num_layers=1, rope_type="split",
    video_connector_num_learnable_registers=REGISTERS, audio_connector_num_learnable_registers=REGISTERS,
)  # fmt: skip


def random(name: str, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return keys.normal(keys.fold_in(keys.key(5), name), shape).to(dtype)


def pipeline(folder: Path, family: str) -> Path:
    """A pipeline's folder with what is read of it: the transformer's config and the connectors."""
    connectors = NEW if family == "2.3" else OLD
    cfg = tiny_config(family=family, audio_in_channels=6, caption_channels=8)
    (folder / "transformer").mkdir(parents=True)
    write_json(folder / "transformer" / "config.json", to_json(cfg))
    specs = ltx2_connectors.param_specs(connectors)
    save_model(folder / "connectors", random_leaves(specs, 3), specs, ltx2_connectors.to_json(connectors))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: pipeline(root / family, family) for family in ("2.0", "2.3")}


def caption(name: str, width: tuple[int, int], tokens: int, length: int) -> dict:
    """Features of `tokens` real tokens behind padding, `length` in all; of the padding something that nobody reads."""
    mask = torch.arange(length) >= length - tokens
    return {
        "video_prompt_embeds": random(f"{name} v", length, width[0], dtype=torch.bfloat16),
        "audio_prompt_embeds": random(f"{name} a", length, width[1], dtype=torch.bfloat16),
        "prompt_attention_mask": mask,
    }


def sample(name: str, grid=(2, 1, 3)) -> dict[str, dict]:
    """The files of a sample, LTX-2.3's."""
    t, h, w = grid
    latents = random(f"{name} z", 4, *grid, dtype=torch.bfloat16)
    return {
        "latents": {"latents": latents, "num_frames": t, "height": h, "width": w, "fps": 12.5},
        "audio_latents": {"latents": random(f"{name} s", 2, 18, 3), "num_time_steps": 18, "frequency_bins": 3,
                          "duration": 0.72},
        "conditions": caption(name, (16, 12), 3 + len(name), LENGTH if name == "c" else 11),
    }  # fmt: skip


def write(root: Path, files=None, places=("latents", "audio_latents", "conditions")) -> Path:
    """A data set's folder with `.precomputed` in it."""
    files = {name: sample(name) for name in NAMES} if files is None else files
    for name, by in files.items():
        for place in places:
            path = root / ".precomputed" / place / f"{name}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(by[place], path)
    return root


def connected(model: Path, cfg: ConnectorConfig, data: dict) -> dict[str, torch.Tensor]:
    """What the connectors make of a caption at full length, by the functions that are proven equal to Diffusers'."""
    short = LENGTH - len(data["prompt_attention_mask"])
    pad = lambda x: torch.cat([torch.full((short, x.shape[1]), 7.0), x.float()])[None]  # noqa: E731
    mask = torch.cat([torch.zeros(short, dtype=torch.bool), data["prompt_attention_mask"]])[None]
    both = {"video": pad(data["video_prompt_embeds"]), "audio": pad(data["audio_prompt_embeds"])}
    params = random_leaves(ltx2_connectors.param_specs(cfg), 3)
    return {name: x[0] for name, x in ltx2_connectors.connect(params, cfg, both, mask).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    # One is computed with the other captions' padding, and BLAS may sum differently: a rounding of float32 or two.
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", ["folder", ".precomputed"])
def test_rows_are_the_latents_and_what_the_connectors_make_of_the_features(models, tmp_path, given):
    """Whether texts are stored with their padding or without."""
    root = write(tmp_path / "data")
    (tmp_path / "clips.json").write_text(json.dumps([{"video": f"{n}.mp4", "caption": f"it is {n}"} for n in NAMES]))
    folder = root if given == "folder" else root / ".precomputed"
    argv = ["--precomputed", str(folder), "--output", str(tmp_path / "set"), "--model", str(models["2.3"])]
    argv += ["--device", "cpu", "--dtype", "fp32", "--clips-per-file", "2"]
    assert main([*argv, "--data", str(tmp_path / "clips.json")]) == 0
    data = open_dataset(tmp_path / "set", T2VA)
    rows = {row["id"]: row for row in map(Reader(data).sample, range(3))}
    assert rows.keys() == set(NAMES) and len(data.files) == 2
    for name, row in rows.items():
        stored, wanted = sample(name), connected(models["2.3"], NEW, sample(name)["conditions"])
        assert torch.equal(row["vae_latent"], stored["latents"]["latents"])
        assert torch.equal(row["audio_latent"], stored["audio_latents"]["latents"])
        assert same(row["text_embedding"], wanted["video"]) and same(row["audio_text_embedding"], wanted["audio"])
        assert (row["num_frames"], row["height"], row["width"], row["fps"]) == (9, 32, 96, 12.5)
        assert row["duration_sec"] == 9 / 12.5 and row["caption"] == f"it is {name}" and row["media_type"] == "video"
        assert row["audio_sample_rate"] == 16000
    prompts = read_prompts(tmp_path / "set" / "validation.json")
    assert [(p.caption, p.num_frames) for p in prompts] == [(f"it is {n}", 9) for n in sorted(NAMES)]
    record = json.loads((tmp_path / "set" / "preprocess.json").read_text())
    assert record["complete"] and record["models"]["connectors"]["folder"] == str(models["2.3"] / "connectors")


@pytest.mark.parametrize("modality, kind", [("video", T2V), ("audio", T2A)])
def test_of_one_stream_only_its_own_files_and_weights_are_read(models, tmp_path, monkeypatch, modality, kind):
    root, read, original = write(tmp_path / "data"), set(), checkpoint.read_leaves
    spy = lambda leaves, keys, *more: read.update(keys) or original(leaves, keys, *more)  # noqa: E731
    monkeypatch.setattr(checkpoint, "read_leaves", spy)
    adopt(root, tmp_path / "set", models["2.3"], Settings(dtype="fp32"), modality=modality)
    other = "audio" if modality == "video" else "video"
    assert read and not any(key.startswith(other) for key in read)
    data = open_dataset(tmp_path / "set", kind)
    for index in range(3):
        row = Reader(data).sample(index)
        wanted = connected(models["2.3"], NEW, sample(row["id"])["conditions"])[modality]
        assert same(row["text_embedding"], wanted) and row.get("audio_text_embedding") is None
        assert row["duration_sec"] == pytest.approx(0.72) and row["caption"] == ""
    assert not (tmp_path / "set" / "validation.json").exists()  # nothing is known of what they show


@pytest.mark.parametrize("places, kind", [
    (("latents", "conditions"), T2V), (("audio_latents", "conditions"), T2A),
])  # fmt: skip
def test_what_is_there_decides_the_rows(models, tmp_path, places, kind):
    adopt(write(tmp_path / "data", places=places), tmp_path / "set", models["2.3"], Settings(dtype="fp32"))
    assert len(open_dataset(tmp_path / "set", kind)) == 3


def test_old_folders_are_read(models, tmp_path):
    """Names by number, latents as tokens, one text for both streams."""
    grid, files = (2, 2, 3), {}
    for i in range(2):
        latents = random(f"old {i}", 4, *grid)
        tokens = latents.permute(1, 2, 3, 0).reshape(-1, 4)
        text = {"prompt_embeds": random(f"text {i}", 8, 8), "prompt_attention_mask": torch.arange(8) >= 3}
        files[i] = (latents, text)
        base = tmp_path / "data"
        for place, name, data in (
            ("latents", f"latent_{i}", {"latents": tokens, "num_frames": 2, "height": 2, "width": 3}),
            ("audio_latents", f"latent_{i}", {"latents": random(f"sound {i}", 2, 9, 3)}),
            ("conditions", f"condition_{i}", text),
        ):
            (base / place).mkdir(parents=True, exist_ok=True)
            torch.save(data, base / place / f"{name}.pt")
    adopt(base, tmp_path / "set", models["2.0"], Settings(dtype="fp32"))
    data = open_dataset(tmp_path / "set", T2VA)
    for i in range(2):
        row, (latents, text) = Reader(data).sample(i), files[i]
        both = {"video_prompt_embeds": text["prompt_embeds"], "audio_prompt_embeds": text["prompt_embeds"]}
        wanted = connected(models["2.0"], OLD, {**both, "prompt_attention_mask": text["prompt_attention_mask"]})
        assert torch.equal(row["vae_latent"], latents) and row["fps"] is None and row["duration_sec"] is None
        assert same(row["text_embedding"], wanted["video"]) and same(row["audio_text_embedding"], wanted["audio"])


# --- faults ---------------------------------------------------------------------------------------------------


def test_every_fault_is_in_one_message(models, tmp_path):
    files = {name: sample(name) for name in (*NAMES, "d", "e", "f", "g")}
    files["a"]["latents"]["latents"] = random("x", 5, 2, 1, 3)
    files["c"]["audio_latents"]["latents"] = random("x", 2, 18, 4)
    files["d"]["latents"]["height"] = 2
    files["e"]["conditions"]["video_prompt_embeds"] = random("x", 11, 15)
    files["f"]["conditions"]["prompt_attention_mask"] = torch.zeros(11, dtype=torch.bool)
    del files["g"]["conditions"]["audio_prompt_embeds"]
    with pytest.raises(UserError) as error:
        adopt(write(tmp_path / "data", files), tmp_path / "set", models["2.3"], Settings(dtype="fp32"))
    text = str(error.value)
    assert "6 of 7 samples cannot be used (--skip-unusable leaves them out)" in text.splitlines()[0]
    for part in (
        "row 0: a: ", "latents/a.pt: latents are [5, 2, 1, 3], the model takes 4 channels",
        "audio_latents/c.pt: frequency_bins is 3, but latents are [2, 18, 4]",
        "latents/d.pt: height is 2, but latents are [4, 2, 1, 3]",
        "conditions/e.pt: video_prompt_embeds is [11, 15], expected [L, 16] for the connectors",
        "conditions/f.pt: prompt_attention_mask: no token of the caption is real",
        "conditions/g.pt: audio_prompt_embeds is missing",
    ):  # fmt: skip
        assert part in text
    assert not (tmp_path / "set").exists()
    done = adopt(tmp_path / "data", tmp_path / "set", models["2.3"], Settings(dtype="fp32"), skip_unusable=True)
    assert (done.rows, len(done.unusable)) == (1, 6)
    assert Reader(open_dataset(tmp_path / "set", T2VA)).sample(0)["id"] == "deep/b"


def test_missing_files_and_folders_are_in_one_message(models, tmp_path):
    base = write(tmp_path / "data") / ".precomputed"
    (base / "audio_latents" / "c.pt").unlink()
    (base / "conditions" / "a.pt").unlink()
    torch.save(sample("z")["conditions"], base / "conditions" / "z.pt")
    with pytest.raises(UserError) as error:
        open_folder(tmp_path / "data")
    for line in (
        "audio_latents/ has 2 files for 3 samples, missing: c",
        "conditions/ has 3 files for 3 samples, missing: a",
        "conditions/ has 3 files for 3 samples, without latents: z",
    ):
        assert line in str(error.value)
    (base / "video_masks").mkdir()
    (base / "latents").rename(base / "other")
    with pytest.raises(UserError) as error:
        open_folder(base, ("video",))
    assert "latents/: no such folder" in str(error.value)
    assert "video_masks/: rows hold no masks or references; --without-conditions" in str(error.value)
    (base / "audio_latents").rename(base / "more")
    with pytest.raises(UserError, match="neither latents/ nor audio_latents/ is there"):
        open_folder(base)


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("touched"),)


def test_pickles_that_would_run_code_are_refused_and_do_not(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = write(tmp_path / "data") / ".precomputed"
    torch.save({"latents": Harmful()}, base / "latents" / "a.pt")
    (base / "conditions" / "c.pt").write_bytes(pickle.dumps({"video_prompt_embeds": Harmful()}, protocol=2))
    with pytest.raises(UserError) as error:
        adopt(base, tmp_path / "set", models["2.3"], Settings(dtype="fp32"))
    assert "latents/a.pt: cannot be read as tensors and plain values" in str(error.value)
    assert "conditions/c.pt: cannot be read as tensors and plain values" in str(error.value)
    assert not (tmp_path / "touched").exists()


def test_files_of_old_and_damaged_pickles(tmp_path):
    data = {"latents": random("x", 2, 3, 4)}
    torch.save(data, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(read_file(tmp_path / "old.pt", mapped=True)["latents"], data["latents"])
    torch.save(data["latents"], tmp_path / "bare.pt")
    assert torch.equal(latents_of("audio", read_file(tmp_path / "bare.pt")), data["latents"])
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "bare.pt").read_bytes()[:-80])
    for name, what in (("list", "it holds a list"), ("cut", "cannot be read"), ("gone", "cannot be read")):
        with pytest.raises(UserError, match=f"{name}.pt: {what}"):
            read_file(tmp_path / f"{name}.pt", mapped=True)


def test_texts_longer_than_the_encoder_takes_are_refused():
    features, mask = features_of(caption("x", (16, 12), 4, 9), NEW)
    padded, full = left_padded(features, mask, 12)
    assert padded["video"].shape == (12, 16) and full.tolist() == [False] * 8 + [True] * 4
    assert torch.equal(padded["audio"][3:], features["audio"]) and not padded["audio"][:3].any()
    with pytest.raises(UserError, match="the caption has 9 tokens, the text encoder takes 8"):
        left_padded(features, mask, 8)


def test_models_that_lack_a_stream_and_flags_that_do_nothing_are_refused(models, tmp_path, capsys):
    cfg, connectors = configs(models["2.3"], ("audio",))
    assert cfg.modality == connectors.modality == "audio"
    write_json(tmp_path / "transformer" / "config.json", to_json(tiny_config(modality="video")))
    with pytest.raises(UserError, match="holds the video stream only, not audio"):
        configs(tmp_path, ("video", "audio"))
    root = write(tmp_path / "data")
    given = ["--precomputed", str(root), "--output", str(tmp_path / "set")]
    for more, message in (
        ([], "--model is needed with --precomputed"),
        (["--model", str(models["2.3"]), "--vae", "x"], "--vae: does nothing with --precomputed"),
        (["--model", str(models["2.3"]), "--fps", "8"], "fps: decides nothing, the latents are there"),
    ):
        assert main([*given, *more]) == 2
        assert message in capsys.readouterr().err
    assert main(["--output", str(tmp_path / "set"), "--modality", "video"]) == 2
    err = capsys.readouterr().err
    assert "--data is needed, or --precomputed" in err and "--modality: needs --precomputed" in err


def test_an_interrupted_set_goes_on_and_a_complete_one_is_left(models, tmp_path):
    root = write(tmp_path / "data")
    settings = Settings(dtype="fp32", clips_per_file=1)
    adopt(root, tmp_path / "set", models["2.3"], settings)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "set").rglob("*") if p.is_file()}
    report = tmp_path / "set" / "reports" / "part-00001.json"
    report.unlink()
    with pytest.raises(UserError, match="not finished"):
        open_dataset(tmp_path / "set", T2VA)
    adopt(root, tmp_path / "set", models["2.3"], settings)
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "set").rglob("*") if p.is_file()}
    assert {p: data for p, (data, _) in after.items()} == {p: data for p, (data, _) in before.items()}
    changed = {p.name for p in after if after[p] != before[p]}
    assert changed <= {"part-00001.json", "part-00001.parquet", "preprocess.json"}
