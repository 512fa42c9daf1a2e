"""This project's own checkpoints."""
