"""Any checkpoint that can be read as one of ours that holds weights only.

Weights are copied one at a time: memory is that of a weight of ours and the foreign ones that it is made of, whatever
the size of the model.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.folders import new_folder, refuse_existing
from megatron_coca.checkpoints.huggingface import CONFIG, behaviour_note, is_huggingface_folder
from megatron_coca.checkpoints.load import OpenedCheckpoint, Overrides, load_weights, open_checkpoint
from megatron_coca.checkpoints.native import code_versions
from megatron_coca.checkpoints.tokenizer import Found
from megatron_coca.checkpoints.weights import DTYPES, Weights, write_safetensors
from megatron_coca.config import Config
from megatron_coca.data.tokenizers.kinds import DESCRIPTION
from megatron_coca.model import empty_model

STEP = 0
"""What was imported is where a run begins."""


@dataclass(frozen=True)
class Imported:
    """What was written.

    Attributes:
        folder: a save folder with one checkpoint.
        config: of the model.
        parameters: numbers of the model.
        tokenizer_note: what of the tokenizer could not be taken, or None.
        behaviour_note: what a Hugging Face folder's tokenizer and generation files do that is not kept, or None.
    """

    folder: Path
    config: Config
    parameters: int
    tokenizer_note: str | None
    behaviour_note: str | None


def import_checkpoint(
    source: str | Path, folder: str | Path, overrides: Overrides = (), dtype: str | None = None
) -> Imported:
    """Write a checkpoint as a save folder of ours with one step that holds weights only.

    Args:
        source: whatever `open_checkpoint` reads.
        folder: what to write; it must not exist. It is complete or absent.
        overrides: how the weights are used, as for `load_model`; `pos_emb=coca` says what the CoCA authors' GPT-NeoX
            folders are.
        dtype: of the weights; by default as in the source, then they are equal bit by bit.

    Raises:
        CheckpointError: the source is not in order or not of a known kind, its weights do not fit what it says of
            itself, or `folder` exists or cannot be written. Nothing is written then.
        ConfigError: an override that is not valid.
        DataError: the tokenizer of a checkpoint of ours is damaged.
    """
    folder = Path(folder)
    refuse_existing(folder)
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not known; known: {', '.join(DTYPES)}")
    opened = open_checkpoint(source)
    config, weights = opened.configure(overrides), opened.weights()
    check_fit(config, weights)
    tokenizer = opened.tokenizer(overrides)
    more = _not_kept(opened, tokenizer)
    with new_folder(folder) as partial:
        weights = weights if dtype is None else weights.to(DTYPES[dtype])
        inner = native.begin(partial, STEP)
        config = _fill(inner, native.step_folder(folder, STEP), config, weights, tokenizer)
        native.write_json(inner / native.META, _meta(opened))
        native.commit(partial, STEP, holds=native.WEIGHTS_ONLY)
    return Imported(folder, config, sum(prod(entry.shape) for entry in weights.entries.values()), tokenizer.note, more)


def check_fit(config: Config, weights: Weights) -> None:
    """Raise a CheckpointError naming every weight that the model of `config` lacks, misses or has in another shape."""
    plain = config.override({"attention_backend": "auto", "operand_kernel": "torch"})  # nothing is computed with it
    model = empty_model(plain, "cpu", training=False, memory="meta")
    load_weights(model, replace(weights, read=lambda name: weights.entries[name].stand_in()))


def _not_kept(opened: OpenedCheckpoint, found: Found) -> str | None:
    end = found.tokenizer.eod if found.tokenizer is not None else None
    return behaviour_note(opened.folder, end) if is_huggingface_folder(opened.folder) else None


def _fill(partial: Path, final: Path, config: Config, weights: Weights, tokenizer: Found) -> Config:
    """Write all but meta.json; returns the configuration, in which the tokenizer is named by its final place."""
    write_safetensors(partial / native.WEIGHTS, weights)
    if tokenizer.tokenizer is not None:
        tokenizer.tokenizer.save(partial / native.TOKENIZER)
        config = config.override(_tokenizer_keys(partial / native.TOKENIZER, final / native.TOKENIZER))
    (partial / native.CONFIG).write_text(config.to_yaml())
    return config


def _tokenizer_keys(saved: Path, final: Path) -> dict[str, Any]:
    """The keys that name a saved tokenizer. They cannot say that another symbol than the usual one ends documents: then
    they name its kind alone.
    """
    description = native.read_json(saved / DESCRIPTION)
    kind = {"tokenizer_type": description["tokenizer_type"]}
    places = {key: description.get(key) for key in ("vocab_file", "merge_file")}
    usual = "eod_symbol" not in description
    return kind | {key: str(final / name) if name and usual else None for key, name in places.items()}


def _meta(opened: OpenedCheckpoint) -> dict[str, Any]:
    imported = {"source": opened.folder.resolve().name, "identity": opened.identity, "step": opened.step}
    if is_huggingface_folder(opened.folder):
        config = native.read_json(opened.folder / CONFIG)
        imported |= {name: config.get(name) for name in ("model_type", "transformers_version")}
    told = {name: value for name, value in imported.items() if value is not None}
    return {"step": STEP, "imported": told, "versions": code_versions()}
