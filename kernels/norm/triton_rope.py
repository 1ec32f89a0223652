"""Triton kernels of RMSNorm and rotary embedding of queries and keys; launched by `kernels.norm.rope_launch`.

A tile is `[ROWS, HEADS, PAIRS]` channel pairs (a, b) of some tokens, held as two float32 arrays whatever the
convention, so the maths is written once. Program (b, p) walks tokens `[T p / P, T (p + 1) / P)` of sample b. q and k
of a token are worked on together: they share the angles, which are read once.
"""

import triton
import triton.language as tl

from kernels.norm.triton_norm import _span


@triton.jit
def _load_pairs(base, live_rows, H, R, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, sh):
    """(a, b) of `base [ROWS]` pointers to tokens, float32 `[ROWS, HEADS, PAIRS]`, 0 outside."""
    heads = tl.arange(0, HEADS)
    live = live_rows[:, None, None] & (heads < H)[None, :, None]
    lines = base[:, None, None] + heads[None, :, None] * sh
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)
        both = tl.load(lines + cols[None, None, :], mask=live & (cols < 2 * R)[None, None, :], other=0.0)
        a, b = tl.split(tl.reshape(both, [base.shape[0], HEADS, PAIRS, 2]))
    else:
        cols = tl.arange(0, PAIRS)
        live = live & (cols < R)[None, None, :]
        a = tl.load(lines + cols[None, None, :], mask=live, other=0.0)
        b = tl.load(lines + R + cols[None, None, :], mask=live, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(base, a, b, live_rows, H, R, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, sh):
    """The inverse of `_load_pairs`."""
    heads = tl.arange(0, HEADS)
    live = live_rows[:, None, None] & (heads < H)[None, :, None]
    lines = base[:, None, None] + heads[None, :, None] * sh
    to = base.dtype.element_ty
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)
        both = tl.reshape(tl.join(a.to(to), b.to(to)), [base.shape[0], HEADS, 2 * PAIRS])
        tl.store(lines + cols[None, None, :], both, mask=live & (cols < 2 * R)[None, None, :])
    else:
        cols = tl.arange(0, PAIRS)
        live = live & (cols < R)[None, None, :]
        tl.store(lines + cols[None, None, :], a.to(to), mask=live)
        tl.store(lines + R + cols[None, None, :], b.to(to), mask=live)


