"""Activate the plugin by replacing functions in GPT-NeoX's modules."""

import sys
from collections.abc import Mapping
from math import lcm
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_coca.config import ConfigError
from megatron_coca.config.schedule import ScheduleConfig, learning_rate
from megatron_coca.config.source import OVERRIDES
from megatron_coca.neox_plugin.attention import attention_factory
from megatron_coca.neox_plugin.checkpoints import checked_args, recorded_save
from megatron_coca.neox_plugin.keys import extend_fields, resolve, translated, uses_plugin
from megatron_coca.neox_plugin.upstream import Function, import_upstream, incompatible, wrap

LAUNCHER = str(Path(__file__).with_name("__main__.py"))
"""The path of the file, not the name of the module, because DeepSpeed's Slurm launcher can only start scripts."""

ACTIVE = "megatron_coca_neox_plugin"
"""Attribute of GPT-NeoX's NeoXArgs that is set while the plugin is active."""


def activate() -> None:
    """Add the plugin's keys and attention to GPT-NeoX, which must be importable as `megatron`. Later calls do nothing.

    Configurations without plugin keys run as before. Raises IncompatibleError if GPT-NeoX cannot be imported, or if it
    lacks a function that the plugin needs.
    """
    if hasattr(getattr(sys.modules.get("megatron.neox_arguments"), "NeoXArgs", None), ACTIVE):
        return
    modules = import_upstream()
    try:
        _replace(modules)
    except (AttributeError, LookupError, TypeError) as error:
        raise incompatible(f"lacks a part that megatron_coca.neox_plugin needs ({error})") from error


def _replace(modules: Mapping[str, Any]) -> None:
    arguments = modules["megatron.neox_arguments"].NeoXArgs
    _extend_arguments(arguments)
    transformer = modules["megatron.model.transformer"]
    mpu = modules["megatron.mpu"]
    make_attention = attention_factory(
        transformer.ParallelSelfAttention, mpu.get_cuda_rng_tracker, mpu.get_model_parallel_rank
    )
    transformer.ParallelSelfAttention = make_attention
    wrap(modules["megatron.checkpointing"], "check_checkpoint_args", checked_args)
    wrap(modules["megatron.checkpointing"], "save_ds_checkpoint", recorded_save)
    wrap(modules["megatron.training"], "get_learning_rate_scheduler", _with_own_schedule)
    wrap(modules["megatron.training"], "forward_step", _with_metrics)
    wrap(modules["megatron.text_generation_utils"], "stream_tokens", _with_cleared_cache)
    setattr(arguments, ACTIVE, True)


def _extend_arguments(arguments: Any) -> None:
    """Add the plugin's keys and checks to NeoXArgs. Change how NeoXArgs pads the vocabulary and starts processes."""
    extend_fields(arguments)
    fields = {name: field.type for name, field in arguments.__dataclass_fields__.items()}

    def with_translation(original: Function) -> Function:
        def init(self: Any, **values: Any) -> None:
            original(self, **translated(values, fields))

        return init

    wrap(arguments, "__init__", with_translation)
    wrap(arguments, "calculate_derived", _with_adamw)
    wrap(arguments, "calculate_derived", _with_steps_per_print)
    wrap(arguments, "validate_values", _with_position_checks)
    wrap(arguments, "build_tokenizer", _with_vocabulary)
    wrap(arguments, "get_deepspeed_main_args", _with_launcher)


def _with_adamw(original: Function) -> Function:
    """Accept the optimizer type AdamW. GPT-NeoX calls the same optimizer Adam."""

    def calculate_derived(self: Any) -> None:
        if self.optimizer is not None and str(self.optimizer.get("type")).lower() == "adamw":
            self.optimizer = self.optimizer | {"type": "Adam"}
        original(self)

    return calculate_derived


def _with_steps_per_print(original: Function) -> Function:
    """Pass `steps_per_print` to pipelines. GPT-NeoX does not pass the default, so DeepSpeed would divide by None."""

    def calculate_derived(self: Any) -> None:
        if self.pipe_parallel_size:
            extra = self.deepspeed_extra_args or {}
            self.deepspeed_extra_args = {"steps_per_print": self.steps_per_print} | extra
        original(self)

    return calculate_derived


def _with_position_checks(original: Function) -> Function:
    def validate_values(self: Any) -> bool:
        valid = original(self)
        if valid and uses_plugin(self):
            try:
                resolve(self)
            except ConfigError as error:
                raise ConfigError(*(line.removeprefix(f"{OVERRIDES}: ") for line in error.problems)) from error
        return valid

    return validate_values


def _with_vocabulary(original: Function) -> Function:
    """If `vocab_size` is set, pad it instead of the tokenizer's size, as this package does."""

    def build_tokenizer(self: Any) -> None:
        original(self)
        if self.vocab_size is None:
            return
        size = self.tokenizer.vocab_size
        if size > self.vocab_size:
            raise ConfigError(
                f"vocab_size: {self.vocab_size} is too small, the tokenizer has {size} tokens; set {size} or more, or "
                "remove the key"
            )
        multiple = lcm(self.make_vocab_size_divisible_by, self.model_parallel_size)
        self.padded_vocab_size = -(-self.vocab_size // multiple) * multiple

    return build_tokenizer


def _with_launcher(original: Function) -> Function:
    """Start the processes of deepy.py through LAUNCHER, which activates the plugin and then runs the user's script."""

    def get_deepspeed_main_args(self: Any) -> list[str]:
        arguments = original(self)
        at = len(arguments) - 1 - arguments[::-1].index(self.user_script)
        return [*arguments[:at], LAUNCHER, *arguments[at:]]

    return get_deepspeed_main_args


def _with_own_schedule(original: Function) -> Function:
    """Use this package's learning rates if `lr_decay_style` is `linear_to_min_lr` or `lr_warmup_init` is set."""

    def get_learning_rate_scheduler(optimizer: Any, neox_args: Any) -> Any:
        scheduler = original(optimizer, neox_args)
        if scheduler is None:
            return None
        original_lr, start = scheduler.get_lr, neox_args.lr_warmup_init

        def get_lr() -> float:
            style = scheduler.decay_style.lower()
            if style != "linear_to_min_lr" and not start:
                return original_lr()
            schedule = ScheduleConfig(  # the values that the scheduler has now, maybe from a checkpoint
                lr_decay_style=style,
                lr_decay_iters=scheduler.end_iter,
                min_lr=scheduler.min_lr,
                warmup=scheduler.warmup_iter / scheduler.end_iter,
                lr_warmup_init=start,
            )
            return learning_rate(scheduler.num_iters, float(scheduler.start_lr), schedule)

        scheduler.get_lr = get_lr
        scheduler.step(scheduler.num_iters)
        return scheduler

    return get_learning_rate_scheduler


def _with_metrics(original: Function) -> Function:
    """Return a (loss, metrics) pair from pipelines too.

    Validation unpacks the pair, but GPT-NeoX's pipeline returns only the loss. Without this wrapper every pipeline run
    would end with a TypeError at its first validation.
    """

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return (result, {}) if isinstance(result, Tensor) else result

    return forward_step


def _with_cleared_cache(original: Function) -> Function:
    """Clear the key-value cache before each prompt. GPT-NeoX would append each prompt of a file to the previous one."""

    def stream_tokens(neox_args: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if uses_plugin(neox_args):
            model.module.clear_cache()
        return original(neox_args, model, *args, **kwargs)

    return stream_tokens
