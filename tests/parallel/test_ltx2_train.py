"""Whole runs of LTX-2 on several processes: on every mesh what one process gives, frozen streams included."""

import json
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from core import keys
from core.checkpoint import open_checkpoint
from core.errors import UserError
from infer.media import psnr
from infer.sound import log_mel_correlation, read_sound
from parallel.launch import World
from tests.infer.ltx2_demo_cases import make_parts
from train import metrics, validate
from train import state as states
from train.config import load_recipe
from train.rows import T2VA, encode_row
from train.run import train
from train.setup import prepare

SIZES = {
    "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 6, "cross_attention_dim": 24, "in_channels": 4,
    "out_channels": 4, "audio_num_attention_heads": 4, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 16,
    "audio_in_channels": 6, "audio_out_channels": 6, "caption_channels": 7, "rope_type": "split",
    "vae_scale_factors": [4, 8, 8],
}  # fmt: skip
D, BATCH = "training.distributed", "training.data.train_batch_size"
# Every mesh with a microbatch of 4 samples; the single process has batches of 4.
MESHES = {
    "fsdp 4": {BATCH: 1},
    "fsdp 2, sp 2": {BATCH: 2, f"{D}.sp_size": 2},
    "fsdp 2, tp 2": {BATCH: 2, f"{D}.tp_size": 2, f"{D}.accumulate": "sharded"},
}


