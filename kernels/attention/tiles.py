"""Which tile a Triton attention kernel uses, by head size, element size and GPU: a table, no tuner."""

import dataclasses
import functools

import torch

from core.errors import UserError
from kernels.tiles import Capability, Tiles, padded

HEAD_SIZES = (16, 256)


@dataclasses.dataclass(frozen=True)
class ByHand(Tiles):
    """Tiles of the forward kernel in Gluon; `persistent`: one program per processor, which takes tile after tile."""

    persistent: bool = True


@dataclasses.dataclass(frozen=True)
class Fused(Tiles):
    """Tiles of the kernel in Gluon that makes all three gradients: 128 keys and 8 warps.

    `turn`: tiles of queries by which neighbouring programs begin apart.
    """

    turn: int = 0


@dataclasses.dataclass(frozen=True)
class TileSet:
    """The tiles of the kernels: forward, gradients of k and v, gradient of q, output with its tangent.

    `forward_by_hand`: tiles of the forward kernel in Gluon, 128 queries by 4 warps (which it triples). `fused`: tiles
    of the kernel that gives all three gradients, with five products instead of seven, but not the same bits every time;
    used from `fused_from` queries and keys on. None: where it was not found to be faster. `by_hand.py` says when either
    serves a call.
    """

    forward: Tiles
    dkv: Tiles
    dq: Tiles
    tangent: Tiles
    forward_by_hand: ByHand | None = None
    fused: Fused | None = None
    fused_from: int = 2048


# Shared memory holds `stages` tiles of the two operands that run by and the two that stay; registers hold the float32
# accumulators (rows * head size / threads each) and the scores. 16-bit, by padded head size; order: see TileSet.
HOPPER = {
    64: TileSet(Tiles(128, 128, 8, 3), Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
    128: TileSet(
        Tiles(128, 64, 4, 2), Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), ByHand(128, 128, 4, 2),
        Fused(64, 128, 8, 3),
    ),
    256: TileSet(Tiles(128, 64, 8, 2), Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1)),
}
# 99 KB of shared memory and plain loads: consumer cards, everything before Hopper, and what is untested.
SMALL = {
    64: TileSet(Tiles(128, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    128: TileSet(Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
    256: TileSet(Tiles(64, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
}
# float32 multiplies on the ordinary units, with operands in registers: small tiles, many threads.
SINGLE = {
    64: TileSet(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    128: TileSet(Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 1), Tiles(32, 16, 8, 1), Tiles(16, 32, 8, 1)),
    256: TileSet(Tiles(32, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
# Alternatives worth a measurement on a Hopper GPU, those in Gluon by head size; `benchmarks/kernels.py --only attention
# --sweep` runs them.
SWEEP_FORWARD = (Tiles(128, 64, 4, 2), Tiles(128, 128, 8, 3), Tiles(256, 64, 8, 3), Tiles(128, 64, 4, 3))
SWEEP_BY_HAND = {
    64: (ByHand(128, 128, 4, 2), ByHand(128, 128, 4, 3), ByHand(128, 128, 4, 4), ByHand(128, 128, 4, 4, False)),
    128: (ByHand(128, 128, 4, 2), ByHand(128, 128, 4, 2, False)),
}
SWEEP_DKV = (Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 64, 8, 3), Tiles(32, 128, 8, 4))
SWEEP_DQ = (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 4), Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2), Tiles(128, 32, 8, 4))
SWEEP_FUSED = {
    64: (Fused(64, 128, 8, 2), Fused(64, 128, 8, 3), Fused(64, 128, 8, 4), Fused(64, 128, 8, 3, turn=1)),
    128: (Fused(64, 128, 8, 3), Fused(64, 128, 8, 3, turn=1), Fused(64, 128, 8, 3, turn=3)),
}
# The interpreter: several tiles on tiny shapes, unlike in both directions so that a swap would show.
INTERPRETER = TileSet(Tiles(32, 16, 1, 1), Tiles(16, 32, 1, 1), Tiles(32, 16, 1, 1), Tiles(16, 32, 1, 1))


def tiles_for(head_size: int, dtype: torch.dtype, capability: Capability | None) -> TileSet:
    """The tiles for a head size of 16 to 256; `capability` None is the interpreter on a CPU.

    Hopper's tiles need its shared memory, registers and products: everything else, sm_100 and sm_120 included, takes
    small ones, which were compiled for those but never run there.
    """
    if not HEAD_SIZES[0] <= head_size <= HEAD_SIZES[1]:
        raise UserError(f"attention: head size {head_size} is outside of {HEAD_SIZES[0]} to {HEAD_SIZES[1]}")
    if capability is None:
        return INTERPRETER
    table = SINGLE if dtype == torch.float32 else HOPPER if capability[0] == 9 else SMALL
    return table[max(64, padded(head_size))]


@functools.lru_cache(maxsize=4096)
def splits(programs: int, steps: int, units: int) -> int:
    """Into how many parts the queries of a program are split, so that few key tiles still fill `units` processors.

    Of the counts whose last round of programs is at least 95 % full, or failing that the fullest, the smallest; no
    part is shorter than 4 of the `steps`. A function of the shapes only, so the order of every sum is fixed.
    """
    if programs >= 4 * units:
        return 1
    filled = lambda n: programs * n / (-(-programs * n // units) * units)  # noqa: E731
    counts = range(1, max(1, min(64, steps // 4)) + 1)
    best = max(min(filled(n), 0.95) for n in counts)
    return next(n for n in counts if filled(n) >= best)
