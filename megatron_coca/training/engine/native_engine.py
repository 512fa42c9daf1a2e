"""The engine for data parallelism in bfloat16 and float32: PyTorch without DeepSpeed, with few calls on the host."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.checkpoints.native.state import ParameterSlice, StatePiece
from megatron_coca.config import BatchSizes, Config
from megatron_coca.data import Batch
from megatron_coca.training.engine import group, state
from megatron_coca.training.engine.flat_weights import FlatWeights
from megatron_coca.training.engine.inputs import module_inputs
from megatron_coca.training.engine.label_weights import HeldOutLoss, step_labels
from megatron_coca.training.engine.passes import CapturedPass, run_pass
from megatron_coca.training.engine.protocol import StepResult
from megatron_coca.training.engine.routing import finish_routing
from megatron_coca.training.monitoring.loss_guard import Limits, bad_reason
from megatron_coca.training.optimizer import set_rates
from megatron_coca.training.topology import zero_section

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLIP_MARGIN = 1e-4
"""Gradients are not clipped if their norm is below the limit by at least this share of the limit, because rounding
errors could make `clip` change them.
"""


class WholeWeights:
    """The trained weights of a single process in float32, which the optimizer updates directly. The methods are those
    of `FlatWeights`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """The norm is summed in the order of `parameters`, all parameters of the model."""
        self.optimizer, self._parameters = optimizer, list(parameters)

    def begin_pass(self, last: bool, overlaps: bool = True) -> None:
        """Do nothing: gradients stay in their parameters."""

    def end_pass(self) -> None:
        """Do nothing: gradients stay in their parameters."""

    def norm(self) -> Tensor:
        """Return the global norm of the gradient, a scalar on the device."""
        return nn.utils.get_total_norm([each.grad for each in self._parameters if each.grad is not None])

    def clip(self, norm: Tensor, limit: float) -> None:
        """Multiply the gradient by limit / norm if `norm` is above `limit`."""
        nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)

    def step(self) -> None:
        """Update the weights with the gradient."""
        self.optimizer.step()

    def clear(self) -> None:
        """Remove the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Free the memory."""
        for parameter in self._parameters:
            parameter.data, parameter.grad = parameter.detach().new_empty(0), None
        self.optimizer.state.clear()


class NativeEngine:
    """Trains a model of which every rank has all weights; `protocol.py` describes the methods."""

    copies: frozenset[str] = frozenset()
    loss_scale: float | None = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, sizes: BatchSizes) -> None:
        """Move the weights to the memory of the engine. All ranks begin with the weights of rank 0. Every rank must
        call this.

        Args:
            model: maps samples int64 [micro_batch, length + 1] and the other arrays of a batch to a scalar loss.
            optimizer: an optimizer of the parameters of `model` that updates each element by itself, or Muon.
        """
        self._config, self._clipping = config, config.optimizer.gradient_clipping
        self._data_ranks = sizes.total // (sizes.micro * sizes.accumulation)
        self.device = next(model.parameters()).device
        dtype, ranks = DTYPES[config.precision.dtype], group.world_size()
        self._module = model.to(dtype)
        self._balancing = getattr(model, "balancing", None)
        group.send_weights(model)
        self._names = state.saved_names(model, config.optimizer.lora is not None)
        self._weights: FlatWeights | WholeWeights
        if ranks == 1 and dtype == torch.float32:
            self._weights = WholeWeights(optimizer, model.parameters())
        else:
            bucket = int(zero_section(config, ranks, torch.cuda.is_available())["reduce_bucket_size"])
            sums_in_float32 = config.parallel.accumulates_in_fp32 and dtype != torch.float32
            self._weights = FlatWeights(optimizer, group.rank(), ranks, bucket, sums_in_float32)
        self._captured = CapturedPass(self._module, self.device) if config.parallel.cuda_graphs else None
        self._added_at: float | None = None

    @property
    def partitioned(self) -> bool:
        """Whether each data-parallel rank has a different part of the state, instead of a full copy."""
        return isinstance(self._weights, FlatWeights)

    @property
    def _states(self) -> FlatWeights | torch.optim.Optimizer:
        """The object with the optimizer states, which the functions of state.py take as `optimizer`."""
        return self._weights if isinstance(self._weights, FlatWeights) else self._weights.optimizer

    def train_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None = None
    ) -> StepResult:
        """Run one optimizer step over this rank's micro-batches. Every rank must call this."""
        weights, parts = self._weights, len(micro_batches)
        set_rates(weights.optimizer.param_groups, learning_rate)
        counted = step_labels(micro_batches, self._data_ranks)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for index, arguments in enumerate(module_inputs(micro_batches, counted, self.device)):
            total += self._run_micro_batch(arguments, parts, index == parts - 1)
        norm, mean = weights.norm(), group.mean_over_ranks(total / parts)
        both = torch.stack((mean, norm.double())).tolist()  # a step waits for the device only here
        taken = bad_reason(both[0], both[1], limits or Limits()) is None
        if taken:
            if self._clipping and both[1] > self._clipping * (1 - CLIP_MARGIN):
                weights.clip(norm, self._clipping)
            weights.step()
        weights.clear()
        routing = finish_routing(self._balancing, taken)
        return StepResult(both[0], both[1], not taken, counted.labels, routing)

    def _run_micro_batch(self, arguments: Mapping[str, Any], parts: int, last: bool) -> Tensor:
        """Add the gradient of a micro-batch to the sum of the step, and return the loss of the micro-batch."""
        captured = self._captured is not None
        self._weights.begin_pass(last, overlaps=not captured)
        loss = (self._captured or partial(run_pass, self._module))(arguments, parts)
        self._weights.end_pass()
        return loss

    @torch.no_grad()
    def mean_loss(self, micro_batches: Sequence[Batch]) -> HeldOutLoss:
        """Return the loss on held-out samples. Every rank must call this."""
        self._module.eval()
        counted = step_labels(micro_batches, self._data_ranks)
        inputs = module_inputs(micro_batches, counted, self.device)
        losses = [self._module(**arguments).double() for arguments in inputs]
        self._module.train()
        return HeldOutLoss(float(group.mean_over_ranks(torch.stack(losses).mean())), counted.labels)

    def pieces(self) -> list[StatePiece]:
        """Return this rank's weights and optimizer states as views of the engine's own memory."""
        return state.model_pieces(self._states, self._names, self._config)

    def parameter_slices(self) -> dict[str, ParameterSlice]:
        """Return the shape of every parameter. Every rank has all of each parameter."""
        return {name: ParameterSlice(shape) for name, shape in state.local_shapes(self._names, self._config).items()}

    def counters(self) -> dict[str, float]:
        """Return the optimizer's step count."""
        return state.counters(self._states, self._names, self._added_at)

    def restored(self, counters: dict[str, float]) -> None:
        """Continue from `counters` and from the pieces, which the caller has overwritten. Every rank must call this."""
        self._added_at = counters.get(state.ADDED_AT)
        state.set_counters(self._states, counters, self._names)
        state.refresh(self._states, self._names)

    def close(self) -> None:
        """Free the memory of the model and the optimizer, so that another engine can be built."""
        self._names = {}
        if self._captured is not None:
            self._captured.close()
        self._weights.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
