"""Attention backends: each turns `AttentionInputs` into the attention output, and reports the inputs it does not
support.
"""
