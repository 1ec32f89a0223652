"""Norms, gated residuals, scaled and fake-quantised weights against PyTorch and exact grids."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels import dequantise, fake_quant_fp8, gated_residual, norm_modulate, residual_gate_norm


def normalised(x, eps, centre):
    """The definition, in float64."""
    h = x - x.mean(-1, keepdim=True) if centre else x
    return h / (h.square().mean(-1, keepdim=True) + eps).sqrt()


@given(d=st.integers(2, 17), t=st.integers(1, 4), per_token=st.booleans(), seed=st.integers(0, 999))
def test_norm_modulate_is_its_definition(d, t, per_token, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, t, d, generator=g, dtype=torch.float64)
    weight, bias = torch.randn(2, d, generator=g, dtype=torch.float64)
    scale, shift = torch.randn(2, 2, t if per_token else 1, d, generator=g, dtype=torch.float64)
    for kind in ("layer", "rms"):
        got = norm_modulate(x, eps=1e-5, kind=kind, weight=weight, bias=bias, scale=scale, shift=shift)
        expected = (normalised(x, 1e-5, kind == "layer") * weight + bias) * (1 + scale) + shift
        torch.testing.assert_close(got, expected)


def test_statistics_are_float32_for_half_precision():
    """Values whose squares overflow float16 still normalise."""
    x = (torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0)) * 1000).half()
    y = norm_modulate(x, eps=1e-6)
    assert y.dtype == torch.float16 and y.isfinite().all()
    torch.testing.assert_close(y.float(), F.layer_norm(x.float(), (64,), eps=1e-6), atol=2e-3, rtol=1e-3)


def test_residual_gate_norm_is_its_two_parts():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, 3, 8, generator=g)
    gate = torch.randn(2, 1, 8, generator=g)
    new, normed = residual_gate_norm(x, y, gate, eps=1e-6)
    torch.testing.assert_close(new, x + y * gate)
    torch.testing.assert_close(normed, F.layer_norm(new, (8,), eps=1e-6))
    assert torch.equal(gated_residual(x, y), x + y)
    half = gated_residual(x.bfloat16(), y.bfloat16(), gate)
    assert torch.equal(half, (x.bfloat16().float() + y.bfloat16().float() * gate).bfloat16())


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_dequantise(codes):
    weight = torch.tensor([[1.0, -2.0], [3.0, 4.0]]).to(codes)
    scale = torch.tensor([[0.5], [2.0]])
    assert torch.equal(dequantise(weight, scale, torch.float32), torch.tensor([[0.5, -1.0], [6.0, 8.0]]))


def test_fake_quant_rounds_to_the_fp8_grid_and_passes_gradients():
    weight = (torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 300).requires_grad_()
    scale = torch.tensor(0.25)
    out = fake_quant_fp8(weight, scale)
    codes = (out.detach() / scale).to(torch.float8_e4m3fn)
    assert torch.equal(codes.float() * scale, out.detach()), "every value is a code times the scale"
    assert out.detach().abs().max() == 448 * 0.25, "codes saturate"
    assert not torch.equal(out.detach(), weight.detach())
    (out * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    again = fake_quant_fp8(out.detach(), scale)
    assert torch.equal(again, out.detach()), "rounding is idempotent"
