"""Laws of every kind of model that can be trained, and what a recipe of each means."""

import dataclasses

import pytest
import torch
import yaml
from ltx2_sets import LTX23, LTX25, SIZES, config

from core import keys, specs
from core.config import describe
from core.errors import UserError
from core.trees import split_key
from nn.config_files import save_model
from nn.ltx2_config import PRESETS
from nn.wan import WanConfig
from train.config import LTX2, OWN_KEYS, Recipe, Wan, load_recipe
from train.families import FAMILIES, family_of, family_of_class
from train.ltx2_family import owners
from train.precision import classes, leaf_class
from train.rows import ROW_TYPES, row_type
from train.setup import model_config

WAN_SIZES = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "in_channels": 4,
             "out_channels": 4, "text_dim": 8, "freq_dim": 16}  # fmt: skip
IMAGE = {"in_channels": 12, "image_dim": 6, "added_kv_proj_dim": 24}
CONFIGS = {
    "wan": [WanConfig(**WAN_SIZES | more) for more in ({}, IMAGE)],
    "ltx2": [config(sizes, modality=m) for sizes in (SIZES, LTX23, LTX25) for m in ("audio_video", "video", "audio")],
}
EACH = [pytest.param(FAMILIES[name], cfg, id=f"{name}-{i}") for name, cfgs in CONFIGS.items()
        for i, cfg in enumerate(cfgs)]  # fmt: skip
ROLES = {"wan": Wan, "ltx2": LTX2}


def role(name: str, **fields):
    return ROLES[name].model_validate({"_target_": name, **fields})


# --- every kind -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, cfg", EACH)
def test_a_config_survives_a_checkpoint_and_leads_back_to_its_kind(family, cfg):
    entries = family.to_json(cfg)
    assert family_of_class(entries["_class_name"], "here") is family
    assert family.from_json(entries, "here") == cfg
    with pytest.raises(UserError, match="(?s)checkpoint.json: .*num_lairs"):
        family.from_json(entries | {"num_lairs": 3}, "checkpoint.json")


def test_no_two_kinds_share_a_name_or_a_model_type():
    names = [name for family in FAMILIES.values() for name in family.classes]
    assert len(names) == len(set(names)) and all(FAMILIES[f.name] is f for f in FAMILIES.values())
    with pytest.raises(UserError, match="here: _class_name is 'Other', expected one of Wan.*LTX2"):
        family_of_class("Other", "here")


@pytest.mark.parametrize("family, cfg", EACH)
def test_layers_heads_and_packed_projections_belong_to_the_leaves(family, cfg):
    found = family.param_specs(cfg)
    layers = {at[0] for key in found for name in family.stacks if (at := split_key(key, name)) is not None}
    assert sorted(layers) == list(range(cfg.num_layers))
    assert all(getattr(cfg, field) == heads for field, (heads, _) in family.heads(cfg).items())
    packed = family.pack(cfg)(found).specs
    count = lambda tree: sum(torch.Size(s.shape).numel() for s in tree.values())  # noqa: E731
    assert len(packed) < len(found) and count(packed) == count(found)
    for tree in (found, packed):
        assert set(classes(tree).values()) <= {"matrix", "norm", "table"}
        assert all(kind == leaf_class(key, tree[key].keep_fp32) for key, kind in classes(tree).items())


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_known_and_named_in_the_refusal_of_others(name):
    family = FAMILIES[name]
    assert all(row_type(kind).name == kind for kind in family.row_types) and "text_only" not in family.row_types
    assert set(family.row_types) < set(ROW_TYPES)
    for cfg in CONFIGS[name]:
        fitting = [kind for kind in family.row_types if not family.row_faults(cfg, kind)]
        assert fitting, "some rows train every model"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_preset_is_a_model_that_a_recipe_can_name(name):
    family = FAMILIES[name]
    for preset, expected in family.presets.items():
        assert model_config(role(name, preset=preset), "models.student") == expected
        assert model_config(role(name, preset=preset, config={"num_layers": 1}), "x").num_layers == 1
    with pytest.raises(UserError, match=f"student.preset 'none' is unknown; allowed: {next(iter(family.presets))}"):
        model_config(role(name, preset="none"), "models.student")


# --- LTX-2 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_a_stream_is_chosen_by_the_role(modality):
    cfg = model_config(role("ltx2", preset="ltx-2-19b", modality=modality), "models.student")
    assert cfg == dataclasses.replace(PRESETS["ltx-2-19b"], modality=modality)
    assert "audio_video" == model_config(role("ltx2", preset="ltx-2-19b"), "models.student").modality


