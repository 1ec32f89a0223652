"""Attention with structured masks: block-causal with sinks and a rolling window, teacher forcing, block masks.

A mask is planned once per geometry (`plan_attention`, a few milliseconds to a second on the host) and the result is
passed to every call. Callers that meet many geometries keep plans in a dict by (mask, head size, dtype, device).
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.errors import UserError, raise_faults
from kernels.attention import planned_flex
from kernels.attention.plan import BlockCausal, Intervals, Mask, delta, intervals, packed, tile_plan
from kernels.attention.planned import planned_forward
from kernels.attention.tiles import HEAD_SIZES, HOPPER, TileSet, tiles_for
from kernels.dispatch import Backend, capability_of, choose, explain, not_interpreted, triton_fault
from kernels.tiles import DTYPES, Tiles

LN_2 = 0.6931471805599453


@dataclasses.dataclass(frozen=True)
class MaskRequest:
    """What a backend needs to know to say whether it can serve a mask."""

    device: str
    dtype: torch.dtype
    head_dim: int
    rotated: bool
    slots: int


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedMask:
    """A mask ready for calls with `head_dim`, `dtype` and the device of `bounds`: made by `plan_attention`.

    `rotation` holds cosines and sines `[2, classes, pairs]` of the relativistic sinks; `plans` the packed tile plans of
    the forward, query and key kernels, `tiles` their tile sizes, warps and stages (None: not for this backend).
    """

    mask: Mask
    backend: str
    head_dim: int
    dtype: torch.dtype
    class_rows: int
    rotated: tuple[bool, ...]
    bounds: Tensor
    rotation: Tensor | None
    plans: tuple[Tensor, Tensor, Tensor] | None
    tiles: list[int] | None
    flex: Any


def _moved(x: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device that nothing waits for."""
    x = torch.from_numpy(x)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def sink_rotation(mask: BlockCausal, head_dim: int, theta: float = 10000.0) -> np.ndarray | None:
    """Cosines and sines, float32 `[2, classes, pairs]`, by which the queries of each frame are turned back for sinks.

    The angles are those of the temporal rotary axis at `delta` frames, delta * theta ** (-2i / dims) with
    dims = head_dim - 4 * (head_dim // 6) and interleaved pairs; other channels do not turn. None if all deltas are 0.
    """
    shift = delta(mask)
    if not shift.any():
        return None
    dims = head_dim - 4 * (head_dim // 6)
    shift = np.tile(shift, 2 if mask.teacher_forcing else 1)
    angles = shift[:, None] * theta ** (-np.arange(0, dims, 2) / dims)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)


def turn_back(q: Tensor, rotation: Tensor, class_rows: int) -> Tensor:
    """R(-delta) q for `q [B, L, H, D]`: its first `2 * pairs` channels turned in float32 or wider, by row class."""
    pairs = rotation.shape[-1]
    cos, sin = rotation[:, None, :, None, None, :]
    x = q[..., : 2 * pairs].unflatten(1, (-1, class_rows)).to(torch.promote_types(q.dtype, torch.float32))
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(-2).flatten(1, 2)
    return torch.cat([turned.to(q.dtype), q[..., 2 * pairs :]], -1)


def _triton_refusal(request: MaskRequest) -> str | None:
    if (fault := triton_fault(request.device)) is not None:
        return fault
    if request.dtype not in DTYPES:
        return f"it needs float16, bfloat16 or float32, got {request.dtype}"
    low, high = HEAD_SIZES
    step = 16 // request.dtype.itemsize
    if not low <= request.head_dim <= high or request.head_dim % step:
        return f"head size {request.head_dim} is not a multiple of {step} from {low} to {high}"
    return None


def _flex_refusal(request: MaskRequest) -> str | None:
    if request.device != "cuda":
        return f"its compiled backward pass needs a CUDA device, the tensors are on {request.device}"
    if request.rotated:
        return "it scores all keys with the same queries, relativistic sinks need turned ones"
    if request.slots > planned_flex.MAX_SLOTS:
        return f"queries see up to {request.slots} separate intervals of keys, above {planned_flex.MAX_SLOTS}"
    return None


def _turned(q: Tensor, planned: PlannedMask) -> Tensor | None:
    return None if planned.rotation is None else turn_back(q, planned.rotation, planned.class_rows)


