"""Whole runs: what is written, killing and resuming to the last bit, stopping on request, and bad input at the door."""

import errno
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from core.checkpoint import open_checkpoint
from core.errors import UserError
from core.trees import Params
from nn import layers
from train import __main__ as cli
from train import metrics, precision, run
from train import state as states
from train import step as step_module
from train.config import Wan, load_recipe
from train.layout import stored_specs
from train.run import train
from train.setup import check_kernels, initial_state, model_config, prepare

ACCUMULATION, INTERVAL, LIMIT, TOTAL = (
    "training.loop.gradient_accumulation_steps",
    "training.checkpoint.training_state_checkpointing_steps",
    "training.checkpoint.checkpoints_total_limit",
    "training.loop.max_train_steps",
)
RESUME, WORKERS = "training.checkpoint.resume_from_checkpoint", "training.data.dataloader_num_workers"
WEIGHTS_ONLY = "training.checkpoint.weights_only"
LATEST = {RESUME: "latest"}


def rows(out, phase="train") -> list[dict]:
    return [row for row in metrics.read_rows(out / "metrics.jsonl") if row["phase"] == phase]


def course(out) -> list[tuple]:
    """What must not depend on how often a run was interrupted."""
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["loss_by_sigma"]) for row in rows(out)]


def saved(out, step) -> Params:
    """Every tensor of a checkpoint."""
    folder = states.folder_of(out, step)
    groups = [p.name for p in folder.iterdir() if p.is_dir()] + [states.SCALARS]
    return {f"{g}/{k}": v for g in groups for k, v in open_checkpoint(folder / g).read().items()}


def assert_same_end(out, other, step):
    ours, theirs = saved(out, step), saved(other, step)
    assert ours.keys() == theirs.keys() and {k.split("/")[0] for k in ours} >= {"params", "optimizer", "ema"}
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def steps_saved(out) -> list[int]:
    return [states.step_of(p) for p in states.checkpoints(out)]


# --- a finished run -------------------------------------------------------------------------------------------


def test_what_a_run_leaves(finished, recipe, validation):
    left = {p.name for p in finished.iterdir()}
    assert left == {"config.yaml", "metrics.jsonl", "loss.png", "samples", "checkpoints"}
    assert load_recipe(finished / "config.yaml") == recipe(finished, {"callbacks.validation": validation})
    assert steps_saved(finished) == [2, 4, 6, 8]
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    phases = [(row["phase"], row.get("step")) for row in metrics.read_rows(finished / "metrics.jsonl")]
    expected = [("setup", None)]
    for step in range(1, 9):
        expected += [("train", step)] + [("save", step)] * (step % 2 == 0) + [("validate", step)] * (step in (5, 8))
    assert phases == expected
    assert rows(finished, "setup")[0]["effective_batch"] == 2
    for row in rows(finished):
        assert all(row[name] > 0 for name in ("seconds", "tokens_per_second", "peak_memory_bytes", "grad_norm"))
        assert row["mfu"] is None and row["lr"] == 1e-2 and 0 < row["loss"] < 4
        bins = [x for x in row["loss_by_sigma"] if x is not None]
        # One latent shape: the loss is the mean over the samples, so it lies among the means of their bins.
        assert len(row["loss_by_sigma"]) == 4 and min(bins) - 1e-6 <= row["loss"] <= max(bins) + 1e-6


def test_it_learns(recipe, tmp_path, capsys):
    """Three clips by heart: the loss begins at 2, the expectation for a zero head, and falls by a third."""
    changes = {TOTAL: 90, INTERVAL: 0, "training.data.training_cfg_rate": 0.0, "training.optimizer.learning_rate": 2e-2}
    summary = train(recipe(tmp_path / "run", changes))
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert summary.train_steps == 90 and summary.effective_batch == 2 and summary.last_loss == losses[-1]
    end = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"90 steps in \d+:\d\d, \S+ s per steady step, peak memory \S+ GiB, effective batch 2, .*", end)
    assert abs(losses[0] - 2) < 0.5 and sum(losses[-20:]) / 20 < 2 * 2 / 3


