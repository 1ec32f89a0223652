"""Runs the Triton kernels of norms and gated residuals on tensors whose shapes were checked before.

Shapes: x, y `[B, T, D]`; weight, bias `[W, D]` with W dividing B, row `b // (B / W)` serves sample b; gate, scale,
shift `[B, 1, D]` per sample or `[B, T, D]` per token, scale and shift alike. All have unit stride along D. Triton is
imported when a kernel is launched, never before.
"""

import torch
from torch import Tensor

from core.compat import launched
from kernels.norm.config import Launch, launch_of, programs_per_sample
from kernels.tiles import power_of_two

COLUMNS, DEPTH = 32, 64  # the tile in which partial sums are added


def norm_kernels() -> list:
    """What norms and their gradients launch."""
    from kernels.norm import triton_norm

    return [triton_norm.norm_forward, triton_norm.norm_backward, triton_norm.finish]


def absent(x: Tensor) -> Tensor:
    """What stands for an output that was not asked for: `[B, 0]`, so that it can be folded and unfolded."""
    return x.new_empty(x.shape[0], 0)


def strides(p: Tensor | None) -> tuple[int, int]:
    """Strides of samples and tokens; 0 for one token, and for None."""
    return (0, 0) if p is None else (p.stride(0), p.stride(1))


def mode(p: Tensor | None, tokens: int) -> int:
    """0 absent, 1 per sample, 2 per token."""
    return 0 if p is None else 1 if p.shape[1] == 1 or tokens == 1 else 2


def column_bytes(tokens: int, *tensors: Tensor | None) -> int:
    """Bytes that one token reads per column of those tensors that have a row for every token."""
    return sum(p.element_size() for p in tensors if p is not None and p.shape[1] == tokens)


def packed(*tensors: Tensor | None) -> list[Tensor | None]:
    """Contiguous versions, for what the kernels index by row number alone; a folded axis may have stride 0."""
    return [None if p is None else p.contiguous() for p in tensors]


