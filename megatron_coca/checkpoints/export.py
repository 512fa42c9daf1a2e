"""Writing checkpoints as folders that stock Hugging Face transformers loads.

Only what a stock model computes is written: an export gives the same logits, or there is none. The vocabulary keeps
its padding rows, over which the softmax goes here as well; generation is told never to choose them.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_coca.checkpoints import huggingface, native, weight_map
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.export_tokenizer import tokenizer_files
from megatron_coca.checkpoints.exporters import EXPORTERS, choose, describe
from megatron_coca.checkpoints.load import Opened, Overrides, open_checkpoint
from megatron_coca.config import Config
from megatron_coca.data import load_saved_tokenizer

SHARD_BYTES = 5_000_000_000
"""Of one weights file at most, where a single weight is not larger; transformers' own limit."""

THEIRS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files of Hugging Face folders that are written again as they are: the tokenizer, and how to generate."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights may be written in and computed with, by name."""


@dataclass(frozen=True)
class Exported:
    """What was written: where, as which `model_type`, and what of the tokenizer could not be expressed, or None."""

    folder: Path
    model_type: str
    tokenizer_note: str | None


def export(
    checkpoint: str | Path,
    folder: str | Path,
    overrides: Overrides = (),
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write a checkpoint as a folder for `transformers.AutoModelForCausalLM.from_pretrained`.

    Args:
        checkpoint: a run's save folder, one step of it, or a Hugging Face folder.
        folder: what to write; it must not exist. It is complete or absent.
        overrides: how the weights are used, as for `load_model`; an extension becomes part of the export.
        dtype: of the weights; by default as saved, then they are equal bit by bit.
        shard_bytes: larger models are written in several files.

    Raises:
        CheckpointError: the checkpoint is not in order, no stock model computes what it does, or `folder` exists or
            cannot be written. Nothing is written then.
        ConfigError: an override that is not valid.
        DataError: the checkpoint's tokenizer is damaged.
    """
    opened, folder = open_checkpoint(checkpoint), Path(folder)
    config = opened.configure(overrides)
    kind = choose(config, opened.folder)
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; name a new folder, or remove this one")
    files, end, note = _tokenizer(opened)
    weights = foreign_weights(opened, config, EXPORTERS[kind].rows)
    if dtype is not None:
        weights = {name: weight.to(DTYPES[dtype]) for name, weight in weights.items()}
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        _fill(partial, describe(config, kind, end, weights), weights, shard_bytes, files)
        partial.rename(folder)
        native.flush(folder.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: cannot be written ({error.strerror or error}); name another folder"
        ) from error
    return Exported(folder, kind, note)


def _tokenizer(opened: Opened) -> tuple[Mapping[str, bytes], Any, str | None]:
    """The files of the tokenizer, what ends a text (an id, several, or None), and what is not expressed, or None; of a
    Hugging Face folder they are its own.
    """
    if huggingface.is_huggingface_folder(opened.folder):
        files = {name: (opened.folder / name).read_bytes() for name in THEIRS if (opened.folder / name).is_file()}
        end = native.read_json(opened.folder / "config.json").get("eos_token_id")
        note = f"{opened.folder}: has no tokenizer, so the folder has none"
        return files, end, None if any("token" in name for name in files) else note
    tokenizer = load_saved_tokenizer(opened.tokenizer_folder) if opened.tokenizer_folder is not None else None
    files, note = tokenizer_files(opened.tokenizer_folder, tokenizer)
    return files, tokenizer.eod if tokenizer is not None else None, note


def foreign_weights(opened: Opened, config: Config, rows: Sequence[weight_map.Row]) -> dict[str, Tensor]:
    """The weights by their names in `rows`, each contiguous, in the dtype on disk. Raises CheckpointError."""
    ours = opened.weights()
    heads = weight_map.Heads(config.model.num_attention_heads, config.model.num_kv_heads)
    found: dict[str, Tensor] = {}
    for row in weight_map.expand(rows, config.model.num_layers):
        if row.ours in ours:
            parts = row.packing.split(ours.pop(row.ours), heads, len(row.theirs))
            found |= {name: part.contiguous() for name, part in zip(row.theirs, parts, strict=True)}
    if ours:
        raise CheckpointError(f"{opened.folder}: no name in Hugging Face folders for {', '.join(sorted(ours))}")
    return found


def _fill(
    partial: Path,
    contents: Mapping[str, dict[str, Any]],
    weights: Mapping[str, Tensor],
    shard_bytes: int,
    files: Mapping[str, bytes],
) -> None:
    """Write every file into a fresh folder and flush it to disk."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in contents.items():
        native.write_json(partial / name, content)
    for name, data in files.items():
        (partial / name).write_bytes(data)
    shards = list(_shards(weights, shard_bytes))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, partial / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        size = {"total_size": sum(weight.nbytes for weight in weights.values())}
        text = json.dumps({"metadata": size, "weight_map": index}, indent=1)
        (partial / "model.safetensors.index.json").write_text(text + "\n")
    for path in (*partial.iterdir(), partial):
        native.flush(path)


def _shards(weights: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """The weights in their order, in parts of at most `limit` bytes; one that is larger stands alone."""
    shard: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if shard and sum(each.nbytes for each in shard.values()) + weight.nbytes > limit:
            yield shard
            shard = {}
        shard[name] = weight
    yield shard
