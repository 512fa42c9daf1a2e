"""Writing checkpoints as folders that Hugging Face transformers loads.

An export gives the same logits. What a stock model computes is written as one; all else carries a modelling file
(exporters.py). The vocabulary keeps its padding rows, over which the softmax
goes here as well; generation is told never to choose them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_coca.atomic_write import atomic_dir, refuse_existing
from megatron_coca.checkpoints import native, weight_map
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.exports.exporters import EXPORTERS, MODELLING_FILE, choose, describe
from megatron_coca.checkpoints.exports.model_card import CARD, model_card
from megatron_coca.checkpoints.exports.tokenizer import (
    GENERATION,
    Companions,
    Symbols,
    original_companions,
    own_companions,
    suppressing,
    tokenizer_files,
)
from megatron_coca.checkpoints.huggingface import is_huggingface_folder
from megatron_coca.checkpoints.huggingface_families import INDEX, REMOTE_TYPES, SINGLE
from megatron_coca.checkpoints.load import OpenedCheckpoint, Overrides, open_checkpoint
from megatron_coca.checkpoints.tokenizer import KEYS as TOKENIZER_KEYS
from megatron_coca.checkpoints.weights import DTYPES, Weights, to_foreign_weights, write_safetensors
from megatron_coca.config import Config
from megatron_coca.config.source import given_values

NO_TOKENIZER = (
    "the checkpoint carries no tokenizer, so the export has none, and nothing in it ends a text: generate() runs to its "
    "limit ({})"
)
VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "final_linear.weight")
"""Our weights that have a row for each token; a tied head is the embedding."""
SHARD_BYTES = 5_000_000_000
"""Of one weights file at most, where a single weight is not larger; transformers' own limit."""


@dataclass(frozen=True)
class Exported:
    """What was written: where, as which `model_type`, and what of the tokenizer could not be expressed, or None."""

    folder: Path
    model_type: str
    tokenizer_note: str | None

    @property
    def remote(self) -> bool:
        """Whether it is loaded with `trust_remote_code=True`, by the modelling file beside the weights."""
        return self.model_type in REMOTE_TYPES


def export(
    checkpoint: str | Path,
    folder: str | Path,
    overrides: Overrides = (),
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | Path | None = None,
    without_padding: bool = False,
) -> Exported:
    """Write a checkpoint as a folder for `transformers.AutoModelForCausalLM.from_pretrained`.

    Args:
        checkpoint: a run's save folder, one step of it, or a Hugging Face folder.
        folder: what to write; it must not exist. It is complete or absent.
        overrides: how the weights are used, as for `load_model`; an extension becomes part of the export.
        dtype: of the weights; by default as saved, then they are equal bit by bit.
        shard_bytes: larger models are written in several files.
        tokenizer: the model's original, a Hugging Face folder whose tokenizer and generation files are written as they
            are, with its ids of bos, eos and pad; it has to give the ids of the checkpoint's tokenizer.
        without_padding: leave out the rows of the vocabulary that stand for no token, so that no program counts them
            in a softmax. By default they are kept, and log-likelihoods are those that the checkpoint has here.

    Raises:
        CheckpointError: the checkpoint is not in order, `tokenizer` is another one, or `folder` exists or cannot be
            written. Nothing is written then.
        ConfigError: an override that is not valid.
        DataError: the checkpoint's tokenizer is damaged.
    """
    opened, folder = open_checkpoint(checkpoint), Path(folder)
    config = opened.configure(overrides)
    kind = choose(config)
    refuse_existing(folder, CheckpointError)
    files, symbols, note = _companions(opened, config, overrides, Path(tokenizer) if tokenizer is not None else None)
    ours = opened.weights() if dtype is None else opened.weights().to(DTYPES[dtype])
    if without_padding:
        config, ours = _without_padding(config, ours)
    weights = foreign_weights(ours, config, EXPORTERS[kind].rows(config))
    contents = describe(config, kind, symbols, ours)
    files = _never_padding(files, contents[GENERATION]) | {
        CARD: model_card(opened, config, kind, weights, folder.name).encode()
    }
    files |= {MODELLING_FILE.name: MODELLING_FILE.read_bytes()} if kind in REMOTE_TYPES else {}
    with atomic_dir(folder, CheckpointError) as partial:
        _fill(partial, contents, weights, shard_bytes, files)
    return Exported(folder, kind, note)


def _without_padding(config: Config, ours: Weights) -> tuple[Config, Weights]:
    """The configuration and weights of the model without the padding rows of its vocabulary."""
    known = config.model.vocab_size or config.model.padded_vocab_size
    return (
        config.override({"make_vocab_size_divisible_by": 1, "model_parallel_size": 1}),
        ours.first_rows(VOCABULARY_ROWS, known),
    )


def _companions(opened: OpenedCheckpoint, config: Config, overrides: Overrides, original: Path | None) -> Companions:
    """Tokenizer and generation files: the original's where one is given, those of a Hugging Face folder itself unless
    overrides name a tokenizer, else files made from the checkpoint's tokenizer.
    """
    model, found = config.model, opened.tokenizer(overrides)
    named = any(key in given_values(overrides) for key in TOKENIZER_KEYS)
    if original is None and is_huggingface_folder(opened.folder) and not named:
        own = own_companions(opened.folder)
        if own.symbols.eos is None and found.tokenizer is not None:
            return own._replace(symbols=own.symbols._replace(eos=found.tokenizer.eod))
        return own
    if original is not None:
        return original_companions(original, found.tokenizer, model.vocab_size or model.padded_vocab_size)
    if found.tokenizer is None:
        return Companions({}, Symbols(), NO_TOKENIZER.format(found.note))
    files, note = tokenizer_files(found.tokenizer)
    told = "; ".join(filter(None, (found.note, note)))
    return Companions(files, Symbols(eos=found.tokenizer.eod), told or None)


def _never_padding(files: Mapping[str, bytes], ours: Mapping[str, Any]) -> dict[str, bytes]:
    """A generation_config.json of theirs keeps the padding rows out as well, as the model's own does."""
    unused = ours.get("suppress_tokens", [])
    if GENERATION not in files or not unused:
        return dict(files)
    return dict(files) | {GENERATION: suppressing(files[GENERATION], unused)}


def foreign_weights(ours: Weights, config: Config, rows: Sequence[weight_map.Row]) -> Weights:
    """The weights by their names in `rows`. Raises CheckpointError."""
    heads = weight_map.Heads(config.model.num_attention_heads, config.model.num_kv_heads)
    return to_foreign_weights(ours, weight_map.expand(rows, config.model.num_layers), heads)


def _fill(
    partial: Path,
    contents: Mapping[str, dict[str, Any]],
    weights: Weights,
    shard_bytes: int,
    files: Mapping[str, bytes],
) -> None:
    """Write every file into a fresh folder."""
    for name, content in contents.items():
        native.write_json(partial / name, content)
    for name, data in files.items():
        (partial / name).write_bytes(data)
    shards = list(weights.shards(shard_bytes))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(partial / name, shard, {"format": "pt"})
        index |= dict.fromkeys(shard.entries, name)
    if len(shards) > 1:
        size = {"total_size": sum(entry.nbytes for entry in weights.entries.values())}
        text = json.dumps({"metadata": size, "weight_map": index}, indent=1)
        (partial / INDEX).write_text(text + "\n")
