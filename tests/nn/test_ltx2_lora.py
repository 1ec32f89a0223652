"""LoRA files of LTX-2: every key form both ways, scales, metadata, and all that does not fit."""


import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_cases import configs, random_case, random_params, tiny_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core import keys
from core.errors import UserError
from core.specs import specs_of
from core.transforms import apply, invert
from nn import ltx2
from nn.ltx2_config import PRESETS
from nn.ltx2_inputs import model_inputs
from nn.ltx2_lora import (
    FORMS,
    LoraInfo,
    from_lora,
    linear_layers,
    open_lora,
    packed_layers,
    save_lora,
    version_of,
)
from nn.ltx2_names import official_name
from nn.ltx2_specs import pack_projections

LAYERS = ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.audio_attn2.to_out.0", "proj_in",
          "transformer_blocks.0.audio_to_video_attn.to_k", "transformer_blocks.1.ff.net.0.proj")  # fmt: skip


def faults(error) -> list[str]:
    return str(error.value).split("\n  - ")[1:]


def adapters_of(cfg, names, seed=0, rank=2, scale=1.0):
    k, sizes, out = keys.key(seed), linear_layers(cfg), {}
    for name in names:
        n_in, n_out = sizes[name]
        out[f"{name}.lora_A"] = keys.normal(keys.fold_in(k, f"{name} A"), (rank, n_in))
        out[f"{name}.lora_B"] = keys.normal(keys.fold_in(k, f"{name} B"), (n_out, rank))
        out[f"{name}.lora_scale"] = torch.tensor(scale)
    return out


def same(tree, adapters):
    assert tree.keys() == adapters.keys()
    assert all(torch.equal(tree[k], adapters[k]) for k in adapters)


@given(cfg=configs(), seed=st.integers(0, 10**6), rank=st.integers(1, 5), form=st.sampled_from(list(FORMS)),
       alpha=st.sampled_from([None, 1.0, 8.0]))  # fmt: skip
@settings(max_examples=10)
def test_every_form_both_ways(tmp_path_factory, cfg, seed, rank, form, alpha):
    """Adapters of all linear layers survive the file bit by bit, with their scale."""
    path = tmp_path_factory.mktemp("lora") / "x.safetensors"
    alpha = float(rank) if alpha is None else alpha
    adapters = adapters_of(cfg, linear_layers(cfg), seed, rank, alpha / rank)
    save_lora(path, adapters, cfg, rank=rank, alpha=alpha, form=form)
    tree, info = open_lora(path, cfg)
    same(tree.read(), adapters)
    assert (info.rank, info.alpha, info.base_version) == (rank, alpha, version_of(cfg))
    assert all(key.startswith(FORMS[form]) for key in load_file(path))


def test_comfyui_keys_are_the_public_ones(tmp_path):
    """With scale 1 there is no alpha: Lightricks' loader knows none. Diffusers' converter reads the rest."""
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_ltx2_lora_to_diffusers

    cfg = tiny_config()
    save_lora(tmp_path / "x.safetensors", adapters_of(cfg, LAYERS), cfg, rank=2, alpha=2)
    found = load_file(tmp_path / "x.safetensors")
    stem = "diffusion_model.transformer_blocks.0.attn1.to_q.lora_"
    assert {f"{stem}A.weight", f"{stem}B.weight", "diffusion_model.patchify_proj.lora_A.weight"} <= set(found)
    assert len(found) == 2 * len(LAYERS)
    theirs = _convert_non_diffusers_ltx2_lora_to_diffusers(found)
    assert set(theirs) == {f"transformer.{name}.lora_{part}.weight" for name in LAYERS for part in "AB"}


# Layers of public files without prefix: those of a block, and those around the blocks, whose AdaLNs have three each.
ATTENTIONS = "attn1 attn2 audio_attn1 audio_attn2 audio_to_video_attn video_to_audio_attn".split()
OLD = "to_q to_k to_v to_out.0".split()
PROJECTIONS = {"ltx-2-19b": OLD, "ltx-2.3-22b": [*OLD, "to_gate_logits"]}
FORWARDS = "ff.net.0.proj ff.net.2 audio_ff.net.0.proj audio_ff.net.2".split()
ENDS = "patchify_proj proj_out audio_patchify_proj audio_proj_out".split()
ADALNS = """adaln_single audio_adaln_single av_ca_video_scale_shift_adaln_single av_ca_audio_scale_shift_adaln_single
    av_ca_a2v_gate_adaln_single av_ca_v2a_gate_adaln_single""".split()
