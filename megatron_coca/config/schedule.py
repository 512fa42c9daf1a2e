"""Keys of the learning-rate schedule, and its formula."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_coca.config.base import ConfigError, ConfigGroup, Count, Fraction, NotNegative, key

NO_STEPS = "train_iters: not set; training needs it, for example `train_iters=1000`"


class ScheduleConfig(ConfigGroup):
    """Learning-rate schedule."""

    train_iters: Count | None = key(None, "Number of optimizer steps.")
    train_epochs: Count | None = key(
        None, "Number of passes over the training shards. Replaces train_iters, which the run then computes at startup."
    )
    min_lr: NotNegative = key(0.0, "Minimum learning rate after the warm-up.")
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "linear_to_min_lr", "wsd"] = key(
        "linear",
        "linear: linear towards 0, but not below min_lr; linear_to_min_lr: linear to min_lr at the horizon;"
        " exponential: half of the peak rate at the horizon; wsd: constant, then a decay to min_lr over the last steps"
        " before the horizon.",
    )
    lr_decay_iters: Count | None = key(None, "Horizon of the decay in steps; null: train_iters.")
    lr_decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = key(
        None, "Horizon of the decay as a fraction of train_iters, if lr_decay_iters is null."
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = key(
        "linear", "wsd: shape of the decay, as in Megatron-LM."
    )
    lr_wsd_decay_iters: Count | None = key(
        None, "wsd: number of steps of the decay, which ends at the horizon; null: a tenth of the horizon."
    )
    warmup: Fraction = key(0.01, "Linear warm-up as a fraction of the horizon.")
    lr_warmup_init: NotNegative = key(0.0, "Learning rate at step 0 of the warm-up.")
    stages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = key(
        None, "List of consecutive training stages, each with the keys that it changes (docs/stages.md)."
    )

    @property
    def decay_iters(self) -> int:
        """Horizon of the decay in steps.

        Raises:
            ConfigError: neither lr_decay_iters nor train_iters is set.
        """
        if self.lr_decay_iters is not None:
            return self.lr_decay_iters
        if self.train_iters is None:
            raise ConfigError(NO_STEPS)
        return int(self.train_iters * (1.0 if self.lr_decay_fraction is None else self.lr_decay_fraction))


DECAYS: dict[str, Callable[[float, float, float], float]] = {
    "constant": lambda progress, peak, low: peak,
    "linear": lambda progress, peak, low: peak * (1.0 - progress),
    "linear_to_min_lr": lambda progress, peak, low: peak + (low - peak) * progress,
    "cosine": lambda progress, peak, low: low + (peak - low) / 2.0 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress, peak, low: peak * 0.5**progress,
}
"""Functions of the progress, the peak rate and the minimum rate, which return the learning rate. The progress is 0 at
the end of the warm-up and 1 at the horizon. A result below the minimum is raised to the minimum.
"""
WSD_DECAYS: dict[str, Callable[[float, float, float], float]] = {
    "linear": DECAYS["linear_to_min_lr"],
    "cosine": DECAYS["cosine"],
    "exponential": lambda progress, peak, low: low + (peak - low) * (2.0 * 0.5**progress - 1.0),
    "minus_sqrt": lambda progress, peak, low: low + (peak - low) * (1.0 - math.sqrt(progress)),
}
"""Like DECAYS, but for the decay of `wsd` in the last steps, with Megatron-LM's shapes."""


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of the optimizer step after `step` completed steps.

    The warm-up is linear from `lr_warmup_init` to `peak` over warmup * horizon steps. After the horizon the rate keeps
    its last value, whereas GPT-NeoX's cosine rises again.
    """
    count, horizon = step + 1, schedule.decay_iters
    warmup = schedule.warmup * horizon
    if count < warmup:
        return schedule.lr_warmup_init + (peak - schedule.lr_warmup_init) * count / warmup
    if schedule.lr_decay_style == "wsd":
        decay = schedule.lr_wsd_decay_iters or max(1.0, horizon / 10)
        progress = min(1.0, max(0.0, 1.0 - (horizon - count) / decay))
        return max(WSD_DECAYS[schedule.lr_wsd_decay_style](progress, peak, schedule.min_lr), schedule.min_lr)
    progress = min(1.0, (count - warmup) / max(horizon - warmup, 1.0))
    return max(DECAYS[schedule.lr_decay_style](progress, peak, schedule.min_lr), schedule.min_lr)
