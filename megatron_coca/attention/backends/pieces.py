"""Divide the visible pairs of a band into pieces that a flash kernel computes in one call without a mask."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron_coca.attention.inputs import Band

MaskShape = Literal["full", "lower", "upper", "window"]


@dataclass(frozen=True)
class BlockPiece:
    """`blocks` equal blocks of `rows` consecutive queries and `columns` consecutive keys, `step` tokens apart.

    `query` and `key` are the indices of the first query row and first key of the first block. `shape` says which pairs
    of a block are visible. `full`: all pairs. `lower`: pairs with column <= row, which is causal. `upper`: pairs with
    column >= row, which is causal if queries and keys are reversed. `window`: the last row sees the last `window`
    columns, and the row i before it sees the `window` columns that end i columns earlier.
    """

    query: int
    key: int
    rows: int
    columns: int
    shape: MaskShape = "full"
    blocks: int = 1
    step: int = 0
    window: int = 0

    @property
    def query_span(self) -> tuple[int, int]:
        """The first query row of the first block, and the number of rows from it to the end of the last block."""
        return self.query, (self.blocks - 1) * self.step + self.rows

    @property
    def key_span(self) -> tuple[int, int]:
        """The first key of the first block, and the number of keys from it to the end of the last block."""
        return self.key, (self.blocks - 1) * self.step + self.columns


@lru_cache(maxsize=256)
def cover(band: Band, past: int, length: int, windows: bool = False) -> tuple[BlockPiece, ...]:
    """Return the pieces of `band` for queries `past` to `length` and keys 0 to `length`. They cover every visible pair
    exactly once and no other pair. `windows` allows pieces of the shape `window`.
    """
    if windows and (piece := _window(band, past, length)) is not None:
        return (piece,)
    pieces = area_pieces(band, range(past, length), range(length), 0)
    return tuple(replace(piece, query=piece.query - past) for piece in pieces)


def _window(band: Band, past: int, length: int) -> BlockPiece | None:
    """Return the band as one piece of the shape `window`, or None if it is not a window."""
    stop, start = length - band.low, max(past - band.low, 0)
    width = stop if band.high is None else min(band.high - band.low, stop)
    limited = band.first_keys is not None and band.first_keys < stop
    if band.chunk is not None or limited or stop - start <= 1 or (width == stop and start == 0):
        return None
    left = max(start - width + 1, 0)
    return BlockPiece(start + band.low - past, left, stop - start, stop - left, "window", window=width)


def area_pieces(band: Band, queries: range, keys: range, begin: int) -> tuple[BlockPiece, ...]:
    """Return the pieces of `band` for the tokens in `queries` and `keys`, in the document that begins at token `begin`.

    The indices in the pieces are token indices. Either all keys are before the queries, or the last key and the last
    query are the same token.

    With row = m - low, the query at token m sees the keys row - width < n <= row, limited to the given keys and to the
    band's first keys. From row to row, the range of visible keys first grows by one. Then it slides, or does not change
    if there are fewer keys than `width`. Finally it shrinks.
    """
    if band.chunk is not None:
        return tuple(_fold(_chunks(band, band.chunk, queries, keys, begin)))
    left, low = keys.start, band.low
    right = keys.stop if band.first_keys is None else min(keys.stop, begin + band.first_keys)
    start, stop = max(queries.start - low, left), queries.stop - low
    width = stop - left if band.high is None else band.high - low
    stop = min(stop, right + width - 1)
    if left >= right or start >= stop:
        return ()
    slides, stays = min(left + width, stop), min(right, stop)  # first row without key `left`; first row m without key m
    pieces = [*_growing(start, min(slides, stays), left)]
    if slides < stays:
        pieces += _sliding(max(start, slides), stays, width)
    else:
        pieces += _rectangle(max(start, stays), slides, left, right)
    below = max(start, slides, stays)
    pieces += _shrinking(below, stop, below - width + 1, right)
    return tuple(_fold(replace(piece, query=piece.query + low) for piece in pieces))


def _chunks(band: Band, size: int, queries: range, keys: range, begin: int) -> Iterator[BlockPiece]:
    """Yield the pieces for a band of chunks: a query sees earlier chunks and the keys of its own chunk up to itself."""
    first = begin + (queries.start - begin) // size * size
    for start in range(first, queries.stop, size):
        top, bottom = max(start, queries.start), min(start + size, queries.stop)
        left = begin if band.high is None else max(start - (band.high - 1) * size, begin)
        right = top if band.low == 0 else max(start - (band.low - 1) * size, begin)
        yield from _rectangle(top, bottom, max(left, keys.start), min(right, keys.stop))
        if band.low == 0 and top < keys.stop:
            yield from _triangle(top, top, bottom - top, "lower")


def _rectangle(top: int, bottom: int, left: int, right: int) -> Iterator[BlockPiece]:
    if top < bottom and left < right:
        yield BlockPiece(top, left, bottom - top, right - left)


def _triangle(top: int, left: int, size: int, shape: MaskShape) -> Iterator[BlockPiece]:
    if size > 0:
        yield BlockPiece(top, left, size, size, shape if size > 1 else "full")


def _growing(top: int, bottom: int, left: int) -> Iterator[BlockPiece]:
    """Yield the pieces for rows m that see the keys `left` to m."""
    if bottom == top + 1:
        yield from _rectangle(top, bottom, left, bottom)
    elif bottom > top:
        yield from _triangle(top, top, bottom - top, "lower")
        yield from _rectangle(top, bottom, left, top)


def _sliding(top: int, bottom: int, width: int) -> Iterator[BlockPiece]:
    """Yield the pieces for rows m >= width that see the `width` keys up to m: two triangles per `width` rows."""
    for row in range(top, bottom, width):
        end = min(row + width, bottom)
        if end == row + 1:
            yield from _rectangle(row, end, row - width + 1, end)
        else:
            yield from _triangle(row, row, end - row, "lower")
            yield from _shrinking(row, end, row - width + 1, row)


def _shrinking(top: int, bottom: int, left: int, right: int) -> Iterator[BlockPiece]:
    """Yield the pieces for rows top + i that see the keys left + i to right - 1."""
    size = min(bottom - top, right - left)
    yield from _triangle(top, left, size, "upper")
    yield from _rectangle(top, top + size, left + size, right)


def _fold(pieces: Iterator[BlockPiece]) -> Iterator[BlockPiece]:
    """Combine equal pieces at equal steps along the diagonal into one piece with several blocks."""
    groups: dict[tuple[int, int, int, MaskShape], list[BlockPiece]] = {}
    for piece in pieces:
        groups.setdefault((piece.query - piece.key, piece.rows, piece.columns, piece.shape), []).append(piece)
    for run, *rest in groups.values():
        for piece in rest:
            distance = piece.query - run.query
            if distance == run.blocks * (run.step or distance):
                run = replace(run, blocks=run.blocks + 1, step=run.step or distance)
            else:
                yield run
                run = piece
        yield run
