"""Compute the rounds of a ring from dense scores of small blocks, with any bias, soft-capping and forgetting gates.
Memory is linear in the length; the backward pass computes the scores again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_coca.attention.backends.reference import visible
from megatron_coca.attention.inputs import DistanceBias, bias_of_pairs
from megatron_coca.attention.ring.plan import Area, RingPlan, Round
from megatron_coca.attention.ring.rounds import Attended, Keys, Queries, Scoring

QUERY_ROWS, KEY_COLUMNS = 128, 1024
"""Queries and keys of a block."""
RowIndex = slice | list[int]


@dataclass(frozen=True)
class _Block:
    """A part of an area.

    Attributes:
        area: the queries and keys of the block.
        batch: the batch rows of the block.
        rows, columns: the indices of the block's queries among this rank's queries, and the indices of its keys among
            the keys of the round.
    """

    area: Area
    batch: RowIndex
    rows: slice
    columns: slice


def _blocks(each: Round, plan: RingPlan) -> Iterator[_Block]:
    for rows, areas in zip(plan.groups, each.areas, strict=True):
        batch: RowIndex = slice(None) if rows is None else list(rows)
        for area in areas:
            for top in range(area.queries.start, area.queries.stop, QUERY_ROWS):
                queries = range(top, min(top + QUERY_ROWS, area.queries.stop))
                for left in range(area.keys.start, min(area.keys.stop, queries.stop), KEY_COLUMNS):
                    keys = range(left, min(left + KEY_COLUMNS, area.keys.stop))
                    part, row, column = Area(queries, keys, area.begin), each.row(top), each.received.index(left)
                    if any(len(part.seen(band)) for band in each.bands):
                        yield _Block(part, batch, slice(row, row + len(queries)), slice(column, column + len(keys)))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [batch, heads, n, m] of every head by b [batch, kv_heads, m, k] of its key head."""
    return torch.einsum("bghnm,bgmk->bghnk", a.unflatten(1, (b.shape[1], -1)), b).flatten(1, 2)


def _by_key_head(a: Tensor, b: Tensor, kv_heads: int) -> Tensor:
    """Multiply the transpose of a [batch, heads, n, m] by b [batch, heads, n, k], summed over the heads of a key head:
    [batch, kv_heads, m, k].
    """
    return torch.einsum("bghnm,bghnk->bgmk", a.unflatten(1, (kv_heads, -1)), b.unflatten(1, (kv_heads, -1)))


