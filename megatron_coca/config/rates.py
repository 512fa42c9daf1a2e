"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

import math
from collections.abc import Callable

from megatron_coca.config.training import ScheduleConfig

DECAYS: dict[str, Callable[[float, float, float], float]] = {
    "constant": lambda progress, peak, low: peak,
    "linear": lambda progress, peak, low: peak * (1.0 - progress),
    "linear_to_min_lr": lambda progress, peak, low: peak + (low - peak) * progress,
    "cosine": lambda progress, peak, low: low + (peak - low) / 2.0 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress, peak, low: peak * 0.5**progress,
}
"""(progress 0..1 from the end of the warm-up to the horizon, peak, minimum) -> learning rate before the floor at the
minimum.
"""


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate of the optimizer step after `step` completed ones.

    A straight line from `lr_warmup_init` reaches `peak` after warmup * horizon steps; then the decay, which is held
    at its end past the horizon (GPT-NeoX's cosine rises again there).
    """
    count, horizon = step + 1, schedule.decay_iters
    warmup = schedule.warmup * horizon
    if count < warmup:
        return schedule.lr_warmup_init + (peak - schedule.lr_warmup_init) * count / warmup
    progress = min(1.0, (count - warmup) / max(horizon - warmup, 1.0))
    return max(DECAYS[schedule.lr_decay_style](progress, peak, schedule.min_lr), schedule.min_lr)
