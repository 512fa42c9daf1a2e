"""Putting the plugin into upstream's modules, once."""

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_coca.config import ConfigError
from megatron_coca.neox_plugin.attention import dispatcher
from megatron_coca.neox_plugin.compatibility import TESTED_COMMIT, commit, upstream
from megatron_coca.neox_plugin.keys import extend, is_asked_for, resolve, translated
from megatron_coca.neox_plugin.schedule import follow_ours

logger = logging.getLogger(__name__)

MARK = "megatron_coca_neox_plugin"
"""An attribute of upstream's NeoXArgs that says that the plugin is active."""

LAUNCHER = "megatron_coca.neox_plugin"
FREE_AT_LOADING = "max_position_embeddings"
"""What upstream asserts to be as saved, and means nothing to methods without a table of positions."""


def activate() -> None:
    """Let GPT-NeoX, which must be importable as `megatron`, know the plugin's keys and attention. Calling it again does
    nothing. Configurations that ask for none of it run as before.

    Raises:
        IncompatibleError: there is no GPT-NeoX, or one that has changed what this relies on.
    """
    modules = upstream()
    arguments = modules["megatron.neox_arguments"].NeoXArgs
    if hasattr(arguments, MARK):
        return
    _tell_version(modules["megatron.mpu"])
    _extend_arguments(arguments, modules["megatron.neox_arguments.neox_args"])
    transformer = modules["megatron.model.transformer"]
    transformer.ParallelSelfAttention = dispatcher(
        transformer.ParallelSelfAttention, modules["megatron.mpu"].get_cuda_rng_tracker
    )
    _wrap(modules["megatron.checkpointing"], "check_checkpoint_args", _lengths_are_free)
    _wrap(modules["megatron.training"], "get_learning_rate_scheduler", follow_ours)
    setattr(arguments, MARK, True)


def _tell_version(package: ModuleType) -> None:
    found = commit(Path(str(package.__file__)).parents[2])
    if found is not None and found != TESTED_COMMIT:
        logger.info("GPT-NeoX is at commit %s; the plugin is tested with %s", found, TESTED_COMMIT)


def _extend_arguments(arguments: type, definitions: ModuleType) -> None:
    groups = {kind.__name__: kind for kind in arguments.__bases__}
    extend(arguments, groups)
    fields = frozenset(arguments.__dataclass_fields__)  # type: ignore[attr-defined]
    _wrap(arguments, "__init__", lambda original: _translating(original, fields))
    _wrap(arguments, "calculate_derived", _with_adamw)
    _wrap(arguments, "validate_values", _with_positions)
    _wrap(arguments, "get_deepspeed_main_args", _launching_with_plugin)


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(wrapper(original)))


def _translating(original: Callable[..., None], fields: frozenset[str]) -> Callable[..., None]:
    def init(self: Any, **values: Any) -> None:
        original(self, **translated(values, fields))

    return init


def _with_adamw(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Upstream's Adam is AdamW, and it knows no other name for it."""

    def calculate_derived(self: Any) -> None:
        if self.optimizer is not None and str(self.optimizer.get("type")).lower() == "adamw":
            self.optimizer = self.optimizer | {"type": "Adam"}
        original(self)

    return calculate_derived


def _with_positions(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def validate_values(self: Any) -> bool:
        valid = original(self)
        if valid and is_asked_for(self):
            try:
                resolve(self)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return valid

    return validate_values


def _launching_with_plugin(original: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    """The processes that deepy.py starts run the script through this package, and so activate the plugin themselves."""

    def get_deepspeed_main_args(self: Any) -> list[str]:
        arguments = original(self)
        at = arguments.index(self.user_script)
        return [*arguments[:at], "--module", LAUNCHER, *arguments[at:]]

    return get_deepspeed_main_args


def _lengths_are_free(original: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    def check_checkpoint_args(neox_args: Any, checkpoint_args: dict[str, Any]) -> None:
        given = dict(checkpoint_args)
        if is_asked_for(neox_args):
            given.pop(FREE_AT_LOADING, None)
        original(neox_args, given)

    return check_checkpoint_args
