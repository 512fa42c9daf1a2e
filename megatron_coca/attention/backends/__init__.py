"""Attention backends: each turns `AttentionInputs` into the attention output and reports unsupported inputs."""
