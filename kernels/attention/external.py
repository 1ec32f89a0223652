"""FlashAttention 3 and 4, when the user has installed them: their public functions behind the common signature."""

import importlib.util
import sys

import torch
from torch import Tensor

from kernels.dispatch import constant_result

FA3 = "flash_attn_interface"
FA4 = "flash_attn.cute"


@constant_result
def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it (its parent package is)."""
    if module in sys.modules:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def fa3(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """FlashAttention 3 on `[B, L, H, D]`; causal is aligned at the bottom right there as well."""
    from flash_attn_interface import flash_attn_func

    return _first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))


def fa4(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """FlashAttention 4 (the CuTe DSL one) on `[B, L, H, D]`."""
    from flash_attn.cute import flash_attn_func

    return _first(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))


def _first(result) -> Tensor:
    """Versions differ in whether the log-sum-exp comes along."""
    return result if isinstance(result, torch.Tensor) else result[0]
