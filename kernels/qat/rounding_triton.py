"""Rounding to the E4M3 and E2M1 grids in float32 arithmetic, bit-identical to the casts of the references.

Adding and subtracting `2^(23 + n)` times a power of two rounds to nearest even at a chosen step: with `e` the power
of two below x (or the lowest exponent of the grid, for its subnormals), `e 2^(23 - m)` has a step of `e 2^-m`, that of
a format with m mantissa bits. Products with powers of two are exact, so contraction to fused multiply-adds changes
nothing. Imported only by the backends that launch Triton kernels.
"""

import triton
import triton.language as tl


@triton.jit
def _on_grid(x, LOWEST: tl.constexpr, SHIFT: tl.constexpr):
    """x >= 0 to nearest even with 23 - log2(SHIFT) mantissa bits, subnormal below LOWEST."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, LOWEST) * SHIFT
    return (x + shift) - shift


@triton.jit
def e2m1(x):
    """x >= 0 to the grid 0, .5, 1, 1.5, 2, 3, 4, 6, saturating."""
    return _on_grid(tl.minimum(x, 6.0), 1.0, 4194304.0)


@triton.jit
def e4m3(x):
    """x >= 0 to the nearest float8 E4M3 value, saturating at 448."""
    return _on_grid(tl.minimum(x, 448.0), 0.015625, 1048576.0)


@triton.jit
def e2m1_code(x):
    """The three-bit code of x >= 0 on the E2M1 grid: exponent and mantissa bit, biased; 0 and .5 are 0 and 1."""
    normal = (x.to(tl.int32, bitcast=True) >> 22) - 252
    return tl.where(x >= 1.0, normal, (2 * x).to(tl.int32))


@triton.jit
def group_scale(peak, encode):
    """E4M3 scale of a group of 16 with largest magnitude `peak`, under the global scale `encode`."""
    return e4m3(tl.div_rn(peak, 6.0) * encode)