OWN_ADALNS = {"ltx-2-19b": [], "ltx-2.3-22b": ["prompt_adaln_single", "audio_prompt_adaln_single"]}
CAPTIONS = {"ltx-2-19b": "caption_projection audio_caption_projection".split(), "ltx-2.3-22b": []}


@pytest.mark.parametrize("preset", PROJECTIONS)
def test_every_layer_of_the_public_models_has_its_committed_key(preset):
    cfg = PRESETS[preset]
    of_block = [f"{attention}.{part}" for attention in ATTENTIONS for part in PROJECTIONS[preset]] + FORWARDS
    wanted = {f"transformer_blocks.{i}.{layer}" for i in range(48) for layer in of_block} | set(ENDS)
    steps = ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
    wanted |= {f"{adaln}.{step}" for adaln in ADALNS + OWN_ADALNS[preset] for step in steps}
    wanted |= {f"{name}.linear_{i}" for name in CAPTIONS[preset] for i in (1, 2)}
    assert {official_name(name) for name in linear_layers(cfg)} == wanted
    assert len(wanted) == {"ltx-2-19b": 1370, "ltx-2.3-22b": 1660}[preset]


def test_other_spellings_of_the_pair(tmp_path):
    cfg, adapters = tiny_config(), adapters_of(tiny_config(), LAYERS, scale=1.5)
    leaves = {}
    for name in LAYERS:
        stem = "diffusion_model." + official_name(name)
        leaves |= {f"{stem}.lora_down.weight": adapters[f"{name}.lora_A"], f"{stem}.alpha": torch.tensor([3.0])}
        leaves[f"{stem}.lora_up.weight"] = adapters[f"{name}.lora_B"]
    save_file(leaves, tmp_path / "kohya.safetensors")
    same(open_lora(tmp_path / "kohya.safetensors", cfg)[0].read(), adapters)
    bound = from_lora(cfg)(specs_of(leaves))
    back = apply(apply(leaves, bound), invert(bound))
    assert all(torch.equal(back[k], leaves[k]) for k in leaves)
    peft = {f"base_model.model.{name}.lora_{part}.default.weight": adapters[f"{name}.lora_{part}"]
            for name in LAYERS for part in "AB"}  # fmt: skip
    save_file(peft, tmp_path / "peft.safetensors", metadata={"rank": "2", "alpha": "3"})
    same(open_lora(tmp_path / "peft.safetensors", cfg)[0].read(), adapters)


def test_adapters_change_the_model_as_merged_weights_do():
    cfg = tiny_config()
    params, adapters = random_params(cfg, 0), adapters_of(cfg, LAYERS, scale=0.5)
    inputs = model_inputs(cfg, random_case(cfg, 0).streams)
    merged = dict(params)
    for name in LAYERS:
        a, b = adapters[f"{name}.lora_A"], adapters[f"{name}.lora_B"]
        merged[f"{name}.weight"] = params[f"{name}.weight"] + 0.5 * (b @ a)
    ours, theirs = (ltx2.forward(p, cfg, inputs) for p in ({**params, **adapters}, merged))
    plain = ltx2.forward(params, cfg, inputs)
    for name, y in ours.items():
        torch.testing.assert_close(y, theirs[name], rtol=1e-4, atol=1e-5)
        assert (y - plain[name]).abs().max() > 1e-3


def test_one_stream_takes_its_adapters_only(tmp_path):
    whole, video = tiny_config(), tiny_config(modality="video")
    save_lora(tmp_path / "x.safetensors", adapters_of(whole, LAYERS), whole, rank=2, alpha=2)
    tree, _ = open_lora(tmp_path / "x.safetensors", video)
    kept = ("transformer_blocks.0.attn1.to_q", "proj_in", "transformer_blocks.1.ff.net.0.proj")
    same(tree.read(), adapters_of(whole, kept))


