"""What `benchmarks/kernels.py` measures, one module per kernel family."""

import dataclasses
from collections.abc import Callable, Mapping

import torch

Make = Callable[[], Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one shape.

    `ours` and `peers` are makers by name: a maker allocates fresh random inputs and returns the closure that is
    timed. `variants` are ours with other tiles than the table's, for `--sweep`. `flops` (algorithmic, counted for the
    rate) or `bytes` (read and written once) give the rate and, at the machine's measured ceiling, the shortest time.
    """

    op: str
    shape: str
    ours: Mapping[str, Make]
    peers: Mapping[str, Make] = dataclasses.field(default_factory=dict)
    flops: float | None = None
    bytes: float | None = None
    variants: Mapping[str, Make] = dataclasses.field(default_factory=dict)


def backward_of(forward: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], object]:
    """A closure that runs only the backward pass of `forward(*inputs)`, for a random gradient."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = forward(*leaves)
    grad = torch.randn_like(out)
    wanted = [x for x in leaves if x.requires_grad]
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)
