"""The engine that trains a model with DeepSpeed (ZeRO 0 to 3; tensor, sequence and pipeline parallelism)."""

import contextlib
import io
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor

from megatron_coca.attention.context import WHOLE, HeadShard, assign_shard
from megatron_coca.attention.layer import PARTS
from megatron_coca.attention.ring.exchange import Ring
from megatron_coca.attention.ring.shard import RingShard
from megatron_coca.checkpoints.native.state import (
    LayerShards,
    ParameterSlice,
    StatePiece,
    TensorShard,
    layer_shards,
    shapes_by_prefix,
)
from megatron_coca.config import BatchSizes, Config, ConfigError, ParallelConfig
from megatron_coca.data import Batch
from megatron_coca.model import GPT
from megatron_coca.model.pipeline import PipelineStage, StageInput, layer_weights
from megatron_coca.training.engine import deepspeed_internals as internals
from megatron_coca.training.engine import state
from megatron_coca.training.engine.group import (
    everyone_succeeded,
    gather_floats,
    local_device,
    mean_over_ranks,
    own_group,
    world_size,
)
from megatron_coca.training.engine.inputs import module_inputs
from megatron_coca.training.engine.label_weights import HeldOutLoss, StepLabels, step_labels
from megatron_coca.training.engine.protocol import StepResult
from megatron_coca.training.engine.routing import finish_routing
from megatron_coca.training.monitoring.loss_guard import Limits, bad_reason
from megatron_coca.training.optimizer import set_rates
from megatron_coca.training.topology import zero_section

logger = logging.getLogger(__name__)

RESERVED = {
    *("train_batch_size", "tensor_parallel", "sequence_parallel_size", "data_parallel_size", "checkpoint"),
    *("bf16", "bfloat16", "fp16", "torch_autocast", "optimizer", "scheduler"),
}
"""DeepSpeed keys that this project's own keys replace. `train_batch_size` is not set at all, because DeepSpeed in some
places counts tensor-parallel ranks as data-parallel ranks. DeepSpeed then computes this size itself, but does not use
it.
"""
PER_HEAD = r".*\.(position_(bias|sinks|factor|offsets)|positions\.(others\.\w+\.)?(bias|clex))\..*"
"""Pattern of the names of learned parameters that are replicated on all tensor-parallel ranks. Each rank uses them only
for its own heads, so it computes only part of their gradient.
"""
HEAD_NORMS = r".*\.(query|key)_layernorm\..*"
"""Pattern of the names of the weights of `qk_norm: head`, which all heads share. Each rank computes only part of their
gradient, too.
"""


def deepspeed_config(config: Config, sizes: BatchSizes, frozen: Sequence[str] = ()) -> dict[str, Any]:
    """Build DeepSpeed's own configuration. Every value that affects results is explicit, so that no result depends on a
    DeepSpeed default.

    Raises:
        ConfigError: `deepspeed_extra_args` contains a key for which this project has its own key.
    """
    data = sizes.total // (sizes.micro * sizes.accumulation)
    zero = zero_section(config, data * config.parallel.sequence_ranks, torch.cuda.is_available())
    section: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        # Without ZeRO, our engine clips the gradients, because it computes their norm anyway. DeepSpeed would compute
        # the norm a second time.
        "gradient_clipping": config.optimizer.gradient_clipping if zero["stage"] else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # PyTorch's fused AdamW can update offloaded states too; DeepSpeed's own Adam needs a compiler on every host.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        # This timer waits for the device twice per micro-batch; `Monitor` measures the speed of whole intervals.
        "timers": {"throughput": {"enabled": False}},
    }
    if config.parallel.model_parallel_size > 1:
        section["tensor_parallel"] = _tensor_parallel_section(config, frozen)
    if config.precision.dtype == "bf16":
        # Our engine skips a step if the norm is not finite; DeepSpeed would scan every gradient to detect this.
        section["bf16"] = {"check_grad_overflow": False, **(config.precision.bf16 or {}), "enabled": True}
    if config.precision.dtype == "fp16":
        section["fp16"] = {**(config.precision.fp16 or {}), "enabled": True}
    extra = config.parallel.deepspeed_extra_args or {}
    if taken := sorted((section.keys() | RESERVED) & extra.keys()):
        raise ConfigError(
            f"deepspeed_extra_args: {', '.join(taken)}: set by megatron-coca's own keys; use those (docs/config.md)"
        )
    return section | extra


