"""Clips with sound: rows are what the models of a pipeline give, on disk and on the fly, and what is silent is said."""

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from ltx2_cases import tiny_config
from ltx2_side_cases import random_leaves
from ltx2_vae_cases import random_params, vae_config
from set_cases import moving

from core import keys
from core.errors import UserError
from core.files import write_json
from core.geometry import to_video
from infer.autoencoders import load_audio_vae
from infer.media import read_video, write_video
from infer.sound import Sound, read_sound
from nn import ltx2_audio, ltx2_vae, text_hash
from nn.config_files import save_model
from nn.ltx2_audio import AudioVaeConfig
from nn.ltx2_audio_mel import log_mel
from nn.ltx2_formats import to_json
from train.config import Encode
from train.data import Reader, batches, first_fps, open_dataset
from train.online import open_online, sources_of
from train.preprocess import Settings, Sources, preprocess
from train.preprocess.__main__ import main
from train.preprocess.models import find_sources
from train.preprocess.record import check_models
from train.recipe_data import fingerprint
from train.rows import ROW_TYPES, T2VA

CPU, KEY = torch.device("cpu"), keys.key(3)
# Frames, frames per second, and seconds of sound of each clip; None: no audio stream.
CLIPS = [(17, 8, 2.125), (12, 6, 1.0), (9, 8, None)]
SIZE = {"num_frames": 9, "height": 64, "width": 32}


def tone(seconds: float, hz: float, rate: int = 16000) -> Sound:
    """A tone that swells, another an octave above it on the right."""
    time = torch.arange(round(seconds * rate)) / rate
    wave = torch.stack([torch.sin(2 * math.pi * f * time) for f in (hz, 2 * hz)])
    return Sound(0.8 * wave * (time / seconds), rate)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The metadata file of CLIPS."""
    folder = tmp_path_factory.mktemp("sounds")
    for i, (frames, fps, seconds) in enumerate(CLIPS):
        sound = None if seconds is None else tone(seconds, 300 * (i + 1))
        write_video(folder / f"{i}.mp4", moving(i, frames, 80, 48), fps, sound=sound)
    rows = [{"path": f"{i}.mp4", "caption": f"tone number {i}"} for i in range(len(CLIPS))]
    (folder / "clips.json").write_text(json.dumps(rows))
    return folder / "clips.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A pipeline's folder with tiny autoencoders of LTX-2's strides, 32 pixels and 8 frames, and hashed words."""
    root, changes = tmp_path_factory.mktemp("ltx2"), ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
    vae = vae_config(changes, changes, patch_size=4, block_out_channels=(4, 4, 8, 8))
    ltx2_vae.save(root / "vae", random_params(vae, 1), vae)
    sound = AudioVaeConfig(base_channels=8, ch_mult=(1, 2, 2), num_res_blocks=1, latent_channels=4, mel_bins=8)
    specs = ltx2_audio.param_specs(sound)
    save_model(root / "audio_vae", random_leaves(specs, 2), specs, ltx2_audio.to_json(sound))
    text_hash.save(root / "text_encoder", text_hash.HashTextConfig(dim=8, max_length=6))
    write_json(root / "transformer" / "config.json", to_json(tiny_config()))
    return root


@pytest.fixture(scope="module")
def sets(data, model, tmp_path_factory):
    """Sets of the clips with sound, by models: stand-ins, or those of `model`."""
    root = tmp_path_factory.mktemp("sets")
    for name, sources in (("codec", Sources()), ("ltx2", find_sources(str(model), None, None, None, row_type="t2va"))):
        kept = {"audio_latent_channels": 2, "audio_latent_bins": 4, "latent_channels": 4} if name == "codec" else {}
        preprocess(data, root / name, Settings(row_type="t2va", clips_per_file=2, **SIZE, **kept), sources)
    return root


def encode_of(sets: Path, model: Path, name: str) -> Encode:
    """The same models for encoding on the fly."""
    root = sets / "codec" if name == "codec" else model
    return Encode(vae=str(root / "vae"), text_encoder=str(root / "text_encoder"), skip_unusable=True, **SIZE)


