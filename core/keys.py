"""Explicit randomness: an int64 pair that is split and folded, never mutated.

Numbers are drawn on the CPU in float32 from a generator seeded by the key, then moved and cast, so that
they are equal on every device and mesh. The hash is BLAKE2b (RFC 7693) with a 16-byte digest over the
little-endian bytes of the key and of what is folded in.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Key(NamedTuple):
    """A pair of int64. Make one with `key(seed)`; derive others with `fold_in` and `split`."""

    hi: int
    lo: int


def key(seed: int) -> Key:
    """The root key of an integer seed (any int64)."""
    return fold_in(Key(0, 0), int(seed))


def fold_in(k: Key, data: int | str) -> Key:
    """A key derived from `k` and an integer or a name. Equal inputs give equal keys, for ever."""
    if isinstance(data, str):
        payload = b"s" + data.encode()
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


def generator(k: Key) -> torch.Generator:
    """A CPU generator seeded by the key."""
    return torch.Generator("cpu").manual_seed(k.hi ^ k.lo)


def normal(k: Key, shape: Sequence[int], dtype=torch.float32, device="cpu") -> Tensor:
    """Standard normal numbers of `shape`, drawn in float32 on the CPU."""
    return torch.randn(tuple(shape), generator=generator(k), dtype=torch.float32).to(device, dtype)


def uniform(k: Key, shape: Sequence[int] = (), dtype=torch.float32, device="cpu") -> Tensor:
    """Numbers in [0, 1) of `shape`, drawn in float32 on the CPU."""
    return torch.rand(tuple(shape), generator=generator(k), dtype=torch.float32).to(device, dtype)


def permutation(k: Key, n: int) -> list[int]:
    """A permutation of `range(n)`."""
    return torch.randperm(n, generator=generator(k)).tolist()


def truncated_normal(k: Key, shape: Sequence[int], bound: float = 2.0) -> Tensor:
    """Standard normal numbers conditioned on |x| < bound, by the inverse error function, float32."""
    edge = math.erf(bound / math.sqrt(2.0))
    u = uniform(k, shape).double() * 2 * edge - edge
    return (torch.erfinv(u) * math.sqrt(2.0)).clamp_(-bound, bound).float()
