"""Which attention backend serves a call, checked before anything runs."""

import dataclasses
import functools
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from core.errors import raise_faults
from kernels.attention import by_hand, external
from kernels.attention.flash import flash_attention, strided_fault, tangent_fault
from kernels.attention.mixed import mixed_attention
from kernels.attention.reference import attention_reference
from kernels.attention.sdpa import FAST, ONE, sdpa
from kernels.attention.table import preferred
from kernels.dispatch import Backend, backend_name, capability_of, choose, explain, remembered, triton_fault
from kernels.op import forward_mode, wants_gradient

Site = Literal["self", "cross_text", "cross_image", "audio_self", "audio_text", "a2v", "v2a"]
SITES = get_args(Site)
HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """What a backend needs to know to say whether it can serve, and the table to say which is the fastest.

    `repeat`: PyTorch is asked for deterministic algorithms. `forward_by_hand`, `backward_by_hand`: why our kernels in
    Gluon do not serve the pass, or None.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    masked: bool
    biased: bool
    causal: bool
    return_lse: bool
    index: int | None = None
    capability: tuple[int, int] | None = None
    queries: int = 1
    keys: int = 1
    grouped: bool = False
    gradients: bool = False
    tangents: bool = False
    positive_scale: bool = True
    repeat: bool = False
    layout_fault: str | None = None
    forward_by_hand: str | None = "not examined"
    backward_by_hand: str | None = "not examined"


def _sdpa_refusal(request: AttentionRequest, *, forward_mode: bool = False) -> str | None:
    if request.return_lse:
        return "scaled_dot_product_attention returns no log-sum-exp"
    if request.tangents and not forward_mode:
        return "forward-mode derivatives are being taken (jvp), and it has none"
    return None


def _gpu_refusal(request: AttentionRequest, *, masks: bool = True, half_only: bool = True) -> str | None:
    if (reason := _sdpa_refusal(request)) is not None:
        return reason
    if request.device != "cuda":
        return f"it needs a CUDA device, the tensors are on {request.device}"
    if half_only and request.dtype not in HALF:
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
    if request.repeat:
        return "deterministic algorithms are asked for, and cuDNN's backward pass is none"
    return _gpu_refusal(request)


def _triton_refusal(request: AttentionRequest) -> str | None:
    if request.biased:
        return "it takes no additive bias; sdpa and reference do, with gradients"
    if not request.positive_scale:
        return "it needs a scale above 0"
    return triton_fault(request.device) or tangent_fault() or request.layout_fault


def _mixed_refusal(request: AttentionRequest) -> str | None:
    if request.grouped:
        return "it takes as many heads of keys and values as of queries"
    if (reason := _cudnn_refusal(request) or _triton_refusal(request)) is not None:
        return reason
    if request.forward_by_hand is not None:
        return f"its forward pass is our kernel in Gluon, which does not serve: {request.forward_by_hand}"
    return None


def _package_refusal(
    request: AttentionRequest, *, module: str, package: str, majors: tuple[int, ...], largest: int
) -> str | None:
    if not external.installed(module):
        return f"the package {package} (module {module}) is not installed"
    if request.return_lse:
        return "its log-sum-exp has no gradient; triton and reference return one that has"
    if (reason := _gpu_refusal(request, masks=False)) is not None:
        return reason
    if request.capability is None or request.capability[0] not in majors:
        return f"it needs a GPU of compute capability {' or '.join(f'{m}.x' for m in majors)}, got {request.capability}"
    if request.head_dim > largest or request.head_dim % 8:
        return f"head size {request.head_dim} is not a multiple of 8 up to {largest}"
    return None


def _run_sdpa(q, k, v, **options) -> Tensor:
    # On CUDA cuDNN leads the order, flash, efficient and math follow: the order of speed seen on a Hopper GPU
    # (benchmarks/train_step.py --attention NAME compares them within a step).
    return sdpa(q, k, v, **options, backends=FAST if q.is_cuda and q.dtype.itemsize == 2 else None)


def _unmasked(run):
    """`run` without the options that its refusal has excluded."""
    return lambda q, k, v, *, key_mask, lens, bias, **options: run(q, k, v, **options)


def _run_triton(q, k, v, *, bias, **options):
    return flash_attention(q, k, v, **options)


def _run_mixed(q, k, v, *, scale, **others):
    return mixed_attention(q, k, v, scale=scale)


BACKENDS = (
    Backend("sdpa", _run_sdpa, _sdpa_refusal),
    Backend("sdpa_cudnn", functools.partial(sdpa, backends=[ONE["sdpa_cudnn"]]), _cudnn_refusal),
    Backend("sdpa_flash", functools.partial(sdpa, backends=[ONE["sdpa_flash"]]), _flash_refusal),
    Backend(
        "sdpa_efficient",
        functools.partial(sdpa, backends=[ONE["sdpa_efficient"]]),
        functools.partial(_gpu_refusal, half_only=False),
    ),
    Backend(
        "sdpa_math",
        functools.partial(sdpa, backends=[ONE["sdpa_math"]]),
        functools.partial(_sdpa_refusal, forward_mode=True),
    ),
    Backend("triton", _run_triton, _triton_refusal),
    Backend("triton_cudnn", _run_mixed, _mixed_refusal),
    Backend(
        "fa3",
        _unmasked(external.fa3),
        functools.partial(_package_refusal, module=external.FA3, package="flash-attn-3", majors=(9,), largest=256),
    ),
    Backend(
        "fa4",
        _unmasked(external.fa4),
        functools.partial(
            _package_refusal, module=external.FA4, package="flash-attn-4", majors=(9, 10, 11, 12), largest=128
        ),
    ),
    Backend("reference", attention_reference, lambda request: None),
)
BY_NAME = {b.name: b for b in BACKENDS}


class Facts(NamedTuple):
    """All that the checks and the choice depend on, cheap to collect: an eager call costs little but this."""

    devices: tuple[torch.device, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    key_mask: tuple[torch.Size, torch.dtype, torch.device] | None
    lens: tuple[torch.Size, torch.dtype, torch.device] | None
    biased: bool
    causal: bool
    return_lse: bool
    gradients: bool
    tangents: bool
    positive_scale: bool
    repeat: bool


def facts_of(
    q, k, v, *, key_mask=None, lens=None, bias=None, causal=False, scale=None, return_lse=False
) -> Facts:  # fmt: skip
    """The facts of a call with these arguments."""
    return Facts(
        (q.device, k.device, v.device),
        (q.dtype, k.dtype, v.dtype),
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        None if key_mask is None else (key_mask.shape, key_mask.dtype, key_mask.device),
        None if lens is None else (lens.shape, lens.dtype, lens.device),
        bias is not None,
        causal,
        return_lse,
        wants_gradient((q, k, v)),
        forward_mode(),
        scale is None or scale > 0,
        torch.are_deterministic_algorithms_enabled(),
    )


def _mask_faults(facts: Facts, batch: int, keys: int) -> list[str]:
    """Masks of other shapes or dtypes: integers would be read as bytes by one backend, as a bias by another."""
    faults = []
    if facts.key_mask is not None:
        shape, dtype, _ = facts.key_mask
        if shape != (batch, keys):
            faults.append(f"key_mask must be [B, Lk] = [{batch}, {keys}], got {list(shape)}")
        if dtype != torch.bool:
            faults.append(f"key_mask must be bool, got {dtype}")
    if facts.lens is not None:
        shape, dtype, _ = facts.lens
        if shape != (batch,):
            faults.append(f"lens must be [B] = [{batch}], got {list(shape)}")
        if dtype not in (torch.int32, torch.int64):
            faults.append(f"lens must be int32 or int64, got {dtype}")
    return faults


def _device_faults(facts: Facts) -> list[str]:
    """Tensors that are not where q is."""
    found = [("k", facts.devices[1]), ("v", facts.devices[2])]
    found += [] if facts.key_mask is None else [("key_mask", facts.key_mask[2])]
    found += [] if facts.lens is None else [("lens", facts.lens[2])]
    return [f"{name} is on {place}, q on {facts.devices[0]}" for name, place in found if place != facts.devices[0]]


def _check(site: str, facts: Facts) -> None:
    faults, (q, k, v) = [], facts.shapes
    if site not in SITES:
        faults.append(f"site {site!r} is none of {', '.join(SITES)}")
    if not (len(q) == len(k) == len(v) == 4):
        faults.append(f"q, k, v must be [B, L, H, D]; got {list(q)}, {list(k)}, {list(v)}")
    elif k != v or q[0] != k[0] or q[3] != k[3] or (q[2] % k[2] if k[2] else q[2]):
        faults.append(
            f"q {list(q)}, k {list(k)}, v {list(v)}: k and v must be equal, batch and head size "
            "shared, and q's heads a multiple of k's"
        )
    else:
        faults += _mask_faults(facts, k[0], k[1])
    faults += _device_faults(facts)
    of_q, of_k, of_v = facts.dtypes
    if not of_q.is_floating_point:
        faults.append(f"q, k, v must be floating, got {of_q}")
    if not (of_q == of_k == of_v):
        faults.append(f"q, k, v must share a dtype; got {of_q}, {of_k}, {of_v}")
    raise_faults("attention: the arguments do not fit", faults)


def _call_by_hand(facts: Facts, capability) -> by_hand.Call:
    (batch, queries, _, head_size), (_, keys, kv_heads, _) = facts.shapes[:2]
    plain = facts.key_mask is None and facts.lens is None and not facts.biased and not facts.causal
    expanded = any(n > 1 and s == 0 for x, y in zip(facts.shapes, facts.strides, strict=True) for n, s in zip(x, y))
    return by_hand.Call(
        facts.dtypes[0], capability, head_size, batch, kv_heads, queries, keys, plain, facts.repeat, not expanded
    )


def _request(facts: Facts) -> AttentionRequest:
    q, k, _ = facts.shapes
    capability = capability_of(facts.devices[0])
    layout_fault = strided_fault(facts.dtypes[0], facts.shapes, facts.strides)
    call = _call_by_hand(facts, capability)
    faults = [layout_fault or fault(call) for fault in (by_hand.forward_fault, by_hand.backward_fault)]
    return AttentionRequest(
        device=facts.devices[0].type,
        dtype=facts.dtypes[0],
        head_dim=q[-1],
        masked=facts.key_mask is not None or facts.lens is not None,
        biased=facts.biased,
        causal=facts.causal,
        return_lse=facts.return_lse,
        index=facts.devices[0].index,
        capability=capability,
        queries=q[1],
        keys=k[1],
        grouped=q[2] != k[2],
        gradients=facts.gradients,
        tangents=facts.tangents,
        positive_scale=facts.positive_scale,
        repeat=facts.repeat,
        layout_fault=layout_fault,
        forward_by_hand=faults[0],
        backward_by_hand=faults[1],
    )


def request_of(q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **options) -> AttentionRequest:
    """The request that a call with these arguments makes; k and v default to q."""
    k = q if k is None else k
    return _request(facts_of(q, k, k if v is None else v, **options))


def order(request: AttentionRequest) -> tuple[str, ...]:
    """The names that `auto` tries for a request, first the fastest that was measured."""
    kind = "self" if request.queries == request.keys else "cross"
    passes = "backward" if request.gradients else "forward"
    ours = request.forward_by_hand is None and (request.backward_by_hand is None or not request.gradients)
    return preferred(request.capability, kind, passes, request.head_dim, request.queries, by_hand=ours)


def _choice(name: str, request: AttentionRequest) -> Backend:
    return choose("attention", BACKENDS, name, request, order(request))


@remembered
def _decide(name: str, site: str, facts: Facts) -> Backend:
    _check(site, facts)
    return _choice(name, _request(facts))


def explain_attention(q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **options) -> dict[str, str]:
    """`{backend: "usable" or why not}` for a call with these tensors (k and v: as q) and the options of `attention`."""
    return explain(BACKENDS, request_of(q, k, v, **options))


def _of_our_kernels(request: AttentionRequest) -> list[str]:
    """Which kernel each pass of the Triton backend would run, and why not the one in Gluon."""
    passes = {"forward": request.forward_by_hand}
    if request.gradients:
        passes["backward"] = request.backward_by_hand
    told = lambda why: "in Gluon" if why is None else f"in Triton, not in Gluon: {why}"  # noqa: E731
    return [f"{name}: {told(why)}" for name, why in passes.items()]


def print_choice(
    q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, backend: str = "auto", **options
) -> None:
    """Prints which backend such a call would take and why each other one is not used or cannot be."""
    request = request_of(q, k, v, **options)
    name = backend_name("attention", backend, BY_NAME)
    tried = order(request)
    found = next((n for n in tried if BY_NAME[n].refusal(request) is None), None) if name == "auto" else name
    place = request.device if request.capability is None else f"sm_{request.capability[0]}{request.capability[1]}"
    print(f"attention, {request.dtype}, {request.queries} x {request.keys}, head size {request.head_dim}, on {place}:")
    for other, reason in explain(BACKENDS, request).items():
        mark = "->" if other == found else "  "
        place = f" (auto: number {tried.index(other) + 1})" if other in tried else ""
        print(f"{mark} {other}: {reason}{place}")
        if other == "triton" and reason == "usable":
            for line in _of_our_kernels(request):
                print(f"     {line}")


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
        backend: `"auto"` (the first usable one of the device's table) or a name in `BACKENDS`.

    Returns:
        `[B, Lq, H, D]`, with `return_lse` also log-sum-exp `[B, H, Lq]`.

    Raises:
        UserError: shapes that do not fit; an unknown or unusable backend, with the reason.
    """
    flags = {"key_mask": key_mask, "lens": lens, "bias": bias, "causal": causal, "scale": scale}
    if return_lse:
        flags["return_lse"] = True
    return _decide(backend, site, facts_of(q, k, v, **flags)).run(q, k, v, **flags)


@dataclasses.dataclass(frozen=True)
class Attention:
    """`attention` with its backend fixed: what a model's `Run` holds, and what wrappers hold as `inner`."""

    backend: str = "auto"

    def __post_init__(self):
        object.__setattr__(self, "backend", backend_name("attention", self.backend, BY_NAME))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options):
        return attention(q, k, v, backend=self.backend, **options)
