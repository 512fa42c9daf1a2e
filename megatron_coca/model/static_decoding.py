"""Decode tokens one by one with fixed shapes. On CUDA, the operations of a token are captured once in a CUDA graph, and
the host launches the graph for every token.

A step reads its token and its index from the device, and it writes the next token and the next index there. The host
therefore waits for nothing. It reads the tokens of a step only after it has launched the next steps.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_coca.attention.context import WHOLE, PositionContext, SegmentTables, mapped
from megatron_coca.attention.layer import Cache
from megatron_coca.attention.method import PositionEncoding
from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.attention.positions.forms import RotaryTables, rotary_tables
from megatron_coca.attention.static_cache import StaticLayer, TokenStep
from megatron_coca.kernels import missing_triton
from megatron_coca.model.gpt import GPT

ChooseTokens = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [batch, vocabulary], their input tokens [batch, 1], number of the generated token [1]) -> the next tokens,
int64 [batch, 1], and whether the logits are finite, bool [batch, 1]. It must not wait for the device."""

LEAST_EXTENT = 512
"""The smallest number of cache slots that attention reads. The number doubles when the sequence reaches it."""
AHEAD = 2
"""Number of later steps that the host launches on a GPU before it reads the tokens of a step."""
LEAST_CAPTURED = 4
"""A graph is captured only if at least this many tokens remain. Capturing takes the host about as long as one token
without a graph.
"""


def unsupported(model: GPT, cache: Cache, total: int, past: int = 0) -> str | None:
    """Return None, or the reason why a sequence of `past` to `total` tokens cannot be decoded with fixed shapes.

    `PositionMethod.moving` returns the reasons that come from a position method.
    """
    for name, method in model.methods.items():
        if (reason := method.moving(cache.length)) is not None:
            return f"{name} layers: {reason}"
        if cache.length is None and method.switch is not None and past <= method.switch < total:
            return f"{name} layers: all tokens are computed again at {method.switch} tokens"
    if model.share is not WHOLE:
        return "the model is one shard of a model"
    if cache.positions is not None and cache.positions.dim() == 2:
        return "the cached rows have different positions"
    try:
        last = torch.tensor([total - 1], device=next(model.parameters()).device)
        model.embedding(torch.zeros_like(last)[None], last, total)
    except PositionRangeError as error:
        return str(error)
    return None


