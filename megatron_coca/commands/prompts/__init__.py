"""Prompts of `generate` and `chat`: typed at a terminal, and their continuations."""
