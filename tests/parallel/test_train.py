"""Whole runs on several processes: `python -m train` from config alone gives on every mesh what it gives on one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from core import keys
from core.checkpoint import open_checkpoint
from core.config import load_config
from core.errors import UserError
from infer.media import read_video, write_video
from parallel.launch import World
from tests.parallel.launched import errors, statuses
from train import __main__ as cli
from train import metrics
from train import state as states
from train.config import Recipe, load_recipe
from train.export import export
from train.layout import mesh_sizes
from train.preprocess import Settings, preprocess
from train.rows import T2V, encode_row
from train.run import train
from train.setup import initial_state, prepare

ROOT = Path(__file__).parents[2]
MODEL = {
    "num_attention_heads": 4, "attention_head_dim": 6, "ffn_dim": 16, "num_layers": 3, "in_channels": 4,
    "out_channels": 4, "text_dim": 8, "freq_dim": 16,
}  # fmt: skip
STEPS = 20
D, DATA = "training.distributed", "training.data"
BATCH, STEPS_KEY = f"{DATA}.train_batch_size", "training.loop.max_train_steps"
RESUME = "training.checkpoint.resume_from_checkpoint"
INTERVAL = "training.checkpoint.training_state_checkpointing_steps"

# Every mesh with a microbatch of 4 samples; the single process has batches of 4.
MESHES = {
    "fsdp 4": {BATCH: 1},
    "hsdp 2x2, groups of 2": {BATCH: 1, f"{D}.hsdp_replicate_dim": 2, f"{D}.fsdp_modules_per_group": 2},
    "fsdp 2, sp 2": {BATCH: 2, f"{D}.sp_size": 2, f"{D}.reshard_after_forward": False},
    "fsdp 2, tp 2": {BATCH: 2, f"{D}.tp_size": 2, f"{D}.accumulate": "sharded"},
    "sp 2, tp 2": {BATCH: 4, f"{D}.tp_size": 2, f"{D}.sp_size": 2, f"{D}.num_gpus": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A set of 10 samples of one shape and 7 of another, and a recipe over it with everything that matters on."""
    root = tmp_path_factory.mktemp("runs")
    rows = []
    for i in range(17):
        k, shape = keys.fold_in(keys.key(0), i), (4, 1, 4, 2) if i % 5 in (1, 3) else (4, 2, 4, 4)
        rows.append(encode_row(T2V, {
            "id": f"sample-{i}", "vae_latent": keys.normal(keys.fold_in(k, "z"), shape),
            "text_embedding": keys.normal(keys.fold_in(k, "c"), (1 + i % 3, 8)), "file_name": f"{i}.mp4",
            "caption": f"caption {i}", "media_type": "video", "width": 32, "height": 32, "num_frames": 5,
            "duration_sec": 0.5, "fps": 10.0,
        }))  # fmt: skip
    (root / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, T2V.schema), root / "data" / "part.parquet", row_group_size=5)
    recipe = {
        "models": {"student": {"_target_": "wan", "config": MODEL}},
        "method": {"_target_": "sft"},
        "training": {
            "data": {"data_path": str(root / "data"), "training_cfg_rate": 0.3, "seed": 3, "train_batch_size": 4,
                     "text_padding_length": 5},
            "optimizer": {"learning_rate": 3e-3},
            "loop": {"max_train_steps": STEPS, "gradient_accumulation_steps": 2},
            "checkpoint": {"output_dir": "unset"},
            "device": "cpu",
        },
        "callbacks": {"ema": {"decay": 0.9, "start_iter": 1}},
    }  # fmt: skip
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def argv(folder, out, changes=None) -> list[str]:
    """The arguments of `python -m train`."""
    pairs = {"training.checkpoint.output_dir": str(out), **({} if changes is None else changes)}
    return [str(folder / "recipe.yaml"), *(s for k, v in pairs.items() for s in (f"--{k}", json.dumps(v)))]


def recipe_of(folder, out, changes=None) -> Recipe:
    path, *overrides = argv(folder, out, changes)
    return load_recipe(path, overrides)


def on_the_pool(folder, out, changes):
    """A run on the four processes of the pool; returns what `train` does, and the number of parameters each holds."""
    world = World(torch.distributed.get_rank(), 4, torch.distributed.get_rank(), torch.device("cpu"))
    return train(recipe_of(folder, out, changes), world)


