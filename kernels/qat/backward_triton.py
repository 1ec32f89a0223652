"""The backward kernels of QAT attention: gradients of queries, then of keys and values; no atomic additions.

The query kernel visits the keys in the order of the forward kernel, so it meets the same running maxima; for the
forward-consistent gradient of v it writes them down, one per row and 64 keys, and the other kernel reads them.
Imported only by the backend that launches it, since Triton is optional.
"""

import triton
import triton.language as tl

from kernels.qat.parts_triton import TILE, fake_quant_p, grouped, key_of, key_range, seen, spread


@triton.jit
def ready(
    grad, high, lse, ready_grad, statistic, delta, Lq, LqP, H, D, sb, sl, sh, DP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The incoming gradient as dense `[B * H * LqP, DP]`, `delta = sum(high * grad)`, and `statistic`: lse in log2.

    `statistic` is +inf for rows that see no key and rows beyond the end: their weights become 0.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, DP)
    inside = (rows < Lq)[:, None] & (cols < D)[None, :]
    at = grad + b.to(tl.int64) * sb + h.to(tl.int64) * sh + rows.to(tl.int64)[:, None] * sl + cols[None, :]
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(
        high + ((b.to(tl.int64) * Lq + rows) * H + h)[:, None] * D + cols[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    row = bh.to(tl.int64) * LqP + rows
    tl.store(ready_grad + row[:, None] * DP + cols[None, :], g.to(ready_grad.dtype.element_ty))
    tl.store(delta + row, tl.sum(g * o, 1))
    m = tl.load(lse + bh.to(tl.int64) * Lq + rows, mask=rows < Lq, other=float("inf")) * 1.4426950408889634
    tl.store(statistic + row, tl.where(m == float("-inf"), float("inf"), m))


@triton.jit
def _query_steps(
    acc, peak, q, grad, k_desc, v_desc, running, base, begin, end, c, unit, m, delta, rows, length, shift, LqP,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, RUNNING: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds `dS K` over the keys from `begin` to `end`; `running` points at this head's first tile."""
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        k = k_desc.load([base + start, 0])
        v = v_desc.load([base + start, 0])
        s = tl.dot(q, k.T)
        dp = tl.dot(grad, v.T)
        if MASKED:
            s = tl.where(seen(rows, key_of(start + tl.arange(0, TILE)), length, shift, CAUSAL), s, float("-inf"))
        if RUNNING:
            peak = tl.maximum(peak, tl.max(s, 1) * c)
            reference = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak
            tl.store(running + start // TILE * LqP + rows, reference)
        p = tl.exp2(s * c - m[:, None])
        ds = p * (dp * unit - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc)
    return acc, peak


@triton.jit
def query_gradient(
    q_desc, k_desc, v_desc, grad_desc, statistic, deltas, dq, running, lens, decode, scale, scale_log2, first_head,
    Lq, Lk, LqP, LkP, H, D,
    LENS: tl.constexpr, GLOBAL: tl.constexpr, CAUSAL: tl.constexpr, RUNNING: tl.constexpr,
    M: tl.constexpr, DP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`dq [B, Lq, H, D] = scale * dS K` for M rows of one head, and the running maxima `[heads, LkP / 64, LqP]`."""
    bh = first_head + tl.program_id(1)
    b, h = bh // H, bh % H
    first = tl.program_id(0) * M
    rows = first + tl.arange(0, M)
    length = Lk
    if LENS:
        length = tl.minimum(tl.load(lens + b).to(tl.int32), Lk)
    c, unit, weight = scale_log2, 1.0, scale
    if GLOBAL:
        k_decode = tl.load(decode + bh * 3 + 1)
        c = scale_log2 * tl.load(decode + bh * 3) * k_decode
        unit = tl.load(decode + bh * 3 + 2)
        weight = scale * k_decode
    shift = Lk - Lq
    full, stop = key_range(first, first + M - 1, length, shift, CAUSAL)
    q = q_desc.load([bh * LqP + first, 0])
    grad = grad_desc.load([bh * LqP + first, 0])
    m = tl.load(statistic + bh.to(tl.int64) * LqP + rows)
    delta = tl.load(deltas + bh.to(tl.int64) * LqP + rows)
    acc = tl.zeros([M, DP], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    base = bh * LkP
    into = running + (bh - first_head).to(tl.int64) * (LkP // TILE) * LqP
    acc, peak = _query_steps(
        acc, peak, q, grad, k_desc, v_desc, into, base, 0, full, c, unit, m, delta, rows, length, shift, LqP,
        CAUSAL, False, RUNNING, STAGES,
    )  # fmt: skip
    acc, peak = _query_steps(
        acc, peak, q, grad, k_desc, v_desc, into, base, full, stop, c, unit, m, delta, rows, length, shift, LqP,
        CAUSAL, True, RUNNING, 1,
    )  # fmt: skip
    cols = tl.arange(0, DP)
    at = ((b.to(tl.int64) * Lq + rows) * H + h)[:, None] * D + cols[None, :]
    tl.store(dq + at, (acc * weight).to(dq.dtype.element_ty), mask=(rows < Lq)[:, None] & (cols < D)[None, :])


@triton.jit
def _key_steps(
    dk, dv, k, v, q_desc, grad_desc, statistic, deltas, running, base, begin, end, c, unit, keys, length, shift,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, RUNNING: tl.constexpr, P_SCALE: tl.constexpr,
    M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the queries from `begin` to `end`; the pointers are those of this head (and tile, for `running`)."""
    for start in tl.range(begin, end, M, num_stages=STAGES):
        rows = start + tl.arange(0, M)
        q = q_desc.load([base + start, 0])
        grad = grad_desc.load([base + start, 0])
        s = tl.dot(q, k.T)
        dp = tl.dot(grad, v.T)
        m = tl.load(statistic + rows)
        delta = tl.load(deltas + rows)
        if MASKED:
            s = tl.where(seen(rows, keys, length, shift, CAUSAL), s, float("-inf"))
        reference, factor = m, tl.full([M], 1.0, tl.float32)
        if RUNNING:
            reference = tl.load(running + rows)
            factor = tl.exp2(reference - m)
        s = grouped(s, M)
        highest = tl.max(tl.max(s, 3), 1)
        p = tl.exp2(s * c - spread(reference[:, None]))
        top = tl.exp2(tl.max(highest, 1) * c - reference)
        pq = fake_quant_p(p, tl.exp2(highest * c - reference[:, None]), top, factor, P_SCALE)
        pq = tl.reshape(pq, [M, TILE]).to(grad.dtype)
        dv = tl.dot(tl.trans(pq), grad, dv)
        ds = tl.reshape(p, [M, TILE]) * (dp * (unit * factor)[:, None] - (delta * factor)[:, None])
        ds = ds.to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk)
    return dk, dv


@triton.jit
def key_gradient(
    q_desc, k_desc, v_desc, grad_desc, statistic, deltas, dk_out, dv_out, running, lens, decode, scale, scale_log2,
    first_head, Lq, Lk, LqP, LkP, H, D,
    LENS: tl.constexpr, GLOBAL: tl.constexpr, CAUSAL: tl.constexpr, RUNNING: tl.constexpr, P_SCALE: tl.constexpr,
    M: tl.constexpr, DP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`dk = scale * dS^T Q` and `dv = P_q^T grad`, both `[B, Lk, H, D]`, for 64 keys of one head."""
    bh = first_head + tl.program_id(1)
    b, h = bh // H, bh % H
    tile = tl.program_id(0)
    keys = key_of(tile * TILE + tl.arange(0, TILE))
    length = Lk
    if LENS:
        length = tl.minimum(tl.load(lens + b).to(tl.int32), Lk)
    c, unit, weight = scale_log2, 1.0, scale
    if GLOBAL:
        q_decode = tl.load(decode + bh * 3)
        c = scale_log2 * q_decode * tl.load(decode + bh * 3 + 1)
        unit = tl.load(decode + bh * 3 + 2)
        weight = scale * q_decode
    shift = Lk - Lq
    # Queries before `begin` see none of these keys; those from `full` on see all of them, if all keys are real.
    begin, full = 0, 0
    if CAUSAL:
        begin = tl.minimum(tl.maximum(tile * TILE - shift, 0) // M * M, LqP)
        full = tl.minimum((tl.maximum(tile * TILE + TILE - 1 - shift, 0) + M - 1) // M * M, LqP)
    if tile * TILE + TILE > length:
        full = LqP
    if tile * TILE >= length:
        begin = LqP
    k = k_desc.load([bh * LkP + tile * TILE, 0])
    v = v_desc.load([bh * LkP + tile * TILE, 0])
    dk = tl.zeros([TILE, DP], tl.float32)
    dv = tl.zeros([TILE, DP], tl.float32)
    head = bh.to(tl.int64) * LqP
    saved = running + ((bh - first_head).to(tl.int64) * (LkP // TILE) + tile) * LqP
    dk, dv = _key_steps(
        dk, dv, k, v, q_desc, grad_desc, statistic + head, deltas + head, saved, bh * LqP, begin, full, c, unit, keys,
        length, shift, CAUSAL, True, RUNNING, P_SCALE, M, 1,
    )  # fmt: skip
    dk, dv = _key_steps(
        dk, dv, k, v, q_desc, grad_desc, statistic + head, deltas + head, saved, bh * LqP, full, LqP, c, unit, keys,
        length, shift, CAUSAL, False, RUNNING, P_SCALE, M, STAGES,
    )  # fmt: skip
    cols = tl.arange(0, DP)
    at = ((b.to(tl.int64) * Lk + keys) * H + h)[:, None] * D + cols[None, :]
    inside = (keys < Lk)[:, None] & (cols < D)[None, :]
    tl.store(dk_out + at, (dk * weight).to(dk_out.dtype.element_ty), mask=inside)
    tl.store(dv_out + at, dv.to(dv_out.dtype.element_ty), mask=inside)
