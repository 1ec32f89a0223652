"""Pipeline folders: what is written loads back bit for bit and in Diffusers, and theirs opens here."""

import dataclasses
import json
import logging
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wan_cases import configs, diffusers_model, random_inputs, random_params, tiny_config

from core.errors import UserError
from infer.conditions import encode_prompts
from infer.folder import INDEX, NOTED, SCHEDULERS, Defaults, load_pipeline, read_defaults, read_index, save_pipeline
from infer.generate import Sampling, check_sampling, initial_noise, sample_latents
from nn import wan
from nn.wan import param_specs
from nn.wan_formats import open_transformer
from nn.wan_inputs import model_inputs

CPU = torch.device("cpu")


def change(path, **entries):
    """Rewrites entries of a JSON file; `...` removes one."""
    data = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


def load(folder, dtype=torch.float32, **options):
    return load_pipeline(folder, device=CPU, dtype=dtype, **options)


def theirs_from(folder, **options):
    """Diffusers needs accelerate to keep some leaves in float32 while it loads; a float32 load needs neither."""
    from diffusers import WanTransformer3DModel

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WanTransformer3DModel, "_keep_in_fp32_modules", None)
        return WanTransformer3DModel.from_pretrained(folder, low_cpu_mem_usage=False, **options)


# --- round trips ----------------------------------------------------------------------------------------------


def test_a_saved_folder_loads_back_to_the_bit(tiny):
    pipe = load(tiny.folder, needs=("vae", "text_encoder"))
    assert pipe.cfg == tiny.cfg and pipe.defaults == tiny.defaults and not pipe.absent
    assert set(pipe.params) == set(tiny.params)
    assert all(torch.equal(pipe.params[k], v) for k, v in tiny.params.items())
    assert (pipe.vae.latent_channels, pipe.vae.spatial, pipe.vae.temporal, pipe.text.max_length) == (4, 4, 4, 6)
    assert pipe.vae.decode(torch.zeros(2, 4, 3, 2, 3)).shape == (2, 3, 9, 8, 12)
    assert [e.shape for e in pipe.text.embed(["one two three", ""])] == [(3, 8), (1, 8)]


@given(cfg=configs(), image=configs(image=True), seed=st.integers(0, 99))
def test_any_transformer_comes_back_from_its_folder(tmp_path_factory, cfg, image, seed):
    for c in (cfg, image):
        folder, params = tmp_path_factory.mktemp("pipe") / "p", random_params(c, seed)
        save_pipeline(folder, params, c, Defaults())
        tree, found = open_transformer(folder / "transformer")
        assert found == c and all(torch.equal(v, params[k]) for k, v in tree.read().items())


POSITIVE, NUMBERS = st.integers(1, 10**4), st.floats(1e-3, 100)
DEFAULTS = st.builds(
    Defaults, **{k: st.none() | POSITIVE for k in ("num_frames", "height", "width", "text_length")},
    fps=st.none() | NUMBERS, steps=POSITIVE, guidance_scale=st.just(0.0) | st.just(1) | NUMBERS,
    sampler=st.sampled_from(sorted(SCHEDULERS)), flow_shift=NUMBERS,
)  # fmt: skip


@given(defaults=DEFAULTS)
def test_sampling_defaults_survive_the_folder(tmp_path_factory, defaults):
    """Among them an explicit guidance scale of 0, which is not "no value"."""
    cfg, folder = tiny_config(num_layers=1), tmp_path_factory.mktemp("pipe") / "p"
    save_pipeline(folder, random_params(cfg, 0), cfg, defaults)
    assert read_defaults(folder, read_index(folder)) == defaults


@pytest.mark.parametrize("sampler", sorted(SCHEDULERS))
def test_the_scheduler_loads_in_diffusers(tmp_path, sampler):
    import diffusers

    cfg = tiny_config(num_layers=1)
    save_pipeline(tmp_path / "p", random_params(cfg, 0), cfg, Defaults(sampler=sampler, flow_shift=2.5))
    kind = getattr(diffusers, json.loads((tmp_path / "p" / INDEX).read_text())["scheduler"][1])
    theirs = kind.from_pretrained(tmp_path / "p" / "scheduler")
    if sampler == "unipc":
        assert theirs.config.flow_shift == 2.5
        assert theirs.config.use_flow_sigmas and theirs.config.prediction_type == "flow_prediction"
    else:
        assert theirs.config.shift == 2.5
    # What Diffusers writes out of it, with all of its own entries, is read as the same defaults.
    theirs.save_pretrained(tmp_path / "p" / "scheduler")
    assert "_diffusers_version" in (tmp_path / "p" / "scheduler" / "scheduler_config.json").read_text()
    assert load(tmp_path / "p").defaults == Defaults(sampler=sampler, flow_shift=2.5)


