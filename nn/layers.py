"""Layers as functions over a flat tree: `linear(p, "attn1.to_q", x)` reads `attn1.to_q.weight` and friends."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from core import compat, specs
from core.errors import UserError
from core.specs import ParamSpec, Specs
from kernels import dequantise, fake_quant_fp8, norm_rope, qk_norm_rope
from kernels.norm.reference import Pairs
from nn.rope import Rope, apply_rope
from nn.run import TensorParallel


def wide(x: Tensor) -> torch.dtype:
    """The dtype of norms, modulation and angles for x: float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def effective_weight(p: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """`name.weight` as a matrix `[out, in]` in `dtype`, through its companions; a patch kernel is flattened.

    `name.weight_scale`, beside NVFP4 codes optionally `name.weight_global_scale`, dequantises a float8, int8 or NVFP4
    weight (the table of `kernels.linear.reference`); `name.weight_fake_scale` rounds a full-precision weight to the
    FP8 grid of that scale with a straight-through gradient.
    """
    weight = p[f"{name}.weight"].flatten(1)
    if (scale := p.get(f"{name}.weight_scale")) is not None:
        return dequantise(weight, scale, dtype, global_scale=p.get(f"{name}.weight_global_scale"))
    if (scale := p.get(f"{name}.weight_fake_scale")) is not None:
        weight = fake_quant_fp8(weight, scale)
    return weight.to(dtype)


def linear(p: Mapping[str, Tensor], name: str, x: Tensor, *, add_bias: bool = True) -> Tensor:
    """`x W^T + b`, with the companions of `name` applied.

    Args:
        p: a tree with `name.weight` `[out, in, ...]` (trailing dimensions are flattened: a patch
            convolution is a linear layer), optionally `name.bias` `[out]`, `weight_scale`, `weight_global_scale`,
            `weight_fake_scale`, and a LoRA pair `lora_A` `[r, in]`, `lora_B` `[out, r]`, `lora_scale` `[]`.
        x: `[..., in]`.
        add_bias: False leaves the bias to the caller (after a tensor-parallel reduction).

    Returns:
        `[..., out]` in x's dtype. LoRA adds `lora_scale * B(A(x))` and leaves the base weight as it is.
    """
    weight = effective_weight(p, name, x.dtype)
    bias = p.get(f"{name}.bias") if add_bias else None
    y = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if (down := p.get(f"{name}.lora_A")) is not None:
        up, scale = p[f"{name}.lora_B"], p[f"{name}.lora_scale"]
        y = y + F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype)) * scale.to(x.dtype)
    return y


def projections(p: Mapping[str, Tensor], name: str, parts: Sequence[str], x: Tensor) -> tuple[Tensor, ...]:
    """`x` through the linear layers `name.<part>`, in one product where the tree holds them packed.

    Args:
        parts: `("to_q", "to_k", "to_v")` or `("to_k", "to_v")`; packed they are `to_qkv`, `to_kv`, of equal rows.
        x: `[..., in]`.

    Returns:
        One `[..., out]` per part.

    Raises:
        UserError: adapters of the layout that the weights do not have: they would change nothing.
    """
    packed, split = f"{name}.to_{''.join(part.removeprefix('to_') for part in parts)}", [f"{name}.{n}" for n in parts]
    joined = f"{packed}.weight" in p
    if idle := [f"{layer}.lora_A" for layer in (split if joined else [packed]) if f"{layer}.lora_A" in p]:
        there = packed if joined else ", ".join(split)
        raise UserError(f"{', '.join(idle)}: no such layer here, but {there}: adapt the weights as they are laid out")
    if joined:
        return linear(p, packed, x).chunk(len(parts), dim=-1)
    return tuple(linear(p, layer, x) for layer in split)


def linear_specs(
    name: str,
    n_in: int,
    n_out: int,
    *,
    axes: tuple[str | None, str | None] = (None, None),
    init: specs.Init | None = None,
    kernel: tuple[int, ...] = (),
    keep_fp32: bool = False,
    bias: bool = True,
) -> Specs:
    """Specs of `name.weight` `[n_out, n_in, *kernel]` and, with `bias`, `name.bias` `[n_out]` (zeros).

    Args:
        axes: logical names of (out, in).
        init: of the weight; default Xavier uniform over the flattened matrix.
    """
    flat_in = n_in * math.prod(kernel)
    weight = ParamSpec(
        (n_out, n_in, *kernel),
        axes=(*axes, *([None] * len(kernel))),
        init=init if init is not None else specs.xavier(flat_in, n_out),
        keep_fp32=keep_fp32,
    )
    out = {f"{name}.weight": weight}
    if bias:
        out[f"{name}.bias"] = ParamSpec((n_out,), axes=(axes[0],), keep_fp32=keep_fp32)
    return out


def affine_specs(name: str, dim: int, *, axis: str | None = "embed", bias: bool = True, keep_fp32=True) -> Specs:
    """Specs of a norm's `name.weight` (ones) and, with `bias`, `name.bias` (zeros), both `[dim]`."""
    out = {f"{name}.weight": ParamSpec((dim,), axes=(axis,), init=specs.ONES, keep_fp32=keep_fp32)}
    if bias:
        out[f"{name}.bias"] = ParamSpec((dim,), axes=(axis,), keep_fp32=keep_fp32)
    return out


