"""The interface between position methods and attention backends: every value that affects the attention output."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.positions.bias import PAIRWISE as PAIRWISE
from megatron_coca.attention.positions.bias import DistanceBias as DistanceBias
from megatron_coca.attention.positions.bias import bias_of_pairs as bias_of_pairs
from megatron_coca.attention.positions.distance_maps import CAUSAL as CAUSAL
from megatron_coca.attention.positions.distance_maps import Band as Band
from megatron_coca.attention.positions.forms import RotaryTables, expand
from megatron_coca.support.errors import InputError

Built = TypeVar("Built")


@dataclass(frozen=True)
class Turns:
    """The angles that turn the magnitudes of a polar form into Q' and K'.

    Attributes:
        query, key: cos and sin for the queries and the keys, with one column per magnitude.
        offset: constant angles that are subtracted from the angles of the queries, [heads, number of magnitudes], or
            None.
    """

    query: RotaryTables
    key: RotaryTables
    offset: Tensor | None = None


@dataclass(frozen=True)
class Segment:
    """Operands for one band of distances.

    Attributes:
        query: Q' [batch, heads, query_length, head_dim].
        key: K' [batch, kv_heads, key_length, head_dim]; `heads` is a multiple of `kv_heads`, and query head h reads key
            head h // (heads / kv_heads).
        band: the distances of the pairs that the segment scores.
        turns: None, or the angles if `query` and `key` are magnitudes m followed by unrotated features, instead of Q'
            and K'. Q' and K' are then (m cos, m sin) followed by the unrotated features. Only backends with `expands`
            receive such segments; other code calls `expanded`.
    """

    query: Tensor
    key: Tensor
    band: Band
    turns: Turns | None = None


@dataclass(frozen=True)
class PackedDocuments:
    """Documents packed into one row. A query does not see keys before the first token of its own document.

    Attributes:
        starts: [batch, key_length] int64, the index of the first token of each token's document.
        spans: the documents of each row as (start, stop) token indices on the host, in order.
        masks: a cache of masks and other values that all layers share; each key has the arguments of the computation.
    """

    starts: Tensor
    spans: tuple[tuple[tuple[int, int], ...], ...]
    masks: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class AttentionInputs:
    """Operands of causal attention: softmax(scale * Q' K'^T + bias) V over the visible pairs.

    The queries are the last `query_length` of the `key_length` tokens: query row i is token key_length - query_length +
    i. The distance r of a pair is the difference of its token indices. A pair is in a band if r is in the band's range;
    for a band with `chunk`, the range limits the distance in chunks instead. The segment of this band scores the pair.
    A pair is masked if it is in no band, or if its tokens belong to different documents.

    Attributes:
        segments: one or more segments with disjoint bands. The first band contains r = 0, so every query sees itself.
        value: V [batch, kv_heads, key_length, head_dim].
        scale: factor on the dot products. There is no default value, because the backends' defaults differ.
        bias: added to the scaled scores, or None.
        dropout: dropout of attention weights (0 in evaluation).
        documents: document boundaries, or None for one document per row.
        softcap: c, or None. Scaled scores s are replaced by c tanh(s / c) before the bias is added.
        sinks: [heads], each head's score of an additional key with value 0, or None.
        gates: [batch, heads, key_length] float32 or better, the log forgetting gates of the tokens, or None. The sum of
            the log gates from the token after the key up to the query is added to the pair's score, like a bias.

    All operands have the same dtype and device. Q' and K' may be wider than V. The output has the width of V, and
    otherwise the shape and dtype of a segment's query.
    """

    segments: tuple[Segment, ...]
    value: Tensor
    scale: float
    bias: DistanceBias | None = None
    dropout: float = 0.0
    documents: PackedDocuments | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    gates: Tensor | None = None

    @property
    def query(self) -> Tensor:
        """Q' of the first segment. The output has its dtype, its device and, except for the width, its shape."""
        return self.segments[0].query

    @property
    def key(self) -> Tensor:
        """K' of the first segment."""
        return self.segments[0].key

    @property
    def past(self) -> int:
        """Number of tokens before the first query."""
        return self.value.shape[2] - self.query.shape[2]

    def replace(self, **changes: Any) -> "AttentionInputs":
        """Return a copy with some attributes replaced."""
        return replace(self, **changes)


