"""Clips and exports of LTX-2 in training: what a run samples, what it writes, and what inference makes of it."""

import json

import pytest
import torch
from ltx2_sets import SIZES, recipe_of, row, write

from core.checkpoint import open_checkpoint
from core.errors import UserError
from core.geometry import to_frames, to_video
from infer.__main__ import main as infer
from infer.folder import with_weights
from infer.ltx2_folder import open_ltx2
from infer.ltx2_generate import generate
from infer.media import psnr, read_video
from infer.sound import has_sound, read_sound
from nn import text_hash
from nn.ltx2_formats import open_transformer
from tests.infer.ltx2_demo_cases import make_parts
from train import ltx2_validate, metrics, validate
from train import state as states
from train import step as step_module
from train.data import batches
from train.export import export, main
from train.preprocess.finish import write_png
from train.run import train
from train.setup import initial_state, prepare

FITTING = SIZES | {"in_channels": 8, "out_channels": 8, "audio_in_channels": 16, "audio_out_channels": 16,
                   "caption_channels": 12}  # fmt: skip
FRAMES, HEIGHT, WIDTH = 9, 16, 32
V, STUDENT, RATE = "callbacks.validation", "models.student", "training.data.training_cfg_rate"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows of latents as the stand-ins make them, with the stand-ins and prompts beside them."""
    root = tmp_path_factory.mktemp("clips")
    make_parts(root)
    folder = write(root / "data", "t2va", [fitting(i) for i in range(4)])
    prompts = [{"caption": "a red clip", "seed": 5}, {"caption": "two", "num_frames": 5, "height": 16, "width": 16}]
    (root / "prompts.json").write_text(json.dumps({"data": prompts}))
    return folder


def fitting(i: int) -> dict:
    """A row of the shapes that the stand-ins give for 9 frames of 16 x 32 at 25 a second."""
    made = row("t2va", i, widths=(12, 12)) | {"num_frames": FRAMES}
    draw = torch.Generator().manual_seed(i)
    latents = {"vae_latent": (8, 3, 2, 4), "audio_latent": (4, 9, 4)}
    return made | {k: torch.randn(shape, generator=draw) for k, shape in latents.items()}


def validation(data, **changes) -> dict:
    return {"dataset_file": str(data.parent / "prompts.json"), "every_steps": 2, "sampling_steps": [2],
            "guidance_scale": 2.0, **changes}  # fmt: skip


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A run of both streams, with its samples after two and four steps."""
    out = tmp_path_factory.mktemp("finished") / "run"
    changes = {V: validation(data), "callbacks.ema": {"decay": 0.5}, RATE: 0.5}
    train(recipe_of(data, out, sizes=FITTING, changes=changes))
    return out


# --- validation -----------------------------------------------------------------------------------------------


def test_a_run_writes_clips_with_sound_and_sheets_of_both(finished):
    names = {p.name for p in (finished / "samples").iterdir()}
    steps = [f"step-{s:06d}" for s in (2, 4)]
    clips = {f"{s}-prompt{i}-2steps.mp4" for s in steps for i in (0, 1)}
    assert names == clips | {f"{s}.png" for s in steps} | {f"{s}-sound.png" for s in steps}
    for i, (frames, height, width) in enumerate([(FRAMES, HEIGHT, WIDTH), (5, 16, 16)]):
        path = finished / "samples" / f"step-000004-prompt{i}-2steps.mp4"
        video = read_video(path)
        assert tuple(video.frames.shape) == (frames, height, width, 3) and video.fps == 25
        # AAC is made of blocks of 1,024 samples.
        assert has_sound(path) and read_sound(path, rate=16000).seconds == pytest.approx(frames / 25, abs=0.07)
    done = [r["step"] for r in metrics.read_rows(finished / "metrics.jsonl") if r["phase"] == "validate"]
    assert done == [2, 4]