def test_metadata_is_written_and_checked(tmp_path):
    cfg, path = tiny_config(), tmp_path / "x.safetensors"
    save_lora(path, adapters_of(cfg, LAYERS), cfg, rank=2, alpha=2, downscale=2, temporal_scale=4)
    with safe_open(path, "pt") as file:
        written = file.metadata()
    assert written["reference_downscale_factor"] == "2" and written["reference_temporal_scale_factor"] == "4"
    wanted = LoraInfo(2, 2.0, "LTX2VideoTransformer3DModel", "2.3", 2, 4)
    assert open_lora(path, cfg)[1] == wanted
    with pytest.raises(UserError, match="trained on LTX-2 version 2.3, this model is 2.0"):
        open_lora(path, tiny_config(family="2.0"))
    old = tiny_config(family="2.0")
    assert open_lora(path, old, other_version=True)[1] == wanted
    save_file(load_file(path), path, metadata={"base_model": "WanTransformer3DModel", "alpha": "2"})
    with pytest.raises(UserError, match="trained on 'WanTransformer3DModel'"):
        open_lora(path, cfg)
    save_file(load_file(path), path, metadata={"alpha": "much", "reference_downscale_factor": "1.5"})
    with pytest.raises(UserError) as error:
        open_lora(path, cfg)
    assert faults(error) == [
        "alpha is 'much', expected a finite number",
        "reference_downscale_factor is '1.5', expected an integer of at least 1",
    ]
    bad = {"rank": "0", "alpha": "nan", "reference_downscale_factor": "-3", "reference_temporal_scale_factor": "inf"}
    save_file(load_file(path), path, metadata=bad)
    with pytest.raises(UserError) as error:
        open_lora(path, cfg)
    assert [fault.split(" is ")[0] for fault in faults(error)] == list(bad)
    save_file(load_file(path), path, metadata={"rank": "64"})
    with pytest.raises(UserError, match="its header says rank 64") as error:
        open_lora(path, cfg)
    assert faults(error) == [f"{name}.lora_A has rank 2" for name in sorted(LAYERS)]


def test_adapters_of_packed_projections_become_those_of_their_parts(tmp_path):
    """With their scale, and back; the model changes as it does with merged packed weights."""
    cfg, path = tiny_config(), tmp_path / "x.safetensors"
    params, layers = random_params(cfg, 0), packed_layers(cfg)
    names = ("transformer_blocks.0.attn1.to_qkv", "transformer_blocks.1.audio_to_video_attn.to_kv")
    packed = apply(params, bound := pack_projections(cfg)(specs_of(params)))
    leaves, merged = {}, dict(packed)
    for name in names:
        out, n_in = packed[f"{name}.weight"].shape
        a, b = torch.randn(2, n_in), torch.randn(out, 2)
        leaves |= {f"diffusion_model.{name}.lora_A.weight": a, f"diffusion_model.{name}.lora_B.weight": b}
        leaves[f"diffusion_model.{name}.alpha"] = torch.tensor(1.0)
        merged[f"{name}.weight"] = packed[f"{name}.weight"] + 0.5 * (b @ a)
    save_file(leaves, path)
    adapters = open_lora(path, cfg)[0].read()
    assert {key.rpartition(".lora_")[0] for key in adapters} == {part for name in names for part in layers[name]}
    inputs = model_inputs(cfg, random_case(cfg, 0).streams)
    ours, theirs = (ltx2.forward(p, cfg, inputs) for p in ({**params, **adapters}, merged))
    for name, y in ours.items():
        torch.testing.assert_close(y, theirs[name], rtol=1e-4, atol=1e-5)
    assert apply(merged, invert(bound)).keys() == params.keys()
    lora = from_lora(cfg)(specs_of(leaves))
    back = apply(apply(leaves, lora), invert(lora))
    assert all(torch.equal(back[k], leaves[k]) for k in leaves)
    leaves |= {"diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight": torch.zeros(2, 16),
               "diffusion_model.transformer_blocks.0.attn1.to_q.lora_B.weight": torch.zeros(16, 2)}  # fmt: skip
    with pytest.raises(UserError, match="attn1.to_q.lora_A"):
        from_lora(cfg)(specs_of(leaves))


