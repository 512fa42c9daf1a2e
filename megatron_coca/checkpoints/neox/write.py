"""Export checkpoints as GPT-NeoX save folders.

An exported folder has weights, but no optimizer state and no random states. Load it with `finetune: true`, or with
`no_load_optim: true` and `no_load_rng: true`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.export_check import check_folder, check_import, excerpt
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.neox.layout import (
    CONFIGS,
    MODEL_FILE,
    NEOX_KEYS,
    cannot_hold,
    computed_differently,
    foreign_keys,
    layers,
    model_yaml,
    table,
)
from megatron_coca.checkpoints.neox.names import FOREIGN, RECORD, record_of, saved_name
from megatron_coca.checkpoints.neox.read import open_step
from megatron_coca.checkpoints.opened import OpenedCheckpoint, check_fit
from megatron_coca.checkpoints.unsupported import SHAPE_KEYS, lost_keys
from megatron_coca.checkpoints.weights import DTYPES, Weights
from megatron_coca.config import Config
from megatron_coca.config.source import Overrides
from megatron_coca.data.tokenizers import Tokenizer, load_saved_tokenizer
from megatron_coca.support.errors import InputError
from megatron_coca.work.folders import atomic_dir, is_complete

WITH_REASONS = ("use_bias_in_norms", "attention_output_gate")
"""Keys that GPT-NeoX lacks and for which `cannot_hold` returns a more precise reason."""


@dataclass(frozen=True)
class ExportedNeox:
    """Result of an export to GPT-NeoX.

    Attributes:
        folder: the save folder, for GPT-NeoX's key `load`.
        step: the only step folder in `folder`.
        foreign: keys of the exported configuration that stock GPT-NeoX does not support.
        note: a note about the tokenizer, or None.
    """

    folder: Path
    step: Path
    foreign: tuple[str, ...]
    note: str | None


def export(
    opened: OpenedCheckpoint,
    folder: Path,
    overrides: Overrides = (),
    dtype: str | None = None,
    model_parallel_size: int = 1,
    pipe_parallel_size: int = 1,
) -> ExportedNeox:
    """Export a checkpoint as a GPT-NeoX save folder.

    Args:
        opened: the checkpoint, of any layout.
        folder: the folder to write. After an error it does not exist. If it exists and holds this export already, it is
            compared with the source again, and nothing is written.
        overrides: config overrides, as for `load_model`.
        dtype: dtype of the exported weights. By default, they are copied bit by bit.
        model_parallel_size: number of tensor-parallel ranks, each with its own files. GPT-NeoX must run with the same
            number.
        pipe_parallel_size: 1 writes a file for each layer, which runs with any `pipe_parallel_size` of 1 or more can
            load. 0 writes all layers of a rank into one file, for runs with `pipe_parallel_size: 0`.

    Raises:
        CheckpointError: the checkpoint is invalid, GPT-NeoX cannot represent the model, the model cannot be divided
            among the ranks, or `folder` has other content or cannot be written. Nothing is written then.
        ConfigError: an override is invalid.
        DataError: the tokenizer of the overrides or of the checkpoint cannot be opened.
    """
    config, ranks = opened.configure(overrides), model_parallel_size
    if reasons := _reasons(config, ranks, pipe_parallel_size):
        raise CheckpointError(f"{opened.folder}: GPT-NeoX's layout cannot represent the model: {'; '.join(reasons)}")
    weights = opened.weights()
    check_fit(config, weights)
    tokenizer, tokenizer_note = opened.tokenizer(overrides)
    weights = weights if dtype is None else weights.to(DTYPES[dtype])
    foreign, number = foreign_keys(config), opened.step or 0
    name = native.step_folder(folder, number).name
    done = ExportedNeox(folder, folder / name, tuple(foreign), tokenizer_note)
    texts = {f"{name}/{CONFIGS}/{MODEL_FILE}": model_yaml(config, ranks, pipe_parallel_size), native.LATEST: name}
    if is_complete(folder, {path: text.encode() for path, text in texts.items()}, CheckpointError):
        _compare_again(folder / name, config, weights, tokenizer)
        return done
    with atomic_dir(folder, CheckpointError) as partial, weights.shown(f"exporting {folder}") as weights:
        step = partial / name
        (step / CONFIGS).mkdir(parents=True)
        for path, text in texts.items():
            (partial / path).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(step / native.TOKENIZER)
        _write_weights(step, config, weights, _rank_state(config, ranks, number), pipe_parallel_size > 0)
        _read_back(step, config, weights)
    return done


def _compare_again(step: Path, config: Config, weights: Weights, tokenizer: Tokenizer | None) -> None:
    """Compare an export by an earlier process with the source. Raises CheckpointError if they differ."""
    try:
        saved = step / native.TOKENIZER
        found = load_saved_tokenizer(saved).fingerprint if saved.is_dir() else None
        if found != (None if tokenizer is None else tokenizer.fingerprint):
            raise CheckpointError("another tokenizer")
        _read_back(step, config, weights)
    except InputError as error:
        raise CheckpointError(
            f"{step.parent}: exists already ({error}); name a new folder, or remove this one"
        ) from error


def _read_back(step: Path, config: Config, weights: Weights) -> None:
    """Import the written step folder and compare it with the source. Raises CheckpointError if they differ."""
    check_import(check_folder(step, open_step, config, weights), excerpt(config, weights))


def _reasons(config: Config, ranks: int, pipe_parallel_size: int) -> list[str]:
    """Return the reasons why GPT-NeoX cannot represent the model or would compute other results."""
    lost = [*lost_keys(config, SHAPE_KEYS | {*NEOX_KEYS, *FOREIGN, *WITH_REASONS})]
    if config.position.sliding_window_width is not None and pipe_parallel_size == 0:
        lost.append("sliding_window_width: GPT-NeoX ignores it with pipe_parallel_size 0; set pipe_parallel_size to 1")
    return lost + computed_differently(config, ranks) + cannot_hold(config, ranks)


def _layer_states(config: Config, weights: Weights, ranks: int) -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
    """Yield the number of each layer and its state dict on every rank.

    The state dicts have the plugin's weight names if the model needs the plugin.
    """
    foreign, entries = bool(foreign_keys(config)), table(config)
    dtype = next(iter(weights.entries.values())).dtype
    for layer in layers(config.model):
        states: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        for location, weight in entries.items():
            if location.layer != layer:
                continue
            if weight.ours is not None and weight.ours in weights.entries:
                whole, name = weights.read(weight.ours), saved_name(location.name) if foreign else location.name
            elif weight.values is not None:
                whole, name = weight.values.to(dtype), location.name
            else:
                continue
            for state, part in zip(states, weight.sharding.split(whole, ranks), strict=True):
                state[name] = part.clone(memory_format=torch.contiguous_format)  # a view would save its whole storage
        yield layer, states


def _write_weights(step: Path, config: Config, weights: Weights, state: dict[str, Any], in_files: bool) -> None:
    """Write one file per rank with `state` and all layers. If `in_files`, write each layer to its own file instead."""
    ranks = state["mp_world_size"]
    modules: list[dict[str, Tensor]] = [OrderedDict() for _ in range(ranks)]
    for layer, states in _layer_states(config, weights, ranks):
        for rank, tensors in enumerate(states):
            if in_files:
                _save(OrderedDict(tensors), step / f"layer_{layer:02}-model_{rank:02}-model_states.pt")
            else:
                modules[rank] |= {f"sequential.{layer}.{key}": tensor for key, tensor in tensors.items()}
    for rank, module in enumerate(modules):
        _save({"module": None if in_files else module} | state, step / f"mp_rank_{rank:02}_model_states.pt")


def _rank_state(config: Config, ranks: int, step: int) -> dict[str, Any]:
    """Return the entries of a rank's file, in addition to the weights, that DeepSpeed and GPT-NeoX read.

    GPT-NeoX compares `args` with its configuration, so `args` contains only keys that the weights depend on.
    """
    names = ["num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"]
    names += ["max_position_embeddings"] * (config.position.pos_emb == "learned")
    args = {name: getattr(config.model, name) for name in names} | {"model_parallel_size": ranks}
    return {
        "optimizer": None,
        "lr_scheduler": None,
        "global_steps": step,
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": ranks,
        "iteration": step,
        "args": args | ({RECORD: record_of(config)} if foreign_keys(config) else {}),
    }


def _save(content: dict[str, Any], path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # PyTorch raises RuntimeError if the disk is full
        raise OSError(f"{path.name}: {error}") from error
