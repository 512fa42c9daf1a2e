"""From a checkpoint folder to a model ready for evaluation."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints import neox as neox
from megatron_coca.checkpoints import neox as neox_files
from megatron_coca.checkpoints.compare import refuse_other_model
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.huggingface import CONFIG, is_huggingface_folder, may_be_coca, open_weights, read_config
from megatron_coca.checkpoints.object_store import fetch, is_url
from megatron_coca.checkpoints.tokenizer import Found, TokenizerLocation, find_tokenizer, known_tokens
from megatron_coca.checkpoints.weights import Weights, names_in, open_safetensors
from megatron_coca.config import Config, load_config
from megatron_coca.config.source import given_values
from megatron_coca.data.tokenizers.kinds import DESCRIPTION
from megatron_coca.model import GPT, empty_model

logger = logging.getLogger(__name__)

Overrides = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with where it came from.

    Attributes:
        model: on the asked device, float32 unless another dtype was asked for.
        config: the resolved configuration, overrides included.
        tokenizer_folder: the tokenizer's files, or None where the folder has none.
        step: completed training iterations, or None for a Hugging Face folder.
        identity: sha256 of the weights file of our own checkpoints, one of GPT-NeoX's files, else the folder's name.
    """

    model: GPT
    config: Config
    tokenizer_folder: Path | None
    step: int | None
    identity: str


def load_model(path: str | Path, overrides: Overrides = (), device: str = "cpu") -> GPT:
    """The model of a checkpoint of ours, of a Hugging Face folder or of a checkpoint of GPT-NeoX, in evaluation mode.

    `overrides` may change the extension, the rotary base or the attention backend, as a mapping or as "key=value"
    strings: {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}.

    Raises:
        CheckpointError: nothing usable at `path`, or an override that the weights do not fit.
        ConfigError: an override that is not valid.
    """
    return load_checkpoint(path, overrides, device).model


def load_checkpoint(path: str | Path, overrides: Overrides = (), device: str = "cpu") -> LoadedModel:
    """As `load_model`, with the configuration, tokenizer and identity."""
    return open_checkpoint(path).load(overrides, device=device)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose files are in order, from which models are made, one for each way of using the weights.

    Attributes:
        folder: where it is.
        trained: its configuration.
        tokenizer_folder, step, identity: as in `Loaded`.
        weights: opens the state dict, in the dtype on disk.
        also_free: keys that may differ from `trained` besides those of any checkpoint.
        guessed: a warning by the key of `trained` that had to be guessed; logged once, unless overrides give the key.
        document_end: the symbol that ends documents in the layout's own program, None where no one symbol does.
    """

    folder: Path
    trained: Config
    tokenizer_folder: Path | None
    step: int | None
    identity: str
    weights: Callable[[], Weights]
    also_free: frozenset[str] = frozenset()
    guessed: dict[str, str] = field(default_factory=dict)
    document_end: str | None = None

    def configure(self, overrides: Overrides = (), files: Sequence[str | Path] = ()) -> Config:
        """The configuration for another use of the weights: YAML files, then overrides, over the trained one.

        Raises CheckpointError where it would be another model, ConfigError where it is not valid.
        """
        config = self.trained.override(overrides, files)
        refuse_other_model(self.folder, self.trained, config, self.also_free)
        for key in self.guessed.keys() - given_values(overrides, files):
            logger.warning(self.guessed.pop(key))
        model = self.trained.model
        if model.make_vocab_size_divisible_by > 1:
            return config
        # Of foreign layouts the rows of the embedding are known, and by the tokenizer how many of them mean a token.
        known = known_tokens(self._place, self.tokenizer(overrides, files))
        return config.override({"vocab_size": known, "make_vocab_size_divisible_by": model.padded_vocab_size})

    def tokenizer(self, overrides: Overrides = (), files: Sequence[str | Path] = ()) -> Found:
        """The tokenizer, or None with the reason; overrides may name another one. Raises as `find_tokenizer`."""
        return find_tokenizer(self._place, overrides, files)

    @property
    def _place(self) -> TokenizerLocation:
        return TokenizerLocation(self.folder, self.tokenizer_folder, self.trained, self.document_end)

    def load(
        self,
        overrides: Overrides = (),
        files: Sequence[str | Path] = (),
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> LoadedModel:
        """The model for one use of the weights, with its parameters in `dtype`. Raises as `load_model`."""
        config = self.configure(overrides, files)
        model = empty_model(config, device, training=False, dtype=dtype)
        load_weights(model, self.weights())
        return LoadedModel(model.eval(), config, self.tokenizer_folder, self.step, self.identity)


def open_checkpoint(path: str | Path, verify: bool = True, step: int | None = None) -> OpenedCheckpoint:
    """Find a checkpoint of ours, a Hugging Face folder or a checkpoint of GPT-NeoX. Raises CheckpointError.

    `verify` compares the files of ours with their checksums; without it their sizes alone are looked at. `step` is one
    of a save folder's; by default the newest. A URL of an object store is a checkpoint of ours, and is downloaded.
    """
    if is_url(path):
        path, step = fetch(str(path), step), None
    layout, path = _layout(Path(path), step)
    return layout.open(path, verify)


def find_native(path: str | Path, step: int | None = None) -> Path | None:
    """The folder of one step that `open_checkpoint` would open, where it is a checkpoint of ours. Raises
    CheckpointError.
    """
    if is_url(path):
        path, step = fetch(str(path), step), None
    layout, found = _layout(Path(path), step)
    return native.locate(found) if layout.open is _open_native else None


def _layout(path: Path, step: int | None) -> tuple["CheckpointLayout", Path]:
    if step is not None:
        named = native.step_folder(path, step)
        path = named if neox_files.is_step(named) else native.locate(path, step)
    return next(layout for layout in LAYOUTS if layout.found(path)), path


def _open_native(path: Path, verify: bool) -> OpenedCheckpoint:
    folder = native.locate(path)
    manifest = native.verify(folder, contents=verify, links=True)
    tokenizer = folder / native.TOKENIZER
    return OpenedCheckpoint(
        folder=folder,
        trained=load_config([folder / native.CONFIG]),
        tokenizer_folder=tokenizer if f"{native.TOKENIZER}/{DESCRIPTION}" in manifest["files"] else None,
        step=native.read_json(folder / native.META)["step"],
        identity=manifest["files"][native.WEIGHTS]["sha256"],
        weights=partial(_native_weights, folder),
    )


def _native_weights(folder: Path) -> Weights:
    path = folder / native.WEIGHTS
    return open_safetensors(dict.fromkeys(names_in(path), path), folder)


MAY_BE_COCA = (
    "{}: read as pos_emb=rotary, but config.json (gpt_neox, rotary_pct 1) would be the same for CoCA weights of CoCA's "
    "authors; override with pos_emb=coca if they are that, or with pos_emb=rotary if not"
)


def _open_huggingface(folder: Path, verify: bool) -> OpenedCheckpoint:
    """The CoCA authors' GPT-NeoX folders look like plain ones, so that overrides may give `pos_emb`."""
    trained = read_config(folder)
    shape = trained.model
    return OpenedCheckpoint(
        folder=folder,
        trained=trained,
        tokenizer_folder=None,
        step=None,
        identity=folder.resolve().name,
        weights=partial(open_weights, folder, shape.num_layers, shape.num_attention_heads, not shape.no_weight_tying),
        also_free=frozenset({"pos_emb"}),
        guessed={"pos_emb": MAY_BE_COCA.format(folder)} if may_be_coca(native.read_json(folder / CONFIG)) else {},
    )


