"""NVFP4: E2M1 codes of four bits in groups of 16 along the last axis, one E4M3 scale per group.

With a group's largest magnitude `a` and the encoding global scale `g` (1 when absent; `6 * 448 / max|x|` uses the whole
range of the scales), in float32 and in this order:

    scale  = E4M3(a / 6 * g)                 nearest even, saturating at 448
    code   = E2M1(x / (scale * (1 / g)))     nearest even on 0, .5, 1, 1.5, 2, 3, 4, 6, saturating; 0 where scale is 0
    result = code * scale * (1 / g)          then clamped to the finite range of x's dtype and rounded to it

Without a global scale the result has at most 6 significant bits between 2^-10 and 2688: bfloat16 and float16 hold it
exactly. Gradients and tangents pass straight through.
"""

import dataclasses

import torch
from torch import Tensor

from core.errors import UserError
from kernels.dispatch import Backend, choose, explain, not_interpreted, remembered, triton_fault
from kernels.op import differentiable, fold_batch, raw_op, unfold_batch
from kernels.tiles import DTYPES

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_e2m1(magnitude: Tensor) -> Tensor:
    """float32 magnitudes to the E2M1 grid: nearest, ties to the even code, saturating at 6."""
    x = magnitude.clamp(max=E2M1_MAX)
    step = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    return (x / step).round() * step


def round_e4m3(x: Tensor) -> Tensor:
    """Non-negative float32 to the nearest E4M3 value, saturating at 448."""
    return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()


