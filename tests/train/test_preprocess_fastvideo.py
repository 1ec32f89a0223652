"""Preprocessing with a FastVideo folder gives the rows that the same models in Diffusers' layout give."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from set_cases import moving  # finds the cases of other folders

from ltx2_fastvideo_pair_cases import make_pair  # isort: skip

from core.errors import UserError
from infer.ltx2_folder import LTX2Defaults, open_ltx2, save_ltx2
from infer.media import write_video
from infer.sound import Sound
from nn.ltx2_formats import open_transformer
from train.data import Reader, open_dataset
from train.preprocess import Settings, preprocess
from train.preprocess.__main__ import main
from train.preprocess.models import find_sources
from train.preprocess.record import fingerprint
from train.rows import T2VA

SIZE = {"num_frames": 9, "height": 64, "width": 64}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), "2.3")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    wave = 0.4 * torch.sin(torch.arange(32000) * 0.2).repeat(2, 1)
    write_video(folder / "0.mp4", moving(0, 17, 80, 80), 8, sound=Sound(wave, 16000))
    (folder / "clips.json").write_text(json.dumps([{"path": "0.mp4", "caption": "a red ball"}]))
    return folder / "clips.json"


def made(model, data, output):
    sources = find_sources(str(model), None, None, None, row_type="t2va")
    preprocess(data, output, Settings(row_type="t2va", dtype="fp32", **SIZE), sources)
    return Reader(open_dataset(output, T2VA)).sample(0)


def test_rows_are_those_of_diffusers_layout(pair, data, tmp_path):
    ours, theirs = (made(model, data, tmp_path / model.name) for model in (pair.fastvideo, pair.diffusers))
    names = ("vae_latent", "audio_latent", "text_embedding", "audio_text_embedding")
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[k], theirs[k], atol=1e-4) for k in names)
    assert ours["text_embedding"].shape[1] == 16 and ours["audio_text_embedding"].shape[1] == 6
    record = json.loads((tmp_path / "fastvideo" / "preprocess.json").read_text())["models"]
    assert record["text_encoder"]["class"] == "LTX2GemmaTextEncoderModel" and "connectors" not in record


def test_gemma_and_tokenizer_count_in_the_fingerprint(pair, tmp_path):
    copy = Path(shutil.copytree(pair.fastvideo, tmp_path / "copy"))
    before = fingerprint(copy / "text_encoder")
    assert before == fingerprint(pair.fastvideo / "text_encoder")
    for path in (copy / "tokenizer" / "tokenizer.json", copy / "text_encoder" / "gemma" / "model.safetensors"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        assert fingerprint(copy / "text_encoder") != before
        path.write_bytes(whole)
    assert fingerprint(copy / "text_encoder") == before


def test_an_audio_vae_without_an_encoder_is_refused_before_a_clip_is_read(pair, data, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(pair.fastvideo, tmp_path / "copy"))
    path = copy / "audio_vae" / "model.safetensors"
    save_file({k: v.clone() for k, v in load_file(path).items() if not k.startswith("encoder.")}, path)
    argv = ["--data", data, "--output", tmp_path / "set", "--row-type", "t2va", "--model", copy, "--device", "cpu"]
    argv += ["--num-frames", 9, "--height", 64, "--width", 64]
    assert main(list(map(str, argv))) == 2
    assert "it has a decoder and no encoder" in capsys.readouterr().err and not (tmp_path / "set").exists()


def test_a_pipeline_that_is_saved_with_its_text_encoder_takes_gemma_along(pair, tmp_path):
    """What export does with the parts of `init_from`."""
    tree, cfg = open_transformer(pair.fastvideo / "transformer")
    names = ("vae", "audio_vae", "vocoder", "text_encoder")
    save_ltx2(tmp_path / "out", tree, cfg, LTX2Defaults(), parts={name: pair.fastvideo / name for name in names})
    how = {"device": torch.device("cpu"), "dtype": torch.float32, "needs": ("vae", "audio_vae", "text_encoder")}
    ours, theirs = (open_ltx2(folder, **how).text.embed(["a ball"]) for folder in (tmp_path / "out", pair.fastvideo))
    assert all(torch.allclose(ours[0][k], theirs[0][k], atol=1e-5) for k in ("video", "audio"))
    with pytest.raises(UserError, match="none of vae"):
        save_ltx2(tmp_path / "no", tree, cfg, LTX2Defaults(), parts={"text_encoder/gemma": pair.fastvideo})