def test_the_clips_are_what_inference_makes_of_the_exported_average(finished, data, tmp_path):
    """Same weights, prompt, seed and size give the same frames and the same sound, but for roundings: where tensors lie
    in memory decides how sums are vectorised, so that a level of 255 may fall on the other side here and there."""
    export(finished, tmp_path / "ema", ema=True)
    pipe = with_weights(open_ltx2(tmp_path / "ema", device=torch.device("cpu"), dtype=torch.float32))
    changes = {V: validation(data), "callbacks.ema": {"decay": 0.5}}
    setup = prepare(recipe_of(data, tmp_path / "run", sizes=FITTING, changes=changes))
    state = initial_state(setup)
    weights = open_checkpoint(states.folder_of(finished, 4) / "ema").read()
    (job, _) = validate.check_prompts(setup)
    clip = ltx2_validate.sampled(setup, state, weights, job, 2, lambda done, total: None)
    texts, negative = ({k: v[None] for k, v in pipe.text.embed([c])[0].items()} for c in ("a red clip", ""))
    sampling = ltx2_validate.sampling_for(setup, job.prompt, 2)
    (expected,) = generate(pipe, sampling, texts, negative, [5])
    assert (clip.frames.int() - expected.frames.int()).abs().max() <= 1
    torch.testing.assert_close(clip.sound.waveform, expected.sound.waveform, rtol=1e-4, atol=1e-4)
    written = read_video(finished / "samples" / "step-000004-prompt0-2steps.mp4").frames
    validate.write_clip(tmp_path / "again.mp4", expected, 25.0)
    (other,) = generate(pipe, sampling, texts, negative, [6])
    validate.write_clip(tmp_path / "other.mp4", other, 25.0)
    # H.264 makes up to 26 levels of one that fell on the other side; another seed's clip is far away.
    assert psnr(written, read_video(tmp_path / "again.mp4").frames) > 30
    assert psnr(written, read_video(tmp_path / "other.mp4").frames) < 25


@pytest.mark.parametrize("modality, suffix, absent", [("video", "mp4", "-sound.png"), ("audio", "wav", ".mp4")])
def test_a_model_of_one_stream_makes_pictures_or_sound_alone(data, tmp_path, modality, suffix, absent):
    out = tmp_path / "run"
    changes = {V: validation(data, guidance_scale=1.0), f"{STUDENT}.modality": modality}
    train(recipe_of(data, out, sizes=FITTING, changes=changes | {"training.loop.max_train_steps": 2}))
    names = {p.name for p in (out / "samples").iterdir()}
    assert names == {f"step-000002-prompt{i}-2steps.{suffix}" for i in (0, 1)} | {"step-000002.png"}
    path = out / "samples" / f"step-000002-prompt0-2steps.{suffix}"
    assert has_sound(path) == (modality == "audio") and not any(name.endswith(absent) for name in names)
    if modality == "audio":
        assert read_sound(path, rate=16000).seconds == pytest.approx(FRAMES / 25, abs=1e-3), "as long as the data's"
    export(out, tmp_path / "alone")
    made = tmp_path / f"x.{suffix}"
    asked = ["--model", str(tmp_path / "alone"), "--prompt", "x", "--output", str(made), "--steps", "1"]
    assert infer([*asked, "--device", "cpu"]) == 0 and has_sound(made) == (modality == "audio")


def test_a_picture_is_the_first_frame(data, tmp_path):
    """The codec gives back next to what it was given, so that the first frame shows the picture, not the others."""
    picture = torch.zeros(1, HEIGHT, WIDTH, 3, dtype=torch.uint8) + torch.tensor([200, 120, 40], dtype=torch.uint8)
    write_png(tmp_path / "red.png", picture[0])
    (tmp_path / "p.json").write_text(json.dumps({"data": [{"caption": "a", "image": "red.png"}]}))
    changes = {V: validation(data, dataset_file=str(tmp_path / "p.json"))}
    setup = prepare(recipe_of(data, tmp_path / "run", sizes=FITTING, changes=changes))
    (job,) = validate.check_prompts(setup)
    state = initial_state(setup)
    clip = ltx2_validate.sampled(setup, state, validate.own_weights(setup, state), job, 2, lambda done, total: None)
    coded = setup.components.vae.decode(setup.components.vae.encode(to_video(picture)[None]))[0]
    assert torch.equal(clip.frames[0], to_frames(coded)[0])


