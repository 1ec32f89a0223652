"""LTX-2's checkpoint forms on synthetic files with exactly the public key names."""

import dataclasses
import json
import re
import resource
import weakref

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_cases import configs, random_case, random_params, tiny_config
from ltx2_official_cases import CONFIGS, MODULES, D, part_params, release, sparse_file, transformer_config, write
from ltx2_side_cases import close, draw
from ltx2_vae_cases import conditions as vae_given
from ltx2_vae_cases import same_noise
from safetensors.torch import load_file, save_file

from core import stored
from core.checkpoint import LazyLeaf, LazyTree
from core.errors import UserError
from core.rules import cast
from core.save import describe, save_checkpoint
from core.specs import specs_of
from core.transforms import apply, invert
from nn import ltx2, ltx2_audio, ltx2_connectors, ltx2_upsampler, ltx2_vae, ltx2_vocoder
from nn.config_files import open_model
from nn.ltx2_config import PRESETS
from nn.ltx2_formats import (
    class_name,
    from_json,
    merge_base,
    open_single_file,
    open_transformer,
    read_config,
    split_single_file,
    to_json,
    with_modality,
)
from nn.ltx2_inputs import model_inputs
from nn.ltx2_names import foreign_keys, from_official, official_name, to_official
from nn.ltx2_official import official_config, official_section
from nn.ltx2_official_parts import PARTS, open_single_part
from nn.ltx2_official_sections import upsampler_config
from nn.ltx2_specs import param_specs
from nn.ltx2_upsampler import UpsamplerConfig

# Sections `transformer` of the public single files, as their headers have them.
COMMON = {
    "_class_name": "AVTransformer3DModel", "activation_fn": "gelu-approximate", "attention_bias": True,
    "attention_head_dim": 128, "attention_type": "default", "caption_channels": 3840, "cross_attention_dim": 4096,
    "double_self_attention": False, "dropout": 0.0, "in_channels": 128, "norm_elementwise_affine": False,
    "norm_eps": 1e-06, "norm_num_groups": 32, "num_attention_heads": 32, "num_embeds_ada_norm": 1000,
    "num_layers": 48, "num_vector_embeds": None, "only_cross_attention": False, "cross_attention_norm": True,
    "out_channels": 128, "upcast_attention": False, "use_linear_projection": False, "qk_norm": "rms_norm",
    "standardization_norm": "rms_norm", "positional_embedding_type": "rope", "positional_embedding_theta": 10000.0,
    "positional_embedding_max_pos": [20, 2048, 2048], "timestep_scale_multiplier": 1000,
    "av_ca_timestep_scale_multiplier": 1000.0, "causal_temporal_positioning": True, "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64, "use_audio_video_cross_attention": True, "share_ff": False,
    "audio_out_channels": 128, "audio_cross_attention_dim": 2048, "audio_positional_embedding_max_pos": [20],
    "av_cross_ada_norm": True, "use_embeddings_connector": True, "use_middle_indices_grid": True,
    "rope_type": "split", "frequencies_precision": "float64",
}  # fmt: skip
CONNECTOR = {
    "connector_attention_head_dim": 128, "connector_num_attention_heads": 30, "connector_num_layers": 2,
    "connector_positional_embedding_max_pos": [4096], "connector_num_learnable_registers": 128,
    "connector_norm_output": True, "audio_connector_attention_head_dim": 64, "audio_connector_num_attention_heads": 32,
    "caption_projection_first_linear": False, "caption_projection_second_linear": False,
    "caption_proj_input_norm": False, "connector_learnable_registers_std": 1, "text_encoder_norm_type": "per_token_rms",
    "connector_apply_gated_attention": True,
}  # fmt: skip
SECTION = {
    "ltx-2-19b": COMMON,
    "ltx-2.3-22b": {
        **COMMON, **CONNECTOR, "apply_gated_attention": True, "cross_attention_adaln": True,
        "caption_proj_before_connector": True,
    },
    "ltx-2.5": {
        **COMMON, **CONNECTOR, "apply_gated_attention": True, "cross_attention_adaln": True,
        "caption_proj_before_connector": True, "ff_bias": False, "use_prompt_adaln_single": False,
        "use_keyframes_abs_pos_embedding": True,
    },
}  # fmt: skip
BESIDE = ("vae.encoder.conv_in.conv.weight", "vae.per_channel_statistics.mean-of-means", "vocoder.conv_pre.weight",
          "audio_vae.per_channel_statistics.mean-of-means", "text_embedding_projection.aggregate_embed.weight",
          "model.diffusion_model.video_embeddings_connector.learnable_registers",
          "model.diffusion_model.audio_embeddings_connector.transformer_1d_blocks.0.attn1.q_norm.weight")  # fmt: skip