def rms_norm_across_heads(x: Tensor, weight: Tensor, eps: float, tp: TensorParallel = TensorParallel()) -> Tensor:
    """RMSNorm of queries or keys `[B, L, H*D]` over their full inner width, in float32 or wider."""
    h = x.to(wide(x))
    h = h * torch.rsqrt(tp.mean_square(h) + eps)
    return (h * weight).to(x.dtype)


def norm_heads(
    x: Tensor, weight: Tensor, head_dim: int, eps: float, tp: TensorParallel = TensorParallel(), *,
    rope: Rope | None = None, pairs: Pairs = "interleaved",
) -> Tensor:  # fmt: skip
    """Queries or keys `[B, L, H*D]`, normalised over their full inner width, as heads `[B, L, H, D]`.

    `rope` then turns them (see `nn.rope.apply_rope`); a table per head has the heads of this rank.
    """
    if tp == TensorParallel():
        return norm_rope(split_heads(x, head_dim), eps=eps, weight=weight, rope=rope, pairs=pairs)
    heads = split_heads(rms_norm_across_heads(x, weight, eps, tp), head_dim)
    return heads if rope is None else apply_rope(heads, rope, pairs)


def norm_rope_heads(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Rope, head_dim: int, eps: float,
    tp: TensorParallel = TensorParallel(), *, pairs: Pairs = "interleaved",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`norm_heads` of queries and keys, turned by the angles of `rope`, in one pass where no rank needs another."""
    if tp == TensorParallel():
        q, k = split_heads(q, head_dim), split_heads(k, head_dim)
        return qk_norm_rope(q, k, eps=eps, q_weight=q_weight, k_weight=k_weight, rope=rope, pairs=pairs)
    q, k = (norm_heads(x, w, head_dim, eps, tp, rope=rope, pairs=pairs) for x, w in ((q, q_weight), (k, k_weight)))
    return q, k


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """`[B, L, H*D] -> [B, L, H, D]`; H comes from the shape, so local shards work too."""
    return x.unflatten(-1, (-1, head_dim))


def timestep_embedding(timestep: Tensor, dim: int, *, max_period: float = 10000.0) -> Tensor:
    """Sinusoidal embedding `[..., dim]` of timesteps `[...]`: cosines first, then sines.

    Angles are `t * max_period ** (-i / half)`, i = 0..half-1 (Vaswani et al., 2017, with the halves apart),
    in float32, or float64 for float64 timesteps. `dim` must be even.
    """
    half = dim // 2
    dtype = wide(timestep)
    rates = torch.exp(-math.log(max_period) * torch.arange(half, device=timestep.device, dtype=dtype) / half)
    angles = timestep.to(dtype)[..., None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def gelu_mlp(p: Mapping[str, Tensor], up: str, down: str, x: Tensor, tp: TensorParallel = TensorParallel()) -> Tensor:
    """`down(gelu_tanh(up(x)))`, `[B, T, D] -> [B, T, D]`."""
    return reduced_linear(p, down, gelu_linear(p, up, tp.copy(x)), tp)


def gelu_linear(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """`gelu_tanh(linear(x))`; in 16 bits on a GPU one kernel where there is no gradient."""
    bias, adapted = p.get(f"{name}.bias"), f"{name}.lora_A" in p
    if bias is not None and not adapted and x.is_cuda and x.dtype.itemsize == 2 and compat.plain_call():
        return compat.linear_gelu(x, effective_weight(p, name, x.dtype), bias.to(x.dtype))
    return F.gelu(linear(p, name, x), approximate="tanh")


def reduced_linear(p: Mapping[str, Tensor], name: str, x: Tensor, tp: TensorParallel) -> Tensor:
    """A row-parallel linear layer: partial products are summed first, then the bias, if there is one, is added once."""
    if tp == TensorParallel():
        return linear(p, name, x)
    y, bias = tp.reduce(linear(p, name, x, add_bias=False)), p.get(f"{name}.bias")
    return y if bias is None else y + bias.to(x.dtype)


def patchify(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """`[B, C, T, H, W] -> [B, N, C*pt*ph*pw]`, tokens in (t, h, w) order, features in (c, pt, ph, pw) order."""
    pt, ph, pw = patch
    return rearrange(x, "b c (t pt) (h ph) (w pw) -> b (t h w) (c pt ph pw)", pt=pt, ph=ph, pw=pw)


def unpatchify(x: Tensor, patch: tuple[int, int, int], grid: tuple[int, int, int]) -> Tensor:
    """`[B, N, pt*ph*pw*C] -> [B, C, T, H, W]`; features in (pt, ph, pw, c) order, as Wan's head emits them."""
    (pt, ph, pw), (t, h, w) = patch, grid
    return rearrange(
        x, "b (t h w) (pt ph pw c) -> b c (t pt) (h ph) (w pw)", t=t, h=h, w=w, pt=pt, ph=ph, pw=pw
    )
