"""Flow matching: draws, densities, weights, accumulation, and that every path feeds the model the same tensors."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from core import keys, specs
from infer.conditions import encode_prompts
from infer.folder import load_pipeline
from infer.generate import Sampling, generate, initial_noise, latent_shape
from kernels import Attention
from nn import wan
from nn.run import Run
from nn.wan_inputs import clean_estimate, noised
from train import sft, validate
from train import step as step_module
from train.config import Recipe
from train.export import export
from train.flops import forward_flops, train_flops
from train.rows import Batch
from train.setup import initial_state, prepare
from train.sft import SIGMA_FLOOR, WEIGHTS, Draws, Objective, draw, sample_errors, training_inputs
from train.state import TrainState
from train.wan_family import objective as objective_of

KEY = keys.key(11)
TINY = wan.WanConfig(
    num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=2, in_channels=4, out_channels=4,
    text_dim=8, freq_dim=16,
)  # fmt: skip


def random(name, *shape, dtype=torch.float32):
    return keys.normal(keys.fold_in(KEY, name), shape, dtype=dtype)


# --- draws ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 3))
def test_draws_of_a_sample_do_not_depend_on_how_the_step_is_cut(sizes, step, seed):
    objective, shape = Objective("logit_normal", caption_dropout=0.5), (2, 1, 2, 3)
    whole = draw(objective, keys.key(seed), step, 0, (sum(sizes), *shape))
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [draw(objective, keys.key(seed), step, f, (n, *shape)) for f, n in zip(firsts, sizes, strict=True)]
    for name in ("noise", "sigma", "dropped"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
    assert whole.noise.dtype == whole.sigma.dtype == torch.float32


def test_steps_samples_seeds_and_parts_of_a_draw_are_all_different():
    objective = Objective()
    draws = [draw(objective, keys.key(seed), step, 0, (3, 1, 1, 1, 4)) for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(row.tolist()) for d in draws for row in d.noise.flatten(1)}) == 12
    assert len({float(s) for d in draws for s in d.sigma}) == 12


def logit_normal_cdf(x, mean, std):
    return 0.5 * (1 + torch.erf((torch.logit(x) - mean) / (std * math.sqrt(2))))


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(
    "scheme, mean, std", [("uniform", 0.0, 1.0), ("logit_normal", 0.0, 1.0), ("logit_normal", -0.5, 0.7)]
)
def test_timestep_densities_have_their_distribution(scheme, mean, std, shift):
    objective, n = Objective(scheme, logit_mean=mean, logit_std=std, flow_shift=shift), 4000
    sigma = torch.stack([sft.draw_sigma(objective, keys.fold_in(KEY, i)) for i in range(n)]).double().sort().values
    assert 0 <= sigma[0] and sigma[-1] <= 1
    unshifted = sigma / (shift - (shift - 1) * sigma)  # inverse of s x / (1 + (s - 1) x)
    cdf = unshifted if scheme == "uniform" else logit_normal_cdf(unshifted, mean, std)
    grid = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((cdf - grid[:-1]).abs(), (cdf - grid[1:]).abs()).max())
    # Kolmogorov: P(sqrt(n) D > 1.95) is 0.1 %; the seed is fixed. A missing shift gives D of about 0.27.
    assert distance < 1.95 / math.sqrt(n)


def test_weights_are_their_closed_forms():
    sigma = torch.tensor([0.0, 1e-4, 0.01, 0.25, 0.5, 1.0], dtype=torch.float64)
    assert torch.equal(WEIGHTS["none"](sigma), torch.ones(6, dtype=torch.float64))
    expected = [SIGMA_FLOOR**-2, SIGMA_FLOOR**-2, 1e4, 16.0, 4.0, 1.0]
    torch.testing.assert_close(WEIGHTS["sigma_sqrt"](sigma).tolist(), expected, rtol=1e-12, atol=0)
    u = sigma[1:-1]
    cosmap = 2 / math.pi / (1 - 2 * u + 2 * u**2)
    torch.testing.assert_close(WEIGHTS["cosmap"](u), cosmap, rtol=1e-12, atol=0)
    # A density over sigma in [0, 1]: it integrates to 1 (midpoint rule; its error is 1e-8 for 1000 cells).
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert abs(float(WEIGHTS["cosmap"](grid).mean()) - 1) < 1e-6


@pytest.mark.parametrize("weighting", WEIGHTS)
def test_errors_are_weighted_sums_and_preconditioning_multiplies_them_by_sigma_squared(weighting):
    # float64: the two sides differ by rounding alone.
    clean, velocity, noise = (random(n, 5, 3, 2, 2, 4, dtype=torch.float64) for n in ("x", "v", "e"))
    sigma = keys.uniform(KEY, (5,), dtype=torch.float64)
    draws = Draws(noise, sigma, torch.zeros(5, dtype=torch.bool))
    plain = sample_errors(Objective(), velocity.float(), clean, draws)
    manual = torch.stack([((velocity[i].float() - (noise[i] - clean[i])) ** 2).sum() for i in range(5)])
    torch.testing.assert_close(plain, manual, rtol=1e-12, atol=0)
    objective = Objective(loss_weighting=weighting)
    weighted = sample_errors(objective, velocity, clean, draws)
    torch.testing.assert_close(weighted, WEIGHTS[weighting](sigma) * plain, rtol=1e-12, atol=0)
    conditioned = sample_errors(dataclasses.replace(objective, precondition_outputs=True), velocity, clean, draws)
    torch.testing.assert_close(conditioned, sigma**2 * weighted, rtol=1e-10, atol=1e-12)


def test_the_target_velocity_leads_back_to_the_clean_latents_with_no_error():
    clean, noise = random("x", 3, 2, 1, 2, 2), random("e", 3, 2, 1, 2, 2)
    sigma = torch.tensor([0.1, 0.5, 0.99])
    torch.testing.assert_close(clean_estimate(noised(clean, noise, sigma), noise - clean, sigma), clean)
    draws = Draws(noise, sigma, torch.zeros(3, dtype=torch.bool))
    assert float(sample_errors(Objective(), noise - clean, clean, draws).abs().max()) == 0


def test_captions_are_dropped_at_the_rate_and_replaced_by_the_empty_one():
    objective, n = Objective(caption_dropout=0.3), 4000
    dropped = draw(objective, KEY, 0, 0, (n, 1, 1, 1, 1)).dropped
    # Five standard deviations of a binomial share.
    assert abs(float(dropped.float().mean()) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / n)
    assert not draw(Objective(), KEY, 0, 0, (50, 1, 1, 1, 1)).dropped.any()
    assert draw(Objective(caption_dropout=1.0), KEY, 0, 0, (50, 1, 1, 1, 1)).dropped.all()
    text, empty = random("c", 6, 5, 8), random("0", 5, 8)
    draws = Draws(random("e", 6, 4, 1, 2, 2), torch.full((6,), 0.5), torch.tensor([1, 0, 0, 1, 0, 1]).bool())
    fed = training_inputs(TINY, random("x", 6, 4, 1, 2, 2), {"text": text}, empty, draws, torch.float32)["text"]
    assert torch.equal(fed[[0, 3, 5]], empty.expand(3, -1, -1)) and torch.equal(fed[[1, 2, 4]], text[[1, 2, 4]])


# --- the step -------------------------------------------------------------------------------------------------


def test_the_loss_of_a_fresh_model_is_2():
    """A zero head predicts velocity 0, and E|noise - x0|^2 is 2 per element for latents of unit variance."""
    clean, n = random("x", 64, 4, 2, 4, 4), 64 * 4 * 2 * 4 * 4
    params = specs.init(wan.param_specs(TINY), KEY)
    draws = draw(Objective(), KEY, 0, 0, tuple(clean.shape))
    text, empty = {"text": random("c", 64, 5, 8)}, torch.zeros(5, 8)
    errors = sft.loss(params, TINY, Objective(), clean, text, empty, draws, dtype=torch.float32)
    # (noise - x0)^2 is 2 chi^2_1, of variance 8: five standard deviations of the mean.
    assert abs(float(errors.sum()) / n - 2) < 5 * math.sqrt(8 / n)


@pytest.fixture
def setup_of(recipe, tmp_path):
    """`setup_of({dotted key: value})`: a prepared run."""
    return lambda changes=None: prepare(recipe(tmp_path / "run", changes))


def batch(name, n, grid=(2, 4, 4)):
    text = random(f"text {name}", n, 3, 8)
    names = [f"{name}-{i}" for i in range(n)]
    return Batch({"video": random(f"z {name}", n, 4, *grid)}, {"text": text}, [3] * n, names, list(range(n)))


def joined(a: Batch, b: Batch) -> Batch:
    video, text = torch.cat([a.latents, b.latents]), torch.cat([a.text, b.text])
    return Batch({"video": video}, {"text": text}, a.text_lens + b.text_lens, a.names + b.names, a.indices + b.indices)


def fresh(setup) -> TrainState:
    """A state whose head is not zero, so that every leaf has a gradient."""
    state = initial_state(setup)
    with torch.no_grad():
        head = state.params["proj_out.weight"]
        head.copy_(random("head", *head.shape) * 0.1)
    return state


def gradients_of_step(setup, state, micro, monkeypatch):
    """The step, and the gradients as the optimiser got them."""
    seen = {}
    keep = lambda opt, grads, *rest: seen.update({k: g.clone() for k, g in grads.items()})  # noqa: E731
    monkeypatch.setattr(step_module.optim, "adamw_update", keep)
    return step_module.train_step(setup, state, micro), seen


def test_two_microbatches_of_one_equal_one_batch_of_two(setup_of, monkeypatch):
    setup = setup_of({"callbacks.grad_clip.max_grad_norm": 0})
    a, b = batch("a", 1), batch("b", 1)
    whole, expected = gradients_of_step(setup, fresh(setup), [joined(a, b)], monkeypatch)
    cut, grads = gradients_of_step(setup, fresh(setup), [a, b], monkeypatch)
    assert cut.names == whole.names and cut.tokens == whole.tokens and cut.flops == whole.flops
    # Same sums of float32 products in another order; gradients are of order 1e-3 to 1.
    torch.testing.assert_close(cut.loss, whole.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(cut.losses, whole.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)
    assert all(g.abs().max() > 0 for g in grads.values())


def test_unequal_microbatches_weigh_by_their_tokens(setup_of, monkeypatch):
    """The step's gradient is that of all squared errors over all elements, in float64 from the formulas."""
    setup = setup_of({"callbacks.grad_clip.max_grad_norm": 0})
    state, micro = fresh(setup), [batch("long", 1, (2, 4, 4)), batch("short", 2, (1, 2, 4))]
    params = {k: p.detach().double().requires_grad_() for k, p in state.params.items()}
    total, count, first = 0.0, 0, 0
    for b in micro:
        clean = b.latents.double()
        d = draw(setup.objective, keys.fold_in(state.key, "sft"), 0, first, tuple(clean.shape))
        draws = Draws(d.noise.double(), d.sigma.double(), d.dropped)
        empty = setup.empty["text"].double()
        text = {"text": sft.fit_text(b.text, len(empty)).double()}
        inputs = training_inputs(setup.cfg, clean, text, empty, draws, torch.float64)
        velocity = wan.forward(params, setup.cfg, inputs)
        total = total + (velocity - (draws.noise - clean)).square().sum()
        count, first = count + clean.numel(), first + len(b.names)
    expected = dict(zip(params, torch.autograd.grad(total / count, list(params.values())), strict=True))
    step, grads = gradients_of_step(setup, state, micro, monkeypatch)
    # float32 against float64: some thousand additions and two layers.
    torch.testing.assert_close(step.loss, (total / count).detach().float(), rtol=1e-5, atol=0)
    for k, g in grads.items():
        torch.testing.assert_close(g, expected[k].float(), rtol=1e-3, atol=1e-5, msg=lambda m, k=k: f"{k}: {m}")


