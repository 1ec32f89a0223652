"""Scaled weights and their straight-through imitation, in plain PyTorch."""

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest finite float8_e4m3fn


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight * scale` in `dtype`.

    Args:
        weight: `[out, in]`, float8 or int8 codes.
        scale: float32, scalar or one per output row `[out, 1]`.
    """
    return (weight.to(torch.float32) * scale.to(torch.float32)).to(dtype)


def fake_quant_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """`weight` rounded to the grid of float8 E4M3 codes times `scale`; its gradient passes straight through.

    Args:
        weight: `[out, in]`. scale: float32, scalar or `[out, 1]`; codes saturate at ±448.
    """
    codes = (weight.detach().float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    rounded = dequantise(codes, scale, weight.dtype)
    return weight + (rounded - weight).detach()
