"""Import GPT-NeoX's modules, replace functions in them, and report an incompatible checkout."""

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

TESTED_COMMIT = "ea7aefd8f8e183256992d9fede4d7c71a46d67a5"
"""The commit of EleutherAI/gpt-neox that the plugin is tested with."""


class IncompatibleError(Exception):
    """GPT-NeoX cannot be imported, lacks a function that the plugin needs, or does not call a replaced function."""


MODULES = (
    *("neox_arguments", "neox_arguments.neox_args", "model.transformer", "mpu", "checkpointing"),
    *("text_generation_utils", "training"),
)
"""Modules below `megatron` that the plugin changes or reads."""


def import_upstream() -> Mapping[str, ModuleType]:
    """Import MODULES and return them by name. Raises IncompatibleError if a module cannot be imported."""
    modules: dict[str, ModuleType] = {}
    for name in (f"megatron.{module}" for module in MODULES):
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as error:
            raise IncompatibleError(
                f"{name}: cannot be imported ({error}); install GPT-NeoX's requirements, and run from the root of its "
                "checkout or put the checkout on PYTHONPATH before any other `megatron` package (megatron-core)"
            ) from error
    return modules


def incompatible(message: str) -> IncompatibleError:
    """Return an error that names the imported checkout."""
    root = Path(str(sys.modules["megatron.mpu"].__file__)).parents[2]
    return IncompatibleError(
        f"{root}: this GPT-NeoX {message}; use the tested commit, {TESTED_COMMIT}, or a newer version of the plugin"
    )


Function = Callable[..., Any]


def wrap(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
    """Replace `owner.name` with `wrapper(original)`, which keeps the name and docstring of the original."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(wrapper(original)))