# --- sets -----------------------------------------------------------------------------------------------------


def test_the_command_with_stand_ins(data, tmp_path, capsys):
    """No downloads: the folder holds a codec for pictures, one for sound and the hash embedder, and the report says
    which clip is silent."""
    argv = ["--data", str(data), "--output", str(tmp_path / "set"), "--row-type", "t2va", "--device", "cpu"]
    argv += ["--num-frames", "9", "--height", "64", "--width", "32", "--latent-channels", "4"]
    assert main(argv) == 1
    shown = capsys.readouterr()
    assert "row 2: 2.mp4: silent: it has no audio stream" in shown.err and "allow_silent" in shown.err
    assert all((tmp_path / "set" / name / "config.json").is_file() for name in ("vae", "audio_vae", "text_encoder"))
    record = json.loads((tmp_path / "set" / "preprocess.json").read_text())
    assert record["complete"] and record["models"]["audio_vae"]["folder"] == "audio_vae"
    assert record["settings"]["allow_silent"] is False and record["row_type"] == "t2va"
    assert len(open_dataset(tmp_path / "set", T2VA)) == 2
    prompts = json.loads((tmp_path / "set" / "validation.json").read_text())["data"]
    assert [p["caption"] for p in prompts] == ["tone number 0", "tone number 1"] and prompts[0]["num_frames"] == 9


@pytest.mark.parametrize("name", ["codec", "ltx2"])
def test_the_sound_of_a_row_is_that_of_exactly_its_frames(sets, model, data, name):
    """Of a longer clip its beginning, of a shorter sound silence after it."""
    rows = list(map(Reader(open_dataset(sets / name, T2VA)).sample, range(2)))
    vae = load_audio_vae((sets / name if name == "codec" else model) / "audio_vae", None)
    for i, row in enumerate(rows):
        seconds = 9 / CLIPS[i][1]
        sound = read_sound(data.parent / row["id"], rate=vae.input_rate, seconds=seconds)
        assert sound.waveform.shape == (2, round(seconds * vae.input_rate))
        assert row["audio_latent"].shape == (vae.latent_channels, vae.latent_frames(seconds), vae.latent_bins)
        assert vae.latent_frames(seconds) == round(seconds * vae.latents_per_second)
        wanted = vae.encode(sound.waveform[None])[0][:, : vae.latent_frames(seconds)]
        assert torch.equal(row["audio_latent"], wanted)
        assert (row["audio_sample_rate"], row["num_frames"], row["fps"]) == (vae.input_rate, 9, CLIPS[i][1])
        assert row["audio_text_embedding"] is None and row["text_embedding"].shape[0] == 3
    # The second clip's sound ends after a second of its one and a half: what is left is encoded silence.
    half = read_sound(data.parent / "1.mp4", rate=vae.input_rate, seconds=1.5).waveform
    assert not half[:, round(1.2 * vae.input_rate) :].any() and half[:, : vae.input_rate].abs().max() > 0.3


def test_rows_of_a_pipeline_are_what_its_autoencoders_give(sets, model, data):
    """By the functions that are proven equal to Diffusers': video at 32 pixels and 8 frames a latent."""
    row = Reader(open_dataset(sets / "ltx2", T2VA)).sample(0)
    params, cfg = ltx2_vae.load(model / "vae")
    frames = read_video(data.parent / "0.mp4", num_frames=9, size=(64, 32)).frames
    wanted = ltx2_vae.encode(params, cfg, to_video(frames)[None])[0]
    assert row["vae_latent"].shape == (4, 2, 2, 1)
    # Encoded in chunks or at once: roundings of float32 through some twenty layers.
    assert torch.allclose(row["vae_latent"], wanted, rtol=1e-4, atol=1e-4)
    sound = AudioVaeConfig(base_channels=8, ch_mult=(1, 2, 2), num_res_blocks=1, latent_channels=4, mel_bins=8)
    wave = read_sound(data.parent / "0.mp4", rate=16000, seconds=9 / 8).waveform
    mel = log_mel(sound.mel, wave[None])
    whole = ltx2_audio.encode(random_leaves(ltx2_audio.param_specs(sound), 2), sound, mel[:, :, : 4 * 27 + 1])[0]
    assert row["audio_latent"].shape == (4, 28, 2)
    # Layers are causal in time, so the first latents do not see where the sound ends.
    assert torch.allclose(row["audio_latent"][:, :26], whole[:, :26], rtol=1e-4, atol=1e-4)


