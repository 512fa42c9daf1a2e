"""The one place that knows DeepSpeed."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from pydantic import ValidationError
from torch import Tensor

from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.data import Batch

# DeepSpeed looks for an accelerator while it is imported, and warns where it finds none: tell it.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfigError  # noqa: E402

_TAG = "state"


class StepResult(NamedTuple):
    """What one optimizer step reports: mean loss in nats per token over all ranks, and the gradient norm before
    clipping.

    The norm is None where the step was skipped for an overflow.
    """

    loss: float
    grad_norm: float | None


def init_distributed() -> None:
    """Join the process group that the launcher's environment describes (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT).
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On CPU DeepSpeed would compile a shared-memory all-reduce at start; gloo needs no compiler on the machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)


class Engine:
    """A model being trained: forward, backward, reduction, clipping, optimizer, and its state on disk."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, sizes: BatchSizes) -> None:
        """`model` maps samples [micro_batch, length + 1], and what else a batch has, to a scalar loss (as
        LanguageModelLoss); `sizes` are those of this world size.
        """
        section = deepspeed_config(config, sizes)
        try:
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=section)
        except (ValidationError, DeepSpeedConfigError) as error:
            raise ConfigError(
                [f"zero_optimization, fp16, bf16 or deepspeed_extra_args: DeepSpeed says: {error}"]
            ) from error
        self._sharded = config.parallel.stage == 3
        self.device = self._engine.device

    @property
    def module(self) -> nn.Module:
        """The module given at construction, its parameters in the training dtype (and sharded under ZeRO 3)."""
        return self._engine.module

    def train_step(self, micro_batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """One optimizer step over this rank's micro batches."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        norm = None
        for index, batch in enumerate(micro_batches):
            loss = self._engine(**self._inputs(batch))
            total += loss.detach()
            self._engine.backward(loss)
            if index == len(micro_batches) - 1:
                norm = self._norm_before_step()
            self._engine.step()
        return StepResult(self._mean(total / len(micro_batches)), self._norm_after_step(norm))

    @torch.no_grad()
    def mean_loss(self, micro_batches: Sequence[Batch]) -> float:
        """The loss of held-out samples, averaged over all ranks."""
        self._engine.eval()
        losses = [self._engine(**self._inputs(batch)).double() for batch in micro_batches]
        self._engine.train()
        return self._mean(torch.stack(losses).mean())

    def weights(self) -> dict[str, Tensor]:
        """All weights of the module on the CPU, in the training dtype. Every rank must call it; the first one gets
        the result.
        """
        if self._sharded:
            gathered = self._engine._zero3_consolidated_16bit_state_dict() or {}
        else:
            gathered = self._engine.module.state_dict()
        return {name: tensor.detach().cpu().contiguous() for name, tensor in gathered.items()}

    def save(self, folder: Path) -> None:
        """Write optimizer and parameter state below `folder`. Every rank must call it."""
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, at the same world size and ZeRO stage. Every rank must call it."""
        self._engine.load_checkpoint(str(folder), tag=_TAG, load_lr_scheduler_states=False)

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """What the trained module is called with: the arrays that the batch has, on the device."""
        arrays = {name: array for name, array in vars(batch).items() if array is not None}
        arrays["samples"] = arrays.pop("tokens")
        return {name: self._on_device(array) for name, array in arrays.items()}

    def _on_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        # Only from pinned memory does the copy run beside the computation.
        return tensor.pin_memory().to(self.device, non_blocking=True) if torch.cuda.is_available() else tensor

    def _mean(self, value: Tensor) -> float:
        if world_size() > 1:
            dist.all_reduce(value)
        return float(value) / world_size()

    def _norm_before_step(self) -> float | None:
        """DeepSpeed reports no norm for plain float32 without ZeRO; there the reduced gradients lie in the
        parameters.
        """
        if isinstance(self._engine.optimizer, torch.optim.Optimizer):
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            return float(nn.utils.get_total_norm(gradients))
        return None

    def _norm_after_step(self, before: float | None) -> float | None:
        reported = before if before is not None else self._engine.get_global_grad_norm()
        skipped = getattr(self._engine.optimizer, "overflow", False)
        return None if skipped or reported is None else float(reported)


def deepspeed_config(config: Config, sizes: BatchSizes) -> dict[str, Any]:
    """DeepSpeed's own configuration. Every value that matters is spelled out, so that its defaults never decide a
    result.
    """
    section: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        "train_batch_size": sizes.total,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_optimization": {**(config.parallel.zero_optimization or {}), "stage": config.parallel.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
    }
    if config.precision.dtype == "bf16":
        section["bf16"] = {**(config.precision.bf16 or {}), "enabled": True}
    if config.precision.dtype == "fp16":
        section["fp16"] = {**(config.precision.fp16 or {}), "enabled": True}
    extra = config.parallel.deepspeed_extra_args or {}
    taken = sorted(section.keys() & extra.keys())
    if taken:
        raise ConfigError(
            [f"deepspeed_extra_args: {', '.join(taken)}: set by keys of their own; use those (docs/config.md)"]
        )
    return section | extra


def rank() -> int:
    """This process's number in the run."""
    return dist.get_rank()


def world_size() -> int:
    """Processes in the run."""
    return dist.get_world_size()


def is_main() -> bool:
    """Whether this process writes what is written once."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def everyone_succeeded(succeeded: bool) -> bool:
    """Whether all ranks say so: a failure on one rank must end the save on all."""
    flag = torch.tensor(int(succeeded), device=local_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def local_device() -> str:
    """The device of this process: its own GPU, or the CPU."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"


def shut_down() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
