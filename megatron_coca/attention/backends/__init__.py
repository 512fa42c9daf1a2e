"""Attention backends: each turns `AttentionInputs` into the attention output, and reports what it does not support."""
