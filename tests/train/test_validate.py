"""Validation during training: which videos, of which weights, and what stays untouched."""

import dataclasses
import json

import pytest
import torch

from core.errors import UserError
from infer.conditions import encode_prompts
from infer.folder import load_pipeline
from infer.generate import generate
from infer.media import read_video
from nn import text_hash
from nn.wan import WanConfig
from train import components, families, metrics
from train import validate as validation_module
from train.export import export
from train.run import train
from train.setup import initial_state, prepare
from train.validate import Prompt, check_prompts, own_weights, prepare_jobs, sampling_for, validate

TOTAL = "training.loop.max_train_steps"


@pytest.fixture
def setup_of(recipe, validation, tmp_path):
    """`setup_of(**changes of callbacks.validation)`."""
    return lambda **changes: prepare(recipe(tmp_path / "run", {"callbacks.validation": validation | changes}))


def test_a_video_per_prompt_and_number_of_steps_and_a_sheet_per_validation(finished):
    names = {p.name for p in (finished / "samples").iterdir()}
    expected = {f"step-{s:06d}.png" for s in (5, 8)}
    expected |= {f"step-{s:06d}-prompt{i}-{n}steps.mp4" for s in (5, 8) for i in (0, 1) for n in (1, 2)}
    assert names == expected
    for step in (5, 8):
        for i, size in ((0, (5, 32, 32, 3)), (1, (1, 16, 48, 3))):
            for n in (1, 2):
                video = read_video(finished / "samples" / f"step-{step:06d}-prompt{i}-{n}steps.mp4")
                assert tuple(video.frames.shape) == size and video.fps == 8
        assert (finished / "samples" / f"step-{step:06d}.png").read_bytes().startswith(b"\x89PNG")


def test_the_videos_are_what_inference_makes_of_the_exported_average(finished, tmp_path, setup_of):
    """Same weights, prompt, seed and size give the same file: compared after the codec, to the bit."""
    setup = setup_of()
    export(finished, tmp_path / "ema", ema=True)
    export(finished, tmp_path / "params")
    videos = {}
    for name in ("ema", "params"):
        pipe = load_pipeline(tmp_path / name, device=torch.device("cpu"), dtype=torch.float32)
        prompt = Prompt("another", seed=5, num_frames=1, height=16, width=48)
        text, negative = encode_prompts(pipe, [prompt.caption]), encode_prompts(pipe, [""])
        (frames,) = generate(pipe, sampling_for(setup, prompt, 2), text, negative, [prompt.seed])
        validation_module.write_video(tmp_path / f"{name}.mp4", frames, 8)
        videos[name] = read_video(tmp_path / f"{name}.mp4").frames
    seen = read_video(finished / "samples" / "step-000008-prompt1-2steps.mp4").frames
    assert torch.equal(seen, videos["ema"]) and not torch.equal(seen, videos["params"])


def test_averaged_weights_are_used_when_there_are_any_and_asked_for(setup_of):
    state = initial_state(setup_of())
    for v in state.ema.values():
        v.zero_()
    for use_ema, with_ema, averaged in ((True, True, True), (False, True, False), (True, False, False)):
        seen = own_weights(setup_of(use_ema=use_ema), dataclasses.replace(state, ema=state.ema if with_ema else None))
        assert all(torch.equal(v, (state.ema if averaged else state.params)[k]) for k, v in seen.items())
        assert seen.keys() == state.params.keys() and not any(v.requires_grad for v in seen.values())


@pytest.mark.parametrize("fails", [False, True])
def test_validation_leaves_the_state_and_torch_as_they_were(setup_of, monkeypatch, fails):
    setup = setup_of(sampling_steps=[1])
    state = initial_state(setup)
    before = {k: p.detach().clone() for k, p in state.params.items()}
    random_state = torch.get_rng_state()

    def disk(*_):
        raise OSError("No space left on device")

    if fails:
        monkeypatch.setattr(validation_module, "write_video", disk)
        with pytest.raises(OSError, match="No space"):
            validate(setup, state, check_prompts(setup), lambda line: None)
    else:
        lines = []
        paths = validate(setup, state, check_prompts(setup), lines.append)
        assert len(paths) == 2 and all(p.is_file() for p in paths) and "2 videos, contact sheet" in lines[0]
    assert all(torch.equal(p, before[k]) and p.requires_grad and p.grad is None for k, p in state.params.items())
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), random_state)


def test_the_seed_decides_a_sample_whatever_stands_beside_it(setup_of, monkeypatch):
    setup, seen = setup_of(sampling_steps=[1]), {}
    state = initial_state(setup)
    monkeypatch.setattr(validation_module, "contact_sheet", lambda rows, *_, **__: None)
    keep = lambda path, frames, fps, sound=None: seen.update({path.name: frames})  # noqa: E731
    monkeypatch.setattr(validation_module, "write_video", keep)
    jobs = prepare_jobs(setup, [Prompt("a", seed=s) for s in (1, 2, 1, None)])
    validate(setup, state, jobs, lambda line: None)
    a, b, again, default = seen.values()
    assert torch.equal(a, again) and not torch.equal(a, b) and not torch.equal(a, default)


