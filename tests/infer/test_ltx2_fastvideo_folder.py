"""FastVideo's LTX-2 folders are run like Diffusers' ones with the same models."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from gemma_cases import CAPTIONS
from ltx2_cli_cases import alike, clips_of, command
from ltx2_fastvideo_pair_cases import make_pair
from ltx2_side_cases import draw
from safetensors.torch import load_file, save_file

from core.errors import UserError
from infer import ltx2_command
from infer.autoencoders import load_audio_vae, load_vae
from infer.ltx2_folder import open_ltx2
from infer.ltx2_text import connector_config, load_connectors, load_ltx2_text, save_texts
from infer.sound import Sound, write_sound

SIZE = ("--height", 64, "--width", 64, "--num-frames", 9, "--steps", 1, "--fps", 24)
# Where tensors lie in memory decides how sums are vectorised: roundings of some ten layers in float32.
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """`pair(family)`, made once; read only."""
    return functools.cache(lambda family: make_pair(tmp_path_factory.mktemp("pair"), family))


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Contact sheets and spectrograms are drawn elsewhere."""
    monkeypatch.setattr(ltx2_command, "write_pictures", lambda outputs, rows: None)


@pytest.fixture
def own(pair, tmp_path):
    """A copy of LTX-2.0's folder to change, and the same models in Diffusers' layout."""
    return Path(shutil.copytree(pair("2.0").fastvideo, tmp_path / "model")), pair("2.0").diffusers


def change(place, rewrite):
    """Other leaves for a part's folder."""
    path = place / "model.safetensors"
    save_file({k: v.clone() for k, v in rewrite(load_file(path)).items()}, path)


def deafened(folder):
    change(folder / "audio_vae", lambda leaves: {k: v for k, v in leaves.items() if not k.startswith("encoder.")})


def opened(folder, **options):
    return open_ltx2(folder, device=torch.device("cpu"), dtype=torch.float32, **options)


def close(a, b):
    assert a.dtype == b.dtype and torch.allclose(a.float(), b.float(), **NEAR)


# --- equal models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["2.0", "2.3"])
def test_all_parts_are_those_of_diffusers_layout(pair, family):
    needs = ("vae", "audio_vae", "text_encoder")
    ours, theirs = (opened(folder, needs=needs) for folder in (pair(family).fastvideo, pair(family).diffusers))
    assert ours.cfg == theirs.cfg == pair(family).cfg and set(ours.absent) == {"latent_upsampler"}
    params, wanted = ours.params.read(), theirs.params.read()
    assert params.keys() == wanted.keys() and all(torch.equal(params[k], wanted[k]) for k in wanted)
    latents, video = draw(1, "z", 1, 4, 2, 2, 2), draw(2, "video", 1, 3, 9, 64, 64).clamp(-1, 1)
    sound, wave = draw(3, "sound", 1, 4, 5, 2), 0.3 * draw(4, "wave", 1, 2, 4000)
    close(ours.vae.decode(latents), theirs.vae.decode(latents))
    close(ours.vae.encode(video), theirs.vae.encode(video))
    close(ours.vae.denormalise(latents), theirs.vae.denormalise(latents))
    close(ours.sound.decode(sound), theirs.sound.decode(sound))
    close(ours.sound.encode(wave), theirs.sound.encode(wave))
    assert ours.sound.no_encoder is None
    found, texts = ours.text.embed(CAPTIONS[:2]), theirs.text.embed(CAPTIONS[:2])
    for one, other in zip(found, texts, strict=True):
        assert list(one) == ["video", "audio"]
        for name in one:
            close(one[name], other[name])


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_one_stream_alone(pair, modality):
    cfg = dataclasses.replace(pair("2.3").cfg, modality=modality)
    places = pair("2.3").fastvideo, pair("2.3").diffusers
    (ours,), (theirs,) = (load_ltx2_text(folder, cfg).embed(CAPTIONS[:1]) for folder in places)
    assert list(ours) == [modality]
    close(ours[modality], theirs[modality])
    assert connector_config(places[0], cfg) == connector_config(places[1], cfg)


def test_half_precision_is_that_of_diffusers_layout(pair):
    z, sound = draw(1, "z", 1, 4, 2, 2, 2), draw(3, "sound", 1, 4, 5, 2)
    for keep in (False, True):
        how = {"dtype": torch.bfloat16, "keep": keep}
        a, b = (load_vae(root / "vae", **how) for root in (pair("2.0").fastvideo, pair("2.0").diffusers))
        assert torch.allclose(a.decode(z), b.decode(z), atol=0.02)
        a, b = (
            load_audio_vae(root / "audio_vae", root / "vocoder", **how)
            for root in (pair("2.0").fastvideo, pair("2.0").diffusers)
        )
        assert torch.allclose(a.decode(sound), b.decode(sound), atol=0.02)


