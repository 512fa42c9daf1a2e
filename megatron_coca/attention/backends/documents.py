"""Packed documents on backends that know of none: attention document by document, written into place."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, Segment

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