# --- Diffusers' folders ---------------------------------------------------------------------------------------


def compare(model, params, cfg):
    """One call of both: float32 through two blocks, 2e-5 of the largest entry as in the parity tests."""
    noisy, timestep, conditions = random_inputs(cfg, 3)
    inputs = model_inputs(cfg, noisy, timestep, conditions)
    with torch.no_grad():
        theirs = model(inputs["latents"], inputs["timestep"], inputs["text"], return_dict=False)[0]
        ours = wan.forward(params, cfg, inputs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * theirs.abs().max().item())


def test_our_transformer_loads_in_diffusers(tiny):
    model, info = theirs_from(tiny.folder / "transformer", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(v, tiny.params[k]) for k, v in model.state_dict().items())
    compare(model, tiny.params, tiny.cfg)


@pytest.mark.parametrize("shard", [None, "20KB"])
def test_a_transformer_saved_by_diffusers_opens_here(tmp_path, shard):
    cfg = tiny_config(num_layers=2)
    model = diffusers_model(cfg, random_params(cfg, 4))
    model.save_pretrained(tmp_path, **({} if shard is None else {"max_shard_size": shard}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard is not None)
    tree, found = open_transformer(tmp_path)
    assert found == cfg
    compare(model, tree.read(), cfg)


@pytest.mark.parametrize("image", [False, True])
def test_bfloat16_keeps_the_same_leaves_in_float32_as_diffusers(tmp_path, image):
    """Their rule: leaves with one of these path components."""
    from diffusers import WanTransformer3DModel

    heads = {"image_dim": 6, "added_kv_proj_dim": 24, "in_channels": 7} if image else {}
    cfg = tiny_config(num_layers=1, **heads)
    params = random_params(cfg, 0)
    save_pipeline(tmp_path / "p", params, cfg, Defaults())
    loaded, names = load(tmp_path / "p", torch.bfloat16).params, set(WanTransformer3DModel._keep_in_fp32_modules)
    wide = {k for k in params if names & set(k.split("."))}
    assert {k for k, v in loaded.items() if v.dtype == torch.float32} == wide
    assert {k for k, s in param_specs(cfg).items() if s.keep_fp32} == wide
    assert all(torch.equal(v, params[k] if k in wide else params[k].bfloat16()) for k, v in loaded.items())


def test_a_bfloat16_folder_loads_in_both_dtypes(tiny, tmp_path):
    half = load(tiny.folder, torch.bfloat16).params
    save_pipeline(tmp_path / "p", half, tiny.cfg, tiny.defaults)
    assert all(
        torch.equal(v, half[k]) and v.dtype == half[k].dtype
        for k, v in load(tmp_path / "p", torch.bfloat16).params.items()
    )
    wide = load(tmp_path / "p", torch.float32).params
    assert all(v.dtype == torch.float32 and torch.equal(v, half[k].float()) for k, v in wide.items())


def test_a_folder_with_models_that_cannot_be_run_still_gives_latents(own_folder, tiny):
    """A VAE and a text encoder of other classes matter only where they are used."""
    change(own_folder / "vae" / "config.json", _class_name="AutoencoderKLCogVideoX")
    change(own_folder / "text_encoder" / "config.json", model_type="clip_text_model")
    pipe = load(own_folder)
    assert pipe.vae is None and pipe.text is None
    sampling = dataclasses.replace(Sampling(5, 16, 24), steps=2, guidance_scale=1.0)
    noise, text = initial_noise((4, 2, 4, 6), [0]), torch.randn(1, 3, 8)
    full = load(tiny.folder)
    assert torch.equal(sample_latents(pipe, sampling, noise, text), sample_latents(full, sampling, noise, text))
    with pytest.raises(UserError, match="AutoencoderKLCogVideoX.*only 'LatentreePatchCodec'"):
        check_sampling(pipe, sampling)
    with pytest.raises(UserError, match="clip_text_model.*precomputed"):
        encode_prompts(pipe, ["a"])
    with pytest.raises(UserError) as error:
        load(own_folder, needs=("vae", "text_encoder"))
    assert "AutoencoderKLCogVideoX" in str(error.value) and "clip_text_model" in str(error.value)


def test_needed_models_are_missed_before_weights_are_read(own_folder, monkeypatch):
    shutil.rmtree(own_folder / "vae")
    monkeypatch.setattr("core.checkpoint.read_leaves", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(UserError, match="vae/config.json: no such file"):
        load(own_folder, needs=("vae",))


# --- what is refused ------------------------------------------------------------------------------------------


def refused(folder, *parts):
    with pytest.raises(UserError) as error:
        load(folder)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "entries,parts",
    [
        ({"_class_name": "StableDiffusionPipeline"}, ["_class_name is 'StableDiffusionPipeline'", "'WanPipeline'"]),
        ({"_class_name": ...}, ["_class_name is None"]),
        ({"boundary_ratio": 0.9}, ["two transformers"]),
        ({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, ["two transformers"]),
        ({"_sampling": 5}, ["_sampling is 5, expected a mapping"]),
        ({"_sampling": {"step": 5}}, ["_sampling.step is 5", *NOTED]),
        ({"_sampling": {"steps": 0, "height": "16", "fps": 0, "guidance_scale": -1, "width": True, "num_frames": 5.0}},
         ["steps is 0", "height is '16'", "fps is 0", "guidance_scale is -1", "width is True", "num_frames is 5.0"]),
    ],
)  # fmt: skip
def test_a_model_index_that_cannot_be_used(own_folder, entries, parts):
    change(own_folder / INDEX, **entries)
    refused(own_folder, str(own_folder / INDEX), *parts)


def test_entries_that_diffusers_adds_to_the_index_are_fine(own_folder):
    change(
        own_folder / INDEX,
        _diffusers_version="0.42",
        boundary_ratio=None,
        transformer_2=[None, None],
        expand_timesteps=False,
    )
    load(own_folder)


@pytest.mark.parametrize(
    "entries,parts",
    [
        ({"_class_name": "DDIMScheduler"}, ["DDIMScheduler", *SCHEDULERS.values()]),
        ({"_class_name": ["a"]}, ["['a']"]),
        ({"flow_shift": 0}, ["flow_shift is 0, expected a number above 0"]),
        ({"flow_shift": "3"}, ["flow_shift is '3'"]),
        (
            {"prediction_type": "epsilon", "solver_order": 3},
            ["prediction_type is 'epsilon'", "solver_order is 3, only 2"],
        ),
        # What is left out has Diffusers' default, which for these two is not flow matching.
        (
            {"prediction_type": ..., "use_flow_sigmas": ...},
            ["prediction_type is 'epsilon'", "use_flow_sigmas is False"],
        ),
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True},
            ["use_dynamic_shifting is True"],
        ),
    ],
)
def test_a_scheduler_that_samples_otherwise_is_refused(own_folder, entries, parts):
    path = own_folder / "scheduler" / "scheduler_config.json"
    change(path, **entries)
    refused(own_folder, str(path), *parts)


