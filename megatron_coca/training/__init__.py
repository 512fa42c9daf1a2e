"""Training: launching, the DeepSpeed engine, the training loop, and checkpointing."""
