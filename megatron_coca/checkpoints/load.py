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
from megatron_coca.checkpoints.compare import refuse_other_model
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.config import Config, load_config
from megatron_coca.model import GPT, build_model

Overrides = Mapping[str, Any] | Sequence[str]


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
    refuse_other_model(folder, trained, config)
    tokenizer = folder / native.TOKENIZER
    return Loaded(
        model=_fill(build_model(config, device, training=False), read_weights(folder), folder),
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


def _load_huggingface(folder: Path, overrides: Overrides, device: str) -> Loaded:
    keys = huggingface.read_keys(folder)
    config = load_config([], keys).override(overrides)
    refuse_other_model(folder, load_config([], keys), config, frozenset({"pos_emb"}))
    shape = config.model
    weights = huggingface.read_weights(folder, shape.num_layers, shape.num_attention_heads, not shape.no_weight_tying)
    return Loaded(
        _fill(build_model(config, device, training=False), weights, folder), config, None, None, folder.resolve().name
    )


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
