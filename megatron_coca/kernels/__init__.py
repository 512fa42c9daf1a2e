"""Triton kernels: operand preparation and flash attention with distance bands and bias formulas.

The modules here import torch and triton and nothing of this package; importing this file alone imports neither.
"""
