"""The forward kernel of QAT attention. Imported only by the backend that launches it, since Triton is optional."""

import triton
import triton.language as tl

from kernels.qat.parts_triton import TILE, fake_quant_p, grouped, key_of, key_range, seen, spread


@triton.jit
def _attend(
    acc, exact, peak, total, q, k_desc, v_desc, base, begin, end, c, rows, length, shift,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, P_SCALE: tl.constexpr, HIGH: tl.constexpr, M: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `begin` to `end`; `peak` is the running maximum in units of log2, `total` per group."""
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        k = k_desc.load([base + start, 0])
        s = tl.dot(q, k.T)
        if MASKED:
            s = tl.where(seen(rows, key_of(start + tl.arange(0, TILE)), length, shift, CAUSAL), s, float("-inf"))
        s = grouped(s, M)
        highest = tl.max(tl.max(s, 3), 1)
        new_peak = tl.maximum(peak, tl.max(highest, 1) * c)
        reference = new_peak
        if MASKED:
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        keep = tl.exp2(peak - reference)
        p = tl.exp2(s * c - spread(reference[:, None]))
        top = tl.exp2(tl.max(highest, 1) * c - reference)
        one = tl.full([M], 1.0, tl.float32)
        pq = fake_quant_p(p, tl.exp2(highest * c - reference[:, None]), top, one, P_SCALE)
        total = total * keep[:, None] + tl.sum(tl.sum(p, 3), 1)
        v = v_desc.load([base + start, 0])
        acc = tl.dot(tl.reshape(pq, [M, TILE]).to(v.dtype), v, acc * keep[:, None])
        if HIGH:
            exact = tl.dot(tl.reshape(p, [M, TILE]).to(v.dtype), v, exact * keep[:, None])
        peak = new_peak
    return acc, exact, peak, total


@triton.jit
def forward(
    q_desc, k_desc, v_desc, out, high, lse, lens, decode, scale_log2, Lq, Lk, LqP, LkP, H, D,
    LENS: tl.constexpr, GLOBAL: tl.constexpr, CAUSAL: tl.constexpr, P_SCALE: tl.constexpr, HIGH: tl.constexpr,
    M: tl.constexpr, DP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `[M]` of one head: quantised and exact outputs `[B, Lq, H, D]`, natural log-sum-exp `[B, H, Lq]`."""
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    first = tl.program_id(0) * M
    rows = first + tl.arange(0, M)
    length = Lk
    if LENS:
        length = tl.minimum(tl.load(lens + b).to(tl.int32), Lk)
    c, unit = scale_log2, 1.0
    if GLOBAL:
        c = scale_log2 * tl.load(decode + bh * 3) * tl.load(decode + bh * 3 + 1)
        unit = tl.load(decode + bh * 3 + 2)
    shift = Lk - Lq
    full, stop = key_range(first, first + M - 1, length, shift, CAUSAL)
    q = q_desc.load([bh * LqP + first, 0])
    acc = tl.zeros([M, DP], tl.float32)
    exact = tl.zeros([M, DP], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M, 4], tl.float32)
    base = bh * LkP
    acc, exact, peak, total = _attend(
        acc, exact, peak, total, q, k_desc, v_desc, base, 0, full, c, rows, length, shift,
        CAUSAL, False, P_SCALE, HIGH, M, STAGES,
    )  # fmt: skip
    acc, exact, peak, total = _attend(
        acc, exact, peak, total, q, k_desc, v_desc, base, full, stop, c, rows, length, shift,
        CAUSAL, True, P_SCALE, HIGH, M, 1,
    )  # fmt: skip
    summed = tl.sum(total, 1)
    sees = summed > 0
    share = tl.where(sees, unit / tl.where(sees, summed, 1.0), 0.0)[:, None]
    cols = tl.arange(0, DP)
    inside = (rows < Lq)[:, None] & (cols < D)[None, :]
    at = ((b.to(tl.int64) * Lq + rows) * H + h)[:, None] * D + cols[None, :]
    tl.store(out + at, (acc * share).to(out.dtype.element_ty), mask=inside)
    if HIGH:
        tl.store(high + at, (exact * share).to(high.dtype.element_ty), mask=inside)
    log_sum = (peak + tl.log2(tl.where(sees, summed, 1.0))) * 0.6931471805599453
    tl.store(lse + bh.to(tl.int64) * Lq + rows, log_sum, mask=rows < Lq)
