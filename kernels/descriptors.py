"""Tensor descriptors for the copy engine. Imports Triton, so only modules that launch kernels import it."""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Descriptor(TensorDescriptor):
    """A descriptor whose arguments the caller has checked: Triton's own checks take longer than the rest of a launch.

    The base and all strides but the last are multiples of 16 bytes, the last stride is 1, no size is 0, and the block's
    sizes are powers of two.
    """

    def __post_init__(self):
        pass


def describable(x: Tensor) -> bool:
    """Whether the copy engine can address `x [B, L, H, D]`: 16-byte strides and base, no axis expanded."""
    (b, n, h, d), (of_b, of_n, of_h, of_d), size = x.shape, x.stride(), x.element_size()
    return (
        of_d == 1
        and d * size >= 16
        and (b == 1 or (of_b > 0 and of_b * size % 16 == 0))
        and (n == 1 or (of_n > 0 and of_n * size % 16 == 0))
        and (h == 1 or (of_h > 0 and of_h * size % 16 == 0))
        and x.data_ptr() % 16 == 0
    )


def rows_of_heads(x: Tensor, rows: int, width: int) -> Descriptor:
    """Blocks `[1, 1, rows, width]` of a describable `x [B, L, H, D]`, as axes B, H, L, D.

    In this order since the compiler keeps a tile in shared memory only if leading axes alone have length 1.
    """
    (b, n, h, d), (of_b, of_n, of_h, _) = x.shape, x.stride()
    # The stride of an axis of length 1 is arbitrary in PyTorch, and still has to be a multiple of 16 bytes.
    any_ = 16 * width
    strides = [of_b if b > 1 else any_, of_h if h > 1 else any_, of_n if n > 1 else any_, 1]
    return Descriptor(x, [b, h, n, d], strides, [1, 1, rows, width])
