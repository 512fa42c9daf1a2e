"""The training engine: one model trained by DeepSpeed (ZeRO 0 to 3, tensor and sequence parallel, pipeline stages)."""

import contextlib
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor

from megatron_coca.attention.context import WHOLE, HeadShard, assign_shard
from megatron_coca.attention.layer import PARTS
from megatron_coca.checkpoints.native.state import LayerShards, ParameterSlice, StatePiece, TensorShard, layer_shards
from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.data import Batch
from megatron_coca.model import GPT, LanguageModelLoss
from megatron_coca.model.pipeline import Stage, StageInput, layer_weights
from megatron_coca.training.engine import deepspeed_internals as internals
from megatron_coca.training.engine import state
from megatron_coca.training.engine.group import everyone_succeeded, local_device, mean_over_ranks, world_size
from megatron_coca.training.engine.label_weights import HeldOutLoss, StepLabels, step_labels
from megatron_coca.training.loss_guard import Limits, bad_reason
from megatron_coca.training.topology import zero_section

logger = logging.getLogger(__name__)

RESERVED = {
    *("train_batch_size", "tensor_parallel", "sequence_parallel_size", "data_parallel_size", "checkpoint"),
    *("bf16", "bfloat16", "fp16", "torch_autocast", "optimizer", "scheduler"),
}
"""DeepSpeed keys for which this project has keys of its own. DeepSpeed computes the total batch itself: it counts
tensor-parallel ranks as data-parallel ones in some places, and does not use the product.
"""
PER_HEAD = r".*\.(position_(bias|sinks|factor)|positions\.(others\.\w+\.)?(bias|clex))\..*"
"""Learned parameters that every tensor-parallel rank holds in full. Each rank uses them for its own heads only, so it
computes a part of their gradient.
"""
HEAD_NORMS = r".*\.(query|key)_layernorm\..*"
"""Weights of `qk_norm: head`, which all heads share. Each rank computes a part of their gradient too."""


def deepspeed_config(config: Config, sizes: BatchSizes) -> dict[str, Any]:
    """Build DeepSpeed's own configuration. Every value that affects a result is explicit: results depend on no default.

    Raises:
        ConfigError: `deepspeed_extra_args` has a key that this project's keys set.
    """
    data = sizes.total // (sizes.micro * sizes.accumulation)
    zero = zero_section(config, data * config.parallel.sequence_parallel_size, torch.cuda.is_available())
    section: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        # Without ZeRO the engine clips: it needs the norm anyway, and DeepSpeed would compute it a second time.
        "gradient_clipping": config.optimizer.gradient_clipping if zero["stage"] else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # PyTorch's fused AdamW steps offloaded states too; DeepSpeed's own needs a compiler on every host.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        # This timer waits for the device twice in every micro-batch; `Monitor` measures the speed of whole intervals.
        "timers": {"throughput": {"enabled": False}},
    }
    if config.parallel.model_parallel_size > 1:
        section["tensor_parallel"] = _tensor_parallel_section(config)
    if config.precision.dtype == "bf16":
        # The engine skips a step if the norm is not finite; DeepSpeed would scan every gradient to find out.
        section["bf16"] = {"check_grad_overflow": False, **(config.precision.bf16 or {}), "enabled": True}
    if config.precision.dtype == "fp16":
        section["fp16"] = {**(config.precision.fp16 or {}), "enabled": True}
    extra = config.parallel.deepspeed_extra_args or {}
    if taken := sorted((section.keys() | RESERVED) & extra.keys()):
        raise ConfigError(f"deepspeed_extra_args: {', '.join(taken)}: have their own keys; use those (docs/config.md)")
    return section | extra


