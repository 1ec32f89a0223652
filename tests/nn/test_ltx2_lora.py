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
from nn.ltx2_inputs import model_inputs
from nn.ltx2_lora import FORMS, LoraInfo, from_lora, linear_layers, open_lora, save_lora, version_of
from nn.ltx2_names import official_name

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
        "alpha is 'much', expected a number",
        "reference_downscale_factor is '1.5', expected an integer",
    ]


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
