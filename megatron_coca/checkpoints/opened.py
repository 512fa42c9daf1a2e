"""Opened checkpoints of any layout, and models with their weights."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn as nn

from megatron_coca.checkpoints.compare import check_same_model, extension_note
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.tokenizer import Found, find_tokenizer, largest_named_id, read_tokenizer
from megatron_coca.checkpoints.weights import Weights
from megatron_coca.config import Config
from megatron_coca.config.source import Overrides, given_values
from megatron_coca.model import GPT, empty_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode.

    Attributes:
        model: the model, on the requested device; float32 unless another dtype was requested.
        config: the resolved configuration, including overrides.
        tokenizer_folder: folder of the tokenizer that was saved with the weights, or None.
        step: number of completed optimizer steps, or None for a Hugging Face folder.
        identify: a function that computes `identity`.
    """

    model: GPT
    config: Config
    tokenizer_folder: Path | None
    step: int | None
    identify: Callable[[], str] = field(repr=False, compare=False)

    @cached_property
    def identity(self) -> str:
        """A digest of the checkpoint's content.

        For native checkpoints, it is the sha256 of the weights file. For other layouts, it is a digest of the
        configuration and the weights, with large weights sampled (identity.py).
        """
        return self.identify()


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A valid checkpoint, which can be loaded with different config overrides.

    Attributes:
        folder: folder of the checkpoint.
        trained: configuration that the weights were trained with.
        tokenizer_folder, step, identify, identity: see `LoadedModel`.
        weights: a function that opens the weights, in the dtype on disk.
        also_free: keys that overrides may change for this checkpoint but not for every checkpoint.
        guessed: keys of `trained` that were guessed -> a warning, which is logged once if no override sets the key.
        document_end: the token that ended documents in training, or None if it is unknown.
        imported: facts about the source of an imported checkpoint.
        changed_imports: the user's method files that have changed since training.
        packed_tokenizer: a function that writes the tokenizer inside the weights file to a folder, under transformers'
            file names; None if the weights file has no tokenizer.
        settings: the content of config.json for the text network in a Hugging Face folder; None for other layouts.
        base: the model that the adapters in a native checkpoint change; None if it has no adapters.
        own_weights: with adapters, a function that opens the weights that the checkpoint itself contains.
    """

    folder: Path
    trained: Config
    tokenizer_folder: Path | None
    step: int | None
    identify: Callable[[], str] = field(repr=False, compare=False)
    weights: Callable[[], Weights]
    also_free: frozenset[str] = frozenset()
    guessed: dict[str, str] = field(default_factory=dict)
    document_end: str | None = None
    imported: Mapping[str, Any] = field(default_factory=dict)
    changed_imports: tuple[str, ...] = ()
    packed_tokenizer: Callable[[Path], None] | None = None
    settings: Mapping[str, Any] | None = field(default=None, repr=False)
    base: "OpenedCheckpoint | None" = None
    own_weights: Callable[[], Weights] | None = None

    @cached_property
    def identity(self) -> str:
        """The digest described in `LoadedModel`, computed on first use."""
        return self.identify()

    def configure(self, overrides: Overrides = (), files: Sequence[str | Path] = ()) -> Config:
        """Apply YAML files and then overrides to `trained`, and return the result.

        A warning is logged if the result changes the frequency extension or combines it with another method.
        Raises CheckpointError if the result does not fit the weights, and ConfigError if it is invalid.
        """
        config = self.trained.override(overrides, files)
        check_same_model(self.folder, self.trained, config, self.also_free)
        given = given_values(overrides, files).keys()
        for key in self.guessed.keys() - given:
            logger.warning(self.guessed.pop(key))
        if (note := extension_note(self.trained, config)) is not None:
            logger.warning("%s: %s", self.folder, note)
        model = self.trained.model
        if model.make_vocab_size_divisible_by > 1:
            return config
        known, rows = self.known_ids(overrides, files), model.padded_vocab_size
        return config.override({"vocab_size": known, "make_vocab_size_divisible_by": rows})

    def known_ids(self, overrides: Overrides = (), files: Sequence[str | Path] = ()) -> int:
        """Return the number of token ids; other embedding rows are padding. Raises the errors of `find_tokenizer`."""
        model = self.trained.model
        if model.make_vocab_size_divisible_by > 1 and model.vocab_size is not None:
            return model.vocab_size
        # Other layouts record only the number of embedding rows. The number of tokens comes from the tokenizer.
        tokenizer = self.tokenizer(overrides, files).tokenizer
        if tokenizer is None:
            return model.padded_vocab_size
        return min(model.padded_vocab_size, max(tokenizer.vocab_size, largest_named_id(self.folder) + 1))

    def tokenizer(self, overrides: Overrides = (), files: Sequence[str | Path] = ()) -> Found:
        """Return the tokenizer, or None with the reason. Overrides may select another tokenizer.

        Raises the errors of `find_tokenizer`.
        """
        given = given_values(overrides, files)
        found = find_tokenizer(self.folder, self.tokenizer_folder, self.trained, self.document_end, given)
        return found if found.tokenizer is not None or self.packed_tokenizer is None else self._unpacked

    @cached_property
    def _unpacked(self) -> Found:
        """The tokenizer inside the weights file."""
        assert self.packed_tokenizer is not None
        with TemporaryDirectory(prefix="megatron_coca_tokenizer") as name:
            self.packed_tokenizer(Path(name))
            return read_tokenizer(Path(name), self.trained.model.padded_vocab_size)

    def load(
        self,
        overrides: Overrides = (),
        files: Sequence[str | Path] = (),
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        show: bool = False,
    ) -> LoadedModel:
        """Build the model with config overrides and load its weights, in `dtype`. If `show` is set, show progress.

        Raises the errors of `load_model`.
        """
        config = self.configure(overrides, files)
        model = empty_model(config, device, training=False, dtype=dtype)
        with self.weights().shown(f"loading {self.folder}", show) as weights:
            load_weights(model, weights)
        return LoadedModel(model.eval(), config, self.tokenizer_folder, self.step, self.identify)


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights, drawn: Collection[str] = ()) -> None:
    """Copy `weights` into `model` one at a time.

    A weight named in `drawn` may be missing in `weights`. The model then keeps the value that it has.
    Raises CheckpointError, which names every weight that does not fit. After this error, the model is unchanged.
    """
    own, given = model.state_dict(), weights.entries
    problems = [f"missing {name}" for name in own if name not in given and name not in drawn]
    problems += [f"unexpected {name}" for name in given if name not in own]
    problems += [
        f"{weights.origin(name)} has shape {list(given[name].shape)}, the model {list(own[name].shape)}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    if problems:
        raise CheckpointError(
            f"{weights.source}: the weights do not fit the model: {'; '.join(problems)}; {weights.remedy}"
        )
    for name, tensor in weights:
        own[name].copy_(tensor)


def check_fit(config: Config, weights: Weights) -> None:
    """Check the weights' names and shapes. Raises CheckpointError, which names every weight that does not fit."""
    plain = config.override({"attention_backend": "auto", "operand_kernel": "torch"})  # the model never runs
    model = empty_model(plain, "cpu", training=False, memory="meta")
    load_weights(model, replace(weights, read=lambda name: weights.entries[name].stand_in()))
