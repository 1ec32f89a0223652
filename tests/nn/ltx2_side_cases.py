"""Random weights for LTX-2's smaller models, and how they are compared with Diffusers' modules that hold the same."""

import math

import torch

from core import keys


def random_leaves(specs, seed: int, dtype=torch.float32, constants=()):
    """Every leaf random and of unit gain, norms near 1; `constants` keep their values. A leaf depends on its name."""
    k, out = keys.key(seed), {}
    for name, s in specs.items():
        noise = keys.normal(keys.fold_in(k, name), s.shape, dtype=torch.float64)
        gain = math.prod(s.shape[1:]) ** -0.5 if len(s.shape) > 1 else 0.2
        one = 1.0 if len(s.shape) == 1 and "norm" in name and name.endswith("weight") else 0.0
        out[name] = (gain * noise + one).to(dtype)
    return out | {name: leaf.to(dtype) for name, leaf in dict(constants).items()}


def draw(seed: int, name: str, *shape: int, dtype=torch.float32):
    """Gaussian input that depends on the seed and its name."""
    return keys.normal(keys.fold_in(keys.key(seed), name), shape, dtype=torch.float64).to(dtype)


def loaded(make, params, dtype=torch.float32):
    """Diffusers' module from `make()`, with the given weights; its buffers take gradients like parameters."""
    model = make() if dtype == torch.float32 else make().to(dtype)
    model.load_state_dict(params, strict=True)
    for buffer in model.buffers():
        buffer.requires_grad_(buffer.is_floating_point())
    return model.eval()


def close(ours, theirs, what, tolerance, floor=1e-3):
    assert ours.shape == theirs.shape, f"{what}: {list(ours.shape)}, expected {list(theirs.shape)}"
    error = (ours - theirs).abs().max().item() / max(theirs.abs().max().item(), floor)
    assert error < tolerance, f"{what}: relative error {error:.2e}"


def _weighted(outputs):
    """One number that every entry of every output moves."""
    return sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in outputs)


def compare(ours, theirs, params, model, inputs, tolerance):
    """Outputs, and gradients of all leaves and inputs.

    `ours(leaves, *inputs)` and `theirs(*inputs)` return lists of tensors.
    """
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    mine, other = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    found, wanted = ours(leaves, *mine), theirs(*other)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        close(a.detach(), b.detach(), f"output {i}", tolerance)
    _weighted(found).backward()
    _weighted(wanted).backward()
    held = model.state_dict(keep_vars=True)
    pairs = {f"gradient of {k}": (v.grad, held[k].grad) for k, v in leaves.items()}
    pairs |= {f"gradient of input {i}": (a.grad, b.grad) for i, (a, b) in enumerate(zip(mine, other, strict=True))}
    # Below a hundredth of the largest gradient, cancellation of larger terms rules; all are 0 where all is clamped.
    floor = max(1e-6, 1e-2 * max(b.abs().max().item() for _, b in pairs.values() if b is not None))
    for what, (a, b) in pairs.items():
        assert (a is None) == (b is None), what
        if b is not None:
            close(a, b, what, tolerance, floor)
