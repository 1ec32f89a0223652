"""What recomputed blocks keep, by the operators that run again in the backward pass."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core import keys, specs
from core.scan import recompute, scan
from kernels import Attention
from nn import wan
from nn.run import Run
from nn.wan_inputs import model_inputs
from train.recompute import is_attention, is_matmul, policy_of

CFG = wan.WanConfig(
    num_attention_heads=2, attention_head_dim=8, ffn_dim=16, num_layers=3, in_channels=2, out_channels=2, text_dim=4,
    freq_dim=8,
)  # fmt: skip


class Count(TorchDispatchMode):
    """Counts forward passes of attention, and other matrix products."""

    def __init__(self):
        super().__init__()
        self.attention = self.matmuls = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.attention += is_attention(op.name())
        self.matmuls += is_matmul(op.name()) and not is_attention(op.name())
        return op(*args, **({} if kwargs is None else kwargs))


def backward_of(how):
    """Gradients of a small Wan, and what its backward pass ran."""
    params = {k: v.requires_grad_() for k, v in specs.init(wan.param_specs(CFG), keys.key(0)).items()}
    with torch.no_grad():
        params["proj_out.weight"].normal_(generator=torch.Generator().manual_seed(0))
    draw = lambda name, *shape: keys.normal(keys.fold_in(keys.key(1), name), shape)  # noqa: E731
    inputs = model_inputs(CFG, draw("x", 2, 2, 2, 4, 4), torch.tensor([300.0, 700.0]), {"text": draw("t", 2, 3, 4)})
    out = wan.forward(params, CFG, inputs, run=Run(attention=Attention("sdpa"), scan=how))
    with Count() as count:
        out.square().sum().backward()
    return {k: p.grad for k, p in params.items()}, count


def test_policies_keep_what_they_name():
    plain, none = backward_of(scan)
    counts = {}
    for kind in ("full", "save_attention", "save_matmuls"):
        grads, counts[kind] = backward_of(recompute(scan, policy=policy_of(kind)))
        assert all(torch.equal(grads[k], plain[k]) for k in plain), kind
    full, attention, matmuls = (counts[kind] for kind in ("full", "save_attention", "save_matmuls"))
    assert none.attention == 0 and full.attention == 2 * CFG.num_layers
    assert attention.attention == matmuls.attention == 0
    # 10 linear layers a block: 4 of self-attention, 4 of cross-attention, 2 of the MLP.
    assert full.matmuls - none.matmuls == attention.matmuls - none.matmuls == 10 * CFG.num_layers
    assert matmuls.matmuls == none.matmuls


@pytest.mark.parametrize("name", ["latentree::attention_forward", "latentree::qat_attention", "flash_attn_3::fwd",
                                  "aten::_scaled_dot_product_flash_attention"])  # fmt: skip
def test_attention_is_known_by_name(name):
    assert is_attention(name) and is_matmul(name) and not is_attention(name + "_backward")
    assert not is_attention("latentree::norm") and not is_matmul("latentree::norm") and is_matmul("aten::addmm")
