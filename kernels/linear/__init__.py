"""Quantised weights for linear layers: dequantisation and fake quantisation."""

from kernels.linear.reference import FP8_MAX, dequantise, fake_quant_fp8

__all__ = ["FP8_MAX", "dequantise", "fake_quant_fp8"]
