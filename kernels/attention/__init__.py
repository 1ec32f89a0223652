"""Attention: one front door over typed backends."""

from kernels.attention.dispatch import (
    BACKENDS,
    SITES,
    Attention,
    AttentionRequest,
    Site,
    attention,
    explain_attention,
    print_choice,
)
from kernels.attention.flash import flash_attention, flash_with_tangent
from kernels.attention.masks import (
    PlannedMask,
    block_causal_sink,
    explain_mask,
    plan_attention,
    planned_attention,
)
from kernels.attention.plan import BlockCausal, BlockMask, block_mask
from kernels.attention.reference import attention_reference
from kernels.attention.varlen import attention_varlen

__all__ = [
    "BACKENDS",
    "SITES",
    "Attention",
    "AttentionRequest",
    "BlockCausal",
    "BlockMask",
    "PlannedMask",
    "Site",
    "attention",
    "attention_reference",
    "attention_varlen",
    "block_causal_sink",
    "block_mask",
    "explain_attention",
    "explain_mask",
    "flash_attention",
    "flash_with_tangent",
    "plan_attention",
    "planned_attention",
    "print_choice",
]
