"""Fake quantisation of weights and activations of linear layers, straight-through.

| format | activations `[..., K]` | weights `[out, K]` |
|---|---|---|
| nvfp4 | E2M1 codes, an E4M3 scale per 16 of K | the same |
| fp8 | E4M3 codes, one scale per tensor | the same |
| fp8_block | E4M3 codes, a scale per row and 128 of K | a scale per 128 x 128 |

An FP8 scale is `max|x| / 448` in float32 (DeepSeek-V3, section 3.3.2, for the blocks); codes are
`E4M3(x / scale)`, nearest even. Blocks at the ends may be smaller.
"""

import dataclasses
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from core.errors import UserError, nearest_names
from kernels.dispatch import Backend, choose, not_interpreted
from kernels.linear.reference import BLOCK, fp8_block_scales, fp8_scale, per_element, round_fp8
from kernels.op import differentiable, fold_batch, raw_op, unfold_batch
from kernels.qat.nvfp4 import Request, fake_quant_nvfp4, triton_refusal

Format = Literal["nvfp4", "fp8", "fp8_block"]
Role = Literal["weight", "activation"]


def _run_reference(x: Tensor, scale: Tensor | None, rows: int) -> Tensor:
    if scale is not None:
        return round_fp8(x, scale[:, None, None])
    return round_fp8(x, per_element(fp8_block_scales(x, rows), x.shape, rows))


def _run_triton(x: Tensor, scale: Tensor | None, rows: int) -> Tensor:
    from kernels.linear.fp8_triton import run

    return run(x, scale, rows)


BACKENDS = (
    Backend("triton", _run_triton, triton_refusal),
    Backend("reference", _run_reference, lambda request: None),
)


def _fake(x: Tensor, scale: Tensor | None, rows: int, backend: str) -> Tensor:
    return next(b for b in BACKENDS if b.name == backend).run(x, scale, rows)


def _fold(size: int, dims: tuple, args: tuple):
    x, scale, *rest = args
    return unfold_batch(_fake_op(fold_batch(x, dims[0], size), fold_batch(scale, dims[1], size), *rest), size), 0


_fake_op = differentiable(
    raw_op("fp8_fake_quant", _fake, lambda x, scale, rows, backend: x.new_empty(x.shape)),
    fold=_fold,
    keep=lambda args, outputs: (),
    backward=lambda kept, args, grads: (grads[0], None, None, None),
    tangent=lambda kept, args, tangents: tangents[0],
)


def fake_quant(x: Tensor, format: Format, role: Role, *, backend: str = "auto") -> Tensor:
    """x rounded to `format` and back, in its dtype; gradients and tangents pass straight through.

    Args:
        x: activations `[..., K]` or a weight `[out, K]`; float32, bfloat16 or float16 (the reference also float64).
            K is a multiple of 16 for nvfp4.
        backend: `"auto"`, `"triton"` or `"reference"`; bit-identical.

    Raises:
        UserError: an unknown format or role, a shape that does not fit, an unknown or unusable backend.
    """
    for name, value, allowed in (("format", format, get_args(Format)), ("role", role, get_args(Role))):
        if value not in allowed:
            near = nearest_names(str(value), allowed)
            raise UserError(f"fake_quant: {name} {value!r}{near} is none of {', '.join(allowed)}")
    if format == "nvfp4":
        return fake_quant_nvfp4(x, backend=backend)
    if x.ndim == 0 or not x.is_floating_point():
        raise UserError(f"fake_quant: needs a floating-point tensor [..., K], got {list(x.shape)} {x.dtype}")
    request, auto = Request(x.device.type, x.dtype), not_interpreted(x.device.type)
    name = choose("fake_quant", BACKENDS, backend, request, auto).name
    if x.numel() == 0:
        return x.clone()
    scale = None if format == "fp8_block" else fp8_scale(x.detach().abs().amax()).reshape(1)
    rows = BLOCK if role == "weight" else 1
    return _fake_op(x.reshape(1, -1, x.shape[-1]), scale, rows, name).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class LinearQuant:
    """What a linear layer imitates: the format, and whether of its weight, of its input, or of both."""

    format: Format
    weights: bool = True
    activations: bool = True
    backend: str = "auto"

    def __post_init__(self):
        if self.format not in get_args(Format):
            near = nearest_names(str(self.format), get_args(Format))
            raise UserError(f"LinearQuant: format {self.format!r}{near} is none of {', '.join(get_args(Format))}")


def fake_quant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, quant: LinearQuant) -> Tensor:
    """`x W^T + b`, `[..., in] -> [..., out]`, with x and W fake-quantised as `quant` says; W `[out, in]`."""
    if quant.weights:
        weight = fake_quant(weight, quant.format, "weight", backend=quant.backend)
    if quant.activations:
        x = fake_quant(x, quant.format, "activation", backend=quant.backend)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