def test_a_step_counts_and_leaves_no_gradients(setup_of):
    setup = setup_of()
    state = fresh(setup)
    before = {k: p.detach().clone() for k, p in state.params.items()}
    step = step_module.train_step(setup, state, [batch("a", 2), batch("b", 1)])
    assert (state.step, state.position) == (1, 3) and float(state.optimizer["step"]) == 1
    assert all(p.grad is None and not torch.equal(p, before[k]) for k, p in state.params.items())
    assert isinstance(step.grad_norm, torch.Tensor) and step.grad_norm.shape == ()
    assert step.tokens == 3 * 2 * 2 * 2


def test_flops_are_those_that_torch_counts():
    length = 5
    latents, text = random("x", 1, 4, 2, 4, 6), random("c", 1, length, 8)
    inputs = {"latents": latents, "timestep": torch.tensor([500.0]), "text": text}
    params = specs.init(wan.param_specs(TINY), KEY)
    with FlopCounterMode(display=False) as counter:
        wan.forward(params, TINY, inputs, run=Run(attention=Attention("reference")))
    assert forward_flops(TINY, 2 * 2 * 3, length) == counter.get_total_flops()
    assert train_flops(TINY, 12, length) == 3 * forward_flops(TINY, 12, length)


def test_the_objective_has_every_key_of_the_recipe_that_decides_the_loss(recipe, tmp_path):
    changes = {
        "training.model.weighting_scheme": "logit_normal", "training.model.logit_mean": 0.25,
        "training.model.logit_std": 0.5, "training.model.loss_weighting": "cosmap",
        "training.model.precondition_outputs": True, "training.data.training_cfg_rate": 0.0, "pipeline.flow_shift": 5.0,
    }  # fmt: skip
    made: Recipe = recipe(tmp_path / "run", changes)
    assert objective_of(made, TINY) == Objective("logit_normal", 0.25, 0.5, 5.0, "cosmap", True, 0.0)


