"""Quantised weights for linear layers: dequantisation and fake quantisation."""

from kernels.linear.fake_quant import LinearQuant, fake_quant, fake_quant_linear
from kernels.linear.reference import FP8_MAX, dequantise, fake_quant_fp8, linear_reference, quantise_fp8_blocks

__all__ = [
    "FP8_MAX",
    "LinearQuant",
    "dequantise",
    "fake_quant",
    "fake_quant_fp8",
    "fake_quant_linear",
    "linear_reference",
    "quantise_fp8_blocks",
]