class StaticDecoder:
    """Decodes the tokens that follow the tokens in a cache. New keys and values go into the buffers of the cache.

    It can be used for one sequence after another. The captured graphs are kept while the cache keeps its buffers.
    """

    def __init__(
        self,
        model: GPT,
        cache: Cache,
        batch: int,
        total: int,
        choose: ChooseTokens,
        rule: Hashable | None = None,
        past: int = 0,
    ) -> None:
        """`total` is the largest number of tokens of a sequence, prompt included, and `past` the smallest number of
        cached tokens. `rule` is equal for any two functions `choose` that always choose the same tokens, or None if no
        other function chooses the same tokens.
        """
        device = next(model.parameters()).device
        self._choose, self._rule, self._model, self._total, self._past = choose, rule, model, total, past
        with torch.inference_mode():
            self._contexts = _contexts(model, cache, total, device)
            self._turning = {
                name: _turning(model.encodings()[name], range(past + 1, total + 1), device)
                for name in self._contexts
                if not model.methods[name].keys_stay(cache.length)
            }
        self._kernel = device.type == "cuda" and missing_triton("cuda") is None
        self._token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._index, self._number = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._found = torch.zeros(batch, 2, dtype=torch.int64, device=device)
        self._layers: list[StaticLayer] = []
        self._buffers: list[Tensor] = []
        self._graphs: dict[int, Any] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self._host = [
            torch.empty(batch, 2, dtype=torch.int64, pin_memory=True) for _ in range(AHEAD + 1 if self._cuda else 0)
        ]

    @property
    def _cuda(self) -> bool:
        return self._token.is_cuda

    def fits(self, model: GPT, batch: int, total: int, rule: Hashable | None, past: int) -> bool:
        """Return whether this decoder can replace a new decoder with these arguments."""
        same = (len(self._token), self._total, self._rule, self._past) == (batch, total, rule, past)
        return same and rule is not None and model is self._model

    def tokens(self, cache: Cache, new: Tensor, number: int, count: int) -> Iterator[Tensor]:
        """Yield the next tokens and whether their logits were finite, int64 [batch, 2] in host memory, `count` times.

        `cache` is the cache that the constructor received. `new`, int64 [batch, 1], are the tokens after the cached
        ones. `number` is the index of the first yielded token among the generated tokens, from 0.
        """
        past = start = len(cache)
        self._begin(cache, new, number)
        waiting: deque[Any] = deque()
        try:
            for step in range(count):
                with torch.cuda.device_of(self._token):  # the current GPU may be another one
                    self._launch(past, count - step)
                    past += 1
                    waiting.append(self._read(step))
                if len(waiting) > (AHEAD if self._cuda else 0):
                    yield waiting.popleft()()
            while waiting:
                yield waiting.popleft()()
        finally:
            self._end(cache, start, past)

    def _begin(self, cache: Cache, new: Tensor, number: int) -> None:
        if [*map(id, _buffers(cache))] != [*map(id, self._buffers)]:  # all of them exist, so their ids are unique
            self._graphs.clear()
            tables: dict[Hashable, Tensor] = {}
            self._layers = [
                StaticLayer(layer, self._model.methods[name], self._total, self._contexts[name].bias, tables)
                for layer, name in zip(cache.layers, self._model.layer_types, strict=True)
            ]
            self._buffers = _buffers(cache)
        self._token.copy_(new)
        self._index.fill_(len(cache))
        self._number.fill_(number)

    def _end(self, cache: Cache, past: int, length: int) -> None:
        """Enter the computed tokens, from index `past` to `length` - 1, into the cache."""
        for layer in cache.layers:
            layer.release(length)
        cache.extend(past, length)

    def _launch(self, past: int, left: int) -> None:
        """Compute one token after `past` tokens."""
        extent = min(max(LEAST_EXTENT, 1 << past.bit_length()), self._total)
        if extent in self._graphs:
            self._graphs[extent].replay()
            return
        self._step(extent)  # this first step also loads the kernels, which a capture could not do
        if self._cuda and left > LEAST_CAPTURED:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                self._step(extent)
            self._graphs[extent] = graph

    def _step(self, extent: int) -> None:
        """Run the operations of one token. They read and write tensors on the device and never wait for it."""
        step = TokenStep(self._index, extent, self._kernel)
        for layer in self._layers:
            layer.step = step
        contexts = {name: _at(context, self._index) for name, context in self._contexts.items()}
        for name, turning in self._turning.items():
            contexts[name] = turning.context(contexts[name], self._index, extent)
        model = self._model
        hidden = model.through_blocks(model.embedding(self._token, self._index, 1), contexts, self._layers)
        new, finite = self._choose(model.logits(hidden[:, -1]), self._token, self._number)
        self._found.copy_(torch.cat((new, finite.to(new.dtype)), dim=1))
        self._token.copy_(new)
        self._index.add_(1)
        self._number.add_(1)
        for layer in self._layers:
            layer.step = None

    def _read(self, step: int) -> Callable[[], Tensor]:
        """Begin to copy the result of the last step to the host, and return a function that waits for it."""
        if not self._cuda:
            return self._found.clone
        place, event = self._host[step % len(self._host)], torch.cuda.Event()
        place.copy_(self._found, non_blocking=True)
        event.record()

        def wait() -> Tensor:
            event.synchronize()
            return place.clone()

        return wait