def test_a_silent_clip_can_be_taken_as_silence(sets, model, data, tmp_path):
    settings = Settings(row_type="t2va", allow_silent=True, **SIZE)
    done = preprocess(data, tmp_path / "set", settings, find_sources(str(model), None, None, None, row_type="t2va"))
    assert (done.rows, done.unusable) == (3, ())
    row = Reader(open_dataset(tmp_path / "set", T2VA)).sample(2)
    vae = load_audio_vae(model / "audio_vae", None)
    silence = vae.encode(torch.zeros(1, 2, round(9 / 8 * vae.input_rate)))[0][:, :28]
    assert torch.equal(row["audio_latent"], silence)
    silent = {"path": "2.mp4", "caption": ""}
    (data.parent / "silent.json").write_text(json.dumps([silent]))
    with pytest.raises(UserError, match="1 of 1 clip cannot be used\n  - row 0: 2.mp4: silent"):
        preprocess(data.parent / "silent.json", tmp_path / "none", Settings(row_type="t2va", **SIZE))


def test_the_rate_of_resampled_clips_decides_how_much_is_heard(model, data, tmp_path):
    settings = Settings(row_type="t2va", fps=6.0, **SIZE)
    preprocess(data, tmp_path / "set", settings, find_sources(str(model), None, None, None, row_type="t2va"))
    rows = map(Reader(open_dataset(tmp_path / "set", T2VA)).sample, range(2))
    assert [row["audio_latent"].shape[1] for row in rows] == [38, 38]  # 25 a second of 9 / 6 s, an odd half to the even


def test_a_set_with_a_codec_of_its_own_goes_on_with_that(data, tmp_path, monkeypatch):
    """A part that is missing is made again to the bit; nothing is fitted anew."""
    settings = Settings(row_type="t2va", clips_per_file=1, latent_channels=4, audio_latent_channels=2, **SIZE)
    preprocess(data, tmp_path / "set", settings)
    before = {p: p.read_bytes() for p in (tmp_path / "set").rglob("*") if p.is_file()}
    (tmp_path / "set" / "reports" / "part-00001.json").unlink()
    for name in ("fit", "fit_sound"):
        monkeypatch.setattr(f"train.preprocess.run.{name}", lambda *a: pytest.fail("fitted again"))
    preprocess(data, tmp_path / "set", settings)
    assert {p: p.read_bytes() for p in (tmp_path / "set").rglob("*") if p.is_file()} == before


def test_several_processes_cannot_fit_a_codec_of_sound(sets, data, tmp_path):
    sources = Sources(vae=sets / "codec" / "vae")
    with pytest.raises(UserError, match="2 processes cannot fit one codec: give an audio VAE"):
        preprocess(data, tmp_path / "set", Settings(row_type="t2va", **SIZE), sources, world=2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_frames": 12}, r"num_frames is 12, expected 8k\+1: nearest valid 9 or 17"),
        ({"height": 72}, "height is 72, expected a multiple of 32: nearest valid 64 or 96"),
        ({"audio_latent_bins": 4}, "audio_latent_bins is 4, but .*audio_vae decides it"),
        ({"row_type": "t2v", "allow_silent": True}, "allow_silent: t2v rows have no sound"),
    ],
)
def test_bad_settings_are_refused_before_a_clip_is_read(model, data, tmp_path, monkeypatch, change, message):
    monkeypatch.setattr("train.preprocess.buckets.probe", lambda *a: pytest.fail("read a clip"))
    settings = Settings(**{"row_type": "t2va", **SIZE, **change})
    sources = find_sources(str(model), None, None, None, row_type=settings.row_type)
    with pytest.raises(UserError, match=message):
        preprocess(data, tmp_path / "set", settings, sources)
    assert not (tmp_path / "set").exists()