def _scores(
    scoring: Scoring,
    part: Area,
    queries: list[Tensor],
    keys: list[Tensor | None],
    bias: DistanceBias | None,
    gates: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the scores [batch, heads, rows, columns] of a block; pairs that are not visible get -inf. `gates` are the
    running sums of the log gates of the block's queries and keys.
    """
    device = queries[0].device
    row, column = (
        torch.arange(tokens.start, tokens.stop, device=device) - part.begin for tokens in (part.queries, part.keys)
    )
    distance = row[:, None] - column
    scores = torch.tensor(-math.inf, dtype=queries[0].dtype, device=device)
    for query, key, band in zip(queries, keys, scoring.bands, strict=True):
        if key is not None and len(part.seen(band)):
            product = _product(query, key.transpose(-1, -2)) * scoring.scale
            if scoring.softcap is not None:
                product = scoring.softcap * torch.tanh(product / scoring.softcap)
            scores = torch.where(visible(band, distance, column, None), product, scores)
    if bias is not None:
        scores = scores + bias_of_pairs(bias, distance.clamp(min=0).to(scores.dtype), row[:, None].to(scores.dtype))
    if gates is not None:
        of_query, of_key = gates
        scores = scores + (of_query[..., None] - of_key[:, :, None]).to(scores.dtype)
    return scores


class _Pass:
    """The base class of both passes. It converts the operands of a block to float32 or better."""

    def __init__(self, scoring: Scoring, plan: RingPlan, queries: Queries) -> None:
        self._scoring, self._plan, self._queries = scoring, plan, queries
        self._wide = torch.promote_types(queries.operands[0].dtype, torch.float32)

    def _operands(self, block: _Block, keys: Keys) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
        """Return Q' and K' of every segment, and V."""
        queries = [self._part(x, block.batch, block.rows) for x in self._queries.operands]
        of_keys = [None if key is None else self._part(key, block.batch, block.columns) for key in keys.operands]
        return queries, of_keys, self._part(keys.value, block.batch, block.columns)

    def _part(self, x: Tensor, batch: RowIndex, tokens: slice) -> Tensor:
        return x[batch][:, :, tokens].to(self._wide)

    def _gates(self, block: _Block) -> tuple[Tensor, Tensor] | None:
        total = self._queries.gates
        if total is None:
            return None
        queries, keys = block.area.queries, block.area.keys
        rows = total[block.batch]
        return rows[:, :, queries.start : queries.stop], rows[:, :, keys.start : keys.stop]


class DenseForward(_Pass):
    """The forward pass; see `Forward`."""

    def __init__(self, scoring: Scoring, plan: RingPlan, queries: Queries, width: int) -> None:
        """`width` is the width of V."""
        super().__init__(scoring, plan, queries)
        shape = queries.operands[0].shape[:3]
        self._out = queries.operands[0].new_zeros(*shape, width, dtype=self._wide)
        self._lse = queries.operands[0].new_full(shape, -math.inf, dtype=self._wide)

    def add(self, each: Round, keys: Keys) -> None:
        for block in _blocks(each, self._plan):
            queries, of_keys, value = self._operands(block, keys)
            scores = _scores(self._scoring, block.area, queries, of_keys, self._scoring.bias, self._gates(block))
            at = (block.batch, slice(None), block.rows)
            before = self._lse[at]
            after = torch.logaddexp(before, scores.logsumexp(-1))
            weights = (scores - _finite(after)[..., None]).exp()
            self._out[at] = self._out[at] * (before - _finite(after)).exp()[..., None] + _product(weights, value)
            self._lse[at] = after

    def finished(self) -> tuple[Tensor, Tensor]:
        return self._out, self._lse


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf, the log-sum-exp of a row that has seen no key yet, by 0: its weights are 0 in any case."""
    return lse.masked_fill(lse == -math.inf, 0.0)


class DenseBackward(_Pass):
    """The backward pass; see `Backward`."""

    def __init__(self, scoring: Scoring, plan: RingPlan, queries: Queries, result: Attended) -> None:
        super().__init__(scoring, plan, queries)
        self._grad, self._lse = result.grad, result.lse
        self._share = (result.grad.to(self._wide) * result.out.to(self._wide)).sum(-1, keepdim=True)
        self._query_sums = [torch.zeros_like(x, dtype=self._wide) for x in queries.operands]
        self._bias, self._coefficients = _with_leaf(scoring.bias)
        self._coefficient_sum = None if self._coefficients is None else torch.zeros_like(self._coefficients)
        self._gate_sum = None if queries.gates is None else torch.zeros_like(queries.gates)

    def add(self, each: Round, keys: Keys) -> Keys:
        value_sum = torch.zeros_like(keys.value, dtype=self._wide)
        key_sums = [None if key is None else torch.zeros_like(key, dtype=self._wide) for key in keys.operands]
        for block in _blocks(each, self._plan):
            self._add_block(block, keys, value_sum, key_sums)
        return Keys(value_sum, key_sums)

    def _add_block(self, block: _Block, keys: Keys, value_sum: Tensor, key_sums: list[Tensor | None]) -> None:
        queries, of_keys, value = self._operands(block, keys)
        at, columns = (block.batch, slice(None), block.rows), (block.batch, slice(None), block.columns)
        leaves = [x.detach().requires_grad_() for x in (*queries, *(key for key in of_keys if key is not None))]
        inner = iter(leaves[len(queries) :])
        given = self._gates(block)
        gates = None if given is None else (given[0].detach().requires_grad_(), given[1].detach().requires_grad_())
        with torch.enable_grad():
            keyed = [None if key is None else next(inner) for key in of_keys]
            scores = _scores(self._scoring, block.area, leaves[: len(queries)], keyed, self._bias, gates)
        grad = self._grad[at].to(self._wide)
        weights = (scores.detach() - self._lse[at].to(self._wide)[..., None]).exp()
        of_scores = weights * (_product(grad, value.transpose(-1, -2)) - self._share[at])
        value_sum[columns] += _by_key_head(weights, grad, value.shape[1])
        learned = [] if self._coefficients is None else [self._coefficients]
        found = torch.autograd.grad(scores, [*leaves, *learned, *(gates or ())], of_scores, allow_unused=True)
        sums = [(total, at) for total in self._query_sums]
        sums += [(total, columns) for total in key_sums if total is not None]
        for (total, place), part in zip(sums, found, strict=False):
            if part is not None:
                total[place] += part
        if self._coefficient_sum is not None and (part := found[len(leaves)]) is not None:
            self._coefficient_sum += part
        if gates is not None and self._gate_sum is not None:
            for tokens, part in zip((block.area.queries, block.area.keys), found[-2:], strict=True):
                self._gate_sum[block.batch, :, tokens.start : tokens.stop] += part

    def finished(self) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        return self._query_sums, self._coefficient_sum, self._gate_sum


def _with_leaf(bias: Any) -> tuple[DistanceBias | None, Tensor | None]:
    """If the coefficients are learned, return the bias with a leaf of the graph as its coefficients, and this leaf.
    Otherwise return the bias unchanged, and None.
    """
    if bias is None or not bias.coefficients.requires_grad:
        return bias, None
    leaf = bias.coefficients.detach().requires_grad_()
    return replace(bias, coefficients=leaf), leaf
