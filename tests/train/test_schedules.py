"""Learning-rate schedules against diffusers, and their own laws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from train.schedules import learning_rate, lr_factor

SETTINGS = settings(max_examples=30, deadline=None, derandomize=True)
NAMES = ("constant", "linear", "cosine")


def oracle(name, warmup, total, peak):
    """The learning rates that diffusers' scheduler sets before each of `total` optimiser steps."""
    from diffusers.optimization import get_scheduler

    name = "constant_with_warmup" if name == "constant" else name
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@SETTINGS
@given(st.sampled_from(NAMES), st.integers(1, 60), st.integers(0, 60), st.floats(1e-7, 1.0))
def test_every_step_equals_diffusers(name, total, warmup, peak):
    ours = [learning_rate(s, peak, scheduler=name, total_steps=total, warmup_steps=warmup) for s in range(total)]
    # The same float64 formulas in another order of operations; near 0 only an absolute bound has meaning.
    assert ours == pytest.approx(oracle(name, warmup, total, peak), rel=1e-12, abs=1e-15)


@SETTINGS
@given(st.sampled_from(NAMES), st.integers(1, 200), st.integers(0, 100), st.floats(0, 1))
def test_floor_warmup_and_monotony(name, total, warmup, floor):
    factors = [lr_factor(s, scheduler=name, total_steps=total, warmup_steps=warmup, min_lr_ratio=floor)
               for s in range(total + warmup + 5)]  # fmt: skip
    assert factors[:warmup] == [s / warmup for s in range(warmup)]
    decay = factors[warmup:]
    # One rounding in r + (1 - r) x may fall below or above its bounds.
    assert decay[0] == pytest.approx(1.0, abs=1e-15) and all(floor - 1e-15 <= f <= 1 + 1e-15 for f in decay)
    assert all(a >= b - 1e-15 for a, b in zip(decay, decay[1:], strict=False))
    end = 1.0 if name == "constant" else floor
    assert factors[max(total, warmup + 1) :] == pytest.approx([end] * len(factors[max(total, warmup + 1) :]), abs=1e-15)


@SETTINGS
@given(st.sampled_from(NAMES), st.integers(1, 50), st.integers(0, 20), st.floats(0, 1), st.integers(0, 70))
def test_the_floor_is_affine(name, total, warmup, floor, step):
    """With floor r the decay is r + (1 - r) times the decay without: an explicit 0.0 is no other value."""
    bare = lr_factor(step, scheduler=name, total_steps=total, warmup_steps=warmup, min_lr_ratio=0.0)
    assert bare == lr_factor(step, scheduler=name, total_steps=total, warmup_steps=warmup)
    if step >= warmup:
        raised = lr_factor(step, scheduler=name, total_steps=total, warmup_steps=warmup, min_lr_ratio=floor)
        assert raised == pytest.approx(floor + (1 - floor) * bare, abs=1e-15)


def test_known_values():
    half = {"total_steps": 110, "warmup_steps": 10}
    assert lr_factor(60, scheduler="linear", **half) == 0.5
    assert lr_factor(35, scheduler="cosine", **half) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert lr_factor(60, scheduler="cosine", min_lr_ratio=0.2, **half) == pytest.approx(0.6)
    assert lr_factor(5, scheduler="constant", **half) == 0.5


def test_unknown_scheduler():
    with pytest.raises(UserError, match=r"'cosin'.*did you mean 'cosine'.*constant, linear, cosine"):
        lr_factor(0, scheduler="cosin", total_steps=1)
