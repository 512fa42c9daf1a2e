"""The plan of a ring: which tokens each rank has, and which keys it needs from the other ranks.

The sequence is cut into two chunks per rank. Rank r of R has the chunks r and 2R - 1 - r, so that the causal mask gives
all ranks the same number of pairs (zig-zag). In round s, rank r computes the pairs of its queries with keys of rank
r - s, and sends its own keys to rank r + s. Keys that no query of the receiver sees are not sent. Every rank derives
the same plan from the lengths, the bands and the documents, which all ranks know.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from megatron_coca.attention.backends.pieces import BlockPiece, area_pieces
from megatron_coca.attention.inputs import Band, PackedDocuments

Spans = tuple[tuple[int, int], ...]
"""The documents of a row as (start, stop) token indices, in order."""


@dataclass(frozen=True)
class Division:
    """The zig-zag division of `length` tokens among `ranks`. The sizes of two chunks differ by at most one token."""

    length: int
    ranks: int

    def chunks(self, rank: int) -> tuple[range, range]:
        """Return the token indices of the two chunks of `rank`, in order."""
        count = 2 * self.ranks
        first, second = (
            range(index * self.length // count, (index + 1) * self.length // count)
            for index in (rank, count - 1 - rank)
        )
        return first, second

    def held(self, tokens: Tensor, rank: int) -> Tensor:
        """Select the tokens of `rank` from tokens [..., length]."""
        return torch.cat([tokens[..., chunk.start : chunk.stop] for chunk in self.chunks(rank)], dim=-1)

    def tokens(self, rank: int) -> int:
        """Return the number of tokens of `rank`."""
        return sum(map(len, self.chunks(rank)))


@dataclass(frozen=True)
class KeySlice:
    """The keys of one rank that another rank needs.

    Attributes:
        ranges: the token indices in each of the two chunks; one or both may be empty.
        segments: the segments that score a pair with one of these keys, in order. Their K' are sent with the values.
    """

    ranges: tuple[range, range]
    segments: tuple[int, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def index(self, token: int) -> int:
        """Return the index of a token's key in the slice."""
        first, second = self.ranges
        return token - first.start if token in first else len(first) + token - second.start


@dataclass(frozen=True)
class Area:
    """The tokens `queries` and `keys` of the document that begins at token `begin`. Both are consecutive. In a round,
    either all keys are before the queries, or keys and queries are the same tokens.
    """

    queries: range
    keys: range
    begin: int

    def seen(self, band: Band) -> range:
        """Return the keys from the first to the last one that a query sees in this band."""
        low, high, size = band.low, band.high, band.chunk
        first, stop = self.keys.start, min(self.keys.stop, self.queries.stop)
        if size is None:
            first = first if high is None else max(first, self.queries.start - high + 1)
            stop = min(stop, self.queries.stop - low)
        else:
            oldest, newest = ((token - self.begin) // size for token in (self.queries.start, self.queries.stop - 1))
            first = first if high is None else max(first, self.begin + (oldest - high + 1) * size)
            stop = min(stop, self.begin + (newest - low + 1) * size)
        if band.first_keys is not None:
            stop = min(stop, self.begin + band.first_keys)
        return range(first, max(first, stop))


@dataclass(frozen=True)
class Round:
    """One round of a rank.

    Attributes:
        source: the rank whose keys are read.
        target: the rank to which this rank sends its own keys.
        received: the keys of `source` that this rank reads.
        sent: this rank's keys that `target` reads.
        areas: for each group of batch rows, the areas of this rank's queries and the received keys.
        bands: the bands of all segments.
        chunks: the chunks of this rank's queries.
    """

    source: int
    target: int
    received: KeySlice
    sent: KeySlice
    areas: tuple[tuple[Area, ...], ...]
    bands: tuple[Band, ...]
    chunks: tuple[range, range]

    def row(self, token: int) -> int:
        """Return the index of a token among this rank's queries."""
        return KeySlice(self.chunks, ()).index(token)

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[int, BlockPiece], ...], ...]:
        """For each group of batch rows, the pieces that need no mask, each with the index of its segment. The indices
        in a piece refer to this rank's queries and to the received keys.
        """
        return tuple(tuple(piece for area in areas for piece in self._pieces(area)) for areas in self.areas)

    def _pieces(self, area: Area) -> list[tuple[int, BlockPiece]]:
        query, key = self.row(area.queries.start), self.received.index(area.keys.start)
        down, right = query - area.queries.start, key - area.keys.start
        return [
            (segment, replace(piece, query=piece.query + down, key=piece.key + right))
            for segment in self.received.segments
            for piece in area_pieces(self.bands[segment], area.queries, area.keys, area.begin)
        ]


