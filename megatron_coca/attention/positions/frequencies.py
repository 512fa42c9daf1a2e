"""Rotary frequencies and their extensions beyond the training length.

An extension is a pure function of the rotary dimension d, base, training length L, scaling and current length l. It has
no state between calls. Notation: theta_j = theta_0 base^(-2j/d), j = 0..d/2-1, s = factor; theta_0 is 1 unless
`rotary_frequencies` sets another. `clex`, the only learned extension, is in its own module.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_coca import methods


@dataclass(frozen=True)
class Ramp:
    """The transition between features that rotate `slow` times within L and features that rotate `fast` times.
    `truncate` rounds the ends of the transition to integer dimensions.
    """

    slow: float
    fast: float
    truncate: bool = True


def kept_by_rotations(theta: Tensor, rotary: "Rotary", ramp: Ramp) -> Tensor:
    """The ramp gamma of NTK-by-parts, linear in the number of rotations (Peng et al. 2023, "YaRN", section 3.2)."""
    turns = rotary.original_length * theta / (2 * math.pi)
    return ((turns - ramp.slow) / (ramp.fast - ramp.slow)).clamp(0, 1)


def kept_by_dimension(theta: Tensor, rotary: "Rotary", ramp: Ramp) -> Tensor:
    """The ramp in the YaRN authors' code and in Hugging Face: linear in j between the dimensions that rotate `fast` and
    `slow` times. The dimension that rotates x times is d ln(theta_0 L/(2 pi x)) / (2 ln base).
    """
    dim, length = 2 * theta.shape[-1], rotary.fastest * rotary.original_length
    low, high = (
        dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(rotary.base)) for turns in (ramp.fast, ramp.slow)
    )
    if ramp.truncate:  # round to 9 digits first: a pair may rotate exactly `slow` times
        low, high = math.floor(round(low, 9)), math.ceil(round(high, 9))
    low, high = max(low, 0), min(high, dim - 1)
    index = torch.arange(dim // 2, dtype=theta.dtype, device=theta.device)
    return 1 - ((index - low) / max(high - low, 0.001)).clamp(0, 1)  # a ramp of width 0 is a step


RAMPS: dict[str, Callable[[Tensor, "Rotary", Ramp], Tensor]] = {
    "dimension": kept_by_dimension,
    "rotations": kept_by_rotations,
}


def interpolate(theta: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Return theta / s where `kept` is 0, theta where it is 1, and a linear interpolation in between."""
    return (1 - kept) * theta / factor + kept * theta


def temperature(factor: float, strength: float = 1.0) -> float:
    """0.1 ln s + 1 for s > 1, else 1 (Peng et al. 2023, "YaRN", section 3.4). `strength` multiplies the logarithm, as
    in DeepSeek 2.
    """
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0


class Scaling:
    """An extension with its options as attributes; hashable. The configuration has already validated the options."""

    def __init__(self, rope_type: str = "default", **given: Any) -> None:
        self.declaration: methods.FrequencyExtension = methods.find("rope_scaling", rope_type)
        self.rope_type = rope_type
        self.options = self.declaration.resolved(given, 0)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["options"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaling) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.rope_type, *self.options.items())


@dataclass(frozen=True)
class Rotary:
    """A model's rotary frequencies: an even rotary dimension d, a base, L in tokens (the reference length of the
    scaling formula), a scaling, and the fastest frequency theta_0 of training. Formulas are computed on `device`.
    """

    dim: int
    base: float = 10000.0
    original_length: int = 2048
    scaling: Scaling = field(default_factory=Scaling)
    fastest: float = 1.0
    device: ClassVar[torch.device] = torch.device("cpu")

    def inverse_frequencies(self, length: int) -> Tensor:
        """Return the frequencies for an input of `length` tokens: [dim/2] float64, in radians per position."""
        compute = self.scaling.declaration.compute or EXTENSIONS[self.scaling.rope_type]
        theta = compute(self, length)
        return resonant(theta) if self.scaling.options.get("resonance") else theta

    def multiplier(self, length: int) -> float:
        """Return the factor on cos and sin. Its square multiplies the logits of the rotated block."""
        return multiplier(self, length)

    @property
    def logit_factor(self) -> float:
        """The factor on all logits, including those of unrotated features. It is 1 or, if YaRN's `mscale_all_dim` is
        set, the square of the temperature for this strength.
        """
        strength = self.scaling.options.get("mscale_all_dim")
        return 1.0 if strength is None else temperature(self.scaling.factor, strength) ** 2

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length, which would make cached rotated keys wrong."""
        return self.scaling.declaration.length_dependent


def geometric(dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """Return theta_j = base^(-2j/dim), [dim/2] float64 (Su et al. 2021, "RoFormer", section 3.2.2)."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def rope_id(dim: int, options: Mapping[str, Any], length: int) -> tuple[float, float]:
    """RoPE-ID has d/2 frequencies in equal ratios, from 2 pi / period to 2 pi turns / L (Wertheimer et al. 2026,
    "Frayed RoPE and Long Inputs"). Return the fastest frequency and the base, so that the slowest frequency is
    fastest * base^(-(d-2)/d).
    """
    fastest, slowest = 2 * math.pi / options["period"], 2 * math.pi * options["turns"] / length
    return fastest, (fastest / slowest) ** (dim / max(dim - 2, 1))


