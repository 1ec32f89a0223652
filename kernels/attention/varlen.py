"""Attention of sequences of unlike lengths, packed one after the other without padding."""

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from kernels.attention.flash import flash_varlen, layout_fault
from kernels.dispatch import backend_name, triton_fault

VARLEN_BACKENDS = ("triton", "reference")


def _places(cu: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Number of the sequence of every row (that of rows behind the last is `len(cu) - 1`), and its row in it."""
    at = torch.arange(rows, device=cu.device)
    number = (at[:, None] >= cu[1:]).sum(1)
    return number, at - cu[number]


def varlen_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *, max_q: int, max_k: int, causal: bool = False,
    scale: float | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Dense attention over all rows, float32 or wider, in which only rows of one sequence see each other."""
    wide = torch.promote_types(q.dtype, torch.float32)
    (number_q, row_q), (number_k, row_k) = _places(cu_q, q.shape[0]), _places(cu_k, k.shape[0])
    mask = (number_q[:, None] == number_k[None, :]) & (number_q < cu_q.shape[0] - 1)[:, None]
    if causal:
        offset = torch.cat([cu_k.diff() - cu_q.diff(), cu_q.new_zeros(1)])[number_q]
        mask = mask & (row_k[None, :] <= (row_q + offset)[:, None])
    group = q.shape[1] // k.shape[1]
    q_, k_, v_ = (x.to(wide).transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = (q_ * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k_.transpose(-1, -2)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse.isinf(), torch.zeros_like(lse), lse)[..., None]).exp()
    out = (weights @ v_).transpose(0, 1).to(q.dtype)
    return (out, lse) if return_lse else out


def _faults(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> list[str]:
    faults = []
    if not (q.ndim == k.ndim == v.ndim == 3):
        faults.append(f"q, k, v must be [rows, H, D]; got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    elif k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        faults.append(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: k and v must be equal, the head size shared, "
            "and q's heads a multiple of k's"
        )
    if not (q.dtype == k.dtype == v.dtype):
        faults.append(f"q, k, v must share a dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    for name, cu in (("cu_q", cu_q), ("cu_k", cu_k)):
        if cu.ndim != 1 or cu.dtype not in (torch.int32, torch.int64) or cu.shape[0] < 2:
            faults.append(f"{name} must be int32 or int64 [sequences + 1], got {cu.dtype} {list(cu.shape)}")
    devices = {n: x.device for n, x in (("q", q), ("k", k), ("v", v), ("cu_q", cu_q), ("cu_k", cu_k))}
    if len(set(devices.values())) > 1:
        faults.append("all must be on one device; " + ", ".join(f"{name} is on {d}" for name, d in devices.items()))
    if not faults and cu_q.shape != cu_k.shape:
        faults.append(f"cu_q and cu_k have {cu_q.shape[0] - 1} and {cu_k.shape[0] - 1} sequences")
    return faults


def _triton_refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return triton_fault(q.device.type) or layout_fault(q[None], k[None], v[None])


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *, max_q: int, max_k: int, causal: bool = False,
    scale: float | None = None, return_lse: bool = False, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention within each of S packed sequences; see `attention` for the maths.

    Args:
        q: `[Tq, H, D]`. k, v: `[Tk, Hkv, D]`. Rows behind the last sequence get zeros.
        cu_q, cu_k: int `[S + 1]` on the same device, first row of every sequence and the end of the last one:
            `[0, 3, 3, 10]` are three sequences of 3, 0 and 7 rows.
        max_q, max_k: at least the longest sequence. The values of `cu_q` and `cu_k` are not read on the host (no
            synchronisation), so too small a number leaves rows out; larger ones cost a little time.
        causal: query i of a sequence sees its keys up to `i + keys - queries`.
        backend: `"auto"` (Triton on a GPU where it can serve, else the dense reference), `"triton"`, `"reference"`.

    Returns:
        `[Tq, H, D]`, with `return_lse` also log-sum-exp `[H, Tq]`.

    Raises:
        UserError: shapes that do not fit; an unknown or unusable backend, with the reason.
    """
    raise_faults("attention_varlen: the arguments do not fit", _faults(q, k, v, cu_q, cu_k))
    name = backend_name("attention_varlen", backend, VARLEN_BACKENDS)
    if name == "auto":
        name = "triton" if q.is_cuda and _triton_refusal(q, k, v) is None else "reference"
    elif name == "triton" and (reason := _triton_refusal(q, k, v)) is not None:
        raise UserError(f"attention_varlen: backend 'triton' cannot serve this call: {reason}")
    run = flash_varlen if name == "triton" else varlen_reference
    return run(q, k, v, cu_q, cu_k, max_q=max_q, max_k=max_k, causal=causal, scale=scale, return_lse=return_lse)
