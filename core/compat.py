"""The one file that reaches PyTorch APIs without a stability promise (torch 2.11 to 2.14)."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    *,
    fused: bool,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """One AdamW update in place (Loshchilov and Hutter, 2019, algorithm 2), for leaves of one device and dtype.

    Args:
        step: 0-d float32 on the leaves' device, already counting this update.
        fused: PyTorch's fused kernel, else multi-tensor kernels.
    """
    leaves = [list(t) for t in (params, [_laid_out_as(p, g) for p, g in zip(params, grads, strict=True)], exp_avgs,
                                exp_avg_sqs)]  # fmt: skip
    moments = [(m, p) for m, p in zip([*exp_avgs, *exp_avg_sqs], [*params, *params], strict=True)]
    if fused and all(m.stride() == p.stride() for m, p in moments):
        torch._fused_adamw_(
            *leaves, [], [step] * len(leaves[0]), lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay,
            eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    else:
        _foreach_adamw_(*leaves, step, lr, betas, weight_decay, eps)


def _laid_out_as(p: Tensor, g: Tensor) -> Tensor:
    """g in p's layout: the fused kernel goes by position in memory and would mix up elements without a word."""
    return g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)


def _foreach_adamw_(params, grads, m, v, step, lr, betas, weight_decay, eps) -> None:
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_lerp_(m, grads, 1 - betas[0])
    torch._foreach_mul_(v, betas[1])
    torch._foreach_addcmul_(v, grads, grads, 1 - betas[1])
    denominator = torch._foreach_sqrt(v)
    torch._foreach_div_(denominator, _bias_correction(betas[1], step).sqrt())
    torch._foreach_add_(denominator, eps)
    update = torch._foreach_div(m, denominator)
    torch._foreach_mul_(update, -lr / _bias_correction(betas[0], step))
    torch._foreach_add_(params, update)


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """`1 - beta ** step` as a 0-d tensor, so that the step is not copied to the host.

    By expm1: the plain difference loses the digits of float32 while it is small (beta near 1, first steps).
    """
    return torch.ones_like(step) if beta == 0 else -torch.expm1(step * math.log(beta))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies tensors of one device by a 0-d tensor in place, without a host sync."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_lerp_(tensors: Sequence[Tensor], towards: Sequence[Tensor], weight: float) -> None:
    """`t += weight * (towards - t)` in place."""
    torch._foreach_lerp_(list(tensors), list(towards), weight)


def deterministic() -> None:
    """Deterministic kernels for the rest of the process; an operation without one raises.

    cuBLAS reads its variable when its first handle is made, so this comes before any CUDA work.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def record_memory(device: torch.device, max_entries: int = 100_000) -> None:
    """Starts the record of CUDA allocations that `dump_memory` writes; nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory(device: torch.device, path: Path) -> str:
    """Writes the record (readable at pytorch.org/memory_viz) and returns where; "none" on other devices."""
    if device.type != "cuda":
        return "none"
    torch.cuda.memory._dump_snapshot(str(path))
    return str(path)


# --- operators of our own: what `kernels.op` asks of the dispatcher ---------------------------------------------------


def below_autograd():
    """A context in which operators are called past autograd, whose part an autograd.Function has taken."""
    return torch._C._AutoDispatchBelowAutograd()


def transforms_active() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is running."""
    return torch._C._are_functorch_transforms_active()


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken: PyTorch's level, since a mapped dual tensor looks like none."""
    return forward_ad._current_level >= 0


# --- collectives as operators: differentiated by `parallel.collectives`, traceable, counted by their names -------------


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum of x over the process group of this name, as a new tensor."""
    return _waited(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """`[n, ...] -> [size * n, ...]`, in the order of the group."""
    return _waited(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """`[size * n, ...] -> [n, ...]`: this process's part of the sum."""
    return _waited(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def all_to_all(x: Tensor, size: int, group: str) -> Tensor:
    """Exchanges equal parts along dimension 0, which must be divisible by `size`."""
    parts = [x.shape[0] // size] * size
    return _waited(torch.ops._c10d_functional.all_to_all_single(x.contiguous(), parts, parts, group))


def _waited(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)
