"""The geometry of a band: which mask-free pieces cover its pairs of queries and keys exactly once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron_coca.attention.inputs import Band

Shape = Literal["full", "lower", "upper"]


@dataclass(frozen=True)
class Piece:
    """Pairs of consecutive queries and keys, `blocks` times over, each block `step` queries and keys after the last.

    Row i and column j of a block, counted from its first query and key, are visible: all of them (full), where j <= i
    (lower, a causal square), or where j >= i (upper, a causal square once both its sides are reversed).

    Attributes:
        query: index among the query rows of the first block's first query.
        key: index of the first block's first key.
        rows: queries in a block.
        columns: keys in a block; as many as rows in a triangle.
    """

    query: int
    key: int
    rows: int
    columns: int
    shape: Shape = "full"
    blocks: int = 1
    step: int = 0


@lru_cache(maxsize=256)
def cover(band: Band, past: int, length: int) -> tuple[Piece, ...]:
    """The pieces of `band` for queries `past` to `length` of `length` keys: every visible pair once, no other pair.

    A query at token m and the band [low, high) see the keys n = m - low, m - low - 1, ... Counted from row = m - low,
    these are the keys row - width < n <= row that are neither negative nor beyond the first keys. So going down the
    rows, the keys first grow by one a row, then slide (or stay, where the first keys are used up before the width),
    and then shrink.
    """
    stop = length - band.low
    start = max(past - band.low, 0)
    width = stop if band.high is None else min(band.high - band.low, stop)
    first = stop if band.first_keys is None else min(band.first_keys, stop)
    inner, outer = sorted((width, first))
    pieces = [*_growing(start, min(inner, stop))]
    if width < first:
        pieces += _sliding(max(start, width), first, width)
    else:
        pieces += _rectangle(max(start, first), min(width, stop), 0, first)
    below = max(start, outer)
    pieces += _shrinking(below, stop, below - width + 1, first)
    offset = band.low - past
    return tuple(_fold(replace(piece, query=piece.query + offset) for piece in pieces))


def _rectangle(top: int, bottom: int, left: int, right: int) -> Iterator[Piece]:
    if top < bottom and left < right:
        yield Piece(top, left, bottom - top, right - left)


def _triangle(top: int, left: int, size: int, shape: Shape) -> Iterator[Piece]:
    if size > 0:
        yield Piece(top, left, size, size, shape if size > 1 else "full")


def _growing(top: int, bottom: int) -> Iterator[Piece]:
    """Row m sees the keys 0 to m."""
    if bottom == top + 1:
        yield from _rectangle(top, bottom, 0, bottom)
    elif bottom > top:
        yield from _triangle(top, top, bottom - top, "lower")
        yield from _rectangle(top, bottom, 0, top)


def _sliding(top: int, bottom: int, width: int) -> Iterator[Piece]:
    """Row m >= width sees the `width` keys up to m: blocks of `width` rows, each with the keys beside and before it."""
    for row in range(top, bottom, width):
        end = min(row + width, bottom)
        if end == row + 1:
            yield from _rectangle(row, end, row - width + 1, end)
        else:
            yield from _triangle(row, row, end - row, "lower")
            yield from _shrinking(row, end, row - width + 1, row)


def _shrinking(top: int, bottom: int, left: int, right: int) -> Iterator[Piece]:
    """Row top + i sees the keys left + i to right - 1."""
    size = min(bottom - top, right - left)
    yield from _triangle(top, left, size, "upper")
    yield from _rectangle(top, top + size, left + size, right)


def _fold(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Equal pieces at equal steps along the diagonal as one."""
    groups: dict[tuple[int, int, int, Shape], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.query - piece.key, piece.rows, piece.columns, piece.shape), []).append(piece)
    for group in groups.values():
        yield from _runs(group)


def _runs(pieces: list[Piece]) -> Iterator[Piece]:
    run = pieces[0]
    for piece in pieces[1:]:
        distance = piece.query - run.query
        if distance == run.blocks * (run.step or distance):
            run = replace(run, blocks=run.blocks + 1, step=run.step or distance)
        else:
            yield run
            run = piece
    yield run
