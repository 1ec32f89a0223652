"""Checkpoints: bitwise round trip, strict loading in one message, and nothing lost when a save fails."""

import errno
import json
import shutil
import subprocess
import sys

import pytest
import torch

from core import keys, save
from core.errors import UserError
from core.files import write_json
from train import state as states
from train.optim import adamw_init
from train.state import RECORD, SCALARS, TrainState

RECORD_OF_RUN = {
    "config": {"num_layers": 2, "patch_size": [1, 2, 2]},
    "sampling": {},
    "vae": None,
    "text_encoder": None,
    "data": {"samples": 3, "train_batch_size": 1, "fingerprint": "aa"},
    "threads": 1,
}


def make(seed=0, step=4, ema=True, dtype=torch.float32, run_seed=0) -> TrainState:
    k = keys.fold_in(keys.key(seed), step)
    shapes = {"blocks.0.w": (3, 4), "blocks.0.table": (1, 2, 3), "bias": (5,)}
    draw = lambda name, shape: keys.normal(keys.fold_in(k, name), shape)  # noqa: E731
    params = {n: draw(n, s).to(torch.float32 if "table" in n else dtype).requires_grad_() for n, s in shapes.items()}
    optimizer = {n: draw(n, v.shape) for n, v in adamw_init(params).items()}
    average = {n: draw("ema" + n, s) for n, s in shapes.items()} if ema else None
    return TrainState(params, optimizer, average, step, 2 * step, keys.key(run_seed))


def leaves(state: TrainState) -> dict[str, torch.Tensor]:
    return {f"{group}/{k}": v.detach().clone() for group, tree in states.groups(state).items() for k, v in tree.items()}


def load(state, folder, record, *, weights_only):
    """As a run does: judged first, then filled."""
    states.fill(state, states.open_for(state, folder, record, weights_only=weights_only))


