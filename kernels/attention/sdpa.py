"""torch.nn.functional.scaled_dot_product_attention behind the common signature."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention.reference import visible

FAST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ONE = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def sdpa(q, k, v, *, key_mask=None, lens=None, bias=None, causal=False, scale=None, backends=None) -> Tensor:
    """Attention on `[B, L, H, D]` by PyTorch's fused kernels; arguments as `attention_reference`.

    Args:
        backends: SDPBackends to try in order; None leaves the choice to PyTorch.
    """
    # is_causal of SDPA aligns the diagonal at the top left; ours at the bottom right.
    square = causal and q.shape[1] == k.shape[1] and key_mask is None and lens is None and bias is None
    mask = visible(q, k, key_mask, lens, causal and not square)
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    # A branch, so that under dynamic shapes the comparison becomes a guard and not a symbolic argument.
    grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    call = lambda: F.scaled_dot_product_attention(  # noqa: E731
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=square,
        scale=scale,
        **grouped,
    )
    if backends is None:
        return call().transpose(1, 2)
    with sdpa_kernel(backends, set_priority=True):
        return call().transpose(1, 2)
