"""Official single files written from models: what opens them gives the same leaves and configs back."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from ltx2_cases import random_params
from ltx2_official_cases import (
    CONFIGS,
    PRESET,
    SECTIONS,
    block_lists,
    part_params,
    release,
    section_of_blocks,
    transformer_config,
    write,
)

from core.checkpoint import open_checkpoint
from core.errors import UserError
from nn import ltx2_official_sections as sections
from nn.ltx2_config import PRESETS
from nn.ltx2_formats import open_single_file
from nn.ltx2_official import official_config
from nn.ltx2_official_parts import PARTS, open_single_part
from nn.ltx2_official_save import official_sections, save_single_file

MODELS = ("transformer", *PARTS)


def faults(error) -> list[str]:
    return str(error.value).split("\n  - ")[1:]


def config_of(name, family):
    return transformer_config(family) if name == "transformer" else CONFIGS[name, family]


def params_of(name, family):
    return random_params(transformer_config(family), 0) if name == "transformer" else part_params(name, family)


def opened(path, name):
    return open_single_file(path) if name == "transformer" else open_single_part(path, name)


# --- headers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["2.0", "2.3"])
def test_block_lists_of_presets_are_the_public_ones(family):
    """Where a public header leaves a flag out, it is false."""
    found = official_sections({"vae": PARTS["vae"].presets[PRESET["vae", family]]})["vae"]
    public = SECTIONS["vae", family]

    def plain(entries):
        return [[kind, {k: v for k, v in params.items() if v is not False}] for kind, params in entries]

    for name in ("encoder_blocks", "decoder_blocks"):
        assert plain(found[name]) == plain(public[name])


@pytest.mark.parametrize("part,family", PRESET)
def test_sections_of_presets_say_what_public_headers_say(part, family):
    cfg = PARTS[part].presets[PRESET[part, family]]
    found = official_sections({part: cfg})[PARTS[part].section]
    for key, value in SECTIONS[part, family].items():
        if key in found and not isinstance(value, dict | list):
            assert found[key] == value, key


@given(blocks=block_lists())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_vae_of_a_header_goes_back_into_one(blocks):
    cfg = sections.vae_config(section_of_blocks(*blocks), "file", {})
    assert sections.vae_config(official_sections({"vae": cfg})["vae"], "file", {}) == cfg


def test_presets_of_the_transformer_have_an_official_form():
    for cfg in PRESETS.values():
        assert official_config(official_sections({"transformer": cfg})["transformer"], "file") == cfg


@pytest.mark.parametrize(
    "name,family,changes,fault",
    [
        ("vae", "2.0", {"resnet_norm_eps": 1e-5}, "vae: resnet_norm_eps is 1e-05, would be read as 1e-06"),
        ("vae", "2.0", {"encoder_causal": False}, "vae: encoder_causal is False, would be read as True"),
        ("vae", "2.3", {"upsample_residual": (True, False)}, "unknown parameter residual of compress_space"),
        ("vocoder", "2.0", {"leaky_relu_negative_slope": 0.2}, "leaky_relu_negative_slope is 0.2, would be read as"),
        ("vocoder", "2.0", {"act_fn": "snake"}, "vocoder: act_fn is 'snake', would be read as 'leaky_relu'"),
        ("connectors", "2.3", {"rope_theta": 5e4}, "connectors: rope_theta is 50000.0, would be read as 10000.0"),
        ("connectors", "2.3", {"modality": "video"}, "connectors: modality is 'video', would be read as"),
        ("transformer", "2.3", {"modality": "audio"}, "transformer: modality is 'audio', would be read as"),
    ],
)
def test_what_a_header_cannot_say_is_refused(tmp_path, name, family, changes, fault):
    cfg = dataclasses.replace(config_of(name, family), **changes)
    with pytest.raises(UserError, match="these configs have no official form") as error:
        save_single_file(tmp_path / "x.safetensors", {name: ({}, cfg)})
    assert fault in str(error.value) and not list(tmp_path.iterdir())


def test_models_that_share_a_section_must_agree():
    """The transformer's fields and the connectors' stand in one section."""
    configs = {name: config_of(name, "2.3") for name in ("transformer", "connectors")}
    official_sections(configs)
    configs["transformer"] = dataclasses.replace(configs["transformer"], caption_channels=24, rope_type="interleaved")
    with pytest.raises(UserError) as error:
        official_sections(configs)
    assert any("connectors: rope_type is 'split', would be read as 'interleaved'" in f for f in faults(error))


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["2.0", "2.3"])
def test_a_release_is_written_as_it_was_read(tmp_path, family):
    """From lazy leaves; keys, tensors and dtypes are those of the first file, and every model opens as before."""
    leaves, head = release(family)
    first = write(tmp_path / "first.safetensors", leaves, head)
    second = tmp_path / "second.safetensors"
    save_single_file(second, {name: opened(first, name) for name in MODELS})
    again = open_checkpoint(second).read()
    assert again.keys() == leaves.keys()
    assert all(torch.equal(again[k], leaves[k]) and again[k].dtype == leaves[k].dtype for k in leaves)
    for name in MODELS:
        tree, cfg = opened(second, name)
        assert cfg == config_of(name, family) and tree.keys() == params_of(name, family).keys()


def test_some_models_alone(tmp_path):
    path = tmp_path / "x.safetensors"
    save_single_file(path, {"vocoder": (params_of("vocoder", "2.3"), config_of("vocoder", "2.3"))})
    tree, cfg = open_single_part(path, "vocoder")
    assert cfg == config_of("vocoder", "2.3") and all(torch.equal(tree[k].read(), v)
                                                      for k, v in params_of("vocoder", "2.3").items())  # fmt: skip
    assert list(json.loads(open_checkpoint(path).metadata["config"])) == ["vocoder"]


def test_leaves_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    path, params = tmp_path / "x.safetensors", params_of("audio_vae", "2.0")
    del params["latents_mean"]
    with pytest.raises(UserError, match="latents_mean"):
        save_single_file(path, {"audio_vae": (params, config_of("audio_vae", "2.0"))})
    with pytest.raises(UserError, match="text_encoder is none of connectors, transformer, vae, audio_vae, vocoder"):
        save_single_file(path, {"text_encoder": ({}, None)})
    assert not list(tmp_path.iterdir())
