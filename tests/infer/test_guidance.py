"""Classifier-free guidance: the formula, both ways to evaluate it, what is never evaluated, and what is refused."""

import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from infer.guidance import guide, guided
from infer.samplers import sample

LAW = settings(max_examples=25, deadline=None, derandomize=True)
TIMESTEP = torch.tensor(500.0)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def model(calls=None):
    """Depends on every channel and sample by sample; notes the batch and the mean of the text of each call."""

    def velocity_fn(x, sigma, timestep, conditions):
        if calls is not None:
            calls.append((x.shape[0], float(conditions["text"].mean())))
        text, image = conditions["text"].mean(dim=1), conditions["image"]
        return torch.tanh(x * sigma + text[:, None] * image) * timestep / 1000

    return velocity_fn


def branches(seed, batch, length, width, dtype=torch.float32):
    image = normal(seed + 5, batch, 3, width, dtype=dtype)
    cond, uncond = (
        {"text": normal(seed + i, batch, length, width, dtype=dtype), "image": image * (1 - i)} for i in range(2)
    )
    return cond, uncond


@LAW
@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 6),
    width=st.integers(1, 5),
    scale=st.floats(0.0, 12.0).filter(lambda s: s != 1.0),
    rescale=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**30),
)
def test_batched_equals_two_passes_and_the_formula(batch, length, width, scale, rescale, seed):
    cond, uncond = branches(seed, batch, length, width, torch.float64)
    x, fn = normal(seed + 9, batch, 3, width, dtype=torch.float64), model()
    one, two = (
        guided(fn, cond, uncond, scale, batched=b, rescale=rescale)(x, 0.5, TIMESTEP) for b in (True, False)
    )
    # A batched mean may sum in another order: float64 rounding, times the scale.
    torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)
    u, c = fn(x, 0.5, TIMESTEP, uncond), fn(x, 0.5, TIMESTEP, cond)
    if rescale == 0.0:
        torch.testing.assert_close(two, (1 - scale) * u + scale * c, rtol=1e-11, atol=1e-11)


@LAW
@given(
    shape=st.lists(st.integers(2, 4), min_size=2, max_size=4),
    scale=st.floats(1.1, 12.0),
    rescale=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**30),
)
def test_rescale_equals_diffusers_and_matches_deviations(shape, scale, rescale, seed):
    cond, uncond = normal(seed, *shape, dtype=torch.float64), normal(seed + 1, *shape, dtype=torch.float64)
    plain = guide(cond, uncond, scale)
    ours = guide(cond, uncond, scale, rescale)
    torch.testing.assert_close(ours, rescale_noise_cfg(plain, cond, guidance_rescale=rescale), rtol=1e-12, atol=1e-12)
    full = guide(cond, uncond, scale, 1.0)
    torch.testing.assert_close(full.flatten(1).std(1), cond.flatten(1).std(1), rtol=1e-12, atol=1e-12)


def test_rescaling_a_constant_field_stays_finite():
    cond, uncond = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
    assert torch.equal(guide(cond, uncond, 4.0, 0.7), torch.full((2, 3, 4), 4.0))


@pytest.mark.parametrize("batched, calls_wanted", [(True, [4]), (False, [2, 2])])
def test_calls_of_each_way(batched, calls_wanted):
    calls = []
    cond, uncond = branches(0, 2, 3, 4)
    guided(model(calls), cond, uncond, 5.0, batched=batched)(normal(1, 2, 3, 4), 0.5, TIMESTEP)
    assert [n for n, _ in calls] == calls_wanted


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1])
def test_scale_one_never_evaluates_the_unconditional_branch(batched, scale):
    calls = []
    cond, uncond = branches(0, 2, 3, 4)
    uncond["text"] = torch.full((2, 7, 4), float("nan"))  # would poison the result, and has another length
    x = normal(1, 2, 3, 4)
    out = guided(model(calls), cond, uncond, scale, batched=batched)(x, 0.5, TIMESTEP)
    assert calls == [(2, float(cond["text"].mean()))]
    assert torch.equal(out, model()(x, 0.5, TIMESTEP, cond))


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("batched", [True, False])
def test_half_precision_outputs_are_combined_in_float32(batched, scale):
    cond, uncond = branches(0, 2, 3, 4)
    x = normal(1, 2, 3, 4)

    def half(*args):
        return model()(*args).bfloat16()

    out = guided(half, cond, uncond, scale, batched=batched)(x, 0.5, TIMESTEP)
    u, c = (half(x, 0.5, TIMESTEP, d).float() for d in (uncond, cond))
    assert out.dtype == torch.float32
    # Computed from the same bfloat16 values, exact to float32 rounding; bfloat16 arithmetic would be 1e-2 off.
    torch.testing.assert_close(out, u + scale * (c - u), rtol=1e-6, atol=1e-6)


