"""Recorded functions give what plain ones do, for every signature and every value; only a GPU can record."""

import pytest
import torch

from core.capture import replayed, signature


def test_signatures_tell_shapes_dtypes_and_names_apart():
    x = torch.zeros(2, 3)
    assert signature({"a": x}) == signature({"a": x + 1})
    others = ({"a": x[:1]}, {"a": x.double()}, {"b": x}, {"a": x, "b": x})
    assert len({signature(inputs) for inputs in ({"a": x}, *others)}) == 5
    assert signature({"a": x, "b": x[0]}) == signature({"b": x[0], "a": x})


def test_on_a_cpu_the_function_itself_is_called():
    calls = []
    fn = replayed(lambda inputs: calls.append(1) or inputs["x"] * 2)
    with torch.no_grad():
        for n in range(3):
            assert torch.equal(fn({"x": torch.full((2,), n)}), torch.full((2,), 2 * n))
    assert len(calls) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replays_equal_calls_and_do_not_run_the_function():
    calls, weight = [], torch.randn(8, 8, device="cuda")

    def fn(inputs):
        calls.append(1)
        return {"y": inputs["x"] @ weight, "z": (inputs["x"].sum(),)}

    fast = replayed(fn)
    with torch.no_grad():
        kept = []
        for rows in (3, 5, 3, 5):
            x = torch.randn(rows, 8, device="cuda")
            kept.append((fast({"x": x}), x @ weight, x.sum()))
        assert len(calls) == 2 * 3  # warm-up and recording of each of the two shapes
        for got, y, z in kept:  # results of earlier calls are not overwritten
            torch.testing.assert_close(got["y"], y)
            torch.testing.assert_close(got["z"][0], z)
        weight.mul_(2)  # weights are read where they lie
        x = torch.randn(3, 8, device="cuda")
        torch.testing.assert_close(fast({"x": x})["y"], x @ weight)
    x.requires_grad_()
    fast({"x": x})["y"].sum().backward()  # not recorded
    assert x.grad is not None