def test_an_audio_vae_is_for_rows_with_sound_and_stands_beside_the_vae(sets, model):
    own = {"vae": str(model / "vae"), "text_encoder": str(model / "text_encoder")}
    assert sources_of(Encode(**own), "t2va").audio_vae == model / "audio_vae"
    other = sets / "codec" / "audio_vae"
    assert sources_of(Encode(audio_vae=str(other), **own), "t2va").audio_vae == other
    with pytest.raises(UserError, match="audio_vae: t2v rows have no sound; it is for row type t2va"):
        find_sources(None, None, None, None, model / "audio_vae", row_type="t2v")
    found = find_sources(None, model / "vae", None, None, row_type="t2va")
    assert found == Sources(vae=model / "vae", audio_vae=model / "audio_vae")
    assert find_sources(None, model / "vae", None, None, row_type="t2v") == Sources(vae=model / "vae")


def test_sets_of_another_audio_vae_are_refused(sets, model):
    own = {name: model / name for name in ("vae", "audio_vae", "text_encoder")}
    check_models([sets / "ltx2"], own)
    with pytest.raises(UserError, match="audio_vae: .*ltx2 records AutoencoderKLLTX2Audio"):
        check_models([sets / "ltx2"], own | {"audio_vae": sets / "codec" / "audio_vae"})


# --- texts of two streams -------------------------------------------------------------------------------------


class Connected:
    """Stands for a text encoder with connectors: texts of both widths for the streams that it is opened for."""

    opened: list[str] = []

    def __init__(self, folder, cfg, **how):
        self.cfg = cfg
        Connected.opened.append(cfg.modality)

    def embed(self, captions):
        text = lambda caption, s: keys.normal(keys.fold_in(keys.key(1), caption + s.name), (4, s.text_dim))  # noqa: E731
        return [{s.name: text(caption, s) for s in self.cfg.streams} for caption in captions]


@pytest.fixture
def connected(model, tmp_path, monkeypatch) -> Path:
    """`model` with such an encoder in place of the hashed words."""
    root = Path(shutil.copytree(model, tmp_path / "ltx2"))
    write_json(root / "text_encoder" / "config.json", {"model_type": "gemma3"})
    write_json(root / "connectors" / "config.json", {"_class_name": "LTX2TextConnectors"})
    monkeypatch.setattr("train.preprocess.models.load_ltx2_text", Connected)
    Connected.opened.clear()
    return root


@pytest.mark.parametrize("kind, streams, made", [
    ("t2va", None, "audio_video"), ("t2va", ("audio",), "audio"), ("t2va", ("video",), "video"), ("t2v", None, "video"),
])  # fmt: skip
def test_each_stream_has_its_own_text_and_no_other_is_made(connected, data, tmp_path, kind, streams, made):
    """Stored rows keep both; on the fly only what the model takes is embedded, and batches are the same."""
    kept = tmp_path / "kept.json"
    rows = [{"path": str(data.parent / f"{i}.mp4"), "caption": f"tone number {i}"} for i in range(2)]
    kept.write_text(json.dumps(rows))
    sources = find_sources(str(connected), None, None, None, row_type=kind)
    assert sources.connectors == connected / "connectors"
    preprocess(kept, tmp_path / "set", Settings(row_type=kind, **SIZE), sources)
    assert set(Connected.opened) == {"audio_video" if kind == "t2va" else "video"}
    Connected.opened.clear()
    stored = open_dataset(tmp_path / "set", ROW_TYPES[kind], streams=streams)
    online = open_online(kept, ROW_TYPES[kind], Encode(model=str(connected), **SIZE), CPU, streams=streams)
    pairs = list(itertools.islice(zip(*(batches(d, key=KEY, batch_size=1) for d in (stored, online)), strict=False), 3))
    assert set(Connected.opened) == {made} and all(same(a, b) for a, b in pairs)
    widths = {name: x.shape[2] for name, x in pairs[0][1].conditions.items()}
    assert widths == {"audio_video": {"text": 16, "audio_text": 12}, "audio": {"text": 12}, "video": {"text": 16}}[made]
    record = json.loads((tmp_path / "set" / "preprocess.json").read_text())
    assert record["models"]["connectors"]["class"] == "LTX2TextConnectors"


