"""Image-to-video training: what the model is fed, whole runs, and pairs of model and data that are refused."""

import dataclasses
import json

import pytest
import torch
from test_rows import sample, write
from test_run import assert_same_end, course

from core import keys
from core.checkpoint import open_checkpoint
from core.errors import UserError
from nn import wan
from train import __main__ as cli
from train import sft
from train import state as states
from train import step as step_module
from train.data import batches
from train.export import export
from train.rows import I2V, T2V
from train.run import train
from train.setup import initial_state, prepare
from train.sft import training_inputs

KEY, GRID = keys.key(5), (2, 4, 4)
DATA, KIND = "training.data.data_path", "training.data.preprocessed_data_type"
STUDENT = "models.student.config"
MODEL = {"in_channels": 12, "image_dim": 6, "added_kv_proj_dim": 24}
TOTAL, RESUME = "training.loop.max_train_steps", "training.checkpoint.resume_from_checkpoint"


def model(**changes) -> dict:
    """Changes of the shared recipe that give its model other fields."""
    return {f"{STUDENT}.{k}": v for k, v in changes.items()}


@pytest.fixture(scope="module")
def i2v(tmp_path_factory):
    """The changes that train an image-to-video model on a set of six clips."""
    root = tmp_path_factory.mktemp("i2v")
    write(root / "x.parquet", I2V, [sample(I2V, i, GRID) for i in range(6)])
    return {DATA: str(root), KIND: "i2v", **model(**MODEL)}


# --- the model's inputs ---------------------------------------------------------------------------------------


def masked(latents: torch.Tensor, masks: int) -> torch.Tensor:
    """From the definition: one 0/1 per video frame, the first repeated to fill its latent frame, folded by `masks`."""
    b, _, t, h, w = latents.shape
    video = torch.zeros(b, masks * (t - 1) + 1, h, w)
    video[:, 0] = 1
    filled = torch.cat([video[:, :1].expand(-1, masks, -1, -1), video[:, 1:]], dim=1)
    return torch.cat([filled.unflatten(1, (t, masks)).transpose(1, 2), latents], dim=1)


def conditions_of(batch: int) -> dict[str, torch.Tensor]:
    draw = lambda name, *shape: keys.normal(keys.fold_in(KEY, name), (batch, *shape))  # noqa: E731
    return {"text": draw("c", 5, 8), "image": draw("i", 5, 6), "first_frame": draw("f", 4, *GRID)}


def test_dropping_a_caption_leaves_the_image():
    """And masks stand before the first frame's latents, after the noisy ones."""
    cfg = wan.WanConfig(num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=1, in_channels=12,
                        out_channels=4, text_dim=8, freq_dim=16, image_dim=6, added_kv_proj_dim=24)  # fmt: skip
    given_, clean, empty = conditions_of(4), keys.normal(KEY, (4, 4, *GRID)), keys.normal(KEY, (5, 8))
    draws = sft.Draws(torch.zeros_like(clean), torch.full((4,), 0.5), torch.tensor([True, False, True, False]))
    fed = training_inputs(cfg, clean, given_, empty, draws, torch.float32)
    kept = training_inputs(
        cfg, clean, given_, empty, dataclasses.replace(draws, dropped=torch.zeros(4).bool()), torch.float32
    )
    assert torch.equal(fed["text"][[0, 2]], empty.expand(2, -1, -1))
    assert torch.equal(fed["text"][[1, 3]], given_["text"][[1, 3]])
    assert torch.equal(fed["latents"], kept["latents"]) and torch.equal(fed["image"], kept["image"])
    assert torch.equal(fed["image"], given_["image"])
    assert torch.equal(fed["latents"], torch.cat([clean * 0.5, masked(given_["first_frame"], 4)], 1))
    assert given_.keys() == conditions_of(4).keys() and torch.equal(given_["text"], conditions_of(4)["text"])


@pytest.mark.parametrize(
    "fields, channels",
    [
        (MODEL, {"image", "first_frame"}),
        ({"in_channels": 12}, {"first_frame"}),  # Wan 2.2 I2V has no image branch
        ({"image_dim": 6, "added_kv_proj_dim": 24}, {"image"}),
    ],
)
def test_a_step_feeds_what_the_rows_hold_and_every_leaf_learns(recipe, i2v, tmp_path, monkeypatch, fields, channels):
    changes = {k: v for k, v in i2v.items() if not k.startswith(STUDENT)} | model(**fields)
    setup = prepare(recipe(tmp_path / "run", {**changes, "training.data.training_cfg_rate": 0.0}))
    state, fed, grads = initial_state(setup), [], {}
    with torch.no_grad():
        state.params["proj_out.weight"].normal_(generator=torch.Generator().manual_seed(0))
    batch = next(batches(setup.dataset, key=KEY, batch_size=2))
    forward = wan.forward
    monkeypatch.setattr(wan, "forward", lambda p, c, inputs, **k: fed.append(inputs) or forward(p, c, inputs, **k))
    monkeypatch.setattr(step_module.optim, "adamw_update", lambda opt, g, *rest: grads.update(g))
    step_module.train_step(setup, state, [batch])
    (inputs,) = fed
    assert inputs.keys() == {"latents", "timestep", "text"} | (channels & {"image"})
    for row, index in enumerate(batch.indices):
        wanted = sample(I2V, index, GRID)
        if "image" in channels:
            assert torch.equal(inputs["image"][row], wanted["clip_feature"])
        if "first_frame" in channels:
            assert torch.equal(inputs["latents"][row, 8:], wanted["first_frame_latent"])
            assert inputs["latents"][row, 4:8, 0].eq(1).all() and not inputs["latents"][row, 4:8, 1:].any()
    assert grads.keys() == state.params.keys() and all(g.abs().max() > 0 for g in grads.values())


