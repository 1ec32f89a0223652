"""Which tiles an attention kernel visits: plain data, computed from a mask before any kernel runs.

A mask here is a set of key intervals per query row, equal for all rows of a class (the tokens of a frame, or of a
block). `BlockCausal` and `BlockMask` describe masks; `intervals` turns them into numbers, `tile_plan` into the tiles to
visit. One kernel serves every mask, so a new kind of sparsity is a new description and no new kernel.
"""

import dataclasses

import numpy as np

from core.errors import UserError, raise_faults


@dataclasses.dataclass(frozen=True)
class BlockCausal:
    """Block-causal attention over frames, with attention sinks and a rolling window. Hashable: a key for caches.

    A frame f of a block that ends at frame E = (f // block + 1) * block sees the frames k < E with k >= E - rolling or
    k < sink_size, where rolling = local_attn_size - sink_size. With `teacher_forcing` the sequence is [clean | noisy],
    `frames` each: clean frames see clean ones as above; a noisy frame sees its own noisy block and the clean frames
    k < E - block with k >= E - rolling or k < sink_size (so its own block counts towards the window).

    Args:
        frames: latent frames (of one half under teacher forcing).
        tokens_per_frame: tokens of a frame.
        block: frames per causal block; the last block may be shorter.
        local_attn_size: frames seen in all, sinks plus rolling window; -1 for all past frames.
        sink_size: leading frames that stay visible.
        relativistic: sink keys take the position just before the window: see `delta`. Changes nothing while all past
            frames fit into the window, or without sinks.

    Raises:
        UserError: every number that does not fit, at once.
    """

    frames: int
    tokens_per_frame: int
    block: int
    local_attn_size: int = -1
    sink_size: int = 0
    teacher_forcing: bool = False
    relativistic: bool = False

    def __post_init__(self):
        raise_faults(f"block-causal mask: the geometry does not fit: {self}", _faults(self))

    @property
    def q_len(self) -> int:
        return self.frames * self.tokens_per_frame * (2 if self.teacher_forcing else 1)

    k_len = q_len


def _faults(mask: BlockCausal) -> list[str]:
    sizes = {"frames": mask.frames, "tokens_per_frame": mask.tokens_per_frame, "block": mask.block}
    faults = [f"{name} is {size}, at least 1 is needed" for name, size in sizes.items() if size < 1]
    window, sink = mask.local_attn_size, mask.sink_size
    if sink < 0:
        faults.append(f"sink_size is {sink}, at least 0 is needed")
    if window < 1 and window != -1:
        faults.append(f"local_attn_size is {window}; it is -1 (all past frames) or at least block = {mask.block}")
    elif window != -1 and sink >= window:
        faults.append(
            f"sink_size {sink} leaves nothing of local_attn_size {window}, which counts sinks and the rolling window; "
            f"the smallest local_attn_size for it is sink_size + block = {sink + mask.block}"
        )
    elif window != -1 and sink + mask.block > window:
        faults.append(
            f"the rolling window, local_attn_size {window} - sink_size {sink} = {window - sink} frames, is smaller "
            f"than a block of {mask.block}; the smallest local_attn_size is {sink + mask.block}"
        )
    return faults


