"""Writing checkpoints in the layouts of other programs."""