# --- one input builder ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(finished, recipe, validation, tmp_path_factory):
    """`make(changes) -> Setup` of a training run, and `pipeline(dtype)` of inference, from an export."""
    root = tmp_path_factory.mktemp("paths")

    def make(changes):
        return prepare(recipe(root / "none", {"callbacks.validation": validation, **changes}))

    exported = root / "export"
    export(finished, exported)
    return make, lambda dtype: load_pipeline(exported, device=torch.device("cpu"), dtype=dtype)


class Line:
    """Stands in for `wan.forward`: records its inputs and returns the velocity of a straight line to `clean`."""

    def __init__(self, clean):
        self.clean, self.noise, self.calls = clean, None, []

    def __call__(self, params, cfg, inputs, *, run):
        self.calls.append(inputs)
        x = inputs["latents"]
        self.noise = x[:1].float() if self.noise is None else self.noise
        return (self.noise - self.clean).to(x.dtype).expand_as(x)


@given(
    caption=st.sampled_from(["clip number 2", "", "six words are the most here", "another"]),
    seed=st.integers(-5, 5),
    size=st.sampled_from([(5, 32, 32), (1, 16, 48), (9, 16, 16)]),
    steps=st.integers(1, 4),
    sampler=st.sampled_from(["euler", "unipc"]),
    guidance=st.sampled_from([1.0, 2.0]),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_training_validation_and_inference_feed_the_model_the_same_tensors(
    paths, monkeypatch, caption, seed, size, steps, sampler, guidance, dtype
):
    """At equal latents, noise level and caption. The model is replaced by the straight flow to known clean latents,
    so that training, which gets those, has to arrive at what the samplers visit."""
    make, pipeline = paths
    setup = make({"training.compute_dtype": dtype, "training.data.training_cfg_rate": 0.0})
    v = setup.recipe.callbacks.validation.model_copy(
        update={"sampler": sampler, "guidance_scale": guidance, "sampling_steps": (steps,)}
    )
    setup = dataclasses.replace(setup, recipe=setup.recipe.model_copy(
        update={"callbacks": setup.recipe.callbacks.model_copy(update={"validation": v})}))  # fmt: skip
    sizes = dict(zip(("num_frames", "height", "width"), size, strict=True))
    state, prompt = initial_state(setup), validate.Prompt(caption, seed=seed, **sizes)
    pipe = pipeline(setup.compute)
    sampling = Sampling(*size, steps=steps, sampler=sampler, flow_shift=3.0, guidance_scale=guidance)
    clean = random("clean", 1, *latent_shape(pipe, sampling))

    inferred, validated, trained = Line(clean), Line(clean), Line(clean)
    monkeypatch.setattr(wan, "forward", inferred)
    text, negative = encode_prompts(pipe, [caption]), encode_prompts(pipe, [""])
    generate(pipe, sampling, text, negative, [seed])
    monkeypatch.setattr(wan, "forward", validated)
    monkeypatch.setattr(validate, "write_video", lambda path, frames, fps, sound=None: None)
    monkeypatch.setattr(validate, "contact_sheet", lambda rows, path, title: None)
    validate.validate(setup, state, validate.prepare_jobs(setup, [prompt]), lambda line: None)
    assert len(inferred.calls) == len(validated.calls) == steps
    for a, b in zip(inferred.calls, validated.calls, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)

    monkeypatch.setattr(wan, "forward", trained)
    noise = initial_noise(clean.shape[1:], [seed])
    embedding = setup.components.text.embed([caption])[0]
    data = Batch({"video": clean}, {"text": embedding[None]}, [len(embedding)], ["clip"], [0])
    for call in inferred.calls:
        sigma = call["timestep"][:1] / 1000
        monkeypatch.setattr(sft, "draw", lambda *_, s=sigma: Draws(noise, s, torch.tensor([False])))
        step_module.microbatch_loss(setup, state, data, 0)
        ours = trained.calls[-1]
        assert ours.keys() == call.keys()
        for name, tensor in ours.items():
            seen = call[name][:1]
            assert tensor.dtype == seen.dtype and tensor.shape == seen.shape
            # Text to the bit. A timestep survives / 1000 * 1000 to one rounding. UniPC conditions the model on
            # whole timesteps, rounded down, so its latents are noisier than the timestep says by up to 1e-3.
            exact = {"rtol": 0, "atol": 0}
            near = {"rtol": 0, "atol": (8e-3 if sampler == "unipc" else 2e-5) + (4e-2 if dtype == "bf16" else 0)}
            tolerance = {"text": exact, "timestep": {"rtol": 2e-7, "atol": 0}, "latents": near}[name]
            torch.testing.assert_close(tensor, seen, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def test_text_is_padded_alike_everywhere_and_cut_in_training_and_validation(paths):
    """The length is noted in an export, so that inference pads to it; it refuses what training would have cut."""
    make, pipeline = paths
    caption, words = "one two three", 3
    for length in (2, 4, 9):
        setup = make({"training.data.text_padding_length": length})
        trained = sft.fit_text(setup.components.text.embed([caption])[0][None], length)
        validated = encode_prompts(validate.pipeline_of(setup, {}), [caption])
        assert trained.shape == (1, length, 8) and torch.equal(trained, validated)
        if length >= words:
            exported = dataclasses.replace(pipeline(torch.float32), defaults=setup.defaults)
            assert torch.equal(encode_prompts(exported, [caption]), trained)