FREQUENCIES: dict[str, Callable[[int, Mapping[str, Any], int], tuple[float, float]]] = {"rope_id": rope_id}
"""Formulas of `rotary_frequencies`: (d, options, L) -> the fastest frequency theta_0 and the base, so that theta_j =
theta_0 * base^(-2j/d). A type that is not listed here has the function `compute` in its declaration.
"""


def resonant(theta: Tensor) -> Tensor:
    """Return 2 pi / round(2 pi / theta_j). Wavelengths are then whole numbers of tokens, so each period of a feature
    repeats the values of the first period (Wang et al. 2024, "Resonance RoPE", section 4). Frequencies of 0 stay 0.
    """
    return 2 * math.pi / (2 * math.pi / theta).round()


def ntk_base(dim: int, base: float, alpha: float) -> float:
    """Return base * alpha^(d/(d-2)), which divides the slowest frequency by exactly alpha and keeps the fastest.

    With a rotary dimension of 2, there is only one frequency, which is kept.
    """
    return base * alpha ** (dim / (dim - 2)) if dim > 2 else base


def _theta(rotary: Rotary, base: float | None = None) -> Tensor:
    """Return theta_0 * base^(-2j/d); `base` replaces the base of `rotary`."""
    return rotary.fastest * geometric(rotary.dim, rotary.base if base is None else base, rotary.device)