@pytest.mark.parametrize("sizes", [SIZES, LTX23, LTX25], ids=["2.0", "2.3", "2.5"])
def test_every_leaf_belongs_to_one_stream(sizes):
    """Its own, where a model of that stream alone has it; else attention and its tables to what they are added to."""
    cfg = config(sizes)
    found = owners(cfg)
    assert found.keys() == FAMILIES["ltx2"].param_specs(cfg).keys()
    for name in ("video", "audio"):
        alone = FAMILIES["ltx2"].param_specs(dataclasses.replace(cfg, modality=name))
        assert all(found[key] == name for key in alone)
        assert {key for key, owner in owners(dataclasses.replace(cfg, modality=name)).items()} == alone.keys()
    between = {key: owner for key, owner in found.items() if "a2v" in key or "v2a" in key or "_to_" in key
               or "av_cross" in key}  # fmt: skip
    starts = {"audio_to_video_attn": "video", "video_to_audio_attn": "audio", "av_cross_attn_video": "video",
              "av_cross_attn_audio": "audio", "video_a2v_cross": "video", "audio_a2v_cross": "audio"}  # fmt: skip
    seen = set()
    for key, owner in between.items():
        local = key.split(".", 2)[2] if key.startswith("transformer_blocks.") else key
        (start,) = [s for s in starts if local.startswith(s)] or [None]
        if start is not None:
            assert owner == starts[start], key
            seen.add(start)
    assert seen == set(starts)


@pytest.mark.parametrize("frozen", [None, "video", "audio"])
def test_what_is_frozen_is_a_stream_and_what_nothing_reads(frozen):
    family, marked = FAMILIES["ltx2"], "keyframes_abs_pos_embedding"
    for cfg in (config(SIZES), config(LTX25)):
        idle = {marked} & family.param_specs(cfg).keys()
        still = family.frozen(role("ltx2", preset="ltx-2-19b", frozen=frozen), cfg)
        assert still == idle | {key for key, owner in owners(cfg).items() if owner == frozen}
    with pytest.raises(UserError, match="models.student.frozen: audio needs a model of both streams, this is video"):
        family.frozen(role("ltx2", preset="ltx-2-19b", frozen="audio"), config(modality="video"))


@pytest.mark.parametrize("modality, absent", [("audio_video", set()), ("video", {"audio_vae", "vocoder"}),
                                              ("audio", {"vae"})])  # fmt: skip
def test_models_around_a_stream_that_is_not_there_have_no_place(modality, absent):
    parts = FAMILIES["ltx2"].parts(config(modality=modality))
    assert {name for name, why in parts.items() if why} == absent and parts["text_encoder"] is None


# --- recipes --------------------------------------------------------------------------------------------------


def test_the_smallest_recipe_of_ltx2_and_its_defaults(tmp_path):
    data = {"models": {"student": {"_target_": "ltx2", "preset": "ltx-2.3-22b"}}, "method": {"_target_": "sft"},
            "training": {"data": {"data_path": "d"}, "optimizer": {"learning_rate": 1e-4},
                         "loop": {"max_train_steps": 1}, "checkpoint": {"output_dir": "o"}}}  # fmt: skip
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(data))
    recipe = load_recipe(tmp_path / "r.yaml")
    student = recipe.models.student
    assert isinstance(student, LTX2) and (student.modality, student.frozen) == (None, None)
    assert family_of(recipe) is FAMILIES["ltx2"] and student.temporal_stride == 8
    cfg = model_config(student, "models.student")
    made = FAMILIES["ltx2"].objective(recipe, cfg)
    assert (made.weighting_scheme, made.timestep_uniform_prob, made.logit_std) == ("shifted_logit_normal", 0.1, 1.0)
    assert made.weights == {"video": 1.0, "audio": 1.0} and made.given is None and made.caption_dropout == 0


def test_keys_of_one_kind_alone_are_keys_of_the_recipe():
    """A renamed key would be refused for no kind any more."""
    known = {r.key for r in describe(Recipe)}
    assert all(key in known for keys in OWN_KEYS.values() for key in keys) and OWN_KEYS.keys() == FAMILIES.keys()


# --- completing a stream from a base --------------------------------------------------------------------------


def test_a_trained_stream_is_completed_by_the_other_one_of_a_base(tmp_path):
    family, both, alone = FAMILIES["ltx2"], config(), config(modality="audio")
    base = specs.init(family.param_specs(both), keys.key(1))
    save_model(tmp_path / "base" / "transformer", base, family.param_specs(both), family.to_json(both))
    trained = specs.init(family.param_specs(alone), keys.key(2))
    tree, cfg = family.merge_base(trained, alone, tmp_path / "base", torch.float32)
    assert cfg == both and tree.keys() == base.keys()
    for key, leaf in tree.items():
        found = leaf if isinstance(leaf, torch.Tensor) else leaf.read()
        assert torch.equal(found, trained[key] if key in trained else base[key]), key
    with pytest.raises(UserError, match="another architecture\n  - num_layers is 2, the checkpoint has 3"):
        family.merge_base({}, config(modality="audio", num_layers=3), tmp_path / "base", torch.float32)
    with pytest.raises(UserError, match="the checkpoint has both streams"):
        family.merge_base(base, both, tmp_path / "base", torch.float32)
    with pytest.raises(UserError, match="only LTX-2 has streams"):
        FAMILIES["wan"].merge_base({}, CONFIGS["wan"][0], tmp_path / "base", torch.float32)
