"""Rotary frequencies and their extensions, written out pair by pair in Python's own floats.

Notation of the sources: theta_j = B^(-2j/d), j = 0 .. d/2-1; s is the factor, L the training length, l the present one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Extension:
    """Everything an extension may look at; the names are those of Hugging Face's `rope_scaling`."""

    dim: int
    base: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    training_length: int = 1
    length: int = 1
    target_length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    ramp: str = "dimension"
    truncate: bool = True
    b: float = 0.625
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: Sequence[float] | None = None
    long_factor: Sequence[float] | None = None
    proportion: float = 1.0
    resonance: bool = False
    rope_id: Mapping[str, float] | None = None

    def theta(self, j: int, alpha: float = 1.0) -> float:
        """theta_j of the base B alpha^(d/(d-2)); the only frequency of a block of two dimensions is kept."""
        if self.rope_id is not None:  # the same change of every frequency
            return 2 * math.pi * self.turned(j) / self.training_length * alpha ** (-2 * j / max(self.dim - 2, 1))
        base = self.base * alpha ** (self.dim / (self.dim - 2)) if self.dim > 2 else self.base
        return base ** (-2 * j / self.dim)

    @property
    def turns(self) -> tuple[float, float]:
        """How often the first and the last pair of RoPE-ID turn within L tokens: the first once in `period` tokens."""
        assert self.rope_id is not None
        length = self.training_length
        period = self.rope_id.get("period") or min(32, max(2 * math.pi, length / 128))
        return length / period, self.rope_id.get("turns") or 2

    def turned(self, j: int) -> float:
        """How often pair j of RoPE-ID turns within L tokens, in equal ratios from the first pair to the last."""
        first, last = self.turns
        return first if j == 0 else first * (last / first) ** (j / (self.dim // 2 - 1))


def frequencies(dim: int, base: float = 10000.0, rope_type: str = "default", **settings: Any) -> Tensor:
    """The frequencies of `rope_type`, [dim/2] float64, in radians per position; `settings` as in `Extension`."""
    extension = Extension(dim, base, rope_type, **settings)
    theta = [FREQUENCY[rope_type](extension, j) for j in range(dim // 2)]
    if extension.resonance:  # every wavelength a whole number of tokens
        theta = [2 * math.pi / round(2 * math.pi / each) if each else 0.0 for each in theta]
    return torch.tensor(theta, dtype=torch.float64)


def multiplier(dim: int, base: float = 10000.0, rope_type: str = "default", **settings: Any) -> float:
    """What cosine and sine are multiplied by, so that the logits of the rotated part take its square."""
    extension = Extension(dim, base, rope_type, **settings)
    return MULTIPLIER[rope_type](extension) if rope_type in MULTIPLIER else 1.0


def _default(e: Extension, j: int) -> float:
    return e.theta(j)


def _linear(e: Extension, j: int) -> float:
    return e.theta(j) / e.factor


def _ntk(e: Extension, j: int) -> float:
    return e.theta(j, alpha=e.factor)


def _ntk_fixed(e: Extension, j: int) -> float:
    return e.theta(j) * e.factor ** (-2 * (j + 1) / e.dim)


def _ntk_mixed(e: Extension, j: int) -> float:
    a = math.log(e.factor) / (e.dim / 2) ** e.b
    return e.theta(j) * math.exp(-a * (j + 1) ** e.b)


def _dynamic(e: Extension, j: int) -> float:
    if e.length <= e.training_length:
        return e.theta(j)
    return e.theta(j, alpha=e.factor * e.length / e.training_length - (e.factor - 1))


def _dynamic_max(e: Extension, j: int) -> float:
    assert e.target_length is not None
    s = e.target_length / (2 * e.training_length)
    return e.theta(j, alpha=s * max(e.target_length, e.length) / e.training_length - (s - 1))


def _dimension_of(e: Extension, rotations: float) -> float:
    """The dimension that turns `rotations` times over L positions."""
    if e.rope_id is not None:
        first, last = e.turns
        return (e.dim // 2 - 1) * math.log(first / rotations) / math.log(first / last)
    return e.dim * math.log(e.training_length / (2 * math.pi * rotations)) / (2 * math.log(e.base))


def _interpolated(e: Extension, j: int) -> float:
    """YaRN's share of theta/s in frequency j: 0 for the fast ones, 1 for the slow ones."""
    if e.ramp == "rotations":
        turns = e.training_length * e.theta(j) / (2 * math.pi)
        return 1 - min(max((turns - e.beta_slow) / (e.beta_fast - e.beta_slow), 0.0), 1.0)
    low, high = _dimension_of(e, e.beta_fast), _dimension_of(e, e.beta_slow)
    if e.truncate:  # a dimension that is whole up to rounding errors is whole
        low, high = math.floor(low + 1e-8), math.ceil(high - 1e-8)
    low, high = max(low, 0), min(high, e.dim - 1)
    if low == high:
        high += 0.001  # a step, as in the authors' code
    return min(max((j - low) / (high - low), 0.0), 1.0)


def _yarn(e: Extension, j: int, factor: float | None = None) -> float:
    share, s = _interpolated(e, j), e.factor if factor is None else factor
    return share * e.theta(j) / s + (1 - share) * e.theta(j)


def _grown(e: Extension) -> float:
    """The factor of dynamic YaRN."""
    return max(1.0, e.length / e.training_length)


def _dynamic_yarn(e: Extension, j: int) -> float:
    return _yarn(e, j, _grown(e))


def _longrope(e: Extension, j: int) -> float:
    factors = e.long_factor if e.length > e.training_length else e.short_factor
    assert factors is not None
    return e.theta(j) / factors[j]


def _llama3(e: Extension, j: int) -> float:
    theta = e.theta(j)
    turns = e.training_length / (2 * math.pi / theta)
    if turns > e.high_freq_factor:
        return theta
    if turns < e.low_freq_factor:
        return theta / e.factor
    t = (turns - e.low_freq_factor) / (e.high_freq_factor - e.low_freq_factor)
    return (1 - t) * theta / e.factor + t * theta


def _proportional(e: Extension, j: int) -> float:
    """The first share of the pairs rotates, each as if all did; the others stand still."""
    return e.theta(j) / e.factor if 2 * j + 2 <= e.proportion * e.dim else 0.0


def _temperature(e: Extension, factor: float) -> float:
    if e.attention_factor is not None:
        return e.attention_factor
    if e.mscale is None or e.mscale_all_dim is None:
        return 0.1 * math.log(factor) + 1
    return (0.1 * e.mscale * math.log(factor) + 1) / (0.1 * e.mscale_all_dim * math.log(factor) + 1)


def _longrope_multiplier(e: Extension) -> float:
    if e.attention_factor is not None:
        return e.attention_factor
    return math.sqrt(1 + math.log(e.factor) / math.log(e.training_length)) if e.factor > 1 else 1.0


FREQUENCY: dict[str, Callable[[Extension, int], float]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "ntk_fixed": _ntk_fixed,
    "ntk_mixed": _ntk_mixed,
    "dynamic": _dynamic,
    "dynamic_max": _dynamic_max,
    "yarn": _yarn,
    "dynamic_yarn": _dynamic_yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}

MULTIPLIER: dict[str, Callable[[Extension], float]] = {
    "yarn": lambda e: _temperature(e, e.factor),
    "dynamic_yarn": lambda e: _temperature(e, _grown(e)),
    "longrope": _longrope_multiplier,
}
