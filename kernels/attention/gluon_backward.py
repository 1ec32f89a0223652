"""Attention backward in one kernel for Hopper, its products ordered by hand, in Gluon, 16-bit.

The maths is that of `triton_backward`. A program owns 128 keys and walks over the queries; scores are transposed,
`[keys, queries]`, so that P and dS are operands as they are. Per tile of queries the tensor cores are given

    S = K Q^T, dP = V dO^T, dV += P dO, dQ = dS^T K, dK += dS Q

in this order, so that they have the next product to work on while P, dS and dQ pass through registers; a compiler that
waits for the result of each statement leaves none. The copy engine adds dQ to float32 sums in memory, in whatever order
programs come; `triton_backward.finish_queries` scales and rounds them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernels.attention.gluon_parts import barrier, place, slot_of, span, step_of, store_rows
from kernels.attention.triton_parts import LN_2


@builtin
def _reduce_add(desc, at, part, _semantic=None):
    """Adds shared memory `part` to the block of `desc` at `at` (before version 3.8 Gluon has no name for it)."""
    from triton._C.libtriton import ir

    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, part.handle)


@gluon.jit
def _fetch(walk, buffers, i, end, STAGES: gl.constexpr, BM: gl.constexpr, PLANNED: gl.constexpr):
    """Starts the copies of step i, a tile of queries of one head, unless it is beyond the end."""
    q_, g_, base, delta, bounds_, batch, head0, aux0, padded = (
        walk[0], walk[1], walk[2], walk[3], walk[4], walk[5], walk[6], walk[7], walk[8],
    )  # fmt: skip
    qs, gs, bases, deltas, bounds, ready = buffers
    member, row, intervals, turn = _place(walk, i, BM, PLANNED)
    aux = aux0 + member * padded + row
    slot = i % STAGES
    real = i < end
    arrived = ready.index(slot)
    mbarrier.expect(arrived, 2 * q_.block_type.nbytes + (16 if PLANNED else 8) * BM, pred=real)
    from_q = [turn * walk[13] + batch, head0 + member, row, 0]
    tma.async_copy_global_to_shared(q_, from_q, arrived, qs.index(slot), pred=real)
    tma.async_copy_global_to_shared(base, [aux], arrived, bases.index(slot), pred=real)
    if PLANNED:
        at = 2 * (intervals * padded + row)
        tma.async_copy_global_to_shared(bounds_, [at], arrived, bounds.index(slot), pred=real)
    tma.async_copy_global_to_shared(g_, [batch, head0 + member, row, 0], arrived, gs.index(slot), pred=real)
    tma.async_copy_global_to_shared(delta, [aux], arrived, deltas.index(slot), pred=real)


@gluon.jit
def _place(walk, i, BM: gl.constexpr, PLANNED: gl.constexpr):
    """`(head of the group, first row, intervals, turn)` of step i: head by head, each from step `shift` on, around."""
    steps, shift = walk[9], walk[10]
    tile = i % steps + shift
    tile = gl.where(tile >= steps, tile - steps, tile)
    if PLANNED:
        step = step_of(walk[11], walk[12] + tile, walk[14])
        row, intervals, turn = (step >> 8) * BM, slot_of(step), step & 1
    else:
        row, intervals, turn = tile * BM, 0, 0
    return i // steps, row, intervals, turn


@gluon.jit
def _walk(
    walk, buffers, ks, vs, ds_s, dq_s, sums, keys, length_k, end, scale,
    BM: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr, PLANNED: gl.constexpr,
):  # fmt: skip
    """`(dk / scale, dv)` of the key tile of numbers `keys` over steps `0 ... end`; hidden pairs give nothing.

    One loop for all tiles: with two, ptxas lets no product overlap another one (its warning C7515).
    """
    qs, gs, bases, deltas, bounds, ready = buffers
    aux0, padded = walk[7], walk[8]
    real = keys < length_k
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BD, 16])
    queries: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BD // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_keys, 2)
    columns: gl.constexpr = gl.SliceLayout(0, scores)
    dtype: gl.constexpr = qs.dtype
    zero_s = gl.zeros([BN, BM], gl.float32, scores)
    zero_q = gl.zeros([BM, BD], gl.float32, queries)
    dk = warpgroup_mma_init(gl.zeros([BN, BD], gl.float32, of_keys))
    dv = warpgroup_mma_init(gl.zeros([BN, BD], gl.float32, of_keys))
    for i in gl.static_range(STAGES - 1):
        _fetch(walk, buffers, i, end, STAGES, BM, PLANNED)
    for i in range(end):
        slot = i % STAGES
        # Always 0, but the compiler does not know: it would keep the addresses of all products in registers and spill.
        only = i >> 30
        member, row, _, turn = _place(walk, i, BM, PLANNED)
        to = turn * walk[15] + aux0 + member * padded + row
        k, v = ks.index(only).reshape([BN, BD]), vs.index(only).reshape([BN, BD])
        q, g = qs.index(slot).reshape([BM, BD]), gs.index(slot).reshape([BM, BD])
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        s = warpgroup_mma(k, q.permute([1, 0]), zero_s, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, g.permute([1, 0]), zero_s, use_acc=False, is_async=True)
        base = bases.index(slot).load(columns)
        p = gl.exp2(warpgroup_mma_wait(1, deps=[s]) * scale - base[None, :])
        if PLANNED:
            low = bounds.index(slot).slice(0, BM).load(columns)
            high = bounds.index(slot).slice(BM, BM).load(columns)
            p = gl.where((keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :]), p, 0.0)
        else:
            p = gl.where(real[:, None], p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), g, dv, is_async=True)
        delta = deltas.index(slot).load(columns)
        ds = (p * (warpgroup_mma_wait(1, deps=[dp]) - delta[None, :])).to(dtype)
        ds_s.index(only).store(ds)
        fence_async_shared()
        tma.store_wait(0)
        barrier()
        dq = warpgroup_mma(ds_s.index(only).permute([1, 0]), k, zero_q, use_acc=False, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
        # Before the barrier above every warp has waited for the products of step i - 1: its copies may be overwritten.
        _fetch(walk, buffers, i + STAGES - 1, end, STAGES, BM, PLANNED)
        part = warpgroup_mma_wait(1, deps=[dq])
        dq_s.store(part)
        fence_async_shared()
        barrier()
        _reduce_add(sums, [to, 0], dq_s)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    tma.store_wait(0)
    return dk, dv


@gluon.jit(
    do_not_specialize=["kv_heads", "group", "length_q", "length_k", "tiles", "items", "at_once", "padded"]
)
def backward(
    q_, k_, v_, g_, dk_, dv_, base, delta, sums, plan, bounds_, dkb, dkh, dkl, dvb, dvh, dvl, kv_heads, group, length_q,
    length_k, tiles, items, at_once, padded, scale,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr, TURN: gl.constexpr,
    PLANNED: gl.constexpr,
):  # fmt: skip
    """One program per tile of keys of one of the `items` key heads of samples, over the queries of its group of heads.

    Arguments as in `triton_backward.backward_keys`; `base`, `delta`: descriptors of all rows; `sums [rows, BD]`: of the
    sums of dQ / scale. TURN: each key tile begins with another query tile, so that programs side by side add to other
    rows. PLANNED: `plan` and `at_once` as in `gluon_forward.forward`, `bounds_` a descriptor of its rows; q may
    have the rotated queries behind the others, and then `sums` has theirs.
    """
    tile, item = place(gl.program_id(0), plan, tiles, items, at_once, PLANNED)
    batch, head = item // kv_heads, item % kv_heads
    start = tile * BN
    if PLANNED:
        first, _, steps = span(plan, tile, tiles)
    else:
        first, steps = 0, gl.cdiv(length_q, BM)
    shift = (tile * TURN) % steps
    qs = gl.allocate_shared_memory(q_.dtype, [STAGES] + q_.block_type.shape, q_.layout)
    gs = gl.allocate_shared_memory(q_.dtype, [STAGES] + g_.block_type.shape, g_.layout)
    bases = gl.allocate_shared_memory(gl.float32, [STAGES] + base.block_type.shape, base.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES] + delta.block_type.shape, delta.layout)
    if PLANNED:
        bounds = gl.allocate_shared_memory(gl.int32, [STAGES] + bounds_.block_type.shape, bounds_.layout)
    else:
        bounds = bases
    ks = gl.allocate_shared_memory(q_.dtype, [1] + k_.block_type.shape, k_.layout)
    vs = gl.allocate_shared_memory(q_.dtype, [1] + v_.block_type.shape, v_.layout)
    of_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], q_.dtype)
    ds_s = gl.allocate_shared_memory(q_.dtype, [1, BN, BM], of_ds)
    dq_s = gl.allocate_shared_memory(gl.float32, [BM, BD], sums.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(ready.index(STAGES), 2 * k_.block_type.nbytes)
    tma.async_copy_global_to_shared(k_, [batch, head, start, 0], ready.index(STAGES), ks.index(0))
    tma.async_copy_global_to_shared(v_, [batch, head, start, 0], ready.index(STAGES), vs.index(0))
    aux0 = item * group * padded
    walk = (
        q_, g_, base, delta, bounds_, batch, head * group, aux0, padded, steps, shift, plan, first,
        items // kv_heads, tiles, items * group * padded,
    )  # fmt: skip
    mbarrier.wait(ready.index(STAGES), 0)
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])
    keys = start + gl.arange(0, BN, gl.SliceLayout(1, scores))
    dk, dv = _walk(
        walk, (qs, gs, bases, deltas, bounds, ready), ks, vs, ds_s, dq_s, sums, keys, length_k, steps * group,
        scale, BM, BN, BD, STAGES, PLANNED,
    )  # fmt: skip
    store_rows(dk_, dk * (scale * LN_2), batch, head, start, length_k, dkb, dkh, dkl, D)
    store_rows(dv_, dv, batch, head, start, length_k, dvb, dvh, dvl, D)
