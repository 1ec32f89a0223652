"""Schedules and samplers: equal to Diffusers step by step, and convergent to the exact flow where it is known."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from core.trees import map_tree, tensors
from infer import samplers, schedules
from infer.samplers import SAMPLERS, euler, euler_step, sample, unipc, unipc_init, unipc_step
from infer.schedules import Schedule, flow_euler, flow_unipc, from_sigmas, from_timesteps

LAW = settings(max_examples=25, deadline=None, derandomize=True)
STEPS = st.integers(1, 30)
SHIFT = st.floats(1.0, 12.0)
SHAPE = st.lists(st.integers(1, 5), min_size=2, max_size=5)  # Diffusers' UniPC needs a batch and a channel axis
SEED = st.integers(0, 2**31)


def affine_velocity(seed, width, dtype):
    """A fixed random affine field of (x, sigma) that mixes the last axis; its norm keeps trajectories bounded."""
    g = torch.Generator().manual_seed(seed)
    a = (torch.randn(width, width, generator=g, dtype=torch.float64) / width**0.5).to(dtype)
    b = torch.randn(2, width, generator=g, dtype=torch.float64).to(dtype)
    return lambda x, sigma, timestep: x @ a + sigma * b[0] + b[1]


def noise(seed, shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def diffusers_unipc(steps, shift, **options):
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, num_train_timesteps=1000, **options
    )
    scheduler.set_timesteps(steps)
    return scheduler


def diffusers_trajectory(scheduler, velocity_fn, x, start=0, stop=None):
    """Samples after steps start..stop-1 (all, by default)."""
    out = []
    scheduler.set_begin_index(start)
    for i, t in list(enumerate(scheduler.timesteps))[start:stop]:
        velocity = velocity_fn(x, float(scheduler.sigmas[i]), t)
        x = scheduler.step(velocity, t, x, return_dict=False)[0]
        out.append(x)
    return out


def unipc_trajectory(schedule, velocity_fn, x, **options):
    state, out = unipc_init(x, schedule, **options), []
    for i in range(state["step"], schedule.steps):
        state = unipc_step(state, velocity_fn(state["x"], float(schedule.sigmas[i]), schedule.timesteps[i]))
        out.append(state["x"])
    return out


def euler_trajectory(schedule, velocity_fn, x):
    sigmas, out = schedule.sigmas.tolist(), []
    for i in range(schedule.steps):
        x = euler_step(x, velocity_fn(x, sigmas[i], schedule.timesteps[i]), sigmas[i], sigmas[i + 1])
        out.append(x)
    return out


def worst(ours, theirs):
    """Largest difference over all steps, each relative to the largest value of that step."""
    assert len(ours) == len(theirs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


# --- schedules ---


@LAW
@given(steps=STEPS, shift=st.floats(0.2, 12.0), table=st.sampled_from([1000, 700]))
def test_euler_schedule_equals_diffusers_to_the_bit(steps, shift, table):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift, num_train_timesteps=table)
    scheduler.set_timesteps(steps)
    ours = flow_euler(steps, shift, table)
    assert torch.equal(ours.sigmas, scheduler.sigmas)
    assert torch.equal(ours.timesteps, scheduler.timesteps)


@LAW
@given(steps=STEPS, shift=st.floats(0.2, 12.0))
def test_unipc_schedule_equals_diffusers_to_the_bit(steps, shift):
    scheduler = diffusers_unipc(steps, shift)
    ours = flow_unipc(steps, shift)
    assert torch.equal(ours.sigmas, scheduler.sigmas)
    assert ours.timesteps.dtype == torch.float32
    assert torch.equal(ours.timesteps.long(), scheduler.timesteps)
    assert torch.equal(ours.timesteps, ours.timesteps.round())


@LAW
@given(sigma=st.floats(0.0, 1.0), s=st.floats(0.1, 20.0))
def test_shift_is_a_monotone_bijection_of_the_unit_interval(sigma, s):
    shifted = schedules.shift(sigma, s)
    assert 0.0 <= shifted <= 1.0 + 1e-12
    assert (shifted >= sigma - 1e-12) == (s >= 1.0) or abs(shifted - sigma) < 1e-9
    assert schedules.shift(shifted, 1 / s) == pytest.approx(sigma, abs=1e-9)
    assert schedules.shift(sigma, 1.0) == sigma
    assert float(schedules.shift(torch.tensor(sigma, dtype=torch.float64), s)) == shifted


def test_explicit_schedules_keep_what_is_given():
    a = from_sigmas([1.0, 0.9375, 0.725, 0.421875])
    assert a.sigmas.tolist() == [1.0, 0.9375, np.float32(0.725), 0.421875, 0.0]
    assert a.timesteps.tolist() == [1000.0, 937.5, 725.0, 421.875]
    assert torch.equal(from_sigmas(a.sigmas).sigmas, a.sigmas), "a final 0 is not appended twice"
    b = from_timesteps([1000, 757, 522])
    assert b.timesteps.tolist() == [1000.0, 757.0, 522.0] and b.steps == 3
    assert b.sigmas.tolist() == [1.0, np.float32(0.757), np.float32(0.522), 0.0]


@pytest.mark.parametrize("make", [flow_euler, flow_unipc])
@pytest.mark.parametrize(
    "steps, shift, part",
    [
        (0, 3.0, "steps is 0"),
        (True, 3.0, "steps is True"),
        (4.0, 3.0, "steps is 4.0"),
        (4, 0.0, "shift is 0.0"),
        (4, -1.0, "shift is -1.0"),
        (4, float("nan"), "shift is nan"),
        (4, True, "shift is True"),
        (4, "3", "shift is '3'"),
    ],
)
def test_bad_schedule_requests_are_refused(make, steps, shift, part):
    with pytest.raises(UserError, match=part):
        make(steps, shift)


def test_bad_requests_are_listed_together():
    with pytest.raises(UserError, match=r"steps is 0(.|\n)*num_train_timesteps is True(.|\n)*shift is 0"):
        flow_euler(0, 0, True)


@pytest.mark.parametrize(
    "make, part",
    [
        (lambda: from_sigmas([]), "non-empty"),
        (lambda: from_sigmas(["x"]), "list of numbers"),
        (lambda: from_sigmas([[1.0, 0.5]]), "list of numbers"),
        (lambda: from_sigmas([0.0]), "N >= 1"),
        (lambda: from_sigmas([0.5, 0.7]), r"sigmas\[1\] is 0.69\d* after sigmas\[0\] = 0.5"),
        (lambda: from_sigmas([0.5, 0.5]), r"sigmas\[1\]"),
        (lambda: from_sigmas([1.5, 0.5]), r"sigmas\[0\] is 1.5"),
        (lambda: from_sigmas([float("nan"), 0.5]), r"sigmas\[0\] is nan"),
        (lambda: from_timesteps([1000, 250, 500]), r"timesteps\[2\] is 500.0 after timesteps\[1\] = 250.0"),
        (lambda: flow_unipc(30, 1e6), "smaller shift"),
        (lambda: Schedule(torch.ones(2), torch.ones(2)), "2 and 2"),
        (lambda: Schedule(torch.tensor([1.0, 0.5]), torch.ones(1)), "must be 0"),
        (lambda: Schedule(torch.zeros(2, dtype=torch.float64), [1.0]), r"sigmas: (.|\n)*timesteps: expected a tensor"),
    ],
)
def test_what_is_no_schedule_is_refused(make, part):
    with pytest.raises(UserError, match=part):
        make()


def test_schedules_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        flow_euler(2, 1.0).sigmas = torch.zeros(3)


# --- Euler ---


@LAW
@given(steps=STEPS, shift=SHIFT, shape=SHAPE, seed=SEED)
def test_euler_equals_diffusers_to_the_bit(steps, shift, shape, seed):
    """Same float32 operations in the same order: no tolerance."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    velocity_fn, x = affine_velocity(seed, shape[-1], torch.float32), noise(seed, shape, torch.float32)
    theirs = diffusers_trajectory(scheduler, velocity_fn, x)
    schedule = flow_euler(steps, shift)
    ours = euler_trajectory(schedule, velocity_fn, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(euler(velocity_fn, x, schedule), theirs[-1])


@LAW
@given(steps=STEPS, shift=SHIFT, shape=SHAPE, seed=SEED)
def test_euler_in_float64(steps, shift, shape, seed):
    """Diffusers rounds the sample to float32 at every step even for float64 input: 30 steps x 6e-8, with growth < 10.
    The exact reference is the sum written out, to float64 rounding."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    velocity_fn, x = affine_velocity(seed, shape[-1], torch.float64), noise(seed, shape, torch.float64)
    ours = euler_trajectory(flow_euler(steps, shift), velocity_fn, x)
    assert ours[-1].dtype == torch.float64
    assert worst(ours, diffusers_trajectory(scheduler, velocity_fn, x)) < 2e-5
    exact = x.numpy()
    sigmas = scheduler.sigmas.numpy().astype(np.float64)
    for s, s_next in zip(sigmas, sigmas[1:], strict=False):
        exact = exact + (s_next - s) * velocity_fn(torch.from_numpy(exact), float(s), None).numpy()
    assert worst(ours[-1:], [torch.from_numpy(exact)]) < 1e-12


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_one_step_is_exactly_the_x0_prediction(name):
    x = noise(1, [2, 3, 4], torch.float32)
    velocity_fn = affine_velocity(2, 4, torch.float32)
    schedule = SAMPLERS[name].schedule(1, 5.0)
    sigma = float(schedule.sigmas[0])
    assert (sigma == 1.0) == (name == "euler")
    x0 = x - sigma * velocity_fn(x, sigma, None)
    assert torch.equal(sample(name, velocity_fn, x, 1, 5.0), x0)


# --- UniPC ---


@LAW
@given(
    steps=STEPS,
    shift=SHIFT,
    shape=SHAPE,
    seed=SEED,
    order=st.integers(1, 3),
    solver_type=st.sampled_from(["bh1", "bh2"]),
    lower_order_final=st.booleans(),
    disable_corrector=st.lists(st.integers(0, 6), max_size=3),
    upcast=st.booleans(),
)
def test_unipc_equals_diffusers_step_by_step(
    steps, shift, shape, seed, order, solver_type, lower_order_final, disable_corrector, upcast
):
    """float64 samples. Stock Diffusers keeps sigmas, and so all solver coefficients, in float32: about 3e-7 apart.
    With its sigmas (the same values) held in float64 its arithmetic is float64 throughout: rounding only, amplified
    by the difference quotients of small steps."""
    options = {
        "solver_type": solver_type,
        "lower_order_final": lower_order_final,
        "disable_corrector": disable_corrector,
    }
    scheduler = diffusers_unipc(steps, shift, solver_order=order, **options)
    if upcast:
        scheduler.sigmas = scheduler.sigmas.double()
    velocity_fn, x = affine_velocity(seed, shape[-1], torch.float64), noise(seed, shape, torch.float64)
    # In these cases Diffusers' last step divides infinities or inverts a singular matrix; ours takes the limit below.
    finite = solver_type == "bh2" and (lower_order_final or order == 1)
    theirs = diffusers_trajectory(scheduler, velocity_fn, x, stop=steps if finite else steps - 1)
    schedule = flow_unipc(steps, shift)
    ours = unipc_trajectory(schedule, velocity_fn, x, order=order, **options)
    if theirs:
        assert worst(ours[: len(theirs)], theirs) < (1e-11 if upcast else 5e-6)
    before, sigma = [x, *ours][-2], float(schedule.sigmas[-2])
    assert torch.equal(ours[-1], before - sigma * velocity_fn(before, sigma, None)), "sigma = 0 is the x0 prediction"


@LAW
@given(steps=STEPS, shift=SHIFT, shape=SHAPE, seed=SEED, order=st.integers(1, 3))
def test_unipc_equals_diffusers_in_float32(steps, shift, shape, seed, order):
    """30 steps of float32 rounding (6e-8 each) on both sides and Diffusers' float32 coefficients; seen: 7e-7."""
    velocity_fn, x = affine_velocity(seed, shape[-1], torch.float32), noise(seed, shape, torch.float32)
    theirs = diffusers_trajectory(diffusers_unipc(steps, shift, solver_order=order), velocity_fn, x)
    schedule = flow_unipc(steps, shift)
    ours = unipc_trajectory(schedule, velocity_fn, x, order=order)
    assert ours[-1].dtype == torch.float32
    assert worst(ours, theirs) < 1e-5
    assert torch.equal(unipc(velocity_fn, x, schedule, order=order), ours[-1])


@LAW
@given(steps=st.integers(2, 30), shift=SHIFT, order=st.integers(1, 3), data=st.data())
def test_samplers_start_in_the_middle(steps, shift, order, data):
    """Equal to Diffusers' begin index: the order warms up again and the first corrector has nothing to correct."""
    start = data.draw(st.integers(0, steps - 1))
    velocity_fn, x = affine_velocity(0, 3, torch.float64), noise(1, [2, 3], torch.float64)
    scheduler = diffusers_unipc(steps, shift, solver_order=order)
    scheduler.sigmas = scheduler.sigmas.double()
    theirs = diffusers_trajectory(scheduler, velocity_fn, x, start)
    schedule = flow_unipc(steps, shift)
    ours = unipc_trajectory(schedule, velocity_fn, x, order=order, start=start)
    assert worst(ours, theirs) < 1e-11
    rest = from_sigmas(schedule.sigmas[start:])
    assert torch.equal(unipc(velocity_fn, x, schedule, order=order, start=start), ours[-1])
    assert torch.equal(euler(velocity_fn, x, schedule, start=start), euler(velocity_fn, x, rest))


@LAW
@given(
    steps=st.integers(2, 30),
    shift=SHIFT,
    order=st.integers(1, 3),
    solver_type=st.sampled_from(["bh1", "bh2"]),
    start=st.integers(0, 1),
)
def test_noise_prediction_equals_diffusers(steps, shift, order, solver_type, start):
    """Diffusers has predict_x0=False for noise predictions only: it gets x + (1 - sigma) v. A step from sigma divides
    by 1 - sigma, which amplifies float64 rounding by 1e6 at the first step (and by the instability of that step: a
    change of x by 1e-15 moves the end by up to 3e-9) and by at most 300 at the second. Its last step would be NaN
    (0 * inf), so it goes to sigma = 1e-12 instead: ours at 0 is the limit."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="epsilon",
        use_flow_sigmas=True,
        flow_shift=shift,
        solver_order=order,
        solver_type=solver_type,
        predict_x0=False,
    )
    scheduler.set_timesteps(steps)
    scheduler.sigmas = scheduler.sigmas.double()
    scheduler.sigmas[-1] = 1e-12
    velocity_fn, x = affine_velocity(3, 3, torch.float64), noise(4, [2, 3], torch.float64)

    def noise_fn(x, sigma, timestep):
        return x + (1 - sigma) * velocity_fn(x, sigma, timestep)

    theirs = diffusers_trajectory(scheduler, noise_fn, x, start)
    options = {"order": order, "solver_type": solver_type, "predict_x0": False, "start": start}
    ours = unipc_trajectory(flow_unipc(steps, shift), velocity_fn, x, **options)
    assert worst(ours, theirs) < (1e-6 if start == 0 else 1e-9)


def test_explicit_schedules_from_sigma_one_run_as_in_diffusers():
    sigmas = [1.0, 0.9375, 0.8333, 0.625]
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)
    scheduler.set_timesteps(sigmas=np.array(sigmas))
    scheduler.sigmas = scheduler.sigmas.double()
    x, velocity = noise(5, [2, 3], torch.float64), affine_velocity(6, 3, torch.float64)
    # The sigma itself is left out: the schedules say 1 and 1 - 1e-6 there.
    velocity_fn = lambda x, sigma, t: velocity(x, 0.5, t)  # noqa: E731
    ours = unipc_trajectory(from_sigmas(sigmas), velocity_fn, x)
    assert worst(ours, diffusers_trajectory(scheduler, velocity_fn, x)) < 1e-11
    with pytest.raises(UserError, match=r"sigmas\[1\] is 0.99999"):
        unipc_init(x, from_sigmas([1.0, 0.9999999]))


@pytest.mark.parametrize("z", [-13.8, -1.0001, -0.9999, -1e-3, 1e-9, 0.3, 5.0])
def test_phi_functions_against_their_integral(z):
    """phi_k(z) = int_0^1 e^{(1-t) z} t^{k-1} / (k-1)! dt, by 40-point Gauss-Legendre (exact to rounding here)."""
    t, w = np.polynomial.legendre.leggauss(40)
    t, w = (t + 1) / 2, w / 2
    for k in range(1, 5):
        wanted = float((w * np.exp((1 - t) * z) * t ** (k - 1)).sum()) / math.factorial(k - 1)
        assert samplers._phi(k, z) == pytest.approx(wanted, rel=1e-12)


# --- convergence to the exact flow of Gaussian data ---

MEAN, STD = 0.7, 0.4


def gaussian_velocity(x, sigma, timestep):
    """E[noise - x0 | x_sigma = x] for x0 ~ N(MEAN, STD^2)."""
    u = (x - (1 - sigma) * MEAN) / ((1 - sigma) ** 2 * STD**2 + sigma**2)
    return sigma * u - (MEAN + (1 - sigma) * STD**2 * u)


def gaussian_flow(x, sigma, sigma_next):
    """The exact solution: the standardised variable is constant along the flow."""
    mean = [(1 - s) * MEAN for s in (sigma, sigma_next)]
    std = [((1 - s) ** 2 * STD**2 + s**2) ** 0.5 for s in (sigma, sigma_next)]
    return mean[1] + std[1] / std[0] * (x - mean[0])


X = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]


def end_error(name, steps, shift):
    schedule = SAMPLERS[name].schedule(steps, shift)
    out = sample(name, gaussian_velocity, X, steps, shift)
    return float((out - gaussian_flow(X, float(schedule.sigmas[0]), 0.0)).abs().max())


def interior_error(steps, **options):
    """Error at sigma = 0.2 after `steps` equal steps from 0.9 (None: Euler); away from the singular ends."""
    schedule = from_sigmas(torch.linspace(0.9, 0.2, steps + 1))
    sigmas = schedule.sigmas.tolist()
    if options:
        out = unipc_trajectory(schedule, gaussian_velocity, X, lower_order_final=False, **options)[steps - 1]
    else:
        out = euler_trajectory(schedule, gaussian_velocity, X)[steps - 1]
    return float((out - gaussian_flow(X, sigmas[0], sigmas[steps])).abs().max())


def test_many_steps_reach_the_exact_solution_and_unipc_is_there_first():
    """Errors at shift 1 fall like 1/N for Euler (0.13 at 10) and faster for UniPC (0.01 at 10)."""
    e = {(name, n): end_error(name, n, 1.0) for name in SAMPLERS for n in (10, 40, 320)}
    assert e["euler", 320] < 5e-3 and e["unipc", 320] < 2e-5
    assert e["euler", 40] / e["euler", 320] == pytest.approx(8, rel=0.1)
    assert e["unipc", 40] / e["unipc", 320] > 50
    assert all(e["unipc", n] < e["euler", n] / 8 for n in (10, 40, 320))


@pytest.mark.parametrize("solver_type", ["bh1", "bh2"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_unipc_p_has_order_p_plus_one(order, solver_type):
    """Halving the step divides the error by 2^(p+1) (UniPC, Theorem 3.1): seen 1.96 to 1.98, 2.8 to 2.9, 3.9 to 4.6. On
    much finer grids the two warm-up steps hold order 3 back to 3. Euler's exponent is 1."""
    coarse, fine = (interior_error(n, order=order, solver_type=solver_type) for n in (40, 80))
    rate = math.log2(coarse / fine)
    assert order + 0.7 < rate < order + 2
    assert math.log2(interior_error(40) / interior_error(80)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("order", [1, 2])
def test_the_corrector_is_what_adds_an_order(order):
    """bh1, whose predictor is in its asymptotic regime at these steps (seen 0.99 and 1.96)."""
    without = [interior_error(n, order=order, solver_type="bh1", disable_corrector=range(n)) for n in (40, 80)]
    assert math.log2(without[0] / without[1]) == pytest.approx(order, abs=0.1)
    assert interior_error(80, order=order, solver_type="bh1") < without[1] / 4


# --- purity, dtypes, resuming, the table ---


def test_a_saved_state_resumes_bitwise_and_steps_are_pure():
    schedule, velocity_fn = flow_unipc(9, 3.0), affine_velocity(7, 4, torch.float32)
    x = noise(8, [2, 4], torch.float32)
    whole = unipc_trajectory(schedule, velocity_fn, x, order=3, disable_corrector=[2])
    state = unipc_init(x, schedule, order=3, disable_corrector=[2])
    for i in range(9):
        before = map_tree(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
        velocity = velocity_fn(state["x"], float(schedule.sigmas[i]), None)
        after = unipc_step(state, velocity)
        assert all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(before), strict=True))
        assert state["step"] == i, "the old state is unchanged"
        state = unipc_step(before, velocity)
        assert torch.equal(state["x"], after["x"]) and torch.equal(state["x"], whole[i])
    with pytest.raises(UserError, match="after its 9 steps"):
        unipc_step(state, x)


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_half_precision_models_are_integrated_in_float32(name):
    """A bfloat16 model's outputs are exact in float32: the result equals that of a float32 model with those outputs."""
    velocity_fn, x = affine_velocity(9, 4, torch.float32), noise(10, [2, 4], torch.bfloat16)
    seen = []

    def rounded(x, sigma, timestep):
        seen.append((x.dtype, timestep.dtype, timestep.ndim, type(sigma)))
        return velocity_fn(x, sigma, timestep).bfloat16()

    out = sample(name, rounded, x, 6, 3.0)
    wanted = sample(name, lambda *a: rounded(*a).float(), x.float(), 6, 3.0)
    assert out.dtype == torch.float32 and torch.equal(out, wanted)
    assert set(seen) == {(torch.float32, torch.float32, 0, float)}


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_one_evaluation_a_step_at_the_schedules_points_with_progress(name):
    schedule, calls, done = SAMPLERS[name].schedule(5, 3.0), [], []

    def velocity_fn(x, sigma, timestep):
        calls.append((sigma, float(timestep)))
        return torch.zeros_like(x)

    sample(name, velocity_fn, torch.zeros(1, 2), 5, 3.0, progress=lambda i, n: done.append((i, n)))
    assert calls == list(zip(schedule.sigmas.tolist(), schedule.timesteps.tolist(), strict=False))
    assert done == [(i, 5) for i in range(1, 6)]


def test_gradients_flow_through_a_sampler():
    """What distillation needs: the derivative of the last sample by the first, against finite differences."""
    velocity_fn = affine_velocity(11, 3, torch.float64)
    x = noise(12, [1, 3], torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sample("unipc", velocity_fn, x, 4, 3.0), (x,))


def test_unknown_samplers_name_the_near_miss():
    with pytest.raises(UserError, match=r"'unipcc' \(did you mean 'unipc'\?\); allowed: euler, unipc"):
        sample("unipcc", None, torch.zeros(1), 2, 1.0)


@pytest.mark.parametrize(
    "options, part",
    [
        ({"order": 0}, "order is 0"),
        ({"order": 4}, r"order is 4, allowed is an integer 1..3"),
        ({"order": True}, "order is True"),
        ({"solver_type": "bh3"}, r"'bh3' \(did you mean 'bh\d'\?\)"),
        ({"disable_corrector": [1, -1]}, r"disable_corrector\[1\] is -1"),
        ({"lower_order_final": "false"}, "lower_order_final is 'false'"),
        ({"start": 4}, r"start is 4, allowed is a step index 0..3"),
        ({"start": False}, "start is False"),
    ],
)
def test_bad_unipc_options_are_refused(options, part):
    with pytest.raises(UserError, match=part):
        unipc_init(torch.zeros(1, 2), flow_unipc(4, 3.0), **options)


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_a_velocity_of_another_shape_is_refused_instead_of_broadcast(name):
    with pytest.raises(UserError, match=r"velocity has shape \[1, 2\], the latents have \[3, 2\]"):
        sample(name, lambda x, sigma, timestep: x[:1], torch.zeros(3, 2), 2, 1.0)
    with pytest.raises(UserError, match="floating-point tensor, got torch.int64"):
        sample(name, None, torch.zeros(3, 2, dtype=torch.int64), 2, 1.0)
    with pytest.raises(UserError, match="start is 2"):
        SAMPLERS[name].run(None, torch.zeros(3, 2), SAMPLERS[name].schedule(2, 1.0), start=2)