PUBLIC_KEYS = {  # some of the 19B file's keys after the prefix, and what Diffusers' converter calls them
    "patchify_proj.weight": "proj_in.weight",
    "audio_patchify_proj.bias": "audio_proj_in.bias",
    "adaln_single.linear.weight": "time_embed.linear.weight",
    "audio_adaln_single.emb.timestep_embedder.linear_1.bias": "audio_time_embed.emb.timestep_embedder.linear_1.bias",
    "av_ca_video_scale_shift_adaln_single.linear.bias": "av_cross_attn_video_scale_shift.linear.bias",
    "av_ca_audio_scale_shift_adaln_single.linear.bias": "av_cross_attn_audio_scale_shift.linear.bias",
    "av_ca_a2v_gate_adaln_single.linear.weight": "av_cross_attn_video_a2v_gate.linear.weight",
    "av_ca_v2a_gate_adaln_single.linear.weight": "av_cross_attn_audio_v2a_gate.linear.weight",
    "transformer_blocks.1.scale_shift_table_a2v_ca_video":
        "transformer_blocks.1.video_a2v_cross_attn_scale_shift_table",
    "transformer_blocks.1.scale_shift_table_a2v_ca_audio":
        "transformer_blocks.1.audio_a2v_cross_attn_scale_shift_table",
    "transformer_blocks.0.audio_to_video_attn.q_norm.weight": "transformer_blocks.0.audio_to_video_attn.norm_q.weight",
    "transformer_blocks.0.attn1.to_out.0.bias": "transformer_blocks.0.attn1.to_out.0.bias",
    "transformer_blocks.0.ff.net.0.proj.weight": "transformer_blocks.0.ff.net.0.proj.weight",
    "audio_caption_projection.linear_2.weight": "audio_caption_projection.linear_2.weight",
    "audio_scale_shift_table": "audio_scale_shift_table",
}  # fmt: skip


def faults(error) -> list[str]:
    return str(error.value).split("\n  - ")[1:]


def official(params, prefix="model.diffusion_model."):
    return {prefix + official_name(k): v for k, v in params.items()}


def write_single(path, cfg, params, prefix="model.diffusion_model.", config=True, beside=BESIDE):
    """An official single file: the transformer, and leaves of other models."""
    leaves = official(params, prefix) | {k: torch.zeros(3) for k in beside}
    section = {**COMMON, **CONNECTOR, **official_section(cfg)}
    metadata = {"config": json.dumps({"transformer": section, "vae": {}}), "model_version": "2.0.0"} if config else {}
    save_file(leaves, path, metadata=metadata)
    return path


def write_folder(path, cfg, params, **changes):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**to_json(cfg), "_diffusers_version": "0.42.1", **changes}))
    save_file(params, path / "diffusion_pytorch_model.safetensors")
    return path


def equal(tree, params):
    read = tree.read()
    assert read.keys() == params.keys()
    assert all(torch.equal(read[k], params[k]) and read[k].dtype == params[k].dtype for k in params)


def mixed(cfg, seed=0):
    """bfloat16 weights beside float32 tables, as public checkpoints have them."""
    return apply(random_params(cfg, seed), cast(torch.bfloat16)(param_specs(cfg)))


