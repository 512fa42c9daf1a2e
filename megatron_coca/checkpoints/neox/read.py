"""Read GPT-NeoX checkpoints: find a step, open its files, and read its weights under our names."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.files import CheckpointError, UnreadableError
from megatron_coca.checkpoints.identity import pickles_identity
from megatron_coca.checkpoints.neox.layout import (
    CONFIGS,
    EMBEDDING,
    FIRST_BLOCK,
    WORDS,
    NeoxLocation,
    NeoxWeight,
    computed_differently,
    foreign_keys,
    layers,
    read_config,
    table,
)
from megatron_coca.checkpoints.neox.names import plain_name
from megatron_coca.checkpoints.opened import OpenedCheckpoint
from megatron_coca.checkpoints.weights import RANDOM_STATE, WeightEntry, Weights, load_pickle
from megatron_coca.config import Config
from megatron_coca.config.source import Overrides
from megatron_coca.support.regular_files import open_regular

DOCUMENT_END = "<|endoftext|>"
"""End-of-document token of all GPT-NeoX tokenizers except the byte-level one. A SentencePiece model without this token
uses its unknown token.
"""

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
ZERO_3_FILE = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
STEP = re.compile(r"global_step(\d+)")
SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")


def find_step(path: Path) -> Path | None:
    """Return the GPT-NeoX step folder at `path`: the path itself, or a step in a save folder.

    In a save folder, this is the step that the file `latest` names, else the last step. Return None for other folders,
    including native checkpoints, which have a manifest.
    """
    if is_step(path):
        return path
    name = native.read_latest(path)
    if name is not None:
        if os.path.isfile(path / name / native.MANIFEST):
            return None
        if is_step(path / name):
            return path / name
    steps = [native.step_folder(path, step) for step in native.begun_steps(path)]
    theirs = [folder for folder in steps if is_step(folder)]
    return theirs[-1] if theirs and not native.steps(path) else None


def is_step(folder: Path) -> bool:
    """Return whether a folder is a GPT-NeoX step folder; False if it cannot be listed."""
    if not os.path.isdir(folder) or os.path.isfile(folder / native.MANIFEST):
        return False
    try:
        return any(matching(folder, kind) for kind in (LAYER_FILE, RANK_FILE, ZERO_3_FILE))
    except OSError:
        return False


def step_of(folder: Path) -> int | None:
    """Return the iteration in the name of a step folder, or None for any other name."""
    match = STEP.fullmatch(folder.resolve().name)
    return int(match.group(1)) if match else None


def matching(folder: Path, pattern: re.Pattern[str]) -> dict[Path, tuple[int, ...]]:
    """Return the files in a folder that match `pattern`, sorted, each with the numbers in its name."""
    matches = {path: pattern.fullmatch(path.name) for path in sorted(folder.iterdir())}
    return {path: tuple(map(int, match.groups())) for path, match in matches.items() if match is not None}


class NeoxFiles:
    """The weight files of one step: one file for each layer and tensor rank, or one file for each tensor rank.

    Attributes:
        paths: all files, sorted by name.
        by_layer: whether each layer has its own files.
        from_plugin: whether any block opened so far has the weight names of the GPT-NeoX plugin.
    """

    def __init__(self, folder: Path) -> None:
        """Find the files. Raises CheckpointError if the step was saved with ZeRO 3, or if a file cannot be read."""
        self._folder = folder
        by_layer, by_rank = matching(folder, LAYER_FILE), matching(folder, RANK_FILE)
        if not by_layer and not by_rank:
            raise CheckpointError(
                f"{folder}: saved with ZeRO 3, which partitions weights; save it with ZeRO 2 or lower"
            )
        self.by_layer = bool(by_layer)
        self._numbers = (by_layer or by_rank).values()
        self.paths, self.from_plugin = list(by_layer or by_rank), False
        for path in self.paths:
            try:
                open_regular(path).close()
            except OSError as error:
                raise UnreadableError.of(path, error) from error
        self._opened: dict[int, dict[int, dict[str, Tensor]]] = {}

    def ranks(self) -> set[int]:
        """Return the tensor ranks that have files."""
        return {numbers[-1] for numbers in self._numbers}

    def layers(self) -> set[int]:
        """Return the numbers of the layers that have weights in the files."""
        return {layer for layer, _ in self._numbers} if self.by_layer else set(self._rank(min(self.ranks())))

    def path(self, layer: int, rank: int) -> Path:
        """Return the path of the file with a layer's weights. The file may be missing."""
        stem = f"layer_{layer:02}-model_{rank:02}-" if self.by_layer else f"mp_rank_{rank:02}_"
        return self._folder / f"{stem}model_states.pt"

    def state(self, layer: int, rank: int) -> Mapping[str, Tensor]:
        """Return a layer's weights under GPT-NeoX's names, even if the plugin saved them under different names.

        Raises CheckpointError if the file is missing or damaged.
        """
        if not self.by_layer:
            return self._rank(rank).get(layer, {})
        path = self._present(layer, rank)
        saved = _tensors(load_pickle(path), path)
        self.from_plugin = self.from_plugin or any(name != plain_name(name) for name in saved)
        return {plain_name(name): tensor for name, tensor in saved.items()}

    def _present(self, layer: int, rank: int) -> Path:
        path = self.path(layer, rank)
        if not path.is_file():
            raise CheckpointError(f"{path}: not found; copy all files of the checkpoint")
        return path

    def _rank(self, rank: int) -> dict[int, dict[str, Tensor]]:
        """Return the weights of all layers on a rank. The rank's file is opened only once."""
        if rank in self._opened:
            return self._opened[rank]
        path = self._present(EMBEDDING, rank)
        module = load_pickle(path, RANDOM_STATE).get("module")
        if not isinstance(module, dict):
            raise CheckpointError(f"{path}: has no weights, and there are no layer_<N> files; copy all files again")
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _tensors(module, path).items():
            match = SEQUENTIAL.fullmatch(name)
            if match is None:
                raise CheckpointError(
                    f"{path}: the name of {name} does not begin with sequential.<N>; copy the file again"
                )
            self.from_plugin = self.from_plugin or name != plain_name(name)
            states.setdefault(int(match.group(1)), {})[plain_name(match.group(2))] = tensor
        self._opened[rank] = states
        return states


