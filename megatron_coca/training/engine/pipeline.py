"""A model being trained by DeepSpeed in pipeline stages (ZeRO 0 and 1)."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn as nn
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.utils import partition_balanced
from torch import Tensor

from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.data import Batch
from megatron_coca.model import GPT, LanguageModelLoss
from megatron_coca.model.stages import Sharing, Stage, StageInput, layer_weights
from megatron_coca.training.engine.engine import Engine, StepResult, _OneStep
from megatron_coca.training.engine.group import everyone_succeeded, local_device, mean_over_ranks, world_size
from megatron_coca.training.loss_guard import Limits

logger = logging.getLogger(__name__)


def cut(model: GPT, config: Config, index: int) -> Stage:
    """Stage `index` of `pipe_parallel_size`, with its layers taken out of `model`; the others are given up."""
    bounds = partition_balanced(
        layer_weights(model, config.parallel.pipe_partition_method), config.parallel.pipe_parallel_size
    )
    return Stage(model, [int(bound) for bound in bounds], index)


class PipelineEngine(Engine):
    """As `Engine`, for one stage of a pipeline. Every rank must make the same calls, with the micro batches of its
    data-parallel copy: every stage is given them, and only hidden states travel.

    A loss is known to the last stage alone; it is shared where it is needed first, when the optimizer is about to
    change weights.
    """

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer, config: Config, sizes: BatchSizes) -> None:
        """`optimizer` steps the parameters of `stage`; the default process group has the ranks of the pipeline."""
        self._stage, self._shape = stage, torch.Size()
        self._loss_known = True
        if sizes.accumulation < len(stage.spans):
            logger.warning(
                "gradient_accumulation_steps %d is below pipe_parallel_size %d: stages wait most of the time",
                sizes.accumulation,
                len(stage.spans),
            )
        super().__init__(_pipeline(stage), optimizer, config, sizes)
        self._names = stage.names

    @property
    def copies(self) -> frozenset[str]:
        """Names of the parameters whose pieces an earlier stage holds too, and writes."""
        return self._stage.copies

    def train_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None = None
    ) -> StepResult:
        """One optimizer step over the micro batches of this rank's data-parallel copy, `sizes.accumulation` many."""
        self._set_rate(learning_rate)
        self._step, self._loss_known = _OneStep(limits=limits), False
        self._engine.train_batch(self._fed(micro_batches))
        self._know_loss()
        return self._result()

    @torch.no_grad()
    def mean_loss(self, micro_batches: Sequence[Batch]) -> float:
        """The loss of held-out samples, averaged over all data-parallel copies."""
        count = len(micro_batches)
        self._engine.eval_batch(self._fed(micro_batches), reduce_output=None, bcast_loss=False, num_micro_batches=count)
        self._engine.module.train()
        return self._shared_loss()

    def _fed(self, micro_batches: Sequence[Batch]) -> Iterator[tuple[Tensor, None]]:
        """Give the stage its micro batches, and DeepSpeed's first stage something to begin with."""
        inputs = [StageInput(**self._inputs(batch)) for batch in micro_batches]
        if inputs[0].samples.shape != self._shape:
            # DeepSpeed tells the next stage a shape once and then takes it for granted.
            self._engine.reset_activation_shape()
            self._shape = inputs[0].samples.shape
        self._stage.feed(inputs)
        return iter([(each.samples, None) for each in inputs])

    def _open(self) -> bool:
        self._know_loss()
        return super()._open()

    def _know_loss(self) -> None:
        """Where DeepSpeed finds an overflow no optimizer is asked to step, on any rank."""
        if not self._loss_known:
            self._step.loss, self._loss_known = self._shared_loss(), True

    def _shared_loss(self) -> float:
        """The mean over the micro batches that went through the pipelines last, on every rank."""
        losses: list[Tensor] = self._engine.fwd_outputs
        mean = torch.stack(losses).double().mean() if losses else torch.zeros((), dtype=torch.float64)
        return float(mean_over_ranks(mean.to(self.device)) * len(self._stage.spans))


def _pipeline(stage: Stage) -> PipelineModule:
    """DeepSpeed's module with `stage` on this rank.

    Its list has, for every stage, a place for each shared module, which passes hidden states on, and the stage itself:
    equally many for all, so that its division by number gives each stage its own.
    """
    stages = len(stage.spans)
    layers = [layer for index in range(stages) for layer in _layers(stage, index)]
    # It prints the list, and it broadcasts shared parameters as if gradients flowed through that.
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        return PipelineModule(
            layers,
            topology=PipeDataParallelTopology(num_pp=stages, num_dp=world_size() // stages),
            partition_method="uniform",
        )


def _layers(stage: Stage, index: int) -> list[object]:
    shared = [_tie(stage, each) if index in each.stages else _pass_on for each in stage.sharing]
    return [*shared, stage if index == stage.index else _pass_on]


def _tie(stage: Stage, shared: Sharing) -> TiedLayerSpec:
    """DeepSpeed sums the gradients of tied modules over the stages that hold them, and counts them once in norms."""
    return TiedLayerSpec(
        shared.path.replace(".", "_"),
        _Shared,
        stage,
        shared.path,
        forward_fn=lambda module, x: x,
        tied_weight_attr=[f"module.{weight}" for weight in shared.weights],
    )


class _Shared(nn.Module):
    """What DeepSpeed takes for a tied layer: a module that the stage uses by itself."""

    def __init__(self, stage: Stage, path: str) -> None:
        super().__init__()
        self.module = stage.model.get_submodule(path)


def _pass_on(x: Tensor) -> Tensor:
    return x


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
