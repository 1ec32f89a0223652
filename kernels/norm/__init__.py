"""Norms with modulation, gated residuals, QK norm with rotary embedding: the fused calls of a transformer block."""

from kernels.norm.dispatch import (
    explain_norm,
    explain_qk_norm_rope,
    gated_residual,
    norm_modulate,
    norm_rope,
    qk_norm_rope,
    residual_gate_norm,
)

__all__ = [
    "explain_norm",
    "explain_qk_norm_rope",
    "gated_residual",
    "norm_modulate",
    "norm_rope",
    "qk_norm_rope",
    "residual_gate_norm",
]
