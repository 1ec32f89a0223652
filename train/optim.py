"""AdamW over flat trees and EMA: pairs of functions that update in place. Of sharded leaves each process has its part.

Gradients are clipped by `parallel.norms.clip_`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from core import compat
from core.errors import UserError, raise_faults
from core.trees import Params
from parallel.norms import clip_, local

__all__ = ["AdamW", "adamw_init", "adamw_update", "clip_", "ema_update", "exchange", "holding", "swapped"]

OptState = dict[str, Tensor]
FUSED_DEVICES = ("cuda", "cpu")


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Hyperparameters. `fused`: None takes the fused kernel on FUSED_DEVICES, multi-tensor kernels elsewhere."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    fused: bool | None = None


def adamw_init(params: Mapping[str, Tensor]) -> OptState:
    """`{"step", "exp_avg.<key>", "exp_avg_sq.<key>"}`: moments of every leaf in float32 or wider, zeros.

    Moments are sharded as their leaves are. The step is a 0-d float32 tensor on the leaves' device, as the fused
    kernel needs it there.
    """
    device = next(iter(params.values())).device
    state: OptState = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    for moment in ("exp_avg", "exp_avg_sq"):
        for k, p in params.items():
            state[f"{moment}.{k}"] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
    return state


def groups_of(params: Mapping[str, Tensor]) -> list[list[str]]:
    """Keys grouped by device and dtype, for multi-tensor kernels. Empty shards are left out."""
    groups: dict[tuple, list[str]] = {}
    for k, p in params.items():
        if local(p).numel():
            groups.setdefault((p.device, p.dtype), []).append(k)
    return list(groups.values())


@torch.no_grad()
def adamw_update(opt: AdamW, grads: Mapping[str, Tensor], state: OptState, params: Params, lr: float) -> None:
    """One update of `params` and `state`, in place.

    Args:
        grads: one gradient per key of `params`, same shapes and shards; they are used in the dtype of the moments.
        lr: learning rate of this step.

    Raises:
        UserError: keys differ, or `fused` was asked for on a device without the kernel.
    """
    differ = sorted(set(params) ^ set(grads))
    raise_faults("adamw: parameters and gradients have different keys", differ)
    state["step"] += 1
    for keys in groups_of(params):
        device = params[keys[0]].device
        if opt.fused and device.type not in FUSED_DEVICES:
            raise UserError(f"training.optimizer.fused: no fused AdamW on {device.type}; use null or false")
        fused = device.type in FUSED_DEVICES if opt.fused is None else opt.fused
        wide = state[f"exp_avg.{keys[0]}"].dtype
        leaves = [local(params[k]) for k in keys]
        # bf16 masters are updated through a float32 copy: their moments are float32.
        work = [p.to(wide) for p in leaves]
        compat.adamw_(
            work,
            [local(grads[k]).to(wide) for k in keys],
            [local(state[f"exp_avg.{k}"]) for k in keys],
            [local(state[f"exp_avg_sq.{k}"]) for k in keys],
            state["step"],
            fused=fused,
            lr=lr,
            betas=opt.betas,
            weight_decay=opt.weight_decay,
            eps=opt.eps,
        )
        if leaves[0].dtype != wide:
            torch._foreach_copy_(leaves, work)


@torch.no_grad()
def ema_update(ema: Params, params: Mapping[str, Tensor], decay: float) -> None:
    """`ema = decay * ema + (1 - decay) * params`, in place, in the EMA's dtype."""
    for keys in groups_of(ema):
        towards = [local(params[k]).to(ema[k].dtype) for k in keys]
        compat.foreach_lerp_([local(ema[k]) for k in keys], towards, 1.0 - decay)


@contextlib.contextmanager
def swapped(params: Params, other: Params | None) -> Iterator[None]:
    """Exchanges the storage of two trees inside the block and restores it on any exit; None does nothing."""
    if other is None:
        yield
        return
    exchange(params, other)
    try:
        yield
    finally:
        exchange(params, other)


@contextlib.contextmanager
def holding(params: Params, other: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block `params` hold what `other` does, and afterwards, on any exit, what they held.

    For sharded leaves: FSDP keeps views of their storage, which `swapped` would exchange. It takes a copy of the
    shards meanwhile.
    """
    held = {k: local(p).clone() for k, p in params.items()}
    _copy(params, other)
    try:
        yield
    finally:
        _copy(params, held)


@torch.no_grad()
def _copy(params: Params, other: Mapping[str, Tensor]) -> None:
    for k, p in params.items():
        local(p).copy_(local(other[k]))


def exchange(a: Params, b: Params) -> None:
    """Swaps the storages of equal leaves without copying. Raises UserError before any swap when keys differ."""
    raise_faults("exchange: trees have different keys", sorted(set(a) ^ set(b)))
    for k, tensor in a.items():
        tensor.data, b[k].data = b[k].data, tensor.data
