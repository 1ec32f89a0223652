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


# The first row that fits counts. "sdpa" is cuDNN where it can serve, then flash, efficient and math.
TABLE = (
    Row((9, 0), ("triton", "sdpa"), kind="cross", passes="backward", head_dim=(128, 128), length=(8192, ANY[1])),
    Row((9, 0), ("sdpa",)),
    Row((10, 0), ("fa4", "sdpa"), kind="cross", head_dim=(1, 128)),
    Row((10, 0), ("sdpa",)),
    Row((12, 0), ("sdpa",)),
)
GPU_DEFAULT = ("sdpa", "triton", "reference")
OTHER_DEFAULT = ("sdpa", "reference")


def _fits(row: Row, capability, kind: str, passes: str, head_dim: int, length: int) -> bool:
    return (
        row.capability == capability
        and row.kind in ("any", kind)
        and row.passes in ("any", passes)
        and row.head_dim[0] <= head_dim <= row.head_dim[1]
        and row.length[0] <= length <= row.length[1]
    )


def preferred(
    capability: tuple[int, int] | None, kind: str, passes: str, head_dim: int, length: int, table=TABLE
) -> tuple[str, ...]:
    """Backend names in the order that `auto` tries them; `capability` None: not a CUDA device."""
    if capability is None:
        return OTHER_DEFAULT
    first = next((r.names for r in table if _fits(r, capability, kind, passes, head_dim, length)), ())
    return (*first, *(name for name in GPU_DEFAULT if name not in first))
