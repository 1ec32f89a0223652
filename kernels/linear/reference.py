"""Scaled weights and their straight-through imitation, in plain PyTorch.

The companions of a quantised weight `name.weight` `[out, in]`, by its dtype:

| weight | `name.weight_scale` | `name.weight_global_scale` |
|---|---|---|
| float8_e4m3fn or int8 `[out, in]` | float32: scalar, per row `[out, 1]`, or per 128 x 128 `[out/128, in/128]` | |
| uint8 `[out, in/2]`, NVFP4 codes | float8_e4m3fn `[out, in/16]` | float32 scalar, the encoding scale, optional |
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import UserError
from kernels.qat.nvfp4 import dequantise_nvfp4

FP8_MAX = 448.0  # largest finite float8_e4m3fn
BLOCK = 128


def round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x rounded to E4M3 codes times `scale` (broadcast; where it is 0, to 0), in x's dtype, without derivatives."""
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def fp8_scale(peak: Tensor) -> Tensor:
    """`peak / 448` in float32, to nearest: of a divisor that is a number a GPU takes the reciprocal."""
    return peak.float() / torch.full_like(peak, FP8_MAX, dtype=torch.float32)


def fp8_block_scales(x: Tensor, rows: int) -> Tensor:
    """`max|x| / 448` of blocks of `rows` x 128, float32 `[..., ceil(R / rows), ceil(K / 128)]`; x `[..., R, K]`."""
    r, k = x.shape[-2:]
    padded = F.pad(x.float().abs(), (0, -k % BLOCK, 0, -r % rows))
    return fp8_scale(padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, rows)).amax((-3, -1)))


def per_element(scales: Tensor, shape: torch.Size, rows: int) -> Tensor:
    """Block scales `[..., ceil(R / rows), ceil(K / 128)]` repeated to `[..., R, K]`."""
    spread = scales.repeat_interleave(rows, -2).repeat_interleave(BLOCK, -1)
    return spread[..., : shape[-2], : shape[-1]]


def quantise_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8 codes `[out, in]` and float32 scales per 128 x 128 of a weight, for export."""
    scales = fp8_block_scales(weight, BLOCK)
    divisor = per_element(torch.where(scales > 0, scales, 1.0), weight.shape, BLOCK)
    return (weight.float() / divisor).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype, *, global_scale: Tensor | None = None) -> Tensor:
    """The weight `[out, in]` in `dtype` that codes and their scales stand for.

    Args:
        weight, scale, global_scale: see the table at the top of this file.

    Raises:
        UserError: a scale whose shape fits no row of the table.
    """
    if weight.dtype == torch.uint8:
        groups = (weight.shape[0], weight.shape[-1] // 8)
        if scale.shape != groups or scale.dtype != torch.float8_e4m3fn:
            raise UserError(
                f"weight_scale of NVFP4 codes {list(weight.shape)} must be float8_e4m3fn {list(groups)}, got "
                f"{scale.dtype} {list(scale.shape)}"
            )
        return dequantise_nvfp4(weight, scale, global_scale, dtype=dtype)
    out, n_in = weight.shape
    blocks = (-(-out // BLOCK), -(-n_in // BLOCK))
    if scale.numel() != 1 and scale.shape != (out, 1):
        if scale.shape != blocks:
            raise UserError(
                f"weight_scale of a weight {list(weight.shape)} must be a scalar, [{out}, 1] or {list(blocks)} "
                f"(blocks of 128), got {list(scale.shape)}"
            )
        scale = per_element(scale, weight.shape, BLOCK)
    return (weight.to(torch.float32) * scale.to(torch.float32)).to(dtype)


def fake_quant_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """`weight` rounded to the grid of float8 E4M3 codes times `scale`; its gradient passes straight through.

    Args:
        weight: `[out, in]`. scale: float32, scalar or `[out, 1]`; codes saturate at ±448.
    """
    rounded = round_fp8(weight.detach(), scale.detach())
    # Exactly `rounded`, unlike weight + (rounded - weight): the bracket is zero.
    return rounded + (weight - weight.detach())


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_fake_scale: Tensor | None = None,
) -> Tensor:
    """`x W^T + b` with the companions of W applied: `[..., in] -> [..., out]` in x's dtype.

    Args:
        weight: `[out, in]`, or codes (see the table at the top). bias: `[out]`.
        weight_fake_scale: rounds a full-precision weight to FP8 codes times this scale, straight-through.
    """
    if weight_scale is not None:
        weight = dequantise(weight, weight_scale, x.dtype, global_scale=weight_global_scale)
    elif weight_fake_scale is not None:
        weight = fake_quant_fp8(weight, weight_fake_scale)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
