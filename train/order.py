"""The order of a data set without end, and the batches that it is cut into. Processes share batches, not the set.

Each epoch puts all samples in an order of its own, and epochs follow each other. In that endless order, the samples of
each signature (a *bucket*: a batch holds one) are cut into batches, and batches come in the order in which they are
complete. So every sample comes exactly once in each epoch of its bucket; what fills no batch at the end of an epoch
begins the first one of the next. A batch depends on the set, the key, the batch size and its number alone. Sets of one
bucket are cut from one row of samples, so that there a step sees the same samples however many batches they fill.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

# `entries(epoch, bucket)`: the bucket's samples in the epoch's order, int64 `[n]`, and when in the epoch each comes,
# ascending `[n]`.
Entries = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Share:
    """Which part of every batch this process reads: the `index`-th of `count` equal ones."""

    index: int = 0
    count: int = 1

    def part(self, batch_size: int) -> slice:
        """The samples of a batch that are this process's."""
        n = batch_size // self.count
        return slice(self.index * n, (self.index + 1) * n)


def batches_before(counts: Sequence[int], batch_size: int, epoch: int) -> int:
    """Batches that are complete before an epoch begins.

    Args:
        counts: samples of each bucket.
    """
    return sum(epoch * int(n) // batch_size for n in counts)


def find_batch(counts: Sequence[int], batch_size: int, number: int) -> tuple[int, int]:
    """The epoch in which a batch is complete, and its number there, from 0."""
    low, high = 0, number * batch_size + batch_size + 1  # an epoch has at least one sample
    while high - low > 1:
        middle = (low + high) // 2
        if batches_before(counts, batch_size, middle) <= number:
            low = middle
        else:
            high = middle
    return low, number - batches_before(counts, batch_size, low)


def epoch_batches(entries: Entries, counts: Sequence[int], batch_size: int, epoch: int) -> np.ndarray:
    """The batches that are complete in an epoch, in order: int64 `[n, batch_size]`, what `entries` gives."""
    rows, when = [np.zeros((0, batch_size), np.int64)], [np.zeros(0)]
    for bucket, n in enumerate(map(int, counts)):
        carried = epoch * n % batch_size
        full = (carried + n) // batch_size
        if full:
            own, at = entries(epoch, bucket)
            parts, back = [own], epoch
            while sum(map(len, parts)) < carried + n:
                back -= 1
                parts.insert(0, entries(back, bucket)[0])
            row = np.concatenate(parts)[-(carried + n) :]
            rows.append(row[: full * batch_size].reshape(full, batch_size))
            when.append(at[np.arange(1, full + 1) * batch_size - carried - 1])
    return np.concatenate(rows)[np.argsort(np.concatenate(when), kind="stable")]


def batches_from(
    entries: Entries, counts: Sequence[int], batch_size: int, number: int
) -> Iterator[tuple[int, np.ndarray]]:
    """`(epoch, batches [n, batch_size])` from batch `number` on, through the epochs, without end."""
    epoch, skip = find_batch(counts, batch_size, number)
    while True:
        batches = epoch_batches(entries, counts, batch_size, epoch)
        if len(batches) > skip:
            yield epoch, batches[skip:]
        epoch, skip = epoch + 1, 0