# --- configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_headers_of_the_public_files_are_the_presets(name):
    assert official_config(SECTION[name], "file") == PRESETS[name]


@given(cfg=configs(), modality=st.sampled_from(["audio_video", "video", "audio"]))
def test_configs_survive_their_json(cfg, modality):
    cfg = dataclasses.replace(cfg, modality=modality)
    data = json.loads(json.dumps(to_json(cfg)))
    assert data["_class_name"] == class_name(cfg)
    assert from_json(data, "file") == cfg


@given(cfg=configs(), gated=st.booleans(), mod=st.booleans())
@settings(max_examples=8)
def test_configs_survive_their_official_form(cfg, gated, mod):
    cfg = dataclasses.replace(
        cfg, gated_attn=gated, audio_gated_attn=gated, cross_attn_mod=mod, audio_cross_attn_mod=mod,
        use_cross_timestep=mod, perturbed_attn=True,
    )  # fmt: skip
    assert official_config(json.loads(json.dumps(official_section(cfg))), "file") == cfg


def test_a_config_without_an_official_form():
    with pytest.raises(UserError, match="gated_attn True and audio_gated_attn False must be equal"):
        official_section(tiny_config(audio_gated_attn=False))


def test_diffusers_config_of_2_3_follows_the_other_stream():
    """Diffusers' config does not say so; its pipelines pass it for LTX-2.3."""
    data = {k: v for k, v in to_json(PRESETS["ltx-2.3-22b"]).items() if k != "use_cross_timestep"}
    assert from_json(data, "file").use_cross_timestep
    assert not from_json(to_json(PRESETS["ltx-2-19b"]), "file").use_cross_timestep
    assert from_json({**data, "out_channels": None}, "file").out_channels == 128


@pytest.mark.parametrize(
    "changes,fault",
    [
        ({"num_layer": 3}, "unknown key num_layer (did you mean 'num_layers'?)"),
        ({"gated_attn": "true"}, "gated_attn is 'true', expected bool"),
        ({"qk_norm": "rms_norm"}, "qk_norm is 'rms_norm', only 'rms_norm_across_heads' is supported"),
        ({"_class_name": "WanTransformer3DModel"}, "_class_name is 'WanTransformer3DModel', expected one of LTX2Video"),
        ({"rope_type": "half"}, "rope_type is 'half', must be one of interleaved, split"),
        ({"quantization_config": {}}, "unknown key quantization_config"),
    ],
)
def test_a_bad_diffusers_config_names_file_and_key(tmp_path, changes, fault):
    folder = write_folder(tmp_path, tiny_config(), {"a": torch.zeros(1)}, **changes)
    with pytest.raises(UserError) as error:
        read_config(folder)
    assert str(tmp_path / "config.json") in str(error.value) and fault in str(error.value)


def test_bad_official_sections_name_every_field():
    section = {**COMMON, "dropout": 0.1, "aply_gated_attention": True, "share_ff": True}
    section["positional_embedding_max_pos"] = [20]
    with pytest.raises(UserError) as error:
        official_config(section, "x.safetensors")
    assert "x.safetensors" in str(error.value) and faults(error) == [
        "dropout is 0.1, only 0.0 is supported",
        "share_ff is True, only False is supported",
        "unknown field aply_gated_attention (did you mean 'apply_gated_attention'?)",
        "positional_embedding_max_pos is [20], expected 3 numbers",
    ]
    with pytest.raises(UserError, match="num_layers is '48', expected int"):
        official_config({**COMMON, "num_layers": "48"}, "x")
    with pytest.raises(UserError, match="transformer is list"):
        official_config([], "x")


# --- names --------------------------------------------------------------------------------------------------------


