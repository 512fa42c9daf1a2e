"""Checkpoints of a run: the initial model, resuming, saving, and runs on an object store."""
