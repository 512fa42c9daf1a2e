"""Resuming from a GPT-NeoX checkpoint: its weights, optimizer, step and schedule become a checkpoint of this run."""

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from megatron_coca.checkpoints import CheckpointError, native, open_checkpoint
from megatron_coca.checkpoints.compare import check_same_architecture, differing_keys
from megatron_coca.checkpoints.native.state import WEIGHT, ParameterSlice, StatePiece, file_name, write_pieces
from megatron_coca.checkpoints.neox.optimizer import STEP, NeoxOptimizer
from megatron_coca.checkpoints.neox.read import NeoxFiles, configure, find_step
from megatron_coca.checkpoints.opened import OpenedCheckpoint, check_fit
from megatron_coca.checkpoints.weights import Weights, write_safetensors
from megatron_coca.config import (
    COMPUTE_KEYS,
    KEYS,
    CheckpointConfig,
    Config,
    adds_norms,
    form_keys,
    stage_at,
    weight_changes,
)
from megatron_coca.model import initial_norms
from megatron_coca.support.errors import why_not_written
from megatron_coca.training.checkpointing.initial_model import check_same_tokenizer
from megatron_coca.training.checkpointing.saving import DTYPES
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.engine.state import ADDED_AT, MOMENTS, moments_of
from megatron_coca.training.opened_stages import OpenedStage
from megatron_coca.training.optimizer import OPTIMIZERS
from megatron_coca.training.randomness import rng_states

COMPARED = {name for name, place in KEYS.items() if place.group == "position"} - COMPUTE_KEYS
"""Position keys. Like the architecture, they must match the checkpoint. The checkpoint's files record no other groups
of keys.
"""


def starts_from_neox(keys: CheckpointConfig) -> bool:
    """Return whether the run resumes from a GPT-NeoX checkpoint in `load`."""
    return keys.load is not None and not keys.finetune and find_step(Path(keys.load)) is not None


def convert_from_neox(stages: Sequence[OpenedStage]) -> Path:
    """Convert the GPT-NeoX checkpoint in `load` to a checkpoint of this run in `save`, and return the new folder.

    The new folder is a checkpoint like any other. With `no_load_optim`, the moments are 0. Random generator states
    and data order are not converted, because this project has its own.

    Raises:
        CheckpointError: the model or optimizer differs, the optimizer state is missing, or the new checkpoint cannot be
            written.
    """
    keys = stages[0].corpus.config.checkpoint
    if keys.save is None:
        raise CheckpointError(
            f"load: {keys.load} is a GPT-NeoX checkpoint, but the run has no folder in which to save a converted copy; "
            "set save=FOLDER, or finetune=true to start from its weights"
        )
    own = {"imports": stages[0].corpus.config.position.imports}
    source, save = open_checkpoint(str(keys.load), step=keys.iteration, overrides=own), Path(keys.save)
    opened = stages[stage_at([each.stage for each in stages], max(0, (source.step or 0) - 1))]
    config = opened.corpus.config
    check_same_architecture(source.folder, source.trained, config)
    check_same_tokenizer(source, config, opened.corpus.tokenizer)
    norms = initial_norms(config.model) if adds_norms(source.trained.model, config.model) else {}
    weights = source.weights().adding(norms)
    optimizer = _same_run(source, config, weights, own)
    meta = _meta(source, opened, optimizer, adds=bool(norms))
    try:
        return _save(save, weights, optimizer, opened.corpus, norms.keys(), meta)
    except BaseException as error:
        native.abandon(save, meta["step"])
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{save}: the state of {source.folder} {why_not_written(error, 'choose another save folder')}"
            ) from error
        raise


