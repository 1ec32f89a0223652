"""The one file that reaches PyTorch APIs without a stability promise (torch 2.11 to 2.14)."""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library import triton as registered
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad

from core.errors import UserError


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


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """2-norms of tensors of one device and dtype, each 0-d, computed in `dtype`."""
    return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def foreach_lerp_(tensors: Sequence[Tensor], towards: Sequence[Tensor], weight: float) -> None:
    """`t += weight * (towards - t)` in place."""
    torch._foreach_lerp_(list(tensors), list(towards), weight)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`gelu_tanh(x weight^T + bias)` `[..., n_out]` in one kernel of cuBLAS, rounded once. It has no gradient."""
    out = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return out.unflatten(0, x.shape[:-1])


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """cuDNN's gradients of q, k, v `[B, L, H, D]` for an output and its natural log-sum-exp `[B, H, Lq]`."""
    grad, *tensors = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of dropout
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, *tensors, lse[..., None], unused, unused, None, None, None, q.shape[1], k.shape[1], 0.0, False,
        scale=scale,
    )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in found)


@contextlib.contextmanager
def compiling(max_graphs: int, memory_budget: float | None) -> Iterator[None]:
    """How functions of `torch.compile` that are called inside compile: see `core.scan.compiled`.

    Raises UserError where a function would have more than `max_graphs` graphs.
    """
    with contextlib.ExitStack() as settings:
        settings.enter_context(torch._dynamo.config.patch(recompile_limit=max_graphs))
        if memory_budget is not None:
            settings.enter_context(torch._functorch.config.patch(activation_memory_budget=memory_budget))
        try:
            yield
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            raise UserError(
                f"a compiled block has {max_graphs} graphs and would need one more: each combination of lengths and "
                "batch sizes makes one. Train with fewer sizes or without compilation, or raise max_graphs"
            ) from None


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


class _Later(Sequence):
    """A sequence that is made when it is first looked at."""

    def __init__(self, make: Callable[[], Sequence]):
        self._make = functools.cache(make)

    def __getitem__(self, i):
        return self._make()[i]

    def __len__(self) -> int:
        return len(self._make())


def inline_kernels(library: torch.library.Library, name: str, run: Callable, kernels: Callable[[], Sequence]) -> None:
    """The compiler sees the Triton launches of an operator's `run` on a GPU in its place, and launches them itself.

    A launch by the compiler costs the host a fraction of what calling an operator of Python does. `run` launches
    `launched(kernel, tensor)`. Sizes that are symbols leave the operator as it is.

    Args:
        kernels: the kernels that it and its gradient may launch: their source is a part of the key of what the
            compiler keeps on disk.
    """
    def decompose(mode, op, types, args, kwargs):
        tensors = [a for a in args if isinstance(a, Tensor)]
        fixed = all(isinstance(n, int) for t in tensors for n in (*t.shape, *t.stride()))
        if not fixed or not all(t.is_cuda for t in tensors):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return run(*args, **kwargs)

    library._register_torch_dispatch_rule(name, FunctionalTensorMode, decompose)
    registered.triton_ops_to_kernels[f"{library.ns}::{name}"] = _Later(kernels)


def launched(kernel: Any, x: Tensor) -> Any:
    """What is called as `kernel[grid](...)` on x: the kernel, or where x is being compiled what notes the launch."""
    return torch.library.wrap_triton(kernel) if isinstance(x, FunctionalTensor) else kernel


def transforms_active() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is running."""
    return torch._C._are_functorch_transforms_active()


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken: PyTorch's level, since a mapped dual tensor looks like none."""
    return forward_ad._current_level >= 0


def plain_call() -> bool:
    """Whether nothing is derived or transformed, so that an operator without rules for either may be called."""
    if torch.is_grad_enabled() or forward_mode():
        return False
    return torch.compiler.is_compiling() or not transforms_active()


# --- collectives as operators: differentiated by `parallel.collectives`, traceable, counted by name ------------------


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


def strided_shard(dim: int, split_factor: int):
    """The DTensor placement of FSDP shards of a dimension that inner mesh dimensions cut first, into `split_factor`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def reduce_scatter_into(output: Tensor, x: Tensor, op, group) -> None:
    """Reduces `x` over a process group into this process's part, `output`, as a collective of the current stream."""
    scatter = getattr(dist, "reduce_scatter_single", None)  # the name since torch 2.13
    (scatter if scatter is not None else dist.reduce_scatter_tensor)(output, x, op=op, group=group)


# --- the record of collectives that PyTorch keeps (its flight recorder) -----------------------------------------------

RECORDERS = ("nccl", "fr")  # NCCL's, and that of other backends


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that this process began: its number in the record, and itself in words."""

    record: tuple[str, int]
    text: str


def _recorder(name: str, form: str):
    """`_dump_nccl_trace_json` and its like, or None where this build has none."""
    return getattr(torch._C._distributed_c10d, f"_dump_{name}_trace{form}", None)


def record_collectives(entries: int = 2000) -> None:
    """Has NCCL keep its record, unless the environment says how long it is to be; before its first group."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    if not any(name in os.environ for name in names):
        os.environ.update(dict.fromkeys(names, str(entries)))


def pending_collectives() -> list[Collective]:
    """Collectives that have begun and not ended, oldest first; none where PyTorch keeps no record of them."""
    out = []
    for name in RECORDERS:
        dump = _recorder(name, "_json")
        entries = [] if dump is None else json.loads(dump(True, True)).get("entries", [])
        for e in entries:
            if not e["retired"] and e["state"] != "completed":
                group, number = e["process_group"][-1], e["collective_seq_id"]
                text = f"{e['profiling_name']} of {e['input_sizes']} in group {group} (its number {number})"
                out.append((e["time_created_ns"], Collective((name, e["record_id"]), text)))
    return [c for _, c in sorted(out, key=lambda pair: pair[0])]


def dump_collectives(path: Path) -> bool:
    """Writes the record as PyTorch's `torchfrtrace` reads it; False where there is none, or it cannot be written."""
    for name in RECORDERS:
        dump, readable = _recorder(name, ""), _recorder(name, "_json")
        if dump is not None and readable is not None and json.loads(readable()).get("entries"):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(dump())
            except OSError:
                return False
            return True
    return False


# --- process groups -----------------------------------------------------------------------------------------------


def members_group(ranks: Sequence[int], timeout: datetime.timedelta):
    """A gloo group that its members make among themselves, whatever other groups each of them is in.

    `new_group(use_local_synchronization=True)` names a group after the number of groups that a process has, and waits
    for ever where the members' numbers differ. All members make their groups of equal ranks in the same order.
    """
    from torch.distributed import distributed_c10d as c10d

    stem = f"members {'_'.join(map(str, ranks))} "
    name = stem + str(sum(known.startswith(stem) for known in c10d._world.pg_names.values()))
    rank, store = ranks.index(c10d.get_rank()), c10d._get_default_store()
    group, _ = c10d._new_process_group_helper(len(ranks), rank, list(ranks), "gloo", store, name, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {global_rank: i for i, global_rank in enumerate(ranks)}
    return group


def fsdp_takes(dtype: torch.dtype) -> bool:
    """Whether this torch's `fully_shard` can shard leaves of a dtype: integer ones since 2.13."""
    return dtype.is_floating_point or torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
