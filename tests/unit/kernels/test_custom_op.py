"""Operations with gradients of their own: the same in eager and compiled code, and cheap in eager code."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_coca.kernels.custom_op import operation


def _run(scale: float, x: Tensor, others: list[Tensor], last: Tensor | None) -> list[Tensor]:
    return [scale * x * other if last is None else scale * x * other * last for other in others]


def _fake(scale: float, x: Tensor, others: list[Tensor], last: Tensor | None) -> list[Tensor]:
    return [torch.empty_like(x) for _ in others]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.scale, x, others, _ = inputs
    ctx.save_for_backward(x, *others)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *others = ctx.saved_tensors
    of_x = sum(ctx.scale * grad * other for grad, other in zip(grads, others, strict=True))
    return None, of_x, [ctx.scale * grad * x for grad in grads], None


PRODUCTS = operation(
    "test_products",
    "(float scale, Tensor x, Tensor[] others, Tensor? last) -> Tensor[]",
    _run,
    _fake,
    keep=_keep,
    backward=_backward,
)


class Seen(TorchDispatchMode):
    """The names of all operations that PyTorch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def outputs(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    first, second = PRODUCTS(3.0, x, [y, z], None)
    return first + 2 * second


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_reach_into_lists(compiled: bool) -> None:
    leaves = [torch.randn(5, requires_grad=True) for _ in range(3)]
    x, y, z = leaves
    function = torch.compile(outputs, backend="aot_eager", fullgraph=True) if compiled else outputs
    out = function(*leaves)
    torch.testing.assert_close(out, 3 * x * (y + 2 * z))
    expected = torch.autograd.grad((3 * x * (y + 2 * z)).sum(), leaves)
    for got, right in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
        torch.testing.assert_close(got, right)


def test_an_output_without_a_gradient_and_inputs_that_need_none() -> None:
    x, y = torch.randn(5, requires_grad=True), torch.randn(5)
    first, _ = PRODUCTS(3.0, x, [y, y], None)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 3 * y)


def test_eager_code_does_not_pass_through_the_dispatcher() -> None:
    """A registered operation costs several times the host's time of an autograd.Function."""
    x = torch.randn(5, requires_grad=True)
    with Seen() as seen:
        outputs(x, x, x).sum().backward()
    assert seen.names and not [name for name in seen.names if name.startswith("megatron_coca")]


def test_no_function_of_autograd_is_made_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*inputs: Any) -> Any:
        raise AssertionError("autograd.Function was called")

    monkeypatch.setattr(torch.autograd.Function, "apply", fail)
    x = torch.randn(5, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(outputs(x, x, x), 9 * x * x)


def _scaled(x: Tensor, scale: float) -> Tensor:
    x.data_ptr()  # raises an error while PyTorch traces, as the launch of a kernel does
    return scale * x


def _empty(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _keep_scale(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    _, ctx.scale = inputs


def _scaled_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return SCALED_GRADIENT(grad, ctx.scale), None


SCALED_GRADIENT = operation("test_scaled_gradient", "(Tensor x, float scale) -> Tensor", _scaled, _empty)
SCALED = operation(
    "test_scaled", "(Tensor x, float scale) -> Tensor", _scaled, _empty, keep=_keep_scale, backward=_scaled_backward
)


def test_an_operation_in_a_backward_pass_is_not_traced_into() -> None:
    x = torch.randn(5, requires_grad=True)
    out = torch.compile(lambda x: SCALED(x, 3.0).sin(), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], 3 * (3 * x).cos())