def _tensor_parallel_section(config: Config) -> dict[str, Any]:
    """DeepSpeed's AutoTP section: how the matrices of a block are sharded, and which gradients are summed."""
    model = config.model
    queries, keys = model.attention_width, model.num_kv_heads * model.head_dim
    # A projection in three layers has the same rows as the packed one.
    projections = [
        LayerShards(f"attention.query_key_value.{name}", 0, (size,))
        for name, size in zip(PARTS, (queries, keys, keys), strict=True)
    ]
    specs = [shards.layer_spec() for shards in (*layer_shards(model), *projections)]
    partly = [PER_HEAD] if config.optimizer.trains("positions") else []
    partly += [HEAD_NORMS] if model.qk_norm == "head" and config.optimizer.trains("norms") else []
    if partly:
        specs.append({"patterns": partly, "partition_type": "skip", "grad_allreduce": True})
    return {
        "autotp_size": config.parallel.model_parallel_size,
        "partition_config": {"use_default_specs": False, "layer_specs": specs},
    }


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip gradients in place to the norm `limit`, unless it is 0; returns their norm before, a scalar on the device.

    For training without ZeRO: the parameters then hold their gradients, which are reduced already.
    """
    if limit > 0:
        return nn.utils.clip_grad_norm_(parameters, limit)
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


class StepResult(NamedTuple):
    """The outcome of one optimizer step.

    Attributes:
        loss: mean over the labels of all ranks, in nats per token. Without labels it is 0, and so are all gradients.
        grad_norm: global gradient norm before clipping; None if fp16's loss scaling found an overflow.
        skipped: True if the weights were left unchanged.
        labels: the number of labels on all ranks.
    """

    loss: float
    grad_norm: float | None
    skipped: bool
    labels: int


class Engine:
    """Forward, backward, gradient reduction, clipping and optimizer step, and access to their state."""

    copies: frozenset[str] = frozenset()
    """Names of the parameters that another rank of this model also holds, and saves."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        sizes: BatchSizes,
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        """Initialize DeepSpeed. Every rank must call it.

        Args:
            model: maps samples int64 [micro_batch, length + 1] and the other arrays of a batch to a scalar loss.
            names: names of the parameters in the whole model, by default those in `model`.

        Raises:
            ConfigError: DeepSpeed does not support the configuration.
        """
        self._clipping, self._config = config.optimizer.gradient_clipping, config
        self._data_ranks = sizes.total // (sizes.micro * sizes.accumulation)
        # Of the current step: its labels, the mean of the losses on the device after all micro-batches, the loss and
        # the gradient norm after they are read, and whether the optimizer changed weights.
        self._counted = StepLabels(0, [])
        self._mean: Tensor | None = None
        self._loss: float | None = None
        self._norm: float | None = None
        self._limits, self._applied = Limits(), False
        section = deepspeed_config(config, sizes)
        apply = optimizer.step

        # DeepSpeed's optimizers call PyTorch's last: skipping the step there leaves all their bookkeeping intact.
        def step(closure: Any = None) -> Any:
            return apply(closure) if self._accepts_step() else None

        optimizer.step = step  # type: ignore[method-assign]
        try:
            grid = internals.sequence_grid(config.parallel.sequence_parallel_size)
            self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=section, mpu=grid)[0]
        except internals.DEEPSPEED_ERRORS as error:
            raise ConfigError(
                f"zero_optimization, fp16, bf16 or deepspeed_extra_args: not supported by DeepSpeed ({error}); change "
                "the option that its message names"
            ) from error
        assign_shard(model, _head_shard(config))
        if world_size() == 1 and not self.partitioned:
            internals.skip_reduction(self._engine)
        internals.stay_on_device(self._engine.optimizer)
        if not everyone_succeeded(state.in_known_order(self._engine.optimizer)):
            raise ConfigError(
                "zero_optimization: DeepSpeed keeps optimizer states in an order that checkpoints do not support; "
                "remove the option that reorders them (round_robin_gradients)"
            )
        self.device = self._engine.device
        if names is None:  # in LanguageModelLoss the model is called `model`
            names = {parameter: name.removeprefix("model.") for name, parameter in model.named_parameters()}
        self._names = names

    @property
    def partitioned(self) -> bool:
        """True if data-parallel ranks hold different pieces of the state, not copies of the same."""
        return not isinstance(self._engine.optimizer, torch.optim.Optimizer)

    @property
    def module(self) -> nn.Module:
        """The module given at construction, its parameters in the training dtype (and sharded under ZeRO 3)."""
        return self._engine.module

    @property
    def loss_scale(self) -> float | None:
        """The current factor of fp16's loss scaling; None in other dtypes."""
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else None

    def train_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None = None
    ) -> StepResult:
        """Run one optimizer step over this rank's micro-batches. Every rank must call it.

        The last `step` of DeepSpeed calls `_accepts_step` before it changes weights: they stay unchanged if the loss
        or the gradient norm, both over all ranks, is above `limits` or not finite.
        """
        inputs = self._begin_step(micro_batches, learning_rate, limits)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for index, arguments in enumerate(inputs):
            loss = self._engine(**arguments)
            total += loss.detach()
            self._engine.backward(loss)
            if index == len(micro_batches) - 1:
                self._mean = mean_over_ranks(total / len(micro_batches))
                if not self.partitioned:
                    self._read_step(clip_gradients(self._engine.module.parameters(), self._clipping))
            self._engine.step()
        return self._step_result()

    @torch.no_grad()
    def mean_loss(self, micro_batches: Sequence[Batch]) -> HeldOutLoss:
        """Return the loss of held-out samples. Every rank must call it."""
        self._engine.eval()
        counted = step_labels(micro_batches, self._data_ranks)
        losses = [self._engine(**arguments).double() for arguments in self._inputs(micro_batches, counted)]
        self._engine.train()
        return HeldOutLoss(float(mean_over_ranks(torch.stack(losses).mean())), counted.labels)

    def pieces(self) -> list[StatePiece]:
        """Return this rank's weights and optimizer states as views of the memory that the engine works on."""
        pieces = state.pieces(self._engine.optimizer, self._names)
        return list(state.packed_pieces(pieces, state.packed_parameters(self._names, self._config.model)))

    def parameter_slices(self) -> dict[str, ParameterSlice]:
        """Return the shape of every parameter on this rank, and its slice of the whole parameter."""
        packed = state.packed_parameters(self._names, self._config.model)
        shapes = {name: internals.whole_shape(weight) for weight, name in self._names.items() if name not in packed}
        shapes |= {projection.name: projection.shape for projection in packed.values()}
        return {name: ParameterSlice(shape, self._tensor_shard(name)) for name, shape in shapes.items()}

    def counters(self) -> dict[str, float]:
        """Return the optimizer's step count and, in fp16, the loss scaling's state."""
        return state.counters(self._engine.optimizer)

    def restored(self, counters: dict[str, float]) -> None:
        """Continue from the pieces, which were overwritten, and `counters`. Every rank must call it."""
        state.set_counters(self._engine.optimizer, counters)
        state.refresh(self._engine.optimizer, self._names)

    def close(self) -> None:
        """Free the memory of model and optimizer, so that another engine can be built."""
        self._names = {}
        self._engine.destroy()
        internals.release(self._engine.optimizer, list(self.module.parameters()))

    def _tensor_shard(self, name: str) -> TensorShard | None:
        """This rank's part of the named parameter under tensor parallelism; None for all of it."""
        size = self._config.parallel.model_parallel_size
        if size == 1:
            return None
        rank = internals.get_tensor_model_parallel_rank()
        return next((cut.shard(rank, size) for cut in layer_shards(self._config.model) if cut.holds(name)), None)

    def _begin_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None
    ) -> Iterator[dict[str, Any]]:
        """Set up the step, and return the inputs of its micro-batches."""
        self._mean = self._loss = self._norm = None
        self._limits, self._applied = limits or Limits(), False
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._counted = step_labels(micro_batches, self._data_ranks)
        return self._inputs(micro_batches, self._counted)

    def _inputs(self, micro_batches: Sequence[Batch], counted: StepLabels) -> Iterator[dict[str, Any]]:
        """Yield the keyword arguments of the trained module for each micro-batch."""
        for batch, weight in zip(micro_batches, counted.weights, strict=True):
            yield {**self._tensors(batch), "loss_weight": weight}

    def _tensors(self, batch: Batch) -> dict[str, Tensor]:
        """Return the arrays of a batch as tensors on the module's device. Documents and positions stay on the host: the
        model looks at their values first, and would have to wait for the device.
        """
        tensors = {name: torch.from_numpy(array) for name, array in vars(batch).items() if array is not None}
        tensors["samples"] = tensors.pop("tokens")
        if torch.cuda.is_available():  # a copy overlaps with computation only if it is from pinned memory
            for name in tensors.keys() - {"documents", "positions"}:
                tensors[name] = tensors[name].pin_memory().to(self.device, non_blocking=True)
        return tensors

    def _accepts_step(self) -> bool:
        """Decide if the optimizer may change weights; called once for each of ZeRO's parameter groups."""
        if self._norm is None:
            self._read_step(internals.gradient_norm(self._engine.optimizer))
        self._applied = bad_reason(self._step_loss(), self._norm, self._limits) is None
        return self._applied

    def _read_step(self, norm: Tensor) -> None:
        """Read loss and gradient norm from the device. The step waits for the device only here."""
        both = torch.stack((self._mean_loss().to(self.device), torch.as_tensor(norm, device=self.device).double()))
        self._loss, reported = both.tolist()
        self._norm = reported if reported >= 0 else math.nan  # ZeRO reports -1 for a norm that is not finite

    def _mean_loss(self) -> Tensor:
        """The mean loss of the current step over all ranks, a float64 scalar on the device."""
        assert self._mean is not None
        return self._mean

    def _step_loss(self) -> float:
        """Return the loss of the step over all ranks. After an fp16 overflow it is read here, else with the norm."""
        if self._loss is None:
            self._loss = float(self._mean_loss())
        return self._loss

    def _step_result(self) -> StepResult:
        loss, norm = self._step_loss(), self._norm
        if norm is None and self.loss_scale is None:
            norm = math.nan  # DeepSpeed skips overflowing steps in every dtype; they are a fault except in fp16
        return StepResult(loss, norm, not self._applied, self._counted.labels)


