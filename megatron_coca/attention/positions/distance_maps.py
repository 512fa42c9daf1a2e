"""Relative-position maps: far pairs are scored at another distance than their own.

A map splits the pairs into parts by their distance r = m - n. Within a part the query and the key are each rotated
to a position of their own, so that a part is ordinary attention too, and the parts share one softmax.

Positions are float64, because Leaky ReRoPE divides them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Moved = Callable[[Tensor, Tensor], Tensor]
"""(positions, position of the first token of the document) -> where the rotation puts them."""


def _unmoved(positions: Tensor, first: Tensor) -> Tensor:
    return positions


def _at(position: float) -> Moved:
    return lambda positions, first: torch.full_like(positions, position)


@dataclass(frozen=True)
class Part:
    """The pairs at distances low <= r < high, of which only the first `first_keys` keys are visible (None: all), and
    where their queries and keys are rotated to.
    """

    low: int = 0
    high: int | None = None
    first_keys: int | None = None
    query: Moved = _unmoved
    key: Moved = _unmoved


@dataclass(frozen=True)
class MapSettings:
    """Parameters of the maps, in tokens but for `leak` and `group_size`.

    Attributes:
        window: w, the distances below it are near.
        leak: k of Leaky ReRoPE: far distances grow by 1/k a token.
        group_size: G of SelfExtend: far positions are counted in groups of so many.
        sinks: keys at the beginning that stay visible.
    """

    window: int
    leak: float = 16.0
    group_size: int = 8
    sinks: int = 0


UNMAPPED = (Part(),)


def _rerope(s: MapSettings) -> tuple[Part, ...]:
    """ReRoPE (Su 2023, kexue.fm/archives/9708): min(r, w)."""
    return Part(high=s.window), Part(low=s.window, query=_at(s.window), key=_at(0))


def _leaky_rerope(s: MapSettings) -> tuple[Part, ...]:
    """Leaky ReRoPE (the same article): r below w, then (r - w)/k + w."""

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions + s.window * (s.leak - 1)) / s.leak

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions / s.leak

    return Part(high=s.window), Part(low=s.window, query=query, key=key)


def _self_extend(s: MapSettings) -> tuple[Part, ...]:
    """SelfExtend (Jin et al. 2024, section 3): floor(m/G) + w - floor(w/G) against floor(n/G)."""

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return key(positions, first) + s.window - s.window // s.group_size

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return (positions / s.group_size).floor()

    return Part(high=s.window), Part(low=s.window, query=query, key=key)


def _lm_infinite(s: MapSettings) -> tuple[Part, ...]:
    """LM-Infinite (Han et al. 2023, section 3): the near window, and the first keys at distance w."""
    return Part(high=s.window), Part(s.window, None, s.sinks, query=_at(s.window), key=_at(0))


def _streaming(s: MapSettings) -> tuple[Part, ...]:
    """StreamingLLM (Xiao et al. 2023, section 3.2): positions are indices in a cache of the sinks and the last w keys.

    A row's near pairs keep their distances there, not their positions, so they are scored where they stand: only a form
    that depends on distances alone can be scored so, and the configuration refuses any other.
    """
    if s.sinks == 0:
        return (Part(high=s.window),)

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions - first).clamp(max=s.sinks + s.window - 1)

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions - first

    return Part(high=s.window), Part(s.window, None, s.sinks, query=query, key=key)


DISTANCE_MAPS: dict[str, Callable[[MapSettings], tuple[Part, ...]]] = {
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
