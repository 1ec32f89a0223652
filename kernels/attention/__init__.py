"""Attention: one front door over typed backends."""

from kernels.attention.dispatch import BACKENDS, SITES, Attention, AttentionRequest, Site, attention, explain_attention
from kernels.attention.reference import attention_reference

__all__ = [
    "BACKENDS",
    "SITES",
    "Attention",
    "AttentionRequest",
    "Site",
    "attention",
    "attention_reference",
    "explain_attention",
]
