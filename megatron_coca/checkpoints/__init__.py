"""Checkpoints: our own layout, Hugging Face folders, and loading either for evaluation."""

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.load import LoadedModel, OpenedCheckpoint, load_checkpoint, load_model, open_checkpoint