def unit(x: Tensor | None) -> Tensor | None:
    """x with unit stride along its last axis, which gradients of expanded results lack."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def norm_forward(
    x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, eps: float, kind: str, gating: str, launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`(new [B, T, D], out [B, T, D], stats [B, T, 2])`: mean (0 for RMS) and reciprocal deviation in float32.

    `kind` is `"layer"`, `"rms"`, or `"none"` for the residual sum alone; what is not computed is `absent`.
    """
    from kernels.norm import triton_norm

    (b, t, d), dense = x.shape, x.new_empty
    weight, bias = packed(weight, bias)
    new = absent(x) if y is None else dense(b, t, d)
    out, stats = absent(x), absent(x)
    if kind != "none":
        out, stats = dense(b, t, d), dense(b, t, 2, dtype=torch.float32)
    if x.numel() == 0:
        return new, out, stats
    if launch is None:
        launch = launch_of("norm_forward", d, column_bytes(t, x, y, gate, scale, shift))
    programs = programs_per_sample(launch, x.device, b, t)
    affine = next((p for p in (weight, bias) if p is not None), None)
    fill = lambda p: x if p is None else p  # noqa: E731
    with torch.cuda.device_of(x):
        launched(triton_norm.norm_forward, x)[(b * programs,)](
            x, fill(y), fill(gate), fill(weight), fill(bias), fill(scale), fill(shift), new, out, stats,
            t, d, programs, b if affine is None else b // affine.shape[0], eps,
            *strides(x), *strides(y), *strides(gate), *strides(scale), *strides(shift),
            NORM=kind != "none", LAYER=kind == "layer", HAS_Y=y is not None, GATE=mode(gate, t), TANH=gating == "tanh",
            WEIGHT=weight is not None, BIAS=bias is not None, SCALE=mode(scale, t), SHIFT=mode(shift, t),
            ROWS=launch.rows, BLOCK=power_of_two(d), STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
    return new, out, stats


def _zero_gradients(x, y, gate, weight, bias, scale, shift, kind) -> tuple[Tensor, ...]:
    """Of an empty batch: parameters that no token saw have gradient 0."""
    dx = absent(x) if kind == "none" else torch.zeros_like(x)
    dy = absent(x) if gate is None else torch.zeros_like(x)
    vectors = (gate, *((None,) * 4 if kind == "none" else (weight, bias, scale, shift)))
    return dx, dy, *(absent(x) if p is None else p.new_zeros(p.shape) for p in vectors)


def norm_backward(
    x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, stats: Tensor | None, grad: Tensor | None, grad_new: Tensor | None,
    kind: str, gating: str, launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(dx, dy, dgate, dweight, dbias, dscale, dshift)` in the shapes and dtypes of their inputs.

    Args:
        x: what was normalised (the residual sum where there was one); dx is its gradient, `grad_new` included.
        y: needed only beside a gate.
        kind: `"none"`: dx is grad_new, so it is left out and only dy and dgate are computed.
    """
    from kernels.norm import triton_norm

    grad, grad_new = unit(grad), unit(grad_new)
    weight, bias, stats = packed(weight, bias, stats)
    if x.numel() == 0:
        return _zero_gradients(x, y, gate, weight, bias, scale, shift, kind)
    if kind == "none":
        weight = bias = scale = shift = None
    (b, t, d), like = x.shape, lambda p: absent(x) if p is None else p.new_empty(p.shape)
    if launch is None:
        launch = launch_of("norm_backward", d, column_bytes(t, x, grad, grad_new, y, gate, scale))
    programs = programs_per_sample(launch, x.device, b, t)
    dx = absent(x) if kind == "none" else x.new_empty(b, t, d)
    dy = absent(x) if gate is None else x.new_empty(b, t, d)
    dgate, dscale, dshift = like(gate), like(scale), like(shift)
    affine = next((p for p in (weight, bias) if p is not None), None)
    group = b if affine is None else b // affine.shape[0]
    shares = [absent(x) if p is None else x.new_empty(b, d, dtype=p.dtype if group == 1 else torch.float32)
              for p in (weight, bias)]  # fmt: skip
    gates, scales, shifts = mode(gate, t), mode(scale, t), mode(shift, t)
    sums = {"SUM_A": weight is not None or scales == 1}
    sums["SUM_B"] = bias is not None or shifts == 1
    slots = sums["SUM_A"] + sums["SUM_B"] + (gates == 1)
    partial = x.new_empty(b * programs, slots, d, dtype=torch.float32)
    flags = {"GATE": gates, "TANH": gating == "tanh", "WEIGHT": weight is not None, "BIAS": bias is not None,
             "SCALE": scales, "SHIFT": shifts, **sums}  # fmt: skip
    fill = lambda p: x if p is None else p  # noqa: E731
    inputs = [fill(p) for p in (x, y, gate, weight, bias, scale, stats, grad, grad_new)]
    with torch.cuda.device_of(x):
        launched(triton_norm.norm_backward, x)[(b * programs,)](
            *inputs, dx, dy, dgate, dscale, dshift, partial, t, d, programs, group,
            *strides(x), *strides(y), *strides(gate), *strides(scale), *strides(grad), *strides(grad_new),
            NORM=kind != "none", LAYER=kind == "layer", GRAD_NEW=grad_new is not None, **flags,
            ROWS=launch.rows, BLOCK=power_of_two(d), STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
        if slots:
            launched(triton_norm.finish, x)[(b, -(-d // COLUMNS))](
                partial, *inputs[2:6], dgate, *shares, dscale, dshift, d, programs, group,
                strides(gate)[0], strides(scale)[0], **flags, DEPTH=DEPTH, BLOCK=COLUMNS, num_warps=4,
            )  # fmt: skip
    if group > 1:
        shares = [s if p is None else s.unflatten(0, (-1, group)).sum(1).to(p.dtype)
                  for s, p in zip(shares, (weight, bias), strict=True)]  # fmt: skip
    return dx, dy, dgate, *shares, dscale, dshift