def test_prompts_that_cannot_be_sampled_are_listed_before_anything_is_read(data, tmp_path, monkeypatch):
    prompts = [{"caption": "a"}, {"caption": "b", "height": 20}, {"caption": "c", "num_frames": 6}]
    (tmp_path / "p.json").write_text(json.dumps({"data": prompts}))
    changes = {V: validation(data, dataset_file=str(tmp_path / "p.json"))}
    setup = prepare(recipe_of(data, tmp_path / "run", sizes=FITTING, changes=changes))
    monkeypatch.setattr(text_hash, "embed", lambda *a: pytest.fail("embedded"))
    with pytest.raises(UserError, match="prompts of .*p.json that cannot be sampled") as error:
        validate.check_prompts(setup)
    message = str(error.value)
    assert all(part in message for part in ("data[1]: ", "height is 20", "data[2]: ", "num_frames is 6"))
    assert "data[0]" not in message


def test_a_frozen_stream_has_no_validation(data, tmp_path):
    changes = {V: validation(data), f"{STUDENT}.frozen": "audio"}
    with pytest.raises(UserError, match="frozen: audio is given in training, and prompts cannot give it"):
        validate.check_prompts(prepare(recipe_of(data, tmp_path / "run", sizes=FITTING, changes=changes)))


# --- captions -------------------------------------------------------------------------------------------------


def test_a_dropped_caption_is_the_embedding_of_the_empty_one(data, tmp_path):
    """With every caption dropped the step is the one over rows whose caption was empty."""
    setup = prepare(recipe_of(data, tmp_path / "run", sizes=FITTING, changes={RATE: 1.0}))
    (empty,) = setup.components.text.embed([""])
    assert setup.empty.keys() == {"video", "audio"} and all(torch.equal(setup.empty[k], empty[k]) for k in setup.empty)
    state = initial_state(setup)
    with torch.no_grad():
        for p in state.params.values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    batch = next(batches(setup.dataset, key=state.key, batch_size=2))
    other = batch.__class__(batch.targets, {"text": torch.stack([empty["video"]] * 2)}, [1, 1], batch.names,
                            batch.indices, batch.fps)  # fmt: skip
    never = prepare(recipe_of(data, tmp_path / "never", sizes=FITTING))
    dropped, same, kept = (
        step_module.microbatch_loss(s, state, b, 0)[0] for s, b in ((setup, batch), (never, other), (never, batch))
    )
    for name in dropped:
        # The empty caption is one word; beside four masked ones its sums run in another order.
        torch.testing.assert_close(dropped[name], same[name], rtol=1e-5, atol=0)
        assert not torch.allclose(dropped[name], kept[name], rtol=1e-4)


# --- latents that do not fit ----------------------------------------------------------------------------------


def test_latents_that_the_model_would_misplace_are_refused(data, tmp_path):
    sizes = FITTING | {"vae_scale_factors": [8, 32, 32], "audio_hop_length": 320}
    with pytest.raises(UserError, match="latents that the model cannot place") as error:
        prepare(recipe_of(data, tmp_path / "run", sizes=sizes))
    assert "latents of 8 pixels and 4 frames, the model's positions are of latents of 32 and 8" in str(error.value)
    assert "25 latents a second, the model's positions are of 12.5" in str(error.value)


# --- exports --------------------------------------------------------------------------------------------------


