"""Wan with packed projections against the split layout."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from wan_cases import configs, random_inputs, random_params

from core.specs import check, specs_of
from core.transforms import apply, invert
from nn import wan
from nn.wan_inputs import model_inputs


@given(cfg=configs(), seed=st.integers(0, 10**6))
def test_packed_projections_are_the_same_model(cfg, seed):
    """Outputs and gradients. One product instead of three adds the same terms, in blocks of another shape: float64
    leaves some 1e-15 of it."""
    params = random_params(cfg, seed, torch.float64)
    bound = wan.pack_projections()(specs_of(params))
    packed = apply(params, bound)
    assert "blocks.0.attn1.to_qkv.weight" in packed and "blocks.0.attn2.to_kv.bias" in packed
    assert not any("to_k.weight" in k for k in packed) and len(packed) == len(params) - 6 * cfg.num_layers
    assert all(torch.equal(leaf, params[k]) for k, leaf in apply(packed, invert(bound)).items())
    check(packed, wan.pack_projections()(wan.param_specs(cfg)).specs)

    noisy, timestep, conditions = random_inputs(cfg, seed, dtype=torch.float64)
    inputs, grads, outs = model_inputs(cfg, noisy, timestep, conditions), [], []
    for tree in (params, packed):
        leaves = {k: v.clone().requires_grad_() for k, v in tree.items()}
        outs.append(wan.forward(leaves, cfg, inputs))
        (outs[-1] * torch.linspace(-1, 1, outs[-1].numel()).reshape(outs[-1].shape)).sum().backward()
        grads.append({k: v.grad for k, v in leaves.items()})
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(apply(grads[1], invert(bound)), grads[0], rtol=1e-10, atol=1e-12)
