"""Rotary frequencies and their extensions beyond the training length.

An extension is a pure function of (rotary dimension, base, factor, training length L, present length l): nothing is
kept between calls, so a short input after a long one sees the short input's frequencies. Notation: theta_j =
base^(-2j/d), j = 0..d/2-1,
s = factor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """What the frequencies of a model depend on: rotary dimension d (even), base, extension name, factor s and
    training length L.
    """

    dim: int
    base: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    training_length: int = 2048

    def inverse_frequencies(self, length: int) -> Tensor:
        """theta_j for an input of `length` tokens, shape [dim/2], float64, in radians per position."""
        return EXTENSIONS[self.rope_type](self, length)

    @property
    def depends_on_length(self) -> bool:
        """Whether two lengths can give two tables (then cached rotated keys would be wrong)."""
        return self.rope_type in LENGTH_DEPENDENT


def geometric(dim: int, base: float) -> Tensor:
    """theta_j = base^(-2j/dim), shape [dim/2], float64 (Su et al. 2021, "RoFormer", section 3.2.2)."""
    return torch.pow(torch.tensor(base, dtype=torch.float64), -torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _ntk_base(rotary: Rotary, alpha: float) -> float:
    """base * alpha^(d/(d-2)): the slowest frequency is divided by exactly alpha, the fastest is kept.

    A rotary dimension of 2 has one frequency, which is both: it is kept.
    """
    return rotary.base * alpha ** (rotary.dim / (rotary.dim - 2)) if rotary.dim > 2 else rotary.base


def _default(rotary: Rotary, length: int) -> Tensor:
    return geometric(rotary.dim, rotary.base)


def _linear(rotary: Rotary, length: int) -> Tensor:
    """Position interpolation (Chen et al. 2023): theta_j / s."""
    return geometric(rotary.dim, rotary.base) / rotary.factor


def _ntk(rotary: Rotary, length: int) -> Tensor:
    """NTK-aware interpolation: base' = base * s^(d/(d-2))."""
    return geometric(rotary.dim, _ntk_base(rotary, rotary.factor))


def _dynamic(rotary: Rotary, length: int) -> Tensor:
    """Dynamic NTK: unchanged up to L, beyond it base * alpha^(d/(d-2)) with alpha = s*l/L - (s-1)."""
    if length <= rotary.training_length:
        return geometric(rotary.dim, rotary.base)
    alpha = rotary.factor * length / rotary.training_length - (rotary.factor - 1)
    return geometric(rotary.dim, _ntk_base(rotary, alpha))


EXTENSIONS: dict[str, Callable[[Rotary, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
}
LENGTH_DEPENDENT = frozenset({"dynamic"})