def test_official_names_are_diffusers_converters():
    """Over every key of each family; the converter also drops connectors, and does not know 2.3's prompt AdaLN."""
    from diffusers.loaders.single_file_utils import convert_ltx2_transformer_to_diffusers

    for name in PRESETS:
        cfg = dataclasses.replace(PRESETS[name], num_layers=2)
        keys = {k: s for k, s in param_specs(cfg).items() if "prompt_adaln" not in k}
        theirs = convert_ltx2_transformer_to_diffusers({f"model.diffusion_model.{official_name(k)}": k for k in keys})
        assert theirs == {k: k for k in keys}
    assert official_name("prompt_adaln.linear.bias") == "prompt_adaln_single.linear.bias"
    assert official_name("audio_prompt_adaln.linear.bias") == "audio_prompt_adaln_single.linear.bias"
    for public, ours in PUBLIC_KEYS.items():
        assert official_name(ours) == public
        assert ours in param_specs(dataclasses.replace(PRESETS["ltx-2-19b"], num_layers=2))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("modality", ["video", "audio"])
def test_left_out_keys_are_exactly_the_difference(name, modality):
    """Every key that one stream lacks is dropped by its exact name; names that merely look alike are refused."""
    whole = dataclasses.replace(PRESETS[name], num_layers=2)
    cfg = dataclasses.replace(whole, modality=modality)
    gone = foreign_keys(cfg)
    assert gone | set(param_specs(cfg)) == set(param_specs(whole)) and not gone & set(param_specs(cfg))
    leaves = specs_of({f"model.{official_name(k)}": s for k, s in param_specs(whole).items()})
    assert set(from_official(cfg)(leaves).specs) == set(param_specs(cfg))
    spec = next(iter(leaves.values()))
    for typo in (
        "audio_typo.weight", "transformer_blocks.0.audio_attn3.to_q.weight", "transformer_blocks.bad.audio_attn1.x",
        "audio_scale_shift_tables", "transformer_blocks.2.audio_attn1.to_q.weight",
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"unexpected model.{re.escape(typo)}"):
            from_official(cfg)({**leaves, f"model.{typo}": spec})


def test_audio_alone_has_the_caption_projection_of_the_19b_family():
    audio = dataclasses.replace(PRESETS["ltx-2-19b"], modality="audio", num_layers=1)
    named = {k for k in param_specs(audio) if "caption_projection" in k}
    assert named == {f"audio_caption_projection.linear_{i}.{p}" for i in (1, 2) for p in ("weight", "bias")}


@given(cfg=configs(), seed=st.integers(0, 1000), modality=st.sampled_from(["audio_video", "video", "audio"]),
       prefix=st.sampled_from(["model.diffusion_model.", "diffusion_model.", "model.", ""]))  # fmt: skip
@settings(max_examples=8)
def test_official_names_and_back(cfg, seed, modality, prefix):
    cfg = dataclasses.replace(cfg, modality=modality)
    params = random_params(cfg, seed)
    bound = to_official(cfg, prefix)(specs_of(params))
    renamed = apply(params, bound)
    assert renamed.keys() == official(params, prefix).keys()
    back = apply(renamed, from_official(cfg)(specs_of(renamed)))
    again = apply(renamed, invert(bound))
    assert all(torch.equal(back[k], params[k]) and torch.equal(again[k], params[k]) for k in params)


# --- folders and files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["2.0", "2.3"])
@pytest.mark.parametrize("modality", [None, "video", "audio"])
def test_every_form_opens_to_the_same_tree(tmp_path, family, modality):
    cfg = tiny_config(family=family, perturbed_attn=True)
    params = mixed(cfg)
    folder = write_folder(tmp_path / "diffusers", cfg, params)
    single = write_single(tmp_path / "single.safetensors", cfg, params)
    comfy = write_single(tmp_path / "comfy.safetensors", cfg, params, prefix="diffusion_model.", beside=())
    fastvideo = tmp_path / "fastvideo"
    fastvideo.mkdir()
    section = {k: v for k, v in official_section(cfg).items() if k != "frequencies_precision"}
    section |= {"_class_name": "LTX2Transformer3DModel", "double_precision_rope": True, "patch_size": [1, 1, 1]}
    (fastvideo / "config.json").write_text(json.dumps(section))
    save_file(official(params, ""), fastvideo / "model.safetensors")
    wanted = with_modality(cfg, modality, "")
    kept = {k: params[k] for k in param_specs(wanted)}
    for opened in (
        open_transformer(folder, modality), open_single_file(single, modality), open_single_file(comfy, modality),
        open_transformer(fastvideo, modality),
    ):  # fmt: skip
        tree, found = opened
        assert found == wanted
        equal(tree, kept)