def test_an_export_is_a_pipeline_of_the_same_weights_and_starts_another_run(finished, data, tmp_path, capsys):
    assert main([str(finished), "--output", str(tmp_path / "out")]) == 0
    assert "is without vocoder" in capsys.readouterr().out
    tree, cfg = open_transformer(tmp_path / "out" / "transformer")
    weights = open_checkpoint(states.folder_of(finished, 4) / "params").read()
    assert tree.metadata["model_type"] == "LTX2VideoTransformer3DModel"
    assert tree.keys() == weights.keys() and all(torch.equal(tree[k].read(), weights[k]) for k in weights)
    pipe = open_ltx2(tmp_path / "out", device=torch.device("cpu"), dtype=torch.float32)
    assert not pipe.absent.keys() & {"vae", "audio_vae", "text_encoder"}
    noted = pipe.defaults
    assert (noted.num_frames, noted.height, noted.width, noted.fps) == (FRAMES, HEIGHT, WIDTH, 25.0)
    assert (noted.steps, noted.guidance_scale, noted.audio_guidance_scale) == (2, 2.0, 2.0)
    from_it = {f"{STUDENT}.init_from": str(tmp_path / "out"), f"{STUDENT}.modality": "audio"}
    setup = prepare(recipe_of(data, tmp_path / "run", sizes={}, changes=from_it))
    started = initial_state(setup).params
    assert started.keys() < weights.keys() and all(torch.equal(p.detach(), weights[k]) for k, p in started.items())
    assert (setup.defaults.guidance_scale, setup.defaults.steps) == (2.0, 2), "as the pipeline that it starts from"


def test_weights_of_a_distilled_model_stay_marked_as_such(finished, data, tmp_path):
    export(finished, tmp_path / "base")
    index = tmp_path / "base" / "model_index.json"
    noted = json.loads(index.read_text())
    index.write_text(json.dumps(noted | {"_sampling": noted["_sampling"] | {"distilled": True, "steps": 8}}))
    changes = {f"{STUDENT}.init_from": str(tmp_path / "base")}
    assert prepare(recipe_of(data, tmp_path / "run", sizes={}, changes=changes)).defaults.distilled
    setup = prepare(recipe_of(data, tmp_path / "run", sizes={}, changes=changes | {V: validation(data)}))
    with pytest.raises(UserError, match="steps is 2, a distilled model takes 8"):
        validate.check_prompts(setup)


def test_an_export_of_one_stream_takes_the_other_from_a_base(finished, data, tmp_path, capsys):
    export(finished, tmp_path / "base")
    changes = {f"{STUDENT}.init_from": str(tmp_path / "base"), f"{STUDENT}.modality": "video"}
    train(recipe_of(data, tmp_path / "run", sizes={}, changes=changes))
    argv = [str(tmp_path / "run"), "--output", str(tmp_path / "alone")]
    assert main(argv) == 0
    assert json.loads((tmp_path / "alone" / "model_index.json").read_text())["_class_name"] == "LTX2VideoOnlyPipeline"
    tree, cfg = open_transformer(tmp_path / "alone" / "transformer")
    assert cfg.modality == "video" and tree.metadata["model_type"] == "LTX2VideoOnlyTransformer3DModel"
    argv = [str(tmp_path / "run"), "--output", str(tmp_path / "whole"), "--merge-base", str(tmp_path / "base")]
    assert main([*argv, "--dtype", "bf16"]) == 0
    pipe = with_weights(open_ltx2(tmp_path / "whole", device=torch.device("cpu"), dtype=torch.float32))
    trained = open_checkpoint(states.folder_of(tmp_path / "run", 4) / "params").read()
    base = open_transformer(tmp_path / "base" / "transformer")[0].read()
    stored = open_transformer(tmp_path / "whole" / "transformer")[0].read()
    assert pipe.cfg.crossed and pipe.sound is not None, "with the base's audio VAE"
    for key, value in stored.items():
        source = trained if key in trained else base
        assert torch.equal(value, source[key].to(value.dtype)), key
    assert {v.dtype for v in stored.values()} == {torch.bfloat16, torch.float32}
    capsys.readouterr()
    assert main([str(finished), "--output", str(tmp_path / "no"), "--merge-base", str(tmp_path / "base")]) == 2
    assert "--merge-base" in (said := capsys.readouterr().err) and "the checkpoint has both streams" in said
    assert not (tmp_path / "no").exists()


def test_models_that_a_pipeline_has_no_place_for_are_refused(finished, tmp_path, capsys):
    assert main([str(finished), "--output", str(tmp_path / "x"), "--image-encoder", "y"]) == 2
    assert "--image-encoder y: a pipeline of ltx2 has none" in capsys.readouterr().err
