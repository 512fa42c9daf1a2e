"""Relative-position maps: pairs at a large distance are scored as if they were at a different distance.

A map divides the pairs into bands by their distance r = m - n, in tokens or in chunks. Each band rotates queries and
keys to its own positions, so the scores of a band are ordinary attention scores. All bands share one softmax.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MapPositions = Callable[[Tensor, Tensor], Tensor]
"""(float64 positions, position of the first token of the document) -> positions used by the rotation."""


def _constant(position: float) -> MapPositions:
    return lambda positions, first: torch.full_like(positions, position)


@dataclass(frozen=True)
class Band:
    """The range low <= r < high of relative distances of one segment; `high` = None means no upper limit.

    With `first_keys`, only that many keys at the start of the sequence (or document) are visible. With `chunk`, the
    range counts chunks: low <= floor(m / chunk) - floor(n / chunk) < high, with m and n counted from the start of the
    document. `query_positions` and `key_positions` return the positions to which queries and keys are rotated; None
    means their own positions. Backends do not use these functions, and equality ignores them.

    Raises:
        ValueError: both `chunk` and `first_keys` are set.
    """

    low: int = 0
    high: int | None = None
    first_keys: int | None = None
    chunk: int | None = None
    query_positions: MapPositions | None = field(default=None, compare=False, repr=False)
    key_positions: MapPositions | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.chunk is not None and self.first_keys is not None:
            raise ValueError("first_keys: not supported together with chunk; leave it out")

    def apart(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the distance in tokens or chunks that `low` and `high` limit, for token indices within a document."""
        return query - key if self.chunk is None else query // self.chunk - key // self.chunk


CAUSAL = Band()
"""The band of all keys up to the query's own, at their actual distances."""
UNMAPPED = (CAUSAL,)


MapOptions = Mapping[str, Any]
"""A map's options by name: the window w in tokens, and any other options that the map declares."""


def _rerope(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """ReRoPE (Su 2023, kexue.fm/archives/9708): min(r, w)."""
    return Band(high=s["window"]), Band(
        low=s["window"], query_positions=_constant(s["window"]), key_positions=_constant(0)
    )


def _leaky_rerope(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """Leaky ReRoPE (Su 2023, kexue.fm/archives/9708): r below w, then (r - w)/k + w."""
    return _leaking(s["window"], s["leak"])


def _inv_leaky_rerope(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """Inverse Leaky ReRoPE (Su 2023, kexue.fm/archives/9728): Leaky ReRoPE with k = L/(2L'), so that steps beyond the
    window are longer than 1. The map is used in training, so that plain rotation in evaluation produces only distances
    seen in training.
    """
    return _leaking(s["window"], training_length / (2 * s["target_length"]))


def _leaking(window: int, leak: float) -> tuple[Band, ...]:
    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions + window * (leak - 1)) / leak

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions / leak

    return Band(high=window), Band(low=window, query_positions=query, key_positions=key)


def _self_extend(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """SelfExtend (Jin et al. 2024, section 3): floor(m/G) + w - floor(w/G) against floor(n/G)."""

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return key(positions, first) + s["window"] - s["window"] // s["group_size"]

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return (positions / s["group_size"]).floor()

    return Band(high=s["window"]), Band(low=s["window"], query_positions=query, key_positions=key)


def _string(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """STRING (An et al. 2024, "Why Does the Effective Context Length of LLMs Fall Short?", section 4): r below w, then
    r - w + local, so that far pairs get the distances that are most frequent in training.
    """

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return positions - s["window"] + s["local"]

    return Band(high=s["window"]), Band(low=s["window"], query_positions=query)


def _dual_chunk(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """Dual chunk attention (An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models", section 3).

    Keys are at position n mod c. A query is at m mod c for keys in its own chunk, at m mod c + c for keys in the
    previous chunk, and at 2c - 1 for older keys, but never beyond C, `max_position`. In the paper, C is the largest
    position in training; in its code, C is 3L/4 and c is 11L/16. Distances are unchanged within a chunk, and from a
    chunk's first C - c tokens to the previous chunk.
    """
    size, furthest = s["chunk_size"], s["max_position"]

    def inside(positions: Tensor, first: Tensor) -> Tensor:
        return (positions - first) % size

    def one_further(positions: Tensor, first: Tensor) -> Tensor:
        return (inside(positions, first) + size).clamp(max=furthest)

    queries = (inside, one_further, _constant(min(2 * size - 1, furthest)))
    ends = ((0, 1), (1, 2), (2, None))
    return tuple(
        Band(low, high, chunk=size, query_positions=query, key_positions=inside)
        for (low, high), query in zip(ends, queries, strict=True)
    )


def _lm_infinite(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """LM-Infinite (Han et al. 2023, section 3): the keys in the window, and the first keys, scored at distance w."""
    return Band(high=s["window"]), Band(
        s["window"], None, s["sinks"], query_positions=_constant(s["window"]), key_positions=_constant(0)
    )


def _streaming(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """StreamingLLM (Xiao et al. 2023, section 3.2): positions are indices in a cache of the sinks and the last w keys.

    Pairs in the window keep their distance but not their absolute positions, so the configuration must not select a
    score form that depends on absolute positions.
    """
    if s["sinks"] == 0:
        return (Band(high=s["window"]),)

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions - first).clamp(max=s["sinks"] + s["window"] - 1)

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions - first

    return Band(high=s["window"]), Band(s["window"], None, s["sinks"], query_positions=query, key_positions=key)


DISTANCE_MAPS: dict[str, Callable[[MapOptions, int], tuple[Band, ...]]] = {
    "rerope": _rerope,
    "leaky_rerope": _leaky_rerope,
    "inv_leaky_rerope": _inv_leaky_rerope,
    "self_extend": _self_extend,
    "string": _string,
    "dual_chunk": _dual_chunk,
    "lm_infinite": _lm_infinite,
    "streaming": _streaming,
}
"""Maps by name. Each function turns the options (with the window and the defaults) and the training length into bands.
"""
