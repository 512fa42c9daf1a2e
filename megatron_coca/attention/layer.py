"""Self-attention: project, prepare the operands, attend, project back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.context import PositionContext, ShardedModule
from megatron_coca.attention.inputs import AttentionInputs, Backend
from megatron_coca.attention.method import PositionMethod

PARTS = ("query", "key", "value")
"""The parts of the packed projection, in order."""


class PackedRows(NamedTuple):
    """The rows of one part in a packed projection of `total` rows: blocks of `size` rows that start at row `first` and
    repeat every `period` rows.
    """

    first: int
    size: int
    period: int
    total: int

    def numbers(self) -> Tensor:
        """Return the index of each row of the part in the packed projection, int64."""
        return torch.arange(self.total).view(-1, self.period)[:, self.first : self.first + self.size].flatten()

    def ranges(self, begin: int, stop: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Map elements [begin, stop) of the flattened part (rows of `width` elements) to contiguous ranges of the
        packed tensor. Yield (offset in the packed tensor, begin in the part, stop in the part) of each range.
        """
        unit = self.size * width
        while begin < stop:
            block = begin // unit
            last = min(stop, (block + 1) * unit)
            yield (block * self.period + self.first) * width + begin - block * unit, begin, last
            begin = last


def packed_rows(query_rows: int, key_rows: int, head_dim: int, values: bool = True) -> dict[str, PackedRows]:
    """Return the rows of each part. The layout is [q | k | v] per head if there are as many key heads as query heads;
    otherwise all queries, then all keys, then all values. Without `values`, it is all queries, then all keys.
    """
    if not values:
        total = query_rows + key_rows
        return {"query": PackedRows(0, query_rows, total, total), "key": PackedRows(query_rows, key_rows, total, total)}
    total = query_rows + 2 * key_rows
    if query_rows == key_rows:
        return {name: PackedRows(number * head_dim, head_dim, 3 * head_dim, total) for number, name in enumerate(PARTS)}
    blocks = ((0, query_rows), (query_rows, key_rows), (query_rows + key_rows, key_rows))
    return {name: PackedRows(*block, total, total) for name, block in zip(PARTS, blocks, strict=True)}


class SplitProjection(nn.Module):
    """A packed projection split into three linear layers, so that frozen layers need no gradients and no optimizer
    state.

    Maps hidden states [..., hidden_size] to queries, keys and values, each [..., number of its rows]. If `rows` has no
    values, the keys are also the values.
    """

    def __init__(self, packed: nn.Linear, rows: dict[str, PackedRows]) -> None:
        """Copy the weights of `packed`; `rows` are the rows of its parts."""
        super().__init__()
        self.query, self.key = (_rows_of(packed, rows[name].numbers()) for name in PARTS[:2])
        self.value = _rows_of(packed, rows["value"].numbers()) if "value" in rows else None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key = self.key(hidden)
        return self.query(hidden), key, key if self.value is None else self.value(hidden)


def _rows_of(packed: nn.Linear, numbers: Tensor) -> nn.Linear:
    index = numbers.to(packed.weight.device)
    with torch.device("meta"):  # initialising weights would advance the random state
        layer = nn.Linear(packed.in_features, len(index), bias=packed.bias is not None)
    layer.weight = nn.Parameter(packed.weight.detach()[index])
    if packed.bias is not None:
        layer.bias = nn.Parameter(packed.bias.detach()[index])
    return layer


class CachedTokens(Protocol):
    """The methods of a cache that a layer calls. `LayerCache` and `StaticLayer` implement them."""

    def append(self, *new: Tensor) -> list[Tensor]:
        """Add tensors [batch, kv_heads, tokens, width], and return the cached tensors in the same order."""
        ...

    def attend(self, backend: Backend, inputs: AttentionInputs) -> Tensor:
        """Compute attention of the new tokens over the cached ones, [batch, heads, tokens, width of V]."""
        ...


