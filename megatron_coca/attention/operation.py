"""Attention as single operations to torch.compile, which does not look into them."""

from collections.abc import Callable
from typing import Any

import torch


def operation(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`run` as the operation `megatron_coca::name`; `run` itself before PyTorch 2.4, with which the plugin runs too.

    PyTorch's cache of compiled code knows an operation by its name: results of other shapes, dtypes or strides need
    another name.

    Args:
        schema: of the arguments and results, in PyTorch's notation.
        fake: empty results of the same shapes, dtypes and strides.
        keep, backward: `setup_context` and `backward` as in `torch.autograd.Function`.
    """
    if not hasattr(torch.library, "custom_op"):
        return run
    registered = torch.library.custom_op(f"megatron_coca::{name}", run, mutates_args=(), schema=schema)
    registered.register_fake(fake)
    if backward is not None:
        registered.register_autograd(backward, setup_context=keep)
    return registered