def _same_run(
    source: OpenedCheckpoint, config: Config, weights: Weights, own: Mapping[str, Any]
) -> NeoxOptimizer | None:
    """Return the saved optimizer, or None with `no_load_optim`. Raises CheckpointError if the saved run differs."""
    differing = differing_keys(source.trained, config, frozenset(KEYS) - COMPARED | form_keys(source.trained, config))
    differing += [f"{key} ({reason})" for key, reason in weight_changes(source.trained, config)]
    if not differing:
        check_fit(config, weights)
    optimizer = None
    if not config.checkpoint.no_load_optim:
        optimizer = NeoxOptimizer(source.folder, *configure(source.folder, NeoxFiles(source.folder), own))
        differing += _differing_options(optimizer, config)
    if differing:
        raise CheckpointError(
            f"{source.folder}: cannot be resumed with a different {', '.join(differing)}; "
            "restore these values, or start a new run from its weights with finetune=true"
        )
    return optimizer


def _meta(source: OpenedCheckpoint, opened: OpenedStage, optimizer: NeoxOptimizer | None, adds: bool) -> dict[str, Any]:
    """Return the content of meta.json. `adds`: whether the run adds norms of queries and keys."""
    step, count = source.step or 0, optimizer.step if optimizer is not None else 0.0
    return {
        "step": step,
        "run": uuid4().hex,
        "origin": source.identity,
        "data": opened.corpus.identity,
        **opened.shared,
        "topology": {},  # no run has this layout, so every rank draws new dropout masks
        "counters": {STEP: count} | ({ADDED_AT: count} if adds else {}),
        "progress": {},
        "mixture": [asdict(share) for share in opened.corpus.mixture(step, opened.sizes.total)],
        "versions": native.code_versions(),
    }


def _save(
    save: Path,
    weights: Weights,
    optimizer: NeoxOptimizer | None,
    corpus: Corpus,
    added: Collection[str],
    meta: dict[str, Any],
) -> Path:
    partial, config = native.begin(save, meta["step"]), corpus.config
    _write_state(partial, weights, optimizer, config, added)
    write_safetensors(partial / native.WEIGHTS, weights.to(DTYPES[config.precision.dtype]))
    (partial / native.CONFIG).write_text(config.record(), encoding="utf-8")
    native.write_json(partial / native.META, meta)
    if corpus.tokenizer is not None:
        corpus.tokenizer.save(partial / native.TOKENIZER)
    return native.commit(save, meta["step"])


def _differing_options(optimizer: NeoxOptimizer, config: Config) -> list[str]:
    """Return a line for each optimizer option that differs from the configured value."""
    own = config.optimizer
    moments = set(MOMENTS[OPTIMIZERS[own.type]])
    if optimizer.moments != moments:
        return [f"optimizer.type (saved {' and '.join(sorted(optimizer.moments)) or 'no moments'}, now {own.type!r})"]
    now = {"betas": own.betas, "eps": own.eps, "weight_decay": own.weight_decay}
    names = {"betas": "optimizer.params.betas", "eps": "optimizer.params.eps", "weight_decay": "weight_decay"}
    options = {name: tuple(value) if name == "betas" else value for name, value in optimizer.options.items()}
    return [
        f"{names[name]} (saved {value!r}, now {now[name]!r})" for name, value in options.items() if value != now[name]
    ]


def _write_state(
    folder: Path, weights: Weights, optimizer: NeoxOptimizer | None, config: Config, added: Collection[str]
) -> None:
    """Write `state/`, with one file per block, and the random state, which every checkpoint must contain. The saved
    optimizer has no states for the weights in `added`.
    """
    (folder / native.STATE).mkdir()
    (folder / native.RNG).mkdir()
    buffer = io.BytesIO()
    torch.save(rng_states(), buffer)
    (folder / native.RNG / "rank_0.pt").write_bytes(buffer.getvalue())
    for number, (_, names) in enumerate(groupby(weights.entries, key=lambda name: name.split(".")[:2])):
        pieces, slices = [], {}
        for name in names:
            plain = weights.read(name).float()
            slices[name] = ParameterSlice(tuple(plain.shape))
            for kind in (WEIGHT, *moments_of(OPTIMIZERS[config.optimizer.type], name)):
                default = plain if kind == WEIGHT else torch.zeros_like(plain)
                found = optimizer.read(kind, name) if optimizer is not None and name not in added else default
                pieces.append(StatePiece(name, kind, 0, found.reshape(-1).contiguous()))
        write_pieces(folder / native.STATE / file_name(number), pieces, slices)
