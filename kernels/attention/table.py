"""Which attention backends `auto` tries first, by device and shape: a table, filled from measurements.

`benchmarks/kernels.py --only attention` prints the figures behind the rows of capability 9.0 (an H200). The rows of
10.0 follow public measurements of others and the rest PyTorch's own choice: neither was run by us.
"""

import dataclasses

ANY = (0, 1 << 62)


@dataclasses.dataclass(frozen=True)
class Row:
    """Names to try, in order, for calls of one kind; both ends of a range count."""

    capability: tuple[int, int]
    names: tuple[str, ...]
    kind: str = "any"  # "self": as many queries as keys; "cross": another number
    passes: str = "any"  # "forward": no gradient is wanted; "backward": one is
    head_dim: tuple[int, int] = ANY
    length: tuple[int, int] = ANY  # of the queries
    by_hand: bool = False  # only for calls whose passes all run in our kernels in Gluon (`by_hand.py`)


# The first row that fits counts. "sdpa" is cuDNN where it can serve, then flash, efficient and math. Measured for
# self attention at 4290 and 32760: our forward kernel in Gluon is 1.10 and 1.13 times as fast as cuDNN's, the backward
# one 0.93 times.
TABLE = (
    Row((9, 0), ("triton", "sdpa"), "self", "forward", head_dim=(128, 128), length=(2048, ANY[1]), by_hand=True),
    Row((9, 0), ("triton_cudnn", "sdpa"), "self", "backward", head_dim=(128, 128), length=(2048, ANY[1]), by_hand=True),
    Row((9, 0), ("triton", "sdpa"), kind="cross", passes="backward", head_dim=(128, 128), length=(8192, ANY[1])),
    Row((9, 0), ("sdpa",)),
    Row((10, 0), ("fa4", "sdpa"), kind="cross", head_dim=(1, 128)),
    Row((10, 0), ("sdpa",)),
    Row((12, 0), ("sdpa",)),
)
GPU_DEFAULT = ("sdpa", "triton", "reference")
OTHER_DEFAULT = ("sdpa", "reference")


def _fits(row: Row, capability, kind: str, passes: str, head_dim: int, length: int, by_hand: bool) -> bool:
    return (
        row.capability == capability
        and row.kind in ("any", kind)
        and row.passes in ("any", passes)
        and row.head_dim[0] <= head_dim <= row.head_dim[1]
        and row.length[0] <= length <= row.length[1]
        and (by_hand or not row.by_hand)
    )


def preferred(
    capability: tuple[int, int] | None, kind: str, passes: str, head_dim: int, length: int, table=TABLE,
    by_hand: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """Backend names in the order that `auto` tries them; `capability` None: not a CUDA device."""
    if capability is None:
        return OTHER_DEFAULT
    first = next((r.names for r in table if _fits(r, capability, kind, passes, head_dim, length, by_hand)), ())
    return (*first, *(name for name in GPU_DEFAULT if name not in first))
