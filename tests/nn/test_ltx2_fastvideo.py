"""FastVideo's LTX-2 folders: public names and configs, literally, and tiny folders that its converter's rules make."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ltx2_fastvideo_cases import CLASSES, TEXT, convert, cut, text_config
from ltx2_official_cases import CONFIGS, MODULES, PRESET, D, part_params, release
from safetensors.torch import load_file, save_file

from core.errors import UserError
from nn import ltx2_fastvideo
from nn.ltx2_fastvideo import gemma_folder, open_connectors, open_part, part_names, tokenizer_folder
from nn.ltx2_official_parts import NOTES, PARTS

FAMILIES = ("2.0", "2.3")
CASES = [(part, family) for part in PARTS for family in FAMILIES]
FOLDERS = {**{part: part for part in CLASSES}, "connectors": "text_encoder"}

# {part, family: {FastVideo's name: ours}}
PUBLIC_NAMES = {
    ("vae", "2.0"): {
        "per_channel_statistics.mean-of-means": "latents_mean", "per_channel_statistics.std-of-means": "latents_std",
        "encoder.conv_in.conv.weight": "encoder.conv_in.conv.weight",
        "encoder.down_blocks.1.conv.conv.weight": "encoder.down_blocks.0.downsamplers.0.conv.conv.weight",
        "encoder.down_blocks.8.res_blocks.1.conv2.conv.bias": "encoder.mid_block.resnets.1.conv2.conv.bias",
        "decoder.up_blocks.6.res_blocks.4.conv2.conv.bias": "decoder.up_blocks.2.resnets.4.conv2.conv.bias",
    },
    ("audio_vae", "2.0"): {
        "per_channel_statistics.mean-of-means": "latents_mean", "per_channel_statistics.std-of-means": "latents_std",
        "encoder.down.0.downsample.conv.weight": "encoder.down.0.downsample.conv.weight",
        "decoder.up.1.upsample.conv.conv.weight": "decoder.up.1.upsample.conv.conv.weight",
    },
    ("vocoder", "2.0"): {
        "conv_pre.weight": "conv_in.weight", "ups.4.bias": "upsamplers.4.bias",
        "resblocks.14.convs1.2.weight": "resnets.14.convs1.2.weight", "conv_post.bias": "conv_out.bias",
    },
    ("vocoder", "2.3"): {
        "vocoder.conv_pre.weight": "vocoder.conv_in.weight",
        "bwe_generator.act_post.downsample.lowpass.filter": "bwe_generator.act_out.downsample.filter",
        "mel_stft.mel_basis": "mel_stft.mel_basis",
    },
    ("connectors", "2.0"): {
        "aggregate_embed.weight": "text_proj_in.weight",
        "embeddings_connector.learnable_registers": "video_connector.learnable_registers",
        "embeddings_connector.transformer_1d_blocks.1.attn1.q_norm.weight":
            "video_connector.transformer_blocks.1.attn1.norm_q.weight",
        "audio_embeddings_connector.transformer_1d_blocks.0.attn1.to_out.0.bias":
            "audio_connector.transformer_blocks.0.attn1.to_out.0.bias",
    },
    ("connectors", "2.3"): {
        "video_aggregate_embed.weight": "video_text_proj_in.weight",
        "audio_aggregate_embed.bias": "audio_text_proj_in.bias",
        "audio_embeddings_connector.transformer_1d_blocks.7.attn1.to_gate_logits.weight":
            "audio_connector.transformer_blocks.7.attn1.to_gate_logits.weight",
    },
}  # fmt: skip


def faults(error) -> list[str]:
    return str(error.value).split("\n  - ")[1:]


def preset(part, family):
    return PARTS[part].presets[PRESET[part, family]]


def write(folder, family):
    leaves, head = release(family)
    return convert(leaves, head, folder, text_config(CONFIGS["connectors", family]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("fastvideo")
    return {family: write(root / family, family) for family in FAMILIES}


def opened(folder, part):
    place = folder / FOLDERS[part]
    return open_connectors(place) if part == "connectors" else open_part(place, part)


def rewritten(source, target, change=None, **entries):
    """A copy of a part's folder with other leaves and other entries of its config (None: without that entry)."""
    (target / "text_encoder").mkdir(parents=True)
    target = target / "text_encoder"
    leaves = load_file(source / "model.safetensors")
    save_file(leaves if change is None else change(leaves), target / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | entries
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


def open_place(place, part):
    return open_connectors(place) if part == "connectors" else open_part(place, part)


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part,family", PUBLIC_NAMES)
def test_public_names(part, family):
    names = part_names(part, preset(part, family))
    assert {names[ours]: ours for ours in PUBLIC_NAMES[part, family].values()} == PUBLIC_NAMES[part, family]


@pytest.mark.parametrize("part,family", PRESET)
def test_every_public_name_is_what_the_converter_makes_of_the_official_one(part, family):
    cfg = preset(part, family)
    official = PARTS[part].names(cfg, D)
    assert cut({name: key for key, name in official.items()}) == {
        FOLDERS[part]: {name: key for key, name in part_names(part, cfg).items()}
    }


# --- opening ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part,family", CASES)
def test_parts_open_to_the_models_that_were_converted(folders, part, family):
    tree, cfg = opened(folders[family], part)
    params, read = part_params(part, family), tree.read()
    assert cfg == CONFIGS[part, family] and read.keys() == params.keys()
    assert all(torch.equal(read[k], params[k]) and read[k].dtype == params[k].dtype for k in params)
    assert tree.files == (folders[family] / FOLDERS[part] / "model.safetensors",)


@pytest.mark.parametrize("part", ["vae", "audio_vae"])
def test_statistics_that_no_model_uses_are_left_out(folders, tmp_path, part):
    notes = {f"per_channel_statistics.{note}": torch.zeros(2) for note in NOTES}
    place = rewritten(folders["2.3"] / part, tmp_path, lambda leaves: leaves | notes)
    assert open_part(place, part)[0].keys() == part_params(part, "2.3").keys()


def test_an_audio_vae_may_have_a_decoder_only(folders, tmp_path):
    decoding = lambda leaves: {k: v for k, v in leaves.items() if not k.startswith("encoder.")}  # noqa: E731
    tree, cfg = open_part(rewritten(folders["2.0"] / "audio_vae", tmp_path, decoding), "audio_vae")
    params = part_params("audio_vae", "2.0")
    assert cfg == CONFIGS["audio_vae", "2.0"] and tree.keys() == {k for k in params if not k.startswith("encoder.")}
    assert not ltx2_fastvideo.encodes(tree) and ltx2_fastvideo.encodes(params)
    half = lambda leaves: decoding(leaves) | {"encoder.conv_in.conv.bias": leaves["encoder.conv_in.conv.bias"]}  # noqa: E731
    with pytest.raises(UserError, match=r"missing encoder\.conv_in\.conv\.weight"):
        open_part(rewritten(folders["2.0"] / "audio_vae", tmp_path / "half", half), "audio_vae")


@pytest.mark.parametrize(
    "family,names",
    [
        ("2.0", {"aggregate_embed.": "feature_extractor.aggregate_embed."}),
        ("2.0", {"aggregate_embed.": "feature_extractor_linear.aggregate_embed."}),
        ("2.3", {"embeddings_connector.": "video_connector.", "audio_embeddings_connector.": "audio_connector."}),
        ("2.3", {"video_aggregate_embed.": "feature_extractor.video_aggregate_embed."}),
        ("2.3", {f"{s}_aggregate_embed.": f"{s}_feature_extractor_linear." for s in ("video", "audio")}),
    ],
)
def test_other_names_that_fastvideos_loader_takes(folders, tmp_path, family, names):
    def other(key):
        start = next((start for start in names if key.startswith(start)), None)
        return key if start is None else names[start] + key.removeprefix(start)

    source = folders[family] / "text_encoder"
    place = rewritten(source, tmp_path, lambda leaves: {other(k): v for k, v in leaves.items()})
    assert load_file(place / "model.safetensors").keys() != load_file(source / "model.safetensors").keys()
    tree, cfg = open_connectors(place)
    params = part_params("connectors", family)
    assert cfg == CONFIGS["connectors", family] and all(torch.equal(v, params[k]) for k, v in tree.read().items())


def test_one_leaf_under_two_names_is_refused(folders, tmp_path):
    twice = lambda leaves: leaves | {"feature_extractor.aggregate_embed.weight": torch.zeros(12, 36)}  # noqa: E731
    with pytest.raises(UserError) as error:
        open_connectors(rewritten(folders["2.0"] / "text_encoder", tmp_path, twice))
    assert faults(error) == ["unexpected feature_extractor.aggregate_embed.weight [12, 36]"]


# --- what does not fit --------------------------------------------------------------------------------------------


@given(st.data())
def test_every_missing_extra_and_misshapen_key_is_told_with_the_file(folders, tmp_path_factory, data):
    part, family = data.draw(st.sampled_from(CASES))
    source, root = folders[family] / FOLDERS[part], tmp_path_factory.mktemp("bad")
    keys = sorted(load_file(source / "model.safetensors"))
    # What a config is read from besides its own fields: widths of the vocoder's ends and of the first projection.
    told = ("conv_pre.weight", "conv_post.weight", "aggregate_embed.weight", "embed.bias", "scale_shift_table")
    free = [key for key in keys if not key.endswith(told)]
    gone, odd = data.draw(st.lists(st.sampled_from(free), min_size=2, max_size=2, unique=True))

    def change(leaves):
        leaves = {k: v for k, v in leaves.items() if k != gone}
        return leaves | {odd: torch.zeros(3, 1, 7), "extra.weight": torch.zeros(1)}

    place = rewritten(source, root, change)
    with pytest.raises(UserError) as error:
        open_place(place, part)
    assert str(error.value).startswith(f"{place / 'model.safetensors'}: 3 keys do not fit")
    found = faults(error)
    assert found[0].startswith(f"missing {gone} [") and "unexpected extra.weight [1]" in found
    assert [f for f in found if f.startswith(f"{odd} has shape [3, 1, 7], expected [")]


@pytest.mark.parametrize(
    "part,entries,fault",
    [
        ("vae", {"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL', expected 'CausalVideoAutoencoder'"),
        ("vae", {"vae": None}, "vae is None, expected an object: the section of the single file's header"),
        ("audio_vae", {"audio_vae": [1]}, "audio_vae is [1], expected an object"),
        ("vocoder", {"vae": {}}, "unknown entry vae"),
        ("vocoder", {"vocoder": {"stereo": False}}, "stereo is False, only True is supported"),
        ("audio_vae", {"audio_vae": {"model": {"params": {"ddconfig": {"ch": "4"}}}}}, "base_channels is '4', exp"),
        ("vae", {"vae": {"_class_name": "CausalDiffusionVAE"}}, "_class_name is 'CausalDiffusionVAE', only"),
    ],
)
def test_bad_sections_name_the_file(folders, tmp_path, part, entries, fault):
    place = rewritten(folders["2.0"] / part, tmp_path, **entries)
    with pytest.raises(UserError) as error:
        open_part(place, part)
    assert str(error.value).startswith(str(place / "config.json")) and fault in str(error.value)


# --- the text encoder's config ------------------------------------------------------------------------------------


def shapes(family):
    """Shapes of the public connectors, their projections under official names."""
    cfg = preset("connectors", family)
    names, specs = PARTS["connectors"].names(cfg, ""), MODULES["connectors"].param_specs(cfg)
    return {names[key]: spec for key, spec in specs.items()}


def test_the_public_config_is_the_preset():
    """LTX-2.3's as FastVideo's fields say it; the converter writes LTX-2.0's only."""
    assert ltx2_fastvideo.text_config(TEXT, "x", shapes("2.0"), {}) == preset("connectors", "2.0")
    cfg = preset("connectors", "2.3")
    assert ltx2_fastvideo.text_config(text_config(cfg), "x", shapes("2.3"), {}) == cfg
    with pytest.raises(UserError, match="widths are not those of its connectors"):
        ltx2_fastvideo.text_config(text_config(cfg, audio_feature_extractor_out_features=7), "x", shapes("2.3"), {})


def test_what_the_config_leaves_open_is_the_transformers(folders, tmp_path):
    """As FastVideo's loader has it: an interleaved RoPE in float32 is no oversight where both say so."""
    open_ended = {"connector_rope_type": None, "connector_double_precision_rope": None}
    place = rewritten(folders["2.0"] / "text_encoder", tmp_path, **open_ended)
    found = lambda: (lambda cfg: (cfg.rope_type, cfg.rope_double_precision))(open_connectors(place)[1])  # noqa: E731
    assert found() == ("split", False)
    (tmp_path / "transformer").mkdir()
    path = tmp_path / "transformer" / "config.json"
    path.write_text(json.dumps({"rope_type": "interleaved", "double_precision_rope": True}))
    assert found() == ("interleaved", True)
    place = rewritten(folders["2.0"] / "text_encoder", tmp_path / "said", connector_double_precision_rope=False)
    assert found() == ("split", False)


@pytest.mark.parametrize(
    "entries,fault",
    [
        ({"architectures": ["UMT5EncoderModel"]}, "architectures is ['UMT5EncoderModel'], not LTX2GemmaText"),
        ({"connector_num_layer": 2}, "unknown entry connector_num_layer (did you mean 'connector_num_layers'?)"),
        ({"padding_side": "right"}, "padding_side is 'right', only 'left' is supported"),
        ({"text_len": 512}, "text_len is 512, only 1024 is supported"),
        ({"connector_double_precision_rope": 1}, "connector_double_precision_rope is 1, expected true or false"),
        ({"connector_positional_embedding_theta": "1e4"}, "positional_embedding_theta is '1e4', expected a number"),
        ({"connector_num_layers": "2"}, "video_connector_num_layers is '2', expected int"),
        ({"connector_positional_embedding_max_pos": [1, 2]}, "max_pos is [1, 2], expected 1 number"),
        ({"feature_extractor_in_features": 37}, "feature_extractor_in_features is 37, expected 36"),
        ({"feature_extractor_out_features": 13}, "feature_extractor_out_features is 13, expected 12"),
    ],
)
def test_bad_text_configs_name_the_file(folders, tmp_path, entries, fault):
    place = rewritten(folders["2.0"] / "text_encoder", tmp_path, **entries)
    with pytest.raises(UserError) as error:
        open_connectors(place)
    assert str(error.value).startswith(str(place / "config.json")) and fault in str(error.value)


def test_where_gemma_and_the_tokenizer_stand(tmp_path):
    text, index = tmp_path / "text_encoder", tmp_path / "model_index.json"
    assert gemma_folder(text) == tokenizer_folder(text) == text / "gemma"
    index.write_text(json.dumps({"gemma_model_path": "models/gemma"}))
    assert gemma_folder(text) == tokenizer_folder(text) == tmp_path / "models" / "gemma"
    (tmp_path / "tokenizer").mkdir()
    assert tokenizer_folder(text) == tmp_path / "tokenizer"
    index.write_text(json.dumps({"gemma_model_path": 3}))
    with pytest.raises(UserError, match="gemma_model_path is 3, expected the path of a folder"):
        gemma_folder(text)
