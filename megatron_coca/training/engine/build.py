"""Build the engine of a run."""

from functools import partial

from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.model import GPT, LanguageModelLoss
from megatron_coca.training.engine.group import everyone_succeeded, local_device
from megatron_coca.training.engine.native_engine import NativeEngine
from megatron_coca.training.engine.protocol import Engine
from megatron_coca.training.engine.routing import balancing_of
from megatron_coca.training.optimizer import build_optimizer


def build_engine(model: GPT, config: Config, sizes: BatchSizes, stage: int = 0, separate_norms: bool = False) -> Engine:
    """Build the engine that trains `model` or pipeline stage `stage` of it, with its optimizer. Every rank calls this.

    The weights of `model` are in host memory. Weights that require gradients are trained. `parameter_groups`
    explains `separate_norms`.

    Raises:
        ConfigError: DeepSpeed does not support the configuration, or a pipeline stage has no weights to train.
    """
    width_ratio = config.model.width_ratio
    optimizer_of = partial(
        build_optimizer, config=config.optimizer, separate_norms=separate_norms, width_ratio=width_ratio
    )
    if config.parallel.engine == "native":
        whole = LanguageModelLoss(model.to(local_device()), balancing_of(model, config))
        return NativeEngine(whole, optimizer_of(whole), config, sizes)
    # Importing DeepSpeed takes a second, and the native engine does not need it.
    from megatron_coca.training.engine.deepspeed_engine import DeepSpeedEngine, PipelineEngine, cut

    if config.parallel.pipe_parallel_size <= 1:
        whole = LanguageModelLoss(model.to(local_device()), balancing_of(model, config))
        return DeepSpeedEngine(whole, optimizer_of(whole), config, sizes)
    own = cut(model, config, stage).to(local_device())
    if not everyone_succeeded(any(parameter.requires_grad for parameter in own.parameters())):
        raise ConfigError(
            f"trainable: with {', '.join(config.optimizer.trainable or ())}, one of the "
            f"{config.parallel.pipe_parallel_size} pipeline stages has no weights to train; use fewer stages "
            "(pipe_parallel_size), another pipe_partition_method, or tensor, sequence or data parallelism"
        )
    return PipelineEngine(own, optimizer_of(own), config, sizes)
