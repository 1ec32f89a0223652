"""What the Gluon kernels share: descriptors with a layout in shared memory, and stores."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as Plain

# Its name up to 3.6, and since.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def in_shared(x: Plain) -> TensorDescriptor:
    """The same blocks, as Gluon takes them: with their layout in shared memory."""
    layout = gl.NVMMASharedLayout.get_default_for(x.block_shape, TYPES[x.base.dtype])
    return TensorDescriptor(x.base, x.shape, x.strides, x.block_shape, layout)


def line(x: Tensor, n: int) -> TensorDescriptor:
    """Blocks of n numbers of a contiguous 32-bit `x`, as one line."""
    return TensorDescriptor(x, [x.numel()], [1], [n], gl.NVMMASharedLayout(0, 32, rank=1))


@gluon.jit
def place(i, plan, tiles, items, at_once, PLANNED: gl.constexpr):
    """`(tile, item)` of program i, an item being a head of a sample: in turn, or in the order of a plan.

    By a plan `at_once` items share the processors, in each the tiles with most work first.
    """
    if PLANNED:
        first = i // (tiles * at_once) * at_once
        width = gl.minimum(items - first, at_once)
        rest = i - first * tiles
        tile = gl.load(plan + rest // width)
        item = first + rest % width
    else:
        tile = i % tiles
        item = i // tiles
    return tile, item


@gluon.jit
def span(plan, tile, tiles):
    """Of the steps of a plan (`plan.steps`) `(those of this tile begin, how many may be partial, how many in all)`."""
    first = gl.load(plan + tiles + tile)
    return first, gl.load(plan + 2 * tiles + 1 + tile), gl.load(plan + tiles + tile + 1) - first


@gluon.jit
def step_of(plan, number, tiles):
    """Step `number` of a plan, see `plan.steps`."""
    return gl.load(plan + 3 * tiles + 1 + number)


@gluon.jit
def slot_of(step):
    """Which intervals mask a step: row of `plan.row_bounds`."""
    return (step >> 1) & 127


@gluon.jit
def store_rows(x, value, batch, head, row, rows, stride_b, stride_h, stride_l, D: gl.constexpr):
    """Writes `value` to rows `row ... rows` and columns below D of one head."""
    layout: gl.constexpr = value.type.layout
    r = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    c = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    at = batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h + r.to(gl.int64)[:, None] * stride_l + c[None, :]
    gl.store(x + at, value.to(x.dtype.element_ty), mask=(r[:, None] < rows) & (c[None, :] < D))