def rows(out, phase="train") -> list[dict]:
    return [row for row in metrics.read_rows(out / "metrics.jsonl") if row["phase"] == phase]


def course(out) -> list[list[float]]:
    """The figures of every step that must not depend on the mesh."""
    return [[row["step"], row["loss"], row["grad_norm"], *(x for x in row["loss_by_sigma"] if x is not None)]
            for row in rows(out)]  # fmt: skip


def assert_same_course(out, other):
    ours, theirs = course(out), course(other)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        # Float32 sums in another order, through some steps of Adam; another sample or noise changes the first digits.
        assert a == pytest.approx(b, rel=2e-4), a[0]


@pytest.fixture(scope="module")
def alone(folder) -> Path:
    """The run of a single process."""
    train(recipe_of(folder, folder / "alone", {INTERVAL: 3}))
    return folder / "alone"


# --- the same run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_on_a_mesh_is_the_run_of_one_process(pool, folder, alone, tmp_path, mesh):
    out = tmp_path / "run"
    summaries = pool.run(on_the_pool, folder, out, MESHES[mesh])
    assert all(s == summaries[0] and s.train_steps == STEPS and s.effective_batch == 8 for s in summaries)
    assert_same_course(out, alone)
    assert {p.name for p in out.iterdir()} == {"config.yaml", "metrics.jsonl", "loss.png", "checkpoints"}
    assert [row["phase"] for row in metrics.read_rows(out / "metrics.jsonl")] == ["setup", *["train"] * STEPS, "save"]
    assert rows(out, "setup")[0]["mesh"] == mesh_sizes(recipe_of(folder, out, MESHES[mesh]).training.distributed, 4)
    for row in rows(out):
        assert 0 <= row["data_rank"] < 4 and 0 <= row["straggler_rank"] < 4 and row["straggler_seconds"] >= 0
    for name in ("params", "ema", "optimizer"):
        ours, theirs = (open_checkpoint(states.folder_of(o, STEPS) / name).read() for o in (out, alone))
        assert ours.keys() == theirs.keys()
        for k, v in theirs.items():
            # Of a leaf's largest element. Adam's steps are of one size whatever the gradient, so that rounding of tiny
            # gradients shows: 4e-5 is seen. Another sample makes a tenth.
            error = float((ours[k] - v).abs().max() / v.abs().max())
            assert error < 2e-3, f"{name}/{k}: {error:.1e}"


MOVES = [("fsdp 4", "fsdp 2, tp 2"), ("sp 2, tp 2", "alone"), ("alone", "hsdp 2x2, groups of 2")]


@pytest.mark.parametrize("first, then", MOVES)
def test_a_run_goes_on_on_another_mesh(pool, folder, alone, tmp_path, first, then):
    out = tmp_path / "run"
    for mesh, changes in ((first, {STEPS_KEY: 3}), (then, {RESUME: "latest"})):
        if mesh == "alone":
            train(recipe_of(folder, out, changes))
        else:
            pool.run(on_the_pool, folder, out, MESHES[mesh] | changes)
    assert_same_course(out, alone)


def test_how_memory_is_traded_changes_nothing(pool, folder, tmp_path):
    """Stored in bf16, with what is recomputed, offloaded and written in the background, against a plain run alone."""
    stored = {"training.dit_precision": "bf16", STEPS_KEY: 3}
    model, many = "training.model", MESHES["fsdp 2, sp 2"] | stored
    for kind in ("full", "save_attention", "save_matmuls"):
        traded = {f"{model}.enable_gradient_checkpointing_type": kind, f"{model}.activation_offload": True,
                  f"{model}.gradient_checkpointing_nth": 2, "training.checkpoint.save_in_background": True,
                  f"{D}.pin_cpu_memory": kind == "full", INTERVAL: 1}  # fmt: skip
        pool.run(on_the_pool, folder, tmp_path / kind, many | traded)
        assert [states.step_of(p) for p in states.checkpoints(tmp_path / kind)] == [1, 2, 3]
    train(recipe_of(folder, tmp_path / "alone", stored))
    for kind in ("full", "save_attention", "save_matmuls"):
        ours, theirs = course(tmp_path / kind), course(tmp_path / "alone")
        # Gradients are rounded to bf16, the dtype of the weights, before their norm: 2^-9 of each.
        assert [r[1] for r in ours] == pytest.approx([r[1] for r in theirs], rel=2e-3)
        assert [r[2] for r in ours] == pytest.approx([r[2] for r in theirs], rel=1e-2)


