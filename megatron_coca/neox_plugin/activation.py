"""Putting the plugin into upstream's modules, once."""

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_coca.config.training import ScheduleConfig, learning_rate
from megatron_coca.neox_plugin.attention import checking_model, dispatcher
from megatron_coca.neox_plugin.checkpoints import checking_args, recording
from megatron_coca.neox_plugin.config_files import extend_arguments
from megatron_coca.neox_plugin.keys import is_asked_for
from megatron_coca.neox_plugin.wrapping import TESTED_COMMIT, Function, called, commit, upstream, wrap


def forgetting(original: Function) -> Function:
    """Upstream's `stream_tokens`, which begins with an empty cache: else a prompt from a file follows the one before it,
    and where upstream's rotary positions stop at that, other positions do not.
    """

    def stream_tokens(neox_args: Any, model: Any, *given: Any, **named: Any) -> Any:
        if is_asked_for(neox_args):
            model.module.clear_cache()
        return original(neox_args, model, *given, **named)

    return stream_tokens


OURS = "linear_to_min_lr"


def following_ours(original: Function) -> Function:
    """Upstream's `get_learning_rate_scheduler`, whose schedulers follow ours where they are asked to."""

    def get_learning_rate_scheduler(optimizer: Any, neox_args: Any) -> Any:
        called(neox_args, "megatron.training.get_learning_rate_scheduler")
        scheduler = original(optimizer, neox_args)
        if scheduler is None:
            return None
        theirs, start = scheduler.get_lr, neox_args.lr_warmup_init

        def get_lr() -> float:
            if scheduler.decay_style.lower() != OURS and not start:
                return theirs()
            return learning_rate(scheduler.num_iters, float(scheduler.start_lr), _schedule(scheduler, start))

        scheduler.get_lr = get_lr
        scheduler.step(scheduler.num_iters)
        return scheduler

    return get_learning_rate_scheduler


def _schedule(scheduler: Any, start: float) -> ScheduleConfig:
    """By the scheduler's numbers and not the configuration's: a checkpoint may have set them."""
    return ScheduleConfig(
        lr_decay_style=scheduler.decay_style.lower(),
        lr_decay_iters=scheduler.end_iter,
        min_lr=scheduler.min_lr,
        warmup=scheduler.warmup_iter / scheduler.end_iter,
        lr_warmup_init=start,
    )


logger = logging.getLogger(__name__)

MARK = "megatron_coca_neox_plugin"
"""An attribute of upstream's NeoXArgs that says that the plugin is active."""


def activate() -> None:
    """Let GPT-NeoX, which must be importable as `megatron`, know the plugin's keys and attention. Calling it again does
    nothing. Configurations that ask for none of it run as before.

    Raises:
        IncompatibleError: there is no GPT-NeoX, or one that has changed what this relies on.
    """
    if _is_active():
        return
    modules = upstream()
    arguments = modules["megatron.neox_arguments"].NeoXArgs
    _tell_version(modules["megatron.mpu"])
    extend_arguments(arguments)
    transformer: Any = modules["megatron.model.transformer"]
    transformer.ParallelSelfAttention = dispatcher(
        transformer.ParallelSelfAttention, modules["megatron.mpu"].get_cuda_rng_tracker
    )
    made = transformer.ParallelSelfAttention
    wrap(modules["megatron.training"], "get_model", lambda original: checking_model(original, made))
    wrap(modules["megatron.checkpointing"], "check_checkpoint_args", checking_args)
    wrap(modules["megatron.checkpointing"], "save_ds_checkpoint", recording)
    wrap(modules["megatron.training"], "get_learning_rate_scheduler", following_ours)
    wrap(modules["megatron.text_generation_utils"], "stream_tokens", forgetting)
    setattr(arguments, MARK, True)


def _is_active() -> bool:
    arguments = getattr(sys.modules.get("megatron.neox_arguments"), "NeoXArgs", None)
    return hasattr(arguments, MARK)


def _tell_version(package: ModuleType) -> None:
    found = commit(Path(str(package.__file__)).parents[2])
    if found is not None and found != TESTED_COMMIT:
        logger.warning("GPT-NeoX is at commit %s; the plugin is tested with %s", found, TESTED_COMMIT)
