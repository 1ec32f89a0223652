"""How the norm kernels are launched: tile, warps and programs per multiprocessor, in one table."""

import dataclasses
import functools

import torch

from kernels.dispatch import multiprocessors
from kernels.tiles import power_of_two


@dataclasses.dataclass(frozen=True)
class Launch:
    """`rows` tokens per step of a program, its `warps`, `per_sm` programs per multiprocessor, pipeline stages."""

    rows: int
    warps: int
    per_sm: int
    stages: int = 1

    def __str__(self) -> str:
        return f"{self.rows} rows w{self.warps} x{self.per_sm} s{self.stages}"


# Keyed by kernel and the largest inner width they serve. Width 4096 was measured on an H200, the others follow
# from the compiler's figures: no spilled registers up to width 4096, about 30 to 60 KB of loads in flight per
# multiprocessor, and few programs in the backward passes, since each writes partial sums. Every architecture uses
# them. Counts of programs that end together (65 tokens to a multiprocessor: 5 programs of 13) were slower, not faster.
LAUNCHES: dict[str, tuple[tuple[int, Launch], ...]] = {
    "norm_forward": (
        (256, Launch(8, 4, 8, 2)),
        (1024, Launch(2, 4, 8, 2)),
        (2048, Launch(1, 4, 8, 2)),
        (4096, Launch(1, 8, 4, 3)),
        (8192, Launch(1, 16, 2, 2)),
        (16384, Launch(1, 32, 1, 2)),
    ),
    "norm_backward": (
        (256, Launch(8, 8, 2, 2)),
        (1024, Launch(2, 8, 2, 2)),
        (2048, Launch(1, 8, 2, 3)),
        (4096, Launch(1, 8, 1, 4)),
        (8192, Launch(1, 16, 1, 2)),
        (16384, Launch(1, 32, 1, 1)),
    ),
    "rope_forward": (
        (256, Launch(4, 4, 4, 2)),
        (1024, Launch(2, 4, 4, 2)),
        (2048, Launch(1, 4, 4, 3)),
        (4096, Launch(1, 8, 2, 3)),
        (8192, Launch(1, 16, 1, 3)),
        (16384, Launch(1, 16, 1, 2)),
    ),
    "rope_backward": (
        (256, Launch(4, 4, 4, 2)),
        (1024, Launch(1, 4, 4, 2)),
        (2048, Launch(1, 8, 2, 3)),
        (4096, Launch(1, 8, 1, 3)),
        (8192, Launch(1, 16, 1, 2)),
        (16384, Launch(1, 32, 1, 1)),
    ),
}
MAX_WIDTH = 16384
MAX_JOINT_WIDTH = 4096  # above it q and k are launched apart: sums of both would spill registers
SHARED_BYTES = 96 * 1024  # what a pipeline may take of a multiprocessor's shared memory, on any architecture

# What a sweep at width 4096 should try beside the table.
ALTERNATIVES: dict[str, tuple[Launch, ...]] = {
    kernel: tuple(Launch(*numbers) for numbers in choices)
    for kernel, choices in {
        "norm_forward": (
            (1, 4, 8, 1), (1, 8, 8, 1), (1, 8, 5, 3), (1, 4, 5, 3), (1, 4, 10, 2), (1, 8, 4, 2), (1, 8, 6, 2),
            (1, 16, 2, 3), (2, 8, 4, 2), (1, 4, 16, 1), (1, 8, 3, 4),
        ),
        "norm_backward": (
            (1, 8, 2, 3), (1, 16, 1, 4), (2, 16, 1, 3), (1, 8, 1, 5),
        ),
        "rope_forward": (
            (1, 8, 2, 2), (1, 16, 1, 3), (2, 16, 1, 3), (1, 4, 4, 2), (1, 8, 1, 4),
        ),
        "rope_backward": (
            (1, 8, 1, 2), (1, 16, 1, 3), (1, 8, 1, 4),
        ),
    }.items()
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def launch_of(kernel: str, width: int, column_bytes: int) -> Launch:
    """The launch of `kernel` for rows of `width` elements, with fewer stages where shared memory asks for it.

    Args:
        column_bytes: bytes that one token reads per column, of all tensors that have rows.
    """
    launch = next(launch for limit, launch in LAUNCHES[kernel] if width <= limit)
    stage = launch.rows * power_of_two(width) * column_bytes
    return dataclasses.replace(launch, stages=max(1, min(launch.stages, 1 + SHARED_BYTES // stage)))


def programs_per_sample(launch: Launch, device: torch.device, samples: int, tokens: int) -> int:
    """Programs that share one sample's tokens, so that all samples fill the device `per_sm` times; at least 1."""
    wanted = multiprocessors(device) * launch.per_sm // max(1, samples)
    return max(1, min(wanted, -(-tokens // launch.rows)))
