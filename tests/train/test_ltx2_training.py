"""Training LTX-2 from a recipe: one stream or both, frozen ones, resuming, options of layers, and what is refused."""

import dataclasses
import json

import pytest
import torch
from ltx2_sets import LTX23, LTX25, SIZES, config, recipe_of, row, write

from core import keys
from core.checkpoint import open_checkpoint
from core.errors import UserError
from core.scan import compiled
from nn.ltx2_flops import model_flops
from nn.ltx2_specs import param_specs
from parallel import inventory
from train import layout, ltx2_sft, metrics
from train import state as states
from train import step as step_module
from train.data import batches
from train.ltx2_family import owners
from train.rows import Batch
from train.run import train
from train.setup import initial_state, prepare

TOTAL, RESUME = "training.loop.max_train_steps", "training.checkpoint.resume_from_checkpoint"
STUDENT, MODEL, DATA = "models.student", "training.model", "training.data"
BATCH, ACCUMULATION = f"{DATA}.train_batch_size", "training.loop.gradient_accumulation_steps"
COMPUTE = "training.compute_dtype"


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """`{kind: folder}`: the same six samples as rows of every type."""
    root = tmp_path_factory.mktemp("ltx2")
    return {kind: write(root / kind, kind, [row(kind, i) for i in range(6)]) for kind in ("t2v", "t2va", "t2a")}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Rows whose streams have texts of unlike widths, as LTX-2.3 takes them."""
    rows = [row("t2va", i, widths=(32, 16), own_text=True) for i in range(4)]
    return write(tmp_path_factory.mktemp("wide") / "set", "t2va", rows)


@pytest.fixture(scope="module")
def whole(sets, tmp_path_factory):
    """The output folder of a finished run of four steps of both streams."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(recipe_of(sets["t2va"], out, changes={"callbacks.ema": {"decay": 0.9}, ACCUMULATION: 2}))
    return out


def rows(out):
    return [r for r in metrics.read_rows(out / "metrics.jsonl") if r["phase"] == "train"]


def course(out):
    """What of a run must not depend on the way it was made."""
    names = ("step", "loss", "loss_video", "loss_audio", "loss_by_sigma", "grad_norm")
    return [[r.get(name) for name in names] for r in rows(out)]


def saved(out, step, group="params"):
    return open_checkpoint(states.folder_of(out, step) / group).read()


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- a run ----------------------------------------------------------------------------------------------------


def test_every_row_has_the_loss_of_each_stream_and_by_noise_level(whole):
    for r in rows(whole):
        assert r["loss"] == pytest.approx(r["loss_video"] + r["loss_audio"], rel=1e-6)
        names = ("loss_by_sigma", "loss_by_sigma_video", "loss_by_sigma_audio")
        for every, video, audio in zip(*(r[name] for name in names), strict=True):
            found = [x for x in (video, audio) if x is not None]
            assert (every is None) == (not found) and (every is None or min(found) <= every <= max(found))
    # Latents of unit variance and a zero head: 2 for each stream.
    assert 1.7 < rows(whole)[0]["loss_video"] < 2.3 and 1.5 < rows(whole)[0]["loss_audio"] < 2.5


def test_a_run_stopped_and_resumed_is_the_run_that_was_not(whole, sets, tmp_path):
    changes = {"callbacks.ema": {"decay": 0.9}, ACCUMULATION: 2}
    train(recipe_of(sets["t2va"], tmp_path / "cut", changes=changes | {TOTAL: 2}))
    train(recipe_of(sets["t2va"], tmp_path / "cut", changes=changes | {RESUME: "latest"}))
    assert course(tmp_path / "cut") == course(whole)
    assert all(equal(saved(tmp_path / "cut", 4, g), saved(whole, 4, g)) for g in ("params", "optimizer", "ema"))


