"""Relative-position maps: pairs at a large distance are scored as if at another one.

A map divides the pairs into bands of their distance r = m - n. Each band rotates its queries and keys to positions of
its own, so a band is ordinary attention, and all bands share one softmax.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

MapPositions = Callable[[Tensor, Tensor], Tensor]
"""(float64 positions, position of the first token of the document) -> positions that the rotation uses."""


def _own(positions: Tensor, first: Tensor) -> Tensor:
    return positions


def _constant(position: float) -> MapPositions:
    return lambda positions, first: torch.full_like(positions, position)


@dataclass(frozen=True)
class Band:
    """The range low <= r < high of relative distances that one segment serves (`high` None: no upper end).

    With `first_keys` only that many keys at the start of the sequence, or document, are visible. The two functions give
    the positions to which queries and keys are rotated; backends do not use them and equality ignores them.
    """

    low: int = 0
    high: int | None = None
    first_keys: int | None = None
    query_positions: MapPositions = field(default=_own, compare=False, repr=False)
    key_positions: MapPositions = field(default=_own, compare=False, repr=False)


CAUSAL = Band()
"""Every key up to the query's own, at its own distance."""
UNMAPPED = (CAUSAL,)


@dataclass(frozen=True)
class MapSettings:
    """Window w in tokens, k of Leaky ReRoPE, G of SelfExtend, and first keys that stay visible (attention sinks)."""

    window: int
    leak: float = 16.0
    group_size: int = 8
    sinks: int = 0


def _rerope(s: MapSettings) -> tuple[Band, ...]:
    """ReRoPE (Su 2023, kexue.fm/archives/9708): min(r, w)."""
    return Band(high=s.window), Band(low=s.window, query_positions=_constant(s.window), key_positions=_constant(0))


def _leaky_rerope(s: MapSettings) -> tuple[Band, ...]:
    """Leaky ReRoPE (the same article): r below w, then (r - w)/k + w."""

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions + s.window * (s.leak - 1)) / s.leak

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions / s.leak

    return Band(high=s.window), Band(low=s.window, query_positions=query, key_positions=key)


def _self_extend(s: MapSettings) -> tuple[Band, ...]:
    """SelfExtend (Jin et al. 2024, section 3): floor(m/G) + w - floor(w/G) against floor(n/G)."""

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return key(positions, first) + s.window - s.window // s.group_size

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return (positions / s.group_size).floor()

    return Band(high=s.window), Band(low=s.window, query_positions=query, key_positions=key)


def _lm_infinite(s: MapSettings) -> tuple[Band, ...]:
    """LM-Infinite (Han et al. 2023, section 3): the near window, and the first keys at distance w."""
    return Band(high=s.window), Band(
        s.window, None, s.sinks, query_positions=_constant(s.window), key_positions=_constant(0)
    )


def _streaming(s: MapSettings) -> tuple[Band, ...]:
    """StreamingLLM (Xiao et al. 2023, section 3.2): positions are indices in a cache of the sinks and the last w keys.

    Pairs within the window keep their distance there but not their positions, so the configuration refuses score forms
    that depend on absolute positions.
    """
    if s.sinks == 0:
        return (Band(high=s.window),)

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions - first).clamp(max=s.sinks + s.window - 1)

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions - first

    return Band(high=s.window), Band(s.window, None, s.sinks, query_positions=query, key_positions=key)


DISTANCE_MAPS: dict[str, Callable[[MapSettings], tuple[Band, ...]]] = {
    "rerope": _rerope,
    "leaky_rerope": _leaky_rerope,
    "inv_leaky_rerope": _leaky_rerope,
    "self_extend": _self_extend,
    "lm_infinite": _lm_infinite,
    "streaming": _streaming,
}

TRAINING_ONLY = frozenset({"inv_leaky_rerope"})
"""Maps that a model is trained with and evaluated without: ReRoPE's author trains with far steps longer than one, so
that plain rotation at inference stays within the distances seen (kexue.fm/archives/9728).
"""