class LayerCache:
    """Keys (or K' of every segment) and values of one layer. The buffers have space for `reserved` tokens and double in
    size when full.

    `window` is the number of tokens that a query sees, including its own. If it is set, older tokens are dropped.
    """

    def __init__(self, reserved: int = 0, window: int | None = None) -> None:
        self.length, self.window = 0, window
        self._reserved = reserved if window is None else min(reserved, 2 * window)
        self.buffers: list[Tensor] = []
        self.first = 0  # index of the first token in the buffers

    def append(self, *new: Tensor) -> list[Tensor]:
        """Add tensors [batch, kv_heads, tokens, width], and return views of the cached tensors in the same order. The
        views contain all tokens or, with a window, the new tokens and those that the first new token sees.
        """
        if self.buffers and self.buffers[0].shape[0] != new[0].shape[0]:
            raise ValueError(
                f"cache: contains {self.buffers[0].shape[0]} sequences, but the new tokens have {new[0].shape[0]}; "
                "use a new cache"
            )
        start, end = self.length, self.length + new[0].shape[2]
        seen = 0 if self.window is None else max(start - self.window + 1, 0)
        if not self.buffers or end - self.first > self._capacity():
            needed = end - seen
            spare = 2 * self._capacity() if self.window is None else needed + self.window
            self._resize(seen, max(needed, spare, self._reserved), self.buffers or new)
        self.length = end
        first, begin, end = (token - self.first for token in (seen, start, end))
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, :, begin:end] = x
        return [buffer[:, :, first:end] for buffer in self.buffers]

    def cut(self, length: int) -> None:
        """Drop all tokens from index `length` on.

        Raises:
            ValueError: the window has dropped tokens that the next token would see.
        """
        if self.window is not None and self.first > max(length - self.window + 1, 0):
            raise ValueError(
                f"cache: cannot go back to token {length}, because it keeps only the tokens of the last window; use a "
                "new cache"
            )
        self.length = min(self.length, length)

    def attend(self, backend: Backend, inputs: AttentionInputs) -> Tensor:
        """Compute attention of the new tokens over the cached ones."""
        return backend.attend(inputs)

    def hold(self, total: int) -> None:
        """Allocate buffers that stay in place while a `StaticLayer` decodes up to `total` tokens. With a window, the
        buffers have one slot for each token that a query sees. Slots without a token become 0.
        """
        if self.window is not None:
            seen = max(self.length - self.window + 1, 0)
            self._resize(seen, min(self.window, total), self.buffers)
        elif self._capacity() < total:
            self._resize(0, total, self.buffers)
        for buffer in self.buffers:
            buffer[:, :, self.length - self.first :] = 0

    def release(self, length: int) -> None:
        """Return to buffers that grow, after a `StaticLayer` has added the tokens up to index `length` - 1."""
        if self.window is not None and (shift := max(length - self.first - self._capacity(), 0)):
            self.buffers = [buffer.roll(-(shift % buffer.shape[2]), 2) for buffer in self.buffers]
            self.first += shift
        self.length = length

    def _resize(self, seen: int, slots: int, like: Sequence[Tensor]) -> None:
        """Allocate buffers with `slots` slots, and copy the tokens from index `seen` on into them. The other dimensions
        and the dtypes of the buffers are those of `like`.
        """
        kept = slice(seen - self.first, self.length - self.first)
        moved = [x.new_empty(*x.shape[:2], slots, x.shape[3]) for x in like]
        for buffer, old in zip(moved, self.buffers, strict=False):  # there are no old buffers at first
            buffer[:, :, : self.length - seen] = old[:, :, kept]
        self.buffers, self.first = moved, seen

    def _capacity(self) -> int:
        return self.buffers[0].shape[2] if self.buffers else 0


