"""Loading a checkpoint of any known layout as a model for evaluation."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.adapters import refuse_adapters
from megatron_coca.checkpoints.compare import extension_note, refuse_other_model
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.read import (
    CONFIG,
    SINGLE,
    find_weights,
    is_huggingface_folder,
    may_be_coca,
    open_weights,
    read_config,
)
from megatron_coca.checkpoints.identity import pickles_identity, tensors_identity
from megatron_coca.checkpoints.native.object_store import fetch
from megatron_coca.checkpoints.neox import read as neox
from megatron_coca.checkpoints.tokenizer import Found, find_tokenizer, largest_named_id
from megatron_coca.checkpoints.weights import Weights, open_safetensors_file
from megatron_coca.config import Config, load_saved_config
from megatron_coca.config.source import given_values
from megatron_coca.data.tokenizers.kinds import DESCRIPTION
from megatron_coca.model import GPT, empty_model
from megatron_coca.support.program import local_path
from megatron_coca.support.remote_files import HUB, hub_hint, is_url

logger = logging.getLogger(__name__)

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
HUB_COPIES = ["*/*", "consolidated*"]
"""What is downloaded of a model of the Hugging Face hub, and what is not: the same weights for other programs."""
HUB_PICKLES = "pytorch_model*"
"""What is downloaded besides of a model without safetensors."""

Overrides = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode.

    Attributes:
        model: on the requested device; float32 unless another dtype was requested.
        config: the resolved configuration with overrides.
        tokenizer_folder: the tokenizer saved with the weights, or None.
        step: completed optimizer steps, or None for a Hugging Face folder.
        identify: computes `identity`.
    """

    model: GPT
    config: Config
    tokenizer_folder: Path | None
    step: int | None
    identify: Callable[[], str] = field(repr=False, compare=False)

    @cached_property
    def identity(self) -> str:
        """A digest of the content: the sha256 of our weights' file; of other layouts that of configuration and weights,
        of which large ones are sampled (identity.py).
        """
        return self.identify()


def load_model(path: str | Path, overrides: Overrides = (), device: str = "cpu") -> GPT:
    """Load our checkpoint, a Hugging Face folder or a GPT-NeoX checkpoint as a model in evaluation mode.

    `overrides` may change the frequency extension, the rotary base or the attention backend, as a mapping or as
    "key=value" strings: {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}.

    Raises CheckpointError without a usable checkpoint at `path` or for an override that does not fit the weights, and
    ConfigError for an invalid one.
    """
    return load_checkpoint(path, overrides, device).model


def load_checkpoint(path: str | Path, overrides: Overrides = (), device: str = "cpu") -> LoadedModel:
    """As `load_model`, with the configuration, tokenizer and identity."""
    return open_checkpoint(path, overrides=overrides).load(overrides, device=device)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A valid checkpoint, from which models are made with any config overrides.

    Attributes:
        folder: its location.
        trained: its configuration.
        tokenizer_folder, step, identify, identity: as in `LoadedModel`.
        weights: opens the state dict, in the dtype on disk.
        also_free: keys that may differ from `trained`, in addition to those of any checkpoint.
        guessed: warnings by guessed keys of `trained`, each logged once unless overrides set the key.
        document_end: the token that ended documents in training, if it is known.
        imported: what is known of the folder that ours was imported from.
        changed_imports: the user's files of methods with other contents than those that the weights were trained with.
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

    @cached_property
    def identity(self) -> str:
        """As that of `LoadedModel`. It is computed when it is first asked for."""
        return self.identify()

    def configure(self, overrides: Overrides = (), files: Sequence[str | Path] = ()) -> Config:
        """The trained configuration with YAML files, then overrides, applied; what becomes of an extension is logged.

        Raises CheckpointError if that is another model, ConfigError if it is invalid.
        """
        config = self.trained.override(overrides, files)
        refuse_other_model(self.folder, self.trained, config, self.also_free)
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
        """Number of token ids; other rows of the embedding are padding. Raises as `find_tokenizer`."""
        model = self.trained.model
        if model.make_vocab_size_divisible_by > 1 and model.vocab_size is not None:
            return model.vocab_size
        # Other layouts record the rows of the embedding; the tokenizer tells how many of them are tokens.
        tokenizer = self.tokenizer(overrides, files).tokenizer
        if tokenizer is None:
            return model.padded_vocab_size
        return min(model.padded_vocab_size, max(tokenizer.vocab_size, largest_named_id(self.folder) + 1))

    def tokenizer(self, overrides: Overrides = (), files: Sequence[str | Path] = ()) -> Found:
        """The tokenizer, or None with the reason; overrides may name another one. Raises as `find_tokenizer`."""
        given = given_values(overrides, files)
        return find_tokenizer(self.folder, self.tokenizer_folder, self.trained, self.document_end, given)

    def load(
        self,
        overrides: Overrides = (),
        files: Sequence[str | Path] = (),
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        show: bool = False,
    ) -> LoadedModel:
        """The model with config overrides and parameters in `dtype`. `show` shows progress. Raises as `load_model`."""
        config = self.configure(overrides, files)
        model = empty_model(config, device, training=False, dtype=dtype)
        with self.weights().shown(f"loading {self.folder}", show) as weights:
            load_weights(model, weights)
        return LoadedModel(model.eval(), config, self.tokenizer_folder, self.step, self.identify)


