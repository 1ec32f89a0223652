"""Which results a recomputed block keeps: policies of selective checkpointing, which see operators by their names."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::linear")


def is_attention(name: str) -> bool:
    """Whether an operator is a forward pass of attention, ours or a library's (`aten::_scaled_dot_product_...`)."""
    return any(part in name for part in ("attention", "attn")) and "backward" not in name


def is_matmul(name: str) -> bool:
    """Whether an operator is a matrix product, attention included."""
    return name in MATMULS or is_attention(name)


KINDS: dict[str, Callable[[str], bool]] = {"save_attention": is_attention, "save_matmuls": is_matmul}


def policy_of(kind: str) -> Callable[..., CheckpointPolicy] | None:
    """The policy of a kind of `training.model.enable_gradient_checkpointing_type`; None for `full`: keep nothing.

    Attention that is a backend of plain operators (the reference) has no operator of its own to be kept.
    """
    if kind == "full":
        return None
    keeps = KINDS[kind]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(op.name()) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
