"""Tiles of the QAT attention kernels by head size and GPU: data, no tuner."""

import dataclasses

from kernels.tiles import Capability, Tiles, padded

HEAD_SIZES = tuple(range(16, 257, 16))
MEASURED: tuple[int, ...] = (64, 128)  # head sizes whose times are in benchmarks/results


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of the forward kernel, the gradient of q, and the gradients of k and v. All take 64 keys at a time.

    The number 64 belongs to the definition (P is quantised relative to the running maximum of 64 keys at a time).
    """

    forward: Tiles
    dq: Tiles
    dkv: Tiles


# Two float32 accumulators of [64, 128] take half of the registers of four warps: two programs share a multiprocessor,
# and one multiplies while the other quantises. Head size 256 needs eight warps for that.
HOPPER = {
    64: Plan(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Plan(Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
    256: Plan(Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 1)),
}
# sm_120 has 99 KB of shared memory. Unmeasured.
SMALL = {
    64: Plan(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 1)),
    128: Plan(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 1), Tiles(32, 64, 4, 1)),
    256: Plan(Tiles(32, 64, 8, 1), Tiles(32, 64, 8, 1), Tiles(16, 64, 8, 1)),
}
INTERPRETER = Plan(Tiles(32, 64, 1, 1), Tiles(64, 64, 1, 1), Tiles(32, 64, 1, 1))

# What a sweep at head size 128 on sm_90 should try beside the table: each kernel by itself.
ALTERNATIVES = {
    "forward": (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 4)),
    "dq": (Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 4)),
    "dkv": (Tiles(64, 64, 4, 3),),
}


def plan(head_size: int, capability: Capability | None) -> Plan:
    """The tiles for a head size of 16 to 256; `capability` None is the interpreter on a CPU.

    sm_100 takes Hopper's tiles and sm_120 small ones, both unmeasured.
    """
    if capability is None:
        return INTERPRETER
    return (HOPPER if capability[0] in (9, 10) else SMALL)[max(64, padded(head_size))]
