"""The contract between position methods and attention backends: every quantity that changes the result of attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Formula = Literal["linear", "log", "power", "buckets"]


class DistanceBias(Protocol):
    """A score bias given as a formula of the distance r between query and key."""

    @property
    def formula(self) -> Formula:
        """Which one, for kernels that write it out: linear -c0 r; log -c0 ln(1 + c1 r); power -c0 r^c1; buckets a
        table of steps.
        """
        ...

    @property
    def coefficients(self) -> Tensor:
        """c0, c1 per query head, [heads, 1 or 2] float32 (buckets: the table, [heads, buckets]); learned ones carry
        gradients.
        """
        ...

    def at(self, distance: Tensor) -> Tensor:
        """[heads, ...] for `distance` [...] >= 0 of a floating type, in the dtype and on the device of `distance`."""
        ...

    def part(self, index: int, count: int) -> "DistanceBias":
        """The bias of part `index` of `count` equal parts of the heads."""
        ...


@dataclass(frozen=True)
class Band:
    """The distances r that a segment serves: low <= r < high (no end where `high` is None).

    With `first_keys` only the first so many keys of the sequence, or of the document, are visible.
    """

    low: int = 0
    high: int | None = None
    first_keys: int | None = None


CAUSAL = Band()
"""Every key up to the query's own."""


@dataclass(frozen=True)
class Segment:
    """Operands of the pairs in one band of distances.

    Attributes:
        query: Q' [batch, heads, query_length, head_dim].
        key: K' [batch, kv_heads, key_length, head_dim]; `heads` is a multiple of `kv_heads`, and query head h reads
            key head h // (heads / kv_heads).
        band: the distances served.
    """

    query: Tensor
    key: Tensor
    band: Band = CAUSAL


@dataclass(frozen=True)
class PackedDocuments:
    """Documents packed into one row: a query sees no key before the first token of its own document.

    Attributes:
        starts: [batch, key_length] int64, the index of the first token of the document that each token belongs to.
        spans: for each row of the batch its documents as (start, stop) of token indices, in order; the same fact on
            the host, for backends that go through the documents one by one.
    """

    starts: Tensor
    spans: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class AttentionInputs:
    """Operands of causal attention: softmax(scale * Q' K'^T + bias) V over the visible pairs.

    The queries are the last `query_length` of the `key_length` tokens: query row i stands at token index key_length -
    query_length + i. The distance r of a pair is the difference of token indices. A pair is scored by the segment
    whose band holds r and is invisible where none does, or where documents part the two tokens.

    Attributes:
        segments: one, or several with disjoint bands; the first one's holds r = 0, so that every query sees itself.
        value: V [batch, kv_heads, key_length, head_dim].
        scale: what the dot products are multiplied by. It has no default, because backends disagree about theirs.
        bias: added to the scaled scores, or None.
        dropout: probability with which an attention weight is dropped (0 in evaluation).
        documents: document boundaries, or None where a row is one document.

    All operands share one dtype and device; the output has the shape and dtype of a segment's query.
    """

    segments: tuple[Segment, ...]
    value: Tensor
    scale: float
    bias: DistanceBias | None = None
    dropout: float = 0.0
    documents: PackedDocuments | None = None

    @property
    def query(self) -> Tensor:
        """Q' of the first segment, which gives the output its shape, dtype and device."""
        return self.segments[0].query

    @property
    def key(self) -> Tensor:
        """K' of the first segment."""
        return self.segments[0].key

    @property
    def past(self) -> int:
        """How many tokens precede the first query."""
        return self.value.shape[2] - self.query.shape[2]

    def replace(self, **changes: Any) -> "AttentionInputs":
        """A copy with other attributes."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Needs:
    """What a backend must be able to do for a model; known when the model is built.

    Attributes:
        device_type: "cpu" or "cuda", where the model will run.
        head_dim: features of a head.
        bias: the formula of the distance bias, or None.
        bands: the bands of the segments.
        dropout: the attention dropout in training.
    """

    device_type: str
    head_dim: int = 64
    bias: Formula | None = None
    bands: tuple[Band, ...] = (CAUSAL,)
    dropout: float = 0.0


class Backend(Protocol):
    """Computes attention from its inputs."""

    def supports(self, needs: Needs) -> str | None:
        """None, or the reason why a model with these needs cannot be served."""
        ...

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Causal attention [batch, heads, query_length, head_dim] in the query's dtype."""
        ...