# --- whole runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", ["map", "streaming"])
def test_a_run_stopped_and_resumed_is_the_run_that_was_not(recipe, i2v, tmp_path, loader):
    changes = {**i2v, "training.data.dataloader_type": loader}
    train(recipe(tmp_path / "whole", changes))
    train(recipe(tmp_path / "cut", {**changes, TOTAL: 5}))
    train(recipe(tmp_path / "cut", {**changes, RESUME: "latest"}))
    assert course(tmp_path / "cut") == course(tmp_path / "whole") and len(course(tmp_path / "cut")) == 8
    assert_same_end(tmp_path / "cut", tmp_path / "whole", 8)


def test_an_exported_model_loads_in_diffusers_with_its_image_branch(recipe, i2v, tmp_path):
    from diffusers import WanTransformer3DModel

    train(recipe(tmp_path / "run", {**i2v, TOTAL: 1}))
    export(tmp_path / "run", tmp_path / "export")
    theirs = WanTransformer3DModel.from_pretrained(tmp_path / "export" / "transformer").state_dict()
    ours = open_checkpoint(states.folder_of(tmp_path / "run", 1) / "params").read()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert any("image_embedder" in k for k in ours)


def test_the_image_tells_the_model_which_clip_it_is(recipe, tmp_path):
    """Clips of two kinds that only the first frame tells apart: with the other kind's, the loss is far higher."""
    rows = []
    for i in range(8):
        clip = sample(I2V, 0, GRID) | {"id": f"{i}"}
        sign = 1.0 if i % 2 else -1.0
        rows.append(
            clip | {"vae_latent": sign * torch.ones(4, *GRID), "first_frame_latent": sign * torch.ones(4, *GRID)}
        )
    write(tmp_path / "data" / "x.parquet", I2V, rows)
    changes = {DATA: str(tmp_path / "data"), KIND: "i2v", **model(**MODEL), TOTAL: 60,
               "training.data.train_batch_size": 4, "training.optimizer.learning_rate": 2e-2,
               "training.checkpoint.training_state_checkpointing_steps": 0}  # fmt: skip
    setup = prepare(recipe(tmp_path / "no run", changes))
    train(recipe(tmp_path / "run", changes))
    state = initial_state(setup)
    folder = states.checkpoints(tmp_path / "run")[-1]
    states.fill(state, states.open_for(state, folder, setup.record(), weights_only=False))
    stream = batches(setup.dataset, key=KEY, batch_size=8)
    batch = next(stream)
    swapped = dataclasses.replace(
        batch, conditions=batch.conditions | {"first_frame": -batch.conditions["first_frame"]}
    )
    with torch.no_grad():
        right, wrong = (
            float(step_module.microbatch_loss(setup, state, b, 0)[0]["video"].sum()) / batch.latents.numel()
            for b in (batch, swapped)
        )
    assert right < 0.5 * wrong, (right, wrong)


# --- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (model(in_channels=4, image_dim=None, added_kv_proj_dim=None),
         "i2v does not fit this model\n  - it takes no image .* use t2v data"),
        (model(in_channels=9), "in_channels is 9, expected 12: latents, 4 mask channels"),
        (model(pos_embed_seq_len=10), "needs a first and a last frame .pos_embed_seq_len."),
        (model(image_dim=7), r"row 0: clip_feature \[5, 6\] .6 such., expected \[L, 7\]"),
        ({KIND: "t2v"}, "t2v has no image conditions, which this model needs .*: use i2v data"),
        ({"callbacks.validation": {"dataset_file": "x.json", "every_steps": 1, "sampling_steps": [1]}},
         "callbacks.validation cannot sample videos\n  - no vae/ .*\n  - no text_encoder/ .*\n  - no image_encoder/ "),
        ({"pipeline.expand_timesteps": True}, "pipeline.expand_timesteps is true, but this model takes pictures by"),
        ({"pipeline.image_encoder": "gone"}, "pipeline.image_encoder: gone has no config.json"),
    ],
)  # fmt: skip
def test_models_and_data_that_do_not_go_together_are_refused_before_anything_is_made(
    recipe, i2v, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setattr("train.run.initial_state", lambda setup: pytest.fail("weights were made"))
    with pytest.raises(UserError, match=message):
        train(recipe(tmp_path / "run", {**i2v, **changes}))
    assert not (tmp_path / "run").exists()


def test_latents_of_a_first_frame_that_are_of_another_size_are_named(recipe, i2v, tmp_path):
    rows = [sample(I2V, i, GRID) for i in range(3)]
    rows[1]["first_frame_latent"] = rows[1]["first_frame_latent"][:, :1]
    write(tmp_path / "data" / "x.parquet", I2V, rows)
    with pytest.raises(UserError, match=r"row 1: first_frame_latent \[4, 1, 4, 4\] .1 such., expected \[4, 2, 4, 4\]"):
        prepare(recipe(tmp_path / "run", {**i2v, DATA: str(tmp_path / "data")}))


def test_data_of_another_type_are_refused_with_both_column_lists(recipe, i2v, tmp_path):
    write(tmp_path / "data" / "x.parquet", T2V, [sample(T2V, 0, GRID)])
    with pytest.raises(UserError, match=r"(?s)not a file of row type 'i2v'.*first_frame_latent_bytes .missing"):
        prepare(recipe(tmp_path / "run", {**i2v, DATA: str(tmp_path / "data")}))


def test_the_command_line_trains_image_to_video(arguments, i2v, tmp_path, capsys):
    assert cli.main(arguments(tmp_path / "run", {**i2v, TOTAL: 2})) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["phase"] == "train"] == [1, 2]
