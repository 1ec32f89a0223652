"""QAT attention: attention in NVFP4 imitated during training, behind one front door over typed backends.

`kernels.qat.reference` states the mathematics. Forward-mode derivatives raise NotImplementedError.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from kernels.attention import SITES, Attention, Site
from kernels.dispatch import Backend, capability_of, choose, explain, not_interpreted, spelled, triton_fault
from kernels.op import differentiable, fold_batch, product_flops, raw_op, unfold_batch
from kernels.qat.nvfp4 import nvfp4_global_scale
from kernels.qat.reference import backward_reference, forward_reference
from kernels.qat.tiles import HEAD_SIZES, MEASURED
from kernels.tiles import DTYPES

PScale = Literal["group", "static", "row"]
ValueGradient = Literal["consistent", "published"]


@dataclasses.dataclass(frozen=True)
class QatRequest:
    """What a backend needs to know to say whether it can serve."""

    device: str
    dtype: torch.dtype
    head_dim: int
    capability: tuple[int, int] | None = None


def _triton_refusal(request: QatRequest) -> str | None:
    if request.dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, got {request.dtype}"
    if request.capability is not None and request.capability[0] < 9:
        major, minor = request.capability
        return f"it needs compute capability 9.0 or newer (tensor descriptors), the device has {major}.{minor}"
    return triton_fault(request.device)


def _native_refusal(request: QatRequest) -> str | None:
    """There is no kernel behind this name yet: the route exists so that asking for it is answered."""
    if request.capability is None or request.capability[0] < 10:
        seen = f"the tensors are on {request.device}"
        if request.capability is not None:
            seen = f"the device is sm_{request.capability[0]}{request.capability[1]}"
        return f"FP4 matrix products need sm_100 or newer, {seen}"
    major, minor = request.capability
    return f"sm_{major}{minor} multiplies FP4, but no kernel for it is built yet; triton imitates it there in bfloat16"


def _triton_forward(*args):
    from kernels.qat.launch import run_forward

    with torch.cuda.device_of(args[0]):
        return run_forward(*args)


def _triton_backward(*args):
    from kernels.qat.launch import run_backward

    with torch.cuda.device_of(args[0]):
        return run_backward(*args)


def _none(*args):
    raise NotImplementedError("no native FP4 kernel")


@dataclasses.dataclass(frozen=True)
class QatBackend(Backend):
    """A backend with its backward pass."""

    backward: Callable = _none


BACKENDS = (
    QatBackend("native_fp4", _none, _native_refusal),
    QatBackend("triton", _triton_forward, _triton_refusal, _triton_backward),
    QatBackend("reference", forward_reference, lambda request: None, backward_reference),
)


def _named(name: str) -> QatBackend:
    return next(b for b in BACKENDS if b.name == name)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, lens: Tensor | None, encode: Tensor | None,
    scale: float, causal: bool, p_scale: str, dv: str, exact: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if q.numel() == 0 or k.numel() == 0:
        out, high, lse = _forward_shapes(q, k, v, k_mean, lens, encode, scale, causal, p_scale, dv, exact, backend)
        return out.zero_(), high.zero_(), lse.fill_(-torch.inf)
    return _named(backend).run(q, k, v, k_mean, lens, encode, scale, causal, p_scale, exact)


def _forward_shapes(q, k, v, k_mean, lens, encode, scale, causal, p_scale, dv, exact, backend):
    out = q.new_empty(q.shape)
    high = q.new_empty(q.shape if exact else (q.shape[0], 1, 1, 1))
    return out, high, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, lens: Tensor | None, encode: Tensor | None,
    high: Tensor, lse: Tensor, scale: float, causal: bool, p_scale: str, dv: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return _named(backend).backward(grad, q, k, v, k_mean, lens, encode, high, lse, scale, causal, p_scale, dv)


def _backward_shapes(grad, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fold(f, size: int, dims: Sequence, args: Sequence):
    """All Tensors carry the batch first; what else there is stays."""
    folded = [fold_batch(x, d, size) if isinstance(x, Tensor) else x for x, d in zip(args, dims, strict=True)]
    out = tuple(unfold_batch(o, size) for o in f(*folded))
    return out, (0,) * len(out)


_backward_op = differentiable(
    raw_op(
        "qat_attention_backward", _backward, _backward_shapes, lambda grad, q, k, *_: 7 * product_flops(q, k)
    ),
    fold=lambda *a: _fold(_backward_op, *a),
)


def _gradients(kept, args, grads):
    *_, scale, causal, p_scale, dv, exact, backend = args
    if grads[0] is None:
        return (None,) * 12
    q, k, v, k_mean, lens, encode, high, lse = kept
    found = _backward_op(grads[0], q, k, v, k_mean, lens, encode, high, lse, scale, causal, p_scale, dv, backend)
    return (*found, *(None,) * 9)


_forward_op = differentiable(
    raw_op("qat_attention", _forward, _forward_shapes, lambda q, k, *_: 3 * product_flops(q, k)),
    fold=lambda *a: _fold(_forward_op, *a),
    keep=lambda args, outputs: (*args[:6], outputs[1], outputs[2]),
    backward=_gradients,
    constant=(1, 2),
)


def _check(q, k, v, lens, scale, p_scale, dv) -> None:
    faults = []
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        faults.append(f"q, k, v must be [B, L, H, D]; got {shapes}")
    elif k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        faults.append(f"{shapes}: k and v must be equal, and batch, heads and head size shared with q")
    elif q.shape[3] not in HEAD_SIZES:
        faults.append(f"head size {q.shape[3]} is no multiple of 16 from {HEAD_SIZES[0]} to {HEAD_SIZES[-1]}")
    elif lens is not None and lens.shape != (k.shape[0],):
        faults.append(f"lens must be [B] = [{k.shape[0]}], got {list(lens.shape)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        faults.append(f"q, k, v must share a floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        faults.append(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")
    if scale is not None and not scale > 0:
        faults.append(f"scale must be above 0, got {scale}")
    for name, value, allowed in (("p_scale", p_scale, get_args(PScale)), ("dv", dv, get_args(ValueGradient))):
        if value not in allowed:
            faults.append(f"{name} {value!r} is none of {', '.join(allowed)}")
    raise_faults("qat_attention: the arguments do not fit", faults)


def _request(q: Tensor) -> QatRequest:
    return QatRequest(q.device.type, q.dtype, q.shape[-1], capability_of(q.device))


def explain_qat_attention(q: Tensor) -> dict[str, str]:
    """`{backend: "usable" or why not}` for a query `[B, L, H, D]`, and where its head size was not measured."""
    told, size = explain(BACKENDS, _request(q)), q.shape[-1]
    if told["triton"] == "usable" and size not in MEASURED:
        known = " and ".join(map(str, MEASURED))
        told["triton"] += f"; its time at head size {size} was not measured, those at {known} were"
    return told


def _real_keys(x: Tensor, lens: Tensor | None) -> Tensor:
    """x `[B, Lk, H, D]` with zeros beyond `lens`, without its gradient."""
    x = x.detach()
    if lens is None:
        return x
    return torch.where((torch.arange(x.shape[1], device=x.device) < lens[:, None])[:, :, None, None], x, 0)


def _mean(k: Tensor, lens: Tensor | None) -> Tensor:
    """The mean of real keys `[B, H, D]`, float32."""
    count = k.shape[1] if lens is None else lens.clamp(min=1)[:, None, None]
    return _real_keys(k, lens).sum(1, dtype=torch.float32) / count


def _global_scales(q: Tensor, k: Tensor, v: Tensor, mean: Tensor | None, lens: Tensor | None) -> Tensor:
    """Encoding global scales of q, k, v by sample and head, float32 `[B, H, 3]`."""
    k = k if mean is None else k.detach().float() - mean[:, None]
    parts = (q.detach(), _real_keys(k, lens), _real_keys(v, lens))
    return torch.stack([nvfp4_global_scale(x, dim=(1, 3)) for x in parts], -1)


def qat_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lens: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    smooth_k: bool = False,
    p_scale: PScale = "group",
    global_scales: bool = False,
    dv: ValueGradient = "consistent",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of fake-quantised (NVFP4) Q, K, V and P with straight-through gradients; `reference.py` has the maths.

    Args:
        q: `[B, Lq, H, D]`. k, v: `[B, Lk, H, D]`; D a multiple of 16 up to 256, any strides.
        lens: int `[B]`, the number of leading real keys. causal: query i sees keys up to `i + Lk - Lq`.
        scale: above 0, default `D ** -0.5`.
        smooth_k: subtract the mean of the real keys, per sample and head, before quantising: no score changes by it.
        p_scale: the global scale under the E4M3 scales of P: `"group"` none, as published; `"static"` 2688, since
            weights are at most 1; `"row"` 2688 over the largest weight of a row's 64 keys (two-level).
        global_scales: use the whole range of the E4M3 scales of Q, K and V: `2688 / max|x|` per sample and head, so
            that sharding heads changes nothing.
        dv: weights of the gradient of v: `"consistent"`, those of the forward pass, or `"published"`, the normalised
            P quantised once more, which underflows for long rows.
        backend: `"auto"` or a name in `BACKENDS`.

    Returns:
        `[B, Lq, H, D]` in q's dtype, with `return_lse` also the log-sum-exp `[B, H, Lq]`, float32, without gradient.
        A query that sees no key gets zeros and -inf.

    Raises:
        UserError: arguments that do not fit; an unknown or unusable backend, with the reason.
    """
    _check(q, k, v, lens, scale, p_scale, dv)
    name = choose("qat_attention", BACKENDS, backend, _request(q), not_interpreted(q.device.type)).name
    empty = k.numel() == 0 or q.numel() == 0
    mean = _mean(k, lens) if smooth_k and not empty else None
    encode = _global_scales(q, k, v, mean, lens) if global_scales and not empty else None
    width = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # The exact output is for the backward pass only: without gradients a third of the products is saved.
    exact = torch.is_grad_enabled()
    out, _, lse = _forward_op(q, k, v, mean, lens, encode, width, causal, p_scale, dv, exact, name)
    return (out, lse) if return_lse else out


