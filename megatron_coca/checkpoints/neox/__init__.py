"""GPT-NeoX's checkpoints."""