def written(data: Path, shapes, width: int) -> Path:
    """A set of eight samples with latents of these shapes, of video and of sound, and texts of this width."""
    rows = []
    for i in range(8):
        k = keys.fold_in(keys.key(0), i)
        draw = lambda name, *shape: keys.normal(keys.fold_in(k, name), shape)  # noqa: B023, E731
        rows.append(encode_row(T2VA, {
            "id": f"sample-{i}", "vae_latent": draw("v", *shapes[0]), "audio_latent": draw("a", *shapes[1]),
            "text_embedding": draw("t", 3, width), "file_name": f"{i}.mp4", "caption": f"caption {i}",
            "media_type": "video", "width": 24, "height": 24, "num_frames": 5, "duration_sec": 0.2, "fps": 25.0,
            "audio_sample_rate": 16000,
        }))  # fmt: skip
    data.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, T2VA.schema), data / "part.parquet")
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A set of eight samples: 18 video tokens, which two processes share, and 5 of audio, which each has whole."""
    root = tmp_path_factory.mktemp("ltx2")
    written(root / "data", [(4, 2, 3, 3), (2, 5, 3)], 7)
    recipe = {
        "models": {"student": {"_target_": "ltx2", "config": SIZES}},
        "method": {"_target_": "sft"},
        "training": {
            "data": {"data_path": str(root / "data"), "preprocessed_data_type": "t2va", "train_batch_size": 4},
            "optimizer": {"learning_rate": 3e-3},
            "loop": {"max_train_steps": 4, "gradient_accumulation_steps": 2},
            "checkpoint": {"output_dir": "unset"},
            "device": "cpu",
        },
    }
    (root / "recipe.json").write_text(json.dumps(recipe))
    return root


def recipe_of(folder, out, changes):
    pairs = {"training.checkpoint.output_dir": str(out), **changes}
    return load_recipe(folder / "recipe.json", [s for k, v in pairs.items() for s in (f"--{k}", json.dumps(v))])


def world() -> World:
    rank = torch.distributed.get_rank()
    return World(rank, 4, rank, torch.device("cpu"))


def on_the_pool(folder, out, changes):
    return train(recipe_of(folder, out, changes), world())


def keeping(folder, out, changes, where=None):
    """A run that also keeps the frames of its validation as they are made: before H.264, which makes up to 26 levels of
    one that falls on the other side."""
    plain = validate.write_clip

    def write(path, clip, fps):
        plain(path, clip, fps)
        torch.save(clip.frames, path.with_suffix(".pt"))

    with mock.patch.object(validate, "write_clip", write):
        return train(recipe_of(folder, out, changes), *(() if where is None else (where,)))


def keeping_on_the_pool(folder, out, changes):
    keeping(folder, out, changes, world())


def prepared_on_the_pool(folder, out, changes):
    prepare(recipe_of(folder, out, changes), world())


def course(out) -> list[list[float]]:
    rows = [row for row in metrics.read_rows(out / "metrics.jsonl") if row["phase"] == "train"]
    names = ("step", "loss", "loss_video", "loss_audio", "grad_norm", "loss_by_sigma_video", "loss_by_sigma_audio")
    found = [[row.get(name) for name in names] for row in rows]
    return [[x for v in row for x in (v if isinstance(v, list) else [v]) if x is not None] for row in found]


@pytest.fixture(scope="module")
def alone(folder):
    """`alone(frozen)`: the run of a single process, each made once."""
    made = {}

    def run(frozen=None) -> Path:
        if frozen not in made:
            made[frozen] = folder / f"alone-{frozen}"
            train(recipe_of(folder, made[frozen], {"models.student.frozen": frozen}))
        return made[frozen]

    return run


@pytest.mark.parametrize("mesh, frozen", [*((m, None) for m in MESHES), ("fsdp 4", "audio"), ("fsdp 2, tp 2", "video")])
def test_a_run_on_a_mesh_is_the_run_of_one_process(pool, folder, alone, tmp_path, mesh, frozen):
    out = tmp_path / "run"
    pool.run(on_the_pool, folder, out, {**MESHES[mesh], "models.student.frozen": frozen})
    ours, theirs = course(out), course(alone(frozen))
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        # Float32 sums in another order, through some steps of Adam; another sample or noise changes the first digits.
        assert a == pytest.approx(b, rel=2e-4), a[0]
    ours, theirs = (open_checkpoint(states.folder_of(o, 4) / "params").read() for o in (out, alone(frozen)))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        # Adam's first steps divide by the root of squared gradients that are all but zero in float32.
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=2e-3, msg=key)


@pytest.mark.parametrize("changes, message", [
    ({f"{D}.sp_size": 2, "models.student.modality": "audio"}, "sp_size: 2 processes would share the tokens of a video"),
    ({f"{D}.tp_size": 2, "models.student.config.audio_num_attention_heads": 1,
      "models.student.config.audio_attention_head_dim": 16, "models.student.config.rope_type": "interleaved"},
     "audio_num_attention_heads 1 is not divisible by tp 2"),
    ({f"{D}.tp_size": 2, "training.model.pack_attention_projections": True}, "pack_attention_projections would be cut"),
])  # fmt: skip
def test_meshes_that_do_not_fit_the_streams_are_refused(pool, folder, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        pool.run(prepared_on_the_pool, folder, tmp_path / "run", changes)


def test_clips_of_validation_are_those_of_one_process(pool, folder, tmp_path):
    make_parts(tmp_path)
    data = written(tmp_path / "data", [(8, 3, 2, 4), (4, 9, 4)], 12)
    (tmp_path / "p.json").write_text(json.dumps({"data": [{"caption": "a clip"}, {"caption": "a clip", "seed": 5}]}))
    fitting = {"in_channels": 8, "out_channels": 8, "audio_in_channels": 16, "audio_out_channels": 16,
               "caption_channels": 12}  # fmt: skip
    changes = {f"models.student.config.{k}": v for k, v in fitting.items()} | {
        "training.data.data_path": str(data), "training.loop.max_train_steps": 2,
        "callbacks.validation": {"dataset_file": str(tmp_path / "p.json"), "every_steps": 9, "sampling_steps": [2],
                                 "guidance_scale": 2.0},
    }  # fmt: skip
    keeping(folder, tmp_path / "alone", changes)
    pool.run(keeping_on_the_pool, folder, tmp_path / "run", {**changes, **MESHES["fsdp 2, sp 2"]})
    place = lambda out, prompt: tmp_path / out / "samples" / f"step-000002-prompt{prompt}-2steps.mp4"  # noqa: E731
    one, several, other = place("alone", 0), place("run", 0), place("alone", 1)
    frames, same, another = (torch.load(path.with_suffix(".pt")) for path in (one, several, other))
    # Float32 sums in another order: a few pixels round to the next level.
    assert psnr(frames, same) > 45 > psnr(frames, another)
    assert log_mel_correlation(*(read_sound(path, rate=16000) for path in (one, several))) > 0.99