def test_fastvideos_other_spelling_of_gates(tmp_path):
    cfg = tiny_config(perturbed_attn=True)
    params = mixed(cfg)
    leaves = {k.replace("to_gate_logits", "to_gate_compress"): v for k, v in official(params, "").items()}
    section = {**official_section(cfg), "_class_name": "LTX2Transformer3DModel"}
    (tmp_path / "config.json").write_text(json.dumps(section))
    save_file(leaves, tmp_path / "model.safetensors")
    equal(open_transformer(tmp_path)[0], params)


def test_the_tables_stay_float32_and_the_model_runs(tmp_path):
    cfg = tiny_config(family="2.0", perturbed_attn=True)
    tree, found = open_single_file(write_single(tmp_path / "x.safetensors", cfg, mixed(cfg)), "video")
    tables = {k for k, leaf in tree.items() if leaf.dtype == torch.float32}
    assert tables == {k for k in tree if k.endswith("scale_shift_table")} and len(tables) == cfg.num_layers + 1
    inputs = model_inputs(found, random_case(found, 0).streams, dtype=torch.bfloat16)
    assert ltx2.forward(tree.read(), found, inputs)["video"].isfinite().all()


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_the_other_streams_weights_are_never_read(modality):
    cfg = tiny_config(modality=modality)
    params, reads = official(random_params(tiny_config(), 0)), []

    def leaf(key, value):
        return LazyLeaf(tuple(value.shape), value.dtype, lambda memo: reads.append(key) or value)

    tree = LazyTree({k: leaf(k, v) for k, v in params.items()}, {})
    opened = apply(tree, from_official(cfg)(tree.specs))
    opened.read()
    assert sorted(reads) == sorted(official({k: None for k in param_specs(cfg)}))


def test_a_large_file_takes_no_memory(tmp_path):
    """A quarter of the 19B model's blocks at full width, as a sparse file: opened, one stream chosen, one leaf read."""
    cfg = dataclasses.replace(PRESETS["ltx-2-19b"], num_layers=12)
    leaves = {
        f"model.diffusion_model.{official_name(k)}": ("F32" if s.keep_fp32 else "BF16", s.shape)
        for k, s in param_specs(cfg).items()
    }
    path = tmp_path / "ltx-2-19b-dev.safetensors"
    size = sparse_file(path, leaves, {"config": json.dumps({"transformer": {**COMMON, "num_layers": 12}})})
    assert size > 9 * 2**30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tree, found = open_single_file(path, "video")
    assert found == dataclasses.replace(cfg, modality="video") and len(tree) == 15 + 12 * 25
    assert not tree["transformer_blocks.11.ff.net.0.proj.weight"].read().any()  # 128 MiB
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 400 * 2**20
    path.unlink()


