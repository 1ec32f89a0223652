"""Kernels beside their plain-PyTorch references, behind one dispatch function per operation."""

from kernels.attention import Attention, attention, attention_reference, explain_attention
from kernels.linear import dequantise, fake_quant_fp8
from kernels.namesake import extended_path, forward
from kernels.norm import (
    explain_norm,
    explain_qk_norm_rope,
    gated_residual,
    norm_modulate,
    norm_rope,
    qk_norm_rope,
    residual_gate_norm,
)

__all__ = [
    "Attention",
    "attention",
    "attention_reference",
    "dequantise",
    "explain_attention",
    "explain_norm",
    "explain_qk_norm_rope",
    "fake_quant_fp8",
    "gated_residual",
    "norm_modulate",
    "norm_rope",
    "qk_norm_rope",
    "residual_gate_norm",
]

__path__ = extended_path(__path__)  # submodules of Hugging Face's package of this name, after ours


def __getattr__(name: str):
    return forward(name)