def _run_triton(q: Tensor, k: Tensor, v: Tensor, planned: PlannedMask, scale: float) -> tuple[Tensor, Tensor]:
    turned = _turned(q, planned)
    both = q[None] if turned is None else torch.stack([q, turned])
    out, lse = planned_forward(both, k, v, planned.bounds, *planned.plans, planned.class_rows, scale, planned.tiles)
    return out, lse[..., : q.shape[1]] * LN_2


def _run_flex(q: Tensor, k: Tensor, v: Tensor, planned: PlannedMask, scale: float) -> tuple[Tensor, Tensor]:
    return planned_flex.flex(q, k, v, planned.flex, scale)


def planned_reference(q: Tensor, k: Tensor, v: Tensor, planned: PlannedMask, scale: float) -> tuple[Tensor, Tensor]:
    """The definition: dense scores in float32 or wider, rotated slots scored with `turn_back(q)`, the mask, a softmax.

    Returns `[B, Lq, H, D]` in q's dtype and the natural lse `[B, H, Lq]`; a query without keys gets zeros and -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    share = q.shape[2] // k.shape[2]
    k_, v_ = (x.to(wide).transpose(1, 2).repeat_interleave(share, 1) for x in (k, v))
    score = lambda x: (x.to(wide).transpose(1, 2) * scale) @ k_.transpose(-1, -2)  # noqa: E731
    rows, keys = (torch.arange(n, device=q.device) for n in (q.shape[1], k.shape[1]))
    lo, hi = planned.bounds[:, rows // planned.class_rows].unbind(-1)
    seen = (keys >= lo[..., None]) & (keys < hi[..., None])
    scores = score(q)
    if planned.rotation is not None:
        turned = turn_back(q.to(wide), planned.rotation, planned.class_rows)
        scores = torch.where(seen[list(planned.rotated)].any(0), score(turned), scores)
    scores = scores.masked_fill(~seen.any(0), -torch.inf)
    lse = scores.logsumexp(-1)
    # exp(-inf - -inf) would be NaN for a query that sees nothing.
    weights = (scores - torch.where(lse.isinf(), torch.zeros_like(lse), lse)[..., None]).exp()
    return (weights @ v_).transpose(1, 2).to(q.dtype), lse


MASK_BACKENDS = (
    Backend("triton", _run_triton, _triton_refusal),
    Backend("flex", _run_flex, _flex_refusal),
    Backend("reference", planned_reference, lambda request: None),
)
_RUN = {b.name: b.run for b in MASK_BACKENDS}


def _request(spans: Intervals, head_dim: int, dtype: torch.dtype, device: torch.device) -> MaskRequest:
    return MaskRequest(device.type, dtype, head_dim, any(spans.rotated), len(spans.rotated))


def explain_mask(mask: Mask, *, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, str]:
    """`{backend: "usable" or why not}` for `plan_attention` with these arguments."""
    return explain(MASK_BACKENDS, _request(intervals(mask), head_dim, dtype, torch.device(device)))


# Where runs of tiles are short, less shared memory and more programs at a time are better for dK and dV.
HOPPER_DKV = Tiles(64, 64, 4, 2)


def _default_tiles(head_dim: int, dtype: torch.dtype, device: torch.device) -> TileSet:
    tiles = tiles_for(head_dim, dtype, capability_of(device))
    return dataclasses.replace(tiles, dkv=HOPPER_DKV) if tiles is HOPPER[128] else tiles


def _check_tiles(tiles: TileSet) -> None:
    for name in ("forward", "dq"):
        rows = getattr(tiles, name).queries
        if rows % tiles.dkv.queries:
            raise UserError(f"tiles: dkv.queries {tiles.dkv.queries} does not divide {name}.queries {rows}")


def plan_attention(
    mask: Mask, *, head_dim: int, dtype: torch.dtype, device: torch.device | str, backend: str = "auto",
    theta: float = 10000.0, tiles: TileSet | None = None,
) -> PlannedMask:  # fmt: skip
    """Everything about a mask that does not depend on the tensors, on the device they will be on.

    Args:
        mask: a `BlockCausal` or a `block_mask`.
        backend: `"triton"`, `"flex"`, `"reference"`, or `"auto"`: the first of these that is usable, and the reference
            on a CPU.
        theta: base of the temporal rotary frequencies, for relativistic sinks.
        tiles: tile sizes of the Triton kernels; default: the table's.

    Raises:
        UserError: an unknown backend, or one that cannot serve, with the reason.
    """
    device, spans = torch.device(device), intervals(mask)
    request, auto = _request(spans, head_dim, dtype, device), not_interpreted(device.type)
    name = choose("attention over a plan", MASK_BACKENDS, backend, request, auto).name
    bounds = _moved(spans.bounds, device)
    turn = sink_rotation(mask, head_dim, theta) if isinstance(mask, BlockCausal) else None
    plans = numbers = None
    if name == "triton":
        tiles = _default_tiles(head_dim, dtype, device) if tiles is None else tiles
        _check_tiles(tiles)
        used = (tiles.forward, tiles.dq, tiles.dkv)
        made = [tile_plan(spans, t.queries, t.keys, transposed=i == 2) for i, t in enumerate(used)]
        plans = tuple(_moved(packed(plan), device) for plan in made)
        numbers = [n for t in used for n in (t.queries, t.keys, t.warps, t.stages)]
    turn = None if turn is None else _moved(turn, device)
    flex = planned_flex.flex_block_mask(spans, bounds) if name == "flex" else None
    return PlannedMask(
        mask, name, head_dim, dtype, spans.class_rows, spans.rotated, bounds, turn, plans, numbers, flex
    )


def _wanted(mask: Mask) -> str:
    if not isinstance(mask, BlockCausal):
        return f"the block mask is for {mask.q_len} queries and {mask.k_len} keys"
    halves = " * 2 (clean and noisy)" if mask.teacher_forcing else ""
    numbers = f"frames {mask.frames} * tokens_per_frame {mask.tokens_per_frame}{halves} = {mask.q_len}"
    return f"the mask is for {numbers} tokens"


def _check(q: Tensor, k: Tensor, v: Tensor, planned: PlannedMask, scale: float) -> None:
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise UserError(f"q, k, v must be [B, L, H, D]; got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    faults = []
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        faults.append(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: k and v must be equal, batch and head size "
            "shared, and q's heads a multiple of k's"
        )
    if (q.shape[1], k.shape[1]) != (planned.mask.q_len, planned.mask.k_len):
        faults.append(f"q has {q.shape[1]} and k {k.shape[1]} tokens, {_wanted(planned.mask)}")
    if q.shape[3] != planned.head_dim or not q.dtype == k.dtype == v.dtype == planned.dtype:
        faults.append(
            f"q, k, v have head size {q.shape[3]} and dtypes {q.dtype}, {k.dtype}, {v.dtype}; the plan was made for "
            f"{planned.head_dim} and {planned.dtype}"
        )
    if not q.device == k.device == v.device == planned.bounds.device:
        faults.append(f"q, k, v are on {q.device}, {k.device}, {v.device}, the plan on {planned.bounds.device}")
    if not scale > 0:
        faults.append(f"scale is {scale}, it must be above 0")
    raise_faults("attention over a plan: the arguments do not fit", faults)


def planned_attention(
    q: Tensor, k: Tensor, v: Tensor, planned: PlannedMask, *, scale: float | None = None, return_lse: bool = False
):
    """Attention of `q [B, Lq, H, D]` over the keys of `k, v [B, Lk, Hkv, D]` that `planned.mask` shows to each query.

    Differentiable in q, k, v (and through the lse); `planned_reference` is the maths.

    Args:
        scale: default `D ** -0.5`.

    Returns:
        `[B, Lq, H, D]`, with `return_lse` also the log-sum-exp `[B, H, Lq]`, float32 or wider.

    Raises:
        UserError: tensors that do not fit the mask or the plan, every fault at once.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check(q, k, v, planned, scale)
    out, lse = _RUN[planned.backend](q, k, v, planned, scale)
    return (out, lse) if return_lse else out


def block_causal_sink(
    q: Tensor, k: Tensor, v: Tensor, planned: PlannedMask, *, scale: float | None = None, return_lse: bool = False
):
    """`planned_attention` for a `BlockCausal` mask: self-attention of video tokens `[B, L, H, D]` in frame order."""
    if not isinstance(planned.mask, BlockCausal):
        found = type(planned.mask).__name__
        raise UserError(f"block_causal_sink needs a plan of a BlockCausal mask, got one of a {found}")
    return planned_attention(q, k, v, planned, scale=scale, return_lse=return_lse)
