"""Triton kernels of attention over a tile plan: forward, query gradients, key and value gradients.

A program owns one tile and walks the runs of its plan: full runs in a loop without mask code, partial ones in a loop
that compares key numbers with the interval of each query row. Nothing is added atomically: results do not depend on
the order in which programs run. Imported only by the backend that launches it, since Triton is optional.

Exponentials are base 2 and `lse` is log2 of the sum of exponentials (Dao et al., 2022, algorithm 1 with the scale
folded into the base).
"""

import triton
import triton.language as tl

from kernels.attention.triton_parts import LOG2_E, product, store_rows


@triton.jit
def _rows(desc, batch, row, head, N: tl.constexpr, D: tl.constexpr):
    """Rows [row, row + N) of one head, `[N, D]`; zeros beyond the ends."""
    return desc.load([batch, head, row, 0]).reshape(N, D)


@triton.jit
def _place(plan, n_tiles, heads, group):
    """This program's tile and (batch, head) number: `group` heads at a time, in each the longest tiles first."""
    pid = tl.program_id(0)
    first = pid // (n_tiles * group) * group
    width = min(heads - first, group)
    rest = pid - first * n_tiles
    return tl.load(plan + rest // width), first + rest % width


@triton.jit
def _runs(walk, kind):
    """Where runs are stored, three numbers each, and which are those of group `kind` of the tile."""
    plan, n_tiles, tile = walk[0], walk[1], walk[2]
    index = plan + n_tiles + tile * 5 + kind
    runs = plan + 6 * n_tiles
    return runs, tl.load(index), tl.load(index + 1)


@triton.jit
def _interval(walk, slot, rows):
    """The interval of visible keys of each query row, empty for rows beyond the end."""
    bounds, q_len, class_rows, n_classes = walk[3], walk[4], walk[5], walk[6]
    at = bounds + (slot * n_classes + rows // class_rows) * 2
    inside = rows < q_len
    return tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)


@triton.jit
def _attend(
    acc, peak, total, q, k_desc, v_desc, walk, rows, batch, kv_head, scale2,
    turn, MASKED: tl.constexpr, TILE_K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the full or the partial runs of a tile, for plain (turn 0) or rotated queries (turn 1)."""
    runs, begin, end = _runs(walk, 2 * turn + MASKED)
    for run in range(begin, end):
        first = tl.load(runs + run * 3)
        count = tl.load(runs + run * 3 + 1)
        if MASKED:
            lo, hi = _interval(walk, tl.load(runs + run * 3 + 2), rows)
        for j in range(first, first + count):
            k = _rows(k_desc, batch, j * TILE_K, kv_head, TILE_K, D)
            s = product(q, k.T, None, PRECISION)
            if MASKED:
                keys = j * TILE_K + tl.arange(0, TILE_K)
                s = tl.where((keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None]), s, float("-inf"))
            new = tl.maximum(peak, tl.max(s, 1) * scale2)
            # A row without a key yet has -inf here, and -inf - -inf would be NaN.
            anchor = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
            p = tl.math.exp2(s * scale2 - anchor[:, None])
            shrink = tl.math.exp2(peak - anchor)
            total = total * shrink + tl.sum(p, 1)
            v = _rows(v_desc, batch, j * TILE_K, kv_head, TILE_K, D)
            acc = product(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
            peak = new
    return acc, peak, total


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out, lse, plan, bounds, n_tiles, heads, group, n_heads, share, q_len, class_rows,
    n_classes, scale2, sb, sl, sh, TURNS: tl.constexpr, HEAD: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile: output `[B, L, H, D]` and base-2 lse `[B, H, whole tiles]`; a row without keys: 0 and -inf."""
    tile, item = _place(plan, n_tiles, heads, group)
    batch, head = item // n_heads, item % n_heads
    kv_head = head // share
    walk = (plan, n_tiles, tile, bounds, q_len, class_rows, n_classes)
    rows = tile * TILE_Q + tl.arange(0, TILE_Q)
    acc = tl.zeros([TILE_Q, D], tl.float32)
    peak = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    # Unrolled: as a loop at 4 warps the compiler runs short of registers and waits after every product.
    for turn in tl.static_range(TURNS):
        q = _rows(q_desc, turn * (heads // n_heads) + batch, tile * TILE_Q, head, TILE_Q, D)
        for masked in tl.static_range(2):
            acc, peak, total = _attend(
                acc, peak, total, q, k_desc, v_desc, walk, rows, batch, kv_head, scale2,
                turn, masked, TILE_K, D, PRECISION,
            )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    store_rows(out, acc, batch, head, tile * TILE_Q, q_len, sb, sh, sl, HEAD, TILE_Q, D)
    # +inf gives rows beyond the end the weight 0 in the backward pass, which then need not look for the end.
    row_lse = tl.where(rows < q_len, peak + tl.math.log2(total), float("inf"))
    tl.store(lse + item.to(tl.int64) * tl.cdiv(q_len, TILE_Q) * TILE_Q + rows, row_lse)


@triton.jit
def _pull_queries(
    dq, q, do, lse, delta, k_desc, v_desc, walk, rows, batch, kv_head, scale2,
    turn, MASKED: tl.constexpr, TILE_K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds dS K over the full or the partial runs, dS = P * (dO V^T - delta)."""
    runs, begin, end = _runs(walk, 2 * turn + MASKED)
    for run in range(begin, end):
        first = tl.load(runs + run * 3)
        count = tl.load(runs + run * 3 + 1)
        if MASKED:
            lo, hi = _interval(walk, tl.load(runs + run * 3 + 2), rows)
        for j in range(first, first + count):
            k = _rows(k_desc, batch, j * TILE_K, kv_head, TILE_K, D)
            s = product(q, k.T, None, PRECISION)
            v = _rows(v_desc, batch, j * TILE_K, kv_head, TILE_K, D)
            dp = product(do, v.T, None, PRECISION)
            p = tl.math.exp2(s * scale2 - lse[:, None])
            if MASKED:
                keys = j * TILE_K + tl.arange(0, TILE_K)
                p = tl.where((keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None]), p, 0.0)
            ds = p * (dp - delta[:, None])
            dq = product(ds.to(k.dtype), k, dq, PRECISION)
    return dq


@triton.jit
def dq_kernel(
    q_desc, k_desc, v_desc, o_desc, do_desc, lse, dlse, delta, dq, plan, bounds, n_tiles, heads, group, n_heads,
    share, q_len, class_rows, n_classes, lse_len, scale, scale2, sb, sl, sh, TURNS: tl.constexpr, HEAD: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile: dQ of plain and rotated queries, and delta = rowsum(O * dO) - dlse / ln 2 for dK."""
    tile, item = _place(plan, n_tiles, heads, group)
    batch, head = item // n_heads, item % n_heads
    kv_head = head // share
    walk = (plan, n_tiles, tile, bounds, q_len, class_rows, n_classes)
    rows = tile * TILE_Q + tl.arange(0, TILE_Q)
    o = _rows(o_desc, batch, tile * TILE_Q, head, TILE_Q, D)
    do = _rows(do_desc, batch, tile * TILE_Q, head, TILE_Q, D)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = item.to(tl.int64) * lse_len + rows
    row_lse = tl.load(lse + at, mask=rows < lse_len, other=float("inf"))
    if dlse is not None:
        row_delta -= tl.load(dlse + at, mask=rows < q_len, other=0.0) * LOG2_E
    tl.store(delta + item.to(tl.int64) * tl.cdiv(q_len, TILE_Q) * TILE_Q + rows, row_delta)
    for turn in range(TURNS):
        q_batch = turn * (heads // n_heads) + batch
        q = _rows(q_desc, q_batch, tile * TILE_Q, head, TILE_Q, D)
        acc = tl.zeros([TILE_Q, D], tl.float32)
        for masked in tl.static_range(2):
            acc = _pull_queries(
                acc, q, do, row_lse, row_delta, k_desc, v_desc, walk, rows, batch, kv_head, scale2,
                turn, masked, TILE_K, D, PRECISION,
            )  # fmt: skip
        store_rows(dq, acc * scale, q_batch, head, tile * TILE_Q, q_len, sb, sh, sl, HEAD, TILE_Q, D)


@triton.jit
def _pull_keys(
    dk, dv, k, v, q_desc, do_desc, lse, delta, walk, keys, q_batch, batch, head, scale2,
    turn, MASKED: tl.constexpr, TILE_Q: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds dS^T Q and P^T dO over the full or the partial runs, scores transposed: keys are rows."""
    runs, begin, end = _runs(walk, 2 * turn + MASKED)
    for run in range(begin, end):
        first = tl.load(runs + run * 3)
        count = tl.load(runs + run * 3 + 1)
        slot = tl.load(runs + run * 3 + 2)
        for i in range(first, first + count):
            rows = i * TILE_Q + tl.arange(0, TILE_Q)
            q = _rows(q_desc, q_batch, i * TILE_Q, head, TILE_Q, D)
            s = product(k, q.T, None, PRECISION)
            p = tl.math.exp2(s * scale2 - tl.load(lse + rows)[None, :])
            if MASKED:
                lo, hi = _interval(walk, slot, rows)
                p = tl.where((keys[:, None] >= lo[None, :]) & (keys[:, None] < hi[None, :]), p, 0.0)
            do = _rows(do_desc, batch, i * TILE_Q, head, TILE_Q, D)
            dv = product(p.to(do.dtype), do, dv, PRECISION)
            dp = product(v, do.T, None, PRECISION)
            ds = p * (dp - tl.load(delta + rows)[None, :])
            dk = product(ds.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit
def dkv_kernel(
    q_desc, k_desc, v_desc, do_desc, lse, delta, dk, dv, plan, bounds, n_tiles, heads, group, kv_heads, share,
    q_len, k_len, class_rows, n_classes, lse_len, delta_len, scale, scale2, sb, sl, sh, TURNS: tl.constexpr,
    HEAD: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile of one key head: dK and dV over all query heads that share it."""
    tile, item = _place(plan, n_tiles, heads, group)
    batch, kv_head = item // kv_heads, item % kv_heads
    walk = (plan, n_tiles, tile, bounds, q_len, class_rows, n_classes)
    keys = tile * TILE_K + tl.arange(0, TILE_K)
    k = _rows(k_desc, batch, tile * TILE_K, kv_head, TILE_K, D)
    v = _rows(v_desc, batch, tile * TILE_K, kv_head, TILE_K, D)
    dk_acc = tl.zeros([TILE_K, D], tl.float32)
    dv_acc = tl.zeros([TILE_K, D], tl.float32)
    for step in range(share * TURNS):
        head, turn = kv_head * share + step // TURNS, step % TURNS
        q_batch = turn * (heads // kv_heads) + batch
        row = (batch * kv_heads * share + head).to(tl.int64)
        for masked in tl.static_range(2):
            dk_acc, dv_acc = _pull_keys(
                dk_acc, dv_acc, k, v, q_desc, do_desc, lse + row * lse_len, delta + row * delta_len, walk, keys,
                q_batch, batch, head, scale2, turn, masked, TILE_Q, D, PRECISION,
            )  # fmt: skip
    store_rows(dk, dk_acc * scale, batch, kv_head, tile * TILE_K, k_len, sb, sh, sl, HEAD, TILE_K, D)
    store_rows(dv, dv_acc, batch, kv_head, tile * TILE_K, k_len, sb, sh, sl, HEAD, TILE_K, D)