@dataclass(frozen=True)
class SequenceShard(HeadShard):
    """The shard of a rank that holds a slice of every sequence; the ranks of `group` hold the other slices. With
    `averaged`, DeepSpeed averages gradients over the group (ZeRO 3) instead of summing them.
    """

    group: dist.ProcessGroup | None = None
    averaged: bool = False

    def split(self, tokens: Tensor) -> Tensor:
        return tokens.chunk(self.count, -1)[self.index]

    def gather(self, x: Tensor) -> Tensor:
        return internals.all_to_all(self.group, x, 2, 1)  # [batch, length, heads, width]: exchange heads for tokens

    def scatter(self, x: Tensor) -> Tensor:
        return internals.all_to_all(self.group, x, 1, 2)

    def mean(self, loss: Tensor, loss_mask: Tensor | None) -> Tensor:
        weight: Tensor | float = 1 / self.count
        if loss_mask is not None:
            weight = self.split(loss_mask).sum() / loss_mask.sum().clamp(min=1)
        return _SumOverRanks.apply(loss * weight, self.group, self.count if self.averaged else 1)


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; each rank gets the gradient of its own term, multiplied by `scale`."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, group: dist.ProcessGroup, scale: int) -> Tensor:
        ctx.scale = scale
        total = term.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.scale, None, None


