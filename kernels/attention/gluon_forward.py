"""Attention forward for Hopper, with one warp that copies and two warpgroups that compute, in Gluon, 16-bit.

The maths is that of `triton_forward`. Each warpgroup owns 64 of a program's 128 queries. It starts S = Q K^T of a tile
of keys, then acc += P V of the tile before, and turns S into the next P while the second product runs; the other
warpgroup is somewhere else in its loop, so the tensor cores rarely wait. A program takes tile after tile, the next
one's first copies run while the last one's output is stored.

Without a plan keys are walked from the end: only the first tile may need a mask. With one (`plan.steps`) the partial
tiles come first. Queries may come twice, plain and rotated; each step says which of them it scores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.gluon_parts import barrier, place, slot_of, span, step_of, store_rows
from kernels.attention.triton_parts import LN_2


@gluon.jit
def _steps(work, tile, PLANNED: gl.constexpr, BN: gl.constexpr):
    """`(first, partial ones, all)` of the steps of a tile of queries."""
    plan, tiles, length_k = work[0], work[1], work[6]
    if PLANNED:
        first, partial, count = span(plan, tile, tiles)
    else:
        first, partial, count = tile * 0, tile * 0 + 1, gl.cdiv(length_k, BN)
    return first, partial, count


@gluon.jit
def _step(work, number, count, PLANNED: gl.constexpr):
    """Step `number` of a plan; without one tile `number` of `count`, from the end, written in the same way."""
    plan, tiles = work[0], work[1]
    if PLANNED:
        step = step_of(plan, number, tiles)
    else:
        step = (count - 1 - number) << 8
    return step


@gluon.jit
def _copy_tiles(
    q_, k_, v_, qs, ks, vs, bars, work, BN: gl.constexpr, STAGES: gl.constexpr, PLANNED: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """The copying warp: the queries, then every tile of keys and values as soon as its place is free."""
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    plan, tiles, items, at_once, heads, group = work[0], work[1], work[2], work[3], work[4], work[5]
    done = 0
    turn = 0
    for i in range(gl.program_id(0), tiles * items, gl.num_programs(0)):
        tile, item = place(i, plan, tiles, items, at_once, PLANNED)
        batch, head = item // heads, item % heads
        first, _, count = _steps(work, tile, PLANNED, BN)
        mbarrier.wait(q_free, turn & 1 ^ 1)
        mbarrier.expect(q_full, 2 * TURNS * q_.block_type.nbytes)
        for part in gl.static_range(2 * TURNS):
            at = [part // 2 * (items // heads) + batch, head, tile * 128 + 64 * (part % 2), 0]
            tma.async_copy_global_to_shared(q_, at, q_full, qs.index(part))
        for j in range(count):
            slot = done % STAGES
            phase = (done // STAGES) & 1 ^ 1
            key = (_step(work, first + j, count, PLANNED) >> 8) * BN
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_.block_type.nbytes)
            tma.async_copy_global_to_shared(k_, [batch, head // group, key, 0], k_full.index(slot), ks.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_.block_type.nbytes)
            tma.async_copy_global_to_shared(v_, [batch, head // group, key, 0], v_full.index(slot), vs.index(slot))
            done += 1
        turn += 1


@gluon.jit
def _attend_tiles(
    qs, ks, vs, bars, work, bounds_, out, lse, length_q, padded, scale, ob, oh, ol, lse_b, lse_h,
    HALF: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
    PLANNED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: its half of the queries of every tile."""
    plan, tiles, items, at_once, heads = work[0], work[1], work[2], work[3], work[4]
    done = 0
    turn = 0
    for i in range(gl.program_id(0), tiles * items, gl.num_programs(0)):
        tile, item = place(i, plan, tiles, items, at_once, PLANNED)
        batch, head = item // heads, item % heads
        row = tile * 128 + HALF * 64
        acc, peak, total, done = _attend(
            qs, ks, vs, bars, work, bounds_, tile, row, turn, done, padded, scale,
            HALF, BN, BD, STAGES, PLANNED, TURNS,
        )  # fmt: skip
        rows = row + gl.arange(0, 64, peak.type.layout)
        at = batch.to(gl.int64) * lse_b + head.to(gl.int64) * lse_h + rows
        if PLANNED:
            total = gl.where(total == 0.0, 1.0, total)
            gl.store(lse + at, gl.where(rows < length_q, peak + gl.log2(total), float("inf")))
        else:
            gl.store(lse + at, (peak + gl.log2(total)) * LN_2, mask=rows < length_q)
        values: gl.constexpr = acc.type.layout
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, values))[:, None]
        store_rows(out, acc, batch, head, row, length_q, ob, oh, ol, D)
        turn += 1


@gluon.jit
def _hide(s, work, bounds_, row, step, padded, PLANNED: gl.constexpr, BN: gl.constexpr):
    """-inf for scores of hidden pairs: keys beyond the end, or by a plan those outside of the interval of the row."""
    scores: gl.constexpr = s.type.layout
    keys = (step >> 8) * BN + gl.arange(0, BN, gl.SliceLayout(0, scores))
    if PLANNED:
        at = bounds_ + 2 * (slot_of(step) * padded + row) + gl.arange(0, 64, gl.SliceLayout(1, scores))
        low, high = gl.load(at), gl.load(at + 64)
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
    else:
        seen = (keys < work[6])[None, :]
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _anchor(peak, MASKED: gl.constexpr):
    """The maximum, or 0 for a row that has seen no key yet: -inf - -inf would be NaN."""
    if MASKED:
        peak = gl.where(peak == float("-inf"), 0.0, peak)
    return peak


