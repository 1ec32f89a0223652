"""Which attention backend serves a call, checked before anything runs."""

import dataclasses
import functools
from typing import Literal, get_args

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from kernels.attention.reference import attention_reference
from kernels.attention.sdpa import FAST, ONE, sdpa
from kernels.dispatch import Backend, choose, explain

Site = Literal["self", "cross_text", "cross_image", "audio_self", "audio_text", "a2v", "v2a"]
SITES = get_args(Site)


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """What a backend needs to know to say whether it can serve."""

    device: str
    dtype: torch.dtype
    head_dim: int
    masked: bool
    biased: bool
    causal: bool
    return_lse: bool


def _sdpa_refusal(request: AttentionRequest) -> str | None:
    return "scaled_dot_product_attention returns no log-sum-exp" if request.return_lse else None


def _gpu_refusal(request: AttentionRequest, *, masks: bool = True, half_only: bool = True) -> str | None:
    if (reason := _sdpa_refusal(request)) is not None:
        return reason
    if request.device != "cuda":
        return f"it needs a CUDA device, the tensors are on {request.device}"
    if half_only and request.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, got {request.dtype}"
    if not masks and (request.masked or request.biased):
        return "it takes neither key masks nor a bias"
    return None


def _flash_refusal(request: AttentionRequest) -> str | None:
    if request.head_dim > 256:
        return f"head size {request.head_dim} is above 256"
    return _gpu_refusal(request, masks=False)


def _cudnn_refusal(request: AttentionRequest) -> str | None:
    if request.head_dim > 128 or request.head_dim % 8:
        return f"head size {request.head_dim} is not a multiple of 8 up to 128"
    return _gpu_refusal(request)


def _run_sdpa(q, k, v, **options) -> Tensor:
    # On CUDA cuDNN leads the order, flash, efficient and math follow: the order of speed seen on a Hopper GPU
    # (benchmarks/train_step.py --attention NAME compares them within a step).
    return sdpa(q, k, v, **options, backends=FAST if q.is_cuda and q.dtype.itemsize == 2 else None)


BACKENDS = (
    Backend("sdpa", _run_sdpa, _sdpa_refusal),
    Backend("sdpa_cudnn", functools.partial(sdpa, backends=[ONE["sdpa_cudnn"]]), _cudnn_refusal),
    Backend("sdpa_flash", functools.partial(sdpa, backends=[ONE["sdpa_flash"]]), _flash_refusal),
    Backend(
        "sdpa_efficient",
        functools.partial(sdpa, backends=[ONE["sdpa_efficient"]]),
        functools.partial(_gpu_refusal, half_only=False),
    ),
    Backend("sdpa_math", functools.partial(sdpa, backends=[ONE["sdpa_math"]]), _sdpa_refusal),
    Backend("reference", attention_reference, lambda request: None),
)


def _check(q: Tensor, k: Tensor, v: Tensor, site: str, key_mask, lens) -> None:
    faults = []
    if site not in SITES:
        faults.append(f"site {site!r} is none of {', '.join(SITES)}")
    if not (q.ndim == k.ndim == v.ndim == 4):
        faults.append(f"q, k, v must be [B, L, H, D]; got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    elif k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        faults.append(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: k and v must be equal, batch and head size "
            "shared, and q's heads a multiple of k's"
        )
    elif key_mask is not None and key_mask.shape != (k.shape[0], k.shape[1]):
        faults.append(f"key_mask must be [B, Lk] = [{k.shape[0]}, {k.shape[1]}], got {list(key_mask.shape)}")
    elif lens is not None and lens.shape != (k.shape[0],):
        faults.append(f"lens must be [B] = [{k.shape[0]}], got {list(lens.shape)}")
    if not (q.dtype == k.dtype == v.dtype):
        faults.append(f"q, k, v must share a dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    raise_faults("attention: the arguments do not fit", faults)


def request_of(q, *, key_mask=None, lens=None, bias=None, causal=False, return_lse=False) -> AttentionRequest:
    """The request that a call with these arguments makes."""
    masked = key_mask is not None or lens is not None
    return AttentionRequest(q.device.type, q.dtype, q.shape[-1], masked, bias is not None, causal, return_lse)


def explain_attention(q: Tensor, **options) -> dict[str, str]:
    """`{backend: "usable" or why not}` for a call with query `q` and the options of `attention`."""
    return explain(BACKENDS, request_of(q, **options))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    site: Site,
    key_mask: Tensor | None = None,
    lens: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
):
    """Attention of `q [B, Lq, H, D]` over `k, v [B, Lk, Hkv, D]`; see `attention_reference` for the maths.

    Args:
        site: where in a model the call stands; wrappers choose by it.
        backend: `"auto"` or a name in `BACKENDS`.

    Returns:
        `[B, Lq, H, D]`, with `return_lse` also log-sum-exp `[B, H, Lq]`.

    Raises:
        UserError: shapes that do not fit; an unknown or unusable backend, with the reason.
    """
    _check(q, k, v, site, key_mask, lens)
    flags = {"key_mask": key_mask, "lens": lens, "bias": bias, "causal": causal}
    chosen = choose("attention", BACKENDS, backend, request_of(q, **flags, return_lse=return_lse))
    if return_lse:
        flags["return_lse"] = True
    return chosen.run(q, k, v, scale=scale, **flags)


@dataclasses.dataclass(frozen=True)
class Attention:
    """`attention` with its backend fixed: what a model's `Run` holds, and what wrappers hold as `inner`."""

    backend: str = "auto"

    def __post_init__(self):
        names = ("auto", *(b.name for b in BACKENDS))
        if self.backend not in names:
            raise UserError(f"attention: unknown backend {self.backend!r}; allowed: {', '.join(names)}")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options):
        return attention(q, k, v, backend=self.backend, **options)
