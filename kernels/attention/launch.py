"""Launches the Triton attention kernels: grids, tile sizes, descriptors. Imports Triton, so only the ops import it."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention import by_hand, triton_backward, triton_forward, triton_tangent
from kernels.attention.tiles import ByHand, Fused, TileSet, splits, tiles_for
from kernels.descriptors import Descriptor, describable, rows_of_heads
from kernels.dispatch import capability_of, multiprocessors
from kernels.tiles import Tiles, padded

LOG2_E = 1.4426950408889634
INTERPRETER_UNITS = 4


def choose_tiles(q: Tensor) -> TileSet:
    """The tiles for query `q [..., D]` on its device."""
    return tiles_for(q.shape[-1], q.dtype, capability_of(q.device))


def _by_engine(*tensors: Tensor) -> bool:
    """Whether descriptors are used: they pay where products read shared memory (16-bit on Hopper), elsewhere they made
    registers spill."""
    capability = capability_of(tensors[0].device)
    pays = capability is None or (capability[0] == 9 and tensors[0].element_size() == 2)
    return pays and all(map(describable, tensors))


def _operands(tma: bool, tensors: Sequence[Tensor], rows: Sequence[int]) -> Sequence:
    """The tensors as descriptors of `rows` rows of a head each, or as they are."""
    if not tma:
        return tensors
    width = padded(tensors[0].shape[3])
    return [rows_of_heads(x, n, width) for x, n in zip(tensors, rows, strict=True)]


def _strides(*tensors: Tensor) -> list[int]:
    """`[B, L, H, D]` strides in the order batch, head, row."""
    found = []
    for x in tensors:
        of_b, of_n, of_h, _ = x.stride()
        found += of_b, of_h, of_n
    return found


def _bytes(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask.contiguous().view(torch.uint8)


def _flags(q, index, causal, tma, precision) -> dict:
    key_mask, starts_q, _, _, lens_k = index
    if q.dtype == torch.bfloat16 and not q.is_cuda:
        precision = "upcast"
    return {
        "D": q.shape[3], "BD": padded(q.shape[3]), "CAUSAL": causal, "MASKED": key_mask is not None,
        "RAGGED": starts_q is None and lens_k is not None, "PACKED": starts_q is not None, "TMA": tma,
        "PRECISION": precision,
    }  # fmt: skip


def _sequences(q: Tensor, index) -> int:
    return q.shape[0] if index[1] is None else index[1].shape[0]


def _run(kernel, programs: int, tiles: Tiles, device, args: list, flags: dict) -> None:
    if programs:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            kernel[(programs,)](*args, **flags, num_warps=tiles.warps, num_stages=tiles.stages)


def _up(n: int, size: int) -> int:
    return -(-n // size)


def new_output(like: Tensor, packed: bool) -> Tensor:
    """An output in the layout of `like`; rows of no packed sequence stay zero."""
    return torch.zeros_like(like) if packed else torch.empty_like(like)


def new_lse(q: Tensor, packed: bool) -> Tensor:
    """An empty log-sum-exp `[B, H, L]`, float32; rows of no packed sequence stay -inf."""
    shape = (q.shape[0], q.shape[2], q.shape[1])
    if packed:
        return torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, index, max_q: int, max_k: int, causal: bool, scale: float, precision: str,
    tiles: Tiles | ByHand | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp `[B, H, Lq]` of `q [B, Lq, H, D]` over `k, v [B, Lk, Hkv, D]`.

    Args:
        index: `(key_mask, starts_q, lens_q, starts_k, lens_k)`; with starts the rows are packed sequences, B = 1.
        max_q, max_k: the longest sequence (without starts Lq and Lk).
        tiles: default: the table's, and the kernel in Gluon where it serves the call.
    """
    if tiles is None:
        chosen = choose_tiles(q)
        in_gluon = by_hand.forward_fault(_facts(q, k, v, index, causal)) is None
        tiles = chosen.forward_by_hand if in_gluon else chosen.forward
    if isinstance(tiles, ByHand):
        out, lse = new_output(q, False), new_lse(q, False)
        forward_by_hand(q, k, v, out, lse, scale, tiles)
        return out, lse
    heads, group, n = q.shape[2], q.shape[2] // k.shape[2], _up(max_q, tiles.queries)
    out, lse = new_output(q, index[1] is not None), new_lse(q, index[1] is not None)
    tma = _by_engine(q, k, v)
    args = [
        *_operands(tma, (q, k, v), (tiles.queries, tiles.keys, tiles.keys)), out, lse, _bytes(index[0]),
        *index[1:], *_strides(q, k, v, out), lse.stride(0), lse.stride(1), k.shape[1],
        heads, group, max_q, max_k, n, scale * LOG2_E,
    ]  # fmt: skip
    flags = _flags(q, index, causal, tma, precision) | {"BM": tiles.queries, "BN": tiles.keys}
    _run(triton_forward.forward, _sequences(q, index) * heads * n, tiles, q.device, args, flags)
    return out, lse


