"""Triton kernels of norms with modulation and gated residuals; launched by `kernels.norm.ops`.

Program (b, p) walks tokens `[T p / P, T (p + 1) / P)` of sample b, `ROWS` at a time, so what a sample's tokens share
(weight, bias, scale, shift, gate) is read once and stays in registers. The backward kernel sums the gradients of
those vectors over its own tokens and leaves one partial sum per program; `finish` adds the partial sums in a fixed
order. Modes of a modulation: 0 absent, 1 per sample, 2 per token.
"""

import triton
import triton.language as tl


@triton.jit
def _span(T, P):
    """Sample, first and last token of this program."""
    pid = tl.program_id(0)
    p = pid % P
    first = (p.to(tl.int64) * T // P).to(tl.int32)
    last = ((p.to(tl.int64) + 1) * T // P).to(tl.int32)
    return (pid // P).to(tl.int64), first, last


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _gate(at, live, TANH: tl.constexpr):
    g = tl.load(at, mask=live, other=0.0).to(tl.float32)
    if TANH:
        g = _tanh(g)
    return g


@triton.jit
def _vector(ptr, cols, inside, PRESENT: tl.constexpr):
    """A shared vector as float32 `[1, BLOCK]`; zeros where it is absent."""
    if PRESENT:
        return tl.load(ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.zeros([1, cols.shape[0]], tl.float32)


@triton.jit
def _row_mean(h, D):
    return tl.sum(h, axis=1)[:, None] / D


@triton.jit
def norm_forward(
    x, y, gate, weight, bias, scale, shift, new, out, stats, T, D, P, GROUP, eps,
    sxb, sxt, syb, syt, sgb, sgt, scb, sct, shb, sht,
    NORM: tl.constexpr, LAYER: tl.constexpr, HAS_Y: tl.constexpr, GATE: tl.constexpr, TANH: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`new = x + y gate`, statistics of it, `out = (xhat w + b)(1 + scale) + shift`."""
    b, first, last = _span(T, P)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    up = _vector(weight + b // GROUP * D, cols, inside, WEIGHT)
    off = _vector(bias + b // GROUP * D, cols, inside, BIAS)
    if SCALE == 1:
        s = 1 + _vector(scale + b * scb, cols, inside, True)
        if WEIGHT:
            up = up * s
        else:
            up = s
        off = off * s
    if SHIFT == 1:
        off = off + _vector(shift + b * shb, cols, inside, True)
    g = _vector(gate + b * sgb, cols, inside, GATE == 1)
    if TANH and GATE == 1:
        g = _tanh(g)
    for t in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = t + tl.arange(0, ROWS)
        live = (rows < last)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None]
        here = (b * T + at) * D + cols[None, :]
        h = tl.load(x + b * sxb + at * sxt + cols[None, :], mask=live, other=0.0)
        if HAS_Y:
            add = tl.load(y + b * syb + at * syt + cols[None, :], mask=live, other=0.0).to(tl.float32)
            if GATE == 1:
                add = add * g
            if GATE == 2:
                add = add * _gate(gate + b * sgb + at * sgt + cols[None, :], live, TANH)
            h = (h.to(tl.float32) + add).to(h.dtype)
            tl.store(new + here, h, mask=live)
        if NORM:
            h = h.to(tl.float32)
            if LAYER:
                mean = _row_mean(h, D)
                h = tl.where(inside[None, :], h - mean, 0.0)
            rstd = tl.rsqrt(_row_mean(h * h, D) + eps)
            line = stats + (b * T + at) * 2
            if LAYER:
                tl.store(line, mean, mask=(rows < last)[:, None])
            else:
                tl.store(line, tl.zeros_like(rstd), mask=(rows < last)[:, None])
            tl.store(line + 1, rstd, mask=(rows < last)[:, None])
            h = h * rstd
            if WEIGHT or SCALE == 1:
                h = h * up
            if BIAS or SHIFT == 1:
                h = h + off
            if SCALE == 2:
                h = h * (1 + tl.load(scale + b * scb + at * sct + cols[None, :], mask=live, other=0.0).to(tl.float32))
            if SHIFT == 2:
                h = h + tl.load(shift + b * shb + at * sht + cols[None, :], mask=live, other=0.0).to(tl.float32)
            tl.store(out + here, h.to(out.dtype.element_ty), mask=live)


@triton.jit
def norm_backward(
    x, y, gate, weight, bias, scale, stats, grad, grad_new, dx, dy, dgate, dscale, dshift, partial, T, D, P, GROUP,
    sxb, sxt, syb, syt, sgb, sgt, scb, sct, sob, sot, snb, snt,
    NORM: tl.constexpr, LAYER: tl.constexpr, GRAD_NEW: tl.constexpr, GATE: tl.constexpr, TANH: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    SUM_A: tl.constexpr, SUM_B: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of `norm_forward`, one pass: dx (of the residual sum), dy, and partial sums over tokens.

    `partial [B P, K, D]` has in this order those of: A = sum(g xhat), B = sum(g), G = sum(dx y), each only if wanted.
    `g` is the output's gradient, times `1 + scale` unless the scale is per sample (then `finish` multiplies).
    """
    b, first, last = _span(T, P)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    w = _vector(weight + b // GROUP * D, cols, inside, WEIGHT)
    c = _vector(bias + b // GROUP * D, cols, inside, BIAS and SCALE == 2)
    s = _vector(scale + b * scb, cols, inside, SCALE == 1)
    g = _vector(gate + b * sgb, cols, inside, GATE == 1)
    if TANH and GATE == 1:
        g = _tanh(g)
    # What a column's gradient is multiplied with on its way to the normalised value, where that is the same for all.
    if SCALE == 1:
        if WEIGHT:
            w = w * (1 + s)
        else:
            w = 1 + s
    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    sum_g = tl.zeros([BLOCK], tl.float32)
    for t in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = t + tl.arange(0, ROWS)
        live = (rows < last)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None]
        here = (b * T + at) * D + cols[None, :]
        if NORM:
            o = tl.load(grad + b * sob + at * sot + cols[None, :], mask=live, other=0.0).to(tl.float32)
            h = tl.load(x + b * sxb + at * sxt + cols[None, :], mask=live, other=0.0).to(tl.float32)
            line = stats + (b * T + at) * 2
            rstd = tl.load(line + 1, mask=(rows < last)[:, None], other=0.0)
            if LAYER:
                h = h - tl.load(line, mask=(rows < last)[:, None], other=0.0)
            h = h * rstd
            if LAYER:
                h = tl.where(live, h, 0.0)
            if SHIFT == 2:
                tl.store(dshift + here, o.to(dshift.dtype.element_ty), mask=live)
            if SCALE == 2:
                n = h
                if WEIGHT:
                    n = n * w
                if BIAS:
                    n = n + c
                tl.store(dscale + here, (o * n).to(dscale.dtype.element_ty), mask=live)
                o = o * (1 + tl.load(scale + b * scb + at * sct + cols[None, :], mask=live, other=0.0).to(tl.float32))
            if SUM_A:
                sum_a += tl.sum(o * h, axis=0)
            if SUM_B:
                sum_b += tl.sum(o, axis=0)
            if WEIGHT or SCALE == 1:
                o = o * w
            down = _row_mean(o * h, D)
            if LAYER:
                down_mean = _row_mean(o, D)
                d = (o - down_mean - h * down) * rstd
            else:
                d = (o - h * down) * rstd
            if GRAD_NEW:
                d += tl.load(grad_new + b * snb + at * snt + cols[None, :], mask=live, other=0.0).to(tl.float32)
            tl.store(dx + here, d.to(dx.dtype.element_ty), mask=live)
        else:
            d = tl.load(grad_new + b * snb + at * snt + cols[None, :], mask=live, other=0.0).to(tl.float32)
        if GATE > 0:
            v = tl.load(y + b * syb + at * syt + cols[None, :], mask=live, other=0.0).to(tl.float32)
            v = tl.where(live, v * d, 0.0)
            if GATE == 2:
                g_here = _gate(gate + b * sgb + at * sgt + cols[None, :], live, TANH)
                if TANH:
                    v = v * (1 - g_here * g_here)
                tl.store(dgate + here, v.to(dgate.dtype.element_ty), mask=live)
            else:
                g_here = g
                sum_g += tl.sum(v, axis=0)
            tl.store(dy + here, (d * g_here).to(dy.dtype.element_ty), mask=live)
    slots: tl.constexpr = SUM_A + SUM_B + (GATE == 1)
    line = partial + tl.program_id(0).to(tl.int64) * slots * D + cols
    if SUM_A:
        tl.store(line, sum_a, mask=inside)
    if SUM_B:
        tl.store(line + SUM_A * D, sum_b, mask=inside)
    if GATE == 1:
        tl.store(line + (SUM_A + SUM_B) * D, sum_g, mask=inside)


@triton.jit
def _column_sum(partial, b, P, D, slots, slot, cols, inside, DEPTH: tl.constexpr):
    """`sum over p of partial[b P + p, slot, cols]`, in tiles of DEPTH rows."""
    total = tl.zeros([DEPTH, cols.shape[0]], tl.float32)
    for p in range(0, P, DEPTH):
        rows = p + tl.arange(0, DEPTH)
        at = ((b * P + rows.to(tl.int64)) * slots + slot)[:, None] * D + cols[None, :]
        total += tl.load(partial + at, mask=(rows < P)[:, None] & inside[None, :], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def finish(
    partial, gate, weight, bias, scale, dgate, dweight, dbias, dscale, dshift, D, P, GROUP, sgb, scb,
    GATE: tl.constexpr, TANH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    SHIFT: tl.constexpr, SUM_A: tl.constexpr, SUM_B: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums of one sample -> its dgate, dscale, dshift `[B, D]` and its share of dweight, dbias `[B, D]`."""
    b = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < D
    slots: tl.constexpr = SUM_A + SUM_B + (GATE == 1)
    up = tl.zeros([BLOCK], tl.float32) + 1
    if SCALE == 1:
        up += tl.load(scale + b * scb + cols, mask=inside, other=0.0).to(tl.float32)
    if SUM_A:
        a = _column_sum(partial, b, P, D, slots, 0, cols, inside, DEPTH)
        if WEIGHT:
            tl.store(dweight + b * D + cols, (a * up).to(dweight.dtype.element_ty), mask=inside)
    if SUM_B:
        s = _column_sum(partial, b, P, D, slots, SUM_A, cols, inside, DEPTH)
        if BIAS:
            tl.store(dbias + b * D + cols, (s * up).to(dbias.dtype.element_ty), mask=inside)
        if SHIFT == 1:
            tl.store(dshift + b * D + cols, s.to(dshift.dtype.element_ty), mask=inside)
    if SCALE == 1:
        if WEIGHT:
            a = a * tl.load(weight + b // GROUP * D + cols, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            a += s * tl.load(bias + b // GROUP * D + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(dscale + b * D + cols, a.to(dscale.dtype.element_ty), mask=inside)
    if GATE == 1:
        v = _column_sum(partial, b, P, D, slots, SUM_A + SUM_B, cols, inside, DEPTH)
        if TANH:
            g = _tanh(tl.load(gate + b * sgb + cols, mask=inside, other=0.0).to(tl.float32))
            v = v * (1 - g * g)
        tl.store(dgate + b * D + cols, v.to(dgate.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows(partial, out, P, D, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """`partial [G, P, D] -> out [G, D]`, sums in a fixed order."""
    b = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < D
    total = _column_sum(partial, b, P, D, 1, 0, cols, inside, DEPTH)
    tl.store(out + b * D + cols, total.to(out.dtype.element_ty), mask=inside)
