"""Kernels beside their plain-PyTorch references, behind one dispatch function per operation."""

from kernels.attention import Attention, attention, attention_reference, explain_attention
from kernels.linear import dequantise, fake_quant_fp8
from kernels.norm import gated_residual, norm_modulate, residual_gate_norm

__all__ = [
    "Attention",
    "attention",
    "attention_reference",
    "dequantise",
    "explain_attention",
    "fake_quant_fp8",
    "gated_residual",
    "norm_modulate",
    "residual_gate_norm",
]