def _encoded(x: Tensor, encode: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Grouped float32 values `[..., K/16, 16]`, their grid magnitudes, group scales, and the decoding global scale."""
    value = x.float().unflatten(-1, (-1, GROUP))
    encode = encode.float()[..., None, None]
    decode = 1 / encode
    peak = value.abs().amax(-1, keepdim=True)
    # A tensor as divisor: PyTorch on a GPU multiplies by the reciprocal of a number, which is not the same division.
    scale = round_e4m3(peak / torch.full_like(peak, E2M1_MAX) * encode)
    unit = scale * decode
    grid = torch.where(unit > 0, round_e2m1(value.abs() / torch.where(unit > 0, unit, 1.0)), 0.0)
    return value, grid, scale, decode


def _largest(dtype: torch.dtype) -> float:
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def fake_quant_values(x: Tensor, encode: Tensor) -> Tensor:
    """The formula above without derivatives; `encode`, the global scale, broadcasts against `x[..., 0]`."""
    value, grid, scale, decode = _encoded(x, encode)
    return (grid * scale * decode).clamp(max=_largest(x.dtype)).copysign(value).flatten(-2).to(x.dtype)


def _aligned(x: Tensor, global_scale: Tensor | None) -> Tensor:
    """The global scale `[1]` or `[x.shape[0]]` so that it broadcasts against `x[..., 0]`."""
    if global_scale is None:
        return torch.ones((), device=x.device)
    return global_scale.reshape(-1, *[1] * (x.ndim - 2))


def _quantise_reference(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    value, grid, scale, _ = _encoded(x, _aligned(x, global_scale))
    code = torch.bucketize(grid, torch.tensor(GRID, device=x.device)) + 8 * value.signbit()
    low, high = code.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, scale.squeeze(-1).to(torch.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a backend of a fake quantisation needs to know."""

    device: str
    dtype: torch.dtype


def triton_refusal(request: Request) -> str | None:
    """Why Triton kernels cannot serve, or None. CPU tensors run under Triton's interpreter only."""
    if request.dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, got {request.dtype}"
    return triton_fault(request.device)


def _run_triton(kind: str, x: Tensor, global_scale: Tensor | None):
    from kernels.qat import nvfp4_triton

    run = nvfp4_triton.run_fake_quant if kind == "fake" else nvfp4_triton.run_quantise
    return run(x, global_scale)


def _run_reference(kind: str, x: Tensor, global_scale: Tensor | None):
    if kind == "fake":
        return fake_quant_values(x, _aligned(x, global_scale))
    return _quantise_reference(x, global_scale)


BACKENDS = (
    Backend("triton", _run_triton, triton_refusal),
    Backend("reference", _run_reference, lambda request: None),
)


@remembered
def _backend(op: str, name: str, device: str, dtype: torch.dtype) -> str:
    return choose(op, BACKENDS, name, Request(device, dtype), not_interpreted(device)).name


def explain_nvfp4(x: Tensor) -> dict[str, str]:
    """`{backend: "usable" or why not}` for a tensor."""
    return explain(BACKENDS, Request(x.device.type, x.dtype))


def _run(kind: str, backend: str, x: Tensor, global_scale: Tensor | None):
    return next(b for b in BACKENDS if b.name == backend).run(kind, x, global_scale)


def _fake(x: Tensor, global_scale: Tensor | None, backend: str) -> Tensor:
    return _run("fake", backend, x, global_scale)


def _encode(x: Tensor, global_scale: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    return _run("codes", backend, x, global_scale)


def _code_shapes(x: Tensor, global_scale: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    *lead, k = x.shape
    codes = x.new_empty((*lead, k // 2), dtype=torch.uint8)
    return codes, x.new_empty((*lead, k // GROUP), dtype=torch.float8_e4m3fn)


def _fold(f, size: int, dims: tuple, args: tuple):
    (x, scale, backend), (x_dim, scale_dim, _) = args, dims
    rows = fold_batch(x, x_dim, size)
    if scale is not None and (scale_dim is not None or scale.numel() > 1):
        scale = fold_batch(scale, scale_dim, size)
        scale = scale.repeat_interleave(rows.shape[0] // scale.numel())
    out = f(rows, scale, backend)
    unfolded = tuple(unfold_batch(o, size) for o in (out if isinstance(out, tuple) else (out,)))
    return (unfolded, (0,) * len(unfolded)) if isinstance(out, tuple) else (unfolded[0], 0)


_fake_op = differentiable(
    raw_op("nvfp4_fake_quant", _fake, lambda x, global_scale, backend: x.new_empty(x.shape)),
    fold=lambda *a: _fold(_fake_op, *a),
    keep=lambda args, outputs: (),
    backward=lambda kept, args, grads: (grads[0], None, None),
    tangent=lambda kept, args, tangents: tangents[0],
)
_encode_op = differentiable(raw_op("nvfp4_quantise", _encode, _code_shapes), fold=lambda *a: _fold(_encode_op, *a))


def _prepared(op: str, x: Tensor, global_scale: Tensor | None, backend: str):
    """Arguments of the ops: x `[n, ..., K]`, the scale as `[1]`, and the name of the backend."""
    if x.ndim == 0 or x.shape[-1] % GROUP or not x.is_floating_point():
        raise UserError(
            f"{op}: needs a floating-point tensor whose last dimension is a multiple of {GROUP}, got "
            f"{list(x.shape)} {x.dtype}; pad the last dimension with zeros to a multiple of {GROUP}"
        )
    if global_scale is not None and global_scale.numel() != 1:
        raise UserError(f"{op}: the global scale is one number per tensor, got shape {list(global_scale.shape)}")
    name = _backend(op, backend, x.device.type, x.dtype)
    scale = None if global_scale is None else global_scale.detach().float().reshape(1)
    return (x if x.ndim > 1 else x[None]), scale, name


def fake_quant_nvfp4(x: Tensor, global_scale: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """x rounded to NVFP4 and back; gradients and tangents of x pass straight through.

    Args:
        x: `[..., K]`, K a multiple of 16, finite; float32, bfloat16 or float16 (the reference takes float64 too and
            computes in float32).
        global_scale: float32 `[]`, the encoding scale (see `nvfp4_global_scale`); no gradient.
        backend: `"auto"` (Triton on CUDA, the reference elsewhere), `"triton"` or `"reference"`; bit-identical.

    Raises:
        UserError: a last dimension that is no multiple of 16; an unknown or unusable backend, with the reason.
    """
    return _fake_op(*_prepared("fake_quant_nvfp4", x, global_scale, backend)).reshape(x.shape)


def quantise_nvfp4(x: Tensor, global_scale: Tensor | None = None, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Codes and scales of x, for export: `fake_quant_nvfp4(x) == dequantise_nvfp4(*quantise_nvfp4(x))`.

    Args: as `fake_quant_nvfp4`.

    Returns:
        uint8 `[..., K/2]`, two codes a byte, the even element in the low four bits (bit 3 the sign, 0..2 the index
        into `GRID`), and float8_e4m3fn scales `[..., K/16]`.
    """
    codes, scales = _encode_op(*_prepared("quantise_nvfp4", x.detach(), global_scale, backend))
    return (codes, scales) if x.ndim > 1 else (codes[0], scales[0])


def dequantise_nvfp4(
    codes: Tensor, scales: Tensor, global_scale: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values `[..., K]` of codes `[..., K/2]` and scales `[..., K/16]`, all three as `quantise_nvfp4` has them."""
    code = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    grid = torch.tensor(GRID, device=codes.device)[code & 7]
    grid = torch.where(code > 7, -grid, grid).unflatten(-1, (-1, GROUP))
    value = grid * scales.float()[..., None]
    if global_scale is not None:
        value = value * (1 / global_scale.float())
    return value.clamp(-_largest(dtype), _largest(dtype)).flatten(-2).to(dtype)


def nvfp4_global_scale(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """The encoding global scale `6 * 448 / max|x|` (float32) over `dim`, or over the whole tensor; at most 2.7e11."""
    peak = x.detach().abs().amax(dim=() if dim is None else dim).float()
    return E2M1_MAX * E4M3_MAX / peak.clamp(min=1e-8)
