"""GPT-NeoX's checkpoint layout, read and written. Its facts are those of EleutherAI/gpt-neox at commit ea7aefd8."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.neox_config import COMPUTED, CONFIGS, foreign_keys, read_config, reasons
from megatron_coca.checkpoints.neox_layout import (
    EMBEDDING,
    FIRST_BLOCK,
    WORDS,
    Held,
    NeoxLocation,
    buffers,
    layers,
    table,
)
from megatron_coca.checkpoints.pickles import RANDOM_STATE, load, tensors
from megatron_coca.checkpoints.weights import WeightEntry, Weights
from megatron_coca.config import Config
from megatron_coca.neox_plugin.checkpoints import plain_name

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
ZERO_3_FILE = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
STEP = re.compile(r"global_step(\d+)")
SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")
SAMPLE = 1 << 16
"""Bytes at either end of a file that its identity depends on; the checksums of all tensors are among the last ones."""


class Files(Protocol):
    """The weights' files of one checkpoint.

    Attributes:
        paths: all of them, by name.
        from_plugin: whether the blocks opened so far were saved by the plugin, under its names.
    """

    paths: list[Path]
    from_plugin: bool

    def layers(self) -> Iterable[int]:
        """The layers that are there, by number."""

    def ranks(self) -> set[int]:
        """The tensor ranks that any file is of."""

    def named(self, layer: int, rank: int) -> Path:
        """The file, there or not, of a layer."""

    def state(self, layer: int, rank: int) -> Mapping[str, Tensor]:
        """The weights of a layer by GPT-NeoX's names, also where the plugin has saved them under others. Raises
        CheckpointError where there are none.
        """


class LayerFiles:
    """A file for each layer and tensor rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths, self.from_plugin = _matching(folder, LAYER_FILE), False
        self._found = [tuple(map(int, _groups(LAYER_FILE, path))) for path in self.paths]

    def layers(self) -> Iterable[int]:
        return {layer for layer, _ in self._found}

    def ranks(self) -> set[int]:
        return {rank for _, rank in self._found}

    def named(self, layer: int, rank: int) -> Path:
        return self._folder / f"layer_{layer:02}-model_{rank:02}-model_states.pt"

    def state(self, layer: int, rank: int) -> Mapping[str, Tensor]:
        path = self.named(layer, rank)
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; copy all files of the checkpoint")
        found = tensors(load(path), path)
        self.from_plugin = self.from_plugin or any(name != plain_name(name) for name in found)
        return {plain_name(name): tensor for name, tensor in found.items()}


class RankFiles:
    """A file for each tensor rank, with all layers in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths, self.from_plugin = _matching(folder, RANK_FILE), False
        self._opened: dict[int, dict[int, dict[str, Tensor]]] = {}

    def layers(self) -> Iterable[int]:
        return self._layers(min(self.ranks()))

    def ranks(self) -> set[int]:
        return {int(*_groups(RANK_FILE, path)) for path in self.paths}

    def named(self, layer: int, rank: int) -> Path:
        return self._folder / f"mp_rank_{rank:02}_model_states.pt"

    def state(self, layer: int, rank: int) -> Mapping[str, Tensor]:
        return self._layers(rank).get(layer, {})

    def _layers(self, rank: int) -> dict[int, dict[str, Tensor]]:
        if rank not in self._opened:
            self._opened[rank] = self._open(self.named(0, rank))
        return self._opened[rank]

    def _open(self, path: Path) -> dict[int, dict[str, Tensor]]:
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; copy all files of the checkpoint")
        content = load(path, RANDOM_STATE)
        module = content.get("module")
        if not isinstance(module, dict):
            raise CheckpointError(f"{path}: holds no weights, and there are no layer_<N> files beside it")
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors(module, path).items():
            match = SEQUENTIAL.fullmatch(name)
            if match is None:
                raise CheckpointError(f"{path}: {name} is in no layer (names begin with sequential.<N>)")
            self.from_plugin = self.from_plugin or name != plain_name(name)
            found.setdefault(int(match.group(1)), {})[plain_name(match.group(2))] = tensor
        return found


def find_step(path: Path) -> Path | None:
    """The folder of one step that `path` means, if it is GPT-NeoX's: itself, or of a save folder what `latest` names,
    without that the last step. Folders of ours have a manifest.
    """
    if is_step(path):
        return path
    name = native.read_latest(path)
    named = path / name if name is not None else path
    if named != path and os.path.isfile(named / native.MANIFEST):
        return None
    if named != path and is_step(named):
        return named
    steps = [native.step_folder(path, step) for step in native.begun_steps(path)]
    theirs = [folder for folder in steps if is_step(folder)]
    return theirs[-1] if theirs and not native.steps(path) else None


def is_step(folder: Path) -> bool:
    """Whether a folder is one step of GPT-NeoX's; not where it cannot be listed."""
    if not os.path.isdir(folder) or os.path.isfile(folder / native.MANIFEST):
        return False
    try:
        return any(_matching(folder, kind) for kind in (LAYER_FILE, RANK_FILE, ZERO_3_FILE))
    except OSError:
        return False


def step_of(folder: Path) -> int | None:
    """The completed iterations that a step's folder is named after; None where it has another name."""
    match = STEP.fullmatch(folder.resolve().name)
    return int(match.group(1)) if match else None


def open_files(folder: Path) -> Files:
    """The files of a step's folder, whichever way they are divided. Raises CheckpointError."""
    if _matching(folder, LAYER_FILE):
        return LayerFiles(folder)
    if not _matching(folder, RANK_FILE):
        raise CheckpointError(
            f"{folder}: was saved under ZeRO 3, whose weights are in pieces; save it again under ZeRO 2 or less"
        )
    return RankFiles(folder)


