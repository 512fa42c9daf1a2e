"""Functions with their own gradients that torch.compile treats as single opaque operations."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_in_backward: ContextVar[bool] = ContextVar("_in_backward", default=False)
"""Whether the backward function of a registered operation is running. Only compiled code uses registered operations,
but in PyTorch 2.11 `torch.compiler.is_compiling()` is False while the backward pass of these operations is traced.
"""


def operation(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Build a differentiable function from `run`. In compiled code it is the operation `megatron_coca::name`; in eager
    mode it is an autograd.Function, because a custom operation needs several times as much host time.

    PyTorch's cache of compiled code identifies an operation by its name. So the operation needs a new name if the
    shapes, dtypes or strides of its results change, or if the arguments of an operation in its backward pass change.

    Args:
        schema: schema of the arguments and results, in PyTorch's notation.
        fake: function that returns empty results with the same shapes, dtypes and strides.
        keep, backward: the functions `setup_context` and `backward` for `torch.library.register_autograd`, except that
            the context's `needs_input_grad` has one entry for each tensor in a list.
    """
    plain = run if keep is None or backward is None else _differentiable(run, keep, backward)
    if not hasattr(torch.library, "custom_op"):  # PyTorch before 2.4, which the plugin supports
        return plain
    registered = torch.library.custom_op(f"megatron_coca::{name}", run, mutates_args=(), schema=schema)
    registered.register_fake(fake)
    if backward is not None:
        registered.register_autograd(_traced(backward), setup_context=keep)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or _in_backward.get():
            return registered(*inputs)
        return plain(*inputs) if torch.is_grad_enabled() else run(*inputs)  # an autograd.Function costs host time

    return call


def _traced(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `backward` with the registered operations."""

    def call(ctx: Any, *grads: Any) -> Any:
        token = _in_backward.set(True)
        try:
            return backward(ctx, *grads)
        finally:
            _in_backward.reset(token)

    return call


def _differentiable(
    run: Callable[..., Any], keep: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    class Plain(torch.autograd.Function):
        """Takes every tensor as a separate argument, because autograd does not track tensors in lists."""

        @staticmethod
        def forward(ctx: Any, *flat: Any) -> Any:
            *values, ctx.sizes = flat
            inputs = _nested(values, ctx.sizes)
            output = run(*inputs)
            ctx.listed = isinstance(output, list)
            ctx.set_materialize_grads(ctx.listed)
            keep(ctx, inputs, output)
            return tuple(output) if ctx.listed else output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            found = backward(ctx, list(grads)) if ctx.listed else backward(ctx, *grads)
            return *_flat([each if isinstance(each, Tensor) or each else None for each in found], ctx.sizes), None

    def call(*inputs: Any) -> Any:
        sizes = [len(value) if _is_tensors(value) else None for value in inputs]
        return Plain.apply(*_flat(inputs, sizes), sizes)

    return call


def _is_tensors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Tensor)


def _flat(values: Sequence[Any], sizes: Sequence[int | None]) -> list[Any]:
    flat: list[Any] = []
    for value, size in zip(values, sizes, strict=True):
        flat += [value] if size is None else value or [None] * size
    return flat


def _nested(flat: Sequence[Any], sizes: Sequence[int | None]) -> tuple[Any, ...]:
    rest = iter(flat)
    return tuple(next(rest) if size is None else [next(rest) for _ in range(size)] for size in sizes)