def test_the_command_makes_the_same_clip(pair, tmp_path):
    flags = (*SIZE, "--prompt", CAPTIONS[0], "--output", tmp_path / "out.mp4")
    places = pair("2.0").fastvideo, pair("2.0").diffusers
    ours, theirs = (clip for folder in places for clip in clips_of(folder, *flags).values())
    assert alike(ours, theirs)
    assert ours.frames.float().std() > 1 and ours.sound.waveform.std() > 0


# --- parts that are not all there ---------------------------------------------------------------------------------


def test_without_an_encoder_of_sound_only_what_needs_it_is_refused(own, tmp_path, capsys):
    folder, whole = own
    deafened(folder)
    ours, sound = opened(folder, needs=("audio_vae",)).sound, draw(3, "sound", 1, 4, 5, 2)
    close(ours.decode(sound), load_audio_vae(whole / "audio_vae", whole / "vocoder").decode(sound))
    why = f"{folder / 'audio_vae'}: it has a decoder and no encoder"
    assert ours.no_encoder.startswith(why)
    with pytest.raises(UserError, match="no encoder"):
        ours.encode(0.1 * draw(4, "wave", 1, 2, 4000))
    with pytest.raises(UserError, match="and there is no vocoder for what it decodes"):
        load_audio_vae(folder / "audio_vae", None)
    write_sound(tmp_path / "in.wav", Sound(torch.zeros(2, 16000), 16000))
    flags = (*SIZE, "--prompt", "a", "--output", tmp_path / "out.mp4")
    assert command(folder, *flags, "--sound", tmp_path / "in.wav") == 2
    assert why in capsys.readouterr().err and not (tmp_path / "out.mp4").exists()
    assert command(folder, *flags) == 0


def test_without_gemma_texts_come_from_a_file(own, tmp_path, capsys):
    """Or from features that were kept, through the connectors."""
    folder, whole = own
    text = load_ltx2_text(whole, opened(whole).cfg)
    features, mask = text.features(CAPTIONS[:1])
    shutil.rmtree(folder / "text_encoder" / "gemma")
    flags = (*SIZE, "--output", tmp_path / "out.mp4")
    assert command(folder, *flags, "--prompt", "a") == 2
    assert f"{folder / 'text_encoder' / 'gemma'}: no Gemma 3 there" in capsys.readouterr().err
    connect = load_connectors(folder, opened(folder).cfg).connect
    for name, x in text.connect(features, mask).items():
        close(connect(features, mask)[name], x)
    rows = {name: x[0] for name, x in text.connect(features, mask).items()}
    save_texts(tmp_path / "e.safetensors", rows, rows)
    assert command(folder, *flags, "--prompt-embeds", tmp_path / "e.safetensors") == 0


def test_gemma_elsewhere_and_its_tokenizer_with_it(own):
    folder, whole = own
    cfg = opened(whole).cfg
    (wanted,) = load_ltx2_text(whole, cfg).embed(CAPTIONS[:1])
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / "text_encoder" / "gemma" / file.name)
    (folder / "tokenizer").rmdir()
    (folder / "text_encoder" / "gemma").rename(folder / "gemma-3")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"gemma_model_path": "gemma-3"}))
    (found,) = load_ltx2_text(folder, cfg).embed(CAPTIONS[:1])
    for name in wanted:
        close(found[name], wanted[name])
    config = folder / "gemma-3" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gemma2"}))
    with pytest.raises(UserError, match="text encoder 'gemma2' is none of gemma3, gemma3_text"):
        load_ltx2_text(folder, cfg)


# --- what does not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part,key", [
        ("vae", "decoder.conv_out.conv.bias"), ("audio_vae", "decoder.conv_out.conv.bias"), ("vocoder", "ups.0.weight"),
        ("text_encoder", "audio_embeddings_connector.learnable_registers"),
    ],
)  # fmt: skip
def test_the_command_names_part_and_key_before_anything_is_made(own, tmp_path, capsys, part, key):
    folder, _ = own
    change(folder / part, lambda leaves: {k: v for k, v in leaves.items() if k != key} | {"odd": torch.zeros(1)})
    assert command(folder, *SIZE, "--prompt", "a", "--output", tmp_path / "out.mp4") == 2
    said = capsys.readouterr().err
    assert all(x in said for x in (str(folder / part / "model.safetensors"), f"missing {key} [", "unexpected odd [1]"))
    assert not (tmp_path / "out.mp4").exists()


def test_options_and_sizes_are_checked_as_for_others(own, tmp_path):
    folder, _ = own
    with pytest.raises(UserError, match="'CausalVideoAutoencoder' is decoded in tiles, strips would do nothing"):
        load_vae(folder / "vae", strips=2)
    path = folder / "vocoder" / "config.json"
    config = json.loads(path.read_text())
    config["vocoder"]["output_sampling_rate"] = 48000
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="this vocoder does not fit the audio VAE"):
        load_audio_vae(folder / "audio_vae", folder / "vocoder")
    cfg = dataclasses.replace(opened(folder).cfg, caption_channels=16)
    with pytest.raises(UserError, match="the video connector is 12 wide, the transformer's video stream takes 16"):
        load_ltx2_text(folder, cfg)