def test_what_does_not_fit_is_told_before_anything_is_read(tmp_path):
    cfg = tiny_config()
    params = random_params(cfg, 0)
    params["transformer_blocks.0.attn3.to_q.weight"] = params.pop("transformer_blocks.0.attn1.to_q.weight")
    folder = write_folder(tmp_path / "a", cfg, params)
    with pytest.raises(UserError) as error:
        open_transformer(folder)
    assert str(folder) in str(error.value)
    assert faults(error)[0] == "missing transformer_blocks.0.attn1.to_q.weight"
    assert faults(error)[1].startswith("unexpected transformer_blocks.0.attn3.to_q.weight (did you mean")
    params = random_params(cfg, 0)
    params["proj_in.weight"] = torch.zeros(3, 3)
    with pytest.raises(UserError, match=r"proj_in.weight has shape \[3, 3\], expected \[16, 4\]"):
        open_transformer(write_folder(tmp_path / "b", cfg, params))
    single = write_single(tmp_path / "c.safetensors", cfg, random_params(cfg, 0), config=False)
    with pytest.raises(UserError, match="its header has no config; pass the architecture"):
        open_single_file(single)
    equal(open_single_file(single, config=cfg)[0], random_params(cfg, 0))
    header = {"config": json.dumps({"transformer": COMMON})}
    save_file({"a.weight": torch.zeros(1)}, tmp_path / "d.safetensors", metadata=header)
    with pytest.raises(UserError, match="no key with transformer_blocks after any of"):
        open_single_file(tmp_path / "d.safetensors")


def test_weights_of_another_version_are_refused_by_their_keys(tmp_path):
    new, old = tiny_config(), tiny_config(family="2.0")
    with pytest.raises(UserError, match="keys do not fit"):
        open_transformer(write_folder(tmp_path, new, random_params(old, 0)))


# --- a single file split into folders -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["2.0", "2.3"])
def test_a_single_file_becomes_folders(tmp_path, family):
    """Each opens as such a folder does: the transformer, the VAEs, and the others by their config and leaves."""
    path = write(tmp_path / "x.safetensors", *release(family))
    out = tmp_path / "out"
    assert split_single_file(path, out) == ("transformer", *PARTS)
    assert sorted(f.name for f in out.iterdir()) == sorted(("transformer", *PARTS))
    tree, cfg = open_transformer(out / "transformer")
    assert cfg == transformer_config(family)
    equal(tree, random_params(cfg, 0))
    for part in PARTS:
        assert json.loads((out / part / "config.json").read_text()) == PARTS[part].to_json(CONFIGS[part, family])
        found = load_file(out / part / "diffusion_pytorch_model.safetensors")
        wanted = part_params(part, family)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[k], wanted[k]) and found[k].dtype == wanted[k].dtype for k in wanted)
    tree, cfg = MODULES["vae"].open_folder(out / "vae")
    assert cfg == CONFIGS["vae", family] and len(tree) == len(part_params("vae", family))