def unchanged(state, before) -> bool:
    return all(torch.equal(v, before[k]) for k, v in leaves(state).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ema", [True, False])
def test_a_state_comes_back_bit_for_bit_and_in_place(tmp_path, dtype, ema):
    saved = make(0, 4, ema, dtype)
    folder = states.save(tmp_path, saved, RECORD_OF_RUN, keep=0)
    assert folder == states.folder_of(tmp_path, 4) == states.find(tmp_path, "latest") and states.step_of(folder) == 4
    into = make(1, 0, ema, dtype)
    places = {k: v.data_ptr() for g in states.groups(into).values() for k, v in g.items()}
    load(into, folder, RECORD_OF_RUN, weights_only=False)
    assert unchanged(into, leaves(saved))
    assert (into.step, into.position, into.key) == (4, 8, keys.key(0))
    assert {k: v.data_ptr() for g in states.groups(into).values() for k, v in g.items()} == places
    assert all(p.requires_grad for p in into.params.values())


def test_weights_only_takes_params_and_ema_and_needs_no_more(tmp_path):
    saved, into = make(0, 4), make(1, 0, run_seed=9)
    folder = states.save(tmp_path, saved, RECORD_OF_RUN, keep=0)
    shutil.rmtree(folder / "optimizer")
    (folder / SCALARS).write_bytes(b"junk")
    moments = {k: v.clone() for k, v in into.optimizer.items()}
    other_data = RECORD_OF_RUN | {"data": {"samples": 99}}
    load(into, folder, other_data, weights_only=True)
    for name in ("params", "ema"):
        assert all(torch.equal(v, states.groups(saved)[name][k]) for k, v in states.groups(into)[name].items())
    assert all(torch.equal(into.optimizer[k], v) for k, v in moments.items())
    assert (into.step, into.position, into.key) == (0, 0, keys.key(9))
    shutil.rmtree(folder / "ema")
    load(into, folder, other_data, weights_only=True)
    assert all(torch.equal(into.ema[k], saved.params[k]) for k in saved.params), "an average starts at the weights"
    shutil.rmtree(folder / "params")
    with pytest.raises(UserError, match="step-000004/params"):
        load(into, folder, other_data, weights_only=True)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


WEIGHTS = "diffusion_pytorch_model.safetensors"
DAMAGE = {
    "params cut short": (lambda f: cut(f / "params" / WEIGHTS), "params/.*cut short"),
    "optimizer missing": (lambda f: shutil.rmtree(f / "optimizer"), "optimizer: no such file"),
    "optimizer empty": (lambda f: (f / "optimizer" / WEIGHTS).unlink(), "optimizer: no .*safetensors in this folder"),
    "ema cut short": (lambda f: cut(f / "ema" / WEIGHTS), "ema/.*cut short"),
    "scalars missing": (lambda f: (f / SCALARS).unlink(), "scalars.safetensors: no such file"),
    "scalars cut short": (lambda f: cut(f / SCALARS), "scalars.safetensors: cut short"),
    "scalars of another kind": (
        lambda f: save.save_file(f / SCALARS, {"step": torch.tensor(1)}, {}), "no leaf position.*\n.*no leaf key",
    ),
    "no record": (lambda f: (f / RECORD).unlink(), "checkpoint.json: no such file"),
    "record of a newer schema": (
        lambda f: write_json(f / RECORD, {"schema_version": 99}), "schema_version 99, this version reads 1, 2",
    ),
    "record of another kind": (lambda f: write_json(f / RECORD, [1]), "schema_version None"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_state_stays_as_it_was(tmp_path, damage):
    act, message = DAMAGE[damage]
    folder = states.save(tmp_path, make(0, 4), RECORD_OF_RUN, keep=0)
    act(folder)
    into = make(1, 0)
    before = leaves(into)
    with pytest.raises(UserError, match=message):
        load(into, folder, RECORD_OF_RUN, weights_only=False)
    assert unchanged(into, before) and (into.step, into.position) == (0, 0)


def message_of(state, folder, record) -> str:
    with pytest.raises(UserError) as caught:
        load(state, folder, record, weights_only=False)
    return str(caught.value)


def test_another_model_is_told_by_its_config_alone(tmp_path):
    """Its keys and shapes would be pages that say nothing more."""
    folder = states.save(tmp_path, make(0, 4), RECORD_OF_RUN, keep=0)
    shutil.rmtree(folder / "ema")
    ours = {
        "config": {"num_layers": 3, "patch_size": [1, 2, 2], "eps": 1e-6},
        "data": {"samples": 4, "train_batch_size": 1, "fingerprint": "bb"},
    }
    said = message_of(make(1, 0, dtype=torch.bfloat16), folder, ours)
    for words in (
        "config.num_layers: the checkpoint has 2, this run 3",
        "config.eps: the checkpoint has None, this run 1e-06",
        "data.samples: the checkpoint has 3, this run 4",
        "data.fingerprint: the checkpoint has 'aa', this run 'bb'",
        "weights_only: true needs only params/",
    ):
        assert words in said, words
    assert not any(words in said for words in ("patch_size", "train_batch_size", "dtype", "ema"))


def test_every_difference_of_the_trees_is_in_one_message(tmp_path):
    folder = states.save(tmp_path, make(0, 4), RECORD_OF_RUN, keep=0)
    shutil.rmtree(folder / "ema")
    into = make(1, 0, dtype=torch.bfloat16, run_seed=5)
    into.params["extra"] = torch.zeros(2)
    said = message_of(into, folder, RECORD_OF_RUN)
    for words in (
        "missing extra [2]",
        "bias has dtype torch.float32, expected torch.bfloat16",
        "step-000004/ema: no such file",
        "training.data.seed: the checkpoint was made with another seed",
    ):
        assert words in said, words


def test_a_folder_of_another_checkpoint_is_told(tmp_path):
    for step in (4, 6):
        states.save(tmp_path, make(0, step), RECORD_OF_RUN, keep=0)
    shutil.rmtree(states.folder_of(tmp_path, 6) / "optimizer")
    shutil.copytree(states.folder_of(tmp_path, 4) / "optimizer", states.folder_of(tmp_path, 6) / "optimizer")
    said = message_of(make(1, 0), states.folder_of(tmp_path, 6), RECORD_OF_RUN)
    assert "step-000006/optimizer is of step 4, checkpoint.json of step 6" in said and said.count("\n") == 1


def test_the_next_save_removes_what_a_killed_one_left(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / "checkpoints" / f".step-000002.{dead.pid}.part"
    left.mkdir(parents=True)
    assert states.checkpoints(tmp_path) == []
    states.save(tmp_path, make(0, 4), RECORD_OF_RUN, keep=0)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


def test_a_record_without_an_entry_is_damaged(tmp_path):
    folder = states.save(tmp_path, make(0, 4), RECORD_OF_RUN, keep=0)
    record = json.loads((folder / RECORD).read_text())
    write_json(folder / RECORD, {k: v for k, v in record.items() if k not in ("threads", "sampling")})
    assert "damaged\n  - missing sampling\n  - missing threads" in message_of(make(1, 0), folder, RECORD_OF_RUN)


def test_weights_that_are_not_finite_are_never_saved():
    state = make(0, 4)
    states.check_weights(state, None)
    state.ema["bias"][2] = torch.nan
    with torch.no_grad():
        state.params["blocks.0.w"][0, 0] = torch.inf
    said = r"step 4: 2 leaves are not finite \(params/blocks.0.w, ema/bias.*no checkpoint"
    with pytest.raises(UserError, match=said):
        states.check_weights(state, None)


@pytest.mark.parametrize("keep, left", [(0, [1, 2, 3, 10]), (1, [10]), (2, [3, 10]), (9, [1, 2, 3, 10])])
def test_the_newest_are_kept(tmp_path, keep, left):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    for step in (1, 2, 3, 10):
        states.save(tmp_path, make(0, step), RECORD_OF_RUN, keep=keep)
    assert states.checkpoints(tmp_path) == [states.folder_of(tmp_path, step) for step in left]
    assert (tmp_path / "checkpoints" / "notes").is_dir()


def test_finding_a_checkpoint(tmp_path):
    folder = states.save(tmp_path, make(0, 4), RECORD_OF_RUN, keep=0)
    assert states.find("elsewhere", str(folder)) == folder
    for output, which, message in (
        (tmp_path / "empty", "latest", "no checkpoint in .*empty/checkpoints"),
        (tmp_path, str(folder / "params"), "params is not a checkpoint folder"),
        (tmp_path, str(tmp_path / "nowhere"), "nowhere is not a checkpoint folder"),
    ):
        with pytest.raises(UserError, match="training.checkpoint.resume_from_checkpoint: .*" + message):
            states.find(output, which)
    with pytest.raises(UserError, match="expected a folder called step-NNNNNN"):
        states.step_of(tmp_path)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_older_checkpoint_and_no_parts(tmp_path, monkeypatch, fails_at):
    """The disk fills up while params, optimizer, ema or scalars are written."""
    old = make(0, 4)
    folder = states.save(tmp_path, old, RECORD_OF_RUN, keep=1)
    write, calls = save._write, []

    def full(path, *rest):
        calls.append(path)
        if len(calls) == fails_at:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *rest)

    monkeypatch.setattr(save, "_write", full)
    with pytest.raises(UserError, match="(?s)No space left on device.*untouched"):
        states.save(tmp_path, make(0, 6), RECORD_OF_RUN, keep=1)
    assert len(calls) == fails_at
    assert list((tmp_path / "checkpoints").iterdir()) == [folder]
    into = make(1, 0)
    load(into, folder, RECORD_OF_RUN, weights_only=False)
    assert unchanged(into, leaves(old))


def test_a_full_disk_at_the_record_is_the_same(tmp_path, monkeypatch):
    folder = states.save(tmp_path, make(0, 4), RECORD_OF_RUN, keep=1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(states, "write_json", full)
    with pytest.raises(UserError, match="could not be written .*No space left.*; older ones are untouched"):
        states.save(tmp_path, make(0, 6), RECORD_OF_RUN, keep=1)
    assert list((tmp_path / "checkpoints").iterdir()) == [folder]