class Cache:
    """Keys and values of all layers, and the positions of their tokens.

    Attributes:
        layers: one cache per layer.
        positions: positions of the cached tokens, [length] or [batch, length], or None while the cache is empty.
        length: the length for length-dependent extensions, or None to use the current number of tokens. With a fixed
            length, cached decoding equals the full forward pass at that length. With None, every step rotates all keys
            with the frequencies of the current length, but the hidden states of earlier tokens were computed with the
            frequencies of shorter lengths.
        reached: the largest cached position + 1.
        decoder: the object that decodes single tokens in the buffers of this cache, kept for its next use, or None.
    """

    def __init__(self, windows: Sequence[int | None], length: int | None = None, capacity: int | None = None) -> None:
        """`windows` has the window of each layer's method. `capacity` is the number of tokens to allocate space for, by
        default `length`; the cache grows when necessary.
        """
        if length is not None and length < 1:
            raise ValueError(f"length: must be at least 1, not {length}")
        self.layers = [LayerCache(capacity or length or 0, window) for window in windows]
        self.positions: Tensor | None = None
        self.length, self.reached = length, 0
        self.decoder: object | None = None

    def __len__(self) -> int:
        return self.positions.shape[-1] if self.positions is not None else 0

    def cut(self, length: int) -> None:
        """Drop all tokens from index `length` on.

        Raises:
            ValueError: a window has dropped tokens that the next token would see.
        """
        for layer in self.layers:
            layer.cut(length)
        self.positions = self.positions[..., :length] if self.positions is not None and length else None
        self.reached = int(self.positions.max()) + 1 if self.positions is not None else 0

    def extend(self, past: int, length: int) -> None:
        """Record the positions of the tokens that a `StaticLayer` has added: those from index `past` to `length` - 1.

        Their positions are their indices.
        """
        assert self.positions is not None
        new = torch.arange(past, length, device=self.positions.device)
        self.positions = torch.cat((self.positions[..., :past], new))
        self.reached = max(self.reached, length)

    @contextmanager
    def advanced(self, positions: Tensor, reached: int) -> Iterator[Tensor]:
        """Add the positions of new tokens, and yield the positions of all tokens. `reached` is the largest position of
        a new token + 1. If an exception occurs, the cache is restored.
        """
        past, before, reached_before = len(self), self.positions, self.reached
        if before is not None and before.dim() != positions.dim():
            raise ValueError("positions: must be all [length] or all [batch, length] within one cache; use a new cache")
        self.positions = positions if before is None else torch.cat((before, positions), dim=-1)
        self.reached = max(reached_before, reached)
        try:
            yield self.positions
        except BaseException:
            self.positions, self.reached = before, reached_before
            for layer in self.layers:
                layer.cut(past)
            raise


def cache_bytes(methods: Iterable[PositionMethod], length: int, dtype: torch.dtype) -> int:
    """Return how many bytes layers with these methods cache for a sequence of `length` tokens, assuming a fixed length
    for length-dependent extensions. Polar forms cache magnitudes if the method has a backend that expands them (see
    `PositionMethod.with_backend`), and wide K' otherwise.
    """
    total = 0
    for method in methods:
        keys = len(method.bands) if method.keys_stay(1) else 1
        tokens = min(length, method.window or length)
        if method.latent is not None:  # one latent and one key, which all heads share
            total += tokens * (method.latent.rank + method.head_dim) * dtype.itemsize
            total += tokens * method.num_heads * 4 * (method.gates is not None)
            continue
        of_key = method.operand_dim if method.keys_stay(1) else method.head_dim
        kv_heads = method.num_heads // method.queries_per_key
        total += tokens * (keys * of_key + method.head_dim) * kv_heads * dtype.itemsize
        if method.gates is not None:  # gates are float32
            total += tokens * method.num_heads * 4
    return total


