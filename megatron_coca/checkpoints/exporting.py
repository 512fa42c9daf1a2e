"""Export a checkpoint of any layout to Hugging Face transformers, PEFT or GPT-NeoX."""

from pathlib import Path

from megatron_coca.checkpoints.huggingface import write as huggingface
from megatron_coca.checkpoints.huggingface.adapter_export import ExportedAdapters
from megatron_coca.checkpoints.huggingface.adapter_export import export_adapters as export_opened_adapters
from megatron_coca.checkpoints.huggingface.model_card import CardNotes
from megatron_coca.checkpoints.load import open_checkpoint
from megatron_coca.checkpoints.neox import write as neox
from megatron_coca.config.source import Overrides


def export(
    checkpoint: str | Path,
    folder: str | Path,
    overrides: Overrides = (),
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    notes: CardNotes | None = None,
) -> huggingface.Exported:
    """Export any checkpoint that `open_checkpoint` reads as a Hugging Face folder; see `huggingface.write.export`."""
    opened = open_checkpoint(checkpoint, overrides=overrides)
    return huggingface.export(opened, Path(folder), overrides, dtype, tokenizer, notes)


def export_adapters(
    checkpoint: str | Path, folder: str | Path, overrides: Overrides = (), base: str | Path | None = None
) -> ExportedAdapters:
    """Export the adapters of a native checkpoint as a PEFT folder; see `huggingface.adapter_export.export_adapters`."""
    opened = open_checkpoint(checkpoint, overrides=overrides)
    return export_opened_adapters(opened, Path(folder), overrides, None if base is None else Path(base))


def export_neox(
    checkpoint: str | Path,
    folder: str | Path,
    overrides: Overrides = (),
    dtype: str | None = None,
    model_parallel_size: int = 1,
    pipe_parallel_size: int = 1,
) -> neox.ExportedNeox:
    """Export any checkpoint that `open_checkpoint` reads as a GPT-NeoX save folder; see `neox.write.export`."""
    opened = open_checkpoint(checkpoint, overrides=overrides)
    return neox.export(opened, Path(folder), overrides, dtype, model_parallel_size, pipe_parallel_size)
