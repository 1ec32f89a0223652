"""Folders of LTX-2: what kind one is, what it says of sampling, and that Diffusers reads what we write."""

import dataclasses
import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_demo_cases import CFG, make_parts, opened, random_params, written
from ltx2_pipe_cases import make_pair, upsampler

from core.errors import UserError
from infer.folder import INDEX
from infer.ltx2_defaults import LTX2Defaults, read_defaults, scheduler_config
from infer.ltx2_folder import kind_of_pipeline, open_ltx2, save_ltx2
from infer.ltx2_guidance import GUIDANCE
from nn.ltx2_config import PRESETS

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("diffusers") / "pipeline", "2.3")


def test_what_kind_a_folder_is(tmp_path, tiny, parts):
    assert kind_of_pipeline(tiny.folder) == "wan"
    assert kind_of_pipeline(written(tmp_path / "a", parts)) == "ltx2"
    (tmp_path / INDEX).write_text(json.dumps({"_class_name": "MochiPipeline"}))
    with pytest.raises(UserError, match="'MochiPipeline', expected one of WanPipeline, .*LTX2Pipeline"):
        kind_of_pipeline(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        kind_of_pipeline(tmp_path / "b")


# --- how a folder is sampled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GUIDANCE))
def test_public_models_are_guided_as_their_recipes_say(tmp_path, name):
    """Folders of Diffusers note no sampling. An export's notes count as they are, and so does another depth."""
    cfg, (video, audio) = PRESETS[name], (GUIDANCE[name][s] for s in ("video", "audio"))
    found = read_defaults(tmp_path, {}, cfg)
    assert (found.num_frames, found.height, found.width, found.fps, found.steps) == (121, 512, 768, 24.0, 40)
    assert (found.guidance_scale, found.audio_guidance_scale) == (video.cfg_scale, audio.cfg_scale) == (3.0, 7.0)
    for one in (video, audio):
        assert (found.stg_scale, found.stg_blocks) == (one.stg_scale, one.stg_blocks) == (1.0, found.stg_blocks)
        assert (found.modality_scale, found.guidance_rescale) == (one.modality_scale, one.rescale) == (3.0, 0.7)
    assert read_defaults(tmp_path, {"_sampling": {}}, cfg) == LTX2Defaults()
    assert read_defaults(tmp_path, {}, dataclasses.replace(cfg, num_layers=20)) == LTX2Defaults()


def write_scheduler(folder, config):
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))


def test_a_scheduler_that_does_not_shift_is_of_distilled_weights(tmp_path):
    for distilled in (True, False):
        write_scheduler(tmp_path, scheduler_config(distilled))
        assert read_defaults(tmp_path, {}, CFG).distilled == distilled
        assert not read_defaults(tmp_path, {"_sampling": {"distilled": False}}, CFG).distilled


def test_a_scheduler_that_we_would_not_follow_is_refused(tmp_path):
    write_scheduler(tmp_path, scheduler_config(False) | {"max_shift": 1.15, "shift_terminal": None})
    with pytest.raises(UserError, match="max_shift is 1.15, only 2.05(.|\n)*shift_terminal is None, only 0.1"):
        read_defaults(tmp_path, {}, CFG)
    write_scheduler(tmp_path, scheduler_config(False) | {"_class_name": "UniPCMultistepScheduler"})
    with pytest.raises(UserError, match="'UniPCMultistepScheduler', expected FlowMatchEulerDiscreteScheduler"):
        read_defaults(tmp_path, {}, CFG)


BAD = {
    "num_frames": [0, 9.0, "9", True], "height": [-1, None], "width": [0], "steps": [0, 1.5], "fps": [0, "24"],
    "sampler": ["unipc", 1], "guidance_scale": ["3", None], "audio_guidance_scale": [True], "stg_scale": ["1"],
    "stg_blocks": [29, [1.5]], "modality_scale": [None], "guidance_rescale": [1.1, "0"], "distilled": [1, "no"],
    "shift": [1.0],
}  # fmt: skip


def test_every_note_may_be_bad():
    assert BAD.keys() - {"shift"} == {f.name for f in dataclasses.fields(LTX2Defaults)}