def test_a_checkpoint_says_what_model_it_is_of(whole, sets, tmp_path):
    record = json.loads((states.folder_of(whole, 4) / states.RECORD).read_text())
    assert record["config"]["_class_name"] == "LTX2VideoTransformer3DModel"
    tree = open_checkpoint(states.folder_of(whole, 4) / "params")
    assert tree.metadata["model_type"] == "LTX2VideoTransformer3DModel" and tree.keys() == param_specs(config()).keys()
    asked = {RESUME: str(states.folder_of(whole, 4)), f"{STUDENT}.modality": "video", "callbacks.ema": {"decay": 0.9}}
    with pytest.raises(UserError, match="_class_name: the checkpoint has 'LTX2VideoTransformer3DModel', this run"):
        train(recipe_of(sets["t2va"], tmp_path / "run", changes=asked))
    asked |= {f"{STUDENT}.modality": None, f"{STUDENT}.frozen": "audio"}
    with pytest.raises(UserError, match="models.student.frozen: the checkpoint has None, this run 'audio'"):
        train(recipe_of(sets["t2va"], tmp_path / "run", changes=asked))


@pytest.mark.parametrize("modality, kind", [("video", "t2v"), ("audio", "t2a")])
def test_one_stream_reads_its_own_part_of_rows_of_both(sets, tmp_path, modality, kind):
    """The run over rows of video and audio is the run over rows of the one; the other stream's leaves are absent."""
    for out, rows_ in (("both", "t2va"), ("own", kind)):
        train(recipe_of(sets[rows_], tmp_path / out, rows_, changes={f"{STUDENT}.modality": modality}))
    assert course(tmp_path / "both") == course(tmp_path / "own")
    weights = saved(tmp_path / "both", 4)
    assert equal(weights, saved(tmp_path / "own", 4))
    assert weights.keys() == param_specs(config(modality=modality)).keys()
    assert "loss_video" not in rows(tmp_path / "own")[0], "the loss is that of the only stream"


@pytest.mark.parametrize("frozen", ["video", "audio"])
def test_a_frozen_stream_is_given_and_its_leaves_stay_as_they_are(sets, tmp_path, frozen):
    out, other = tmp_path / "run", {"video": "audio", "audio": "video"}[frozen]
    recipe = recipe_of(sets["t2va"], out, changes={f"{STUDENT}.frozen": frozen, "callbacks.ema": {"decay": 0.9}})
    before = {k: p.detach().clone() for k, p in initial_state(prepare(recipe)).params.items()}
    train(recipe)
    after, average, owner = saved(out, 4), saved(out, 4, "ema"), owners(config())
    for key, value in after.items():
        still = torch.equal(value, before[key])
        assert still == (owner[key] == frozen), key
        assert not still or torch.equal(average[key], value), key
    moments = {k.partition(".")[2] for k in saved(out, 4, "optimizer")} - {""}
    assert moments == {k for k in after if owner[k] == other}
    assert all("loss_audio" not in r and r["loss"] > 0 for r in rows(out))
    train(recipe_of(sets["t2va"], out, changes={  # and a run goes on
        f"{STUDENT}.frozen": frozen, "callbacks.ema": {"decay": 0.9}, TOTAL: 5, RESUME: "latest"}))  # fmt: skip
    assert all(torch.equal(v, before[k]) for k, v in saved(out, 5).items() if owner[k] == frozen)


CASES = [(sizes, modality, None) for sizes in ("2.0", "2.3", "2.5") for modality in ("audio_video", "video", "audio")]
CASES += [(sizes, "audio_video", frozen) for sizes in ("2.0", "2.3", "2.5") for frozen in ("video", "audio")]


@pytest.mark.parametrize("version, modality, frozen", CASES)
def test_gradients_reach_every_leaf_that_is_trained(sets, wide, tmp_path, monkeypatch, version, modality, frozen):
    sizes = {"2.0": SIZES, "2.3": LTX23, "2.5": LTX25}[version]
    asked = {f"{STUDENT}.modality": modality, f"{STUDENT}.frozen": frozen}
    setup = prepare(recipe_of(sets["t2va"] if version == "2.0" else wide, tmp_path / "run", sizes=sizes, changes=asked))
    state, grads = fresh(setup), {}
    monkeypatch.setattr(step_module.optim, "adamw_update", lambda opt, g, *rest: grads.update(g))
    step_module.train_step(setup, state, [next(batches(setup.dataset, key=keys.key(5), batch_size=2))])
    assert grads.keys() == state.params.keys() - setup.frozen
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in grads.values()), {
        k for k, g in grads.items() if not g.abs().max() > 0
    }
    assert ("keyframes_abs_pos_embedding" in setup.frozen) == (version == "2.5" and modality != "audio")


