"""Quantisation-aware training: NVFP4 fake quantisation, and attention with fake-quantised operands."""

from kernels.qat.attention import QatAttention, explain_qat_attention, qat_attention
from kernels.qat.nvfp4 import (
    dequantise_nvfp4,
    explain_nvfp4,
    fake_quant_nvfp4,
    nvfp4_global_scale,
    quantise_nvfp4,
)

__all__ = [
    "QatAttention",
    "dequantise_nvfp4",
    "explain_nvfp4",
    "explain_qat_attention",
    "fake_quant_nvfp4",
    "nvfp4_global_scale",
    "qat_attention",
    "quantise_nvfp4",
]