class SelfAttention(ShardedModule):
    """Causal self-attention over hidden states [batch, length, hidden_size] with any position method and backend.

    Parameter names and the packing of `query_key_value` are those of GPT-NeoX. If there are as many key heads as query
    heads, the rows of this projection are [q | k | v] head by head. With fewer key heads (grouped-query attention), the
    rows are all queries, then all keys, then all values. For CoCA, the k rows are the T projection. Methods with
    learned parameters per layer add `position_bias`, `position_sinks`, `position_factor`, `position_gates` or
    `position_offsets`. An output gate multiplies the outputs of the heads by sigmoid(`output_gate` x) before `dense`,
    where x is the layer's input (Qiu et al. 2025, arXiv:2505.06708). With `values_from_keys`, the projection has no
    rows for values: it has all queries, then all keys.

    The number of heads is derived from the rows of the projection, because tensor parallelism splits them across ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        method: PositionMethod,
        backend: Backend,
        bias: bool = True,
        dropout: float = 0.0,
        qkv_bias: bool | None = None,
        norms: Mapping[str, nn.Module] | None = None,
        clip: float | None = None,
        norms_rotated: bool = False,
        output_gates: int = 0,
        values_from_keys: bool = False,
    ) -> None:
        """The default of `qkv_bias` is `bias`. `norms` are applied to queries and keys [batch, length, heads, head_dim]
        before the position method, and are named `qk_layernorm` (shared) or `query_layernorm` and `key_layernorm`. With
        `norms_rotated`, these norms are applied to the operands Q' and K' instead. The norm `value_layernorm` is
        applied to values. With `values_from_keys`, the values are the keys before their norm. `clip` limits the
        absolute value of queries, keys and values. `output_gates` is 0, or the number of output gates of all heads: one
        for each head or for each of its features.
        """
        super().__init__()
        self.head_dim, self.queries_per_key = method.head_dim, num_heads // num_kv_heads
        self.method, self.backend, self.dropout = method, backend, dropout
        qkv_bias = bias if qkv_bias is None else qkv_bias
        self.values_from_keys = values_from_keys
        packed_heads = num_heads + (1 if values_from_keys else 2) * num_kv_heads
        self.query_key_value: nn.Module = nn.Linear(hidden_size, packed_heads * self.head_dim, bias=qkv_bias)
        self.dense = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.output_gate = nn.Linear(hidden_size, output_gates, bias=qkv_bias) if output_gates else None
        norms = norms or {}
        self.clip, self.norms_rotated = clip, norms_rotated
        self.qk_layernorm = norms.get("qk_layernorm")
        self.query_layernorm, self.key_layernorm = norms.get("query_layernorm"), norms.get("key_layernorm")
        self.value_layernorm = norms.get("value_layernorm")
        self.position_bias = method.layer_bias()
        self.position_sinks, self.position_factor = method.layer_sinks(), method.layer_factor()
        self.position_gates, self.position_offsets = method.layer_gates(), method.layer_offsets()

    def split_projection(self) -> None:
        """Replace `query_key_value` by a SplitProjection with the same weights. Call this before sharding."""
        packed = self.query_key_value
        assert isinstance(packed, nn.Linear)
        key_rows = packed.out_features // self._packed_per_key
        rows = packed_rows(self.queries_per_key * key_rows, key_rows, self.head_dim, not self.values_from_keys)
        self.query_key_value = SplitProjection(packed, rows)

    @property
    def _packed_per_key(self) -> int:
        """Number of heads in the packed projection for each key head: its query heads, the key head itself and, if
        there is one, the value head.
        """
        return self.queries_per_key + (1 if self.values_from_keys else 2)

    def forward(self, hidden: Tensor, context: PositionContext, cache: CachedTokens | None = None) -> Tensor:
        """Map hidden states [batch, length, hidden_size] to the same shape; `context` comes from `PositionEncoding`.

        With a cache, the hidden states belong to the tokens after the cached tokens.
        """
        inputs = self._inputs(*self._heads(self.query_key_value(hidden)), context, cache, hidden)
        out = self.share.scatter(self._attend(inputs, cache, context.length).transpose(1, 2))
        if self.output_gate is not None:
            out = out * self.output_gate(hidden).sigmoid().unflatten(-1, (out.shape[2], -1))
        return self.dense(out.flatten(2))

    def _attend(self, inputs: AttentionInputs, cache: CachedTokens | None, length: int) -> Tensor:
        """Compute attention, [batch, heads, tokens, width of V]. With a cache, use the cache's method `attend`."""
        return self.share.attend(self.backend, inputs, length) if cache is None else cache.attend(self.backend, inputs)

    def _inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PositionContext,
        cache: CachedTokens | None,
        hidden: Tensor,
    ) -> AttentionInputs:
        of_layer = self._of_layer(hidden)
        if self.norms_rotated:
            of_layer["norms"] = (self.query_layernorm, self.key_layernorm)
        if cache is None:
            return self.method.prepare(q, k, v, context, self.dropout if self.training else 0.0, **of_layer)
        return self.method.prepare_cached(q, k, v, context, cache.append, **of_layer)

    def _of_layer(self, hidden: Tensor) -> dict[str, Any]:
        """Return the layer's own parameters of the position method, as arguments of `PositionMethod.prepare`."""
        of_layer: dict[str, Any] = {}
        if self.position_bias is not None:
            of_layer["bias"] = self.share.bias(self.position_bias.distance_bias())
        if self.position_sinks is not None:
            of_layer["sinks"] = self.share.of_heads(self.position_sinks())
        if self.position_factor is not None:
            of_layer["factor"] = self.share.of_heads(self.position_factor())
        if self.position_offsets is not None:
            of_layer["offset"] = self.share.of_heads(self.position_offsets())
        if self.position_gates is not None:
            of_layer["gates"] = self.share.gather(self.position_gates(hidden)[..., None])[..., 0].transpose(1, 2)
        return of_layer

    def _heads(self, projected: Tensor | tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Map projections [batch, length, rows], packed or separate, to q [batch, heads, length, head_dim] and to k and
        v [batch, kv_heads, length, head_dim].
        """
        separate = self.qk_layernorm, self.query_layernorm, self.value_layernorm, self.values_from_keys
        if self.clip is not None:
            parts = (projected,) if isinstance(projected, Tensor) else projected
            limited = tuple(part.clamp(-self.clip, self.clip) for part in parts)
            projected = limited[0] if isinstance(projected, Tensor) else (limited[0], limited[1], limited[2])
        if isinstance(projected, Tensor) and self.queries_per_key == 1 and not any(separate):
            packed = projected.unflatten(-1, (-1, 3 * self.head_dim))
            q, k, v = self.share.gather(packed).chunk(3, dim=-1)  # one exchange instead of three
        else:  # normalize first, because a norm may cover all heads of a token
            q, k, v = (self.share.gather(part) for part in self._normalized(*self._parts(projected)))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _normalized(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qk_layernorm is not None:
            q, k = self.qk_layernorm(q), self.qk_layernorm(k)
        if self.query_layernorm is not None and self.key_layernorm is not None and not self.norms_rotated:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        return q, k, v if self.value_layernorm is None else self.value_layernorm(v)

    def _parts(self, projected: Tensor | tuple[Tensor, Tensor, Tensor]) -> Sequence[Tensor]:
        """Split the projections into queries, keys and values, each [batch, length, number of heads, head_dim]."""
        if not isinstance(projected, Tensor):
            return [part.unflatten(-1, (-1, self.head_dim)) for part in projected]
        if self.queries_per_key == 1 and not self.values_from_keys:
            return projected.unflatten(-1, (-1, 3 * self.head_dim)).chunk(3, dim=-1)
        heads = projected.unflatten(-1, (-1, self.head_dim))
        kv_heads = heads.shape[2] // self._packed_per_key
        if self.values_from_keys:
            q, k = heads.split((self.queries_per_key * kv_heads, kv_heads), dim=2)
            return q, k, k
        return heads.split((self.queries_per_key * kv_heads, kv_heads, kv_heads), dim=2)
