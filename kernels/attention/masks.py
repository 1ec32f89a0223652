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
from kernels.attention import by_hand, planned_flex
from kernels.attention.plan import (
    MAX_SLOTS,
    BlockCausal,
    Intervals,
    Mask,
    delta,
    intervals,
    packed,
    row_bounds,
    steps,
    tile_plan,
)
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

    `rotation` holds cosines and sines `[2, classes, pairs]` of the relativistic sinks; `plans` what the kernels visit,
    in the order of the arguments of `planned.planned_forward`, and `tiles` their tiles, five numbers each (None: not
    for this backend). `not_by_hand`: why the kernels in Gluon are not used.
    """

    mask: Mask
    backend: str
    head_dim: int
    dtype: torch.dtype
    class_rows: int
    rotated: tuple[bool, ...]
    bounds: Tensor
    rotation: Tensor | None
    plans: tuple[Tensor | None, ...] | None
    tiles: list[int] | None
    flex: Any
    not_by_hand: str | None = "not its backend"


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
    out, lse = planned_forward(both, k, v, *planned.plans, planned.class_rows, scale, planned.tiles)
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


def _default_tiles(head_dim: int, dtype: torch.dtype, device: torch.device, rows: int) -> tuple[TileSet, str | None]:
    """The table's tiles, those of the kernels in Gluon only where they serve, and why they do not."""
    capability = capability_of(device)
    tiles = tiles_for(head_dim, dtype, capability)
    tiles = dataclasses.replace(tiles, dkv=HOPPER_DKV) if tiles is HOPPER[128] else tiles
    # The heads are not known yet: as many as fill the processors.
    call = by_hand.Call(dtype, capability, head_dim, 1, by_hand.PROCESSORS, rows, rows, plain=True, repeat=False)
    faults = by_hand.forward_fault(call), by_hand.backward_fault(call)
    forward, fused = (x if why is None else None for x, why in zip((tiles.forward_by_hand, tiles.fused), faults))
    return dataclasses.replace(tiles, forward_by_hand=forward, fused=fused), faults[0]


def _plans(spans: Intervals, tiles: TileSet, device: torch.device) -> tuple[tuple[Tensor | None, ...], list[int]]:
    """`PlannedMask.plans` and `.tiles`."""
    slots, in_gluon = len(spans.rotated), tiles.forward_by_hand is not None
    used = [tiles.forward_by_hand if in_gluon else tiles.forward, tiles.dq, tiles.dkv, tiles.fused]
    made = [None if t is None else tile_plan(spans, t.queries, t.keys, transposed=i > 1) for i, t in enumerate(used)]
    forward, dq, dkv, fused = (None if plan is None else packed(plan) for plan in made)
    if in_gluon:
        forward, fused = (None if made[i] is None else steps(made[i], slots) for i in (0, 3))
    arrays = (forward, spans.bounds, row_bounds(spans) if in_gluon else None, dq, dkv, fused if in_gluon else None)
    numbers = [int(n) for t in used if t is not None for n in (*dataclasses.astuple(t), 0)[:5]]
    return tuple(None if x is None else _moved(x, device) for x in arrays), numbers


def _check_tiles(tiles: TileSet) -> None:
    if tiles.forward_by_hand is not None:
        tiles = dataclasses.replace(tiles, forward=tiles.forward_by_hand)
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
        tiles: tile sizes of the Triton kernels, with those of the kernels in Gluon where these are to run; default: the
            table's, and Gluon where `by_hand.py` says that it serves.

    Raises:
        UserError: an unknown backend, or one that cannot serve, with the reason.
    """
    device, spans = torch.device(device), intervals(mask)
    request, auto = _request(spans, head_dim, dtype, device), not_interpreted(device.type)
    name = choose("attention over a plan", MASK_BACKENDS, backend, request, auto).name
    bounds = _moved(spans.bounds, device)
    turn = sink_rotation(mask, head_dim, theta) if isinstance(mask, BlockCausal) else None
    plans, numbers, fault = None, None, "not its backend"
    if name == "triton":
        if tiles is None:
            tiles, fault = _default_tiles(head_dim, dtype, device, min(mask.q_len, mask.k_len))
        else:
            fault = "not asked for" if tiles.forward_by_hand is None else None
        if len(spans.rotated) > MAX_SLOTS:
            fault = f"queries see up to {len(spans.rotated)} separate intervals of keys, above {MAX_SLOTS}"
            tiles = dataclasses.replace(tiles, forward_by_hand=None, fused=None)
        _check_tiles(tiles)
        plans, numbers = _plans(spans, tiles, device)
    turn = None if turn is None else _moved(turn, device)
    flex = planned_flex.flex_block_mask(spans, bounds) if name == "flex" else None
    return PlannedMask(
        mask, name, head_dim, dtype, spans.class_rows, spans.rotated, bounds, turn, plans, numbers, flex, fault
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
