"""How a model's layers run: everything that is not the model is an argument.

`Run` is frozen and has identities or plain versions as defaults, so `forward(params, cfg, inputs)` alone is
the reference; layouts and kernels replace single fields.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from core.errors import UserError
from core.scan import scan
from kernels import Attention


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The token dimension of one stream, whole on this process."""

    def split(self, t: Tensor, dim: int) -> Tensor:
        """This process's part of `t` along its token dimension."""
        return t

    def merge(self, t: Tensor, dim: int, length: int) -> Tensor:
        """Inverse of `split`: `length` tokens along `dim`."""
        return t


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The three collectives of a tensor-parallel block, on one process."""

    def copy(self, x: Tensor) -> Tensor:
        """Enters a column-parallel region: identity forward, sum of gradients backward."""
        return x

    def reduce(self, x: Tensor) -> Tensor:
        """Leaves a row-parallel region: sum forward, identity backward."""
        return x

    def mean_square(self, x: Tensor) -> Tensor:
        """Mean of squares over the full inner width, `[..., 1]`, for norms across sharded heads."""
        return x.square().mean(-1, keepdim=True)


def _token_fault(attention: Callable[..., Any], tokens: Tokens) -> str | None:
    """Why an attention would not see all of what `tokens` cut, or None.

    A wrapper that trades parts of tokens says so by its field `tokens`. Whatever is around it would see parts only.
    """
    held = getattr(attention, "inner", None)
    while held is not None:
        if hasattr(held, "tokens"):
            outer = type(attention).__name__
            return f"{type(held).__name__} must be the outermost attention wrapper, it is inside {outer}"
        held = getattr(held, "inner", None)
    traded = getattr(attention, "tokens", Tokens())
    return None if traded == tokens else f"tokens are {tokens}, those of {type(attention).__name__} {traded}"


@dataclasses.dataclass(frozen=True)
class Run:
    """Attention, scan, tokens and tensor parallelism of one forward pass.

    Raises UserError where attention and tokens do not belong together.
    """

    attention: Callable[..., Any] = Attention()
    scan: Callable[..., Any] = scan
    tokens: Tokens = Tokens()
    tp: TensorParallel = TensorParallel()

    def __post_init__(self):
        if fault := _token_fault(self.attention, self.tokens):
            raise UserError(f"Run: {fault}")