def poisoned(folder, tmp_path) -> dict:
    """Changes that train on the set with sample 6 not a number."""
    table = pq.read_table(folder / "data" / "part.parquet").to_pylist()
    bad = torch.full((4, 1, 4, 2), torch.nan)
    table[6] |= {"vae_latent_bytes": bad.numpy().tobytes(), "vae_latent_shape": list(bad.shape)}
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(table, T2V.schema), tmp_path / "data" / "part.parquet")
    return {f"{DATA}.data_path": str(tmp_path / "data"), INTERVAL: 1, STEPS_KEY: 20}


def test_a_loss_that_is_no_number_names_its_sample_on_all_processes(pool, folder, tmp_path):
    with pytest.raises(UserError, match="loss is nan, .*; not finite: sample-6; (the last good|no) checkpoint"):
        pool.run(on_the_pool, folder, tmp_path / "run", MESHES["fsdp 2, sp 2"] | poisoned(folder, tmp_path))
    last = len(rows(tmp_path / "run"))
    assert [states.step_of(p) for p in states.checkpoints(tmp_path / "run")] == list(range(1, last + 1))


def _slow_data(folder, out, changes):
    """A run in which the third process waits for its data."""
    from train import data

    rank, batch = torch.distributed.get_rank(), data.Reader.batch

    def slow(self, indices):
        time.sleep(0.3 if rank == 2 else 0.0)
        return batch(self, indices)

    data.Reader.batch = slow
    try:
        return on_the_pool(folder, out, changes)
    finally:
        data.Reader.batch = batch


def test_a_process_that_waits_for_data_is_told(pool, folder, tmp_path):
    pool.run(_slow_data, folder, tmp_path / "run", MESHES["fsdp 4"] | {STEPS_KEY: 3})
    for row in rows(tmp_path / "run"):
        assert row["data_rank"] == 2 and 0.6 <= row["data_seconds"] <= row["seconds"]


# --- validation and export --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """Three preprocessed clips with a VAE and a text encoder beside them, and prompts."""
    root = tmp_path_factory.mktemp("clips")
    t, y, x = torch.meshgrid(torch.arange(5), torch.arange(32), torch.arange(32), indexing="ij")
    for i in range(3):
        frames = torch.stack([x * 8 + 16 * t + 40 * i, y * 8, x * y + 9 * i], -1) % 256
        write_video(root / f"{i}.mp4", frames.to(torch.uint8), 8)
    (root / "videos.json").write_text(json.dumps([{"path": f"{i}.mp4", "caption": f"clip {i}"} for i in range(3)]))
    settings = Settings(num_frames=5, height=32, width=32, latent_channels=4, text_dim=8, text_max_length=6)
    preprocess(root / "videos.json", root / "data", settings)
    (root / "prompts.json").write_text(json.dumps({"data": [{"caption": "clip 0"}, {"caption": "other", "seed": 5}]}))
    return root


def test_validation_samples_the_sharded_average_and_export_reads_the_parts(pool, folder, clips, tmp_path):
    """The videos of a mesh are those of one process but for rounding, and training goes on as without them."""
    validation = {"dataset_file": str(clips / "prompts.json"), "every_steps": 2, "sampling_steps": [2],
                  "guidance_scale": 2.0}  # fmt: skip
    changes = {f"{DATA}.data_path": str(clips / "data"), STEPS_KEY: 3, "callbacks.validation": validation,
               f"{DATA}.text_padding_length": None}  # fmt: skip
    pool.run(on_the_pool, folder, tmp_path / "mesh", MESHES["fsdp 2, sp 2"] | changes)
    train(recipe_of(folder, tmp_path / "one", changes))
    assert_same_course(tmp_path / "mesh", tmp_path / "one")
    names = [{p.name for p in (tmp_path / run / "samples").iterdir()} for run in ("mesh", "one")]
    assert names[0] == names[1] and len(names[0]) == 2 * 3
    for name in names[0]:
        if name.endswith(".mp4"):
            ours, theirs = (read_video(tmp_path / run / "samples" / name).frames.float() for run in ("mesh", "one"))
            # Of 255 levels; lossy files of frames that differ by a rounding of a level here and there.
            assert (ours - theirs).abs().mean() < 1.0, name
    for run in ("mesh", "one"):
        export(tmp_path / run, tmp_path / f"{run}-export", ema=True)
    ours, theirs = (open_checkpoint(tmp_path / f"{run}-export" / "transformer").read() for run in ("mesh", "one"))
    assert all((ours[k] - v).abs().max() < 2e-4 for k, v in theirs.items())


