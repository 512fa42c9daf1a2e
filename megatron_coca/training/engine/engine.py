"""A model being trained by DeepSpeed: ZeRO 0 to 3."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.nn as nn
from deepspeed.runtime.config import DeepSpeedConfigError
from pydantic import ValidationError
from torch import Tensor

from megatron_coca.attention.context import assign_shard
from megatron_coca.checkpoints.state import ParameterSlice, StatePiece
from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.data import Batch
from megatron_coca.training.engine import state
from megatron_coca.training.engine.division import division
from megatron_coca.training.engine.group import everyone_succeeded, mean_over_ranks, world_size
from megatron_coca.training.engine.state import local_shape, packed_pieces, packed_places
from megatron_coca.training.loss_guard import Limits, bad_reason
from megatron_coca.training.topology import effective_stage

RESERVED = frozenset(
    {
        "train_batch_size",
        "tensor_parallel",
        "sequence_parallel_size",
        "data_parallel_size",
        "bf16",
        "bfloat16",
        "fp16",
        "torch_autocast",
        "optimizer",
        "scheduler",
        "checkpoint",
    }
)
"""Keys of DeepSpeed that keys of our own stand for. The total batch is left to DeepSpeed's arithmetic, which takes
tensor ranks for ranks that read samples of their own in some places and not in others, and uses the product for
nothing.
"""


def deepspeed_config(config: Config, sizes: BatchSizes, division: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """DeepSpeed's own configuration. Every value that matters is spelled out, so that its defaults never decide a
    result. `division` is the section of what divides the model among ranks, if anything does.
    """
    data = sizes.total // (sizes.micro * sizes.accumulation)
    stage = effective_stage(config, data * config.parallel.sequence_parallel_size)
    section: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        # Without ZeRO the engine clips: it needs the norm in any case, which DeepSpeed would compute again.
        "gradient_clipping": config.optimizer.gradient_clipping if stage else 0.0,
        "zero_optimization": {**(config.parallel.zero_optimization or {}), "stage": stage},
        "zero_allow_untested_optimizer": True,
        # PyTorch's fused AdamW serves offloaded states too; DeepSpeed's own needs a compiler on every host.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        **(division or {}),
    }
    if config.precision.dtype == "bf16":
        section["bf16"] = {**(config.precision.bf16 or {}), "enabled": True}
    if config.precision.dtype == "fp16":
        section["fp16"] = {**(config.precision.fp16 or {}), "enabled": True}
    extra = config.parallel.deepspeed_extra_args or {}
    taken = sorted((section.keys() | RESERVED) & extra.keys())
    if taken:
        raise ConfigError(
            [f"deepspeed_extra_args: {', '.join(taken)}: set by keys of their own; use those (docs/config.md)"]
        )
    return section | extra


MODEL_PREFIX = "model."
"""The language model's name inside the trained module (LanguageModelLoss)."""


REFUSALS = (ValidationError, DeepSpeedConfigError, AssertionError, ValueError, NotImplementedError)
"""What DeepSpeed raises for options that it cannot serve."""


class StepResult(NamedTuple):
    """What one optimizer step reports.

    Attributes:
        loss: mean over all ranks, in nats per token.
        grad_norm: before clipping; None where DeepSpeed found an overflow of fp16's loss scaling.
        skipped: whether the weights were left as they were.
    """

    loss: float
    grad_norm: float | None
    skipped: bool