def _facts(q: Tensor, k: Tensor, v: Tensor, index, causal: bool) -> by_hand.Call:
    (batch, queries, _, head_size), (_, keys, kv_heads, _) = q.shape, k.shape
    plain, repeat = all(x is None for x in index) and not causal, torch.are_deterministic_algorithms_enabled()
    capability, engine = capability_of(q.device), all(map(describable, (q, k, v)))
    return by_hand.Call(q.dtype, capability, head_size, batch, kv_heads, queries, keys, plain, repeat, engine)


class Steps(NamedTuple):
    """A plan for the kernels in Gluon on the device, from `plan.steps` and `plan.row_bounds`.

    `at_once`: heads of samples that share the processors at a time.
    """

    plan: Tensor
    bounds: Tensor
    at_once: int


def forward_by_hand(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, tiles: ByHand, steps: Steps | None = None
) -> None:
    """Fills output and log-sum-exp, see `gluon_forward.forward`.

    Args:
        q: `[B, L, H, D]`; by a plan maybe `[2 B, L, H, D]`, the rotated queries last.
    """
    from kernels.attention import gluon_forward, gluon_parts

    (samples, length, heads, d), width, items = q.shape, padded(q.shape[3]), k.shape[0] * q.shape[2]
    n = _up(length, tiles.queries)
    blocks = zip((q, k, v), (tiles.queries // 2, tiles.keys, tiles.keys), strict=True)
    plan, bounds, at_once = (lse, lse, 1) if steps is None else steps
    args = [
        *[gluon_parts.in_shared(rows_of_heads(x, rows, width)) for x, rows in blocks], out, lse, plan, bounds,
        *_strides(out), lse.stride(0), lse.stride(1), heads, heads // k.shape[2], length, k.shape[1], n, items,
        min(at_once, items), n * tiles.queries, scale * LOG2_E,
    ]  # fmt: skip
    flags = {
        "D": d, "BN": tiles.keys, "BD": width, "STAGES": tiles.stages, "PLANNED": steps is not None,
        "TURNS": samples // k.shape[0],
    }  # fmt: skip
    programs = min(n * items, _units(q)) if tiles.persistent else n * items
    _run(gluon_forward.forward, programs, tiles, q.device, args, flags)


def tangent(
    q: Tensor, k: Tensor, v: Tensor, tq: Tensor, tk: Tensor | None, tv: Tensor | None, index, max_q: int, max_k: int,
    causal: bool, scale: float, precision: str, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(out, tangent of out, lse, tangent of lse)`; `tk` and `tv` None: keys and values are constant."""
    tiles = choose_tiles(q).tangent if tiles is None else tiles
    heads, group, n = q.shape[2], q.shape[2] // k.shape[2], _up(max_q, tiles.queries)
    packed, moving = index[1] is not None, tk is not None or tv is not None
    if moving:
        tk, tv = (torch.zeros_like(x) if t is None else t for x, t in ((k, tk), (v, tv)))
    else:
        tk, tv = k, v
    out, tout, lse, tlse = new_output(q, packed), new_output(q, packed), new_lse(q, packed), new_lse(q, packed)
    if packed:
        tlse.zero_()
    everything = [q, k, v, _rows(tq), _rows(tk), _rows(tv)]
    tma = _by_engine(*everything)
    args = [
        *_operands(tma, everything, [tiles.queries, tiles.keys, tiles.keys] * 2), out, tout, lse, tlse,
        _bytes(index[0]), *index[1:], *_strides(*everything, out, tout), lse.stride(0),
        lse.stride(1), k.shape[1], heads, group, max_q, max_k, n, scale * LOG2_E,
    ]  # fmt: skip
    flags = _flags(q, index, causal, tma, precision) | {"BM": tiles.queries, "BN": tiles.keys, "KEYS": moving}
    _run(triton_tangent.tangent, _sequences(q, index) * heads * n, tiles, q.device, args, flags)
    return out, tout, lse, tlse


def _rows(x: Tensor) -> Tensor:
    """`x` itself where the kernels can read it, else a copy: gradients and tangents arrive in any layout."""
    return x if describable(x) else x.contiguous()


class _Call(NamedTuple):
    """What the kernels of one backward pass share."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    index: tuple[Tensor | None, ...]
    max_q: int
    max_k: int
    causal: bool
    scale: float
    precision: str
    tma: bool

    @property
    def packed(self) -> bool:
        return self.index[1] is not None

    @property
    def sequences(self) -> int:
        return _sequences(self.q, self.index)


def _streamed_rows(q: Tensor) -> int:
    """Rows per program of the kernels that only read and write."""
    return 64 if q.is_cuda else 32


def prepare(q, g, index, max_q: int, out, lse, dlse) -> tuple[Tensor, Tensor]:
    """`(base, delta)` of `triton_backward.prepare`, float32 `[sequences, H, max_q up to a multiple of 128]`."""
    heads, rows, length = q.shape[2], _streamed_rows(q), _up(max_q, 128) * 128
    base, delta = (
        torch.empty(_sequences(q, index), heads, length, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    args = [
        out, g, lse, dlse, base, delta, *index[1:3], *_strides(out, g), lse.stride(0), lse.stride(1),
        *([0, 0, 0] if dlse is None else dlse.stride()), heads, max_q, length // rows,
    ]  # fmt: skip
    flags = {
        "D": q.shape[3], "BM": rows, "BD": padded(q.shape[3]), "PACKED": index[1] is not None,
        "HAS_DLSE": dlse is not None,
    }  # fmt: skip
    _run(triton_backward.prepare, base.numel() // rows, Tiles(rows, 0, 4, 1), q.device, args, flags)
    return base, delta


def _units(q: Tensor) -> int:
    return multiprocessors(q.device) if q.is_cuda else INTERPRETER_UNITS


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, index, max_q: int,
    max_k: int, causal: bool, scale: float, precision: str, tiles: TileSet | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v.

    Bitwise repeatable, partial sums of several programs being added in order, but for the kernel in Gluon, which is not
    used when PyTorch is asked for deterministic algorithms.

    Args:
        tiles: default: the table's, with the kernel in Gluon where it serves the call. Others: with it if they have
            `fused` tiles, but for masked calls.
    """
    call = _facts(q, k, v, index, causal)
    in_gluon = by_hand.backward_fault(call) is None if tiles is None else call.plain
    tiles = choose_tiles(q) if tiles is None else tiles
    if not in_gluon:
        tiles = dataclasses.replace(tiles, fused=None)
    g = _rows(dout)
    c = _Call(q, k, v, g, index, max_q, max_k, causal, scale, precision, _by_engine(q, k, v, g))
    base, delta = prepare(q, g, index, max_q, out, lse, dlse)
    if tiles.fused is not None:
        dq, dk, dv = (new_output(x, False) for x in (q, k, v))
        backward_by_hand(q, k, v, g, base, delta, dq, dk, dv, scale, tiles.fused)
        return dq, dk, dv
    dk, dv = _backward_keys(c, base, delta, tiles.dkv)
    return _backward_queries(c, base, delta, tiles.dq), dk, dv


def backward_by_hand(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, base: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    scale: float, tiles: Fused, steps: Steps | None = None,
) -> None:  # fmt: skip
    """Fills the gradients, see `gluon_backward.backward`; q (and dq) as in `forward_by_hand`, base and delta from
    `prepare`.
    """
    from kernels.attention import gluon_backward, gluon_parts

    (batch, keys, kv_heads, d), width, group = k.shape, padded(k.shape[3]), q.shape[2] // k.shape[2]
    sums = torch.zeros(q.shape[0], *base.shape[1:], width, dtype=torch.float32, device=q.device)
    flat, n, items = sums.flatten(0, 2), _up(keys, tiles.keys), batch * kv_heads
    plan, bounds, at_once = (None, None, 1) if steps is None else steps
    rows = (tiles.queries, tiles.keys, tiles.keys, tiles.queries)
    args = [
        *[gluon_parts.in_shared(rows_of_heads(x, m, width)) for x, m in zip((q, k, v, g), rows, strict=True)], dk, dv,
        *[gluon_parts.line(x, tiles.queries) for x in (base, delta)],
        gluon_parts.in_shared(Descriptor(flat, list(flat.shape), [width, 1], [tiles.queries, width])),
        plan, None if steps is None else gluon_parts.line(bounds, 2 * tiles.queries), *_strides(dk, dv), kv_heads,
        group, q.shape[1], keys, n, items, min(at_once, items), base.shape[2], scale * LOG2_E,
    ]  # fmt: skip
    flags = {
        "D": d, "BM": tiles.queries, "BN": tiles.keys, "BD": width, "STAGES": tiles.stages, "TURN": tiles.turn,
        "PLANNED": steps is not None,
    }  # fmt: skip
    _run(gluon_backward.backward, n * items, tiles, q.device, args, flags)
    finish_queries(dq, sums, scale)


def finish_queries(dq: Tensor, sums: Tensor, scale: float) -> None:
    """Fills the gradient of q from `sums [B, H, padded Lq, padded D]` of the parts that key tiles added to it."""
    heads, padded_length, width = sums.shape[1:]
    rows = _streamed_rows(dq)
    tiles = padded_length // rows
    args = [sums, dq, *_strides(dq), heads, dq.shape[1], tiles, scale * LOG2_E]
    flags = {"D": dq.shape[3], "BM": rows, "BD": width}
    _run(triton_backward.finish_queries, sums.shape[0] * heads * tiles, Tiles(rows, 0, 4, 1), dq.device, args, flags)


def _backward_keys(c: _Call, base, delta, tiles: Tiles) -> tuple[Tensor, Tensor]:
    q, k, v, g = c.q, c.k, c.v, c.g
    kv_heads, group, n = k.shape[2], q.shape[2] // k.shape[2], _up(c.max_k, tiles.keys)
    programs = c.sequences * kv_heads * n
    parts = splits(programs, _up(c.max_q, tiles.queries), _units(q))
    dk, dv = new_output(k, c.packed), new_output(v, c.packed)
    to = dk, dv
    if parts > 1:
        new = torch.zeros if c.packed else torch.empty
        to = [new(parts, *x.shape, dtype=torch.float32, device=x.device) for x in to]
    one = to if parts == 1 else [x[0] for x in to]
    args = [
        *_operands(c.tma, (q, k, v, g), (tiles.queries, tiles.keys, tiles.keys, tiles.queries)), *to, base, delta,
        _bytes(c.index[0]), *c.index[1:], *_strides(q, k, v, g, *one), k.shape[1],
        *[0 if parts == 1 else x.stride(0) for x in to], kv_heads, group, c.max_q, c.max_k, n, parts,
        base.shape[2], c.scale * LOG2_E,
    ]  # fmt: skip
    flags = _flags(q, c.index, c.causal, c.tma, c.precision) | {"BM": tiles.queries, "BN": tiles.keys}
    _run(triton_backward.backward_keys, programs * parts, tiles, q.device, args, flags)
    if parts > 1:
        dk.copy_(to[0].sum(0))
        dv.copy_(to[1].sum(0))
    return dk, dv


def _backward_queries(c: _Call, base, delta, tiles: Tiles) -> Tensor:
    q, k, v, g = c.q, c.k, c.v, c.g
    heads, group, n = q.shape[2], q.shape[2] // k.shape[2], _up(c.max_q, tiles.queries)
    dq = new_output(q, c.packed)
    args = [
        *_operands(c.tma, (q, k, v, g), (tiles.queries, tiles.keys, tiles.keys, tiles.queries)), dq, base, delta,
        _bytes(c.index[0]), *c.index[1:], *_strides(q, k, v, g, dq), k.shape[1],
        heads, group, c.max_q, c.max_k, n, base.shape[2], c.scale * LOG2_E,
    ]  # fmt: skip
    flags = _flags(q, c.index, c.causal, c.tma, c.precision) | {"BM": tiles.queries, "BN": tiles.keys}
    _run(triton_backward.backward_queries, c.sequences * heads * n, tiles, q.device, args, flags)
    return dq
