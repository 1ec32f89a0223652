"""Checkpoints that older versions wrote still load, and runs go on from them as they would have."""

import shutil
from pathlib import Path

import pytest
import torch

from core.checkpoint import open_checkpoint
from core.errors import UserError
from core.files import read_json, write_json
from train import metrics
from train import state as states
from train.config import load_recipe
from train.export import export
from train.migrations import MIGRATIONS, SCHEMA_VERSION, migrated
from train.run import opened_checkpoint, train
from train.setup import blank_state, prepare

CORPUS = Path(__file__).parents[1] / "data" / "checkpoints"
OLD = sorted(p.parent for p in CORPUS.rglob("step-*"))


def recipe_of(run: Path, out: Path):
    """The run's recipe with the old checkpoint as its past."""
    shutil.copytree(run / "step-000002", out / "checkpoints" / "step-000002")
    changes = {"training.data.data_path": run.parent / "data", "training.checkpoint.output_dir": out,
               "training.checkpoint.resume_from_checkpoint": "latest"}  # fmt: skip
    return load_recipe(run / "recipe.yaml", [s for k, v in changes.items() for s in (f"--{k}", str(v))])


def test_there_is_a_checkpoint_of_every_older_schema():
    assert {read_json(run / "step-000002" / states.RECORD)["schema_version"] for run in OLD} >= set(MIGRATIONS)
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION)), "a chain without gaps"


@pytest.mark.parametrize("run", OLD, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_it_loads(run, tmp_path):
    setup = prepare(recipe_of(run, tmp_path / "run"))
    opened = opened_checkpoint(setup)
    assert opened.record["schema_version"] == SCHEMA_VERSION and opened.record["step"] == 2
    state = blank_state(setup, "cpu")
    states.fill(state, opened)
    for name, tree in states.groups(state).items():
        stored = open_checkpoint(run / "step-000002" / name).read()
        assert stored.keys() == tree.keys() and all(torch.equal(tree[k], v) for k, v in stored.items())
    batch = setup.recipe.training.data.train_batch_size
    assert (state.step, state.position) == (2, 2 * 2 * batch), "2 steps of 2 microbatches, in samples"
    export(tmp_path / "run", tmp_path / "pipeline")
    assert len(open_checkpoint(tmp_path / "pipeline" / "transformer")) == len(state.params)


@pytest.mark.parametrize("run", OLD, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_a_run_goes_on_from_it(run, tmp_path):
    recipe = recipe_of(run, tmp_path / "run")
    train(recipe)
    rows = [row for row in metrics.read_rows(tmp_path / "run" / "metrics.jsonl") if row["phase"] == "train"]
    assert [row["step"] for row in rows] == [3, 4] and all(0 < row["loss"] < 4 for row in rows)
    folder = states.folder_of(tmp_path / "run", 4)
    batch = recipe.training.data.train_batch_size
    assert int(states.read_scalars(folder)["position"]) == 4 * 2 * batch
    old, new = (open_checkpoint(f / "optimizer") for f in (run / "step-000002", folder))
    assert (float(old["step"].read()), float(new["step"].read())) == (2, 4)
    assert not torch.equal(old["exp_avg.proj_out.weight"].read(), new["exp_avg.proj_out.weight"].read())


def test_a_sharded_folder_of_an_older_version_is_read_whole():
    sharded = open_checkpoint(CORPUS / "parts" / "sharded")
    whole = open_checkpoint(CORPUS / "parts" / "whole.safetensors")
    assert sharded.metadata == whole.metadata and sorted(sharded) == sorted(whole)
    assert all(torch.equal(sharded[k].read(), whole[k].read()) for k in whole)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", True, None])
def test_unknown_schemas_are_refused(version, tmp_path):
    known = ", ".join(str(n) for n in range(1, SCHEMA_VERSION + 1))
    with pytest.raises(UserError, match=f"here: schema_version .*, this version reads {known}"):
        migrated({"schema_version": version}, None, "here")
    folder = tmp_path / "step-000002"
    shutil.copytree(OLD[0] / "step-000002", folder)
    record = read_json(folder / states.RECORD)
    write_json(folder / states.RECORD, record | {"schema_version": version})
    with pytest.raises(UserError, match="checkpoint.json: schema_version"):
        states.read_record(folder)


def test_migrations_leave_what_they_were_given():
    data = {"train_batch_size": 3, "samples": 7, "streaming": {"shuffle_row_groups": True, "world": 1}}
    record, scalars = {"schema_version": 1, "data": data}, {"position": torch.tensor(5)}
    new, counted = migrated(record, scalars, "here")
    assert int(counted["position"]) == 15
    assert new == {"schema_version": 2, "data": {"samples": 7, "streaming": {"shuffle_row_groups": True}}}
    assert record["schema_version"] == 1 and "train_batch_size" in data and int(scalars["position"]) == 5
    assert migrated(new, counted, "here") == (new, counted), "today's stay as they are"
    assert migrated(record, None, "here") == (new, None)
    for damaged in ({"schema_version": 1}, {"schema_version": 1, "data": {}}, {"schema_version": 1, "data": [1]}):
        with pytest.raises(UserError, match="here: damaged"):
            migrated(damaged, scalars, "here")