# --- the step -------------------------------------------------------------------------------------------------


def fresh(setup):
    """A state with every leaf random, so that each has a gradient."""
    state = initial_state(setup)
    with torch.no_grad():
        for key, p in state.params.items():
            p.copy_(keys.normal(keys.fold_in(keys.key(9), key), p.shape) * 0.1 + ("norm" in key))
    return state


def made_batch(name: str, n: int, grid=(2, 4, 4), steps=5) -> Batch:
    draw = lambda what, *shape: keys.normal(keys.fold_in(keys.fold_in(keys.key(1), name), what), shape)  # noqa: E731
    targets = {"video": draw("v", n, 4, *grid), "audio": draw("a", n, 2, steps, 3)}
    names = [f"{name}-{i}" for i in range(n)]
    return Batch(targets, {"text": draw("t", n, 4, 9)}, [4] * n, names, list(range(n)), [25.0] * n)


def joined(a: Batch, b: Batch) -> Batch:
    cat = lambda x, y: {k: torch.cat([x[k], y[k]]) for k in x}  # noqa: E731
    return Batch(cat(a.targets, b.targets), cat(a.conditions, b.conditions), a.text_lens + b.text_lens,
                 a.names + b.names, a.indices + b.indices, a.fps + b.fps)  # fmt: skip


def gradients_of_step(setup, micro, monkeypatch):
    seen = {}
    keep = lambda opt, grads, *rest: seen.update({k: g.clone() for k, g in grads.items()})  # noqa: E731
    monkeypatch.setattr(step_module.optim, "adamw_update", keep)
    return step_module.train_step(setup, fresh(setup), micro), seen


def test_two_microbatches_of_one_equal_one_batch_of_two(sets, tmp_path, monkeypatch):
    setup = prepare(recipe_of(sets["t2va"], tmp_path / "run", changes={"callbacks.grad_clip.max_grad_norm": 0}))
    a, b = made_batch("a", 1), made_batch("b", 1)
    whole_, expected = gradients_of_step(setup, [joined(a, b)], monkeypatch)
    cut, grads = gradients_of_step(setup, [a, b], monkeypatch)
    assert cut.names == whole_.names and cut.tokens == whole_.tokens == 2 * (32 + 5) and cut.flops == whole_.flops
    # Same sums of float32 products in another order.
    torch.testing.assert_close(cut.losses, whole_.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(cut.means, whole_.means, rtol=1e-5, atol=0)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)


def test_unequal_microbatches_weigh_by_the_elements_of_each_stream(sets, tmp_path, monkeypatch):
    """The gradient is that of each stream's squared errors over all of its elements, weighted, from the formulas."""
    weights = {f"{MODEL}.video_loss_weight": 0.5, f"{MODEL}.audio_loss_weight": 3.0}
    changes = {"callbacks.grad_clip.max_grad_norm": 0, **weights}
    setup = prepare(recipe_of(sets["t2va"], tmp_path / "run", changes=changes))
    micro = [made_batch("long", 1), made_batch("short", 2, (1, 2, 4), 2)]
    step, grads = gradients_of_step(setup, micro, monkeypatch)
    params = {k: p.detach().requires_grad_() for k, p in fresh(setup).params.items()}
    sums, first = {"video": 0.0, "audio": 0.0}, 0
    for b in micro:
        draws = ltx2_sft.draw_batch(setup.cfg, setup.objective, keys.fold_in(keys.key(3), "sft"), 0, first, b)
        errors = ltx2_sft.batch_loss(params, setup.cfg, setup.objective, b, {}, draws, dtype=torch.float32)
        sums = {k: sums[k] + e.sum() for k, e in errors.items()}
        first += len(b.names)
    means = {k: s / sum(b.targets[k].numel() for b in micro) for k, s in sums.items()}
    total = 0.5 * means["video"] + 3.0 * means["audio"]
    expected = dict(zip(params, torch.autograd.grad(total, list(params.values())), strict=True))
    torch.testing.assert_close(step.loss, total.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(step.means, {k: m.detach() for k, m in means.items()}, rtol=1e-5, atol=0)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)


