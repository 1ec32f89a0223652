"""NVFP4 kernels over rows of a 4-D strided tensor: fake quantisation, and codes with scales.

Imported only by the backend that launches it, since Triton is optional.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.qat.rounding_triton import e2m1, e2m1_code, group_scale


@triton.jit
def _row_offsets(rows, N1, N2, S0, S1, S2):
    """Offsets of rows numbered through the first three dimensions, and their first index."""
    i2 = rows % N2
    i1 = (rows // N2) % N1
    i0 = rows // N2 // N1
    return i0.to(tl.int64) * S0 + i1.to(tl.int64) * S1 + i2.to(tl.int64) * S2, i0


@triton.jit
def _quantise(
    x, scales, count, N1, N2, K, S0, S1, S2, gstride, GLOBAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Values of a block `[ROWS * COLS / 16, 16]`, their magnitudes on the grid, group scales and decode scales."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    offsets, first = _row_offsets(rows, N1, N2, S0, S1, S2)
    inside = (rows < count)[:, None] & (cols < K)[None, :]
    value = tl.load(x + offsets[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.reshape(value, [ROWS, COLS // 16, 16])
    magnitude = tl.abs(value)
    if GLOBAL:
        encode = tl.load(scales + first * gstride, mask=rows < count, other=1.0)[:, None]
        decode = tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), encode)
        scale = group_scale(tl.max(magnitude, 2), encode)
        unit = scale * decode
    else:
        decode = tl.full([ROWS, 1], 1.0, tl.float32)
        scale = group_scale(tl.max(magnitude, 2), 1.0)
        unit = scale
    safe = tl.where(unit > 0, unit, 1.0)[:, :, None]
    grid = tl.where((unit > 0)[:, :, None], e2m1(tl.div_rn(magnitude, tl.broadcast_to(safe, magnitude.shape))), 0.0)
    return value, grid, scale, decode


@triton.jit
def fake_quant(
    x, out, scales, count, N1, N2, K, S0, S1, S2, O0, O1, O2, largest, gstride,
    GLOBAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`out = decode(encode(x))`, the sign kept on zeros; at most `largest`, the last finite number of out's dtype."""
    value, grid, scale, decode = _quantise(
        x, scales, count, N1, N2, K, S0, S1, S2, gstride, GLOBAL, ROWS, COLS
    )  # fmt: skip
    result = grid * scale[:, :, None]
    if GLOBAL:
        result = tl.minimum(result * decode[:, :, None], largest)
    sign = value.to(tl.int32, bitcast=True) & -2147483648
    result = (result.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    offsets, _ = _row_offsets(rows, N1, N2, O0, O1, O2)
    inside = (rows < count)[:, None] & (cols < K)[None, :]
    result = tl.reshape(result, [ROWS, COLS]).to(out.dtype.element_ty)
    tl.store(out + offsets[:, None] + cols[None, :], result, mask=inside)


@triton.jit
def encode(
    x, codes, group_scales, scales, count, N1, N2, K, S0, S1, S2, gstride,
    GLOBAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Packed codes `[count, K / 2]` (the even element in the low four bits) and float32 scales `[count, K / 16]`."""
    value, grid, scale, _ = _quantise(
        x, scales, count, N1, N2, K, S0, S1, S2, gstride, GLOBAL, ROWS, COLS
    )  # fmt: skip
    sign = (value.to(tl.int32, bitcast=True) >> 28) & 8
    four = tl.reshape(e2m1_code(grid) | sign, [ROWS, COLS // 2, 2])
    weights = tl.arange(0, 2) * 15 + 1
    packed = tl.sum(four * weights[None, None, :], 2).to(tl.uint8)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pairs = tl.program_id(1) * (COLS // 2) + tl.arange(0, COLS // 2)[None, :]
    groups = tl.program_id(1) * (COLS // 16) + tl.arange(0, COLS // 16)[None, :]
    tl.store(codes + rows * (K // 2) + pairs, packed, mask=(rows < count) & (pairs < K // 2))
    tl.store(group_scales + rows * (K // 16) + groups, scale, mask=(rows < count) & (groups < K // 16))


def _four_dims(x: Tensor) -> Tensor:
    """A view (a copy only for leading dimensions that no view can join) with four dimensions, the last dense."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    while x.ndim < 4:
        x = x.unsqueeze(1)
    while x.ndim > 4:
        x = x.flatten(1, 2)
    return x


def _launch(kernel, x: Tensor, outputs: list[Tensor], extra: list[int | float], global_scale: Tensor | None) -> None:
    count, (_, n1, n2, k) = x.shape[:-1].numel(), x.shape
    cols = min(256, triton.next_power_of_2(k))
    rows = max(1, 2048 // cols)
    step = 0 if global_scale is None or global_scale.numel() == 1 else 1
    scale = x if global_scale is None else global_scale
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(count, rows), triton.cdiv(k, cols))](
            x, *outputs, scale, count, n1, n2, k, *x.stride()[:3], *extra, step,
            GLOBAL=global_scale is not None, ROWS=rows, COLS=cols, num_warps=4,
        )  # fmt: skip


def run_fake_quant(x: Tensor, global_scale: Tensor | None) -> Tensor:
    """See `kernels.qat.nvfp4.fake_quant_nvfp4`; x `[..., K]` with at least two dimensions."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        source = _four_dims(x)
        strides = out.view(source.shape).stride()[:3]
        _launch(fake_quant, source, [out], [*strides, torch.finfo(x.dtype).max], global_scale)
    return out


def run_quantise(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `kernels.qat.nvfp4.quantise_nvfp4`."""
    *lead, k = x.shape
    codes = torch.empty(*lead, k // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*lead, k // 16, dtype=torch.float32, device=x.device)
    if x.numel():
        _launch(encode, _four_dims(x), [codes, scales], [], global_scale)
    return codes, scales.to(torch.float8_e4m3fn)