def _open_neox(path: Path, verify: bool) -> OpenedCheckpoint:
    folder = neox_files.find_step(path)
    assert folder is not None, "found by it"
    files = neox.NeoxFiles(folder)
    config, ranks = neox.configure(folder, files)
    return OpenedCheckpoint(
        folder=folder,
        trained=config,
        tokenizer_folder=carried if (carried := folder / native.TOKENIZER).is_dir() else None,
        step=neox_files.step_of(folder),
        identity=neox_files.identity(files),
        weights=partial(neox.open_weights, folder, files, config, ranks),
        document_end=neox.DOCUMENT_END,
    )


class CheckpointLayout(NamedTuple):
    """A layout on disk: whether a path is of it, and how it is opened, with its checksums compared or not."""

    found: Callable[[Path], bool]
    open: Callable[[Path, bool], OpenedCheckpoint]


LAYOUTS: tuple[CheckpointLayout, ...] = (
    CheckpointLayout(is_huggingface_folder, _open_huggingface),
    CheckpointLayout(lambda path: neox_files.find_step(path) is not None, _open_neox),
    CheckpointLayout(lambda path: True, _open_native),
)
"""The first that a path is of is taken. What is of none is looked for as ours, whose errors say what is missing."""


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights, drawn: Collection[str] = ()) -> None:
    """Copy `weights` into `model` one by one, or name every key and shape that does not fit and change nothing.

    Those of the names `drawn` may be missing: the model keeps its own.
    """
    own, given = model.state_dict(), weights.entries
    problems = [f"missing {name}" for name in own if name not in given and name not in drawn]
    problems += [f"unexpected {name}" for name in given if name not in own]
    problems += [
        f"{weights.origin(name)} is {list(given[name].shape)}, the model wants {list(own[name].shape)}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    if problems:
        raise CheckpointError(f"{weights.source}: the weights do not fit the model: {'; '.join(problems)}")
    for name, tensor in weights:
        own[name].copy_(tensor)
