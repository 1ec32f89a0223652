"""Attention's output and its tangent in one walk over the keys (forward-mode derivative).

With s = scale q k^T and ds = scale (dq k^T + q dk^T), P the softmax of s:
o = P v,   do = (P * ds) v + P dv - r o,   r = rowsum(P * ds),   dlse = r.
All three sums over keys are carried unnormalised under the online softmax and rescaled together.
"""

import triton
import triton.language as tl

from kernels.attention.triton_parts import LN_2, key_range, load_rows, product, sequence, store_rows, visible


@triton.jit
def _walk(
    acc, tan, total, slope, peak, q, tq, k_, v_, tk_, tv_, key_mask, batch, head, index, row, first, n_keys, offset,
    lo, hi, scale, kb, kh, kl, vb, vh, vl, tkb, tkh, tkl, tvb, tvh, tvl, mask_b,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, SELECT: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for key in range(lo, hi, BN):
        k = load_rows(k_, batch, head, first + key, first + n_keys, kb, kh, kl, D, BN, BD, TMA)
        s = product(q, tl.trans(k), None, PRECISION)
        ts = product(tq, tl.trans(k), None, PRECISION)
        if KEYS:
            tk = load_rows(tk_, batch, head, first + key, first + n_keys, tkb, tkh, tkl, D, BN, BD, TMA)
            ts = product(q, tl.trans(tk), ts, PRECISION)
        if SELECT:
            keys = key + tl.arange(0, BN)
            seen = visible(row + tl.arange(0, BM), keys, n_keys, offset, key_mask, index * mask_b, CAUSAL, MASKED)
            s = tl.where(seen, s, float("-inf"))
            ts = tl.where(seen, ts, 0.0)
        new = tl.maximum(peak, tl.max(s, 1) * scale)
        base = tl.where(new == float("-inf"), 0.0, new) if SELECT else new
        p = tl.exp2(s * scale - base[:, None])
        pt = p * (ts * (scale * LN_2))
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        slope = slope * shrink + tl.sum(pt, 1)
        v = load_rows(v_, batch, head, first + key, first + n_keys, vb, vh, vl, D, BN, BD, TMA)
        p16 = p.to(v.dtype)
        acc = product(p16, v, acc * shrink[:, None], PRECISION)
        tan = product(pt.to(v.dtype), v, tan * shrink[:, None], PRECISION)
        if KEYS:
            tv = load_rows(tv_, batch, head, first + key, first + n_keys, tvb, tvh, tvl, D, BN, BD, TMA)
            tan = product(p16, tv, tan, PRECISION)
        peak = new
    return acc, tan, total, slope, peak


@triton.jit
def tangent(
    q_, k_, v_, tq_, tk_, tv_, out, tout, lse, tlse, key_mask, starts_q, lens_q, starts_k, lens_k,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, tqb, tqh, tql, tkb, tkh, tkl, tvb, tvh, tvl, ob, oh, ol, tob, toh, tol,
    lse_b, lse_h, mask_b, heads, group, length_q, length_k, tiles, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program `(index * heads + head) * tiles + tile`. KEYS: k and v have tangents (else tk and tv are not read)."""
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
    to, stop = first_q + row, first_q + n_queries
    q = load_rows(q_, batch, head, to, stop, qb, qh, ql, D, BM, BD, TMA)
    tq = load_rows(tq_, batch, head, to, stop, tqb, tqh, tql, D, BM, BD, TMA)
    acc = tl.zeros([BM, BD], tl.float32)
    tan = tl.zeros([BM, BD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    slope = tl.zeros([BM], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    kv_head = head // group
    acc, tan, total, slope, peak = _walk(
        acc, tan, total, slope, peak, q, tq, k_, v_, tk_, tv_, key_mask, batch, kv_head, index, row, first_k, n_keys,
        offset, 0, plain, scale, kb, kh, kl, vb, vh, vl, tkb, tkh, tkl, tvb, tvh, tvl, mask_b,
        D, BM, BN, BD, CAUSAL, MASKED, False, KEYS, TMA, PRECISION,
    )  # fmt: skip
    acc, tan, total, slope, peak = _walk(
        acc, tan, total, slope, peak, q, tq, k_, v_, tk_, tv_, key_mask, batch, kv_head, index, row, first_k, n_keys,
        offset, plain, end, scale, kb, kh, kl, vb, vh, vl, tkb, tkh, tkl, tvb, tvh, tvl, mask_b,
        D, BM, BN, BD, CAUSAL, MASKED, True, KEYS, TMA, PRECISION,
    )  # fmt: skip
    blind = total == 0.0
    safe = tl.where(blind, 1.0, total)
    slope = slope / safe
    o = acc / safe[:, None]
    store_rows(out, o, batch, head, to, stop, ob, oh, ol, D, BM, BD)
    store_rows(tout, tan / safe[:, None] - slope[:, None] * o, batch, head, to, stop, tob, toh, tol, D, BM, BD)
    rows = row + tl.arange(0, BM)
    at = batch.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h + first_q + rows
    tl.store(lse + at, tl.where(blind, float("-inf"), (peak + tl.log2(safe)) * LN_2), mask=rows < n_queries)
    tl.store(tlse + at, slope, mask=rows < n_queries)