def identity(files: Files) -> str:
    """A sha256 that other weights do not have: of names, sizes, and both ends of every file."""
    digest = hashlib.sha256()
    for path in files.paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE))
            file.seek(max(size - SAMPLE, 0))
            digest.update(file.read())
    return digest.hexdigest()


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _groups(pattern: re.Pattern[str], path: Path) -> tuple[str, ...]:
    match = pattern.fullmatch(path.name)
    assert match is not None, f"{path} was found by this pattern"
    return match.groups()


DOCUMENT_END = "<|endoftext|>"
"""What all of GPT-NeoX's tokenizers but that of bytes look for; SentencePiece's gives its unknown token without it."""

States = Sequence[Mapping[str, Tensor]]
"""A layer's weights, rank by rank."""


def configure(folder: Path, files: Files) -> tuple[Config, int]:
    """The model's configuration and its number of tensor ranks.

    Raises:
        CheckpointError: the configuration is absent, describes another network than this package has, or other files
            than there are.
    """
    ranks = max(files.ranks()) + 1
    parts = [files.state(EMBEDDING, rank) for rank in range(ranks)]
    if any(WORDS not in part for part in parts):
        raise CheckpointError(f"{files.named(EMBEDDING, 0)}: has no {WORDS}")
    config, expected = read_config(folder, sum(part[WORDS].shape[0] for part in parts))
    if expected != ranks:
        raise CheckpointError(
            f"{folder}: has files of {ranks} tensor ranks, its configuration says model_parallel_size: {expected}"
        )
    against = reasons(config, COMPUTED)
    if against:
        raise CheckpointError(f"{folder}: is computed otherwise by GPT-NeoX: {'; '.join(against)}")
    _check_layers(folder, files, config)
    files.state(FIRST_BLOCK, 0)
    if files.from_plugin and not foreign_keys(config):
        raise CheckpointError(
            f"{folder}: its weights were trained with the attention of the GPT-NeoX plugin, but its {CONFIGS} say "
            f"pos_emb: {config.position.pos_emb} and no more; put the YAML files that it was trained with there"
        )
    return config, ranks


def _check_layers(folder: Path, files: Files, config: Config) -> None:
    present, needed = set(files.layers()), {place.layer for place in table(config)}
    for layer in sorted(needed - present):
        raise CheckpointError(f"{folder}: has no layer {layer:02} ({files.named(layer, 0).name}), {_size(config)}")
    for layer in sorted(present - set(layers(config.model))):
        raise CheckpointError(f"{folder}: has a layer {layer:02} that no part of the model is, {_size(config)}")


def _size(config: Config) -> str:
    head = "untied" if config.model.no_weight_tying else "tied"
    return f"where its configuration says {config.model.num_layers} blocks and an output head that is {head}"


def open_weights(folder: Path, files: Files, config: Config, ranks: int) -> Weights:
    """The weights of our model, in the dtype on disk.

    Raises:
        CheckpointError: a file is missing or damaged, a name is unknown, or ranks do not fit together.
    """
    known, kept = table(config), buffers(config)
    places: dict[str, list[NeoxLocation]] = {}
    entries: dict[str, WeightEntry] = {}
    for layer in sorted(files.layers()):
        states = [files.state(layer, rank) for rank in range(ranks)]
        for place in _places(states, layer, files):
            if place in kept and place not in known:
                continue
            if place not in known:
                raise CheckpointError(f"{files.named(layer, 0)}: {place.name} is a weight that the model does not have")
            held = known[place]
            if held.used:
                entries.setdefault(held.ours, _entry(states, place, held, files))
                places.setdefault(held.ours, []).append(place)

    @lru_cache(maxsize=1)  # the weights of a layer are asked for one after the other
    def opened(layer: int) -> States:
        return [files.state(layer, rank) for rank in range(ranks)]

    def merged(place: NeoxLocation) -> Tensor:
        return known[place].division.merge([state[place.name] for state in opened(place.layer)], str(place))

    def read(name: str) -> Tensor:
        first, *others = places[name]
        whole = merged(first)
        for other in others:
            if not torch.equal(merged(other), whole):
                raise CheckpointError(f"{folder}: {first} and {other} differ; they are one weight of the model")
        return whole

    return Weights(entries, read, folder)


def _places(states: States, layer: int, files: Files) -> list[NeoxLocation]:
    """What lies in a layer, which all ranks must have alike."""
    for rank, state in enumerate(states):
        differing = sorted(state.keys() ^ states[0].keys())
        if differing:
            raise CheckpointError(f"{files.named(layer, rank)}: {differing[0]} is not on all tensor ranks")
    return [NeoxLocation(layer, name) for name in states[0]]


def _entry(states: States, place: NeoxLocation, held: Held, files: Files) -> WeightEntry:
    parts = [state[place.name] for state in states]
    kinds = {(part.dtype, tuple(part.shape)) for part in parts}
    if len(kinds) > 1:
        raise CheckpointError(f"{files.named(place.layer, 0)}: {place.name} has another shape or dtype on other ranks")
    ((dtype, shape),) = kinds
    if not held.division.fits(shape, len(parts)):
        raise CheckpointError(
            f"{files.named(place.layer, 0)}: {place.name} is {list(shape)} on each of {len(parts)} tensor ranks, which "
            "does not fit the configuration"
        )
    return WeightEntry(dtype, held.division.whole(shape, len(parts)))
