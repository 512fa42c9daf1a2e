"""GPT-NeoX's initialisations as a literal table."""

import math
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.compose import LEARNED_MODULES
from megatron_coca.config import ModelConfig
from megatron_coca.model.embedding import LearnedPositions

Initializer = Callable[[Tensor], Tensor]


def _normal(std: float) -> Initializer:
    return lambda weight: nn.init.normal_(weight, mean=0.0, std=std)


INITIALIZERS: dict[str, Callable[[ModelConfig], Initializer]] = {
    "normal": lambda m: _normal(m.init_method_std),
    "scaled_normal": lambda m: _normal(m.init_method_std / math.sqrt(2.0 * m.num_layers)),
    "small_init": lambda m: _normal(math.sqrt(2.0 / (5.0 * m.hidden_size))),
    "wang_init": lambda m: _normal(2.0 / (m.num_layers * math.sqrt(m.hidden_size))),
    "xavier_uniform": lambda m: nn.init.xavier_uniform_,
    "xavier_normal": lambda m: nn.init.xavier_normal_,
    "orthogonal": lambda m: nn.init.orthogonal_,
    "scaled_orthogonal": lambda m: lambda weight: nn.init.orthogonal_(weight, gain=1.0 / math.sqrt(2.0 * m.num_layers)),
}

OUTPUT_LAYERS = ("attention.dense.weight", "mlp.linear2.weight")
"""The layers that write into the residual stream: `output_layer_init_method` is theirs."""


@torch.no_grad()
def initialize(module: nn.Module, model: ModelConfig, seed: int) -> None:
    """Fill every weight matrix by the configured methods, biases with 0; norms keep their 1 and 0.

    The numbers depend on the seed and the parameters' shapes and order alone, and what positions learn is drawn last,
    so any two position methods start from the same weights in the layers that both have; the global random state is
    left as it was.
    """
    inner, output = INITIALIZERS[model.init_method](model), INITIALIZERS[model.output_layer_init_method](model)
    learned = [part for part in module.modules() if isinstance(part, LEARNED_MODULES)]
    apart = {id(parameter) for part in learned for parameter in part.parameters()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in module.named_parameters():
            if id(parameter) in apart:
                continue
            if parameter.dim() >= 2:
                (output if name.endswith(OUTPUT_LAYERS) else inner)(parameter)
            elif name.endswith(("linear1.bias", "linear2.bias", "dense.bias", "query_key_value.bias")):
                parameter.zero_()
        for part in learned:
            part.reset_parameters()


@torch.no_grad()
def draw_learned_positions(module: nn.Module, model: ModelConfig, seed: int) -> list[str]:
    """Draw what positions learn, by the seed; the global random state is left as it was. Returns the names."""
    parts = {name: part for name, part in module.named_modules() if isinstance(part, LEARNED_MODULES)}
    tables = {name: part for name, part in module.named_modules() if isinstance(part, LearnedPositions)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for table in tables.values():
            INITIALIZERS[model.init_method](model)(table.weight)
        for part in parts.values():
            part.reset_parameters()
    return [f"{name}.{weight}" for name, part in (tables | parts).items() for weight, _ in part.named_parameters()]
