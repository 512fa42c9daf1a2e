"""Builds the engine of a run."""

from collections.abc import Callable

import torch
import torch.nn as nn

from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.model import GPT, LanguageModelLoss
from megatron_coca.training.engine.group import everyone_succeeded, local_device
from megatron_coca.training.engine.native_engine import NativeEngine
from megatron_coca.training.engine.protocol import Engine
from megatron_coca.training.engine.routing import balancing_of


def build_engine(
    model: GPT,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    config: Config,
    sizes: BatchSizes,
    stage: int = 0,
) -> Engine:
    """Build the engine that trains `model` or pipeline stage `stage` of it. Every rank must call this.

    The weights of `model` are in host memory. `optimizer` builds the optimizer for the trained parameters of a module.

    Raises:
        ConfigError: DeepSpeed does not support the configuration, or a pipeline stage has no weights to train.
    """
    if config.parallel.engine == "native":
        whole = LanguageModelLoss(model.to(local_device()), balancing_of(model, config))
        return NativeEngine(whole, optimizer(whole), config, sizes)
    # Importing DeepSpeed takes a second, and the native engine does not need it.
    from megatron_coca.training.engine.deepspeed_engine import DeepSpeedEngine, PipelineEngine, cut

    if config.parallel.pipe_parallel_size <= 1:
        whole = LanguageModelLoss(model.to(local_device()), balancing_of(model, config))
        return DeepSpeedEngine(whole, optimizer(whole), config, sizes)
    own = cut(model, config, stage).to(local_device())
    if not everyone_succeeded(any(parameter.requires_grad for parameter in own.parameters())):
        raise ConfigError(
            f"trainable: with {', '.join(config.optimizer.trainable or ())}, one of the "
            f"{config.parallel.pipe_parallel_size} pipeline stages has no weights to train; use fewer stages "
            "(pipe_parallel_size), another pipe_partition_method, or tensor, sequence or data parallelism"
        )
    return PipelineEngine(own, optimizer(own), config, sizes)
