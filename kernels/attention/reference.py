"""Dense attention in plain PyTorch: the definition that every other backend is compared with."""

import math

import torch
from torch import Tensor


def visible(
    q: Tensor, k: Tensor, key_mask: Tensor | None, lens: Tensor | None, causal: bool
) -> Tensor | None:
    """The boolean mask `[B or 1, 1, Lq, Lk]` of visible pairs; None when all are.

    Args:
        key_mask: bool `[B, Lk]`, True where a key is real.
        lens: int `[B]`, number of leading real keys.
        causal: query i sees keys up to `i + Lk - Lq` (the last query sees all).
    """
    lq, lk = q.shape[1], k.shape[1]
    mask = None if key_mask is None else key_mask[:, None, None, :]
    if lens is not None:
        real = torch.arange(lk, device=k.device) < lens[:, None]
        mask = real[:, None, None, :] if mask is None else mask & real[:, None, None, :]
    if causal:
        past = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)[None, None]
        mask = past if mask is None else mask & past
    return mask


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    lens: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + bias) v over visible keys, in float32 or wider.

    Args:
        q: `[B, Lq, H, D]`. k, v: `[B, Lk, Hkv, D]` with H a multiple of Hkv.
        bias: additive, broadcastable to `[B, H, Lq, Lk]`.
        scale: default `D ** -0.5`.
        return_lse: also return log-sum-exp `[B, H, Lq]`, float32 or wider.

    Returns:
        `[B, Lq, H, D]` in q's dtype. A query that sees no key gets zeros (and lse = -inf).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, kv_heads = q.shape[2], k.shape[2]
    mask = visible(q, k, key_mask, lens, causal)
    q_, k_, v_ = (t.to(wide).transpose(1, 2) for t in (q, k, v))
    if heads != kv_heads:
        k_, v_ = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k_, v_))
    scores = (q_ * (scale if scale is not None else 1.0 / math.sqrt(q.shape[-1]))) @ k_.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.to(wide)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    # exp(-inf - -inf) would be NaN for a query that sees nothing.
    weights = (scores - torch.where(lse.isinf(), torch.zeros_like(lse), lse)[..., None]).exp()
    out = (weights @ v_).transpose(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out