# --- on the fly -----------------------------------------------------------------------------------------------


def same(a, b) -> bool:
    """Whether two batches are equal to the bit."""
    assert (a.names, a.indices, a.text_lens, a.fps) == (b.names, b.indices, b.text_lens, b.fps)
    pairs = [(x[k], y[k]) for x, y in ((a.targets, b.targets), (a.conditions, b.conditions)) for k in x | y]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", ["codec", "ltx2"])
@pytest.mark.parametrize("streams", [None, ("video",), ("audio",)])
def test_batches_are_those_of_the_preprocessed_set(sets, model, data, name, streams):
    """For models of both streams and of one."""
    stored = open_dataset(sets / name, T2VA, streams=streams)
    kept = data.parent / "kept.json"
    kept.write_text(json.dumps(json.loads(data.read_text())[:2]))  # a video stream alone could use the third as well
    online = open_online(kept, T2VA, encode_of(sets, model, name), CPU, streams=streams)
    assert online.shapes == stored.shapes and (online.buckets == stored.buckets).all()
    assert first_fps(online) == first_fps(stored) == 8.0
    pairs = list(itertools.islice(zip(*(batches(d, key=KEY, batch_size=1) for d in (stored, online)), strict=False), 5))
    assert all(same(a, b) for a, b in pairs)
    assert all(b.targets.keys() == set(streams or ("video", "audio")) for _, b in pairs)
    assert len({b.targets["audio"].shape for _, b in pairs if "audio" in b.targets}) in (0, 2)


def test_of_a_stream_that_the_model_lacks_nothing_is_encoded(sets, model, data, monkeypatch):
    encode = encode_of(sets, model, "ltx2")
    with monkeypatch.context() as patch:
        patch.setattr("train.preprocess.encode.read_sound", lambda *a, **k: pytest.fail("listened"))
        online = open_online(data, T2VA, encode, CPU, streams=("video",))
        assert len(online) == 3  # the silent clip too
        next(batches(online, key=KEY, batch_size=1))
    with monkeypatch.context() as patch:
        patch.setattr("nn.ltx2_vae.encode", lambda *a, **k: pytest.fail("encoded pictures"))
        patch.setattr("nn.ltx2_vae.load", lambda *a, **k: pytest.fail("read the VAE's weights"))
        online = open_online(data, T2VA, encode, CPU, streams=("audio",))
        batch = next(batches(online, key=KEY, batch_size=1))
        assert batch.targets.keys() == {"audio"}


def test_one_process_probes_for_all_and_alone_prints(sets, model, data, monkeypatch, capsys):
    """`once` stands for what makes one process of several choose: the others take what it says, as JSON."""
    encode, said, logged = encode_of(sets, model, "codec"), [], []

    def lead(choose):
        said.append(json.dumps(choose()))
        return json.loads(said[0])

    first = open_online(data, T2VA, encode, CPU, logged.append, once=lead)
    assert len(logged) == 1 and "2.mp4: silent" in logged[0]
    capsys.readouterr()
    monkeypatch.setattr("train.preprocess.buckets.probe", lambda *a: pytest.fail("probed again"))
    other = open_online(data, T2VA, encode, CPU, logged.append, once=lambda choose: json.loads(said[0]))
    assert len(logged) == 1 and capsys.readouterr().out == ""
    assert fingerprint(other) == fingerprint(first) and other.signatures == first.signatures
    pairs = zip(*(batches(d, key=KEY, batch_size=1) for d in (first, other)), strict=False)
    assert all(same(a, b) for a, b in itertools.islice(pairs, 3))