def _tensor_parallel_section(config: Config, frozen: Sequence[str]) -> dict[str, Any]:
    """Build DeepSpeed's AutoTP section: how the matrices of a block are sharded, and which gradients are summed over
    ranks. `frozen` lists the names of parameters that are never trained.
    """
    model = config.model
    # A projection that is split into three layers has the same rows as the packed projection.
    projections = [
        LayerShards(f"{prefix}attention.query_key_value.{name}", 0, (size,))
        for prefix, shape in shapes_by_prefix(model)
        for name, size in zip(PARTS, (shape.attention_width, *[shape.num_kv_heads * shape.head_dim] * 2), strict=True)
    ]
    specs = [shards.layer_spec() for shards in (*layer_shards(model), *projections)]
    # DeepSpeed cannot register a hook on a frozen parameter.
    trained = f"(?!.*({'|'.join(map(re.escape, frozen))})$){PER_HEAD}" if frozen else PER_HEAD
    partly = [trained] if config.optimizer.trains("positions") else []
    partly += [HEAD_NORMS] if model.qk_norm == "head" and config.optimizer.trains("norms") else []
    if partly:
        specs.append({"patterns": partly, "partition_type": "skip", "grad_allreduce": True})
    return {
        "autotp_size": config.parallel.model_parallel_size,
        "partition_config": {"use_default_specs": False, "layer_specs": specs},
    }


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip gradients in place to the norm `limit` (0: no limit), and return the norm before clipping, a scalar on the
    device.

    This is for training without ZeRO, where the parameters have gradients that are already reduced.
    """
    if limit > 0:
        return nn.utils.clip_grad_norm_(parameters, limit)
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


class DeepSpeedEngine:
    """The engine that trains with DeepSpeed; `protocol.py` describes the methods."""

    copies: frozenset[str] = frozenset()

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        sizes: BatchSizes,
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        """Initialize DeepSpeed. Every rank must call this.

        Args:
            model: maps samples int64 [micro_batch, length + 1] and the other arrays of a batch to a scalar loss.
            names: parameter names in the whole model, by default the names in `model`.

        Raises:
            ConfigError: DeepSpeed does not support the configuration.
        """
        internals.join()
        self._clipping, self._config = config.optimizer.gradient_clipping, config
        self._balancing = getattr(model, "balancing", None)
        self._data_ranks = sizes.total // (sizes.micro * sizes.accumulation)
        # State of the current step: its labels; after all micro-batches, the mean loss on the device; the loss and the
        # gradient norm, once the host has read them; and whether the optimizer changed weights.
        self._counted = StepLabels(0, [])
        self._mean: Tensor | None = None
        self._loss: float | None = None
        self._norm: float | None = None
        self._limits, self._applied = Limits(), False
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        section = deepspeed_config(config, sizes, [name for name in frozen if re.fullmatch(PER_HEAD, f".{name}")])
        apply = optimizer.step

        # DeepSpeed's optimizers call the PyTorch optimizer last, so skipping the step there keeps their bookkeeping
        # intact.
        def step(closure: Any = None) -> Any:
            return apply(closure) if self._accepts_step() else None

        optimizer.step = step  # type: ignore[method-assign]
        try:
            grid = internals.sequence_grid(config.parallel.sequence_ranks)
            with contextlib.nullcontext() if self._balancing is None else self._balancing.kept_corrections():
                self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=section, mpu=grid)[0]
        except internals.DEEPSPEED_ERRORS as error:
            raise ConfigError(
                f"zero_optimization, fp16, bf16 or deepspeed_extra_args: not supported by DeepSpeed ({error}); change "
                "the option that DeepSpeed's message names"
            ) from error
        assign_shard(model, _head_shard(config))
        if world_size() == 1:
            internals.skip_reduction(self._engine)
        internals.stay_on_device(self._engine.optimizer, config.parallel.reduction_wait)
        if not everyone_succeeded(state.in_known_order(self._engine.optimizer)):
            raise ConfigError(
                "zero_optimization: checkpoints do not support DeepSpeed's order of the optimizer states; remove the "
                "option that reorders them (round_robin_gradients)"
            )
        self.device = self._engine.device
        if names is None:  # `saved_names` removes `model.`, the prefix of the model in LanguageModelLoss
            names = state.saved_names(model, config.optimizer.lora is not None)
        self._names = names
        self._added_at: float | None = None

    @property
    def partitioned(self) -> bool:
        """Whether each data-parallel rank has a different part of the state, instead of a full copy."""
        return not isinstance(self._engine.optimizer, torch.optim.Optimizer)

    @property
    def module(self) -> nn.Module:
        """The module passed to the constructor, with parameters in the training dtype (and sharded under ZeRO 3)."""
        return self._engine.module

    @property
    def loss_scale(self) -> float | None:
        """The current fp16 loss scale; None in other dtypes."""
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else None

    def train_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None = None
    ) -> StepResult:
        """Run one optimizer step over this rank's micro-batches. Every rank must call this.

        DeepSpeed's last `step` calls `_accepts_step` before it changes weights. The weights stay unchanged if the loss
        or the gradient norm (over all ranks) is above `limits` or not finite.
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
        """Return the loss on held-out samples. Every rank must call this."""
        self._engine.eval()
        counted = step_labels(micro_batches, self._data_ranks)
        inputs = module_inputs(micro_batches, counted, self.device)
        losses = [self._engine(**arguments).double() for arguments in inputs]
        self._engine.train()
        return HeldOutLoss(float(mean_over_ranks(torch.stack(losses).mean())), counted.labels)

    def pieces(self) -> list[StatePiece]:
        """Return this rank's weights and optimizer states as views of the engine's own memory."""
        return state.model_pieces(self._engine.optimizer, self._names, self._config)

    def parameter_slices(self) -> dict[str, ParameterSlice]:
        """Return, for every parameter, its shape on this rank and this rank's slice of the whole parameter."""
        shapes = state.local_shapes(self._names, self._config)
        return {name: ParameterSlice(shape, self._tensor_shard(name)) for name, shape in shapes.items()}

    def counters(self) -> dict[str, float]:
        """Return the optimizer's step count and, in fp16, the state of the loss scaler."""
        return state.counters(self._engine.optimizer, self._names, self._added_at)

    def restored(self, counters: dict[str, float]) -> None:
        """Continue from `counters` and from the pieces, which the caller has overwritten. Every rank must call this."""
        self._added_at = counters.get(state.ADDED_AT)
        state.set_counters(self._engine.optimizer, counters, self._names)
        state.refresh(self._engine.optimizer, self._names)

    def close(self) -> None:
        """Free the memory of the model and the optimizer, so that another engine can be built."""
        self._names = {}
        self._engine.destroy()
        internals.release(self._engine.optimizer, list(self.module.parameters()))

    def _tensor_shard(self, name: str) -> TensorShard | None:
        """Return this rank's part of the named parameter under tensor parallelism; None means all of it."""
        size = self._config.parallel.model_parallel_size
        if size == 1:
            return None
        rank = internals.get_tensor_model_parallel_rank()
        return next((cut.shard(rank, size) for cut in layer_shards(self._config.model) if cut.holds(name)), None)

    def _begin_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None
    ) -> Iterator[dict[str, Any]]:
        """Prepare a step, and return the inputs of its micro-batches."""
        self._mean = self._loss = self._norm = None
        self._limits, self._applied = limits or Limits(), False
        set_rates(self._engine.optimizer.param_groups, learning_rate)
        self._counted = step_labels(micro_batches, self._data_ranks)
        return module_inputs(micro_batches, self._counted, self.device)

    def _accepts_step(self) -> bool:
        """Decide whether the optimizer may change weights. ZeRO calls this once per parameter group."""
        if self._norm is None:
            self._read_step(internals.gradient_norm(self._engine.optimizer))
        self._applied = bad_reason(self._step_loss(), self._norm, self._limits) is None
        return self._applied

    def _read_step(self, norm: Tensor) -> None:
        """Read the loss and the gradient norm from the device. A step waits for the device only here."""
        both = torch.stack((self._mean_loss().to(self.device), torch.as_tensor(norm, device=self.device).double()))
        self._loss, reported = both.tolist()
        self._norm = reported if reported >= 0 else math.nan  # ZeRO reports -1 for a norm that is not finite

    def _mean_loss(self) -> Tensor:
        """Return the mean loss of the current step over all ranks, a float64 scalar on the device."""
        assert self._mean is not None
        return self._mean

    def _step_loss(self) -> float:
        """Return the loss of the current step over all ranks. After an fp16 overflow, this reads it from the device."""
        if self._loss is None:
            self._loss = float(self._mean_loss())
        return self._loss

    def _step_result(self) -> StepResult:
        loss, norm = self._step_loss(), self._norm
        if norm is None and self.loss_scale is None:
            norm = math.nan  # DeepSpeed skips overflows in every dtype; only in fp16 are they normal
        routing = finish_routing(self._balancing, self._applied)
        return StepResult(loss, norm, not self._applied, self._counted.labels, routing)