def test_the_seed_decides_everything(recipe, finished, tmp_path):
    again = recipe(tmp_path / "a", {TOTAL: 3})
    train(again)
    assert course(tmp_path / "a") == course(finished)[:3], "validation and the number of steps change no loss"
    train(recipe(tmp_path / "b", {TOTAL: 3, "training.data.seed": 4}))
    assert all(a[1] != b[1] for a, b in zip(course(tmp_path / "a"), course(tmp_path / "b"), strict=True))


# --- killed and resumed ---------------------------------------------------------------------------------------


def main_with_threads(threads, argv):
    torch.set_num_threads(threads)
    return cli.main(argv)


@pytest.fixture(scope="module")
def spawn():
    """`spawn(argv)`: `python -m train` in a process of its own, forked from a server that has imported it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.run"])
    started = []

    def start(argv):
        # Bit-equal results need equal thread counts; the server may be one that another test has started.
        process = context.Process(target=main_with_threads, args=(torch.get_num_threads(), argv))
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def wait_for(process, out, step):
    """Until the run has begun to write row `step`; the process must be alive then."""
    path, deadline = out / "metrics.jsonl", time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b'"train"') < step:
        assert process.is_alive() and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.002)


def test_kill_9_at_random_steps_changes_no_bit_of_the_rest(arguments, recipe, spawn, tmp_path):
    changes = {TOTAL: 60, INTERVAL: 3, LIMIT: 2, "training.optimizer.lr_scheduler": "cosine"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(recipe(whole, changes))
    draw = random.Random(7)
    for life, step in enumerate((draw.randint(4, 12), draw.randint(18, 28), draw.randint(34, 44))):
        process = spawn(arguments(killed, changes | (LATEST if life else {})))
        wait_for(process, killed, step)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL and steps_saved(killed)[-1] < 60
    process = spawn(arguments(killed, changes | LATEST))
    process.join()
    assert process.exitcode == 0 and len(rows(killed, "setup")) == 4
    assert [row["step"] for row in rows(killed)] == list(range(1, 61)), "each step once"
    assert course(killed) == course(whole)
    assert_same_end(killed, whole, 60)
    assert steps_saved(killed) == [57, 60] and not list((killed / "checkpoints").glob(".*"))


@pytest.mark.parametrize("workers", [0, 1])
def test_4_and_4_steps_are_8(recipe, finished, tmp_path, workers):
    out = tmp_path / "run"
    train(recipe(out, {TOTAL: 4, WORKERS: workers}))
    train(recipe(out, {TOTAL: 8, WORKERS: workers} | LATEST))
    assert course(out) == course(finished)
    assert_same_end(out, finished, 8)


def test_other_batches_go_on_with_the_next_sample(recipe, finished, tmp_path):
    """The position counts samples, so that 2 microbatches of 1 and 1 of 2 are the same step."""
    out = tmp_path / "run"
    train(recipe(out, {TOTAL: 4}))
    train(recipe(out, {TOTAL: 8, ACCUMULATION: 1, "training.data.train_batch_size": 2} | LATEST))
    for ours, theirs in zip(course(out), course(finished), strict=True):
        # Sums over two samples in float32, in another order, through four steps.
        assert ours[:4] == pytest.approx(theirs[:4], rel=1e-4)


def test_batches_that_do_not_divide_what_was_drawn_begin_before_it(recipe, tmp_path, capsys):
    out = tmp_path / "run"
    train(recipe(out, {TOTAL: 3}))
    train(recipe(out, {TOTAL: 4, ACCUMULATION: 1, "training.data.train_batch_size": 4} | LATEST))
    assert "batches of another size: the last 2 of 6 samples are drawn again" in capsys.readouterr().out
    assert int(states.read_scalars(states.folder_of(out, 4))["position"]) == 8


def test_sigterm_saves_where_it_stopped_and_the_rest_is_as_if_uninterrupted(arguments, recipe, spawn, tmp_path):
    changes = {TOTAL: 40, INTERVAL: 0}
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    train(recipe(whole, changes))
    assert steps_saved(whole) == [40], "an interval of 0 saves the end only"
    process = spawn(arguments(out, changes | {"training.deterministic": True}))
    wait_for(process, out, 5)
    process.terminate()
    process.join()
    stopped = len(rows(out))
    assert process.exitcode == 143 and 5 <= stopped < 40 and steps_saved(out) == [stopped]
    train(recipe(out, changes | LATEST))
    assert course(out) == course(whole) and steps_saved(out) == [stopped, 40]
    assert_same_end(out, whole, 40)


def test_a_signal_to_the_whole_process_group_leaves_the_data_workers_alone(arguments, tmp_path):
    """As a job scheduler sends it: the main process finishes its step and saves, with workers running."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "train", *arguments(out, {TOTAL: 5000, INTERVAL: 0, WORKERS: 1})]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or len(rows(out)) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert steps_saved(out) == [len(rows(out))]


