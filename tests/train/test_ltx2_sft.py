"""LTX-2's flow matching: draws of each stream, their density, the model's inputs, and the loss."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltx2_sets import LTX23, SIZES, config

from core import keys, specs
from infer.ltx2_schedules import shift_exponent
from nn import ltx2
from nn.ltx2_conditions import Conditioned
from nn.ltx2_inputs import audio_tokens, video_tokens
from nn.ltx2_rope import audio_positions, video_positions
from train import ltx2_sft
from train.ltx2_sft import FLOOR, TAILS, Draws, Objective, draw, sample_errors, stretched, training_inputs
from train.rows import Batch
from train.sft import WEIGHTS

KEY, BOTH = keys.key(11), {"video": 1.0, "audio": 1.0}
SHAPES = {"video": (4, 2, 4, 4), "audio": (2, 5, 3)}


def random(name, *shape, dtype=torch.float32):
    return keys.normal(keys.fold_in(KEY, name), shape, dtype=dtype)


def batch(n: int, streams=("video", "audio"), lens=None, **changes) -> Batch:
    targets = {name: random(f"z {name}", n, *SHAPES[name]) for name in streams}
    lens = [4] * n if lens is None else lens
    names = [f"sample-{i}" for i in range(n)]
    return Batch(targets, {"text": random("text", n, 4, 9)}, lens, names, list(range(n)), [25.0] * n, **changes)


def drawn(cfg, objective, of: Batch, step=0, first=0) -> Draws:
    return ltx2_sft.draw_batch(cfg, objective, KEY, step, first, of)


# --- draws ----------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 9), st.sampled_from([0.0, 0.1, 1.0]))
def test_draws_depend_neither_on_how_the_step_is_cut_nor_on_the_other_stream(sizes, step, share):
    objective = Objective(BOTH, timestep_uniform_prob=share, caption_dropout=0.5)
    of = lambda n, names=("video", "audio"): {name: (n, *SHAPES[name]) for name in names}  # noqa: E731
    cfg = config()
    whole = draw(cfg, objective, KEY, step, 0, of(sum(sizes)))
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [draw(cfg, objective, KEY, step, f, of(n)) for f, n in zip(firsts, sizes, strict=True)]
    for name in SHAPES:
        alone = draw(cfg, objective, KEY, step, 0, of(sum(sizes), (name,)))
        for got in ("noise", "sigmas"):
            joined = torch.cat([getattr(p, got)[name] for p in parts])
            assert torch.equal(joined, getattr(whole, got)[name]) and torch.equal(joined, getattr(alone, got)[name])
            assert joined.dtype == torch.float32
    assert torch.equal(torch.cat([p.dropped for p in parts]), whole.dropped)


def test_samples_steps_and_streams_have_draws_of_their_own():
    draws = [drawn(config(), Objective(BOTH), batch(3), step=step) for step in (0, 1)]
    sigmas = {float(s) for d in draws for levels in d.sigmas.values() for s in levels}
    noises = {tuple(row.tolist()) for d in draws for n in d.noise.values() for row in n.flatten(1)[:, :4]}
    assert len(sigmas) == len(noises) == 12


def cdf(x, tokens, std, share):
    """Of the mixture: the reflected, stretched density, and the uniform one on [FLOOR, 1]."""
    mu = shift_exponent(min(tokens, 4096))
    low, high = (torch.sigmoid(torch.tensor(mu + t * std, dtype=torch.float64)) for t in (-TAILS[0], TAILS[1]))

    def before(t):
        u = (low + t * (high - low)).clamp(0, 1)
        return 0.5 * (1 + torch.erf((torch.logit(u) - mu) / (std * math.sqrt(2))))

    stretched_part = torch.where(x >= FLOOR, before(x) - before(2 * FLOOR - x), torch.zeros_like(x))
    return (1 - share) * stretched_part + share * ((x - FLOOR) / (1 - FLOOR)).clamp(0, 1)


@pytest.mark.parametrize("tokens", [84, 1024, 4290, 30_000])
@pytest.mark.parametrize("share, std", [(0.1, 1.0), (0.0, 0.7)])
def test_noise_levels_have_their_density(tokens, share, std):
    objective, n = Objective(BOTH, logit_std=std, timestep_uniform_prob=share), 2000
    levels = [ltx2_sft.draw_sigma(objective, keys.fold_in(KEY, i), tokens) for i in range(n)]
    sigma = torch.stack(levels).double().sort().values
    assert FLOOR * 0.999 <= sigma[0] and sigma[-1] <= 1
    inside = sigma[sigma < 1]  # what lies above the upper quantile is 1: about 0.1 %
    assert len(inside) >= 0.99 * n
    grid = torch.arange(len(inside) + 1, dtype=torch.float64) / n
    found = cdf(inside, tokens, std, share)
    distance = float(torch.maximum((found - grid[:-1]).abs(), (found - grid[1:]).abs()).max())
    # Kolmogorov: P(sqrt(n) D > 1.95) is 0.1 %; the seed is fixed. Without the stretch D is about 0.1 at 4,096 tokens.
    assert distance < 1.95 / math.sqrt(n)


def test_the_shift_follows_the_tokens_up_to_those_of_the_public_models():
    normal = torch.linspace(-3, 3, 50)
    few, some, many, more = (stretched(normal, tokens, 1.0) for tokens in (84, 1024, 4096, 10**6))
    middle = (normal.abs() < 2).nonzero().flatten()
    assert (few[middle] < some[middle]).all() and (some[middle] < many[middle]).all() and torch.equal(many, more)
    assert all(t.isfinite().all() and ((0 <= t) & (t <= 1)).all() for t in (few, some, many, more))
    # mu is 0.95 at 1,024 tokens and 2.05 at 4,096: the medians before the stretch.
    for tokens, mu in ((1024, 0.95), (4096, 2.05)):
        u, (low, high) = 1 / (1 + math.exp(-mu)), (1 / (1 + math.exp(-(mu + q))) for q in (-TAILS[0], TAILS[1]))
        assert float(stretched(torch.zeros(()), tokens, 1.0)) == pytest.approx((u - low) / (high - low), rel=1e-5)


def test_the_uniform_scheme_is_uniform_whatever_the_tokens():
    objective = Objective(BOTH, weighting_scheme="uniform", timestep_uniform_prob=0.0)
    levels = torch.stack([ltx2_sft.draw_sigma(objective, keys.fold_in(KEY, i), 4096) for i in range(2000)])
    distance = (levels.sort().values - torch.linspace(FLOOR, 1, 2000)).abs().max()
    assert float(distance) < 1.95 / math.sqrt(2000)


# --- the model's inputs ---------------------------------------------------------------------------------------


def test_a_stream_is_noised_at_one_level_a_sample_and_placed_by_its_frame_rate():
    cfg, of = config(), batch(3)
    draws = drawn(cfg, Objective(BOTH), of)
    inputs, found = training_inputs(cfg, of, {}, draws, torch.float32)
    for name, tokens in (("video", video_tokens), ("audio", audio_tokens)):
        clean, noise, sigma = tokens(cfg, of.targets[name]), tokens(cfg, draws.noise[name]), draws.sigmas[name]
        noisy = (1 - sigma[:, None, None]) * clean + sigma[:, None, None] * noise
        torch.testing.assert_close(inputs[name], noisy, rtol=1e-6, atol=1e-6)
        assert torch.equal(inputs[f"{name}_timestep"], 1000 * sigma[:, None])
        assert inputs[f"{name}_timestep"].shape == inputs[f"{name}_level"].shape == (3, 1)
        assert torch.equal(found[name].target, noise - clean) and found[name].loss_mask.all()
        assert torch.equal(inputs[f"{name}_text"], of.text) and f"{name}_text_mask" not in inputs
    assert torch.equal(inputs["video_positions"], video_positions(cfg, (2, 4, 4), 25.0))
    assert torch.equal(inputs["audio_positions"], audio_positions(cfg, 5))


@pytest.mark.parametrize("fps, rate", [([12.0] * 2, 12.0), ([None, None], 24.0), ([], 24.0), ([12.0, None], None)])
def test_the_frame_rate_of_every_sample_reaches_the_positions(fps, rate):
    cfg, of = config(), dataclasses.replace(batch(2), fps=fps)
    seen = training_inputs(cfg, of, {}, drawn(cfg, Objective(BOTH), of), torch.float32)[0]["video_positions"]
    each = [rate] * 2 if rate is not None else [12.0, 24.0]
    expected = torch.cat([video_positions(cfg, (2, 4, 4), r) for r in each])
    assert torch.equal(seen.expand(2, -1, -1, -1), expected) and seen.shape[0] == (1 if rate is not None else 2)


def test_a_given_stream_is_clean_at_level_0_and_has_no_loss():
    cfg, of = config(LTX23, cross_attention_dim=32, caption_channels=9), batch(2)
    wide, narrow = cfg.stream("video").text_dim, cfg.stream("audio").text_dim
    texts = {"text": random("w", 2, 4, wide), "audio_text": random("n", 2, 4, narrow)}
    of = dataclasses.replace(of, conditions=texts, audio_text_lens=[4, 4])
    objective = Objective({"video": 1.0}, given="audio")
    draws = drawn(cfg, objective, of)
    inputs, _ = training_inputs(cfg, of, {}, draws, torch.float32)
    assert torch.equal(inputs["audio"], audio_tokens(cfg, of.targets["audio"]))
    assert not inputs["audio_timestep"].any() and not inputs["audio_level"].any() and inputs["video_level"].all()
    assert torch.equal(inputs["audio_text"], texts["audio_text"]) and torch.equal(inputs["video_text"], texts["text"])
    params = specs.init(ltx2.param_specs(cfg), KEY)
    assert ltx2_sft.batch_loss(params, cfg, objective, of, {}, draws, dtype=torch.float32).keys() == {"video"}


def test_text_beyond_its_length_is_masked_and_dropped_captions_become_the_empty_one():
    cfg, of = config(), batch(4, lens=[4, 2, 3, 4])
    draws = drawn(cfg, Objective(BOTH), of)
    inputs, _ = training_inputs(cfg, of, {}, draws, torch.float32)
    assert inputs["video_text_mask"].sum(1).tolist() == inputs["audio_text_mask"].sum(1).tolist() == [4, 2, 3, 4]
    draws = dataclasses.replace(draws, dropped=torch.tensor([True, False, False, True]))
    empty = {"video": random("e", 6, 9), "audio": random("f", 6, 9)}
    inputs, _ = training_inputs(cfg, of, empty, draws, torch.float32)
    for name in SHAPES:
        assert torch.equal(inputs[f"{name}_text"][[0, 3]], empty[name].expand(2, -1, -1))
        assert torch.equal(inputs[f"{name}_text"][[1, 2], :4], of.text[[1, 2]])
        assert inputs[f"{name}_text_mask"].sum(1).tolist() == [6, 2, 3, 6]


def test_what_a_mask_hides_changes_nothing():
    cfg, of = config(), batch(2, lens=[2, 4])
    params, objective = random_params(cfg), Objective(BOTH)
    draws = drawn(cfg, objective, of)
    poisoned = dataclasses.replace(of, conditions={"text": of.text.clone()})
    poisoned.text[0, 2:] = 1e3
    a, b = (ltx2_sft.batch_loss(params, cfg, objective, x, {}, draws, dtype=torch.float32) for x in (of, poisoned))
    assert all(torch.equal(a[k], b[k]) for k in BOTH)


# --- the loss -------------------------------------------------------------------------------------------------


def random_params(cfg) -> dict[str, torch.Tensor]:
    """Every leaf random, so that every one has a gradient."""
    draw = lambda k, s: keys.normal(keys.fold_in(KEY, k), s.shape) * 0.1 + ("norm" in k)  # noqa: E731
    return {k: draw(k, s) for k, s in ltx2.param_specs(cfg).items()}


@pytest.mark.parametrize("modality", ["audio_video", "video", "audio"])
def test_the_loss_of_a_fresh_model_is_2_for_each_stream(modality):
    """A zero head predicts velocity 0, and E|noise - x0|^2 is 2 per element for latents of unit variance."""
    cfg = config(modality=modality)
    names, n = tuple(s.name for s in cfg.streams), 64
    of, params = batch(n, names), specs.init(ltx2.param_specs(cfg), KEY)
    objective = Objective({name: 1.0 for name in names})
    errors = ltx2_sft.batch_loss(params, cfg, objective, of, {}, drawn(cfg, objective, of), dtype=torch.float32)
    assert errors.keys() == set(names)
    for name, error in errors.items():
        count = of.targets[name].numel()
        # (noise - x0)^2 is 2 chi^2_1, of variance 8: five standard deviations of the mean.
        assert error.shape == (n,) and abs(float(error.sum()) / count - 2) < 5 * math.sqrt(8 / count)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 99), st.sampled_from(sorted(WEIGHTS)), st.booleans())
def test_errors_are_means_over_what_has_a_loss_times_all_elements(seed, weighting, precondition):
    k = keys.key(seed)
    velocity, target = (keys.normal(keys.fold_in(k, n), (3, 5, 4), dtype=torch.float64) for n in "vt")
    sigma = 0.05 + 0.9 * keys.uniform(keys.fold_in(k, "s"), (3,), dtype=torch.float64)
    mask = keys.uniform(keys.fold_in(k, "m"), (3, 5)) < 0.5
    mask[:, 0], mask[1] = True, True
    given_ = Conditioned(velocity, sigma[:, None], mask, velocity, target)
    objective = Objective(BOTH, loss_weighting=weighting, precondition_outputs=precondition)
    got = sample_errors(objective, velocity, given_, sigma)
    for i in range(3):
        each = (velocity[i].float() - target[i])[mask[i]].square()
        scale = WEIGHTS[weighting](sigma[i]) * (sigma[i] ** 2 if precondition else 1)
        # float64, but for the velocity's rounding to float32, which both sides have.
        assert float(got[i]) == pytest.approx(float(scale * each.mean() * 20), rel=1e-9)


@pytest.mark.parametrize("sizes", [SIZES, LTX23], ids=["2.0", "2.3"])
def test_without_influence_of_the_sound_the_video_learns_as_a_model_of_its_own(sizes):
    """Attention to the sound that adds nothing: loss and gradients are those of the video-only model. With it, not."""
    both = config(sizes, caption_channels=9)
    alone = dataclasses.replace(both, modality="video")
    texts = {k: random(k, 2, 4, both.stream(s).text_dim) for k, s in (("text", "video"), ("audio_text", "audio"))}
    of = dataclasses.replace(batch(2), conditions=texts, audio_text_lens=[4, 4])
    params = random_params(both)
    deaf = {k: torch.zeros_like(p) if "audio_to_video_attn.to_out" in k else p for k, p in params.items()}

    def run(cfg, tree, weights):
        leaves = {k: tree[k].double().requires_grad_() for k in ltx2.param_specs(cfg)}
        objective = Objective(weights)
        draws = drawn(cfg, objective, of)
        errors = ltx2_sft.batch_loss(leaves, cfg, objective, of, {}, draws, dtype=torch.float64)["video"]
        errors.sum().backward()
        return errors, {k: p.grad for k, p in leaves.items() if k in ltx2.param_specs(alone)}

    errors, grads = run(alone, params, {"video": 1.0})
    same, equal = run(both, deaf, BOTH)
    other, _ = run(both, params, BOTH)
    # Float64 blocks; RoPE and timesteps are float32 in both.
    torch.testing.assert_close(same, errors, rtol=1e-9, atol=0)
    torch.testing.assert_close(equal, grads, rtol=1e-7, atol=1e-9)
    assert not torch.allclose(other, errors, rtol=1e-4)


def test_the_target_velocity_leads_back_to_the_clean_latents():
    cfg, of = config(), batch(3)
    draws = drawn(cfg, Objective(BOTH), of)
    inputs, found = training_inputs(cfg, of, {}, draws, torch.float32)
    clean = ltx2.clean_estimates(cfg, inputs, {name: found[name].target for name in BOTH})
    for name, tokens in (("video", video_tokens), ("audio", audio_tokens)):
        torch.testing.assert_close(clean[name], tokens(cfg, of.targets[name]), rtol=1e-5, atol=1e-5)
        errors = sample_errors(Objective(BOTH), found[name].target, found[name], draws.sigmas[name])
        assert not errors.any()
