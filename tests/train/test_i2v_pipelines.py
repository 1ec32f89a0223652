"""Image-to-video runs with the models around the transformer: validation, export, inference and Diffusers agree."""

import functools
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from test_rows import sample, write

sys.path += [str(Path(__file__).parents[1] / name) for name in ("infer", "nn")]

from real_cases import (
    IMAGE_DIM,
    TEXT_DIM,
    make_real,
    pictures,
    random_frames,
    same_video,
    save_image_encoder,
    without_loss,
    write_png,
)

from core import keys
from core.errors import UserError
from infer import encoders
from infer.__main__ import main as infer
from infer.conditions import encode_prompts, image_conditions, image_features
from infer.folder import load_pipeline, read_index
from infer.generate import Sampling, initial_noise, latent_shape, sample_latents
from infer.media import read_video
from train import run as run_module
from train import state as states
from train.export import export
from train.export import main as export_main
from train.rows import I2V, T2V
from train.run import train
from train.setup import prepare
from train.validate import check_prompts


@pytest.fixture(autouse=True)
def lossless(monkeypatch):
    without_loss(monkeypatch)


KEY = keys.key(5)
DATA, KIND, TOTAL = "training.data.data_path", "training.data.preprocessed_data_type", "training.loop.max_train_steps"
LENGTH, DROPOUT = "training.data.text_padding_length", "training.data.training_cfg_rate"
STUDENT = "models.student.config"
SIZE, CAPTION = (32, 48), "a red ball"
CODEC_GRID = (2, 4, 4)
VALIDATION = {"every_steps": 2, "sampling_steps": [2], "guidance_scale": 3.0}