FORWARDS = {  # of a part: its input, our function, and Diffusers' module on the same
    "vae": (
        lambda cfg: draw(0, "z", 1, cfg.latent_channels, 2, 2, 3),
        lambda p, cfg, x: ltx2_vae.decode(p, cfg, ltx2_vae.normalise(p, cfg, x), clamp=False, **vae_given(cfg)),
        lambda model, cfg, x: decoded(model, cfg, x),
    ),
    "audio_vae": (
        lambda cfg: draw(0, "z", 1, cfg.latent_channels, 3, cfg.latent_mel_bins),
        lambda p, cfg, x: ltx2_audio.decode(p, cfg, ltx2_audio.normalise(p, cfg, x)),
        lambda model, cfg, x: model.decode(x).sample,
    ),
    "vocoder": (
        lambda cfg: draw(0, "mel", 1, 2, 4, cfg.in_channels // 2),
        lambda p, cfg, x: ltx2_vocoder.vocode(p, cfg, x),
        lambda model, cfg, x: model(x).clamp(-1, 1),
    ),
    "connectors": (
        lambda cfg: draw(0, "hidden", 1, 128, cfg.caption_channels, cfg.text_proj_in_factor),
        lambda p, cfg, x: torch.cat([y.flatten() for y in ltx2_connectors.forward(p, cfg, x, MASK).values()]),
        lambda model, cfg, x: torch.cat([y.flatten() for y in model(x, MASK.long(), padding_side="left")[:2]]),
    ),
}
MASK = torch.ones(1, 128, dtype=torch.bool)


def decoded(model, cfg, x):
    given = vae_given(cfg)
    with same_noise(given["noise"], cfg):
        return model.decode(x, given["timestep"]).sample


@pytest.mark.parametrize("family", ["2.0", "2.3"])
@pytest.mark.parametrize("part", PARTS)
def test_diffusers_opens_the_folders_and_computes_what_the_single_file_does(tmp_path, part, family):
    """Float32; the folder is Diffusers' to read, the file ours."""
    from diffusers.pipelines.ltx2 import connectors, vocoder

    path = write(tmp_path / "x.safetensors", *release(family))
    split_single_file(path, tmp_path / "out")
    name = json.loads((tmp_path / "out" / part / "config.json").read_text())["_class_name"]
    kind = next(getattr(m, name) for m in (diffusers, vocoder, connectors) if hasattr(m, name))
    how = {"output_loading_info": True, "torch_dtype": torch.float32}
    model, info = kind.from_pretrained(tmp_path / "out" / part, **how)
    assert not any(info.values())
    tree, cfg = open_single_part(path, part)
    params, (given, ours, theirs) = {k: v.float() for k, v in tree.read().items()}, FORWARDS[part]
    with torch.no_grad():
        found, wanted = ours(params, cfg, given(cfg)), theirs(model.eval(), cfg, given(cfg))
    # Float32 sums in another order, which the logarithm of the second generator's spectrogram enlarges.
    close(found, wanted, part, 1e-4)


def test_diffusers_opens_the_transformers_folder(tmp_path):
    split_single_file(write(tmp_path / "x.safetensors", *release("2.3")), tmp_path / "out")
    model, info = diffusers.LTX2VideoTransformer3DModel.from_pretrained(
        tmp_path / "out" / "transformer", output_loading_info=True
    )
    params = random_params(transformer_config("2.3"), 0)
    assert not any(info.values()) and model.state_dict().keys() == params.keys()


def test_an_upsamplers_file_becomes_a_folder_too(tmp_path):
    head = {"_class_name": "LatentUpsampler", "in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}
    cfg = upsampler_config(head, "file", {})
    params = {k: draw(0, k, *s.shape).bfloat16() for k, s in ltx2_upsampler.param_specs(cfg).items()}
    path, more = write(tmp_path / "x.safetensors", *release("2.0")), write(tmp_path / "up.safetensors", params, head)
    assert split_single_file(path, tmp_path / "out", upsampler=more)[-1] == "latent_upsampler"
    folder = tmp_path / "out" / "latent_upsampler"
    tree, found = open_model(folder, UpsamplerConfig, ltx2_upsampler.CLASS_NAME, ltx2_upsampler.param_specs)
    assert found == cfg
    equal(tree, params)
    del params["final_conv.bias"]
    leaves, head_of_release = release("2.0")
    del leaves["vocoder.conv_pre.bias"]
    path, more = write(path, leaves, head_of_release), write(more, params, head)
    with pytest.raises(UserError) as error:
        split_single_file(path, tmp_path / "again", upsampler=more)
    assert "final_conv.bias" in str(error.value) and "missing vocoder.conv_pre.bias" in str(error.value)
    with pytest.raises(UserError, match="latent_upsampler is no model"):
        split_single_file(path, tmp_path / "again", configs={"latent_upsampler": cfg})


def test_a_file_is_split_leaf_by_leaf(tmp_path, monkeypatch):
    """Never more than two leaves in memory: the one being written, and the next one read."""
    alive, most = [], 0
    plain = stored.read

    def counted(*args):
        nonlocal most
        out = plain(*args)
        alive.append(weakref.ref(out))
        most = max(most, sum(ref() is not None for ref in alive))
        return out

    monkeypatch.setattr(stored, "read", counted)
    leaves, head = release("2.3")
    split_single_file(write(tmp_path / "x.safetensors", leaves, head), tmp_path / "out")
    assert len(alive) == len(leaves) and most <= 2


def test_a_file_with_some_models_only(tmp_path):
    leaves, head = release("2.0")
    some = {k: v for k, v in leaves.items() if k.startswith(("vocoder.", "audio_vae."))}
    path = write(tmp_path / "x.safetensors", some, None)
    with pytest.raises(UserError, match="no section audio_vae, and no preset fits"):
        split_single_file(path, tmp_path / "out")
    configs = {part: CONFIGS[part, "2.0"] for part in ("vocoder", "audio_vae")}
    assert split_single_file(path, tmp_path / "out", configs=configs) == ("audio_vae", "vocoder")


def test_what_cannot_be_split_is_told_before_anything_is_written(tmp_path):
    leaves, head = release("2.3")
    del leaves["vae.decoder.conv_in.conv.bias"], leaves["vocoder.vocoder.conv_pre.bias"]
    del leaves[f"{D}patchify_proj.bias"]
    leaves["duration_head.mlp_hidden.weight"] = torch.zeros(1)
    path, out = write(tmp_path / "x.safetensors", leaves, head), tmp_path / "out"
    with pytest.raises(UserError) as error:
        split_single_file(path, out)
    assert "duration_head.mlp_hidden.weight belongs to no model" in str(error.value)
    for key in ("vae.decoder.conv_in.conv.bias", "vocoder.vocoder.conv_pre.bias", f"{D}patchify_proj.bias"):
        assert f"missing {key}" in str(error.value)
    assert [f.name for f in tmp_path.iterdir()] == ["x.safetensors"]
    with pytest.raises(UserError, match="holds none of transformer, vae"):
        split_single_file(write(tmp_path / "y.safetensors", {}, None), out)
    with pytest.raises(UserError, match="text is no model, must be one of transformer"):
        split_single_file(path, out, configs={"text": None})
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(UserError, match="exists already; give a new or an empty folder"):
        split_single_file(path, out)
    assert (out / "mine").read_text() == "kept"


def test_a_failed_split_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", *release("2.0"))
    plain, count = stored.read, 0

    def failing(*args):
        nonlocal count
        count += 1
        if count > 300:
            raise UserError("the disk is gone")
        return plain(*args)

    monkeypatch.setattr(stored, "read", failing)
    with pytest.raises(UserError, match="the disk is gone"):
        split_single_file(path, tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["x.safetensors"]


# --- one stream's exports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_an_export_of_one_stream_says_so_and_merges_into_its_base(tmp_path, modality):
    cfg = tiny_config(modality=modality)
    base = write_folder(tmp_path / "base", tiny_config(), random_params(tiny_config(), 0))
    trained = {k: v + 1 for k, v in random_params(cfg, 0).items()}
    out = tmp_path / "out"
    save_checkpoint(out, trained, metadata=describe(class_name(cfg), to_json(cfg)))
    (out / "config.json").write_text(json.dumps(to_json(cfg)))
    assert json.loads((out / "config.json").read_text())["_class_name"] != "LTX2VideoTransformer3DModel"
    tree, found = open_transformer(out)
    assert found == cfg
    equal(tree, trained)
    with pytest.raises(UserError, match=f"holds the {modality} stream only"):
        open_transformer(out, "audio_video")
    merged = merge_base(tree, open_transformer(base)[0], cfg)
    whole = write_folder(tmp_path / "whole", tiny_config(), {k: v.read() for k, v in merged.items()})
    read = open_transformer(whole)[0].read()
    for key, value in random_params(tiny_config(), 0).items():
        assert torch.equal(read[key], trained.get(key, value))
    with pytest.raises(UserError, match="float32, the base has torch.bfloat16"):
        half = apply(open_transformer(base)[0], cast(torch.bfloat16)(open_transformer(base)[0].specs))
        merge_base(tree, half, cfg)
    assert set(load_file(out / "diffusion_pytorch_model.safetensors")) == set(param_specs(cfg))
