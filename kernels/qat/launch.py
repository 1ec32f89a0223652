"""Launches the QAT attention kernels: operands made ready, tiles chosen, workspace bounded.

Imported only by the backend that runs it, since Triton is optional. Operands are bfloat16 whatever the inputs are:
NVFP4 values without their global scale fit it exactly. Under the interpreter, which has no bfloat16 products, float32.
"""

import dataclasses

import torch
import triton
from torch import Tensor

from kernels.descriptors import Descriptor
from kernels.dispatch import capability_of
from kernels.qat.backward_triton import key_gradient, query_gradient, ready
from kernels.qat.forward_triton import forward
from kernels.qat.parts_triton import prepare
from kernels.qat.tiles import Plan, plan
from kernels.tiles import padded

LOG2E = 1.4426950408889634
KEYS = 64
P_SCALES = {"group": 0, "static": 1, "row": 2}
WORKSPACE = 2**29  # bytes of running maxima that live at a time in the backward pass


@dataclasses.dataclass(frozen=True)
class _Call:
    """What every kernel of a call is given."""

    sizes: tuple[int, ...]  # Lq, Lk, padded Lq, padded Lk, heads, head size
    programs: int  # batch times heads
    plan: Plan
    lens: Tensor
    decode: Tensor
    flags: dict


def _call(q: Tensor, k: Tensor, lens: Tensor | None, encode: Tensor | None, causal: bool, tiles: Plan | None) -> _Call:
    (b, lq, h, d), lk = q.shape, k.shape[1]
    chosen = tiles if tiles is not None else plan(d, capability_of(q.device))
    step = max(KEYS, chosen.forward.queries, chosen.dq.queries, chosen.dkv.queries)
    sizes = (lq, lk, -(-lq // step) * step, -(-lk // KEYS) * KEYS, h, d)
    flags = dict(LENS=lens is not None, GLOBAL=encode is not None, CAUSAL=causal, DP=padded(d))
    nothing = torch.empty(0, dtype=torch.float32, device=q.device)
    decode = nothing if encode is None else (1 / encode.float()).contiguous()
    return _Call(sizes, b * h, chosen, nothing if lens is None else lens.int(), decode, flags)


def _step(call: _Call) -> int:
    """Rows per program of the kernels that stream: 16 elements per thread."""
    return min(KEYS, 2048 // call.flags["DP"])


def _dense(
    x: Tensor, rows: int, call: _Call, *, encode: Tensor | None = None, mean: Tensor | None = None, keys: bool
) -> Tensor:
    """`[B * H * rows, DP]`: x fake-quantised; keys in storage order."""
    b, length, h, d = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    out = torch.empty(b * h * rows, call.flags["DP"], dtype=dtype, device=x.device)
    nothing = call.lens
    prepare[(rows // _step(call), b * h)](
        x, nothing if mean is None else mean, nothing if encode is None else encode, call.lens, out,
        length, rows, h, d, x.stride(0), x.stride(1), x.stride(2), 0 if encode is None else encode.stride(1),
        MEAN=mean is not None, GLOBAL=encode is not None, LENS=keys and call.flags["LENS"], PERMUTE=keys,
        DP=call.flags["DP"], ROWS=_step(call), num_warps=4,
    )  # fmt: skip
    return out


def _operands(q, k, v, k_mean, encode, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    scales = (None, None, None) if encode is None else encode.float().contiguous().unbind(-1)
    mean = None if k_mean is None else k_mean.float().contiguous()
    return (
        _dense(q, call.sizes[2], call, encode=scales[0], keys=False),
        _dense(k, call.sizes[3], call, encode=scales[1], mean=mean, keys=True),
        _dense(v, call.sizes[3], call, encode=scales[2], keys=True),
    )


def _blocks(x: Tensor, rows: int) -> Descriptor:
    """Blocks of whole rows of what `_dense` made."""
    return Descriptor(x, list(x.shape), list(x.stride()), [rows, x.shape[1]])


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, lens: Tensor | None, encode: Tensor | None,
    scale: float, causal: bool, p_scale: str, exact: bool, tiles: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `kernels.qat.reference.forward_reference`; `tiles` overrides the table (for a sweep)."""
    call = _call(q, k, lens, encode, causal, tiles)
    qh, kh, vh = _operands(q, k, v, k_mean, encode, call)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    high = torch.empty_like(out) if exact else out.new_zeros(q.shape[0], 1, 1, 1)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    shape = call.plan.forward
    forward[(triton.cdiv(q.shape[1], shape.queries), call.programs)](
        _blocks(qh, shape.queries), _blocks(kh, KEYS), _blocks(vh, KEYS), out, high, lse, call.lens, call.decode,
        scale * LOG2E, *call.sizes, P_SCALE=P_SCALES[p_scale], HIGH=exact, M=shape.queries, STAGES=shape.stages,
        num_warps=shape.warps, num_stages=shape.stages, **call.flags,
    )  # fmt: skip
    return out, high, lse


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, lens: Tensor | None, encode: Tensor | None,
    high: Tensor, lse: Tensor, scale: float, causal: bool, p_scale: str, dv: str, tiles: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `kernels.qat.reference.backward_reference`. Q', K', V' are made again: nothing but inputs is kept for it."""
    call = _call(q, k, lens, encode, causal, tiles)
    (lq, _, lqp, lkp, heads, d), device = call.sizes, q.device
    qh, kh, vh = _operands(q, k, v, k_mean, encode, call)
    grads = torch.empty_like(qh)
    statistic, delta = torch.empty(2, call.programs, lqp, dtype=torch.float32, device=device).unbind(0)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    ready[(lqp // _step(call), call.programs)](
        grad, high.contiguous(), lse.contiguous(), grads, statistic, delta, lq, lqp, heads, d, grad.stride(0),
        grad.stride(1), grad.stride(2), DP=call.flags["DP"], ROWS=_step(call), num_warps=4,
    )  # fmt: skip
    found = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v)]
    running = dv == "consistent"
    level = P_SCALES[p_scale] if running else 0
    per_head = lkp // KEYS * lqp
    chunk = min(call.programs, max(1, WORKSPACE // (4 * per_head))) if running else call.programs
    # Where a causal query tile stops early nothing is written; what is read there is multiplied by a weight of zero.
    make = torch.zeros if causal else torch.empty
    maxima = make(chunk * per_head if running else 0, dtype=torch.float32, device=device)
    by_query, by_key = call.plan.dq, call.plan.dkv
    for first in range(0, call.programs, chunk):
        count = min(chunk, call.programs - first)
        common = (maxima, call.lens, call.decode, scale, scale * LOG2E, first, *call.sizes)
        query_gradient[(triton.cdiv(lqp, by_query.queries), count)](
            _blocks(qh, by_query.queries), _blocks(kh, KEYS), _blocks(vh, KEYS), _blocks(grads, by_query.queries),
            statistic, delta, found[0], *common, RUNNING=running, M=by_query.queries, STAGES=by_query.stages,
            num_warps=by_query.warps, num_stages=by_query.stages, **call.flags,
        )  # fmt: skip
        key_gradient[(lkp // KEYS, count)](
            _blocks(qh, by_key.queries), _blocks(kh, KEYS), _blocks(vh, KEYS), _blocks(grads, by_key.queries),
            statistic, delta, found[1], found[2], *common, RUNNING=running, P_SCALE=level, M=by_key.queries,
            STAGES=by_key.stages, num_warps=by_key.warps, num_stages=by_key.stages, **call.flags,
        )  # fmt: skip
    return tuple(found)