def open_checkpoint(
    path: str | Path,
    verify: bool = True,
    step: int | None = None,
    overrides: Overrides = (),
    files: Sequence[str | Path] = (),
) -> OpenedCheckpoint:
    """Open our checkpoint (also by URL, then it is downloaded), a Hugging Face folder or a GPT-NeoX checkpoint.

    Args:
        verify: compare our files with their checksums; otherwise their sizes only.
        step: one of a save folder's steps; by default the newest.
        overrides, files: of the user; only `imports` is read. A checkpoint's own `imports` are never run.

    Raises CheckpointError, or ConfigError if `imports` is needed and not given, or cannot be run.
    """
    folder = _local_folder(path, step)
    refuse_adapters(folder)
    if is_huggingface_folder(folder):
        return _open_huggingface(folder)
    neox_folder = neox.find_step(folder)
    if neox_folder is not None:
        return _open_neox(neox_folder, overrides, files)
    return _open_native(folder, verify, overrides, files)


def find_native(path: str | Path, step: int | None = None) -> Path | None:
    """The step folder that `open_checkpoint` would open, None if the checkpoint has another layout.

    Raises CheckpointError.
    """
    folder = _local_folder(path, step)
    refuse_adapters(folder)
    return None if is_huggingface_folder(folder) or neox.find_step(folder) is not None else native.locate(folder)


def _local_folder(path: str | Path, step: int | None) -> Path:
    """The folder of a checkpoint, or of a run; one behind a URL is downloaded."""
    if str(path).startswith(HUB):
        return _from_hub(str(path).removeprefix(HUB))
    if is_url(path):
        return fetch(str(path), step)
    path = local_path(str(path))
    if not path.exists() and (hint := hub_hint(path)):
        raise CheckpointError(f"{path}: no such checkpoint folder{hint}")
    if step is None:
        return path
    folder = native.step_folder(path, step)
    return folder if neox.is_step(folder) else native.locate(path, step)


def _from_hub(name: str) -> Path:
    """Download a model of the Hugging Face hub into the cache of huggingface_hub, unless it is there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(f"{HUB}{name}: needs huggingface_hub (pip install huggingface_hub)") from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES))
        if any(folder.glob("*.safetensors")):
            return folder
        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES, HUB_PICKLES], ignore_patterns=HUB_COPIES))
    except Exception as error:  # that of its HTTP client is another class in each version
        raise CheckpointError(f"{HUB}{name}: cannot be downloaded: {error}") from error


def _open_native(path: Path, verify: bool, overrides: Overrides, files: Sequence[str | Path]) -> OpenedCheckpoint:
    folder = native.locate(path)
    manifest = native.verify(folder, contents=verify, links=True)
    tokenizer, meta = folder / native.TOKENIZER, native.read_meta(folder)
    saved = load_saved_config(folder / native.CONFIG, overrides, files)
    return OpenedCheckpoint(
        folder=folder,
        trained=saved.config,
        tokenizer_folder=tokenizer if f"{native.TOKENIZER}/{DESCRIPTION}" in manifest["files"] else None,
        step=meta["step"],
        identify=lambda: manifest["files"][native.WEIGHTS]["sha256"],
        weights=partial(open_safetensors_file, folder / native.WEIGHTS, folder),
        imported=meta.get("imported", {}),
        changed_imports=saved.changed,
    )


def _open_huggingface(folder: Path) -> OpenedCheckpoint:
    trained = read_config(folder)
    guessed = {}
    if may_be_coca(native.read_json(folder / CONFIG)):
        guessed["pos_emb"] = (
            f"{folder}: read as pos_emb=rotary, but config.json (gpt_neox, rotary_pct 1) would be the same for CoCA "
            "weights of CoCA's authors; override with pos_emb=coca if they are that, or with pos_emb=rotary if not"
        )
    return OpenedCheckpoint(
        folder=folder,
        trained=trained,
        tokenizer_folder=None,
        step=None,
        identify=partial(_huggingface_identity, folder, trained),
        weights=partial(open_weights, folder, trained.model),
        also_free=frozenset({"pos_emb"}),
        guessed=guessed,
    )


def _huggingface_identity(folder: Path, config: Config) -> str:
    kind, files = find_weights(folder)
    if kind.single_file == SINGLE:
        return tensors_identity(config, files)
    return pickles_identity(config, set(files.values()))


def _open_neox(folder: Path, overrides: Overrides, given: Sequence[str | Path]) -> OpenedCheckpoint:
    files = neox.NeoxFiles(folder)
    config, ranks = neox.configure(folder, files, overrides, given)
    tokenizer = folder / native.TOKENIZER
    return OpenedCheckpoint(
        folder=folder,
        trained=config,
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
        step=neox.step_of(folder),
        identify=partial(pickles_identity, config, files.paths),
        weights=partial(neox.open_weights, folder, files, config, ranks),
        document_end=neox.DOCUMENT_END,
    )


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights, drawn: Collection[str] = ()) -> None:
    """Copy `weights` into `model` one at a time; names in `drawn` may be missing and keep the model's values.

    Raises CheckpointError, naming every key and shape that does not fit, and then changes nothing.
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
