"""From a checkpoint folder to a model ready for evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_coca.checkpoints import huggingface, native
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.config import KEYS, Config, load_config
from megatron_coca.model import GPT, build_model

Overrides = Mapping[str, Any] | Sequence[str]

EVALUATION_KEYS = frozenset({"rope_scaling", "rotary_emb_base", "attention_backend"})
EVALUATION_GROUPS = frozenset({"data", "batch", "checkpoint", "logging", "launch"})
"""What may differ from training when a checkpoint is evaluated; anything else would be another model."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, with where it came from.

    Attributes:
        model: float32 weights on the asked device.
        config: the resolved configuration, overrides included.
        tokenizer_folder: the tokenizer's files, or None where the folder has none.
        step: completed training iterations, or None for a Hugging Face folder.
        identity: sha256 of the weights file of our own checkpoints, else the folder's name.
    """

    model: GPT
    config: Config
    tokenizer_folder: Path | None
    step: int | None
    identity: str


def load_model(path: str | Path, overrides: Overrides = (), device: str = "cpu") -> GPT:
    """The model of a checkpoint of ours or of a Hugging Face folder, in evaluation mode.

    `overrides` may change the extension, the rotary base or the attention backend, as a mapping or as "key=value"
    strings: {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}.

    Raises:
        CheckpointError: nothing usable at `path`, or an override that the weights do not fit.
        ConfigError: an override that is not valid.
    """
    return load_checkpoint(path, overrides, device).model


def load_checkpoint(path: str | Path, overrides: Overrides = (), device: str = "cpu") -> Loaded:
    """As `load_model`, with the configuration, tokenizer and identity."""
    path = Path(path)
    if huggingface.is_huggingface_folder(path):
        return _load_huggingface(path, overrides, device)
    folder = native.locate(path)
    manifest = native.verify(folder)
    trained = load_config([folder / native.CONFIG])
    config = trained.override(overrides)
    _refuse(
        f"{folder}: its weights cannot be evaluated with another",
        differing_keys(trained, config, EVALUATION_KEYS, EVALUATION_GROUPS),
    )
    tokenizer = folder / native.TOKENIZER
    return Loaded(
        model=_fill(build_model(config, device), read_weights(folder), folder),
        config=config,
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
        step=native.read_json(folder / native.META)["step"],
        identity=manifest["files"][native.WEIGHTS]["sha256"],
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of one step folder by our names, in the dtype they were saved in."""
    try:
        return load_file(folder / native.WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / native.WEIGHTS}: cannot be read: {error}") from error


def differing_keys(
    saved: Config, wanted: Config, free_keys: frozenset[str], free_groups: frozenset[str] = frozenset()
) -> list[str]:
    """A line for every key in which two configurations differ, the free ones aside."""
    before, after = saved.flat(), wanted.flat()
    return [
        f"{key} (saved {before[key]!r}, now {after[key]!r})"
        for key, place in KEYS.items()
        if before[key] != after[key] and key not in free_keys and place.group not in free_groups
    ]


def _refuse(message: str, differing: list[str]) -> None:
    if differing:
        raise CheckpointError(f"{message} {', '.join(differing)}")


def _load_huggingface(folder: Path, overrides: Overrides, device: str) -> Loaded:
    keys = huggingface.read_keys(folder)
    config = load_config([], keys).override(overrides)
    differing = differing_keys(load_config([], keys), config, EVALUATION_KEYS | {"pos_emb"}, EVALUATION_GROUPS)
    _refuse(f"{folder}: its weights cannot be evaluated with another", differing)
    shape = config.model
    weights = huggingface.read_weights(folder, shape.num_layers, shape.num_attention_heads, not shape.no_weight_tying)
    return Loaded(_fill(build_model(config, device), weights, folder), config, None, None, folder.resolve().name)


def _fill(model: GPT, weights: dict[str, Tensor], folder: Path) -> GPT:
    load_weights(model, weights, folder)
    return model.eval()


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Copy `weights` into `model`, or name every key and shape that does not fit and change nothing."""
    own = model.state_dict()
    problems = [f"missing {name}" for name in own if name not in weights]
    problems += [f"unexpected {name}" for name in weights if name not in own]
    problems += [
        f"{name} is {list(weights[name].shape)}, the model wants {list(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if problems:
        raise CheckpointError(f"{folder}: the weights do not fit the model: {'; '.join(problems)}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])