@dataclass(frozen=True)
class SequenceShard(RingShard):
    """The shard of a rank that processes one slice of every sequence. The ranks of `group` process all slices together.
    In attention, the ranks of `exchange` have the same tokens and divide the heads. With `averaged` (ZeRO 3), DeepSpeed
    averages gradients over the group instead of summing them.
    """

    group: dist.ProcessGroup | None = None
    exchange: dist.ProcessGroup | None = None
    averaged: bool = False

    def split(self, tokens: Tensor) -> Tensor:
        held = self.held(tokens)
        return held if self.count == 1 else held.chunk(self.count, -1)[self.index]

    def gather(self, x: Tensor) -> Tensor:
        if self.count == 1:
            return x
        return internals.all_to_all(self.exchange, x, 2, 1)  # [batch, length, heads, width]: exchange heads for tokens

    def scatter(self, x: Tensor) -> Tensor:
        return x if self.count == 1 else internals.all_to_all(self.exchange, x, 1, 2)

    def mean(self, loss: Tensor, loss_mask: Tensor | None, length: int) -> Tensor:
        ring = self.ring
        held = length if ring is None else ring.division(length).tokens(ring.rank)
        weight: Tensor | float = held // self.count / length
        if loss_mask is not None:
            weight = self.split(loss_mask).sum() / loss_mask.sum().clamp(min=1)
        ranks = self.count if ring is None else self.count * ring.ranks
        return _SumOverRanks.apply(loss * weight, self.group, ranks if self.averaged else 1)


