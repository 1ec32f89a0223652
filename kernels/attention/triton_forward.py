"""Attention forward: one program per query tile walks over the keys with an online softmax, base 2, in float32.

Derivation: with scores s, running maximum m, sum l and accumulator a over the keys seen so far, a further tile gives
m' = max(m, max s), l' = 2^(m - m') l + sum 2^(s - m'), a' = 2^(m - m') a + 2^(s - m') v; the result is a / l and
lse = (m + log2 l) ln 2. Scores are kept unscaled; one fused multiply-add per element applies scale * log2(e).
"""

import triton
import triton.language as tl

from kernels.attention.triton_parts import LN_2, key_range, load_rows, product, sequence, store_rows, visible


@triton.jit
def _walk(
    acc, total, peak, q, k_, v_, key_mask, batch, head, index, row, first, n_keys, offset, lo, hi, scale,
    kb, kh, kl, vb, vh, vl, mask_b,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, SELECT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `lo ... hi` in tiles; only with SELECT are unseen pairs taken out."""
    for key in range(lo, hi, BN):
        k = load_rows(k_, batch, head, first + key, first + n_keys, kb, kh, kl, D, BN, BD, TMA)
        s = product(q, tl.trans(k), None, PRECISION)
        if SELECT:
            keys = key + tl.arange(0, BN)
            seen = visible(row + tl.arange(0, BM), keys, n_keys, offset, key_mask, index * mask_b, CAUSAL, MASKED)
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(peak, tl.max(s, 1) * scale)
        base = tl.where(new == float("-inf"), 0.0, new) if SELECT else new
        p = tl.exp2(s * scale - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_rows(v_, batch, head, first + key, first + n_keys, vb, vh, vl, D, BN, BD, TMA)
        acc = product(p.to(v.dtype), v, acc, PRECISION)
        peak = new
    return acc, total, peak


@triton.jit
def forward(
    q_, k_, v_, out, lse, key_mask, starts_q, lens_q, starts_k, lens_k,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, lse_b, lse_h, mask_b,
    heads, group, length_q, length_k, tiles, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program `(index * heads + head) * tiles + tile`; index is a batch entry or a packed sequence."""
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
    acc = tl.zeros([BM, BD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    kv_head = head // group
    acc, total, peak = _walk(
        acc, total, peak, q, k_, v_, key_mask, batch, kv_head, index, row, first_k, n_keys, offset, 0, plain, scale,
        kb, kh, kl, vb, vh, vl, mask_b, D, BM, BN, BD, CAUSAL, MASKED, False, TMA, PRECISION,
    )  # fmt: skip
    acc, total, peak = _walk(
        acc, total, peak, q, k_, v_, key_mask, batch, kv_head, index, row, first_k, n_keys, offset, plain, end, scale,
        kb, kh, kl, vb, vh, vl, mask_b, D, BM, BN, BD, CAUSAL, MASKED, True, TMA, PRECISION,
    )  # fmt: skip
    blind = total == 0.0
    safe = tl.where(blind, 1.0, total)
    store_rows(out, acc / safe[:, None], batch, head, first_q + row, first_q + n_queries, ob, oh, ol, D, BM, BD)
    rows = row + tl.arange(0, BM)
    at = batch.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h + first_q + rows
    tl.store(lse + at, tl.where(blind, float("-inf"), (peak + tl.log2(safe)) * LN_2), mask=rows < n_queries)
