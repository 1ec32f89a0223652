"""FP8 fake quantisation of `[N, R, K]`; imported only by the backend that launches it, since Triton is optional."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.qat.rounding_triton import e4m3


@triton.jit
def fake_quant(
    x, scales, out, R, K, sn, sr, MODE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """MODE 0: one given scale per sample; 1: a scale per row and COLS columns; 2: one per ROWS x COLS."""
    sample = tl.program_id(2).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (rows < R)[:, None] & (cols < K)[None, :]
    value = tl.load(x + sample * sn + rows[:, None] * sr + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    magnitude = tl.abs(value)
    if MODE == 0:
        scale = tl.zeros([ROWS, 1], tl.float32) + tl.load(scales + sample)
    else:
        peak = tl.max(magnitude, 1)
        if MODE == 2:
            peak = tl.zeros([ROWS], tl.float32) + tl.max(peak, 0)
        scale = tl.div_rn(peak, 448.0)[:, None]
    safe = tl.broadcast_to(tl.where(scale > 0, scale, 1.0), magnitude.shape)
    grid = e4m3(tl.div_rn(magnitude, safe)) * safe
    result = tl.where(value < 0, -grid, grid).to(out.dtype.element_ty)
    tl.store(out + (sample * R + rows)[:, None] * K + cols[None, :], result, mask=inside)


def run(x: Tensor, scale: Tensor | None, rows: int) -> Tensor:
    """See `kernels.linear.fake_quant`: x `[N, R, K]`, scale `[N]` or None for blocks of `rows x 128`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    n, r, k = x.shape
    mode, height = (0, 16) if scale is not None else (1, 16) if rows == 1 else (2, rows)
    with torch.cuda.device_of(x):
        fake_quant[(triton.cdiv(r, height), triton.cdiv(k, 128), n)](
            x, x if scale is None else scale.contiguous(), out, r, k, x.stride(0), x.stride(1), MODE=mode,
            ROWS=height, COLS=128, num_warps=16 if mode == 2 else 4,
        )  # fmt: skip
    return out
