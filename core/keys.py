"""Explicit randomness: an int64 pair that is split and folded, never mutated.

Numbers are drawn on the CPU in float32 from a generator seeded by the key, then moved and cast, so that
they are equal on every device and mesh. The generator is numpy's Philox (Salmon et al. 2011), which takes
all 128 bits of the key: PyTorch's CPU generator would keep 32 of them and let distinct keys collide. The
hash is BLAKE2b (RFC 7693) with a 16-byte digest over the little-endian bytes of the key and of what is
folded in.
"""

import hashlib
import operator
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.errors import UserError


class Key(NamedTuple):
    """A pair of int64. Make one with `key(seed)`; derive others with `fold_in` and `split`."""

    hi: int
    lo: int


def key(seed: int) -> Key:
    """The root key of an integer seed. Raises UserError for one that is no int64, TypeError for a float."""
    return fold_in(Key(0, 0), operator.index(seed))


def fold_in(k: Key, data: int | str) -> Key:
    """A key derived from `k` and an integer or a name. Equal inputs give equal keys, for ever.

    Raises UserError for an integer outside int64.
    """
    if isinstance(data, str):
        payload = b"s" + data.encode()
    elif not -(2**63) <= data < 2**63:
        raise UserError(f"seed or index {data} is outside int64: allowed is {-(2**63)} to {2**63 - 1}")
    else:
        payload = b"i" + struct.pack("<q", data)
    digest = hashlib.blake2b(struct.pack("<qq", *k) + payload, digest_size=16).digest()
    return Key(*struct.unpack("<qq", digest))


def split(k: Key, n: int = 2) -> list[Key]:
    """`n` independent keys."""
    return [fold_in(fold_in(k, "split"), i) for i in range(n)]


def to_tensor(k: Key) -> Tensor:
    """The key as int64 `[2]`, for checkpoints."""
    return torch.tensor(k, dtype=torch.int64)


def from_tensor(t: Tensor) -> Key:
    """Inverse of `to_tensor`."""
    return Key(*(int(x) for x in t))


def generator(k: Key) -> np.random.Generator:
    """A generator on the CPU seeded by all 128 bits of the key."""
    return np.random.Generator(np.random.Philox(key=np.array(k, dtype=np.int64).view(np.uint64)))


def normal(k: Key, shape: Sequence[int], dtype=torch.float32, device="cpu") -> Tensor:
    """Standard normal numbers of `shape`, drawn in float32 on the CPU."""
    numbers = generator(k).standard_normal(tuple(shape), dtype=np.float32)
    return torch.as_tensor(numbers).to(device, dtype)


def uniform(k: Key, shape: Sequence[int] = (), dtype=torch.float32, device="cpu") -> Tensor:
    """Numbers in [0, 1) of `shape`, multiples of 2^-24, drawn in float32 on the CPU."""
    return torch.as_tensor(generator(k).random(tuple(shape), dtype=np.float32)).to(device, dtype)


def permutation(k: Key, n: int) -> list[int]:
    """A permutation of `range(n)`."""
    return generator(k).permutation(n).tolist()
