"""Training: launchers, the two engines (DeepSpeed and our own), the training loop, and checkpoints."""
