"""The optimizer and which parameters decay."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from megatron_coca.config import OptimizerConfig

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
