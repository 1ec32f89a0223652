"""Attention backward, with P = 2^(s - lse) recomputed from the log-sum-exp.

dV = P^T dO, dS = P * (dO V^T - delta) with delta = rowsum(O * dO) - dlse, dK = scale dS^T Q, dQ = scale dS K
(Dao et al. 2022, FlashAttention, algorithm 4; the gradient dlse of the log-sum-exp adds P * dlse to dS).

The gradient of q comes from a kernel of its own: scores and dP are computed twice, seven products in all where five are
needed, and no program adds to what another one writes. Or the key kernel adds its part to float32 sums in memory (SUMS):
five products, but the order of the adds, and so the last bits, differ from run to run.

`prepare` stores delta and lse in base 2, padded to whole tiles: a row that does not exist, or sees no key, has
lse = +inf, hence P = 0. So the key kernel needs no mask on queries; and as row j of dK and dV takes part in nothing
else, hidden keys are left out when it is stored. Only dQ mixes keys, so with SUMS tiles with hidden keys are masked.
"""

import triton
import triton.language as tl

from kernels.attention.triton_parts import LN_2, LOG2_E, key_range, load_rows, product, sequence, store_rows, visible

BY_ELEMENT: tl.constexpr = tl.constexpr(1)


@triton.jit
def prepare(
    out, dout, lse, dlse, base, delta, starts_q, lens_q,
    ob, oh, ol, gb, gh, gl, lse_b, lse_h, dlse_b, dlse_h, dlse_l, heads, length_q, tiles,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Writes `base` and `delta [sequences, heads, tiles * BM]`, every element."""
    tile = tl.program_id(0) % tiles
    index = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    row = tile * BM
    batch, first, n_queries = sequence(starts_q, lens_q, index, length_q, PACKED, False)
    o = load_rows(out, batch, head, first + row, first + n_queries, ob, oh, ol, D, BM, BD, False)
    g = load_rows(dout, batch, head, first + row, first + n_queries, gb, gh, gl, D, BM, BD, False)
    rows = row + tl.arange(0, BM)
    real = rows < n_queries
    at = batch.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h + first + rows
    low = tl.load(lse + at, mask=real, other=float("-inf"))
    g = g.to(tl.float32)
    d = tl.sum(o.to(tl.float32) * g, 1)
    if HAS_DLSE:
        at = batch.to(tl.int64) * dlse_b + head.to(tl.int64) * dlse_h + (first + rows).to(tl.int64) * dlse_l
        d -= tl.load(dlse + at, mask=real & (low != float("-inf")), other=0.0)
    to = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    tl.store(base + to, tl.where(low == float("-inf"), float("inf"), low * LOG2_E))
    tl.store(delta + to, tl.where(real, d, 0.0))


@triton.jit
def _add(sums, part, row, BM: tl.constexpr, BD: tl.constexpr, SUMS: tl.constexpr):
    """Adds `part` to rows `row ... row + BM` of the float32 sums `[rows, BD]`, in whatever order programs come."""
    if SUMS == BY_ELEMENT:
        at = (row + tl.arange(0, BM)).to(tl.int64)[:, None] * BD + tl.arange(0, BD)[None, :]
        tl.atomic_add(sums + at, part, sem="relaxed")
    else:
        sums.atomic_add([row.to(tl.int32), 0], part)


@triton.jit
def _over_queries(
    dk, dv, k, v, q_, g_, base_, delta_, sums, batch, head, first, n_queries, aux, keys, real, offset, lo, hi,
    scale, qb, qh, ql, gb, gh, gl,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, DIAGONAL: tl.constexpr, HIDE: tl.constexpr,
    SUMS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Query rows `lo ... hi` in tiles, scores transposed: `[keys, queries]`, so P and dS are operands as they are."""
    for row in range(lo, hi, BM):
        rows = row + tl.arange(0, BM)
        q = load_rows(q_, batch, head, first + row, first + n_queries, qb, qh, ql, D, BM, BD, TMA)
        base = tl.load(base_ + aux + rows)
        s = product(k, tl.trans(q), None, PRECISION)
        p = tl.exp2(s * scale - base[None, :])
        if DIAGONAL:
            p = tl.where(keys[:, None] <= rows[None, :] + offset, p, 0.0)
        if HIDE:
            p = tl.where(real[:, None], p, 0.0)
        g = load_rows(g_, batch, head, first + row, first + n_queries, gb, gh, gl, D, BM, BD, TMA)
        dv = product(p.to(g.dtype), g, dv, PRECISION)
        dp = product(v, tl.trans(g), None, PRECISION)
        delta = tl.load(delta_ + aux + rows)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = product(ds, q, dk, PRECISION)
        if SUMS:
            _add(sums, product(tl.trans(ds), k, None, PRECISION), aux + row, BM, BD, SUMS)
    return dk, dv


@triton.jit
def _over_group(
    dk, dv, k, v, q_, g_, base, delta, sums, batch, index, kv_head, kv_heads, group, padded, first, n_queries,
    start, keys, real, hidden, offset, lo, hi, scale, qb, qh, ql, gb, gh, gl,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    SUMS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head; causal: first the rows whose view of the key tile ends within it.

    With SUMS a tile with `hidden` keys takes all rows in the loop that masks.
    """
    for member in range(group):
        head = kv_head * group + member
        aux = (index * kv_heads * group + head).to(tl.int64) * padded
        begin = lo
        plain = lo
        if CAUSAL:
            begin = tl.maximum(lo, tl.maximum(start - offset, 0) // BM * BM)
            plain = tl.maximum(lo, tl.cdiv(tl.maximum(start + BN - 1 - offset, 0), BM) * BM)
        if SUMS:
            plain = tl.where(hidden, tl.maximum(plain, hi), plain)
        if CAUSAL or SUMS:
            dk, dv = _over_queries(
                dk, dv, k, v, q_, g_, base, delta, sums, batch, head, first, n_queries, aux, keys, real, offset,
                begin, tl.minimum(plain, hi), scale, qb, qh, ql, gb, gh, gl,
                D, BM, BD, CAUSAL, SUMS != 0, SUMS, TMA, PRECISION,
            )  # fmt: skip
        dk, dv = _over_queries(
            dk, dv, k, v, q_, g_, base, delta, sums, batch, head, first, n_queries, aux, keys, real, offset,
            plain, hi, scale, qb, qh, ql, gb, gh, gl, D, BM, BD, False, False, SUMS, TMA, PRECISION,
        )  # fmt: skip
    return dk, dv


@triton.jit
def backward_keys(
    q_, k_, v_, g_, dk_, dv_, base, delta, sums, key_mask, starts_q, lens_q, starts_k, lens_k,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, gb, gh, gl, dkb, dkh, dkl, dvb, dvh, dvl, mask_b, dk_part, dv_part,
    kv_heads, group, length_q, length_k, tiles, parts, padded, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Program `((index * kv_heads + head) * parts + part) * tiles + tile`: one key tile, one part of the queries.

    SUMS: 0, or how its part of dQ / scale is added to `sums [sequences, heads, padded, BD]`: element by element (1) or
    by the copy engine, `sums` being a descriptor of rows of BD (2). With parts > 1 the results are float32 partial sums, part p at `dk_ + p * dk_part`, to be added in order.
    """
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles % parts
    index = tl.program_id(0) // tiles // parts // kv_heads
    head = tl.program_id(0) // tiles // parts % kv_heads
    batch, first_q, n_queries = sequence(starts_q, lens_q, index, length_q, PACKED, False)
    _, first_k, n_keys = sequence(starts_k, lens_k, index, length_k, PACKED, RAGGED)
    start = tile * BN
    rows_k = n_keys if PACKED else length_k
    if start >= rows_k:
        return
    offset = rows_k - n_queries
    each = tl.cdiv(tl.cdiv(n_queries, BM), parts) * BM
    lo = part * each
    hi = tl.minimum(lo + each, n_queries)
    if start >= n_keys:
        hi = lo
    keys = start + tl.arange(0, BN)
    real = keys < n_keys
    if MASKED:
        real = real & (tl.load(key_mask + index * mask_b + keys, mask=real, other=0) != 0)
    k = load_rows(k_, batch, head, first_k + start, first_k + rows_k, kb, kh, kl, D, BN, BD, TMA)
    v = load_rows(v_, batch, head, first_k + start, first_k + rows_k, vb, vh, vl, D, BN, BD, TMA)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    dk, dv = _over_group(
        dk, dv, k, v, q_, g_, base, delta, sums, batch, index, head, kv_heads, group, padded, first_q,
        n_queries, start, keys, real, MASKED or start + BN > n_keys, offset, lo, hi, scale, qb, qh, ql, gb, gh, gl,
        D, BM, BN, BD, CAUSAL, SUMS, TMA, PRECISION,
    )  # fmt: skip
    dk = tl.where(real[:, None], dk * (scale * LN_2), 0.0)
    dv = tl.where(real[:, None], dv, 0.0)
    to, end = first_k + start, first_k + rows_k
    store_rows(dk_ + part.to(tl.int64) * dk_part, dk, batch, head, to, end, dkb, dkh, dkl, D, BN, BD)
    store_rows(dv_ + part.to(tl.int64) * dv_part, dv, batch, head, to, end, dvb, dvh, dvl, D, BN, BD)


@triton.jit
def finish_queries(
    sums, dq, starts_q, lens_q, dqb, dqh, dql, heads, length_q, tiles, padded, scale,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dQ from the sums `[sequences, heads, padded, BD]`; program `(index * heads + head) * tiles + tile`."""
    tile = tl.program_id(0) % tiles
    index = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    row = tile * BM
    batch, first, n_queries = sequence(starts_q, lens_q, index, length_q, PACKED, False)
    at = (index * heads + head).to(tl.int64) * padded + row + tl.arange(0, BM)
    total = tl.load(sums + at[:, None] * BD + tl.arange(0, BD)[None, :])
    store_rows(dq, total * (scale * LN_2), batch, head, first + row, first + n_queries, dqb, dqh, dql, D, BM, BD)


@triton.jit
def _over_keys(
    dq, q, g, base, delta, k_, v_, key_mask, batch, head, index, row, first, n_keys, offset, lo, hi, scale,
    kb, kh, kl, vb, vh, vl, mask_b,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, SELECT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for key in range(lo, hi, BN):
        k = load_rows(k_, batch, head, first + key, first + n_keys, kb, kh, kl, D, BN, BD, TMA)
        s = product(q, tl.trans(k), None, PRECISION)
        p = tl.exp2(s * scale - base[:, None])
        if SELECT:
            keys = key + tl.arange(0, BN)
            seen = visible(row + tl.arange(0, BM), keys, n_keys, offset, key_mask, index * mask_b, CAUSAL, MASKED)
            p = tl.where(seen, p, 0.0)
        v = load_rows(v_, batch, head, first + key, first + n_keys, vb, vh, vl, D, BN, BD, TMA)
        dp = product(g, tl.trans(v), None, PRECISION)
        ds = p * (dp - delta[:, None])
        dq = product(ds.to(k.dtype), k, dq, PRECISION)
    return dq


@triton.jit
def backward_queries(
    q_, k_, v_, g_, dq_, base_, delta_, key_mask, starts_q, lens_q, starts_k, lens_k,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, gb, gh, gl, dqb, dqh, dql, mask_b,
    heads, group, length_q, length_k, tiles, padded, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program `(index * heads + head) * tiles + tile`: one query tile over all its keys."""
    tile = tl.program_id(0) % tiles
    index = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    if CAUSAL:
        tile = tiles - 1 - tile
    row = tile * BM
    batch, first_q, n_queries = sequence(starts_q, lens_q, index, length_q, PACKED, False)
    _, first_k, n_keys = sequence(starts_k, lens_k, index, length_k, PACKED, RAGGED)
    if row >= n_queries:
        return
    offset = (n_keys if PACKED else length_k) - n_queries
    plain, end = key_range(row, offset, n_keys, BM, BN, CAUSAL, MASKED)
    q = load_rows(q_, batch, head, first_q + row, first_q + n_queries, qb, qh, ql, D, BM, BD, TMA)
    g = load_rows(g_, batch, head, first_q + row, first_q + n_queries, gb, gh, gl, D, BM, BD, TMA)
    aux = (index * heads + head).to(tl.int64) * padded + row + tl.arange(0, BM)
    base = tl.load(base_ + aux)
    delta = tl.load(delta_ + aux)
    dq = tl.zeros([BM, BD], tl.float32)
    kv_head = head // group
    dq = _over_keys(
        dq, q, g, base, delta, k_, v_, key_mask, batch, kv_head, index, row, first_k, n_keys, offset, 0, plain, scale,
        kb, kh, kl, vb, vh, vl, mask_b, D, BM, BN, BD, CAUSAL, MASKED, False, TMA, PRECISION,
    )  # fmt: skip
    dq = _over_keys(
        dq, q, g, base, delta, k_, v_, key_mask, batch, kv_head, index, row, first_k, n_keys, offset, plain, end, scale,
        kb, kh, kl, vb, vh, vl, mask_b, D, BM, BN, BD, CAUSAL, MASKED, True, TMA, PRECISION,
    )  # fmt: skip
    store_rows(dq_, dq * (scale * LN_2), batch, head, first_q + row, first_q + n_queries, dqb, dqh, dql, D, BM, BD)
