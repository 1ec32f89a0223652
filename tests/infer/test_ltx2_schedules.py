"""LTX-2's schedules and samplers: Diffusers' numbers, orders of convergence, and what is exact."""

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from infer.ltx2_schedules import (
    LTX2_SAMPLERS,
    distilled_schedule,
    gradient_estimation,
    res_2s,
    shift_exponent,
    shifted_schedule,
)
from infer.samplers import euler
from infer.schedules import from_sigmas

LAW = settings(max_examples=25, deadline=None, derandomize=True)
TOKEN_COUNT = st.integers(1, 40_000)


def diffusers_schedule(steps, tokens, terminal=0.1):
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift_terminal=terminal, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024,
        max_image_seq_len=4096, time_shift_type="exponential",
    )  # fmt: skip
    mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler


# --- schedules ----------------------------------------------------------------------------------------------------


@LAW
@given(tokens=TOKEN_COUNT)
def test_the_shift_is_diffusers_line_through_the_two_published_points(tokens):
    assert shift_exponent(tokens) == pytest.approx(calculate_shift(tokens, 1024, 4096, 0.95, 2.05), rel=1e-12)
    assert (shift_exponent(1024), shift_exponent(4096)) == pytest.approx((0.95, 2.05), rel=1e-12)


@LAW
@given(steps=st.integers(2, 60), tokens=st.integers(1, 8192), terminal=st.sampled_from([0.1, 0.02, None]))
def test_the_shifted_schedule_is_diffusers(steps, tokens, terminal):
    ours, theirs = shifted_schedule(steps, tokens, terminal=terminal), diffusers_schedule(steps, tokens, terminal)
    # Float32 in both, in another order of operations; 1 - sigma divided by as little as 0.01 magnifies one rounding.
    torch.testing.assert_close(ours.sigmas, theirs.sigmas, rtol=0, atol=3e-6)
    torch.testing.assert_close(ours.timesteps, theirs.timesteps, rtol=0, atol=3e-3)
    assert ours.sigmas[0] == 1.0 and (terminal is None or float(ours.sigmas[-2]) == pytest.approx(terminal, abs=1e-6))


def test_the_token_count_left_out_is_the_official_default():
    assert torch.equal(shifted_schedule(30).sigmas, shifted_schedule(30, 4096).sigmas)
    assert shifted_schedule(1).sigmas.tolist() == [1.0, 0.0]
    assert shifted_schedule(10, 8000).sigmas[5] > shifted_schedule(10, 1000).sigmas[5], "more tokens, more noise"


def test_the_distilled_schedules_are_the_published_numbers():
    one, two = distilled_schedule(), distilled_schedule("two")
    assert torch.equal(one.sigmas, torch.tensor([*DISTILLED_SIGMA_VALUES, 0.0]))
    assert torch.equal(two.sigmas, torch.tensor([*STAGE_2_DISTILLED_SIGMA_VALUES, 0.0]))
    assert (one.steps, two.steps) == (8, 3) and two.timesteps[0] == 909.375


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: shifted_schedule(0), "steps is 0, allowed is an integer >= 1"),
        (lambda: shifted_schedule(4, 0), "tokens is 0, allowed is an integer >= 1"),
        (lambda: shifted_schedule(4, 9, terminal=1.0), "terminal is 1.0, allowed is a number between 0 and 1"),
        (lambda: distilled_schedule("tow"), r"stage is 'tow' \(did you mean 'two'\?\), allowed: one, two"),
        (lambda: res_2s(None, torch.zeros(1), distilled_schedule(), start=8), "start is 8, allowed is a step"),
        (lambda: gradient_estimation(None, torch.zeros(1), distilled_schedule(), gamma="2"), "gamma is '2', allowed"),
    ],
)
def test_requests_that_cannot_be(make, message):
    with pytest.raises(UserError, match=message):
        make()


# --- samplers -----------------------------------------------------------------------------------------------------


def gaussian_velocity(mean, std):
    """The exact velocity for data N(mean, std^2), and where its flow takes x from sigma = 1 to a sigma."""

    def velocity(x, sigma, timestep):
        variance = (1 - sigma) ** 2 * std**2 + sigma**2
        slope = (sigma - (1 - sigma) * std**2) / variance
        return -mean + slope * (x - (1 - sigma) * mean)

    def flow(x, sigma):
        return (1 - sigma) * mean + math.sqrt((1 - sigma) ** 2 * std**2 + sigma**2) * x

    return velocity, flow


