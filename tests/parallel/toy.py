"""A small model with the traits that layouts must handle, for tests of this folder.

Two streams in the carry, per-layer inputs and outputs that carry gradients, leaves of which no, the first or only the
second dimension divides by 4 (one shard of four is empty), float32 tables, an MLP whose width tensor parallelism cuts.
"""

import functools

import torch
import torch.nn.functional as F

from core import specs as core_specs
from core.scan import scan
from core.specs import ParamSpec
from core.trees import stack
from nn.run import TensorParallel

DIM, MLP, LAYERS, IN, OUT = 6, 8, 5, 5, 3
STACKS = ("blocks",)


def specs(dtype=torch.float64, layers: int = LAYERS) -> core_specs.Specs:
    """Specs of the toy; `table` leaves are of float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    block = {
        "table": ParamSpec((2, DIM), wide, keep_fp32=True),
        "up.weight": ParamSpec((MLP, DIM), dtype, axes=("mlp", None)),
        "up.bias": ParamSpec((MLP,), dtype, axes=("mlp",)),
        "down.weight": ParamSpec((DIM, MLP), dtype, axes=(None, "mlp")),
        "down.bias": ParamSpec((DIM,), dtype),
    }
    return {
        "embed.weight": ParamSpec((DIM, IN), dtype),
        **{f"blocks.{i}.{k}": s for i in range(layers) for k, s in block.items()},
        "table": ParamSpec((DIM,), wide, keep_fp32=True),
        "head.weight": ParamSpec((OUT, DIM), dtype),
    }


def params(model: core_specs.Specs, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random leaves, equal in every process."""
    g = torch.Generator().manual_seed(seed)
    return {k: (torch.randn(s.shape, generator=g, dtype=torch.float64) * 0.4).to(s.dtype) for k, s in model.items()}


def samples(n: int, dtype=torch.float64, seed: int = 1) -> torch.Tensor:
    """`[n, 2, 4, IN]`: a batch for each of n data ranks or microbatches."""
    return torch.randn(n, 2, 4, IN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def block(p, carry, gain, *, tp: TensorParallel):
    """One layer: `(x, total), gain -> (x, total), y`."""
    x, total = carry
    h = (x * (1 + p["table"][0]) + p["table"][1]).to(x.dtype)
    h = torch.tanh(F.linear(tp.copy(h), p["up.weight"].to(x.dtype), p["up.bias"].to(x.dtype)))
    y = tp.reduce(F.linear(h, p["down.weight"].to(x.dtype))) + p["down.bias"].to(x.dtype)
    x = x + gain * y
    return (x, total + x.square().mean()), y


def forward(params, x, *, scan=scan, tp: TensorParallel = TensorParallel()):
    """`[B, T, IN] -> [B, T, OUT]`, a scalar of the second stream, and the layers' outputs."""
    h = F.linear(x, params["embed.weight"].to(x.dtype))
    layers = stack(params, "blocks")
    gains = [h.new_full((), 1.0 - 0.1 * i) for i in range(len(layers))]
    (h, total), ys = scan(functools.partial(block, tp=tp), (h, h.new_zeros(())), layers, gains)
    return F.linear((h * params["table"]).to(x.dtype), params["head.weight"].to(x.dtype)), total, ys


def loss(params, x, **how):
    """A scalar to which every leaf and every output of the model contributes."""
    out, total, ys = forward(params, x, **how)
    return out.square().mean() + 0.1 * total + 0.01 * sum(y.square().mean() for y in ys)


def reference(tree, batches, dtype=None, **how) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss over batches, on one process."""
    tree = {k: v.detach().to(v.dtype if dtype is None else dtype).requires_grad_() for k, v in tree.items()}
    (sum(loss(tree, x, **how) for x in batches) / len(batches)).backward()
    return {k: v.grad for k, v in tree.items()}