class BackendError(ValueError):
    """No implementation can serve the model, or the one that was named cannot."""


def documents_from_ids(ids: Tensor) -> PackedDocuments:
    """The documents of `ids` [batch, length] integer: neighbouring tokens with one id are one document.

    Takes one copy to the host, so it is made once for a forward pass.
    """
    length = ids.shape[1]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    index = torch.arange(length, device=ids.device)
    starts = torch.where(begins, index, torch.zeros_like(index)).cummax(dim=1).values
    return PackedDocuments(starts, tuple(_spans(row, length) for row in begins.cpu()))


def positions_within(documents: PackedDocuments) -> Tensor:
    """Positions [batch, length] that begin at 0 in every document."""
    length = documents.starts.shape[1]
    return torch.arange(length, device=documents.starts.device) - documents.starts


def _spans(begins: Tensor, length: int) -> tuple[tuple[int, int], ...]:
    edges = [*begins.nonzero().flatten().tolist(), length]
    return tuple(zip(edges[:-1], edges[1:], strict=True))


Span = tuple[int, int]


def attend_by_document(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """`attend` applied to every document by itself: exact, differentiable, [batch, heads, query_length, head_dim].

    A document sees only itself, and distances are differences, so a slice of the tokens is attention of its own. Rows
    of the batch with the same documents are served together.

    Raises:
        ValueError: the documents of a row leave out some of its queries.
    """
    if inputs.documents is None:
        return attend(inputs)
    groups: dict[tuple[Span, ...], list[int]] = {}
    for row, spans in enumerate(inputs.documents.spans):
        groups.setdefault(spans, []).append(row)
    outputs = [_attend_rows(attend, inputs, rows, spans) for spans, rows in groups.items()]
    if len(outputs) == 1:
        return outputs[0]
    order = torch.tensor([row for rows in groups.values() for row in rows])
    return torch.cat(outputs).index_select(0, order.argsort().to(inputs.value.device))


def _attend_rows(
    attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs, rows: list[int], spans: tuple[Span, ...]
) -> Tensor:
    _check_cover(spans, inputs.past, inputs.value.shape[2], rows[0])
    if len(rows) < inputs.value.shape[0]:
        inputs = _map_operands(inputs, lambda x: x[rows])
    outputs = [attend(document) for document in _slices(inputs, spans)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _check_cover(spans: tuple[Span, ...], past: int, length: int, row: int) -> None:
    reached = past
    for start, stop in spans:
        if stop > past:
            if start > reached:
                break
            reached = stop
    if reached != length:
        raise ValueError(
            f"row {row}: the documents {spans} do not cover its tokens {past} to {length} one after another"
        )


def _slices(inputs: AttentionInputs, spans: tuple[Span, ...]) -> Iterator[AttentionInputs]:
    """The inputs of every document that has a query."""
    past = inputs.past
    for start, stop in spans:
        if stop <= past:
            continue
        first = max(start - past, 0)
        segments = tuple(
            Segment(part.query[:, :, first : stop - past], part.key[:, :, start:stop], part.band)
            for part in inputs.segments
        )
        yield inputs.replace(segments=segments, value=inputs.value[:, :, start:stop], documents=None)


def _map_operands(inputs: AttentionInputs, change: Callable[[Tensor], Tensor]) -> AttentionInputs:
    segments = tuple(Segment(change(part.query), change(part.key), part.band) for part in inputs.segments)
    return inputs.replace(segments=segments, value=change(inputs.value))