def test_without_a_scheduler_the_defaults_hold(own_folder, tiny):
    shutil.rmtree(own_folder / "scheduler")
    assert load(own_folder).defaults == dataclasses.replace(tiny.defaults, flow_shift=Defaults().flow_shift)


@pytest.mark.parametrize("name", [INDEX, "transformer/config.json", "scheduler/scheduler_config.json"])
def test_json_of_another_kind_is_refused(own_folder, name):
    (own_folder / name).write_text("[1]")
    refused(own_folder, name)


# --- writing --------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_write_nothing(tiny, tmp_path):
    params = {**tiny.params, "extra": torch.zeros(2)}
    del params["proj_out.bias"]
    with pytest.raises(UserError) as error:
        save_pipeline(tmp_path / "p", params, tiny.cfg, tiny.defaults)
    assert "missing proj_out.bias [16]" in str(error.value) and "unexpected extra [2]" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_old_folder(tiny, own_folder):
    """The text encoder to copy is gone, which shows after the weights were written."""
    new = {k: v + 1 for k, v in tiny.params.items()}
    with pytest.raises(OSError):
        save_pipeline(own_folder, new, tiny.cfg, tiny.defaults, text_encoder=own_folder / "nothing")
    assert all(torch.equal(load(own_folder).params[k], v) for k, v in tiny.params.items())
    assert [p.name for p in own_folder.parent.iterdir()] == [own_folder.name]


def test_a_folder_is_rewritten_in_place_from_its_own_lazy_leaves(own_folder, tiny):
    tree, cfg = open_transformer(own_folder / "transformer")
    parts = {"vae": own_folder / "vae", "text_encoder": own_folder / "text_encoder"}
    save_pipeline(own_folder, tree, cfg, tiny.defaults, **parts, transforms=["nothing"])
    pipe = load(own_folder, needs=("vae", "text_encoder"))
    assert all(torch.equal(pipe.params[k], v) for k, v in tiny.params.items())
    assert json.loads(open_transformer(own_folder / "transformer")[0].metadata["transforms"]) == ["nothing"]