def test_two_passes_take_branches_of_unlike_length_and_batched_refuses():
    cond, uncond = branches(0, 2, 3, 4)
    uncond["text"] = normal(3, 2, 7, 4)
    x = normal(1, 2, 3, 4)
    fn = model()
    out = guided(fn, cond, uncond, 2.0, batched=False)(x, 0.5, TIMESTEP)
    wanted = guide(fn(x, 0.5, TIMESTEP, cond), fn(x, 0.5, TIMESTEP, uncond), 2.0)
    assert torch.equal(out, wanted)
    with pytest.raises(UserError, match=r"'text': cond has shape \[2, 3, 4\], uncond \[2, 7, 4\]; pad"):
        guided(fn, cond, uncond, 2.0, batched=True)


@pytest.mark.parametrize("batched", [True, False])
def test_every_channel_that_does_not_fit_is_listed(batched):
    cond, uncond = branches(0, 2, 3, 4)
    uncond["txet"] = uncond.pop("text")
    with pytest.raises(UserError, match=r"'txet': only in uncond(.|\n)*'text': only in cond"):
        guided(model(), cond, uncond, 2.0, batched=batched)


def test_batched_refuses_mixed_dtypes_and_another_batch():
    cond, uncond = branches(0, 2, 3, 4)
    with pytest.raises(UserError, match="'image': cond is torch.float32"):
        guided(model(), cond, uncond | {"image": uncond["image"].double()}, 2.0, batched=True)
    with pytest.raises(UserError, match=r"batch 3(.|\n)*'text': batch 2(.|\n)*'image': batch 2"):
        guided(model(), cond, uncond, 2.0, batched=True)(normal(1, 3, 3, 4), 0.5, TIMESTEP)
    with pytest.raises(UserError, match="velocity has batch 2, expected 2 x 2"):
        guided(lambda x, *_: x[:2], cond, uncond, 2.0, batched=True)(normal(1, 2, 3, 4), 0.5, TIMESTEP)


@pytest.mark.parametrize(
    "scale, rescale, part",
    [
        (True, 0.0, "scale is True"),
        ("5", 0.0, "scale is '5'"),
        (-1.0, 0.0, "scale is -1.0, allowed is a number >= 0"),
        (float("inf"), 0.0, "scale is inf"),
        (2.0, 1.5, "rescale is 1.5, allowed is a number 0..1"),
    ],
)
def test_bad_numbers_are_refused(scale, rescale, part):
    cond, uncond = branches(0, 2, 3, 4)
    with pytest.raises(UserError, match=part):
        guided(model(), cond, uncond, scale, batched=True, rescale=rescale)


def test_unequal_velocities_are_refused_instead_of_broadcast():
    with pytest.raises(UserError, match=r"cond has shape \[2, 3\], uncond has \[1, 3\]"):
        guide(torch.zeros(2, 3), torch.zeros(1, 3), 2.0)


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_guidance_fits_into_the_samplers(name):
    """Scale 0 samples the unconditional model, scale 1 the conditional one."""
    cond, uncond = branches(0, 2, 3, 4)
    x, fn = normal(1, 2, 3, 4), model()
    for scale, branch in ((0.0, uncond), (1.0, cond)):
        out = sample(name, guided(fn, cond, uncond, scale, batched=True), x, 4, 3.0)
        wanted = sample(name, lambda x, s, t, branch=branch: fn(x, s, t, branch), x, 4, 3.0)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
