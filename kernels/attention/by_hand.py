"""When the attention kernels in Gluon serve a call; elsewhere the Triton ones do. Needs no Triton.

Gluon is experimental: its names change from version to version, and its kernels are only worth having as long as they
stay in registers. So they are used with versions of Triton for which they were compiled and looked at.
"""

import functools
import importlib.metadata
from typing import NamedTuple

import torch

from kernels.attention.tiles import tiles_for
from kernels.dispatch import constant_result
from kernels.tiles import Capability

# Measured on 3.6; with the others they compile to the same loops for sm_90, without spills in them: nobody ran them.
VERSIONS = ((3, 6), (3, 7), (3, 8))
HOPPER = (9, 0)
# The processors of an H100 or H200; a constant, so that what runs is a function of the shapes.
PROCESSORS = 132


class Call(NamedTuple):
    """What the kernels in Gluon depend on.

    `plain`: no key mask, lengths, packed rows, bias or causality. `repeat`: PyTorch is asked for deterministic
    algorithms. `describable`: the copy engine can address q, k and v.
    """

    dtype: torch.dtype
    capability: Capability | None
    head_size: int
    batch: int
    kv_heads: int
    queries: int
    keys: int
    plain: bool
    repeat: bool
    describable: bool = True


@functools.cache
def _installed() -> str | None:
    for name in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@constant_result
def version_fault() -> str | None:
    """Why the kernels in Gluon are not used with the installed Triton, or None. A constant for the compiler."""
    return fault_of_version(_installed())


def fault_of_version(version: str | None) -> str | None:
    """The same for a version as its package spells it; None: not installed."""
    if version is None:
        return "Triton is not installed"
    if version.startswith(tuple(f"{major}.{minor}." for major, minor in VERSIONS)):
        return None
    known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
    return f"Triton {version} is none of the versions that they were compiled with: {known}"


def _common_fault(call: Call) -> str | None:
    if not call.capability == HOPPER:  # Dynamo of PyTorch 2.11 cannot trace != of tuples
        return f"they are for compute capability 9.0, got {call.capability}"
    if call.dtype.itemsize != 2:
        return f"they need float16 or bfloat16, got {call.dtype}"
    if not call.plain:
        return "they take no mask, lengths, packed rows or causality"
    if not call.describable:
        return "an axis of q, k or v is expanded, or its base is not aligned to 16 bytes"
    return version_fault()


def forward_fault(call: Call) -> str | None:
    """Why the forward kernel in Gluon does not serve a call, or None."""
    if (fault := _common_fault(call)) is not None:
        return fault
    if tiles_for(call.head_size, call.dtype, call.capability).forward_by_hand is None:
        return f"there are no tiles for head size {call.head_size}, where it was not found to be faster"
    return None


def backward_fault(call: Call) -> str | None:
    """Why the kernel of all three gradients in Gluon does not serve a call, or None."""
    if (fault := _common_fault(call)) is not None:
        return fault
    tiles = tiles_for(call.head_size, call.dtype, call.capability)
    if tiles.fused is None:
        return f"there are no tiles for head size {call.head_size}, where it was not found to be faster"
    if call.repeat:
        return "deterministic algorithms are asked for, and it adds up the gradient of q in any order"
    if min(call.queries, call.keys) < tiles.fused_from:
        return f"it is for {tiles.fused_from} queries and keys or more"
    programs = call.batch * call.kv_heads * -(-call.keys // tiles.fused.keys)
    # It does not split the queries: with seven products for its five, the pair is faster below this share.
    if 7 * programs < 5 * PROCESSORS * -(-programs // PROCESSORS):
        return f"it would keep too few of {PROCESSORS} processors busy with so few tiles of keys"
    return None