def _tensors(content: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights in a mapping. Raises CheckpointError if an entry is not a floating-point tensor."""
    wrong = [name for name, value in content.items() if not isinstance(value, Tensor) or not value.is_floating_point()]
    if wrong:
        raise CheckpointError(f"{path}: {wrong[0]} is not a floating-point tensor; copy the file again")
    return dict(content)


def configure(
    folder: Path, files: NeoxFiles, overrides: Overrides = (), given: Sequence[str | Path] = ()
) -> tuple[Config, int]:
    """Return the model's configuration and its number of tensor ranks.

    `overrides` and the YAML files `given` come from the user, and only their key `imports` is read.

    Raises CheckpointError if the configuration is missing, describes an unsupported network, or does not fit the files.
    """
    ranks = max(files.ranks()) + 1
    states = [files.state(EMBEDDING, rank) for rank in range(ranks)]
    if any(WORDS not in state for state in states):
        raise CheckpointError(f"{files.path(EMBEDDING, 0)}: has no {WORDS}; copy the file again")
    config, expected = read_config(folder, sum(state[WORDS].shape[0] for state in states), overrides, given)
    if expected != ranks:
        raise CheckpointError(
            f"{folder}: has the files of {ranks} tensor ranks, but model_parallel_size is {expected} in {CONFIGS}; "
            f"copy the files of all ranks, or correct {CONFIGS}"
        )
    if reasons := computed_differently(config, ranks):
        raise CheckpointError(f"{folder}: GPT-NeoX computes other results than this project: {'; '.join(reasons)}")
    present, needed = files.layers(), {location.layer for location in table(config)}
    if differing := sorted((needed - present) | (present - set(layers(config.model)))):
        raise CheckpointError(
            f"{folder}: layer {differing[0]:02} ({files.path(differing[0], 0).name}) is either in the files or in "
            f"{CONFIGS}, but not in both; copy all files, or correct num_layers ({config.model.num_layers}) or "
            f"no_weight_tying ({config.model.no_weight_tying})"
        )
    files.state(FIRST_BLOCK, 0)  # sets from_plugin
    if files.from_plugin and not foreign_keys(config):
        raise CheckpointError(
            f"{folder}: the weights were trained with the attention of the GPT-NeoX plugin, but {CONFIGS} has "
            f"pos_emb: {config.position.pos_emb} and no other position keys; copy the YAML files of the training run "
            f"to {CONFIGS}"
        )
    ignored = not files.by_layer and not files.from_plugin and "flash" not in str(config.model.attention_config)
    if config.position.sliding_window_width is not None and ignored:
        raise CheckpointError(
            f"{folder}: sliding_window_width: ignored by GPT-NeoX's global attention in training with "
            f"pipe_parallel_size 0; remove the key from {CONFIGS}"
        )
    return config, ranks


def open_weights(folder: Path, files: NeoxFiles, config: Config, ranks: int) -> Weights:
    """Open the weights under our names, in the dtype on disk.

    Raises CheckpointError if a file is missing or damaged, if a weight is unknown, or if the files of different ranks
    do not match.
    """
    known = table(config)
    locations: dict[str, list[NeoxLocation]] = {}
    entries: dict[str, WeightEntry] = {}
    for layer in sorted(files.layers()):
        states = [files.state(layer, rank) for rank in range(ranks)]
        for rank, state in enumerate(states):
            differing = sorted(state.keys() ^ states[0].keys())
            if differing:
                raise CheckpointError(
                    f"{files.path(layer, rank)}: {differing[0]} is missing on some tensor ranks; copy the files of all "
                    "ranks again"
                )
        for name in states[0]:
            location = NeoxLocation(layer, name)
            if location not in known:
                raise CheckpointError(f"{files.path(layer, 0)}: the model has no weight {name}; fix {CONFIGS}")
            weight = known[location]
            if weight.used and weight.ours is not None:
                locations.setdefault(weight.ours, []).append(location)
                entry = _entry([state[name] for state in states], weight, location, files)
                entries.setdefault(weight.ours, entry)

    @lru_cache(maxsize=1)  # the weights of one layer are read in succession
    def opened(layer: int) -> list[Mapping[str, Tensor]]:
        return [files.state(layer, rank) for rank in range(ranks)]

    def merged(location: NeoxLocation) -> Tensor:
        parts = [state[location.name] for state in opened(location.layer)]
        return known[location].sharding.merge(parts, str(location))

    def read(name: str) -> Tensor:
        first, *others = locations[name]
        whole = merged(first)
        for other in others:
            if not torch.equal(merged(other), whole):
                raise CheckpointError(
                    f"{folder}: {first} and {other} differ, but are the same weight in the model; copy the files again"
                )
        return whole

    return Weights(entries, read, folder)


def _entry(parts: Sequence[Tensor], weight: NeoxWeight, location: NeoxLocation, files: NeoxFiles) -> WeightEntry:
    path, ranks = files.path(location.layer, 0), len(parts)
    kinds = {(part.dtype, tuple(part.shape)) for part in parts}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{path}: {location.name} has other shapes or dtypes on other ranks; copy the files of all ranks again"
        )
    ((dtype, shape),) = kinds
    whole = weight.sharding.whole_shape(shape, ranks)
    if whole is None:
        raise CheckpointError(
            f"{path}: {location.name} has shape {list(shape)} on each of {ranks} tensor ranks, which does not fit the "
            f"configuration; correct {CONFIGS}"
        )
    return WeightEntry(dtype, whole)


def open_step(folder: Path, overrides: Overrides = (), given: Sequence[str | Path] = ()) -> OpenedCheckpoint:
    """Open a GPT-NeoX step folder. `overrides` and `given` are described in `configure`. Raises CheckpointError."""
    files = NeoxFiles(folder)
    config, ranks = configure(folder, files, overrides, given)
    tokenizer = folder / native.TOKENIZER
    return OpenedCheckpoint(
        folder=folder,
        trained=config,
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
        step=step_of(folder),
        identify=partial(pickles_identity, config, files.paths),
        weights=partial(open_weights, folder, files, config, ranks),
        document_end=DOCUMENT_END,
    )