def _ordinal(rotary: Rotary) -> Tensor:
    """Return 1, ..., d/2 in float64."""
    return torch.arange(1, rotary.dim // 2 + 1, dtype=torch.float64, device=rotary.device)


def _default(rotary: Rotary, length: int) -> Tensor:
    """theta_j (Su et al. 2021, "RoFormer", section 3.2.2)."""
    return _theta(rotary)


def _linear(rotary: Rotary, length: int) -> Tensor:
    """Position interpolation (Chen et al. 2023, section 2.3): theta_j / s."""
    return _theta(rotary) / rotary.scaling.factor


def _ntk(rotary: Rotary, length: int) -> Tensor:
    """NTK-aware interpolation (bloc97 2023; Peng et al. 2023, "YaRN", section 3.1): base' = base * s^(d/(d-2))."""
    return _theta(rotary, ntk_base(rotary.dim, rotary.base, rotary.scaling.factor))


def _ntk_fixed(rotary: Rotary, length: int) -> Tensor:
    """NTK-RoPE-fixed (Su 2023, kexue.fm/archives/9706): theta_j * s^(-2(j+1)/d), which changes even the fastest
    frequency.
    """
    return _theta(rotary) * torch.exp(-2 * math.log(rotary.scaling.factor) / rotary.dim * _ordinal(rotary))


def _ntk_mixed(rotary: Rotary, length: int) -> Tensor:
    """NTK-RoPE-mixed (Su 2023, kexue.fm/archives/9706): theta_j * exp(-a (j+1)^b) with a (d/2)^b = ln s.

    The exponent is -ln s * ((j+1) / (d/2))^b. The post's text uses b = 0.625, and its code uses 0.75.
    """
    share = (_ordinal(rotary) / (rotary.dim // 2)) ** rotary.scaling.b
    return _theta(rotary) * torch.exp(-math.log(rotary.scaling.factor) * share)


def _dynamic(rotary: Rotary, length: int) -> Tensor:
    """Dynamic NTK (emozilla 2023; Peng et al. 2023, "YaRN", section 3.3): inputs of up to L tokens use theta_j, and
    inputs of l > L tokens use the NTK frequencies with alpha = s*l/L - (s-1).
    """
    factor = rotary.scaling.factor
    alpha = factor * max(length, rotary.original_length) / rotary.original_length - (factor - 1)
    return _theta(rotary, ntk_base(rotary.dim, rotary.base, alpha))


def _dynamic_max(rotary: Rotary, length: int) -> Tensor:
    """Dynamic NTK for a target length L': alpha = s*max(L', l)/L - (s-1) with s = L'/(2L).

    All inputs of at most L' tokens, even short ones, use the frequencies for L'.
    """
    target, trained = rotary.scaling.target_length, rotary.original_length
    factor = target / (2 * trained)
    alpha = factor * max(target, length) / trained - (factor - 1)
    return _theta(rotary, ntk_base(rotary.dim, rotary.base, alpha))


def _by_parts(rotary: Rotary, factor: float) -> Tensor:
    scaling, theta = rotary.scaling, _theta(rotary)
    ramp = Ramp(scaling.beta_slow, scaling.beta_fast, scaling.truncate)
    return interpolate(theta, factor, RAMPS[scaling.ramp](theta, rotary, ramp))


def _yarn(rotary: Rotary, length: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): slow frequencies are interpolated by s, fast ones are kept, and a ramp
    connects the two ranges.
    """
    return _by_parts(rotary, rotary.scaling.factor)


def _stretch(rotary: Rotary, length: int) -> float:
    """Return max(1, l/L), the factor of dynamic scaling (Peng et al. 2023, "YaRN", section 3.3)."""
    return max(1.0, length / rotary.original_length)


def _dynamic_yarn(rotary: Rotary, length: int) -> Tensor:
    """YaRN with s = max(1, l/L) (Peng et al. 2023, section 3.3)."""
    return _by_parts(rotary, _stretch(rotary, length))


def _longrope(rotary: Rotary, length: int) -> Tensor:
    """LongRoPE (Ding et al. 2024, section 3): theta_j / lambda_j. The authors found lambda_j by a search. They are the
    long factors for inputs of more than L tokens, and the short factors otherwise.
    """
    scaling = rotary.scaling
    factors = scaling.long_factor if length > rotary.original_length else scaling.short_factor
    theta = _theta(rotary)
    return theta / theta.new_tensor(factors)


def _llama3(rotary: Rotary, length: int) -> Tensor:
    """Llama 3.1 (Meta 2024, the released code). A frequency with fewer than low_freq_factor rotations within L becomes
    theta / s. A frequency with more than high_freq_factor rotations does not change. In between, the result is linear
    in the number of rotations.
    """
    theta, ramp = _theta(rotary), Ramp(rotary.scaling.low_freq_factor, rotary.scaling.high_freq_factor)
    kept = kept_by_rotations(theta, rotary, ramp)
    return interpolate(theta, rotary.scaling.factor, kept)


def _proportional(rotary: Rotary, length: int) -> Tensor:
    """p-RoPE (Barbero et al. 2025, "Round and Round We Go!", section 6): theta_j / s for j < floor(p d/2), else 0."""
    rotated = _ordinal(rotary) <= int(rotary.scaling.proportion * rotary.dim // 2)
    return _theta(rotary) / rotary.scaling.factor * rotated


EXTENSIONS: dict[str, Callable[[Rotary, int], Tensor]] = {
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
"""Functions by `rope_type`. A `rope_type` that is not listed here has the function `compute` in its declaration."""


def _longrope_multiplier(rotary: Rotary, length: int) -> float:
    """Return sqrt(1 + ln s / ln L) (Ding et al. 2024, the released code). As in Hugging Face, it applies at every
    length.
    """
    factor = rotary.scaling.factor
    return math.sqrt(1 + math.log(factor) / math.log(rotary.original_length)) if factor > 1 else 1.0


def _yarn_multiplier(rotary: Rotary, length: int) -> float:
    """Return 0.1 ln s + 1. If `mscale` and `mscale_all_dim` are set, return the ratio of their temperatures, as in
    Hugging Face.
    """
    own, of_all = rotary.scaling.mscale, rotary.scaling.mscale_all_dim
    if own is None or of_all is None:
        return temperature(rotary.scaling.factor)
    return temperature(rotary.scaling.factor, own) / temperature(rotary.scaling.factor, of_all)


MULTIPLIERS: dict[str, Callable[[Rotary, int], float]] = {
    "yarn": _yarn_multiplier,
    "dynamic_yarn": lambda rotary, length: temperature(_stretch(rotary, length)),
    "longrope": _longrope_multiplier,
}
"""Multiplier functions by `rope_type`; the multiplier is 1 for all other types."""


def multiplier(rotary: Rotary, length: int) -> float:
    """Return the factor on cos and sin: `attention_factor` if set, otherwise the value of the extension's formula."""
    compute = MULTIPLIERS.get(rotary.scaling.rope_type)
    if compute is None:
        return 1.0
    given = rotary.scaling.attention_factor
    return compute(rotary, length) if given is None else given
