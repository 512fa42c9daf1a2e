"""What a report holds: the names of its figures, and what the training step gives for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_coca.config import Config

Figures = Mapping[str, float | None]
"""Values by name. None stands for what does not exist at this step, such as the norm of a skipped one."""

UNSAVED = Path("runs/unsaved")
"""Where the figures of a run go that names no folder of its own."""

TIMINGS = frozenset(
    {
        "tokens_per_second",
        "tokens_per_second_per_device",
        "step_seconds",
        "tflops_per_device",
        "mfu",
        "peak_memory_gib",
        "data_wait",
        "save_share",
        "eval_share",
        "eta_seconds",
    }
)
"""Figures of time and memory, which no two runs share."""


class StepFigures(NamedTuple):
    """What one optimizer step gives to report.

    Attributes:
        loss: in nats per token over all ranks; a 0-dimensional tensor is read only when a report is due.
        grad_norm: before clipping, likewise; None where the step has none.
        lr: the learning rate that the step took.
        skipped: whether the optimizer left the weights as they were; may be a tensor too.
        loss_scale: of float16 training; None without.
    """

    loss: float | Tensor
    grad_norm: float | Tensor | None
    lr: float
    skipped: bool | Tensor = False
    loss_scale: float | None = None


class RankFigures(Protocol):
    """Collects a few numbers of every rank."""

    def __call__(self, values: list[float], /) -> list[list[float]]:
        """The values of all ranks, by rank. All ranks call it together, with equally many values."""
        ...


def run_folder(config: Config) -> Path:
    """Where the figures of a run are kept: `log_dir`, else `save`, else `UNSAVED`."""
    return Path(config.logging.log_dir or config.checkpoint.save or UNSAVED)


def last_step(config: Config) -> int:
    """The step after which this launch ends: that of `exit_interval`, or of `train_iters`."""
    steps = config.schedule.train_iters
    assert steps is not None, "training has checked it"
    return min(steps, config.logging.exit_interval or steps)


def as_number(value: float | Tensor | None) -> float | None:
    """A plain number; on a GPU this waits for the tensor's value."""
    return None if value is None else float(value)