class Engine:
    """Forward, backward, reduction, clipping, optimizer, and the state of these in pieces."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, sizes: BatchSizes) -> None:
        """`model` maps samples [micro_batch, length + 1], and what else a batch has, to a scalar loss (as
        LanguageModelLoss); `sizes` are those of this world size.
        """
        self._clipping, self._model = config.optimizer.gradient_clipping, config.model
        self._step = _OneStep()
        optimizer.step = _gated(optimizer.step, self._open)  # type: ignore[method-assign]
        self._division = division(config)
        self._engine = self._initialize(model, optimizer, deepspeed_config(config, sizes, self._division.section()))
        assign_shard(model, self._division.share())
        if world_size() == 1 and not self.partitioned:
            # DeepSpeed would flatten all gradients, reduce them over one rank and copy them back.
            self._engine.enable_backward_allreduce = False
        if not everyone_succeeded(state.in_known_order(self._engine.optimizer)):
            raise ConfigError(
                [
                    "zero_optimization: DeepSpeed keeps optimizer states in an order that checkpoints do not know; leave out "
                    "what reorders them (round_robin_gradients)"
                ]
            )
        self.device = self._engine.device
        self._names = {parameter: name.removeprefix(MODEL_PREFIX) for name, parameter in model.named_parameters()}

    def _initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer, section: dict[str, Any]) -> Any:
        try:
            grid = self._division.grid()
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=section, mpu=grid)
        except REFUSALS as error:
            raise ConfigError(
                [f"zero_optimization, fp16, bf16 or deepspeed_extra_args: DeepSpeed says: {error}"]
            ) from error
        return engine

    @property
    def copies(self) -> frozenset[str]:
        """Names of the parameters whose pieces another rank of this model holds too, and writes."""
        return frozenset()

    @property
    def partitioned(self) -> bool:
        """Whether ranks that read different samples hold different pieces, rather than copies of the same."""
        return not isinstance(self._engine.optimizer, torch.optim.Optimizer)

    @property
    def module(self) -> nn.Module:
        """The module given at construction, its parameters in the training dtype (and sharded under ZeRO 3)."""
        return self._engine.module

    def train_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None = None
    ) -> StepResult:
        """One optimizer step over this rank's micro batches."""
        self._set_rate(learning_rate)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for index, batch in enumerate(micro_batches):
            loss = self._engine(**self._inputs(batch))
            total += loss.detach()
            self._engine.backward(loss)
            if index == len(micro_batches) - 1:
                self._step = _OneStep(float(mean_over_ranks(total / len(micro_batches))), limits or Limits())
                self._clip_plain_gradients()
            self._engine.step()
        return self._result()

    @torch.no_grad()
    def mean_loss(self, micro_batches: Sequence[Batch]) -> float:
        """The loss of held-out samples, averaged over all ranks."""
        self._engine.eval()
        losses = [self._engine(**self._inputs(batch)).double() for batch in micro_batches]
        self._engine.train()
        return float(mean_over_ranks(torch.stack(losses).mean()))

    def pieces(self) -> list[StatePiece]:
        """What this rank holds of weights and optimizer states, as the memory that the engine works on."""
        pieces = state.pieces(self._engine.optimizer, self._names)
        return list(packed_pieces(pieces, packed_places(self._names, self._model)))

    def places(self) -> dict[str, ParameterSlice]:
        """The shape of every parameter on this rank, and which part of the whole it is."""
        parts = packed_places(self._names, self._model)
        shapes = {name: local_shape(parameter) for parameter, name in self._names.items() if name not in parts}
        shapes |= {packed.name: packed.shape for packed in parts.values()}
        return {name: ParameterSlice(shape, self._division.shard(name)) for name, shape in shapes.items()}

    @property
    def loss_scale(self) -> float | None:
        """What float16 losses are multiplied with now; None in other number formats."""
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else None

    def counters(self) -> dict[str, float]:
        """The numbers that belong to the pieces."""
        return state.counters(self._engine.optimizer)

    def restored(self, counters: dict[str, float]) -> None:
        """Take the pieces as they were written to, and the counters, for its state. Every rank must call it."""
        state.set_counters(self._engine.optimizer, counters)
        state.refresh(self._engine.optimizer, self._names)

    def _set_rate(self, learning_rate: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """What the trained module is called with: the arrays that the batch has, on the device."""
        arrays = {name: array for name, array in vars(batch).items() if array is not None}
        arrays["samples"] = arrays.pop("tokens")
        return {name: self._on_device(array) for name, array in arrays.items()}

    def _on_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        # Only from pinned memory does the copy run beside the computation.
        return tensor.pin_memory().to(self.device, non_blocking=True) if torch.cuda.is_available() else tensor

    def _clip_plain_gradients(self) -> None:
        """Without ZeRO the reduced gradients lie in the parameters, and DeepSpeed reports no norm of them."""
        if self.partitioned:
            return
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._clipping > 0:
            nn.utils.clip_grads_with_norm_(parameters, self._clipping, norm)
        self._step.norm = float(norm)

    def _open(self) -> bool:
        """Whether the optimizer may change weights; asked when it is about to, once for each group of them."""
        step = self._step
        if step.norm is None:
            reported = float(self._engine.optimizer._global_grad_norm)
            step.norm = reported if reported >= 0 else math.nan  # DeepSpeed writes -1 for a norm that is not finite
        step.applied = bad_reason(step.loss, step.norm, step.limits) is None
        return step.applied

    def _result(self) -> StepResult:
        norm = self._step.norm
        if norm is None and self.loss_scale is None:
            norm = math.nan  # DeepSpeed leaves out such steps in every number format, but only fp16 provokes them
        return StepResult(self._step.loss, norm, not self._step.applied)


class _OneStep:
    """What is known of the step under way."""

    def __init__(self, loss: float = math.nan, limits: Limits | None = None) -> None:
        self.loss, self.limits = loss, limits or Limits()
        self.norm: float | None = None
        self.applied = False


def _gated(step: Callable[..., Any], is_open: Callable[[], bool]) -> Callable[..., Any]:
    """An optimizer's `step` that does nothing while the gate is shut.

    DeepSpeed's optimizers call PyTorch's at their end: shutting it there leaves all their bookkeeping as it is.
    """

    def gated(closure: Any = None) -> Any:
        return step(closure) if is_open() else None

    return gated