def _head_shard(config: Config) -> HeadShard:
    """Return this rank's heads or tokens; the configuration divides at most one. DeepSpeed must be initialized."""
    tensor, sequence = config.parallel.model_parallel_size, config.parallel.sequence_parallel_size
    if tensor > 1:
        return HeadShard(internals.get_tensor_model_parallel_rank(), tensor)
    if sequence > 1:
        group = internals.get_sequence_parallel_group()
        return SequenceShard(dist.get_rank(group), sequence, group, averaged=config.parallel.stage == 3)
    return WHOLE


class PipelineEngine(Engine):
    """An engine for one pipeline stage (ZeRO 0 and 1). Every rank must make the same calls, with the micro-batches of
    its data-parallel copy. Every pipeline stage reads them; only hidden states are sent.

    Only the last pipeline stage computes a loss. The others receive it when it is first needed: before the optimizer
    changes weights, or after an fp16 overflow, in which no rank's optimizer is called.
    """

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer, config: Config, sizes: BatchSizes) -> None:
        """`optimizer` steps the parameters of `stage`; the default process group has the ranks of the pipeline."""
        self._stage, self._shape = stage, torch.Size()
        self.copies = stage.copies
        if sizes.accumulation < len(stage.spans):
            logger.warning(
                "gradient_accumulation_steps: %d is below pipe_parallel_size %d, so pipeline stages wait most of the "
                "time; raise it",
                sizes.accumulation,
                len(stage.spans),
            )
        super().__init__(_pipeline_module(stage), optimizer, config, sizes, stage.names)

    def train_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None = None
    ) -> StepResult:
        """Run one optimizer step over the micro-batches of this rank's data-parallel copy; see `Engine.train_step`."""
        self._engine.train_batch(self._feed(self._begin_step(micro_batches, learning_rate, limits)))
        return self._step_result()

    @torch.no_grad()
    def mean_loss(self, micro_batches: Sequence[Batch]) -> HeldOutLoss:
        """Return the loss of held-out samples; see `Engine.mean_loss`."""
        counted, count = step_labels(micro_batches, self._data_ranks), len(micro_batches)
        batches = self._feed(self._inputs(micro_batches, counted))
        self._engine.eval_batch(batches, reduce_output=None, bcast_loss=False, num_micro_batches=count)
        self._engine.module.train()
        return HeldOutLoss(float(self._mean_loss()), counted.labels)

    def _feed(self, arguments: Iterable[dict[str, Any]]) -> Iterator[tuple[Tensor, None]]:
        """Give the pipeline stage its micro-batches; returns the input of DeepSpeed's first stage."""
        inputs = [StageInput(**each) for each in arguments]
        if inputs[0].samples.shape != self._shape:
            # DeepSpeed sends a shape to the next stage once, and then assumes that it does not change.
            self._engine.reset_activation_shape()
            self._shape = inputs[0].samples.shape
        self._stage.feed(inputs)
        return iter([(batch.samples, None) for batch in inputs])

    def _mean_loss(self) -> Tensor:
        """The mean loss of the last micro-batches, on every rank."""
        losses = internals.stage_losses(self._engine)
        mean = torch.stack(losses).double().mean() if losses else torch.zeros((), dtype=torch.float64)
        return mean_over_ranks(mean.to(self.device)) * len(self._stage.spans)