class _SumOverRanks(torch.autograd.Function):
    """Sum a term over ranks. In the backward pass, each rank gets the gradient of its own term, times `scale`."""

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
    """Return this rank's shard of the heads or of the tokens; a configuration divides at most one of these. DeepSpeed
    must be initialized.
    """
    tensor, parallel = config.parallel.model_parallel_size, config.parallel
    if tensor > 1:
        return HeadShard(internals.get_tensor_model_parallel_rank(), tensor)
    return _sequence_shard(parallel) if parallel.sequence_ranks > 1 else WHOLE


def _sequence_shard(parallel: ParallelConfig) -> SequenceShard:
    """Return this rank's shard of a sequence. `sequence_parallel_size` consecutive ranks divide the heads; the ranks at
    the same place in each of these groups form a ring.
    """
    heads, ranks, group = (
        parallel.sequence_parallel_size,
        parallel.context_parallel_size,
        internals.get_sequence_parallel_group(),
    )
    rank, everyone = dist.get_rank(group), range(world_size())
    exchange, passing = group, group
    if heads > 1 and ranks > 1:
        exchange = own_group([everyone[first : first + heads] for first in everyone[::heads]])
        sequences = [everyone[first : first + heads * ranks] for first in everyone[:: heads * ranks]]
        passing = own_group([sequence[index::heads] for sequence in sequences for index in range(heads)])
    ring = Ring(passing, rank // heads, ranks) if ranks > 1 else None
    if ring is not None:
        # NCCL needs all ranks in the first operation of a group, and a round may skip some of them.
        dist.all_reduce(torch.zeros((), device=local_device()), group=ring.group)
    return SequenceShard(rank % heads, heads, ring, group, exchange, averaged=parallel.stage == 3)


class PipelineEngine(DeepSpeedEngine):
    """An engine for one pipeline stage (ZeRO 0 and 1). Every rank must make the same calls, with the micro-batches of
    its data-parallel copy. Every pipeline stage reads the micro-batches; only hidden states are sent between stages.

    Only the last pipeline stage computes the loss. The other stages receive it when it is first needed: before the
    optimizer changes weights or, after an fp16 overflow (when no rank calls its optimizer), at the end of the step.
    """

    def __init__(
        self, stage: PipelineStage, optimizer: torch.optim.Optimizer, config: Config, sizes: BatchSizes
    ) -> None:
        """`optimizer` updates the parameters of `stage`. The default process group contains the pipeline's ranks."""
        self._stage, self._shape = stage, torch.Size()
        self.copies = stage.copies
        if sizes.accumulation < len(stage.spans):
            logger.warning(
                "gradient_accumulation_steps: %d is less than pipe_parallel_size %d, so pipeline stages are idle most "
                "of the time; increase it",
                sizes.accumulation,
                len(stage.spans),
            )
        super().__init__(_pipeline_module(stage), optimizer, config, sizes, stage.names)
        groups = gather_floats([len(self._engine.optimizer.param_groups)])
        internals.pair_norms(self._engine.optimizer, int(max(groups)[0]))

    def train_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None = None
    ) -> StepResult:
        """Run one optimizer step over the micro-batches of this rank's data-parallel copy; see `Engine.train_step`."""
        self._engine.train_batch(self._feed(self._begin_step(micro_batches, learning_rate, limits)))
        return self._step_result()

    @torch.no_grad()
    def mean_loss(self, micro_batches: Sequence[Batch]) -> HeldOutLoss:
        """Return the loss on held-out samples; see `Engine.mean_loss`."""
        counted, count = step_labels(micro_batches, self._data_ranks), len(micro_batches)
        batches = self._feed(module_inputs(micro_batches, counted, self.device))
        self._engine.eval_batch(batches, reduce_output=None, bcast_loss=False, num_micro_batches=count)
        self._engine.module.train()
        return HeldOutLoss(float(self._mean_loss()), counted.labels)

    def _feed(self, arguments: Iterable[dict[str, Any]]) -> Iterator[tuple[Tensor, None]]:
        """Set the micro-batches of the pipeline stage, and return the inputs of DeepSpeed's first stage."""
        inputs = [StageInput(**each) for each in arguments]
        if inputs[0].samples.shape != self._shape:
            # DeepSpeed sends the shape of the hidden states to the next stage only once, and then assumes that it does
            # not change.
            self._engine.reset_activation_shape()
            self._shape = inputs[0].samples.shape
        self._stage.feed(inputs)
        return iter([(batch.samples, None) for batch in inputs])

    def _mean_loss(self) -> Tensor:
        """Return the mean loss of the last micro-batches, on every rank."""
        losses = internals.stage_losses(self._engine)
        mean = torch.stack(losses).double().mean() if losses else torch.zeros((), dtype=torch.float64)
        return mean_over_ranks(mean.to(self.device)) * len(self._stage.spans)


def cut(model: GPT, config: Config, index: int) -> PipelineStage:
    """Return pipeline stage `index` of `pipe_parallel_size`. It takes over its layers from `model`; the other layers
    are dropped.
    """
    weights = layer_weights(model, config.parallel.pipe_partition_method)
    bounds = internals.partition_balanced(weights, config.parallel.pipe_parallel_size)
    return PipelineStage(model, [int(bound) for bound in bounds], index)


def _pipeline_module(stage: PipelineStage) -> PipelineModule:
    """Wrap `stage` for DeepSpeed.

    For every pipeline stage, DeepSpeed's list of layers contains first the modules that several stages share and then
    the stage itself. The shared modules pass on hidden states unchanged. All stages have the same number of layers, so
    a uniform partition gives every rank its own stage. DeepSpeed sums the gradients of tied layers over the stages that
    contain them, and counts them once in norms.
    """
    internals.join()
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
    # DeepSpeed prints the list of layers, and broadcasts shared parameters with gradients enabled.
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        return PipelineModule(
            layers,
            topology=internals.PipeDataParallelTopology(num_pp=stages, num_dp=world_size() // stages),
            partition_method="uniform",
        )


def _identity(x: Tensor) -> Tensor:
    return x
