"""The rows of attention's packed projection, and the projection in three layers where its parts are not treated alike."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

PARTS = ("query", "key", "value")
"""What is packed, in this order."""


class PackedRows(NamedTuple):
    """Where the rows of one part lie among the packed ones: equal blocks, at equal distances.

    Attributes:
        first: the row with which the first block begins.
        size: rows of a block.
        period: rows from the beginning of one block to that of the next.
        total: all packed rows.
    """

    first: int
    size: int
    period: int
    total: int

    def numbers(self) -> Tensor:
        """The packed row of every row of the part, int64."""
        return torch.arange(self.total).view(-1, self.period)[:, self.first : self.first + self.size].flatten()

    def stretches(self, begin: int, stop: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Elements [begin, stop) of the flattened part, whose rows have `width` elements, as stretches without a gap among
        the packed ones: where each begins there, and its first and last + 1 element in the part.
        """
        unit = self.size * width
        while begin < stop:
            block = begin // unit
            last = min(stop, (block + 1) * unit)
            yield (block * self.period + self.first) * width + begin - block * unit, begin, last
            begin = last


def packed_rows(query_rows: int, key_rows: int, head_dim: int) -> dict[str, PackedRows]:
    """The rows of every part where so many are packed: [q | k | v] head by head where there are as many keys as queries,
    else all queries, all keys, all values.
    """
    total = query_rows + 2 * key_rows
    if query_rows == key_rows:
        return {name: PackedRows(number * head_dim, head_dim, 3 * head_dim, total) for number, name in enumerate(PARTS)}
    blocks = ((0, query_rows), (query_rows, key_rows), (query_rows + key_rows, key_rows))
    return {name: PackedRows(*block, total, total) for name, block in zip(PARTS, blocks, strict=True)}


class SplitProjection(nn.Module):
    """A packed projection as three layers of its own rows, so that one can be trained without the others: no gradient,
    no optimizer state and no product for a gradient exists for the rest.

    Hidden states [..., hidden_size] -> queries, keys and values, each [..., its rows].
    """

    def __init__(self, packed: nn.Linear, rows: dict[str, PackedRows]) -> None:
        """Copies the weights of `packed`, whose rows are `rows`."""
        super().__init__()
        self.query, self.key, self.value = (_rows_of(packed, rows[name].numbers()) for name in PARTS)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(hidden), self.key(hidden), self.value(hidden)


def _rows_of(packed: nn.Linear, numbers: Tensor) -> nn.Linear:
    index = numbers.to(packed.weight.device)
    with torch.device("meta"):  # PyTorch's layers draw weights, which would move the random state
        layer = nn.Linear(packed.in_features, len(index), bias=packed.bias is not None)
    layer.weight = nn.Parameter(packed.weight.detach()[index])
    if packed.bias is not None:
        layer.bias = nn.Parameter(packed.bias.detach()[index])
    return layer