@settings(max_examples=20)
@given(st.lists(st.sampled_from(sorted(BAD)), min_size=1, unique=True), st.data())
def test_bad_notes_are_told_all_at_once(tmp_path_factory, names, data):
    noted = {name: data.draw(st.sampled_from(BAD[name])) for name in names}
    with pytest.raises(UserError) as error:
        read_defaults(tmp_path_factory.getbasetemp(), {"_sampling": noted}, CFG)
    assert all(f"_sampling.{name} is {value!r}: " in str(error.value) for name, value in noted.items())


def test_defaults_come_back_as_they_were_written(tmp_path, parts):
    noted = {
        "sampler": "res_2s", "stg_scale": 1.0, "stg_blocks": (0, 1), "modality_scale": 2.0, "guidance_rescale": 0.5,
        "distilled": True, "audio_guidance_scale": 4.0,
    }  # fmt: skip
    folder = written(tmp_path / "pipeline", parts, **noted)
    assert dataclasses.asdict(opened(folder).defaults).items() >= noted.items()


# --- models ---------------------------------------------------------------------------------------------------


def test_diffusers_loads_what_we_write(tmp_path, pair):
    """With its models from our folder it is the pipeline of which ours were taken."""
    import diffusers

    names = ("vae", "audio_vae", "vocoder", "latent_upsampler")
    out, ours = tmp_path / "out", pair.ours
    save_ltx2(out, ours.params, ours.cfg, ours.defaults, parts={name: pair.folder / name for name in names})
    absent = dict.fromkeys(("text_encoder", "tokenizer", "connectors"))
    found = diffusers.LTX2Pipeline.from_pretrained(out, latent_upsampler=None, **absent)
    for name, module in pair.modules.items():
        leaves = getattr(found, name).state_dict()
        assert all(torch.equal(v, leaves[k]) for k, v in module.state_dict().items()), name
    assert type(found.vocoder).__name__ == "LTX2Vocoder"
    again = opened(out)
    assert again.cfg == ours.cfg and again.upsampler is not None and again.sound.decode is not None


@pytest.mark.parametrize("modality, left", [("video", "audio"), ("audio", "video")])
def test_the_other_stream_is_not_even_opened(tmp_path, pair, modality, left):
    """Nor are the models around it: a folder without them does for a stream alone."""
    folder = tmp_path / "pipeline"
    shutil.copytree(pair.folder, folder)
    for name in ("audio_vae", "vocoder") if left == "audio" else ("vae", "latent_upsampler"):
        shutil.rmtree(folder / name)
    pipe = opened(folder, modality=modality)
    assert pipe.streams == (modality,) and ("vae" in pipe.absent) == (left == "video")
    assert (pipe.vae is None) == (left == "video") and (pipe.sound is None) == (left == "audio")
    with pytest.raises(UserError, match="models that are needed cannot be run"):
        open_ltx2(folder, needs=["vae", "audio_vae"], **CPU)


@pytest.mark.parametrize("changes", [{"rational_spatial_scale": 1.5}, {"temporal_upsample": True}])
def test_an_upsampler_of_another_factor_is_refused(tmp_path, pair, changes):
    folder = tmp_path / "pipeline"
    shutil.copytree(pair.folder, folder, ignore=shutil.ignore_patterns("latent_upsampler"))
    upsampler(**changes).save_pretrained(folder / "latent_upsampler")
    assert "an upsampler to twice the height and width" in open_ltx2(folder, **CPU).absent["latent_upsampler"]


def test_params_that_do_not_fit_write_nothing(tmp_path, parts):
    params = random_params(CFG)
    params.pop(next(iter(params)))
    with pytest.raises(UserError, match="missing"):
        save_ltx2(tmp_path / "out", params, CFG, LTX2Defaults(), parts=parts)
    with pytest.raises(UserError, match="vocal: none of vae, audio_vae"):
        save_ltx2(tmp_path / "out", random_params(CFG), CFG, LTX2Defaults(), parts={"vocal": parts["vae"]})
    assert not list(tmp_path.iterdir())