def send_at(monkeypatch, step, *signals):
    """Sends the process signals in the middle of an optimiser step."""
    update = step_module.update_ema

    def interrupted(setup, state):
        update(setup, state)
        for number in signals if state.step == step else ():
            os.kill(os.getpid(), number)

    monkeypatch.setattr(step_module, "update_ema", interrupted)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_after_the_step_and_a_due_validation_is_made_up_for(
    recipe, validation, finished, tmp_path, monkeypatch, number, status
):
    out, before = tmp_path / "run", signal.getsignal(number)
    changes = {"callbacks.validation": validation, INTERVAL: 0}
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
        send_at(patch, 5, number)
        train(recipe(out, changes))
    assert caught.value.code == status and signal.getsignal(number) is before
    assert steps_saved(out) == [5] and rows(out, "validate") == [] and len(rows(out)) == 5
    train(recipe(out, changes | LATEST))
    assert [row["step"] for row in rows(out, "validate")] == [5, 8]
    assert {p.name for p in (out / "samples").iterdir()} == {p.name for p in (finished / "samples").iterdir()}
    assert course(out) == course(finished)
    assert_same_end(out, finished, 8)


def test_a_second_signal_interrupts_at_once(arguments, tmp_path, monkeypatch, capsys):
    send_at(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    assert cli.main(arguments(tmp_path / "run")) == 130
    assert capsys.readouterr().err.startswith("interrupted")
    assert steps_saved(tmp_path / "run") == [2]


def test_resuming_a_finished_run_trains_nothing(recipe, validation, finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    summary = train(recipe(out, {"callbacks.validation": validation} | LATEST))
    assert summary.train_steps == 8 and course(out) == course(finished)
    assert len(rows(out, "validate")) == 2 and len(rows(out, "save")) == 4 and len(rows(out, "setup")) == 2
    assert_same_end(out, finished, 8)


def test_no_steps_at_all_save_the_start(recipe, tmp_path):
    out = tmp_path / "run"
    setup = prepare(recipe(out, {TOTAL: 0}))
    train(recipe(out, {TOTAL: 0}))
    assert steps_saved(out) == [0] and rows(out) == []
    start = initial_state(setup).params
    assert all(torch.equal(v, start[k.removeprefix("params/")]) for k, v in saved(out, 0).items() if "params/" in k)


@pytest.mark.parametrize("limit, left", [(0, [2, 4, 6, 7]), (1, [7]), (3, [4, 6, 7])])
def test_the_newest_checkpoints_are_kept(recipe, tmp_path, limit, left):
    train(recipe(tmp_path / "run", {TOTAL: 7, LIMIT: limit, ACCUMULATION: 1}))
    assert steps_saved(tmp_path / "run") == left


def test_weights_only_goes_on_from_the_weights_with_a_fresh_optimiser(recipe, finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(states.folder_of(out, 8) / "optimizer")
    before = contents(out)
    with pytest.raises(UserError, match="optimizer: no such file"):
        train(recipe(out, {TOTAL: 9} | LATEST))
    assert contents(out) == before
    train(recipe(out, {TOTAL: 9, WEIGHTS_ONLY: True, "training.data.seed": 5} | LATEST))
    assert [row["step"] for row in rows(out)] == list(range(1, 10))
    assert float(saved(out, 9)["optimizer/step"]) == 1, "the moments start anew"


def test_weights_only_starts_another_run_from_a_path(recipe, finished, tmp_path):
    """In its own folder, without noise from the optimiser: at rate 0 after warmup nothing moves."""
    changes = {RESUME: str(states.folder_of(finished, 4)), WEIGHTS_ONLY: True, TOTAL: 5,
               "training.optimizer.lr_warmup_steps": 1000, "training.optimizer.learning_rate": 1e-30}  # fmt: skip
    train(recipe(tmp_path / "run", changes))
    ours, theirs = saved(tmp_path / "run", 5), saved(finished, 4)
    assert all(torch.equal(ours[k], v) for k, v in theirs.items() if k.startswith("params/"))
    assert [row["step"] for row in rows(tmp_path / "run")] == [5]


# --- rates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_the_rate_of_every_optimiser_step_is_its_closed_form_under_accumulation(recipe, tmp_path, scheduler):
    out, n, warmup = tmp_path / "run", 8, 3
    train(recipe(out, {TOTAL: n, ACCUMULATION: 3, "training.optimizer.lr_scheduler": scheduler,
                       "training.optimizer.lr_warmup_steps": warmup, "training.optimizer.min_lr_ratio": 0.25,
                       INTERVAL: 1, "training.optimizer.weight_decay": 0.0}))  # fmt: skip
    shape = {"constant": lambda u: 1.0, "linear": lambda u: 1 - 0.75 * u,
             "cosine": lambda u: 0.25 + 0.75 * (1 + math.cos(math.pi * u)) / 2}[scheduler]  # fmt: skip
    expected = [1e-2 * (s / warmup if s < warmup else shape((s - warmup) / (n - warmup))) for s in range(n)]
    assert [row["lr"] for row in rows(out)] == pytest.approx(expected, rel=1e-12)
    # The rate that is logged is the one that is used: an update is lr m / (sqrt(v) + eps) with corrected moments.
    for step in (1, 2, 5):
        before, after = saved(out, step), saved(out, step + 1)
        k = "blocks.1.ffn.net.2.weight"
        m = after[f"optimizer/exp_avg.{k}"].double() / (1 - 0.9 ** (step + 1))
        v = after[f"optimizer/exp_avg_sq.{k}"].double() / (1 - 0.999 ** (step + 1))
        update = before[f"params/{k}"].double() - after[f"params/{k}"].double()
        # Differences of float32 weights of order 1e-1: exact to about 1e-8.
        torch.testing.assert_close(update, expected[step] * m / (v.sqrt() + 1e-8), rtol=1e-3, atol=5e-8)


def test_the_average_starts_after_start_iter(recipe, tmp_path):
    out = tmp_path / "run"
    train(recipe(out, {TOTAL: 4, INTERVAL: 1, "callbacks.ema.start_iter": 2, "callbacks.ema.decay": 0.75}))
    for step in (1, 2):
        tree = saved(out, step)
        assert all(torch.equal(tree["params" + k[3:]], v) for k, v in tree.items() if k.startswith("ema/"))
    expected = {k: v for k, v in saved(out, 2).items() if k.startswith("ema/")}
    for step in (3, 4):
        tree = saved(out, step)
        expected = {k: 0.75 * v.double() + 0.25 * tree["params" + k[3:]].double() for k, v in expected.items()}
    for k, v in expected.items():
        torch.testing.assert_close(tree[k].double(), v, rtol=1e-6, atol=1e-7)


# --- what goes wrong on the way -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(write_set, tmp_path_factory) -> dict:
    """Changes that train on five samples of which one is not a number, without accumulation."""
    data = write_set(tmp_path_factory.mktemp("poisoned") / "set", [(4, 2, 4, 4)] * 5, poison=[3])
    return {"training.data.data_path": str(data), ACCUMULATION: 1, INTERVAL: 1, TOTAL: 12, "training.data.seed": 1}


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_sample(recipe, poisoned, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(UserError) as first:
        train(recipe(out, poisoned))
    last = len(rows(out))
    assert 1 <= last < 5 and steps_saved(out) == list(range(1, last + 1)), "the bad sample comes in the first epoch"
    kept = f"the last good checkpoint is {states.folder_of(out, last)}"
    assert all(words in str(first.value) for words in (f"step {last + 1}: loss is nan", "not finite: sample-3", kept))
    assert all(torch.isfinite(v).all() for v in saved(out, last).values())
    with pytest.raises(UserError) as second:
        train(recipe(out, poisoned | LATEST))
    assert str(second.value) == str(first.value) and steps_saved(out)[-1] == last and len(rows(out)) == last


def test_before_the_first_checkpoint_the_message_says_so(recipe, poisoned, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(UserError, match="not finite: sample-3; no checkpoint was saved yet"):
        train(recipe(out, poisoned | {INTERVAL: 0}))
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize("max_norm", [1.0, 0.0])
def test_a_gradient_that_is_no_number_is_seen_without_clipping_too(recipe, tmp_path, monkeypatch, max_norm):
    real = step_module.microbatch_loss

    def infinite_slope(setup, state, batch, first):
        errors, sigma = real(setup, state, batch, first)
        zero = (state.params["proj_out.bias"] * 0.0).square().sum()
        return {k: v + zero.sqrt() if state.step == 3 else v for k, v in errors.items()}, sigma

    monkeypatch.setattr(step_module, "microbatch_loss", infinite_slope)
    with pytest.raises(UserError, match="step 4: loss is [0-9.]+, gradient norm nan; samples of this step: "):
        train(recipe(tmp_path / "run", {INTERVAL: 1, "callbacks.grad_clip.max_grad_norm": max_norm}))
    assert steps_saved(tmp_path / "run") == [1, 2, 3] and len(rows(tmp_path / "run")) == 3


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_while_saving_leaves_a_run_that_resumes(recipe, finished, tmp_path, monkeypatch):
    from core import save

    out, write = tmp_path / "run", save._write
    with monkeypatch.context() as patch:
        patch.setattr(save, "_write", lambda path, *a: full_disk() if "step-000004" in str(path) else write(path, *a))
        with pytest.raises(UserError, match="step-000004.*No space left on device"):
            train(recipe(out, {LIMIT: 1}))
    assert steps_saved(out) == [2] and not list(out.rglob("*.part"))
    train(recipe(out, LATEST))
    assert course(out) == course(finished)
    assert_same_end(out, finished, 8)


def test_a_full_disk_while_logging_is_no_traceback_either(arguments, tmp_path, monkeypatch, capsys):
    append = metrics.append_row

    def full(path, phase, **values):
        return full_disk() if values.get("step") == 3 else append(path, phase, **values)

    monkeypatch.setattr(metrics, "append_row", full)
    assert cli.main(arguments(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "[Errno 28] No space left on device; complete checkpoints are untouched" in error
    assert steps_saved(tmp_path / "run") == [2]


@pytest.mark.parametrize("total", [1, 3])
def test_a_finite_step_that_ruins_the_weights_saves_nothing(recipe, tmp_path, total):
    """A learning rate that overflows: loss and gradients of the step are finite, the weights after it are not."""
    huge = {"training.optimizer.learning_rate": 1e38, "training.optimizer.weight_decay": 1.0, TOTAL: total, INTERVAL: 1}
    with pytest.raises(UserError, match="step 1: [0-9]+ leaves are not finite .*no checkpoint was saved yet"):
        train(recipe(tmp_path / "run", huge))
    assert steps_saved(tmp_path / "run") == []


def test_a_signal_during_validation_stops_it_and_saves(recipe, validation, tmp_path, monkeypatch):
    """The step before it is saved, and the validation is made up for on resume."""
    out, real = tmp_path / "run", run.validate

    def signalled(setup, state, prompts, log, stop=()):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(setup, state, prompts, log, stop)

    changes = {"callbacks.validation": validation | {"every_steps": 3}, TOTAL: 4, INTERVAL: 0}
    monkeypatch.setattr(run, "validate", signalled)
    with pytest.raises(SystemExit):
        train(recipe(out, changes))
    assert steps_saved(out) == [3] and rows(out, "validate") == [] and not (out / "samples").exists()
    monkeypatch.undo()
    train(recipe(out, changes | LATEST))
    assert [row["step"] for row in rows(out, "validate")] == [3, 4]


def test_a_bad_checkpoint_is_told_before_any_weights_are_made(recipe, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "initial_state", lambda setup: pytest.fail("made weights"))
    shutil.copytree(finished, tmp_path / "run")
    weights = states.folder_of(tmp_path / "run", 8) / "optimizer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    blank = run.blank_state
    monkeypatch.setattr(run, "blank_state", lambda s, d: blank(s, d) if d == "meta" else pytest.fail("allocated"))
    with pytest.raises(UserError, match="optimizer/.*cut short"):
        train(recipe(tmp_path / "run", LATEST))


def test_too_little_memory_says_what_the_state_takes(recipe, tmp_path, monkeypatch):
    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(step_module, "microbatch_loss", exhausted)
    with pytest.raises(UserError, match="out of memory: .* GiB.*train_batch_size.*Tried to allocate 2 GiB"):
        train(recipe(tmp_path / "run"))


@pytest.mark.parametrize("stop_after", [None, 3])
def test_a_profile_traces_its_steps_also_when_the_run_ends_within(recipe, tmp_path, monkeypatch, stop_after):
    out = tmp_path / "run"
    made = recipe(out, {"training.profile": {"start": 2, "steps": 2}, INTERVAL: 0, ACCUMULATION: 1})
    if stop_after is None:
        train(made)
    else:
        send_at(monkeypatch, stop_after, signal.SIGTERM)
        with pytest.raises(SystemExit):
            train(made)
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    steps = 2 if stop_after is None else 1
    assert sum(event.get("name") == "aten::_fused_adamw_" for event in events) == steps * count_groups(out)


def count_groups(out) -> int:
    """Groups of equal dtype among the weights: one fused update each."""
    return len({v.dtype for k, v in saved(out, steps_saved(out)[-1]).items() if k.startswith("params/")})


# --- bad input, before anything is written --------------------------------------------------------------------

BAD = {
    "misspelt key": ({"training.optimizer.learning_rat": 1},
                     "training.optimizer.learning_rat is not a known key (did you mean 'learning_rate'?)"),
    "text for a bool": ({"training.deterministic": "true"}, "training.deterministic must be a bool"),
    "bool for an int": ({TOTAL: True}, TOTAL + " must be an int"),
    "seed beyond int64": ({"training.data.seed": 2**63}, "training.data.seed must be"),
    "missing data": ({"training.data.data_path": "/nowhere/set"}, "/nowhere/set: no such file or folder"),
    "channels": ({"models.student.config.out_channels": 8, "models.student.config.in_channels": 8},
                 "row 0: latents [4, 2, 4, 4] (3 such): expected 8 channels"),
    "patches": ({"models.student.config.patch_size": [1, 3, 2]}, "H = 4 is not a multiple of the patch size 3"),
    "rope": ({"models.student.config.rope_max_seq_len": 1}, "row 0: latent frames 2 is above 1"),
    "frames asked for": ({"training.data.num_frames": 9}, "expected [4, 3, 4, 4]"),
    "height asked for": ({"training.data.num_height": 64}, "expected [4, 2, 8, 4]"),
    "height of no latents": ({"training.data.num_height": 36},
                             "training.data.num_height is 36, expected a multiple of 8: nearest valid 32 or 40"),
    "text width": ({"models.student.config.text_dim": 9}, "expected [L, 9]"),
    "nothing to train": ({"models.student.trainable": False}, "models.student.trainable: false leaves nothing"),
    "unknown preset": ({"models.student.preset": "wan2.1-t2v-1.3"}, "did you mean 'wan2.1-t2v-1.3b'?"),
    "preset and init_from": ({"models.student.init_from": "x"}, "leave out preset and config"),
    "unknown field": ({"models.student.config.num_layer": 2}, "num_layer (did you mean 'num_layers'?)"),
    "image model": ({"models.student.config.in_channels": 9}, "t2v has no image conditions"),
    "backend of a GPU": ({"models.student.attention_backend": "sdpa_flash"},
                         "models.student.attention_backend: sdpa_flash cannot run here: it needs a CUDA device"),
    "device": ({"training.device": "cuda:77"}, "'cuda:77' is not available here; available: "),
    "resume path": ({RESUME: "/nowhere/step-000001"}, "/nowhere/step-000001 is not a checkpoint folder"),
    "resume without checkpoint": (LATEST, "resume_from_checkpoint: no checkpoint in"),
    "negative guidance": ({"guidance_scale": -1.0}, "guidance_scale must be a float >= 0"),
    "validation height": ({"height": 40}, "height is 40, expected a multiple of 16: nearest valid 32 or 48"),
    "validation frames": ({"num_frames": 6}, "nearest: 5 or 9"),
    "no prompt file": ({"dataset_file": "/nowhere.json"}, "/nowhere.json: no such file"),
    "vae not there": ({"pipeline.vae": "/nowhere"}, "pipeline.vae: /nowhere has no config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_on_stderr_and_nothing_is_written(case, arguments, validation, tmp_path, capsys):
    changes, message = BAD[case]
    if set(changes) <= {"guidance_scale", "height", "num_frames", "dataset_file"}:
        changes = {"callbacks.validation": validation | changes}
    assert cli.main(arguments(tmp_path / "run" / "deep", changes)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error, error
    assert list(tmp_path.iterdir()) == []


PROMPTS = {
    "image": ({"caption": "x", "image": "prompts.json"},
              "data[1]: this pipeline cannot be sampled so\n  - the transformer takes text only"),
    "misspelt": ({"caption": "x", "sede": 1}, "data[1]: unknown key 'sede' (did you mean 'seed'?); allowed: caption, "),
    "missing image": ({"caption": "x", "image": "a.png"}, "data[1]: image "),
    "no caption": ({"seed": 1}, "data[1]: caption is None, expected text"),
    "bool": ({"caption": "x", "seed": True}, "data[1]: seed is True, expected an integer"),
    "seed": ({"caption": "x", "seed": 2**63}, "data[1]: seed is 9223372036854775808, expected an integer of 64 bits"),
    "frames": ({"caption": "x", "num_frames": 4}, "data[1]: this video size cannot be used"),
    "width": ({"caption": "x", "width": 24}, "width is 24, expected a multiple of 16: nearest valid 16 or 32"),
    "not a mapping": ("x", "data[1]: is 'x', expected a mapping with a caption"),
}  # fmt: skip


@pytest.mark.parametrize("case", PROMPTS)
def test_a_bad_prompt_is_named_by_file_and_index(case, recipe, validation, tmp_path):
    entry, message = PROMPTS[case]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"data": [{"caption": "fine"}, entry]}))
    with pytest.raises(UserError) as caught:
        train(recipe(tmp_path / "run", {"callbacks.validation": validation | {"dataset_file": str(prompts)}}))
    assert message in str(caught.value) and str(prompts) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.json"]


@pytest.mark.parametrize("text", ["[]", '{"data": []}', '{"data": 3}', "{}"])
def test_a_file_without_prompts_is_refused(text, recipe, validation, tmp_path):
    (tmp_path / "p.json").write_text(text)
    changes = {"callbacks.validation": validation | {"dataset_file": str(tmp_path / "p.json")}}
    with pytest.raises(UserError, match="p.json: no prompt file: expected"):
        train(recipe(tmp_path / "run", changes))


def test_validation_without_a_vae_is_refused(recipe, validation, write_set, tmp_path):
    data = write_set(tmp_path / "set", [(4, 2, 4, 4)])
    with pytest.raises(UserError, match="no vae/ beside the data or in init_from; name it in pipeline.vae"):
        train(recipe(tmp_path / "run", {"callbacks.validation": validation, "training.data.data_path": str(data)}))
    assert not (tmp_path / "run").exists()


def test_a_model_needs_an_architecture():
    with pytest.raises(UserError, match="models.student: one of init_from, preset or config is needed"):
        model_config(Wan.model_validate({"_target_": "wan"}), "models.student")


def test_an_optimiser_kernel_that_the_device_lacks_is_named(recipe, tmp_path):
    made = recipe(tmp_path / "run", {"training.optimizer.fused": True})
    cfg = prepare(made).cfg
    with pytest.raises(UserError, match="training.optimizer.fused: there is no fused AdamW on mps"):
        check_kernels(made, cfg, torch.device("mps"), torch.float32)


def test_an_output_folder_that_cannot_be_is_refused(recipe, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file is not a folder"):
        train(recipe(tmp_path / "file"))
    with pytest.raises(UserError, match="file is not a folder"):
        train(recipe(tmp_path / "file" / "below"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    return out


REFUSED = {
    "another run": ({}, "already holds a run (config.yaml, metrics.jsonl, checkpoints)"),
    "a path elsewhere": ({RESUME: "FINISHED/checkpoints/step-000004"}, "already holds a run"),
    "later checkpoints": ({RESUME: "RUN/checkpoints/step-000004"},
                          "holds later checkpoints than step-000004: step-000006, step-000008"),
    "another model": ({"models.student.config.ffn_dim": 48} | LATEST,
                      "config.ffn_dim: the checkpoint has 32, this run 48"),
    "another precision": ({"training.dit_precision": "bf16"} | LATEST, "dtype torch.float32, expected torch.bfloat16"),
    "another seed": ({"training.data.seed": 9} | LATEST,
                     "training.data.seed: the checkpoint was made with another seed"),
    "more data": ({"training.data.data_path": ["DATA", "OTHER"]} | LATEST,
                  "data.samples: the checkpoint has 3, this run 6"),
    "other data": ({"training.data.data_path": "OTHER"} | LATEST, "data.fingerprint: the checkpoint has "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_in_the_way_stays_as_it_is(case, recipe, copied, finished, clips, write_set, tmp_path):
    changes, message = REFUSED[case]
    other = write_set(tmp_path / "other", [(4, 2, 4, 4)] * 3)
    text = json.dumps(changes).replace("FINISHED", str(finished)).replace("RUN", str(copied))
    changes = json.loads(text.replace("DATA", str(clips)).replace("OTHER", str(other)))
    before = contents(copied)
    with pytest.raises(UserError) as caught:
        train(recipe(copied, {TOTAL: 20} | changes))
    assert message in str(caught.value), str(caught.value)
    assert contents(copied) == before


def test_a_run_without_a_checkpoint_says_how_to_start_over(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds a run .metrics.jsonl.; .* or remove this one, which has no checkpoint"):
        train(recipe(tmp_path / "run"))


def test_moved_data_is_the_same_data(recipe, finished, clips, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(clips, tmp_path / "moved")
    shutil.copytree(finished, out)
    shutil.rmtree(states.folder_of(out, 8))
    train(recipe(out, {"training.data.data_path": str(tmp_path / "moved")} | LATEST))
    assert course(out) == course(finished)


def test_help_and_no_arguments(capsys):
    assert cli.main([]) == 2 and cli.main(["--help"]) == 0
    assert "training.checkpoint.resume_from_checkpoint" in capsys.readouterr().out


# --- the precision table --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored, compute", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_a_run_follows_the_precision_table(recipe, tmp_path, monkeypatch, stored, compute):
    out = tmp_path / "run"
    made = recipe(out, {"training.dit_precision": stored, "training.compute_dtype": compute, TOTAL: 2, INTERVAL: 0})
    policy, computed, gradients = precision.policy(stored, compute), {}, {}
    weight_of, update = layers.effective_weight, step_module.optim.adamw_update

    def watched_weight(p, name, dtype):  # `dtype` is that of the layer's input
        weight = weight_of(p, name, dtype)
        computed.setdefault(name, set()).update({dtype, weight.dtype})
        return weight

    def watched_update(opt, grads, *rest):
        gradients.update({k: g.dtype for k, g in grads.items()})
        update(opt, grads, *rest)

    monkeypatch.setattr(layers, "effective_weight", watched_weight)
    monkeypatch.setattr(step_module.optim, "adamw_update", watched_update)
    classes = precision.classes(stored_specs(made, prepare(made).cfg))
    train(made)
    tree = saved(out, 2)
    assert set(classes.values()) == {"matrix", "norm", "table"} and gradients.keys() == classes.keys()
    for key, kind in classes.items():
        row, layer = policy[kind], re.sub(r"^blocks\.\d+\.", "", key).removesuffix(".weight")
        assert tree[f"params/{key}"].dtype == row.storage, key
        assert gradients[key] == row.gradient, key
        assert {tree[f"optimizer/{m}.{key}"].dtype for m in ("exp_avg", "exp_avg_sq")} == {row.moments}, key
        assert tree[f"ema/{key}"].dtype == torch.float32, key
        assert computed.get(layer, {row.compute}) == {row.compute}, key
    assert computed.keys() >= {"patch_embedding", "proj_out", "attn1.to_q", "attn2.to_out.0", "ffn.net.2",
                               "condition_embedder.time_embedder.linear_1"}  # fmt: skip
    assert all(word in precision.table(stored, compute) for word in ("matrix", "moments", "float32"))


def test_an_environment_of_half_a_torchrun_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "r.yaml").write_text(Path("recipes/demo.yaml").read_text())
    assert cli.main([str(tmp_path / "r.yaml")]) == 2
    assert "torchrun" in (said := capsys.readouterr().err) and "RANK is missing" in said
