"""Projections that are trained in three layers, as checkpoints know them: packed, under one name.

What an engine holds of such a layer is the same memory, named and placed as rows of the packed projection.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch.nn as nn

from megatron_coca.attention.projection import PackedRows, packed_rows
from megatron_coca.checkpoints.state import Piece
from megatron_coca.config import ModelConfig

SPLIT = re.compile(r"(?P<packed>.*\.query_key_value)\.(?P<part>query|key|value)\.(?P<kind>weight|bias)")
"""Names of the parameters of `SplitProjection`."""


class Packed(NamedTuple):
    """Where a parameter lies in a packed one.

    Attributes:
        name: of the packed parameter.
        rows: that this one has of it, on this rank.
        row_shape: the shape of one row, () for a bias.
    """

    name: str
    rows: PackedRows
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The packed parameter's shape on this rank."""
        return (self.rows.total, *self.row_shape)

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """The same memory as stretches of the packed parameter."""
        width, stop = self.row_shape[0] if self.row_shape else 1, piece.start + piece.tensor.numel()
        for start, begin, last in self.rows.stretches(piece.start, stop, width):
            yield Piece(self.name, piece.kind, start, piece.tensor[begin - piece.start : last - piece.start])


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter on this rank, also where ZeRO 3 has divided it further."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def packed_places(names: Mapping[nn.Parameter, str], model: ModelConfig) -> dict[str, Packed]:
    """Where the parameters of projections in three layers lie, by their names; all others are not in it."""
    found = {}
    for parameter, name in names.items():
        match = SPLIT.fullmatch(name)
        if match is not None:
            rows, *row_shape = local_shape(parameter)
            # Tensor ranks have equal shares of the queries and of the keys.
            group = model.num_attention_heads // model.num_kv_heads
            keys = rows // group if match["part"] == "query" else rows
            packed = packed_rows(keys * group, keys, model.head_dim)[match["part"]]
            found[name] = Packed(f"{match['packed']}.{match['kind']}", packed, tuple(row_shape))
    return found


def packed_pieces(pieces: Iterable[Piece], places: Mapping[str, Packed]) -> Iterator[Piece]:
    """The same memory, with `places` taken for what they are parts of."""
    for piece in pieces:
        if piece.name in places:
            yield from places[piece.name].pieces(piece)
        else:
            yield piece
