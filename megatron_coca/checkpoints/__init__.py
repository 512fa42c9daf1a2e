"""Checkpoints: our own layout, Hugging Face folders, and loading either for evaluation."""

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.load import Loaded, load_checkpoint, load_model

__all__ = ["CheckpointError", "Loaded", "load_checkpoint", "load_model"]