def test_what_a_prompt_avoids_reaches_guidance(setup_of, monkeypatch):
    """Each prompt with its own negative prompt, the empty one by default."""
    setup, seen, real = setup_of(sampling_steps=[1]), [], validation_module.generate

    def watched(pipe, sampling, text, negative, seeds, **options):
        seen.append((text, negative))
        return real(pipe, sampling, text, negative, seeds, **options)

    monkeypatch.setattr(validation_module, "generate", watched)
    monkeypatch.setattr(validation_module, "contact_sheet", lambda rows, *_, **__: None)
    monkeypatch.setattr(validation_module, "write_video", lambda path, frames, fps, sound=None: None)
    prompts = [Prompt("a"), Prompt("b", negative_prompt="dull")]
    validate(setup, initial_state(setup), prepare_jobs(setup, prompts), lambda line: None)
    pipe = validation_module.pipeline_of(setup, {})
    for found, words in zip(seen, (("a", ""), ("b", "dull")), strict=True):
        for got, word in zip(found, words, strict=True):
            assert torch.equal(got, encode_prompts(pipe, [word]))


def test_sizes_come_from_the_prompt_then_the_recipe_then_the_data(setup_of):
    size = lambda s: (s.num_frames, s.height, s.width)  # noqa: E731
    assert size(sampling_for(setup_of(), Prompt("x"), 1)) == (5, 32, 32)
    setup = setup_of(height=48, num_frames=9)
    assert size(sampling_for(setup, Prompt("x"), 1)) == (9, 48, 32)
    assert size(sampling_for(setup, Prompt("x", width=16, height=16), 3)) == (9, 16, 16)
    sampling = sampling_for(setup, Prompt("x"), 3)
    assert (sampling.steps, sampling.sampler, sampling.flow_shift, sampling.guidance_scale) == (3, "unipc", 3.0, 2.0)


@pytest.mark.parametrize("guidance, distinct", [(2.0, 3), (1.0, 2)])
def test_texts_are_embedded_once_a_run_and_none_that_guidance_does_not_need(
    recipe, validation, tmp_path, monkeypatch, guidance, distinct
):
    """Two validations, two prompts; the empty caption is one more text with guidance."""
    seen, real = [], text_hash.embed
    monkeypatch.setattr(text_hash, "embed", lambda cfg, texts: seen.append(list(texts)) or real(cfg, texts))
    changes = {"callbacks.validation": validation | {"every_steps": 1, "guidance_scale": guidance}}
    train(recipe(tmp_path / "run", {**changes, TOTAL: 2, "training.data.training_cfg_rate": 0.0}))
    assert len(list((tmp_path / "run" / "samples").glob("*.png"))) == 2
    assert [len(texts) for texts in seen] == [distinct]


def test_every_prompt_that_cannot_be_sampled_is_listed_before_any_encoder_is_read(setup_of, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"no picture")
    rows = [
        {"caption": "a"}, {"caption": "b", "image": "a.png"}, {"caption": "c", "height": 17},
        {"caption": "d", "num_frames": 4},
    ]  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps({"data": rows}))
    setup = setup_of(dataset_file=str(tmp_path / "p.json"))
    monkeypatch.setattr(text_hash, "embed", lambda *a: pytest.fail("embedded"))
    with pytest.raises(UserError, match="callbacks.validation: prompts of .*p.json that cannot be sampled") as error:
        check_prompts(setup)
    message = str(error.value)
    for part in ("data[1]: ", "takes text only", "data[2]: ", "height is 17", "data[3]: ", "num_frames is 4"):
        assert part in message, message
    assert "data[0]" not in message


def test_a_size_that_every_prompt_has_itself_is_refused_in_the_recipe(setup_of, tmp_path):
    rows = [{"caption": "a", "height": 16, "num_frames": 5}, {"caption": "b", "height": 32}]
    (tmp_path / "p.json").write_text(json.dumps({"data": rows}))
    with pytest.raises(UserError) as error:
        check_prompts(setup_of(dataset_file=str(tmp_path / "p.json"), num_frames=9, height=48, width=16))
    (line,) = str(error.value).splitlines()[1:]
    why = f"would do nothing: every prompt of {tmp_path / 'p.json'} has its own height"
    assert line == f"  - callbacks.validation.height {why}"
    assert len(check_prompts(setup_of(dataset_file=str(tmp_path / "p.json"), num_frames=9, width=16))) == 2


def test_the_models_around_run_on_the_device_of_the_run(recipe, validation, tmp_path, monkeypatch):
    """Not on the CPU, where a real VAE takes minutes for a video; and they are not held beside the training state."""
    seen = {}
    for module, name in ((components, "load_vae"), (families, "load_text_encoder")):
        monkeypatch.setattr(module, name, lambda folder, n=name, **how: seen.setdefault(n, how))
    made = recipe(tmp_path / "run", {"callbacks.validation": validation, "pipeline.vae_dtype": "bf16"})
    gpu = torch.device("cuda", 1)
    components.find_components(made, WanConfig(), gpu, torch.float16)
    assert seen == {
        "load_vae": {"device": gpu, "dtype": torch.bfloat16, "keep": False},
        "load_text_encoder": {"device": gpu, "dtype": torch.float16},
    }


def test_nothing_to_validate_without_the_callback(recipe, tmp_path):
    assert check_prompts(prepare(recipe(tmp_path / "run"))) == []


def test_validation_at_the_start_comes_before_the_first_step(recipe, validation, tmp_path):
    out = tmp_path / "run"
    changes = validation | {"validate_at_start": True, "sampling_steps": [1], "every_steps": 2}
    train(recipe(out, {"callbacks.validation": changes, TOTAL: 3}))
    phases = [(row["phase"], row.get("step")) for row in metrics.read_rows(out / "metrics.jsonl")]
    phases = [phase for phase in phases if phase[0] in ("train", "validate")]
    assert phases == [("validate", 0), ("train", 1), ("train", 2), ("validate", 2), ("train", 3), ("validate", 3)]
    assert (out / "samples" / "step-000000.png").is_file()
