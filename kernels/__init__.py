"""Kernels beside their plain-PyTorch references, behind one dispatch function per operation."""

from kernels.attention import (
    Attention,
    BlockCausal,
    BlockMask,
    PlannedMask,
    attention,
    attention_reference,
    attention_varlen,
    block_causal_sink,
    block_mask,
    explain_attention,
    explain_mask,
    flash_attention,
    flash_with_tangent,
    plan_attention,
    planned_attention,
    print_choice,
)
from kernels.linear import (
    LinearQuant,
    dequantise,
    fake_quant,
    fake_quant_fp8,
    fake_quant_linear,
    linear_reference,
    quantise_fp8_blocks,
)
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
from kernels.qat import (
    QatAttention,
    dequantise_nvfp4,
    explain_nvfp4,
    explain_qat_attention,
    fake_quant_nvfp4,
    nvfp4_global_scale,
    qat_attention,
    quantise_nvfp4,
)

__all__ = [
    "Attention",
    "BlockCausal",
    "BlockMask",
    "LinearQuant",
    "PlannedMask",
    "QatAttention",
    "attention",
    "attention_reference",
    "attention_varlen",
    "block_causal_sink",
    "block_mask",
    "dequantise",
    "dequantise_nvfp4",
    "explain_attention",
    "explain_mask",
    "explain_norm",
    "explain_nvfp4",
    "explain_qat_attention",
    "explain_qk_norm_rope",
    "fake_quant",
    "fake_quant_fp8",
    "fake_quant_linear",
    "fake_quant_nvfp4",
    "flash_attention",
    "flash_with_tangent",
    "gated_residual",
    "linear_reference",
    "norm_modulate",
    "norm_rope",
    "nvfp4_global_scale",
    "plan_attention",
    "planned_attention",
    "print_choice",
    "qat_attention",
    "qk_norm_rope",
    "quantise_fp8_blocks",
    "quantise_nvfp4",
    "residual_gate_norm",
]

__path__ = extended_path(__path__)  # submodules of Hugging Face's package of this name, after ours


def __getattr__(name: str):
    return forward(name)
