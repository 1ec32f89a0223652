"""Norms with modulation, and gated residuals: the two fused calls of a transformer block."""

from kernels.norm.reference import gated_residual, norm_modulate, residual_gate_norm

__all__ = ["gated_residual", "norm_modulate", "residual_gate_norm"]