def test_arithmetic_is_that_of_the_published_figures_and_less_of_frozen_leaves(sets, tmp_path, monkeypatch):
    cfg, of = config(), {"video": 32, "audio": 5}
    texts = {"video": 4, "audio": 4}
    found = {}
    for frozen in (None, "audio"):
        asked = {f"{STUDENT}.frozen": frozen}
        setup = prepare(recipe_of(sets["t2va"], tmp_path / str(frozen), changes=asked))
        found[frozen] = gradients_of_step(setup, [made_batch("a", 2)], monkeypatch)[0].flops
    assert found[None] == 2 * model_flops(cfg, of, texts)
    alone = dataclasses.replace(cfg, modality="audio")
    matrices = dataclasses.replace(inventory.ltx2_model("x", alone), branches=())
    products = inventory.forward_flops(matrices, {"audio": 5, "audio_text": 4}, layers_only=True)
    cross = 2 * cfg.num_layers * (2 * 5 * 16 * 16 + 2 * 32 * 32 * 16)  # q and out of v2a of 5 tokens, k and v of 32
    assert found[None] - found["audio"] == 2 * (products + cross)


# --- how layers run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {f"{MODEL}.enable_gradient_checkpointing_type": "full", f"{MODEL}.gradient_checkpointing_nth": 2},
    {f"{MODEL}.enable_gradient_checkpointing_type": "save_matmuls", f"{MODEL}.activation_offload": True},
    {f"{MODEL}.pack_attention_projections": True},
], ids=["full", "save_matmuls, offloaded", "packed"])  # fmt: skip
def test_options_of_layers_change_nothing_but_cost(whole, sets, tmp_path, changes):
    out = tmp_path / "run"
    train(recipe_of(sets["t2va"], out, changes={"callbacks.ema": {"decay": 0.9}, ACCUMULATION: 2, **changes}))
    for ours, theirs in zip(rows(out), rows(whole), strict=True):
        # Sums of packed products run in another order; through four steps of Adam.
        got = [r[k] for r in (ours, theirs) for k in ("loss", "loss_video", "loss_audio", "grad_norm")]
        assert got[:4] == pytest.approx(got[4:], rel=1e-3)
    if f"{MODEL}.pack_attention_projections" in changes:
        assert "transformer_blocks.0.attn1.to_qkv.weight" in saved(out, 4)
        train(recipe_of(sets["t2va"], tmp_path / "split", changes={  # the other layout goes on from its checkpoint
            "callbacks.ema": {"decay": 0.9}, TOTAL: 5, RESUME: str(states.folder_of(out, 4))}))  # fmt: skip
        assert saved(tmp_path / "split", 5).keys() == param_specs(config()).keys()
    else:
        assert equal(saved(out, 4), saved(whole, 4)), "recomputed blocks give the same bits"


def test_compiled_blocks_train_alike(whole, sets, tmp_path, monkeypatch):
    # Inductor's C++ takes 40 s; what is traced, and that one block serves all, is the same with this backend.
    monkeypatch.setattr(layout, "compiled", lambda how, memory_budget: compiled(how, backend="aot_eager"))
    changes = {f"{MODEL}.enable_torch_compile": True, "callbacks.ema": {"decay": 0.9}, ACCUMULATION: 2}
    train(recipe_of(sets["t2va"], tmp_path / "run", changes=changes))
    ours, theirs = ([r["loss"] for r in rows(out)] for out in (tmp_path / "run", whole))
    assert ours == pytest.approx(theirs, rel=1e-4)  # other decompositions of float32 operators


