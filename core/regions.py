"""Regions of a tensor: boxes that different processes hold or ask for, and whether boxes make up the whole.

A region is one slice with start and stop per dimension, in the frame of the whole tensor; that of a scalar is `()`.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence

from core.errors import UserError

Region = tuple[slice, ...]


def whole(shape: Sequence[int]) -> Region:
    """The region that is all of a tensor of this shape."""
    return tuple(slice(0, n) for n in shape)


def extent(region: Region) -> tuple[int, ...]:
    """Shape of what lies in a region."""
    return tuple(s.stop - s.start for s in region)


def at(start: Sequence[int], shape: Sequence[int]) -> Region:
    """The region of this shape that begins at `start`."""
    return tuple(slice(first, first + n) for first, n in zip(start, shape, strict=True))


def inside(region: Sequence[slice], shape: Sequence[int]) -> Region:
    """`region` with open ends filled in.

    Raises UserError for another number of dimensions, for steps, and for what lies outside a tensor of this shape.
    """
    filled = tuple(
        slice(0 if s.start is None else s.start, n if s.stop is None else s.stop, s.step)
        for s, n in zip(region, shape, strict=False)
    )
    fits = len(region) == len(shape) and all(
        s.step in (None, 1) and 0 <= s.start <= s.stop <= n for s, n in zip(filled, shape, strict=True)
    )
    if not fits:
        raise UserError(f"region {text(region)} does not exist in a leaf of shape {list(shape)}")
    return tuple(slice(s.start, s.stop) for s in filled)


def overlap(a: Region, b: Region) -> Region | None:
    """What lies in both; None when nothing does."""
    common = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return common if all(s.start < s.stop for s in common) else None


def relative(region: Region, to: Region) -> Region:
    """`region` in the frame of the region `to` that it lies in."""
    return tuple(slice(s.start - t.start, s.stop - t.start) for s, t in zip(region, to, strict=True))


def text(region: Sequence[slice]) -> str:
    """A region for messages: `[0:2, 4:8]`."""
    end = lambda n: "" if n is None else str(n)  # noqa: E731
    ends = (f"{end(s.start)}:{end(s.stop)}" + ("" if s.step is None else f":{s.step}") for s in region)
    return "[" + ", ".join(ends) + "]"


def overlaps(regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Pairs `(i, j)`, i < j, of regions that have elements in common.

    A sweep along the dimension with the most different starts, so that the shards of many processes are compared with
    their neighbours only.
    """
    dims = range(len(regions[0])) if regions else range(0)
    along = max(dims, key=lambda d: len({r[d].start for r in regions}), default=None)
    ends = (lambda r: (0, 1)) if along is None else (lambda r: (r[along].start, r[along].stop))
    active: list[tuple[int, int]] = []  # (stop, index), ascending
    for i in sorted(range(len(regions)), key=lambda i: ends(regions[i])):
        start, stop = ends(regions[i])
        del active[: bisect_right(active, (start, len(regions)))]
        for _, j in active:
            if overlap(regions[i], regions[j]) is not None:
                yield min(i, j), max(i, j)
        insort(active, (stop, i))


def uncovered(shape: Sequence[int], regions: Sequence[Region]) -> int:
    """Elements of a tensor of this shape that lie in no region. The regions lie inside it and do not overlap."""
    return math.prod(shape) - sum(math.prod(extent(r)) for r in regions)
