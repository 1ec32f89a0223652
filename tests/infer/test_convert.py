"""Official single files of LTX-2 made pipeline folders: they sample as the models that were put into the file."""

import dataclasses
import json
import shutil

import pytest
import torch
from gemma_cases import CAPTIONS, make_case, make_gemma
from ltx2_cases import random_params
from ltx2_pipe_cases import SAMPLING, SOUND, UPSAMPLER, VAE, VOICE, make_pair

from core.checkpoint import open_checkpoint
from core.errors import UserError
from core.save import save_file
from infer import convert
from infer.convert import convert_single_file, main
from infer.folder import with_weights
from infer.ltx2_defaults import LTX2Defaults
from infer.ltx2_folder import open_ltx2
from infer.ltx2_generate import generate
from infer.ltx2_text import load_ltx2_text
from nn import ltx2_connectors, ltx2_upsampler
from nn.config_files import save_model
from nn.ltx2_formats import SingleModel
from nn.ltx2_official_save import save_single_file
from nn.ltx2_official_sections import UPSAMPLER_TABLE


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("diffusers") / "pipeline", "2.3")


@pytest.fixture(scope="module")
def single(pair, tmp_path_factory):
    """The pair's models as a single file, and its upsampler's file."""
    folder, configs = tmp_path_factory.mktemp("single"), {"vae": VAE, "audio_vae": SOUND, "vocoder": VOICE}
    models = {name: (open_checkpoint(pair.folder / name), cfg) for name, cfg in configs.items()}
    cfg = dataclasses.replace(pair.ours.cfg, vae_scale_factors=(8, 32, 32))  # those of every file
    save_single_file(folder / "ltx.safetensors", {"transformer": (pair.ours.params, cfg), **models})
    head = {theirs: getattr(UPSAMPLER, ours) for theirs, ours in UPSAMPLER_TABLE.items()}
    head["_class_name"] = "LatentUpsampler"
    leaves = open_checkpoint(pair.folder / "latent_upsampler").read(ltx2_upsampler.param_specs(UPSAMPLER))
    save_file(folder / "up.safetensors", leaves, {"config": json.dumps(head)})
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with Gemma, its tokenizer and connectors, and these with a transformer as a single file."""
    case = make_case(tmp_path_factory.mktemp("text"), "2.3")
    own = dataclasses.replace(case.connectors, rope_type=case.cfg.rope_type)  # a header has one for both
    cfg, specs = dataclasses.replace(case.cfg, perturbed_attn=True), ltx2_connectors.param_specs(own)
    connectors = open_checkpoint(case.folder / "connectors").read(specs)
    save_model(case.folder / "connectors", connectors, specs, ltx2_connectors.to_json(own))
    models = {"transformer": (random_params(cfg, 0), cfg), "connectors": (connectors, own)}
    save_single_file(case.folder / "x.safetensors", models)
    return dataclasses.replace(case, cfg=cfg)


def opened(folder):
    return with_weights(open_ltx2(folder, device=torch.device("cpu"), dtype=torch.float32))


def convert_pair(pair, single, out, **options):
    """With the config of the pair's transformer, whose autoencoder is smaller than a header can say."""
    return convert_single_file(single / "ltx.safetensors", out, configs={"transformer": pair.ours.cfg}, **options)


def test_the_command_names_what_it_wrote(single, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(single / "ltx.safetensors"), str(out), "--upsampler", str(single / "up.safetensors")]) == 0
    assert f"wrote {out} (transformer, vae, audio_vae, vocoder, latent_upsampler)" in capsys.readouterr().out
    index = json.loads((out / "model_index.json").read_text())
    assert index["_class_name"] == "LTX2Pipeline" and index["vae"] == ["diffusers", "AutoencoderKLLTX2Video"]
    assert index["vocoder"] == ["ltx2", "LTX2Vocoder"]


def test_a_single_file_becomes_a_pipeline_that_samples_alike(pair, single, tmp_path):
    names = convert_pair(pair, single, tmp_path / "out", upsampler=single / "up.safetensors")
    assert names == ("transformer", "vae", "audio_vae", "vocoder", "latent_upsampler")
    pipe = opened(tmp_path / "out")
    assert pipe.defaults == LTX2Defaults() == pair.ours.defaults, "of another depth than a public model"
    made = [generate(p, SAMPLING, pair.texts(1), pair.texts(2), [3])[0] for p in (pipe, pair.ours)]
    # Where tensors lie in memory decides how sums are vectorised: a level of 255 may fall on the other side.
    assert (made[0].frames.int() - made[1].frames.int()).abs().max() <= 1
    torch.testing.assert_close(made[0].sound.waveform, made[1].sound.waveform, rtol=1e-4, atol=1e-4)
    latents = torch.randn(1, 4, 2, 4, 8)
    assert torch.equal(pipe.upsampler(latents), pair.ours.upsampler(latents))