@dataclasses.dataclass(frozen=True)
class QatAttention:
    """`qat_attention` at some sites of a model and `inner` at the others: what a student's `Run` holds.

    Teacher and critic hold their own attention, so that only the student is quantised.
    """

    inner: Callable = Attention()
    sites: tuple[Site, ...] = ("self",)
    smooth_k: bool = False
    p_scale: PScale = "group"
    global_scales: bool = False
    dv: ValueGradient = "consistent"
    backend: str = "auto"

    def __post_init__(self):
        known = ("auto", *(b.name for b in BACKENDS))
        faults = [f"site {s!r} is none of {', '.join(SITES)}" for s in self.sites if s not in SITES]
        if spelled(self.backend) not in known:
            faults.append(f"backend {self.backend!r} is none of {', '.join(known)}")
        raise_faults("QatAttention: the settings do not fit", faults)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, site: Site, key_mask=None, bias=None, **options):
        if site not in self.sites:
            return self.inner(q, k, v, site=site, key_mask=key_mask, bias=bias, **options)
        if key_mask is not None or bias is not None:
            raise UserError(f"QatAttention at {site!r} takes lens, but neither key_mask nor bias")
        return qat_attention(
            q, k, v, **options, smooth_k=self.smooth_k, p_scale=self.p_scale, global_scales=self.global_scales,
            dv=self.dv, backend=self.backend,
        )  # fmt: skip