@dataclass(frozen=True)
class RingPlan:
    """The rounds of a rank. In the first round, the rank reads its own keys.

    Attributes:
        division: the tokens of all ranks.
        rank: the rank's index in the ring.
        groups: the batch rows of each group, which have the same documents; None if a group has all rows.
        rounds: the rounds, in order.
    """

    division: Division
    rank: int
    groups: tuple[tuple[int, ...] | None, ...]
    rounds: tuple[Round, ...]


def ring_plan(division: Division, rank: int, bands: tuple[Band, ...], documents: PackedDocuments | None) -> RingPlan:
    """Return the plan of `rank`. It is computed once for all layers with the same bands."""
    if documents is None:
        return _of_whole_rows(division, rank, bands)
    key = ("ring", division, rank, bands)
    if key not in documents.masks:
        rows: dict[Spans, list[int]] = {}
        for row, spans in enumerate(documents.spans):
            rows.setdefault(spans, []).append(row)
        groups = (None,) if len(rows) == 1 else tuple(map(tuple, rows.values()))
        documents.masks[key] = _plan(division, rank, bands, groups, tuple(rows))
    plan: RingPlan = documents.masks[key]
    return plan


@lru_cache(maxsize=64)
def _of_whole_rows(division: Division, rank: int, bands: tuple[Band, ...]) -> RingPlan:
    return _plan(division, rank, bands, (None,), (((0, division.length),),))


def _plan(
    division: Division,
    rank: int,
    bands: tuple[Band, ...],
    groups: tuple[tuple[int, ...] | None, ...],
    documents: Sequence[Spans],
) -> RingPlan:
    rounds = []
    for step in range(division.ranks):
        source, target = (rank - step) % division.ranks, (rank + step) % division.ranks
        received, areas = _between(division, rank, source, bands, documents)
        sent, _ = _between(division, target, rank, bands, documents)
        rounds.append(Round(source, target, received, sent, areas, bands, division.chunks(rank)))
    return RingPlan(division, rank, groups, tuple(rounds))


def _between(
    division: Division, reader: int, source: int, bands: tuple[Band, ...], documents: Sequence[Spans]
) -> tuple[KeySlice, tuple[tuple[Area, ...], ...]]:
    """Return the keys of `source` that `reader` needs, and the areas of its queries and these keys for each row."""
    own = division.chunks(source)
    found = [
        [area for keys in own for queries in division.chunks(reader) for area in _areas(spans, queries, keys)]
        for spans in documents
    ]
    if reader == source:
        return KeySlice(own, tuple(range(len(bands)))), tuple(map(tuple, found))
    areas, used = [area for row in found for area in row], []
    hulls: list[range] = [range(0) for _ in own]
    for segment, band in enumerate(bands):
        seen = [keys for area in areas if len(keys := area.seen(band))]
        used += [segment] if seen else []
        hulls = [
            _hull([hull, *(keys for keys in seen if keys.start in chunk)])
            for hull, chunk in zip(hulls, own, strict=True)
        ]
    ranges = (hulls[0], hulls[1])
    clipped = tuple(
        tuple(cut for area in row for hull in ranges if len((cut := _clipped(area, hull)).keys)) for row in found
    )
    return KeySlice(ranges, tuple(used)), clipped


def _areas(spans: Spans, queries: range, keys: range) -> list[Area]:
    """Return the areas of two chunks. A document with tokens in two chunks contains all tokens between them."""
    if keys.start > queries.start:
        return []
    if keys.start == queries.start:
        return [
            Area(tokens, tokens, start)
            for start, stop in spans[bisect_right(spans, (keys.start + 1,)) - 1 :]
            if len(tokens := range(max(start, keys.start), min(stop, keys.stop)))
        ]
    start, stop = spans[bisect_right(spans, (queries.start + 1,)) - 1]
    if start >= keys.stop:
        return []
    return [Area(range(queries.start, min(queries.stop, stop)), range(max(start, keys.start), keys.stop), start)]


def _hull(ranges: list[range]) -> range:
    """Return the range from the first to the last number in `ranges`."""
    filled = [each for each in ranges if len(each)]
    return range(min(each.start for each in filled), max(each.stop for each in filled)) if filled else range(0)


def _clipped(area: Area, keys: range) -> Area:
    start, stop = max(area.keys.start, keys.start), min(area.keys.stop, keys.stop)
    return Area(area.queries, range(start, max(start, stop)), area.begin)
