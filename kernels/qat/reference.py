"""QAT attention in plain PyTorch: the definition that the kernels are compared with (attention in NVFP4, imitated).

Forward, in float32, keys in tiles of 64 from the first to the last, `c = scale * log2(e)`:

    Q', K', V' = NVFP4 of Q, K - k_mean, V along the head size        (`kernels.qat.nvfp4`)
    S   = c Q' K'^T, -inf where a query does not see a key
    m_j = the largest S of the row in tiles 0..j: the RUNNING maximum, tile j included, not the final one
    p   = exp2(S - m_j)                                               in tile j
    p'  = NVFP4 of p along the keys, groups of 16 consecutive keys
    f_j = exp2(m_j - m) / sum p exp2(m_j - m)                         m = the final maximum
    out = sum p' f_j V',   high = sum p f_j V',   lse = ln 2 (m + log2 sum p exp2(m_j - m))

So P is quantised before it is normalised and relative to what an online softmax knows at that tile; the size of a
kernel's query tile changes nothing. Backward, straight through every rounding (Attn-QAT; `high` makes delta exact):

    P  = exp2(S - lse / ln 2),  dP = dO V'^T,  dS = P (dP - sum(high dO))
    dQ = scale dS K',  dK = scale dS^T Q'
    dV = W^T dO,  W = p' f_j ("consistent": the weights of the forward pass) or NVFP4 of P ("published")

NVFP4 of P underflows when a group's largest weight is below 6 * 2^-10, so the published dV vanishes for flat rows of
more than 170 keys; the consistent one does not. The mean of K shifts every score of a row alike: it has no gradient.
"""

import math

import torch
from torch import Tensor

from kernels.qat.nvfp4 import fake_quant_values

TILE = 64
LOG2E = math.log2(math.e)
FULL_RANGE = 6.0 * 448.0


def _operand(x: Tensor, mean: Tensor | None, encode: Tensor | None) -> Tensor:
    """`[B, L, H, D]` as fake-quantised float32 `[B, H, L, D]`."""
    x = x.float().transpose(1, 2)
    if mean is not None:
        x = x - mean[:, :, None]
    return fake_quant_values(x, torch.ones((), device=x.device) if encode is None else encode[:, :, None])


def operands(q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, lens: Tensor | None, encode: Tensor | None):
    """Q', K', V' `[B, H, L, D]`; keys beyond `lens` are zeros."""
    scales = (None, None, None) if encode is None else encode.unbind(-1)
    q, k, v = _operand(q, None, scales[0]), _operand(k, k_mean, scales[1]), _operand(v, None, scales[2])
    if lens is not None:
        real = (torch.arange(k.shape[2], device=k.device) < lens[:, None])[:, None, :, None]
        k, v = torch.where(real, k, 0.0), torch.where(real, v, 0.0)
    return q, k, v


def scores(q: Tensor, k: Tensor, lens: Tensor | None, scale: float, causal: bool) -> Tensor:
    """S `[B, H, Lq, T, 64]` in units of log2, -inf where nothing is seen and beyond the last key."""
    lq, lk = q.shape[2], k.shape[2]
    s = q @ k.transpose(-1, -2) * (scale * LOG2E)
    keys = torch.arange(lk, device=k.device)
    if lens is not None:
        s = s.masked_fill(keys >= lens[:, None, None, None], -torch.inf)
    if causal:
        s = s.masked_fill(keys > torch.arange(lq, device=k.device)[:, None] + lk - lq, -torch.inf)
    return torch.nn.functional.pad(s, (0, -lk % TILE), value=-torch.inf).unflatten(-1, (-1, TILE))


def fake_quant_p(p: Tensor, p_scale: str) -> Tensor:
    """NVFP4 of weights `[..., T, 64]` along the keys, with the global scale that `p_scale` names."""
    if p_scale == "row":
        encode = FULL_RANGE / p.amax(-1).clamp(min=1e-8)
    else:
        encode = torch.full((), FULL_RANGE if p_scale == "static" else 1.0, device=p.device)
    return fake_quant_values(p, encode)


def _softmax(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p `[.., T, 64]` relative to the running maximum, the factors f_j `[.., T]`, and lse in log2 `[..]`."""
    running = s.amax(-1).cummax(-1).values
    peak = running[..., -1]
    finite = lambda x: torch.where(x.isinf(), 0.0, x)  # noqa: E731
    p = (s - finite(running)[..., None]).exp2()
    factor = (running - finite(peak)[..., None]).exp2()
    total = (p.sum(-1) * factor).sum(-1)
    return p, torch.where(total > 0, 1 / total, 0.0)[..., None] * factor, peak + total.log2()


def forward_reference(
    q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, lens: Tensor | None, encode: Tensor | None,
    scale: float, causal: bool, p_scale: str, exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`out`, `high` `[B, Lq, H, D]` in q's dtype and `lse [B, H, Lq]`; see the top of this file.

    Args: as `kernels.qat.attention.qat_attention`; k_mean `[B, H, D]`, encode `[B, H, 3]` (encoding global
    scales of q, k, v). `exact` False leaves `high` out (`[B, 1, 1, 1]`).
    """
    qh, kh, vh = operands(q, k, v, k_mean, lens, encode)
    p, factor, log2_sum = _softmax(scores(qh, kh, lens, scale, causal))
    weighted = lambda w: ((w * factor[..., None]).flatten(-2)[..., : k.shape[1]] @ vh).transpose(1, 2)  # noqa: E731
    out = weighted(fake_quant_p(p, p_scale)).to(q.dtype).contiguous()
    high = weighted(p).to(q.dtype).contiguous() if exact else out.new_zeros(q.shape[0], 1, 1, 1)
    return out, high, log2_sum / LOG2E


def backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, lens: Tensor | None, encode: Tensor | None,
    high: Tensor, lse: Tensor, scale: float, causal: bool, p_scale: str, dv: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v `[B, L, H, D]`, in their dtypes."""
    qh, kh, vh = operands(q, k, v, k_mean, lens, encode)
    s = scores(qh, kh, lens, scale, causal)
    real = k.shape[1]
    log2_sum = torch.where(lse.isinf(), torch.inf, lse)[..., None] * LOG2E
    weights = (s.flatten(-2)[..., :real] - log2_sum).exp2()
    do = grad.float().transpose(1, 2)
    delta = (high.float().transpose(1, 2) * do).sum(-1, keepdim=True)
    ds = weights * (do @ vh.transpose(-1, -2) - delta) * scale
    if dv == "consistent":
        p, factor, _ = _softmax(s)
        quantised = (fake_quant_p(p, p_scale) * factor[..., None]).flatten(-2)[..., :real]
    else:
        padded = torch.nn.functional.pad(weights, (0, -real % TILE)).unflatten(-1, (-1, TILE))
        quantised = fake_quant_p(padded, "group").flatten(-2)[..., :real]
    transposed = lambda w: w.transpose(-1, -2)  # noqa: E731
    found = (ds @ kh, transposed(ds) @ qh, transposed(quantised) @ do)
    return tuple(g.transpose(1, 2).to(x.dtype).contiguous() for g, x in zip(found, (q, k, v), strict=True))
