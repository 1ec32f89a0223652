"""What a file was when it was read, cheap enough to be compared for every clip at every start."""

import dataclasses
import hashlib
from pathlib import Path

BLOCKS, BLOCK = 16, 1 << 16  # of a large file, evenly spaced, that are hashed


def sampled(path: Path, start: int = 0, head: bytes = b"") -> bytes:
    """A digest of `head`, of a file's size from byte `start` on, and of blocks spread over it (or of all of it)."""
    out = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = path.stat().st_size - start
        out.update(head + repr(size).encode())
        whole = size <= BLOCKS * BLOCK
        for i in range(1 if whole else BLOCKS):
            file.seek(start + i * (size - BLOCK) // (BLOCKS - 1))
            out.update(file.read(size if whole else BLOCK))
    return out.digest()


@dataclasses.dataclass(frozen=True)
class Stamp:
    """A file's size in bytes, the time of its last change in nanoseconds, and the digest of its `sampled` contents."""

    bytes: int
    mtime_ns: int
    digest: str


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file, from 1 MiB of it at most; None for one that cannot be read."""
    try:
        status = path.stat()
        return Stamp(status.st_size, status.st_mtime_ns, sampled(path).hex())
    except OSError:
        return None


def changed(path: Path, before: Stamp) -> bool:
    """Whether a file has other contents than when it was stamped; they are read only where size or time are others.

    A file that is gone has not changed, nor has a copy. An edit that keeps both size and time is not noticed, nor
    one that keeps the size and the sampled blocks.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    if (status.st_size, status.st_mtime_ns) == (before.bytes, before.mtime_ns):
        return False
    now = stamp(path)
    return now is not None and now.digest != before.digest