def model(**changes) -> dict:
    """Changes of the shared recipe that give its model other fields."""
    return {f"{STUDENT}.{k}": v for k, v in changes.items()}


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """`around(kind)`, kind i2v or 5b: a folder with tiny real components, and the changes that train such a model."""

    @functools.cache
    def make(kind: str) -> tuple[Path, dict]:
        root = tmp_path_factory.mktemp(kind)
        real, row_type, stride = make_real(root, kind), *{"i2v": (I2V, 4), "5b": (T2V, 8)}[kind]
        grid = (3, *(n // stride for n in SIZE))
        rows = []
        for i in range(4):
            wide = {"text_embedding": keys.normal(KEY, (3, TEXT_DIM)), "clip_feature": keys.normal(KEY, (5, IMAGE_DIM))}
            row = sample(row_type, i, grid)
            rows.append(row | {k: v for k, v in wide.items() if k in row})
        write(root / "parts" / "data" / "x.parquet", row_type, rows)
        for i in range(2):
            write_png(root / f"{i}.png", random_frames(5 + i, 1, *SIZE)[0])
        fields = {k: getattr(real.cfg, k) for k in ("in_channels", "image_dim", "added_kv_proj_dim", "text_dim")}
        return root, {DATA: str(root / "parts" / "data"), KIND: row_type.name, **model(**fields), TOTAL: 2,
                      LENGTH: 16, "callbacks.ema": None}  # fmt: skip

    return make


def validating(root: Path, rows: list[dict]) -> dict:
    """The change that validates with these prompts; their pictures are relative to `root`."""
    (root / "prompts.json").write_text(json.dumps({"data": rows}))
    return {"callbacks.validation": VALIDATION | {"dataset_file": str(root / "prompts.json")}}


def inferred(folder: Path, out: Path, *flags) -> torch.Tensor:
    """Frames of `python -m infer` with an exported folder."""
    assert infer(["--model", str(folder), "--prompt", CAPTION, "--output", str(out), "--device", "cpu", *flags]) == 0
    return read_video(out).frames


def test_image_to_video_from_training_to_diffusers(recipe, around, tmp_path):
    """With Wan's VAE, UMT5 and CLIP: validation, inference and Diffusers make the same of the same weights.

    Diffusers tells text from image tokens by counting 512 of text.
    """
    from diffusers import WanImageToVideoPipeline

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    root, changes = around("i2v")
    rows = [{"caption": CAPTION, "seed": 3, "image": f"{i}.png"} for i in (0, 1)]
    out, folder = tmp_path / "run", tmp_path / "export"
    train(recipe(out, {**changes, **validating(root, rows), "training.optimizer.learning_rate": 0.1, LENGTH: 512}))
    validated = [read_video(out / "samples" / f"step-000002-prompt{i}-2steps.mp4").frames for i in (0, 1)]
    export(out, folder)
    assert not same_video(*validated), "the picture decides"
    for i, frames in enumerate(validated):
        flags = ["--seed", "3", "--image", str(root / f"{i}.png")]
        assert same_video(inferred(folder, tmp_path / "a.mp4", *flags), frames)

    image, sampling = random_frames(5, 1, *SIZE)[0], Sampling(9, *SIZE, steps=3, guidance_scale=3.0)
    pipe = load_pipeline(folder, device=torch.device("cpu"), dtype=torch.float32)
    noise = initial_noise(latent_shape(pipe, sampling), [1])
    conditions = image_conditions(pipe, image, 9, image_features(pipe, [image])[0])
    text, negative = encode_prompts(pipe, [CAPTION, "dull"]).split(1)
    ours = sample_latents(pipe, sampling, noise, text, negative, conditions=conditions)
    them = WanImageToVideoPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    them.set_progress_bar_config(disable=True)
    theirs = them(
        image=pictures(image[None])[0], prompt=CAPTION, negative_prompt="dull", height=SIZE[0], width=SIZE[1],
        num_frames=9, num_inference_steps=3, guidance_scale=3.0, latents=noise.clone(), output_type="latent",
    ).frames  # fmt: skip
    # Float32 on both sides through two encoders, a VAE and three steps with guidance, as in tests/infer/test_i2v.py.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5 * float(theirs.abs().max()))
    assert (theirs - noise).abs().max() > 0.1, "nothing was learnt"


def test_a_model_with_a_clean_first_frame_takes_prompts_with_and_without_pictures(recipe, around, tmp_path):
    """Wan2.2 5B: what init_from says reaches validation, the checkpoint, and the export; so does the recipe's word."""
    root, changes = around("5b")
    start = {k: v for k, v in changes.items() if not k.startswith(STUDENT)}
    rows = [{"caption": CAPTION, "seed": 3, "image": "0.png"}, {"caption": CAPTION, "seed": 3}]
    check = validating(root, rows)
    made = recipe(tmp_path / "run", {**start, **check, "models.student.init_from": str(root / "pipe")})
    student = made.models.student.model_copy(update={"config": {}})
    train(made.model_copy(update={"models": made.models.model_copy(update={"student": student})}))
    export(tmp_path / "run", tmp_path / "export")
    assert read_index(tmp_path / "export")["expand_timesteps"] is True
    for i, flags in enumerate((["--image", str(root / "0.png")], [])):
        frames = read_video(tmp_path / "run" / "samples" / f"step-000002-prompt{i}-2steps.mp4").frames
        assert same_video(inferred(tmp_path / "export", tmp_path / "a.mp4", "--seed", "3", *flags), frames)
    fresh = {**changes, **check}
    with pytest.raises(UserError, match="(?s)data.0.: .*takes text only: a picture needs an image-to-video model"):
        check_prompts(prepare(recipe(tmp_path / "new", fresh)))
    setup = prepare(recipe(tmp_path / "new", {**fresh, "pipeline.expand_timesteps": True}))
    conditions = [job.conditions.keys() for job in check_prompts(setup)]
    assert conditions == [{"clean_frame"}, set()] and setup.record()["expand_timesteps"] is True


def test_an_image_to_video_model_without_clip(recipe, clips, tmp_path):
    """Mask and first frame alone, with the patch codec: validated, exported, and sampled from a picture."""
    write(tmp_path / "data" / "x.parquet", I2V, [sample(I2V, i, CODEC_GRID) | {"clip_feature": None} for i in range(3)])
    write_png(tmp_path / "0.png", random_frames(5, 1, 32, 32)[0])
    changes = {DATA: str(tmp_path / "data"), KIND: "i2v", **model(in_channels=12), TOTAL: 2,
               "pipeline.vae": str(clips / "vae"), "pipeline.text_encoder": str(clips / "text_encoder"),
               **validating(tmp_path, [{"caption": CAPTION, "image": "0.png", "seed": 3}])}  # fmt: skip
    train(recipe(tmp_path / "run", {**changes, "callbacks.ema": None}))
    export(tmp_path / "run", tmp_path / "export")
    frames = read_video(tmp_path / "run" / "samples" / "step-000002-prompt0-2steps.mp4").frames
    flags = ["--seed", "3", "--image", str(tmp_path / "0.png")]
    assert same_video(inferred(tmp_path / "export", tmp_path / "a.mp4", *flags), frames)


def test_each_encoder_is_read_once_a_run_and_before_the_weights(recipe, around, tmp_path, monkeypatch):
    root, changes = around("i2v")
    rows = [{"caption": c, "image": f"{i}.png"} for i, c in enumerate(("a red ball", "dull blue"))]
    events, read, initial = [], encoders.read_model, run_module.initial_state
    monkeypatch.setattr(encoders, "read_model", lambda name, *rest: events.append(name) or read(name, *rest))
    monkeypatch.setattr(run_module, "initial_state", lambda setup: events.append("weights") or initial(setup))
    check = validating(root, rows)
    check["callbacks.validation"] |= {"every_steps": 1, "sampling_steps": [1]}
    train(recipe(tmp_path / "run", {**changes, **check, DROPOUT: 0.0}))
    assert events == ["UMT5EncoderModel", "CLIPVisionModel", "weights"]
    assert len(list((tmp_path / "run" / "samples").glob("*.mp4"))) == 4


def test_prompts_of_an_image_to_video_model_are_all_judged_before_training(recipe, around, tmp_path, monkeypatch):
    root, changes = around("i2v")
    (root / "broken.png").write_bytes((root / "0.png").read_bytes()[:40])
    rows = [{"caption": "a"}, {"caption": "b", "image": "0.png"}, {"caption": "c", "image": "broken.png"},
            {"caption": "d", "image": "1.png", "num_frames": 6}]  # fmt: skip
    monkeypatch.setattr(encoders, "read_model", lambda *a: pytest.fail("an encoder was read"))
    setup = prepare(recipe(tmp_path / "run", {**changes, **validating(root, rows), DROPOUT: 0.0}))
    with pytest.raises(UserError) as error:
        check_prompts(setup)
    message = str(error.value)
    for part in ("data[0]: ", "it needs a picture to begin with", "data[2]: ", "broken.png: cannot be decoded",
                 "data[3]: ", "num_frames is 6"):  # fmt: skip
        assert part in message, message
    assert "data[1]" not in message


def test_an_image_encoder_of_another_width_is_refused(recipe, around, tmp_path):
    root, changes = around("i2v")
    narrow = {**changes, **model(image_dim=8), **validating(root, [{"caption": "a", "image": "0.png"}])}
    setup = recipe(tmp_path / "run", narrow)
    with pytest.raises(UserError, match="image_encoder: it makes features of width 16, the model takes 8"):
        prepare(setup)


def test_an_export_takes_an_image_encoder_that_the_run_did_not_know(recipe, tmp_path, capsys):
    """It says what it is without, and reads checkpoints from before image encoders were noted."""
    rows = [sample(I2V, i, CODEC_GRID) | {"clip_feature": keys.normal(KEY, (5, IMAGE_DIM))} for i in range(2)]
    write(tmp_path / "data" / "x.parquet", I2V, rows)
    fields = model(in_channels=12, image_dim=IMAGE_DIM, added_kv_proj_dim=24)
    train(recipe(tmp_path / "run", {**fields, DATA: str(tmp_path / "data"), KIND: "i2v", TOTAL: 1}))
    record = states.folder_of(tmp_path / "run", 1) / states.RECORD
    noted = json.loads(record.read_text())
    assert noted["image_encoder"] is None and noted["expand_timesteps"] is False
    record.write_text(json.dumps({k: v for k, v in noted.items() if k not in ("image_encoder", "expand_timesteps")}))
    export(tmp_path / "run", tmp_path / "bare")
    assert "bare is without vae, text_encoder, image_encoder, since none is known" in capsys.readouterr().out
    save_image_encoder(tmp_path / "clip")
    export(tmp_path / "run", tmp_path / "out", image_encoder=tmp_path / "clip" / "image_encoder")
    assert "out is without vae, text_encoder, since none" in capsys.readouterr().out
    index = read_index(tmp_path / "out")
    assert index["image_encoder"] == ["transformers", "CLIPVisionModel"]
    assert "expand_timesteps" not in index and (tmp_path / "out" / "image_processor").is_dir()
    pipe = load_pipeline(tmp_path / "out", device=torch.device("cpu"), dtype=torch.float32, needs=["image_encoder"])
    assert pipe.image.dim == IMAGE_DIM
    gone = str(tmp_path / "gone")
    assert export_main([str(tmp_path / "run"), "--output", str(tmp_path / "no"), "--image-encoder", gone]) == 2
    assert f"image_encoder: {gone}; give --image-encoder" in capsys.readouterr().err and not (tmp_path / "no").exists()
