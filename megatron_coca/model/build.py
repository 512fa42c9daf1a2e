"""From configuration to model: the last place that reads it."""

import torch

from megatron_coca.attention.backends.select import select_backend
from megatron_coca.attention.compose import build_method
from megatron_coca.attention.operands import check_operand_kernel
from megatron_coca.config import Config
from megatron_coca.model.compile import compile_blocks
from megatron_coca.model.gpt import GPT
from megatron_coca.model.init import initialize


def build_model(config: Config, device: str = "cpu", training: bool = True) -> GPT:
    """An initialised float32 model on `device`, with the position method composed and the attention backend chosen
    for that device.

    With `training` False the model is for evaluation: its backend need not know dropout or maps that only train.

    Raises:
        ConfigError: `vocab_size` is not known.
        BackendError: the named attention backend or operand kernel cannot serve the model on that device, or there is
            no compiler for `torch_compile`.
    """
    return assemble_model(config, device, training).to(device)


def assemble_model(config: Config, device: str, training: bool = True) -> GPT:
    """As `build_model`, for `device` but with its weights still in the memory of the host: for one of which the device
    shall hold a part.
    """
    with torch.random.fork_rng(devices=[]):  # PyTorch's layers draw weights of their own, which are then replaced
        model = _compose(config, device, training)
    initialize(model, config.model, config.seed)
    return _compiled(model, config, device, training)


def empty_model(
    config: Config,
    device: str,
    training: bool = True,
    dtype: torch.dtype = torch.float32,
    memory: str | None = None,
) -> GPT:
    """As `build_model`, with memory of `dtype` for the weights but no values in it: for one whose weights are loaded.

    `memory` is where they shall lie, by default on `device`. Drawing 7 billion weights takes minutes, and float32 twice
    the memory that they need.
    """
    with torch.device("meta"):
        model = _compose(config, device, training)
    return _compiled(model.to(dtype).to_empty(device=memory or device), config, device, training)


def _compose(config: Config, device: str, training: bool) -> GPT:
    with torch.device("cpu"):
        method = build_method(config.position, config.model)
    device_type = device.partition(":")[0]
    check_operand_kernel(config.position.operand_kernel, device_type)
    needs = method.needs(device_type, config.model.attention_dropout, training)
    _, backend = select_backend(config.position.attention_backend, needs)
    return GPT(config.model, method, backend)


def _compiled(model: GPT, config: Config, device: str, training: bool) -> GPT:
    if config.model.torch_compile and training:
        compile_blocks(model.blocks, device.partition(":")[0])
    return model
