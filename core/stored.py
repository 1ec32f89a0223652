"""Tensors in safetensors files: found by the file's header, read by position, whole or by region."""

import contextlib
import dataclasses
import json
import math
import os
import struct
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import UserError, raise_faults
from core.regions import Region, extent

SLICE, READERS = 16 * 2**20, 8  # bytes that one of so many threads reads at a time
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")

# Names of the safetensors format; sub-byte types are left out, torch stores them two to an element.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class File:
    """An open file, read by position; closed when the last tensor that needs it is gone.

    Holding it open keeps the bytes that the header described readable when a save replaces the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.fd: int | None = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.identity = _identity(self.fd)

    def release(self) -> None:
        """Closes the file until it is read: a checkpoint of many processes has more files than may be open."""
        self.close()
        self.fd = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The descriptor. Raises UserError when a released file is gone or has been replaced."""
        if self.fd is not None:
            yield self.fd
            return
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be opened any more: {error.strerror}") from error
        try:
            if _identity(fd) != self.identity:
                raise UserError(f"{self.path}: was replaced after it was opened")
            yield fd
        finally:
            os.close(fd)

    def fill(self, buffer: memoryview, offset: int, key: str) -> None:
        """Reads `len(buffer)` bytes at `offset`, large ones in slices side by side: one thread alone neither
        copies nor touches fresh memory as fast as a disk cache gives it.

        Raises UserError when the file ends before.
        """
        with self.opened() as fd:
            if len(buffer) <= SLICE:
                return self._fill(fd, buffer, offset, key)
            starts = range(0, len(buffer), SLICE)
            with ThreadPoolExecutor(min(READERS, len(starts))) as pool:
                for _ in pool.map(lambda i: self._fill(fd, buffer[i : i + SLICE], offset + i, key), starts):
                    pass

    def _fill(self, fd: int, buffer: memoryview, offset: int, key: str) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise UserError(f"{self.path}: cannot read {key}: {error.strerror}") from error
            if got == 0:
                end = offset + len(buffer)
                raise UserError(f"{self.path}: cut short after it was opened: {key} ends at byte {end}")
            done += got


def _identity(fd: int) -> tuple[int, ...]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor whose bytes begin at `start` of a file."""

    file: File
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


def read(stored: Stored, where: Region) -> Tensor:
    """The region `where` of a tensor, fresh on the CPU."""
    out = torch.empty(extent(where), dtype=stored.dtype)
    read_into(stored, out, where)
    return out


def read_into(stored: Stored, out: Tensor, where: Region) -> None:
    """Fills `out`, on the CPU, with the region `where`.

    Rows that are wanted whole are read in place; of others a slice of rows at a time is read and cut.
    """
    if out.numel() == 0:
        return
    row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    first = where[0].start if where else 0
    if tuple(out.shape[1:]) == stored.shape[1:] and out.is_contiguous():
        stored.file.fill(_bytes(out), stored.start + first * row_bytes, stored.key)
        return
    step = max(1, SLICE // row_bytes)
    for i in range(0, out.shape[0], step):
        rows = torch.empty((min(step, out.shape[0] - i), *stored.shape[1:]), dtype=stored.dtype)
        stored.file.fill(_bytes(rows), stored.start + (first + i) * row_bytes, stored.key)
        out[i : i + step] = rows[:, *where[1:]]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


@dataclasses.dataclass(frozen=True)
class Contents:
    """What the header of a file says: the tensors, in its order, and the metadata."""

    file: File
    metadata: dict[str, str]
    tensors: dict[str, Stored]


def open_file(path: Path) -> Contents:
    """One safetensors file by its header. Raises UserError naming the file."""
    if path.suffix in PICKLES:
        raise UserError(f"{path}: a pickle, which can run code when loaded: convert it to safetensors")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    file = File(path)
    header, data = _header(file)
    try:
        # The library judges what the header says of each tensor: overlaps, holes, sizes that do not fit shapes.
        with safe_open(path, "np"):  # "pt" would map the file writable, which large files on small hosts refuse
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not safetensors: {error}") from None
    metadata = header.pop("__metadata__", {})
    faults = [f"{k} has dtype {v['dtype']}" for k, v in header.items() if v["dtype"] not in DTYPES]
    raise_faults(f"{path}: dtypes that cannot be read, only {', '.join(DTYPES)}", faults)
    tensors = {
        k: Stored(file, k, tuple(v["shape"]), DTYPES[v["dtype"]], data + v["data_offsets"][0])
        for k, v in header.items()
    }
    return Contents(file, metadata, tensors)


def _header(file: File) -> tuple[dict[str, Any], int]:
    """`(header, first byte of the data)`. Raises UserError for what is not a whole safetensors file."""
    with file.opened() as fd:
        size = os.fstat(fd).st_size
        start = os.pread(fd, 24, 0)
        if start.startswith(b"version https://git-lfs"):
            raise UserError(f"{file.path}: a Git LFS pointer, not the weights: run `git lfs pull`")
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
        if len(start) < 8 or length + 8 > size:
            alone = f"{size} bytes, its header alone says {length + 8}"
            raise UserError(f"{file.path}: not safetensors or cut short: {alone}")
        blob = os.pread(fd, length, 8)
    try:
        header = json.loads(blob)
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        expected = 8 + length + max((v["data_offsets"][1] for v in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise UserError(f"{file.path}: not safetensors: the header of {length} bytes is corrupt") from None
    if size != expected:
        state = "cut short" if size < expected else "too long"
        raise UserError(f"{file.path}: {state}: {size} bytes, its header says {expected}")
    return header, 8 + length