def expanded(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with Q' and K' in place of magnitudes."""

    def of(segment: Segment) -> Segment:
        turns = segment.turns
        if turns is None:
            return segment
        query = expand(segment.query, turns.query, turns.offset)
        return Segment(query, expand(segment.key, turns.key), segment.band)

    return inputs.replace(segments=tuple(map(of, inputs.segments)))


@dataclass(frozen=True)
class Needs:
    """The model's requirements on its backend, known when the model is built.

    Attributes:
        device_type: "cpu" or "cuda", the type of the device on which the model will run.
        head_dim: features per head of Q' and K', including those for forgetting gates.
        bias: the formula of the distance bias, or None.
        bands: the bands of the segments.
        dropout: the attention dropout in training.
        packed: whether samples contain several documents that do not see each other.
        length: tokens per sample in training; 0 in evaluation, because lengths vary.
        deterministic: whether gradients must be bitwise reproducible.
        softcap: the bound of the scores, or None.
        sinks: whether heads have sink logits.
        gates: whether tokens have forgetting gates.
        ring: whether several ranks divide a sequence by tokens.
    """

    device_type: str
    head_dim: int = 64
    bias: str | None = None
    bands: tuple[Band, ...] = (CAUSAL,)
    dropout: float = 0.0
    packed: bool = False
    length: int = 0
    deterministic: bool = False
    softcap: float | None = None
    sinks: bool = False
    gates: bool = False
    ring: bool = False


class Backend(Protocol):
    """Computes attention from its inputs. If the attribute `expands` of a backend is True, the backend accepts
    magnitudes instead of Q' and K' (`Segment.turns`), provided that there is a single segment without forgetting gates.
    """

    def supports(self, needs: Needs) -> str | None:
        """Return None, or the reason why a model with these needs is not supported."""
        ...

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Return the attention output [batch, heads, query_length, width of V] in the query's dtype."""
        ...


GATE_PARTS = 3
"""The number of features whose sum is the bias of a gate. Three features with 8 significant bits (bfloat16) or 11
(float16) represent 24 bits or more.
"""


def gate_features(queries_per_key: int) -> int:
    """Return the number of features per head for forgetting gates: `GATE_PARTS` times the number of query heads per key
    head, rounded up to a multiple of 8 for the CUDA kernels.
    """
    return -(-GATE_PARTS * queries_per_key // 8) * 8


class BackendError(InputError, ValueError):
    """The chosen backend or kernel does not support the model, or no backend supports it."""


def documents_from_ids(ids: Tensor, device: torch.device | None = None) -> PackedDocuments:
    """Find the documents in integer `ids` [batch, length]: adjacent tokens with the same id form one document.

    `starts` is on `device`, by default the device of `ids`. Ids on a GPU are copied to the host.
    """
    length = ids.shape[1]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    index = torch.arange(length, device=ids.device)
    starts = torch.where(begins, index, torch.zeros_like(index)).cummax(dim=1).values
    spans = tuple(_spans(row, length) for row in begins.cpu())
    return PackedDocuments(starts.to(device or ids.device, non_blocking=True), spans)


def in_chunks(
    documents: PackedDocuments | None, size: int, batch: int, length: int, device: torch.device
) -> PackedDocuments:
    """Split documents into chunks of `size` tokens. Without documents, split `batch` rows of `length` tokens."""
    index = torch.arange(length, device=device).expand(batch, -1)
    begins = torch.zeros_like(index) if documents is None else documents.starts
    whole = (((0, length),),) * batch if documents is None else documents.spans
    spans = tuple(
        tuple((cut, min(cut + size, stop)) for start, stop in row for cut in range(start, stop, size)) for row in whole
    )
    return PackedDocuments(index - (index - begins) % size, spans)


def positions_within(documents: PackedDocuments) -> Tensor:
    """Return positions [batch, length] that start at 0 in every document."""
    length = documents.starts.shape[1]
    return torch.arange(length, device=documents.starts.device) - documents.starts


def _spans(begins: Tensor, length: int) -> tuple[tuple[int, int], ...]:
    edges = [*begins.nonzero().flatten().tolist(), length]
    return tuple(pairwise(edges))


def query_block(inputs: AttentionInputs, start: int, rows: int) -> tuple[AttentionInputs, slice]:
    """Return the inputs for `rows` queries from row `start` on, and the indices of the keys that they may see. The
    inputs contain only these keys.
    """
    stop, (band, *others) = min(start + rows, inputs.query.shape[2]), (segment.band for segment in inputs.segments)
    window = band.high if not others and band == Band(band.low, band.high) else None
    first = 0 if window is None else max(inputs.past + start - window + 1, 0)
    queries, keys = slice(start, stop), slice(first, inputs.past + stop)
    block = inputs.replace(
        segments=tuple(
            replace(segment, query=segment.query[:, :, queries], key=segment.key[:, :, keys])
            for segment in inputs.segments
        ),
        value=inputs.value[:, :, keys],
        gates=None if inputs.gates is None else inputs.gates[:, :, keys],
        documents=None if inputs.documents is None else _documents_of(inputs.documents, keys),
    )
    return block, keys


def _documents_of(documents: PackedDocuments, keys: slice) -> PackedDocuments:
    """Restrict `documents` to the tokens in the slice `keys`. The result is computed once for all layers."""
    if ("keys", keys.start, keys.stop) not in documents.masks:
        first, stop = keys.start, keys.stop
        spans = tuple(
            tuple(
                (max(begin, first) - first, min(end, stop) - first)
                for begin, end in row
                if first < end and begin < stop
            )
            for row in documents.spans
        )
        starts = (documents.starts[:, keys] - first).clamp(min=0)
        documents.masks["keys", first, stop] = PackedDocuments(starts, spans)
    return documents.masks["keys", keys.start, keys.stop]


def attend_by_document(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """Apply `attend` to each document separately and return [batch, heads, query_length, head_dim]. The result is exact
    and differentiable.

    Backends that do not support packed documents use this function. Batch rows with the same document boundaries are
    computed in the same calls.
    """
    if inputs.documents is None:
        return attend(inputs)
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for row, spans in enumerate(inputs.documents.spans):
        groups.setdefault(spans, []).append(row)
    batch, past = inputs.value.shape[0], inputs.past
    outputs = []
    for spans, rows in groups.items():

        def rows_of(x: Tensor, rows: list[int] = rows) -> Tensor:
            return x[rows] if len(rows) < batch else x

        segments = [(rows_of(segment.query), rows_of(segment.key), segment.band) for segment in inputs.segments]
        value, of_documents = rows_of(inputs.value), []
        gates = None if inputs.gates is None else rows_of(inputs.gates)
        for start, stop in spans:
            if stop > past:
                queries, keys = slice(max(start - past, 0), stop - past), slice(start, stop)
                of_documents.append(
                    attend(
                        inputs.replace(
                            segments=tuple(Segment(q[:, :, queries], k[:, :, keys], band) for q, k, band in segments),
                            value=value[:, :, keys],
                            gates=None if gates is None else gates[:, :, keys],
                            documents=None,
                        )
                    )
                )
        outputs.append(of_documents[0] if len(of_documents) == 1 else torch.cat(of_documents, dim=2))
    if len(outputs) == 1:
        return outputs[0]
    order = torch.tensor([row for rows in groups.values() for row in rows])
    return torch.cat(outputs).index_select(0, order.argsort().to(inputs.value.device))


def attend_padded(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """Apply `attend` to values padded with zeros to the width of the operands, for kernels that need this width. Return
    the output without the padding, [batch, heads, query_length, width of V].
    """
    width = inputs.value.shape[-1]
    missing = inputs.query.shape[-1] - width
    if missing <= 0:
        return attend(inputs)
    return attend(inputs.replace(value=F.pad(inputs.value, (0, missing))))[..., :width]


def made_once(function: Callable[..., Built], evaluated: int) -> Callable[..., Built]:
    """Cache the results of `function`, which computes tensors on a device from hashable arguments.

    All results from training stay in the cache, because training uses few lengths. Evaluation uses many lengths, so
    only its last `evaluated` results stay.
    """
    training, evaluation = cache(function), lru_cache(evaluated)(function)
    return lambda *arguments: (training if torch.is_grad_enabled() else evaluation)(*arguments)
