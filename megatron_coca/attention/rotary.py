"""Cosine and sine tables.

Pairing is that of GPT-NeoX and Hugging Face: dimension i turns with dimension i + d/2 (pairs.py). Tables are made in float64
and rounded once, because a float32 phase at position 32k is already off by 1e-3, and they are never module buffers,
which `.bfloat16()` or an engine could cast.

Every score form is linear in its query's and in its key's tables. So whatever multiplies the scores of a row, a
column or a frequency (log n, YaRN's temperature, the decay of xPos) is multiplied into the tables, once for all
layers, and costs the operands nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RotaryTables(NamedTuple):
    """cos and sin of position times frequency, times an amplitude; each [length, d/2] or [batch, 1, length, d/2]."""

    cos: Tensor
    sin: Tensor


def rotary_tables(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype, amplitude: Tensor | float = 1.0
) -> RotaryTables:
    """Tables in at least float32 (float64 where `dtype` is).

    `positions` is [length] or [batch, length], of any real type; `amplitude` broadcasts to [..., length, d/2].
    """
    phases = positions.to(torch.float64)[..., None] * inverse_frequencies.to(positions.device)
    cos, sin = phases.cos() * amplitude, phases.sin() * amplitude
    if positions.dim() == 2:
        cos, sin = cos[:, None], sin[:, None]
    table_dtype = torch.promote_types(dtype, torch.float32)
    return RotaryTables(cos.to(table_dtype), sin.to(table_dtype))


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """R_p x for x [batch, heads, length, rotary_dim] in the tables' dtype."""
    if tables.cos.requires_grad or torch.compiler.is_compiling():
        (first, second), (cos, sin) = _halves(x), tables
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return _Rotation.apply(x, *tables)


def times_rotated(x: Tensor, tables: RotaryTables) -> Tensor:
    """x * (R_p x), dimension by dimension."""
    if tables.cos.requires_grad or torch.compiler.is_compiling():
        return x * rotate(x, tables)
    return _TimesRotated.apply(x, *tables)


def spread(x: Tensor, to_first: Tensor, to_second: Tensor) -> Tensor:
    """(x a, x b), [..., d/2] -> [..., d], for tables a and b."""
    if to_first.requires_grad or torch.compiler.is_compiling():
        return torch.cat((x * to_first, x * to_second), dim=-1)
    return _Spread.apply(x, to_first, to_second)


def positive_mean(x: Tensor) -> Tensor:
    """relu of the mean of the members of each pair, [..., d] -> [..., d/2]."""
    if torch.compiler.is_compiling():
        first, second = _halves(x)
        return ((first + second) * 0.5).relu()
    return _PositiveMean.apply(x)


def squared_length(x: Tensor) -> Tensor:
    """x_i^2 + x_{i+d/2}^2, [..., d] -> [..., d/2]."""
    if torch.compiler.is_compiling():
        first, second = _halves(x)
        return first.square() + second.square()
    return _SquaredLength.apply(x)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first, second


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """R_p x, or with sign -1 its inverse, R_-p x."""
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (turned_first, turned_second) = _halves(x), _halves(turned)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=sign)
    return turned


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


class _TimesRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(x, cos, sin)
        return _turn(x, cos, sin, 1).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """g * (R x) + R^-1 (g * x), which is (2c g1 x1 + s (g2 - g1) x2, 2c g2 x2 + s (g2 - g1) x1)."""
        x, cos, sin = ctx.saved_tensors
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        (x1, x2), (g1, g2) = _halves(x), _halves(grad)
        cross, twice = (g2 - g1).mul_(sin), 2 * cos
        for half, own, of_x, other in zip(_halves(result), (g1, g2), (x1, x2), (x2, x1), strict=True):
            torch.mul(own, of_x, out=half).mul_(twice).addcmul_(cross, other)
        return result, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_first: Tensor, to_second: Tensor) -> Tensor:
        ctx.save_for_backward(to_first, to_second)
        result = torch.empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device=x.device)
        first, second = _halves(result)
        torch.mul(x, to_first, out=first)
        torch.mul(x, to_second, out=second)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        to_first, to_second = ctx.saved_tensors
        first, second = _halves(grad)
        return (first * to_first).addcmul_(second, to_second), None, None


class _PositiveMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        first, second = _halves(x)
        mean = (first + second).mul_(0.5).relu_()
        ctx.save_for_backward(mean)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (mean,) = ctx.saved_tensors
        result = torch.empty((*grad.shape[:-1], 2 * grad.shape[-1]), dtype=grad.dtype, device=grad.device)
        first, second = _halves(result)
        second.copy_(torch.mul(grad, (mean > 0).to(grad.dtype).mul_(0.5), out=first))
        return result


class _SquaredLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        first, second = _halves(x)
        return first.square().addcmul_(second, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for half, of_x in zip(_halves(result), _halves(x), strict=True):
            torch.mul(of_x, grad, out=half).mul_(2)
        return result
