"""Read and write GPT-NeoX checkpoints."""
