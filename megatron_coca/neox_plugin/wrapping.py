"""Replacing a function of upstream's by one that calls it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

Function = Callable[..., Any]


def wrap(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
    """Put `wrapper(original)`, under the original's name and documentation, in place of `owner.name`."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(wrapper(original)))
