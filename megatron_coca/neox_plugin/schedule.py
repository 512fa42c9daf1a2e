"""The learning rates of our schedule in upstream's scheduler, where the configuration has keys that only ours knows."""

from collections.abc import Callable
from typing import Any

from megatron_coca.config.rates import learning_rate
from megatron_coca.config.training import ScheduleConfig

OURS = "linear_to_min_lr"


def follow_ours(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Upstream's `get_learning_rate_scheduler`, whose schedulers follow ours where they are asked to."""

    def get_learning_rate_scheduler(optimizer: Any, neox_args: Any) -> Any:
        scheduler = original(optimizer, neox_args)
        if scheduler is None or not (neox_args.lr_decay_style == OURS or neox_args.lr_warmup_init):
            return scheduler
        schedule = _schedule(neox_args)
        scheduler.get_lr = lambda: learning_rate(scheduler.num_iters, float(scheduler.start_lr), schedule)
        scheduler.step(scheduler.num_iters)
        return scheduler

    return get_learning_rate_scheduler


def _schedule(neox_args: Any) -> ScheduleConfig:
    given = {name: getattr(neox_args, name) for name in ScheduleConfig.model_fields}
    return ScheduleConfig.model_validate({name: value for name, value in given.items() if value is not None})
