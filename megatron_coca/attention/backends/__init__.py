"""Attention backends: each turns `AttentionInputs` into the attention output, and knows what it cannot do."""