def delta(mask: BlockCausal) -> np.ndarray:
    """Frames `[frames]` by which the sink keys are moved forward for the queries of each frame: max(0, E - window).

    Zeros where the mask is not relativistic, has no sinks or no window.
    """
    if not mask.relativistic or mask.sink_size == 0 or mask.local_attn_size == -1:
        return np.zeros(mask.frames, np.int64)
    ends = (np.arange(mask.frames) // mask.block + 1) * mask.block
    return np.maximum(ends - mask.local_attn_size, 0)


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A boolean mask of blocks; build it with `block_mask`. Hashable: a key for caches."""

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    packed: bytes


def block_mask(visible: np.ndarray, block_q: int, block_k: int, q_len: int, k_len: int) -> BlockMask:
    """The mask in which query i sees key j where `visible[i // block_q, j // block_k]`.

    Args:
        visible: bool `[ceil(q_len / block_q), ceil(k_len / block_k)]`.

    Raises:
        UserError: another shape or dtype, or sizes below 1.
    """
    visible = np.asarray(visible)
    sizes = {"block_q": block_q, "block_k": block_k, "q_len": q_len, "k_len": k_len}
    raise_faults("block mask", [f"{n} is {x}, at least 1 is needed" for n, x in sizes.items() if x < 1])
    wanted = (-(-q_len // block_q), -(-k_len // block_k))
    if visible.dtype != np.bool_ or visible.shape != wanted:
        raise UserError(
            f"block mask: {q_len} queries in blocks of {block_q} and {k_len} keys in blocks of {block_k} need bool "
            f"{list(wanted)}, got {visible.dtype} {list(visible.shape)}"
        )
    return BlockMask(q_len, k_len, block_q, block_k, np.packbits(visible).tobytes())


Mask = BlockCausal | BlockMask


@dataclasses.dataclass(frozen=True, eq=False)
class Intervals:
    """The visible keys of every query row: row r sees `bounds[s, r // class_rows, 0] <= k < bounds[s, ..., 1]`, any s.

    `bounds` is int32 `[slots, classes, 2]`; the intervals of a row are disjoint, empty ones have equal ends. Slots in
    `rotated` are scored with the rotated queries.
    """

    q_len: int
    k_len: int
    class_rows: int
    bounds: np.ndarray
    rotated: tuple[bool, ...]


def intervals(mask: Mask) -> Intervals:
    """The key intervals of a mask."""
    return _causal_intervals(mask) if isinstance(mask, BlockCausal) else _block_intervals(mask)


def _causal_intervals(mask: BlockCausal) -> Intervals:
    frame = np.arange(mask.frames)
    ends = (frame // mask.block + 1) * mask.block
    # Where the visible past ends: with the own block, and for noisy rows before it.
    past = np.concatenate([ends, ends - mask.block]) if mask.teacher_forcing else ends
    past = np.minimum(past, mask.frames)
    twice = np.tile(ends, len(past) // mask.frames)
    rolling = mask.local_attn_size - mask.sink_size
    sink = 0 if mask.local_attn_size == -1 else mask.sink_size
    start = np.zeros_like(past) if mask.local_attn_size == -1 else np.maximum(twice - rolling, sink)
    slots = [np.stack([np.minimum(start, past), past], -1)]
    if sink:
        slots.insert(0, np.stack([np.zeros_like(past), np.minimum(sink, past)], -1))
    if mask.teacher_forcing:
        noisy = mask.frames + np.stack([ends - mask.block, np.minimum(ends, mask.frames)], -1)
        slots.append(np.concatenate([np.zeros_like(noisy), noisy]))
    bounds = np.stack(slots) * mask.tokens_per_frame
    rotated = tuple(s == 0 and bool(delta(mask).any()) for s in range(len(slots)))
    return Intervals(mask.q_len, mask.k_len, mask.tokens_per_frame, bounds.astype(np.int32), rotated)


def _block_intervals(mask: BlockMask) -> Intervals:
    rows, cols = -(-mask.q_len // mask.block_q), -(-mask.k_len // mask.block_k)
    visible = np.unpackbits(np.frombuffer(mask.packed, np.uint8), count=rows * cols).reshape(rows, cols).astype(bool)
    row, first, count = _runs(visible)
    # The i-th interval of a row goes into slot i.
    slot = np.arange(len(row)) - np.searchsorted(row, row)
    bounds = np.zeros((max(1, slot.max(initial=-1) + 1), rows, 2), np.int32)
    bounds[slot, row, 0] = first * mask.block_k
    bounds[slot, row, 1] = np.minimum((first + count) * mask.block_k, mask.k_len)
    return Intervals(mask.q_len, mask.k_len, mask.block_q, bounds, (False,) * len(bounds))


def _runs(marked: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, first, count) of the stretches of True in a bool `[rows, columns]`, in order."""
    edges = np.diff(np.pad(marked, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, first = np.nonzero(edges == 1)
    return row, first, np.nonzero(edges == -1)[1] - first


@dataclasses.dataclass(frozen=True, eq=False)
class TilePlan:
    """The runs of tiles that each tile of a kernel's grid visits; all int32.

    `runs [n, 3]` holds (first tile, number of tiles, slot), slot -1 where the run is full: every pair is visible.
    Those of tile t lie in four groups: plain full, plain partial, rotated full, rotated partial; group g is
    `runs[index[t, g] : index[t, g + 1]]`. `order` lists the tiles with most work first.
    A pair of tiles is visited once if it is full, else once per slot: there the slot's interval is the mask.
    """

    order: np.ndarray
    index: np.ndarray
    runs: np.ndarray


def _per_tile(reduce: np.ufunc, per_class: np.ndarray, spans: Intervals, tile_q: int) -> np.ndarray:
    starts = np.arange(0, spans.q_len, tile_q)
    first = starts // spans.class_rows
    last = (np.minimum(starts + tile_q, spans.q_len) - 1) // spans.class_rows
    # reduceat takes [first, last + 1) pairs when every second result is dropped; the pad makes the last end legal.
    padded = np.concatenate([per_class, per_class[:1]])
    return reduce.reduceat(padded, np.stack([first, last + 1], 1).reshape(-1), axis=0)[::2]


def visits(spans: Intervals, tile_q: int, tile_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is to be visited: bool plain full and rotated full `[query tiles, key tiles]`, partial `[slots, ...]`.

    Keys beyond the last one are never visible, so the last key tile is partial unless it is filled.
    """
    seen = [np.zeros((spans.bounds.shape[1], -(-spans.k_len // tile_k)), np.int32) for _ in range(2)]
    tiles = np.arange(seen[0].shape[1]) * tile_k
    touched = []
    for (lo, hi), turned in zip(spans.bounds.transpose(0, 2, 1), spans.rotated, strict=True):
        part = np.minimum(hi[:, None], tiles + tile_k) - np.maximum(lo[:, None], tiles)
        part = np.maximum(part, 0)
        seen[turned] += part
        touched.append(_per_tile(np.maximum, part, spans, tile_q) > 0)
    plain, rotated = (_per_tile(np.minimum, x, spans, tile_q) == tile_k for x in seen)
    return plain, rotated, np.stack(touched) & ~plain & ~rotated


def tile_plan(spans: Intervals, tile_q: int, tile_k: int, *, transposed: bool = False) -> TilePlan:
    """The plan of a kernel whose grid runs over query tiles, or with `transposed` over key tiles.

    Args:
        tile_q, tile_k: rows of a query tile and of a key tile.
    """
    plain, rotated, partial = visits(spans, tile_q, tile_k)
    if transposed:
        plain, rotated, partial = plain.T, rotated.T, partial.transpose(0, 2, 1)
    groups = [(plain, 0, -1), (rotated, 2, -1)]
    groups += [(p, 3 if turned else 1, s) for s, (p, turned) in enumerate(zip(partial, spans.rotated, strict=True))]
    parts = [(*_runs(marked), group, slot) for marked, group, slot in groups]
    tile, first, count = (np.concatenate([p[i] for p in parts]) for i in range(3))
    group, slot = (np.concatenate([np.full(len(p[0]), p[i]) for p in parts]) for i in (3, 4))
    order = np.lexsort((first, slot, group, tile))
    index = np.searchsorted((tile * 4 + group)[order], np.arange(len(plain))[:, None] * 4 + np.arange(5))
    work = plain.sum(1) + rotated.sum(1) + partial.sum((0, 2))
    longest_first = np.argsort(-work, kind="stable")
    runs = np.stack([first, count, slot], 1)[order]
    return TilePlan(*(np.ascontiguousarray(x, np.int32) for x in (longest_first, index, runs)))


def packed(plan: TilePlan) -> np.ndarray:
    """A plan as one int32 array: order `[n]`, index `[n, 5]`, runs `[..., 3]`, one after another."""
    return np.concatenate([plan.order, plan.index.reshape(-1), plan.runs.reshape(-1)])


MAX_SLOTS = 126  # that a step has room for


def steps(plan: TilePlan, slots: int) -> np.ndarray:
    """A plan as one list of steps per tile, for the kernels in Gluon, all in one int32 array.

    After another: order `[n]`, where the steps of each tile begin, and the end `[n + 1]`, how many of them, at the
    front, are partial `[n]`, steps. A step is `tile << 8 | intervals << 1 | rotated` with `intervals` a row of
    `row_bounds`. A tile that sees nothing has one partial step, which shows nothing.
    """
    n, (first, count, slot) = len(plan.order), plan.runs.T
    groups = np.diff(plan.index, axis=1)
    tile, group = (np.repeat(x, groups.reshape(-1)) for x in (np.arange(n).repeat(4), np.tile(np.arange(4), n)))
    each = np.repeat(np.arange(len(count)), count)
    other = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count) + first[each]
    found = np.stack([tile[each], group[each] % 2 == 0, other << 8 | (slot[each] + 1) << 1 | group[each] // 2])
    empty = np.setdiff1d(np.arange(n), tile)
    nothing = np.stack([empty, np.zeros_like(empty), np.full_like(empty, (slots + 1) << 1)])
    tile, full, step = (found := np.concatenate([found, nothing], 1))[:, np.lexsort((found[1], found[0]))]
    begin = np.searchsorted(tile, np.arange(n + 1))
    partial = np.bincount(tile[full == 0], minlength=n)
    return np.concatenate([plan.order, begin, partial, step]).astype(np.int32)


def row_bounds(spans: Intervals) -> np.ndarray:
    """The keys that each row sees by each of the intervals that steps name, as int32 `[slots + 2, blocks, 2, 64]`.

    All keys, those of each slot, none; per block of 64 rows the low ends, then the high ones. The rows are filled up to
    a multiple of 128.
    """
    rows = np.minimum(np.arange(-(-spans.q_len // 128) * 128), spans.q_len - 1)
    everything = np.tile(np.array([0, spans.k_len]), (1, len(rows), 1))
    found = np.concatenate([everything, spans.bounds[:, rows // spans.class_rows], np.zeros_like(everything)])
    return np.ascontiguousarray(found.reshape(len(found), -1, 64, 2).swapaxes(2, 3), np.int32)


def visible_pairs(spans: Intervals) -> int:
    """Pairs (query, key) that are visible: attention costs 4 * head_dim FLOPs each per head, forward."""
    starts = np.arange(spans.bounds.shape[1]) * spans.class_rows
    rows = np.minimum(spans.class_rows, spans.q_len - starts)
    return int((rows * (spans.bounds[..., 1] - spans.bounds[..., 0]).astype(np.int64).sum(0)).sum())
