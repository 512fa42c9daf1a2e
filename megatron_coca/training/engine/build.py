"""The engine that a configuration asks for."""

from collections.abc import Callable

import torch
import torch.nn as nn

from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.model import GPT, LanguageModelLoss
from megatron_coca.training.engine.engine import Engine
from megatron_coca.training.engine.group import everyone_succeeded, local_device
from megatron_coca.training.engine.pipeline import PipelineEngine, cut

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def _refuse_idle_stages(part: nn.Module, config: Config) -> None:
    """Every rank must call it: all of them raise, or none does."""
    if not everyone_succeeded(any(parameter.requires_grad for parameter in part.parameters())):
        raise ConfigError(
            [
                f"trainable: a stage of pipe_parallel_size {config.parallel.pipe_parallel_size} has nothing to train with "
                f"{', '.join(config.optimizer.trainable or ())}; use fewer stages, another pipe_partition_method, or ranks "
                "of another kind"
            ]
        )


def build_engine(model: GPT, optimizer: MakeOptimizer, config: Config, sizes: BatchSizes, stage: int) -> Engine:
    """An engine that trains `model`, whose weights lie in the memory of the host, or stage `stage` of it on this rank.

    `optimizer` makes that of the parameters of a module that need gradients. Every rank must call it.

    Raises:
        ConfigError: DeepSpeed cannot serve what is asked for, or a stage has nothing to train.
    """
    if config.parallel.pipe_parallel_size > 1:
        part = cut(model, config, stage).to(local_device())
        _refuse_idle_stages(part, config)
        return PipelineEngine(part, optimizer(part), config, sizes)
    whole = LanguageModelLoss(model.to(local_device()))
    return Engine(whole, optimizer(whole), config, sizes)