# --- signals, deaths, bad input ---------------------------------------------------------------------------------------


def wait_for(out, step, alive=lambda: True):
    """Until the run has written row `step`."""
    path, deadline = out / "metrics.jsonl", time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b'"train"') < step:
        assert alive() and time.monotonic() < deadline, "the run ended before that"
        time.sleep(0.005)


def test_a_signal_to_one_process_stops_all_after_the_same_step(launched, folder, alone, tmp_path):
    """With processes that read data beside each."""
    out, changes = tmp_path / "run", {BATCH: 2, STEPS_KEY: 5000, f"{DATA}.dataloader_num_workers": 1}
    processes = launched(cli.main, argv(folder, out, changes), size=2)
    wait_for(out, 3, processes.ranks[1].is_alive)
    os.kill(processes.ranks[1].pid, signal.SIGTERM)
    done = processes.wait(60)
    assert statuses(done) == [143, 143] and errors(done) == []
    (last,) = states.checkpoints(out)
    assert states.step_of(last) == len(rows(out)) < 5000
    assert "stopped by SIGTERM after step" in done[0][1] and done[1][1] == "", "one process prints"
    assert course(out)[0] == pytest.approx(course(alone)[0], rel=2e-4)


def test_sigkill_of_a_rank_under_torchrun_and_resume(launched, folder, alone, tmp_path):
    out, changes = tmp_path / "run", {BATCH: 2, INTERVAL: 1, "training.checkpoint.checkpoints_total_limit": 2}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "train"]
    how = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, *argv(folder, out, changes | {STEPS_KEY: 5000})], **how)
    try:
        wait_for(out, 3, lambda: process.poll() is None)
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        killed = time.monotonic()
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode != 0 and time.monotonic() - killed < 30
    assert len(re.findall("^error: rank 1 .process .* ended without a word", said, re.M)) == 1, said
    assert len(re.findall("^error: ", said, re.M)) == 1, said
    complete = states.step_of(states.checkpoints(out)[-1])
    done = launched(cli.main, argv(folder, out, changes | {RESUME: "latest", STEPS_KEY: complete + 1}), size=2).wait()
    assert statuses(done) == [0, 0], done
    assert [row["step"] for row in rows(out)] == list(range(1, complete + 2))
    n = min(STEPS, complete + 1)
    for ours, theirs in zip(course(out)[:n], course(alone)[:n], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)