@triton.jit
def _weights(
    ptr, H, R, WEIGHT: tl.constexpr, JOINT: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """The weight as pairs `[1, HEADS or 1, PAIRS]`; ones where there is none."""
    lines: tl.constexpr = HEADS if JOINT else 1
    heads = H if JOINT else 1
    if WEIGHT:
        always = tl.full([1], 1, tl.int1)
        a, b = _load_pairs(ptr + tl.zeros([1], tl.int32), always, heads, R, INTERLEAVED, lines, PAIRS, 2 * R)
    else:
        a = tl.full([1, 1, PAIRS], 1.0, tl.float32)
        b = a
    return a, b


@triton.jit
def _angles(cos, sin, at, live_rows, H, R, stt, sth, PER_HEAD: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Cosines and sines `[ROWS, HEADS or 1, PAIRS]` of tokens `at`."""
    cols = tl.arange(0, PAIRS)
    live = live_rows[:, None, None] & (cols < R)[None, None, :]
    here = (at * stt)[:, None, None] + cols[None, None, :]
    if PER_HEAD:
        heads = tl.arange(0, HEADS)
        here = here + heads[None, :, None] * sth
        live = live & (heads < H)[None, :, None]
    return tl.load(cos + here, mask=live, other=0.0), tl.load(sin + here, mask=live, other=0.0)


@triton.jit
def _mean(v, WIDTH, JOINT: tl.constexpr):
    """Mean over the norm's width: `[ROWS, 1, 1]`, or `[ROWS, HEADS, 1]` per head."""
    v = tl.sum(v, axis=2)
    if JOINT:
        mean = (tl.sum(v, axis=1) / WIDTH)[:, None, None]
    else:
        mean = (v / WIDTH)[:, :, None]
    return mean


@triton.jit
def _store_rstd(ptr, rstd, rows, live_rows, H, JOINT: tl.constexpr, HEADS: tl.constexpr):
    if JOINT:
        tl.store(ptr + rows[:, None, None], rstd, mask=live_rows[:, None, None])
    else:
        heads = tl.arange(0, HEADS)[None, :, None]
        tl.store(ptr + rows[:, None, None] * H + heads, rstd, mask=live_rows[:, None, None] & (heads < H))


@triton.jit
def _load_rstd(ptr, rows, live_rows, H, JOINT: tl.constexpr, HEADS: tl.constexpr):
    if JOINT:
        rstd = tl.load(ptr + rows[:, None, None], mask=live_rows[:, None, None], other=0.0)
    else:
        heads = tl.arange(0, HEADS)[None, :, None]
        here = ptr + rows[:, None, None] * H + heads
        rstd = tl.load(here, mask=live_rows[:, None, None] & (heads < H), other=0.0)
    return rstd


@triton.jit
def _forward(
    x, out, rstds, wa, wb, c, s, at, rows, live, H, R, eps, st, sh, ROPE: tl.constexpr, JOINT: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One tile of q or k. `at` are tokens within the sample, `rows` within the batch."""
    a, b = _load_pairs(x + at * st, live, H, R, INTERLEAVED, HEADS, PAIRS, sh)
    width = 2 * R * H if JOINT else 2 * R
    rstd = tl.rsqrt(_mean(a * a + b * b, width, JOINT) + eps)
    _store_rstd(rstds, rstd, rows, live, H, JOINT, HEADS)
    a, b = a * rstd * wa, b * rstd * wb
    if ROPE:
        a, b = a * c - b * s, a * s + b * c
    _store_pairs(out + rows * (2 * R * H), a, b, live, H, R, INTERLEAVED, HEADS, PAIRS, 2 * R)


@triton.jit
def rope_forward(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, q_rstd, k_rstd, T, H, R, P, GROUP, eps,
    sqb, sqt, sqh, skb, skt, skh, stb, stt, sth,
    HAS_K: tl.constexpr, WEIGHT: tl.constexpr, ROPE: tl.constexpr, PER_HEAD: tl.constexpr, JOINT: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`rotate(x rsqrt(mean(x^2) + eps) w)` of q and, with HAS_K, of k."""
    b, first, last = _span(T, P)
    width = 2 * R * H if JOINT else 2 * R
    qa, qb = _weights(q_weight + b // GROUP * width, H, R, WEIGHT, JOINT, INTERLEAVED, HEADS, PAIRS)
    ka, kb = _weights(k_weight + b // GROUP * width, H, R, WEIGHT and HAS_K, JOINT, INTERLEAVED, HEADS, PAIRS)
    for t in tl.range(first, last, ROWS, num_stages=STAGES):
        at = (t + tl.arange(0, ROWS)).to(tl.int64)
        live = at < last
        rows = b * T + at
        c, s = 1.0, 0.0
        if ROPE:
            c, s = _angles(cos + b * stb, sin + b * stb, at, live, H, R, stt, sth, PER_HEAD, HEADS, PAIRS)
        _forward(q + b * sqb, q_out, q_rstd, qa, qb, c, s, at, rows, live, H, R, eps, sqt, sqh, ROPE, JOINT,
                 INTERLEAVED, HEADS, PAIRS)  # fmt: skip
        if HAS_K:
            _forward(k + b * skb, k_out, k_rstd, ka, kb, c, s, at, rows, live, H, R, eps, skt, skh, ROPE, JOINT,
                     INTERLEAVED, HEADS, PAIRS)  # fmt: skip


@triton.jit
def _backward(
    x, grad, rstds, dx, wa, wb, c, s, at, rows, live, H, R, st, sh, sgt, sgh, ROPE: tl.constexpr,
    JOINT: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of q or k; returns its sums over tokens for the weight's gradient, `[HEADS, PAIRS]`."""
    ga, gb = _load_pairs(grad + at * sgt, live, H, R, INTERLEAVED, HEADS, PAIRS, sgh)
    a, b = _load_pairs(x + at * st, live, H, R, INTERLEAVED, HEADS, PAIRS, sh)
    rstd = _load_rstd(rstds, rows, live, H, JOINT, HEADS)
    if ROPE:
        ga, gb = ga * c + gb * s, gb * c - ga * s
    a, b = a * rstd, b * rstd
    sum_a, sum_b = tl.sum(ga * a, axis=0), tl.sum(gb * b, axis=0)
    ga, gb = ga * wa, gb * wb
    width = 2 * R * H if JOINT else 2 * R
    down = _mean(ga * a + gb * b, width, JOINT)
    ga, gb = (ga - a * down) * rstd, (gb - b * down) * rstd
    _store_pairs(dx + rows * (2 * R * H), ga, gb, live, H, R, INTERLEAVED, HEADS, PAIRS, 2 * R)
    return sum_a, sum_b


@triton.jit
def _store_sums(ptr, sum_a, sum_b, H, R, JOINT: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
                PAIRS: tl.constexpr):  # fmt: skip
    base = ptr + tl.zeros([1], tl.int32)
    always = tl.full([1], 1, tl.int1)
    if JOINT:
        _store_pairs(base, sum_a[None], sum_b[None], always, H, R, INTERLEAVED, HEADS, PAIRS, 2 * R)
    else:
        a, b = tl.sum(sum_a, axis=0)[None, None, :], tl.sum(sum_b, axis=0)[None, None, :]
        _store_pairs(base, a, b, always, 1, R, INTERLEAVED, 1, PAIRS, 2 * R)


@triton.jit
def rope_backward(
    q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd, q_grad, k_grad, dq, dk, partial, T, H, R, P, GROUP,
    sqb, sqt, sqh, skb, skt, skh, stb, stt, sth, sgb, sgt, sgh, slb, slt, slh,
    HAS_K: tl.constexpr, WEIGHT: tl.constexpr, ROPE: tl.constexpr, PER_HEAD: tl.constexpr, JOINT: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of `rope_forward`; `partial [B P, 1 + HAS_K, width]` are sums for the weights' gradients."""
    b, first, last = _span(T, P)
    width = 2 * R * H if JOINT else 2 * R
    qa, qb = _weights(q_weight + b // GROUP * width, H, R, WEIGHT, JOINT, INTERLEAVED, HEADS, PAIRS)
    ka, kb = _weights(k_weight + b // GROUP * width, H, R, WEIGHT and HAS_K, JOINT, INTERLEAVED, HEADS, PAIRS)
    sum_qa = tl.zeros([HEADS, PAIRS], tl.float32)
    sum_qb = tl.zeros([HEADS, PAIRS], tl.float32)
    sum_ka = tl.zeros([HEADS, PAIRS], tl.float32)
    sum_kb = tl.zeros([HEADS, PAIRS], tl.float32)
    for t in tl.range(first, last, ROWS, num_stages=STAGES):
        at = (t + tl.arange(0, ROWS)).to(tl.int64)
        live = at < last
        rows = b * T + at
        c, s = 1.0, 0.0
        if ROPE:
            c, s = _angles(cos + b * stb, sin + b * stb, at, live, H, R, stt, sth, PER_HEAD, HEADS, PAIRS)
        da, db = _backward(q + b * sqb, q_grad + b * sgb, q_rstd, dq, qa, qb, c, s, at, rows, live, H, R, sqt, sqh,
                           sgt, sgh, ROPE, JOINT, INTERLEAVED, HEADS, PAIRS)  # fmt: skip
        if WEIGHT:
            sum_qa += da
            sum_qb += db
        if HAS_K:
            da, db = _backward(k + b * skb, k_grad + b * slb, k_rstd, dk, ka, kb, c, s, at, rows, live, H, R, skt,
                               skh, slt, slh, ROPE, JOINT, INTERLEAVED, HEADS, PAIRS)  # fmt: skip
            if WEIGHT:
                sum_ka += da
                sum_kb += db
    if WEIGHT:
        line = partial + tl.program_id(0).to(tl.int64) * (1 + HAS_K) * width
        _store_sums(line, sum_qa, sum_qb, H, R, JOINT, INTERLEAVED, HEADS, PAIRS)
        if HAS_K:
            _store_sums(line + width, sum_ka, sum_kb, H, R, JOINT, INTERLEAVED, HEADS, PAIRS)
