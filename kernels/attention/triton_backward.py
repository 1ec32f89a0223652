"""Attention backward, with P = 2^(s - lse) recomputed from the log-sum-exp.

dV = P^T dO, dS = P * (dO V^T - delta) with delta = rowsum(O * dO) - dlse, dK = scale dS^T Q, dQ = scale dS K
(Dao et al. 2022, FlashAttention, algorithm 4; the gradient dlse of the log-sum-exp adds P * dlse to dS).

The gradient of q comes from a kernel of its own: scores and dP are computed twice, seven products in all where five are
needed, and no program adds to what another one writes. The kernel by hand (`gluon_backward`) makes do with five and
leaves float32 sums of dQ, which `finish_queries` rounds.

`prepare` stores delta and lse in base 2, padded to whole tiles: a row that does not exist, or sees no key, has
lse = +inf, hence P = 0. So the key kernel needs no mask on queries; and as row j of dK and dV takes part in nothing
else, hidden keys are left out when it is stored.
"""

import triton
import triton.language as tl

from kernels.attention.triton_parts import LN_2, LOG2_E, key_range, load_rows, product, sequence, store_rows, visible


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
def _over_queries(
    dk, dv, k, v, q_, g_, base_, delta_, batch, head, first, n_queries, aux, keys, offset, lo, hi, scale,
    qb, qh, ql, gb, gh, gl,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, DIAGONAL: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
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
        g = load_rows(g_, batch, head, first + row, first + n_queries, gb, gh, gl, D, BM, BD, TMA)
        dv = product(p.to(g.dtype), g, dv, PRECISION)
        dp = product(v, tl.trans(g), None, PRECISION)
        delta = tl.load(delta_ + aux + rows)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = product(ds, q, dk, PRECISION)
    return dk, dv


@triton.jit
def _over_group(
    dk, dv, k, v, q_, g_, base, delta, batch, index, kv_head, kv_heads, group, padded, first, n_queries,
    start, keys, offset, lo, hi, scale, qb, qh, ql, gb, gh, gl,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head; causal: first the rows whose view of the key tile ends within it."""
    for member in range(group):
        head = kv_head * group + member
        aux = (index * kv_heads * group + head).to(tl.int64) * padded
        plain = lo
        if CAUSAL:
            begin = tl.maximum(lo, tl.maximum(start - offset, 0) // BM * BM)
            plain = tl.maximum(lo, tl.cdiv(tl.maximum(start + BN - 1 - offset, 0), BM) * BM)
            dk, dv = _over_queries(
                dk, dv, k, v, q_, g_, base, delta, batch, head, first, n_queries, aux, keys, offset, begin,
                tl.minimum(plain, hi), scale, qb, qh, ql, gb, gh, gl, D, BM, BD, True, TMA, PRECISION,
            )  # fmt: skip
        dk, dv = _over_queries(
            dk, dv, k, v, q_, g_, base, delta, batch, head, first, n_queries, aux, keys, offset, plain, hi, scale,
            qb, qh, ql, gb, gh, gl, D, BM, BD, False, TMA, PRECISION,
        )  # fmt: skip
    return dk, dv


@triton.jit
def backward_keys(
    q_, k_, v_, g_, dk_, dv_, base, delta, key_mask, starts_q, lens_q, starts_k, lens_k,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, gb, gh, gl, dkb, dkh, dkl, dvb, dvh, dvl, mask_b, dk_part, dv_part,
    kv_heads, group, length_q, length_k, tiles, parts, padded, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program `((index * kv_heads + head) * parts + part) * tiles + tile`: one key tile, one part of the queries.

    With parts > 1 the results are float32 partial sums, part p at `dk_ + p * dk_part`, to be added in order.
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
        dk, dv, k, v, q_, g_, base, delta, batch, index, head, kv_heads, group, padded, first_q, n_queries, start,
        keys, offset, lo, hi, scale, qb, qh, ql, gb, gh, gl, D, BM, BN, BD, CAUSAL, TMA, PRECISION,
    )  # fmt: skip
    dk = tl.where(real[:, None], dk * (scale * LN_2), 0.0)
    dv = tl.where(real[:, None], dv, 0.0)
    to, end = first_k + start, first_k + rows_k
    store_rows(dk_ + part.to(tl.int64) * dk_part, dk, batch, head, to, end, dkb, dkh, dkl, D, BN, BD)
    store_rows(dv_ + part.to(tl.int64) * dv_part, dv, batch, head, to, end, dvb, dvh, dvl, D, BN, BD)


@triton.jit
def finish_queries(
    sums, dq, dqb, dqh, dql, heads, length_q, tiles, scale, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dQ from the sums `[batch, heads, tiles * BM, BD]`; program `(batch * heads + head) * tiles + tile`."""
    row = tl.program_id(0) % tiles * BM
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    at = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    total = tl.load(sums + at[:, None] * BD + tl.arange(0, BD)[None, :])
    store_rows(dq, total * (scale * LN_2), batch, head, row, length_q, dqb, dqh, dql, D, BM, BD)


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