@gluon.jit
def _advance(
    acc, peak, total, p, j, step, qs, ks, vs, bars, work, bounds_, row, padded, scale,
    HALF: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Scores of tile j of keys beside acc += P V of tile j - 1, then the next P."""
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    scores: gl.constexpr = p.type.layout
    values: gl.constexpr = acc.type.layout
    slot = j % STAGES
    before = (j - 1) % STAGES
    q = _queries(qs, step, HALF, BD, TURNS)
    zero = gl.zeros([64, BN], gl.float32, scores)
    mbarrier.wait(k_full.index(slot), (j // STAGES) & 1)
    s = warpgroup_mma(q, ks.index(slot).reshape([BN, BD]).permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((j - 1) // STAGES) & 1)
    weights = gl.convert_layout(p.to(qs.dtype), gl.DotOperandLayout(0, values, 2))
    acc = warpgroup_mma(weights, vs.index(before).reshape([BN, BD]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(slot))
    if MASKED:
        s = _hide(s, work, bounds_, row, step, padded, MASKED, BN)
    new = gl.maximum(peak, gl.max(s, 1) * scale)
    base = _anchor(new, MASKED)
    p = gl.exp2(s * scale - base[:, None])
    shrink = gl.exp2(peak - base)
    total = total * shrink + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, values))[:, None]
    return acc, new, total, p


@gluon.jit
def _queries(qs, step, HALF: gl.constexpr, BD: gl.constexpr, TURNS: gl.constexpr):
    """This warpgroup's queries, those that a step scores."""
    if TURNS == 2:
        q = qs.index((step & 1) * 2 + HALF)
    else:
        q = qs.index(HALF)
    return q.reshape([64, BD])


@gluon.jit
def _attend(
    qs, ks, vs, bars, work, bounds_, tile, row, turn, done, padded, scale,
    HALF: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr, PLANNED: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """`(sums of P V, running maximum, sum of P, steps done)` of 64 queries; `done`: steps of the tiles before."""
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    first, partial, count = _steps(work, tile, PLANNED, BN)
    step = _step(work, first, count, PLANNED)
    zero = gl.zeros([64, BN], gl.float32, scores)
    acc = gl.zeros([64, BD], gl.float32, values)
    slot = done % STAGES
    mbarrier.wait(q_full, turn & 1)
    mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
    q = _queries(qs, step, HALF, BD, TURNS)
    s = warpgroup_mma(q, ks.index(slot).reshape([BN, BD]).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(slot))
    s = _hide(s, work, bounds_, row, step, padded, PLANNED, BN)
    peak = gl.max(s, 1) * scale
    p = gl.exp2(s * scale - _anchor(peak, PLANNED)[:, None])
    total = gl.sum(p, 1)
    plain = 1
    if PLANNED:
        plain = gl.maximum(partial, 1)
        for j in range(1, plain):
            step = _step(work, first + j, count, PLANNED)
            acc, peak, total, p = _advance(
                acc, peak, total, p, done + j, step, qs, ks, vs, bars, work, bounds_, row, padded, scale,
                HALF, BN, BD, STAGES, True, TURNS,
            )  # fmt: skip
    for j in range(plain, count):
        if TURNS == 2:
            step = _step(work, first + j, count, PLANNED)
        acc, peak, total, p = _advance(
            acc, peak, total, p, done + j, step, qs, ks, vs, bars, work, bounds_, row, padded, scale,
            HALF, BN, BD, STAGES, False, TURNS,
        )  # fmt: skip
    mbarrier.arrive(q_free)
    end = done + count - 1
    last = end % STAGES
    mbarrier.wait(v_full.index(last), (end // STAGES) & 1)
    weights = gl.convert_layout(p.to(qs.dtype), gl.DotOperandLayout(0, values, 2))
    acc = warpgroup_mma(weights, vs.index(last).reshape([BN, BD]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(last))
    return acc, peak, total, done + count


@gluon.jit(
    do_not_specialize=["heads", "group", "length_q", "length_k", "tiles", "items", "at_once", "padded"]
)
def forward(
    q_, k_, v_, out, lse, plan, bounds_, ob, oh, ol, lse_b, lse_h, heads, group, length_q, length_k, tiles, items,
    at_once, padded, scale,
    D: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr, PLANNED: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 queries, in blocks of 64, of `items` heads of samples, shared out between the programs in turn.

    Arguments as in `triton_forward`. PLANNED: `plan` and `bounds_` from `plan.steps` and `plan.row_bounds` (for
    `padded` rows), else not read, and `at_once` as in `place`; lse is in base 2, of whole tiles, +inf beyond the
    last query, and a query that sees no key gives 0 and -inf. TURNS 2: q has the rotated queries behind the others.
    """
    qs = gl.allocate_shared_memory(q_.dtype, [2 * TURNS] + q_.block_type.shape, q_.layout)
    ks = gl.allocate_shared_memory(q_.dtype, [STAGES] + k_.block_type.shape, k_.layout)
    vs = gl.allocate_shared_memory(q_.dtype, [STAGES] + v_.block_type.shape, v_.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    barrier()
    bars = (q_full, q_free, k_full, k_free, v_full, v_free)
    work = (plan, tiles, items, at_once, heads, group, length_k)
    gl.warp_specialize(
        [
            (_attend_tiles, (
                qs, ks, vs, bars, work, bounds_, out, lse, length_q, padded, scale, ob, oh, ol, lse_b, lse_h,
                gl.constexpr(0), D, BN, BD, STAGES, PLANNED, TURNS,
            )),
            (_attend_tiles, (
                qs, ks, vs, bars, work, bounds_, out, lse, length_q, padded, scale, ob, oh, ol, lse_b, lse_h,
                gl.constexpr(1), D, BN, BD, STAGES, PLANNED, TURNS,
            )),
            (_copy_tiles, (q_, k_, v_, qs, ks, vs, bars, work, BN, STAGES, PLANNED, TURNS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
