"""A tiny preprocessed set, recipes over it, and one finished run, shared by the tests of training."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from set_cases import BUCKETS, write_clips

from core import keys
from infer.media import write_video
from train.config import load_recipe
from train.preprocess import Settings, preprocess
from train.rows import T2V, encode_row
from train.run import train

MODEL = {
    "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "in_channels": 4,
    "out_channels": 4, "text_dim": 8, "freq_dim": 16,
}  # fmt: skip
SETTINGS = Settings(num_frames=5, height=32, width=32, latent_channels=4, text_dim=8, text_max_length=6)
PROMPTS = [
    {"caption": "clip number 0"},
    {"caption": "another", "seed": 5, "num_frames": 1, "height": 16, "width": 48},
]


def picture(i: int) -> torch.Tensor:
    """Clip i: colour ramps that move, uint8 `[5, 32, 32, 3]`."""
    t, y, x = torch.meshgrid(torch.arange(5), torch.arange(32), torch.arange(32), indexing="ij")
    return (torch.stack([x * 8 + 16 * t + 40 * i, y * 8, x * y + 9 * i], -1) % 256).to(torch.uint8)


@pytest.fixture(scope="session")
def clips(tmp_path_factory) -> Path:
    """Three clips, preprocessed: latents `[4, 2, 4, 4]`, text `[3, 8]`, and the folders vae/ and text_encoder/."""
    root = tmp_path_factory.mktemp("clips")
    rows = [{"path": f"{i}.mp4", "caption": f"clip number {i}"} for i in range(3)]
    for i in range(3):
        write_video(root / f"{i}.mp4", picture(i), 8)
    (root / "videos.json").write_text(json.dumps(rows))
    preprocess(root / "videos.json", root / "data", SETTINGS)
    (root / "prompts.json").write_text(json.dumps({"data": PROMPTS}))
    return root / "data"


@pytest.fixture(scope="session")
def recipe_file(clips) -> Path:
    """A recipe with everything on that matters for resuming; validation is null."""
    recipe = {
        "models": {"student": {"_target_": "wan", "config": MODEL}},
        "method": {"_target_": "sft"},
        "training": {
            "data": {"data_path": str(clips), "training_cfg_rate": 0.3, "seed": 3},
            "optimizer": {"learning_rate": 1e-2},
            "loop": {"max_train_steps": 8, "gradient_accumulation_steps": 2},
            "checkpoint": {"output_dir": "unset", "training_state_checkpointing_steps": 2},
            "device": "cpu",
        },
        "callbacks": {"ema": {"decay": 0.9, "start_iter": 1}},
    }
    path = clips.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="session")
def arguments(recipe_file):
    """`arguments(out, {dotted key: value}) -> argv` of `python -m train`."""

    def make(out, changes=None) -> list[str]:
        pairs = {"training.checkpoint.output_dir": str(out), **({} if changes is None else changes)}
        return [str(recipe_file), *(s for k, v in pairs.items() for s in (f"--{k}", json.dumps(v)))]

    return make


@pytest.fixture(scope="session")
def recipe(arguments):
    """`recipe(out, {dotted key: value}) -> Recipe`."""

    def make(out, changes=None):
        path, *overrides = arguments(out, changes)
        return load_recipe(path, overrides)

    return make


@pytest.fixture(scope="session")
def validation(clips) -> dict:
    """Values of `callbacks.validation` over two prompts, one with its own size and seed."""
    return {"dataset_file": str(clips.parent / "prompts.json"), "every_steps": 5, "sampling_steps": [1, 2],
            "guidance_scale": 2.0}  # fmt: skip


@pytest.fixture(scope="session")
def finished(tmp_path_factory, recipe, validation) -> Path:
    """The output folder of a finished run of 8 steps with validation after 5 and 8. Not to be changed: copy it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(recipe(out, {"callbacks.validation": validation}))
    return out


@pytest.fixture(scope="session")
def write_set():
    """`write_set(folder, shapes, poison=())`: a set of random latents of these shapes, NaN in samples `poison`."""

    def write(folder: Path, shapes, poison=(), text_dim: int = 8) -> Path:
        rows = []
        for i, shape in enumerate(shapes):
            k = keys.fold_in(keys.key(0), i)
            latents = keys.normal(keys.fold_in(k, "z"), shape)
            latents[0, 0, 0, 0] = torch.nan if i in poison else latents[0, 0, 0, 0]
            rows.append(encode_row(T2V, {
                "id": f"sample-{i}", "vae_latent": latents,
                "text_embedding": keys.normal(keys.fold_in(k, "c"), (1 + i % 3, text_dim)),
                "file_name": f"{i}.mp4", "caption": f"caption {i}", "media_type": "video", "width": 32, "height": 32,
                "num_frames": 5, "duration_sec": 0.5, "fps": 10.0,
            }))  # fmt: skip
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, T2V.schema), folder / "part.parquet")
        return folder

    return write


# --- sets made from clips; read only --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real(tmp_path_factory) -> Path:
    """An image-to-video pipeline folder of tiny real components."""
    from real_cases import make_real

    return make_real(tmp_path_factory.mktemp("real"), "i2v").folder


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """The metadata file of `set_cases.write_clips`."""
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="session")
def fitted(data, tmp_path_factory) -> Path:
    """A set with a fitted codec, whose models make other sets quickly."""
    out = tmp_path_factory.mktemp("fitted") / "set"
    preprocess(data, out, Settings(buckets=BUCKETS, latent_channels=4, text_dim=8))
    return out