def errors(run, counts):
    """Largest error against the exact flow from sigma = 1 to just above 0, for ever more steps."""
    velocity, flow = gaussian_velocity(0.7, 0.4)
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)[None]
    out = []
    for n in counts:
        seen = {}

        def noting(x, sigma, timestep, seen=seen):
            seen[sigma] = x
            return velocity(x, sigma, timestep)

        run(noting, x, from_sigmas(np.linspace(1, 0.25, n + 1)))
        out.append(float((seen[0.25] - flow(x, 0.25)).abs().max()))
    return out


def test_orders_of_convergence():
    """Halving the step divides Euler's error by 2 and the second-order samplers' by 4."""
    counts = (32, 64)
    first, second = errors(euler, counts), errors(res_2s, counts)
    assert first[0] / first[1] == pytest.approx(2, rel=0.1)
    assert second[0] / second[1] == pytest.approx(4, rel=0.15)
    assert second[0] < first[0] / 20
    adams = errors(lambda f, x, s: gradient_estimation(f, x, s, gamma=1.5), counts)
    # On equal steps 1.5 v - 0.5 v_before is Adams-Bashforth's second order, started by one Euler step (also h^2).
    assert adams[0] / adams[1] == pytest.approx(4, rel=0.15)


@LAW
@given(seed=st.integers(0, 999), steps=st.integers(1, 8))
def test_gradient_estimation_is_its_recurrence(seed, steps):
    g = torch.Generator().manual_seed(seed)
    x = start = torch.randn(2, 5, generator=g, dtype=torch.float64)
    weight = torch.randn(5, 5, generator=g, dtype=torch.float64) / 3
    field = lambda x, sigma, timestep: torch.tanh(x @ weight) + sigma  # noqa: E731
    schedule = shifted_schedule(steps, 2000)
    sigmas, before = schedule.sigmas.tolist(), None
    for i in range(steps):
        v = field(x, sigmas[i], None)
        bar = v if before is None or i == steps - 1 else 2 * v - before
        x, before = x + (sigmas[i + 1] - sigmas[i]) * bar, v
    torch.testing.assert_close(gradient_estimation(field, start, schedule), x, rtol=1e-12, atol=1e-12)
    plain = gradient_estimation(field, start, schedule, gamma=1.0)
    torch.testing.assert_close(plain, euler(field, start, schedule), rtol=1e-12, atol=1e-12)


def test_res_2s_is_exact_where_x0_is_linear_in_log_sigma():
    """With x0 = a + b log sigma the flow has a closed form: x = x0 + b + (x_1 - a - b) sigma from sigma = 1."""
    a, b, x = 0.3, -0.8, torch.tensor([[1.5, -0.4]], dtype=torch.float64)
    seen = {}

    def velocity(x, sigma, timestep):
        seen[sigma] = x
        return (x - (a + b * math.log(sigma))) / sigma

    schedule = distilled_schedule()
    res_2s(velocity, x, schedule)
    sigma = schedule.sigmas.tolist()[-2]
    exact = a + b * math.log(sigma) + b + (x - a - b) * sigma
    torch.testing.assert_close(seen[sigma], exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LTX2_SAMPLERS)
def test_every_sampler_fits_the_seam(name):
    """A constant x0 is reached exactly; timesteps are 1000 sigma; progress, start, dtypes and shapes as elsewhere."""
    x0, calls, progress = torch.randn(2, 3), [], []

    def velocity(x, sigma, timestep):
        calls.append((sigma, float(timestep), x.dtype))
        return (x - x0) / sigma

    schedule, noise = distilled_schedule("two"), torch.randn(2, 3, dtype=torch.float64)
    out = LTX2_SAMPLERS[name](velocity, noise, schedule, progress=lambda *done: progress.append(done))
    torch.testing.assert_close(out, x0.double(), rtol=1e-9, atol=1e-9)
    assert progress == [(1, 3), (2, 3), (3, 3)] and len(calls) == (5 if name == "res_2s" else 3)
    assert all(t == pytest.approx(1000 * sigma, rel=1e-6) for sigma, t, _ in calls)
    calls.clear()
    out = LTX2_SAMPLERS[name](velocity, torch.randn(2, 3, dtype=torch.bfloat16), schedule, start=2)
    assert out.dtype == torch.float32 and len(calls) == 1 and calls[0][0] == schedule.sigmas[2]
    with pytest.raises(UserError, match="velocity has shape"):
        LTX2_SAMPLERS[name](lambda x, s, t: x[:1], torch.randn(2, 3), schedule)
