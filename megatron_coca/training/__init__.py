"""Training: launchers, the DeepSpeed engine, the training loop, and checkpoints."""
