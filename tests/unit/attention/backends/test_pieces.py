"""The pieces of bands: every visible pair is in exactly one, and they are few."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends.pieces import BlockPiece, cover
from megatron_coca.attention.inputs import CAUSAL, Band

CHUNKS_OF_512 = (Band(0, 1, chunk=512), Band(1, 2, chunk=512), Band(2, chunk=512))


def pairs(pieces: tuple[BlockPiece, ...], queries: int, keys: int) -> Tensor:
    """How often the pieces hold each pair, [queries, keys]."""
    counts = torch.zeros(queries, keys, dtype=torch.long)
    for piece in pieces:
        block = torch.ones(piece.rows, piece.columns, dtype=torch.long)
        last = piece.columns - piece.rows  # of row 0, if the window of the last row ends at the last column
        window = block.tril(last).triu(last - piece.window + 1)
        block = {"full": block, "lower": block.tril(), "upper": block.triu(), "window": window}[piece.shape]
        for offset in (index * piece.step for index in range(piece.blocks)):
            rows, columns = piece.query + offset, piece.key + offset
            counts[rows : rows + piece.rows, columns : columns + piece.columns] += block
    return counts


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 12])
def test_pieces_cover_every_visible_pair_once(length: int, windows: bool) -> None:
    key = torch.arange(length)
    for past, low, high, first in product(range(length), (0, 1, 3), (None, 1, 2, 4, 5, 20), (None, 1, 2, 5, 30)):
        if high is not None and high <= low:
            continue
        distance = torch.arange(past, length)[:, None] - key
        visible = (distance >= low) & (distance < (high or length)) & (key < (first or length))
        pieces = cover(Band(low, high, first), past, length, windows)
        assert torch.equal(pairs(pieces, length - past, length), visible.long()), (past, low, high, first)
        assert first is not None or not windows or len(pieces) <= 1


@pytest.mark.parametrize("length", [1, 2, 7, 12])
def test_pieces_cover_every_pair_of_chunks_once(length: int) -> None:
    for past, low, high, size in product(range(length), (0, 1, 2), (None, 1, 2, 3), (1, 2, 5, 20)):
        if high is not None and high <= low:
            continue
        query, key = torch.arange(past, length)[:, None], torch.arange(length)
        apart = query // size - key // size
        visible = (query >= key) & (apart >= low) & (apart < (high or length))
        found = pairs(cover(Band(low, high, chunk=size), past, length), length - past, length)
        assert torch.equal(found, visible.long()), (past, low, high, size)


def test_three_bands_of_chunks_are_half_the_pairs_in_two_calls_and_one_per_older_chunk() -> None:
    near, following, older = (cover(band, 0, 4096) for band in CHUNKS_OF_512)
    assert near == (BlockPiece(0, 0, 512, 512, "lower", 8, 512),) and following == (
        BlockPiece(512, 0, 512, 512, "full", 7, 512),
    )
    assert [(piece.rows, piece.columns) for piece in older] == [(512, 512 * chunks) for chunks in range(1, 7)]


def test_a_band_of_chunks_shows_all_of_their_keys() -> None:
    with pytest.raises(ValueError, match="first_keys: not supported together with chunk"):
        Band(1, first_keys=4, chunk=8)


def test_triangles_are_square_and_no_piece_is_empty() -> None:
    for past, high, first in product((0, 5, 40), (3, 7, 16, None), (None, 4)):
        for piece in cover(Band(0, high, first), past, 41):
            assert piece.rows > 0 and piece.columns > 0
            assert piece.shape == "full" or piece.rows == piece.columns > 1


@pytest.mark.parametrize(("length", "pieces"), [(4096, 3), (4000, 6)])
def test_near_and_far_are_a_few_calls_over_half_the_pairs(length: int, pieces: int) -> None:
    """Diagonal blocks, blocks before them, and the far triangle; a short last block is three pieces more."""
    found = [*cover(Band(0, 256), 0, length), *cover(Band(256), 0, length)]
    assert len(found) == pieces
    visited = sum(
        piece.blocks * (piece.rows * piece.columns if piece.shape == "full" else piece.rows * (piece.rows + 1) // 2)
        for piece in found
    )
    assert visited == length * (length + 1) // 2


def test_one_query_takes_one_rectangle_a_segment() -> None:
    assert cover(Band(0, 4), 99, 100) == (BlockPiece(0, 96, 1, 4),)
    assert cover(Band(4), 99, 100) == (BlockPiece(0, 0, 1, 96),)
    assert cover(CAUSAL, 99, 100) == (BlockPiece(0, 0, 1, 100),)


def test_with_windows_near_and_far_are_two_calls() -> None:
    """The far band is a shifted causal call; with a cache it is a window that begins at the first key."""
    near, far = Band(0, 256), Band(256)
    assert cover(near, 0, 4000, windows=True) == (BlockPiece(0, 0, 4000, 4000, "window", window=256),)
    assert cover(far, 0, 4000, windows=True) == (BlockPiece(256, 0, 3744, 3744, "lower"),)
    assert cover(near, 3000, 4000, windows=True) == (BlockPiece(0, 2745, 1000, 1255, "window", window=256),)
    assert cover(far, 3000, 4000, windows=True) == (BlockPiece(0, 0, 1000, 3744, "window", window=3744),)
