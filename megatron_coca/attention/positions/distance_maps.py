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
    """ReRoPE scores every pair at the distance min(r, w) (Su 2023, kexue.fm/archives/9708)."""
    return Band(high=s["window"]), Band(
        low=s["window"], query_positions=_constant(s["window"]), key_positions=_constant(0)
    )


def _leaky_rerope(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """Leaky ReRoPE keeps distances below w. From w on, r becomes (r - w)/k + w (Su 2023, kexue.fm/archives/9708)."""
    return _leaking(s["window"], s["leak"])


def _inv_leaky_rerope(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """Inverse Leaky ReRoPE is Leaky ReRoPE with k = L/(2L'), so that steps beyond the window are longer than 1 (Su
    2023, kexue.fm/archives/9728). The map is used only in training. The plain rotation in evaluation then produces only
    distances that were seen in training.
    """
    return _leaking(s["window"], training_length / (2 * s["target_length"]))


def _leaking(window: int, leak: float) -> tuple[Band, ...]:
    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions + window * (leak - 1)) / leak

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions / leak

    return Band(high=window), Band(low=window, query_positions=query, key_positions=key)


def _self_extend(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """SelfExtend keeps distances below w. From w on, the query is at position floor(m/G) + w - floor(w/G) and the key
    is at position floor(n/G) (Jin et al. 2024, section 3).
    """

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return key(positions, first) + s["window"] - s["window"] // s["group_size"]

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return (positions / s["group_size"]).floor()

    return Band(high=s["window"]), Band(low=s["window"], query_positions=query, key_positions=key)


def _string(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """STRING keeps distances below w. From w on, r becomes r - w + local, so that far pairs have the distances that are
    most frequent in training (An et al. 2024, "Why Does the Effective Context Length of LLMs Fall Short?", section 4).
    """

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return positions - s["window"] + s["local"]

    return Band(high=s["window"]), Band(low=s["window"], query_positions=query)


def _dual_chunk(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """Dual chunk attention (An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models", section 3).

    Keys are at position n mod c. A query is at m mod c for keys in its own chunk, at m mod c + c for keys in the
    previous chunk, and at 2c - 1 for older keys. Positions above C, `max_position`, are replaced by C. In the paper, C
    is the largest position in training; in its code, C is 3L/4 and c is 11L/16. Distances within a chunk are unchanged.
    Distances to keys in the previous chunk are unchanged if m mod c <= C - c.
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
    """LM-Infinite scores keys in the window at their own distances, and the first keys before the window at distance w
    (Han et al. 2023, section 3).
    """
    return Band(high=s["window"]), Band(
        s["window"], None, s["sinks"], query_positions=_constant(s["window"]), key_positions=_constant(0)
    )


def _streaming(s: MapOptions, training_length: int) -> tuple[Band, ...]:
    """In StreamingLLM (Xiao et al. 2023, section 3.2), a position is an index in a cache of the sinks and the last w
    keys.

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
"""Maps by name. Each function turns the options and the training length into bands. The options include the window and
default values.
"""
