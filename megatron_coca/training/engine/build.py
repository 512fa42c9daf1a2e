"""The engine that a configuration asks for."""

from collections.abc import Callable

import torch
import torch.nn as nn

from megatron_coca.config import BatchSizes, Config
from megatron_coca.model import GPT, LanguageModelLoss
from megatron_coca.training.engine.engine import Engine
from megatron_coca.training.engine.group import local_device
from megatron_coca.training.engine.pipeline import PipelineEngine, cut

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def build_engine(model: GPT, optimizer: MakeOptimizer, config: Config, sizes: BatchSizes, stage: int) -> Engine:
    """An engine that trains `model`, whose weights lie in the memory of the host, or stage `stage` of it on this rank.

    `optimizer` makes that of the parameters of a module. Every rank must call it.
    """
    if config.parallel.pipe_parallel_size > 1:
        part = cut(model, config, stage).to(local_device())
        return PipelineEngine(part, optimizer(part), config, sizes)
    whole = LanguageModelLoss(model.to(local_device()))
    return Engine(whole, optimizer(whole), config, sizes)