def cut(model: GPT, config: Config, index: int) -> Stage:
    """Return pipeline stage `index` of `pipe_parallel_size`. It takes its layers from `model`; the rest is dropped."""
    weights = layer_weights(model, config.parallel.pipe_partition_method)
    bounds = internals.partition_balanced(weights, config.parallel.pipe_parallel_size)
    return Stage(model, [int(bound) for bound in bounds], index)


def _pipeline_module(stage: Stage) -> PipelineModule:
    """Wrap `stage` for DeepSpeed.

    For every pipeline stage, the list of layers has the modules that several stages share, which only pass hidden
    states on, and then the stage itself. All stages have the same number of layers, so a uniform partition gives every
    rank its own stage. DeepSpeed sums the gradients of tied layers over the stages that hold them, and counts them once
    in norms.
    """
    stages = len(stage.spans)
    layers: list[object] = []
    for index in range(stages):
        for shared in stage.sharing:
            if index not in shared.stages:
                layers.append(_identity)
                continue
            modules = {"module": stage.model.get_submodule(shared.path)} if index == stage.index else {}
            tied = [f"module.{weight}" for weight in shared.weights]
            key, pass_on = shared.path.replace(".", "_"), lambda module, x: x
            layers.append(TiedLayerSpec(key, nn.ModuleDict, modules, forward_fn=pass_on, tied_weight_attr=tied))
        layers.append(stage if index == stage.index else _identity)
    # DeepSpeed prints the list, and broadcasts shared parameters as if gradients flowed through the broadcast.
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        return PipelineModule(
            layers,
            topology=internals.PipeDataParallelTopology(num_pp=stages, num_dp=world_size() // stages),
            partition_method="uniform",
        )


def _identity(x: Tensor) -> Tensor:
    return x


def build_engine(
    model: GPT,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    config: Config,
    sizes: BatchSizes,
    stage: int,
) -> Engine:
    """Build the engine that trains `model`, or pipeline stage `stage` of it on this rank. Every rank must call it.

    `model` has its weights in host memory; `optimizer` builds the optimizer of the trained parameters of a module.

    Raises:
        ConfigError: DeepSpeed does not support the configuration, or a pipeline stage has no weights to train.
    """
    if config.parallel.pipe_parallel_size <= 1:
        whole = LanguageModelLoss(model.to(local_device()))
        return Engine(whole, optimizer(whole), config, sizes)
    own = cut(model, config, stage).to(local_device())
    if not everyone_succeeded(any(parameter.requires_grad for parameter in own.parameters())):
        raise ConfigError(
            f"trainable: a stage of pipe_parallel_size {config.parallel.pipe_parallel_size} has no weights to train "
            f"with {', '.join(config.optimizer.trainable or ())}; use fewer stages, another pipe_partition_method, "
            "or tensor, sequence or data parallelism"
        )
    return PipelineEngine(own, optimizer(own), config, sizes)
