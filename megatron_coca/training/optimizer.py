"""The optimizer and which parameters decay."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from megatron_coca.attention.layer import SelfAttention
from megatron_coca.config import Config, OptimizerConfig
from megatron_coca.config.training import QUERY_KEY_VALUE, TrainablePart
from megatron_coca.model.cost import parameter_count, trained_count

PARTS: tuple[tuple[str, tuple[TrainablePart, ...]], ...] = (
    (r"attention\.query_key_value\.query\.", ("query",)),
    (r"attention\.query_key_value\.key\.", ("key",)),
    (r"attention\.query_key_value\.value\.", ("value",)),
    (r"attention\.query_key_value\.(weight|bias)$", QUERY_KEY_VALUE),
    (r"attention\.dense\.", ("attention_output",)),
    (r"\bmlp\.", ("mlp",)),
    (r"(^|_layer|\.)norm\.", ("norms",)),
    (r"\bword_embeddings\.", ("embedding",)),
    (r"\bfinal_linear\.", ("output_head",)),
    (r"\bposition_embeddings\.|attention\.position_bias\.|^positions\.", ("positions",)),
)
"""Patterns in the names of a model's parameters, and the parts that such a parameter holds."""


def parts_of(name: str) -> tuple[TrainablePart, ...]:
    """The parts that the named parameter of a model holds: several where they are packed in it."""
    return next(parts for pattern, parts in PARTS if re.search(pattern, name))


def train_only_parts(model: nn.Module, config: OptimizerConfig) -> None:
    """Make the parts that `trainable` does not name need no gradient, in place.

    Where some but not all of queries, keys and values are trained, every packed projection is replaced by three layers.
    Weights are to be loaded before, and an engine is to be built after this.
    """
    if config.trainable is None:
        return
    if len({config.trains(part) for part in QUERY_KEY_VALUE}) > 1:
        for attention in [part for part in model.modules() if isinstance(part, SelfAttention)]:
            attention.split_projection()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.trains(*parts_of(name)))


class TrainableShare(NamedTuple):
    """Numbers of a model, and how many of them a run trains."""

    trained: int
    total: int

    def text(self) -> str:
        """For people to read."""
        whole = f"{self.total:,} parameters"
        if self.trained == self.total:
            return whole
        return f"{whole}, {self.trained:,} ({self.trained / self.total:.2%}) trained"


def trainable_share(config: Config) -> TrainableShare:
    """What `trainable` amounts to: the sums of `numel()` over the parameters of the model, the embedding's padding and
    the output head included.

    Raises:
        ConfigError: `vocab_size` is not known.
    """
    return TrainableShare(trained_count(config).total, parameter_count(config).total)


Groups = list[dict[str, Any]]


def _adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr)


OPTIMIZERS: dict[str, Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "Adam": _adamw,
    "AdamW": _adamw,
    "cpu_adam": _adamw,
    "sgd": _sgd,
}
"""By upstream's names: its Adam is decoupled too, and PyTorch's fused AdamW serves the CPU without a compiler."""


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The configured optimizer; its learning rate is set anew before every step."""
    return OPTIMIZERS[config.type](parameter_groups(model, config.weight_decay), config)


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Matrices and embeddings decay; biases and the parameters of norms do not (GPT-NeoX's rule)."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    kept = [parameter for parameter in trainable if parameter.dim() < 2]
    groups: Groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