@dataclass(frozen=True)
class _Turning:
    """Frequencies that depend on the number of tokens, so that all keys are rotated again in every step.

    Attributes:
        lengths: the numbers of tokens for which frequencies are stored.
        frequencies, multiplier: the fields of `RotaryFrequencies` for each length, float64 [lengths, d/2] and
            [lengths, 1].
        both: the field of `RotaryFrequencies` with this name.
        places: the positions to which each band rotates queries and keys, float64 [tokens].
        factor: the logit scaling of each token, float64 [tokens], or None.
    """

    lengths: range
    frequencies: Tensor
    multiplier: Tensor
    both: bool
    places: tuple[tuple[Tensor, Tensor], ...]
    factor: Tensor | None

    def context(self, context: PositionContext, index: Tensor, extent: int) -> PositionContext:
        """Return a token's context with the tables for its number of tokens and for the first `extent` keys."""
        row = index + 1 - self.lengths.start
        theta, multiplier = (x.index_select(0, row) for x in (self.frequencies, self.multiplier))
        of_query, of_key = (multiplier, multiplier) if self.both else (multiplier**2, torch.ones_like(multiplier))
        if self.factor is not None:
            of_query = of_query * self.factor.index_select(0, index)[:, None]
        segments = []
        for each, (query, key) in zip(context.segments, self.places, strict=True):
            assert each.query is not None
            dtype = each.query.cos.dtype
            segments.append(
                SegmentTables(
                    rotary_tables(query.index_select(0, index), theta[0], dtype, of_query),
                    rotary_tables(key[:extent], theta[0], dtype, of_key),
                    each.band,
                )
            )
        return replace(context, segments=tuple(segments), of_new_keys=False)


def _turning(encoding: PositionEncoding, lengths: range, device: torch.device) -> _Turning:
    """Compute the frequencies of all lengths at once."""
    found = [encoding.frequencies(length, torch.device("cpu")) for length in lengths]
    rotary = [each for each in found if each is not None]
    method, positions = encoding.method, torch.arange(lengths.stop - 1, dtype=torch.float64, device=device)
    scaling = None if method.factor_bias else method.logit_scaling
    return _Turning(
        lengths,
        torch.stack([each.inverse_frequencies.to("cpu", torch.float64) for each in rotary]).to(device),
        torch.tensor([[each.multiplier] for each in rotary], dtype=torch.float64, device=device),
        rotary[0].both,
        tuple(
            (
                mapped(positions, positions[:1], band.query_positions),
                mapped(positions, positions[:1], band.key_positions),
            )
            for band in method.bands
        ),
        None if scaling is None else scaling(positions, method.training_length),
    )


def _buffers(cache: Cache) -> list[Tensor]:
    return [buffer for layer in cache.layers for buffer in layer.buffers]


def _contexts(model: GPT, cache: Cache, total: int, device: torch.device) -> Mapping[str, PositionContext]:
    """Compute the contexts of all tokens at once; a step selects the rows of its token."""
    positions = torch.arange(total, device=device)
    dtype = model.embedding.word_embeddings.weight.dtype
    contexts = model.contexts(positions, cache.length or total, dtype, reached=total)
    return {name: replace(context, documents=None, of_new_keys=True) for name, context in contexts.items()}


def _at(context: PositionContext, index: Tensor) -> PositionContext:
    """Return the context of the token at `index`, int64 [1]."""
    selected: dict[int, RotaryTables] = {}

    def of(tables: RotaryTables | None) -> RotaryTables | None:
        if tables is not None and id(tables) not in selected:
            selected[id(tables)] = RotaryTables(*(table.index_select(0, index) for table in tables))
        return None if tables is None else selected[id(tables)]

    segments = tuple(replace(each, query=of(each.query), key=of(each.key)) for each in context.segments)
    factors = (
        None if each is None else each.index_select(0, index) for each in (context.query_factor, context.head_factor)
    )
    query_factor, head_factor = factors
    return replace(context, segments=segments, query_factor=query_factor, head_factor=head_factor)
