"""What the QAT attention kernels share: the order of keys, the fake quantisation of P, operands made ready.

Keys are stored in blocks of 64 in an order in which one thread of a matrix product's result holds whole groups: slot
`8 j + 2 t + b` of a block is key `16 t + 2 j + b`. Such a thread has the columns `2 t` and `2 t + 1` of every 8, so
the largest score of a group of 16 keys, its scale and its reciprocal are found without exchanging data between lanes.
Imported only by the backend that launches it, since Triton is optional.
"""

import triton
import triton.language as tl

from kernels.qat.rounding_triton import e2m1, e4m3, group_scale

TILE = tl.constexpr(64)


@triton.jit
def key_of(slot):
    """The key stored at a slot."""
    return slot // 64 * 64 + slot % 8 // 2 * 16 + slot % 64 // 8 * 2 + slot % 2


@triton.jit
def seen(rows, keys, length, shift, CAUSAL: tl.constexpr):
    """Which keys `[1, N]` each row `[M, 1]` sees: those before `length`, with CAUSAL up to `row + shift`."""
    visible = (keys < length)[None, :] & (rows >= 0)[:, None]
    if CAUSAL:
        visible = visible & (keys[None, :] <= rows[:, None] + shift)
    return visible


@triton.jit
def key_range(first, last, length, shift, CAUSAL: tl.constexpr):
    """`(full, stop)`: keys before `full` are seen by all rows first..last, none from `stop` on. Multiples of 64."""
    stop = length
    full = length
    if CAUSAL:
        stop = tl.minimum(stop, tl.maximum(last + 1 + shift, 0))
        full = tl.minimum(full, tl.maximum(first + 1 + shift, 0))
    return full // 64 * 64, (stop + 63) // 64 * 64


@triton.jit
def grouped(x, M: tl.constexpr):
    """`[M, 64]` in storage order as `[M, 8, 4, 2]`; the third axis numbers the groups."""
    return tl.reshape(x, [M, 8, 4, 2])


@triton.jit
def spread(x):
    """Numbers per row and group `[M, 4]` against `[M, 8, 4, 2]`."""
    return tl.expand_dims(tl.expand_dims(x, 1), 3)


@triton.jit
def fake_quant_p(p, peak, top, factor, P_SCALE: tl.constexpr):
    """`factor` times p rounded to NVFP4 in groups of 16 keys.

    Args:
        p: `[M, 8, 4, 2]`, in [0, 1]. peak: its largest values `[M, 4]`. top: the largest of a row, `[M]`.
        factor: `[M]`. P_SCALE: 0 one level, 1 the static global scale 2688, 2 a global scale `2688 / top`.
    """
    if P_SCALE == 0:
        scale = e4m3(peak * 0.16666667)
        unit = scale
    elif P_SCALE == 1:
        scale = e4m3(peak * 448.0)
        unit = scale * 0.00037202382
    else:
        bound = tl.maximum(top, 1e-8)[:, None]
        scale = e4m3(peak * 0.16666667 * (2688.0 / bound))
        unit = scale * (bound * 0.00037202382)
    # Where the scale is 0 the codes do not matter.
    reciprocal = 1.0 / tl.where(scale > 0, unit, 1.0)
    return e2m1(p * spread(reciprocal)) * spread(unit * factor[:, None])


@triton.jit
def prepare(
    x, mean, encode, lens, out, L, LP, H, D, sb, sl, sh, se,
    MEAN: tl.constexpr, GLOBAL: tl.constexpr, LENS: tl.constexpr, PERMUTE: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of `x [B, L, H, D]` as dense `[B * H * LP, DP]`: mean subtracted, fake-quantised, zeros beyond the ends.

    The decoding global scale is left out, so that bfloat16 holds the result exactly; the kernels apply it to products.
    """
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = key_of(slots) if PERMUTE else slots
    cols = tl.arange(0, DP)
    length = L
    if LENS:
        length = tl.minimum(tl.load(lens + b).to(tl.int32), L)
    inside = (rows < length)[:, None] & (cols < D)[None, :]
    at = x + b.to(tl.int64) * sb + h.to(tl.int64) * sh + rows.to(tl.int64)[:, None] * sl + cols[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if MEAN:
        centre = tl.load(mean + bh.to(tl.int64) * D + cols, mask=cols < D, other=0.0)
        value = tl.where(inside, value - centre[None, :], 0.0)
    value = tl.reshape(value, [ROWS, DP // 16, 16])
    magnitude = tl.abs(value)
    peak = tl.max(magnitude, 2)
    if GLOBAL:
        top = tl.load(encode + bh * se)
        scale = group_scale(peak, top)
        unit = scale * tl.div_rn(1.0, top)
    else:
        scale = group_scale(peak, 1.0)
        unit = scale
    safe = tl.broadcast_to(tl.where(unit > 0, unit, 1.0)[:, :, None], magnitude.shape)
    grid = tl.where((unit > 0)[:, :, None], e2m1(tl.div_rn(magnitude, safe)), 0.0)
    value = tl.reshape(tl.where(value < 0, -grid, grid) * scale[:, :, None], [ROWS, DP])
    to = out + (bh.to(tl.int64) * LP + slots)[:, None] * DP + cols[None, :]
    tl.store(to, value.to(out.dtype.element_ty))
