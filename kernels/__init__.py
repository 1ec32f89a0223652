"""Kernels beside their plain-PyTorch references, behind one dispatch function per operation."""