def test_weights_in_bf16_compute_give_finite_losses_close_to_those_of_float32(whole, sets, tmp_path):
    changes = {COMPUTE: "bf16", "callbacks.ema": {"decay": 0.9}, ACCUMULATION: 2}
    train(recipe_of(sets["t2va"], tmp_path / "run", changes=changes))
    # bf16 has 8 bits; the head begins at zero, so that losses are those of the targets at first.
    losses = [[r["loss"] for r in rows(out)] for out in (tmp_path / "run", whole)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


# --- captions -------------------------------------------------------------------------------------------------


def test_dropping_captions_without_an_encoder_is_refused_with_the_reason(sets, tmp_path):
    changes = {f"{DATA}.training_cfg_rate": 0.1}
    with pytest.raises(UserError, match="training_cfg_rate is 0.1: .*embedding of the empty one.*zeros would be no"):
        prepare(recipe_of(sets["t2va"], tmp_path / "run", changes=changes))


# --- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, changes, message", [
    ("t2v", {}, "t2v has no audio, which a model of modality audio_video makes: use t2va data"),
    ("t2a", {f"{STUDENT}.modality": "video"}, "t2a has no video, .* use t2v or t2va data"),
    ("t2va", {f"{STUDENT}.config.audio_in_channels": 8}, r"audio_latent \[2, 5, 3\], expected .* C \* F = 8"),
    ("t2va", {f"{STUDENT}.config.in_channels": 8}, "latents .4, 2, 4, 4. .6 such.: expected 8 channels"),
    ("t2va", {f"{STUDENT}.config.caption_channels": 5}, "text_embedding is 9 wide, expected 5 for the video stream"),
    ("t2va", {f"{MODEL}.video_loss_weight": 0, f"{MODEL}.audio_loss_weight": 0}, "0 leaves nothing to train"),
    ("t2va", {f"{STUDENT}.frozen": "video", f"{MODEL}.audio_loss_weight": 0}, "audio_loss_weight: 0 leaves nothing"),
    ("t2va", {"pipeline.flow_shift": 5.0}, "pipeline.flow_shift does nothing for .*ltx2, only for wan"),
    ("t2va", {f"{DATA}.text_padding_length": 9}, "text_padding_length does nothing for .*ltx2, only for wan"),
    ("t2va", {f"{MODEL}.weighting_scheme": "logit_normal"}, "must be one of shifted_logit_normal, uniform for ltx2"),
    ("t2va", {f"{DATA}.num_frames": 6}, "num_frames must be 4k . 1, got 6; nearest: 5 or 9"),
    ("t2va", {f"{STUDENT}.config.modality": "video"}, "config.modality is models.student.modality: set it there"),
    ("t2va", {f"{STUDENT}.modality": "video", f"{STUDENT}.frozen": "audio"}, "frozen needs modality: audio_video"),
    ("t2va", {f"{STUDENT}.config.modaltiy": "video"}, "unknown key modaltiy"),
    ("text_only", {}, "text_only cannot train ltx2 with method sft; it takes: t2v, t2va, t2a"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_before_anything_is_made(sets, tmp_path, kind, changes, message):
    with pytest.raises(UserError, match=message):
        prepare(recipe_of(sets.get(kind, tmp_path), tmp_path / "run", kind, changes=changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key, value", [
    (f"{MODEL}.timestep_uniform_prob", 0.2), (f"{MODEL}.audio_loss_weight", 0.5), ("pipeline.vocoder", "x"),
])  # fmt: skip
def test_keys_of_ltx2_do_nothing_for_wan_and_are_refused(recipe, tmp_path, key, value):
    with pytest.raises(UserError, match=f"{key} does nothing for models.student._target_: wan, only for ltx2"):
        recipe(tmp_path / "run", {key: value})


def test_another_frame_rate_is_another_run(sets, tmp_path):
    """Rates reach training, and a set that notes none says what is taken."""
    slow = write(tmp_path / "slow", "t2va", [row("t2va", i, fps=5.0) for i in range(6)])
    changes = {TOTAL: 3}
    for name, data in (("fast", sets["t2va"]), ("slow", slow)):
        train(recipe_of(data, tmp_path / name, changes=changes))
    fast, slow = ([r["loss_video"] for r in rows(tmp_path / n)] for n in ("fast", "slow"))
    assert fast[0] == slow[0] and fast[2] != slow[2], "the head begins at zero"


def test_a_set_without_a_frame_rate_is_noted(tmp_path, capsys):
    data = write(tmp_path / "set", "t2va", [row("t2va", i, fps=0.0) for i in range(2)])
    train(recipe_of(data, tmp_path / "run", changes={TOTAL: 1}))
    assert "note: the data note no frame rate: 24 frames per second are taken" in capsys.readouterr().out