def test_adapters_of_the_other_layout_are_refused_where_they_would_change_nothing():
    cfg = tiny_config()
    params, adapters = random_params(cfg, 0), adapters_of(cfg, LAYERS)
    inputs, packed = model_inputs(cfg, random_case(cfg, 0).streams), pack_projections(cfg)(specs_of(params))
    with pytest.raises(UserError, match="attn1.to_q.lora_A: no such layer here, but .*attn1.to_qkv"):
        ltx2.forward({**apply(params, packed), **adapters}, cfg, inputs)
    stem = "transformer_blocks.0.attn1.to_qkv.lora_"
    with pytest.raises(UserError, match="to_qkv.lora_A: no such layer here, but .*to_q, .*to_k, .*to_v"):
        ltx2.forward({**params, f"{stem}A": torch.zeros(2, 16)}, cfg, inputs)


def test_adapters_of_the_text_connectors_are_counted_and_left_out(tmp_path):
    """Diffusers' loader takes such files: a projection of Gemma's states beside the transformer's layers."""
    cfg, path = tiny_config(), tmp_path / "x.safetensors"
    save_lora(path, adapters_of(cfg, LAYERS), cfg, rank=2, alpha=2)
    names = ("text_embedding_projection.aggregate_embed", "diffusion_model.video_embeddings_connector.x.attn1.to_q")
    extra = {f"{name}.lora_{part}.weight": torch.zeros(2, 2) for name in names for part in "AB"}
    save_file(load_file(path) | extra, path)
    tree, info = open_lora(path, cfg)
    same(tree.read(), adapters_of(cfg, LAYERS))
    assert info.text_layers == 2


def test_what_fits_no_layer_is_told_all_at_once(tmp_path):
    cfg = tiny_config()
    stem = "diffusion_model.transformer_blocks.0.attn1"
    leaves = {
        f"{stem}.to_q.lora_A.weight": torch.zeros(2, 16),
        f"{stem}.to_k.lora_A.weight": torch.zeros(2, 16),
        f"{stem}.to_k.lora_B.weight": torch.zeros(16, 3),
        f"{stem}.to_qq.lora_A.weight": torch.zeros(2, 16),
        f"{stem}.to_v.dora_scale": torch.zeros(2),
    }
    save_file(leaves, tmp_path / "x.safetensors")
    with pytest.raises(UserError) as error:
        open_lora(tmp_path / "x.safetensors", cfg)
    assert str(tmp_path) in str(error.value)
    found = faults(error)
    assert len(found) == 4
    assert f"{stem}.to_v.dora_scale: ends with none of" in found[0]
    assert f"no such layer: {stem}.to_qq (did you mean" in found[1]
    assert "attn1.to_k: lora_A [2, 16] and lora_B [16, 3], expected [r, 16] and [16, r]" in found[2]
    assert "attn1.to_q: lora_B is missing beside" in found[3]
    save_file({"lora.weight": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(UserError, match="keys must begin with one of diffusion_model"):
        open_lora(tmp_path / "y.safetensors", cfg)


def test_adapters_that_cannot_be_saved():
    cfg, adapters = tiny_config(), adapters_of(tiny_config(), LAYERS)
    adapters["proj_in.lora_scale"] = torch.tensor(2.0)
    adapters["nowhere.lora_A"] = torch.zeros(2, 2)
    del adapters["transformer_blocks.0.attn1.to_q.lora_B"]
    with pytest.raises(UserError) as error:
        save_lora("x.safetensors", adapters, cfg, rank=2, alpha=2)
    assert faults(error) == [
        "missing transformer_blocks.0.attn1.to_q.lora_B",
        "proj_in: rank 2 and scale 2.0, expected rank 2 and scale 1.0",
        "nowhere: no such layer",
    ]
    with pytest.raises(UserError, match="form is 'kohya', must be one of comfyui, diffusers, peft"):
        save_lora("x.safetensors", {}, cfg, rank=2, alpha=2, form="kohya")
