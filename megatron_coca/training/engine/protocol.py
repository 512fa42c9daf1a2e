"""The interface of all engines, through which the training loop, the checkpoints and the run use an engine."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from megatron_coca.checkpoints.native.state import ParameterSlice, StatePiece
from megatron_coca.data import Batch
from megatron_coca.model.experts import StepRouting
from megatron_coca.training.engine.label_weights import HeldOutLoss
from megatron_coca.training.monitoring.loss_guard import Limits


class StepResult(NamedTuple):
    """The outcome of one optimizer step.

    Attributes:
        loss: mean over the labels of all ranks, in nats per token. Without labels, the loss and all gradients are 0.
        grad_norm: global gradient norm before clipping; None if the fp16 loss scaler found an overflow.
        skipped: whether the weights were left unchanged.
        labels: number of labels on all ranks.
        routing: the choices and losses of the routers of all ranks; None without mixtures of experts.
    """

    loss: float
    grad_norm: float | None
    skipped: bool
    labels: int
    routing: StepRouting | None = None


class Engine(Protocol):
    """Runs forward pass, backward pass, gradient reduction, clipping and optimizer step, and exposes the weights and
    optimizer states. Every rank makes the same calls in the same order.
    """

    device: torch.device

    @property
    def copies(self) -> frozenset[str]:
        """Names of the parameters that this rank does not save, because another rank of this model saves its copy."""

    @property
    def partitioned(self) -> bool:
        """Whether each data-parallel rank has a different part of the state, instead of a full copy."""

    @property
    def loss_scale(self) -> float | None:
        """The current fp16 loss scale; None in other dtypes."""

    def train_step(
        self, micro_batches: Sequence[Batch], learning_rate: float, limits: Limits | None = None
    ) -> StepResult:
        """Run one optimizer step over this rank's micro-batches. The weights stay unchanged if the loss or the gradient
        norm (over all ranks) is above `limits` or not finite.
        """

    def mean_loss(self, micro_batches: Sequence[Batch]) -> HeldOutLoss:
        """Return the loss on held-out samples."""

    def pieces(self) -> list[StatePiece]:
        """Return this rank's weights and optimizer states as views of the engine's own memory."""

    def parameter_slices(self) -> dict[str, ParameterSlice]:
        """Return, for every parameter, its shape on this rank and this rank's slice of the whole parameter."""

    def counters(self) -> dict[str, float]:
        """Return the optimizer's step count and, in fp16, the state of the loss scaler."""

    def restored(self, counters: dict[str, float]) -> None:
        """Continue from `counters` and from the pieces, which the caller has overwritten."""

    def close(self) -> None:
        """Free the memory of the model and the optimizer, so that another engine can be built."""
