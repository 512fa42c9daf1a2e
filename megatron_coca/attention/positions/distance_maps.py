"""Relative-position maps: pairs at a large distance are scored as if they were at another distance.

A map divides the pairs into bands of their distance r = m - n, in tokens or in chunks. Each band rotates its queries
and keys to its own positions, so a band is ordinary attention. All bands share one softmax.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MapPositions = Callable[[Tensor, Tensor], Tensor]
"""(float64 positions, position of the first token of the document) -> positions that the rotation uses."""


def _constant(position: float) -> MapPositions:
    return lambda positions, first: torch.full_like(positions, position)


@dataclass(frozen=True)
class Band:
    """The range low <= r < high of relative distances of one segment (`high` None: no upper end).

    With `first_keys` only that many keys at the start of the sequence, or document, are visible. With `chunk` the range
    counts chunks: low <= floor(m / chunk) - floor(n / chunk) < high, for m and n from the start of the document. The
    two functions return the positions to which queries and keys are rotated; None keeps their own positions. Backends
    do not use the functions, and equality ignores them.

    Raises:
        ValueError: there are both `chunk` and `first_keys`.
    """

    low: int = 0
    high: int | None = None
    first_keys: int | None = None
    chunk: int | None = None
    query_positions: MapPositions | None = field(default=None, compare=False, repr=False)
    key_positions: MapPositions | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.chunk is not None and self.first_keys is not None:
            raise ValueError("first_keys: a band of chunks shows all keys of its chunks; leave it out")

    def apart(self, query: Tensor, key: Tensor) -> Tensor:
        """The distance that `low` and `high` limit, for indices of tokens within their document."""
        return query - key if self.chunk is None else query // self.chunk - key // self.chunk


CAUSAL = Band()
"""All keys up to the query's own, at their own distances."""
UNMAPPED = (CAUSAL,)


Options = Mapping[str, Any]
"""Options of a map by name: the window w in tokens, and the other options of its declaration."""


def _rerope(s: Options, training_length: int) -> tuple[Band, ...]:
    """ReRoPE (Su 2023, kexue.fm/archives/9708): min(r, w)."""
    return Band(high=s["window"]), Band(
        low=s["window"], query_positions=_constant(s["window"]), key_positions=_constant(0)
    )


def _leaky_rerope(s: Options, training_length: int) -> tuple[Band, ...]:
    """Leaky ReRoPE (the same article): r below w, then (r - w)/k + w."""
    return _leaking(s["window"], s["leak"])


def _inv_leaky_rerope(s: Options, training_length: int) -> tuple[Band, ...]:
    """Leaky ReRoPE with k = L/(2L'), so with far steps longer than one: a model is trained with it, so that plain
    rotation at inference stays within the distances of training (Su 2023, kexue.fm/archives/9728).
    """
    return _leaking(s["window"], training_length / (2 * s["target_length"]))


def _leaking(window: int, leak: float) -> tuple[Band, ...]:
    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions + window * (leak - 1)) / leak

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions / leak

    return Band(high=window), Band(low=window, query_positions=query, key_positions=key)


def _self_extend(s: Options, training_length: int) -> tuple[Band, ...]:
    """SelfExtend (Jin et al. 2024, section 3): floor(m/G) + w - floor(w/G) against floor(n/G)."""

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return key(positions, first) + s["window"] - s["window"] // s["group_size"]

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return (positions / s["group_size"]).floor()

    return Band(high=s["window"]), Band(low=s["window"], query_positions=query, key_positions=key)


def _string(s: Options, training_length: int) -> tuple[Band, ...]:
    """STRING (An et al. 2024, "Why Does the Effective Context Length of LLMs Fall Short?", section 4): r below w, then
    r - w + local, so that far pairs have the distances that are most frequent in training.
    """

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return positions - s["window"] + s["local"]

    return Band(high=s["window"]), Band(low=s["window"], query_positions=query)


def _dual_chunk(s: Options, training_length: int) -> tuple[Band, ...]:
    """Dual chunk attention (An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models", section 3).

    Keys are at n mod c. A query is at m mod c for the keys of its own chunk, at m mod c + c for those of the chunk
    before, and at 2c - 1 for older keys, but never beyond C, `max_position`: this is the largest position of training
    in the paper, and 3L/4 with c = 11L/16 in its code. Distances stay the same within a chunk, and from its first C - c
    tokens to the chunk before.
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


def _lm_infinite(s: Options, training_length: int) -> tuple[Band, ...]:
    """LM-Infinite (Han et al. 2023, section 3): the near window, and the first keys at distance w."""
    return Band(high=s["window"]), Band(
        s["window"], None, s["sinks"], query_positions=_constant(s["window"]), key_positions=_constant(0)
    )


def _streaming(s: Options, training_length: int) -> tuple[Band, ...]:
    """StreamingLLM (Xiao et al. 2023, section 3.2): positions are indices in a cache of the sinks and the last w keys.

    Pairs within the window keep their distance but not their positions, so score forms that depend on absolute
    positions are a configuration error.
    """
    if s["sinks"] == 0:
        return (Band(high=s["window"]),)

    def query(positions: Tensor, first: Tensor) -> Tensor:
        return (positions - first).clamp(max=s["sinks"] + s["window"] - 1)

    def key(positions: Tensor, first: Tensor) -> Tensor:
        return positions - first

    return Band(high=s["window"]), Band(s["window"], None, s["sinks"], query_positions=query, key_positions=key)


DISTANCE_MAPS: dict[str, Callable[[Options, int], tuple[Band, ...]]] = {
    "rerope": _rerope,
    "leaky_rerope": _leaky_rerope,
    "inv_leaky_rerope": _inv_leaky_rerope,
    "self_extend": _self_extend,
    "string": _string,
    "dual_chunk": _dual_chunk,
    "lm_infinite": _lm_infinite,
    "streaming": _streaming,
}
"""Maps by name: (options, including the window and defaults; training length) -> bands."""
