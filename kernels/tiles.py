"""What the Triton kernels of all families have in common: tile sizes, head sizes, dtypes. Needs no Triton."""

import dataclasses

import torch

Capability = tuple[int, int]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """`queries x keys` scores per step, `warps` per program, `stages` of the copies that run ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def padded(head_size: int) -> int:
    """The power of two, at least 16, that a kernel computes with for a head size."""
    return max(16, power_of_two(head_size))