def rank_of(parent: int, rank: int) -> int:
    """The process that torchrun, `parent`, started as this rank."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank}")


BAD = {
    "processes": ({f"{D}.num_gpus": 8}, "training.distributed.num_gpus is 8, 2 processes are running"),
    "product": ({f"{D}.hsdp_shard_dim": 4}, "training.distributed: hsdp_replicate_dim 1 x hsdp_shard_dim 4 x tp_size 1 "
                "do not multiply to the 2 processes"),
    "heads": ({"models.student.config.num_attention_heads": 3, f"{D}.tp_size": 2},
              "training.distributed.tp_size: tensor parallelism over 2 ranks\n  - num_attention_heads 3"),
    "sequence": ({"models.student.config.num_attention_heads": 3, f"{D}.sp_size": 2},
                 "sp_size: 3 heads cannot be shared evenly by 2 processes"),
    "symmetric": ({f"{D}.fsdp_symmetric_memory": True},
                  "fsdp_symmetric_memory needs CUDA and NCCL, the mesh is on cpu"),
    "a GPU of its own": ({"training.device": "cuda:1"}, "training.device: device 'cuda:1'"),
    "key": ({f"{D}.fsdp_modules_per_group": True}, "training.distributed.fsdp_modules_per_group must be an int >= 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_said_once_and_nothing_is_written(launched, folder, tmp_path, case):
    changes, message = BAD[case]
    done = launched(cli.main, argv(folder, tmp_path / "out" / "run", changes), size=2).wait()
    assert statuses(done) == [2, 2] and len(errors(done)) == 1
    assert errors(done)[0].startswith("error: ") and message in errors(done)[0], errors(done)[0]
    assert not (tmp_path / "out").exists()


ALONE = {
    "kept": ({f"{D}.reshard_after_forward": False}, "reshard_after_forward: false needs weights that are sharded"),
    "symmetric": ({f"{D}.fsdp_symmetric_memory": True}, "fsdp_symmetric_memory: true needs weights that are sharded"),
    "tp": ({f"{D}.tp_size": 2}, "hsdp_shard_dim -1 x tp_size 2 do not multiply to the 1 process of this run"),
}  # fmt: skip


def test_a_process_alone_keeps_a_flat_dict_and_makes_no_group(folder, tmp_path):
    setup = prepare(recipe_of(folder, tmp_path / "run"))
    state = initial_state(setup)
    assert setup.mesh.groups == {} and setup.mesh.device_mesh is None and not torch.distributed.is_initialized()
    assert state.sharded is None and all(type(p) is torch.Tensor and p.is_leaf for p in state.params.values())


@pytest.mark.parametrize("case", ALONE)
def test_what_needs_several_processes_is_refused_by_one(folder, tmp_path, case):
    changes, message = ALONE[case]
    with pytest.raises(UserError, match=re.escape(message)):
        train(recipe_of(folder, tmp_path / "run", changes))


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({f"{D}.reshard_after_forward": "true"}, "training.distributed.reshard_after_forward must be a bool"),
        ({f"{D}.fsdp_symmetric_memory": 1}, "training.distributed.fsdp_symmetric_memory must be a bool"),
        ({f"{D}.fsdp_modules_per_group": 0}, "training.distributed.fsdp_modules_per_group must be an int >= 1"),
        ({f"{D}.fsdp_modules_per_group": -1}, "training.distributed.fsdp_modules_per_group must be an int >= 1"),
        ({f"{D}.reduce_dtype": "fp16"}, 'distributed.reduce_dtype must be one of fp32, bf16 or null, got "fp16"'),
        ({f"{D}.tp_size": True}, "training.distributed.tp_size must be an int >= 1"),
        ({f"{D}.hsdp_shard_dim": 0}, "training.distributed.hsdp_shard_dim must be at least 1, or -1"),
        ({f"{D}.hsdp_shard_dim": 6, f"{D}.sp_size": 4}, "distributed.sp_size must divide hsdp_shard_dim, got 4 and 6"),
        ({f"{D}.num_gpus": 8, f"{D}.hsdp_shard_dim": 2}, "training.distributed.num_gpus must be .* = 1 x 2 x 1, got 8"),
        ({f"{D}.accumulate": "never"}, "training.distributed.accumulate must be one of last, sharded"),
        ({f"{D}.timeout_s": 0}, "training.distributed.timeout_s must be a float > 0"),
        ({"training.model.activation_offload": True}, "training.model.activation_offload true needs"),
        ({"training.model.gradient_checkpointing_nth": 2}, "training.model.gradient_checkpointing_nth above 1 needs"),
        ({"training.model.enable_gradient_checkpointing_type": "save_matmuls",
          "training.model.enable_torch_compile": True}, "save_matmuls sees nothing in compiled blocks"),
    ],
)  # fmt: skip
def test_keys_of_several_processes_are_strict(folder, tmp_path, changes, message):
    data = yaml.safe_load((folder / "recipe.yaml").read_text())
    for key, value in changes.items():
        node = data
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(UserError, match=message):
        load_config(Recipe, tmp_path / "r.yaml")


def test_reduce_dtype_is_spelled_freely(folder, tmp_path):
    for text, meant in (('" BF16 "', "bf16"), ("fp32", "fp32"), ("null", None)):
        recipe = load_recipe(folder / "recipe.yaml", [f"--{D}.reduce_dtype={text}"])
        assert recipe.training.distributed.reduce_dtype == meant


@pytest.mark.parametrize(
    "keys_, world, sizes",
    [
        ({}, 8, (1, 8, 1, 1)),
        ({"hsdp_replicate_dim": 2, "sp_size": 2}, 16, (2, 4, 2, 1)),
        ({"hsdp_shard_dim": 4, "sp_size": 4, "tp_size": 2}, 8, (1, 1, 4, 2)),
        ({"num_gpus": 1}, 1, (1, 1, 1, 1)),
    ],
)
def test_shards_count_those_that_share_a_sample(folder, keys_, world, sizes):
    recipe = load_recipe(folder / "recipe.yaml", [f"--{D}.{k}={v}" for k, v in keys_.items()])
    assert tuple(mesh_sizes(recipe.training.distributed, world).values()) == sizes
