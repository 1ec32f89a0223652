"""The global norm of gradients, whole or sharded, and clipping by it. Nothing is copied to the host."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from core import compat


def local(t: Tensor) -> Tensor:
    """This process's shard of a DTensor, sharing its memory and without gradient; other tensors as they are."""
    with torch.no_grad():
        return t.to_local() if isinstance(t, DTensor) else t


def _axes(t: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups over which a leaf is cut. Raises ValueError for a leaf of partial sums."""
    if not isinstance(t, DTensor):
        return ()
    if any(p.is_partial() for p in t.placements):
        raise ValueError(f"a gradient of placements {t.placements} holds partial sums, which have no norm yet")
    cut = [i for i, p in enumerate(t.placements) if not p.is_replicate() and t.device_mesh.size(i) > 1]
    return tuple(t.device_mesh.get_group(i) for i in cut)


def _grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of equal device and dtype together, for multi-tensor kernels."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    return list(groups.values())


def _square_sum(tensors: Iterable[Tensor], wide: torch.dtype, device: torch.device) -> Tensor:
    """Sum of squares of plain tensors in the dtype `wide`, 0-d, on `device`."""
    norms = [torch.stack(compat.foreach_norm(same, wide)).to(device) for same in _grouped(tensors)]
    return torch.cat(norms).square().sum()


@torch.no_grad()
def total_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """2-norm of all gradients together, as if they were whole: 0-d, equal on all processes, on the device.

    Every element counts once: shards are summed over the axes that they are cut over, with one all-reduce per axis;
    copies (replicas, plain tensors) are not. 16-bit gradients are squared and summed in float32. Collective: all
    processes call it with equal keys in equal order.

    Raises ValueError for a leaf of partial sums.
    """
    cut: dict[tuple[ProcessGroup, ...], list[Tensor]] = {(): []}
    for t in grads.values():
        cut.setdefault(_axes(t), []).append(local(t))
    wide = torch.float64 if any(t.dtype == torch.float64 for t in grads.values()) else torch.float32
    device = _device(grads.values())
    sums = {axes: _square_sum(leaves, wide, device) for axes, leaves in cut.items() if leaves}
    while axis := next((axes[0] for axes in sums if axes), None):
        keys = [axes for axes in sums if axis in axes]
        parts = torch.stack([sums.pop(axes) for axes in keys])
        dist.all_reduce(parts, group=axis)
        for axes, part in zip(keys, parts.unbind(), strict=True):
            rest = tuple(a for a in axes if a is not axis)
            sums[rest] = sums[rest] + part if rest in sums else part
    return sums[()].sqrt() if sums else torch.zeros((), device=device)


def _device(tensors: Iterable[Tensor]) -> torch.device:
    """Where sums are added up: the processes' device, also of shards that are kept in host memory."""
    for t in tensors:
        return torch.device(t.device_mesh.device_type) if isinstance(t, DTensor) else t.device
    return torch.device("cpu")


@torch.no_grad()
def clip_(grads: Mapping[str, Tensor], max_norm: float) -> Tensor:
    """Scales gradients in place by `min(1, max_norm / (norm + 1e-6))`; `max_norm` of 0 or less scales nothing.

    Returns:
        `total_norm` before clipping. It stays on the device: reading it is the caller's choice, after the step.
    """
    norm = total_norm(grads)
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for same in _grouped(local(t) for t in grads.values()):
            compat.foreach_mul_(same, factor.to(same[0].device, same[0].dtype))
    return norm
