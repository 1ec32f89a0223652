"""What tests of sequence parallelism run on every process of the pool, and how they compare with one process."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core import keys
from kernels import Attention, PlannedMask, block_causal_sink
from parallel import collectives
from parallel.mesh import Mesh
from tests.parallel.pool import mesh_of

# Float64 sums of up to some hundred terms in another order.
EXACT = 1e-11


def sp_mesh(sp: int) -> Mesh | None:
    """A mesh of this size, for 2 and 3 over ranks that do not start at 0; None on a process that is not in it."""
    if sp == 4:
        return mesh_of(sp=4)
    return mesh_of(ranks=(1, 2) if sp == 2 else (1, 2, 3), sp=sp)


def drawn(seed: int, dtype=torch.float64, **shapes) -> dict[str, torch.Tensor]:
    """Normal tensors by name, equal on all processes."""
    k = keys.key(seed)
    return {name: keys.normal(keys.fold_in(k, name), shape).to(dtype) for name, shape in shapes.items()}


def gradients(loss_of: Callable[..., Any], leaves: dict[str, torch.Tensor], mesh: Mesh | None = None):
    """Loss and gradients by name; with a mesh averaged over `sp`, as FSDP does it."""
    leaves = {k: x.detach().clone().requires_grad_() for k, x in leaves.items()}
    loss = loss_of(leaves)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves.values(), strict=True)]
    if mesh is not None:
        group = collectives.as_group(mesh.group("sp"))
        found = [collectives.all_sum(g, group) / mesh.size("sp") for g in found]
    return loss.detach(), dict(zip(leaves, found, strict=True))


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry (absolute where all are small: gradients that cancel)."""
    if theirs.numel() == 0:
        return 0.0
    return ((ours - theirs).abs().max() / (1 + theirs.abs().max())).item()


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    assert set(ours) == set(theirs)
    return {k: difference(ours[k], theirs[k]) for k in ours}


class Counted(TorchDispatchMode):
    """Counts the collectives that run inside it, by name."""

    def __enter__(self):
        self.counts = collections.Counter()
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        namespace, _, name = op._schema.name.partition("::")
        if "c10d" in namespace and name != "wait_tensor":
            self.counts[name] += 1
        return op(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class BlockCausalAttention:
    """An attention wrapper: `block_causal_sink` for self-attention, `inner` elsewhere."""

    planned: PlannedMask
    inner: Callable[..., Any] = Attention()

    def __call__(self, q, k, v, *, site, scale=None, return_lse=False, **options):
        if site != "self":
            return self.inner(q, k, v, site=site, scale=scale, return_lse=return_lse, **options)
        return block_causal_sink(q, k, v, self.planned, scale=scale, return_lse=return_lse)