def test_diffusers_reads_the_folder(single, tmp_path):
    import diffusers

    out = tmp_path / "out"
    convert_single_file(single / "ltx.safetensors", out)
    parts = dict.fromkeys(("text_encoder", "tokenizer", "connectors"))
    pipe = diffusers.LTX2Pipeline.from_pretrained(out, **parts)
    assert pipe.vocoder is not None and pipe.scheduler.config.use_dynamic_shifting


def test_distilled_weights_are_noted(pair, single, tmp_path):
    convert_pair(pair, single, tmp_path / "out", distilled=True)
    assert opened(tmp_path / "out").defaults.distilled


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_text_encoder_comes_with_its_tokenizer_wherever_that_is(texts, tmp_path, link, inside):
    """Beside it as in Diffusers' folders, or in it as Gemma is published; copied, or linked to."""
    source, out = tmp_path / "gemma" / "text_encoder", tmp_path / "out"
    shutil.copytree(texts.folder / "text_encoder", source)
    shutil.copytree(texts.folder / "tokenizer", source if inside else source.parent / "tokenizer", dirs_exist_ok=True)
    convert_single_file(texts.folder / "x.safetensors", out, text_encoder=source, link=link)
    assert (out / "text_encoder").is_symlink() == (out / "tokenizer").is_symlink() == link
    if not link:
        shutil.rmtree(source)
        assert not list((out / "tokenizer").glob("*.safetensors"))
    index = json.loads((out / "model_index.json").read_text())
    assert index["text_encoder"] == ["transformers", "Gemma3ForConditionalGeneration"] and "tokenizer" in index
    found, wanted = (load_ltx2_text(folder, texts.cfg).embed(CAPTIONS) for folder in (out, texts.folder))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(found, wanted, strict=True) for name in a)


def refused(tmp_path, path, *parts, out="out", **options):
    with pytest.raises(UserError) as error:
        convert_single_file(path, tmp_path / out, **options)
    assert all(part in str(error.value) for part in parts), error.value
    assert not (tmp_path / out).exists() or list((tmp_path / out).iterdir()) == [tmp_path / out / "mine"]
    assert {p.name for p in tmp_path.iterdir()} <= {"used", "text_encoder", "tokenizer", "some.safetensors"}


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(texts, single, tmp_path, capsys):
    file = texts.folder / "x.safetensors"
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("")
    refused(tmp_path, file, "exists already; give a new or an empty folder", out="used")
    gemma = make_gemma()
    gemma.config.text_config.num_hidden_layers = 2
    gemma.config.text_config.layer_types = ["sliding_attention"] * 2
    type(gemma)(gemma.config).save_pretrained(tmp_path / "text_encoder")
    encoder = {"text_encoder": tmp_path / "text_encoder"}
    refused(tmp_path, file, "text_encoder: neither it nor", "tokenizer_config.json", **encoder)
    shutil.copytree(texts.folder / "tokenizer", tmp_path / "tokenizer")
    said = ["text_proj_in_factor is 4, the text encoder gives 3 hidden states", f"{tmp_path / 'text_encoder'}: "]
    refused(tmp_path, file, *said, **encoder)
    refused(tmp_path, single / "ltx.safetensors", "holds no connectors, only transformer, vae", **encoder)
    save_single_file(tmp_path / "some.safetensors", {"vae": (open_checkpoint(texts_vae(single)), VAE)})
    refused(tmp_path, tmp_path / "some.safetensors", "holds no transformer, only vae")
    assert main([str(file), str(tmp_path / "out"), "--link"]) == 2
    assert "--link would do nothing without --text-encoder" in capsys.readouterr().err


def texts_vae(single):
    """A folder with the VAE of the single file."""
    folder = single / "split"
    if not folder.exists():
        convert_single_file(single / "ltx.safetensors", folder)
    return folder / "vae"


def test_the_transformer_is_written_last(texts, tmp_path, monkeypatch):
    """A text encoder that does not fit is told before it, which is most of the bytes."""
    order = []
    plain = SingleModel.save
    monkeypatch.setattr(SingleModel, "save", lambda model, folder: order.append(folder.name) or plain(model, folder))
    monkeypatch.setattr(convert, "load_ltx2_text", lambda part, cfg: order.append("text"))
    convert_single_file(texts.folder / "x.safetensors", tmp_path / "out", text_encoder=texts.folder / "text_encoder")
    assert order == ["connectors", "text", "transformer"]
