"""Self-attention: project, prepare, attend, project."""

from collections.abc import Sequence

import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.cache import LayerCache
from megatron_coca.attention.frame import Frame
from megatron_coca.attention.heads import Shared
from megatron_coca.attention.inputs import AttentionInputs, Backend
from megatron_coca.attention.method import PositionMethod
from megatron_coca.attention.projection import SplitProjection, packed_rows


class SelfAttention(Shared):
    """Causal self-attention of hidden states [batch, length, hidden_size] with any position method and backend.

    Parameter names and the packing of `query_key_value` are GPT-NeoX's: with as many key heads as query heads its
    rows are [q | k | v] head by head, with fewer (grouped-query attention) all queries, then all keys, then all
    values. For CoCA the k rows are the T projection. A method whose layers learn a bias each adds `position_bias`.

    Nothing here counts heads: there are as many as the projection has rows for, which are this process's own where
    its rows are divided among several.
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
    ) -> None:
        super().__init__()
        self.head_dim, self.queries_per_key = hidden_size // num_heads, num_heads // num_kv_heads
        self.method, self.backend, self.dropout = method, backend, dropout
        self.query_key_value: nn.Module = nn.Linear(
            hidden_size, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=bias
        )
        self.dense = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.position_bias = method.layer_bias()

    def split_projection(self) -> None:
        """Replace `query_key_value` by three layers with the same weights, to be done before these are divided among
        processes. Names of its parameters get `query`, `key` or `value` into them.
        """
        packed = self.query_key_value
        assert isinstance(packed, nn.Linear)
        key_rows = packed.out_features // (self.queries_per_key + 2)
        rows = packed_rows(self.queries_per_key * key_rows, key_rows, self.head_dim)
        self.query_key_value = SplitProjection(packed, rows)

    def forward(self, hidden: Tensor, frame: Frame, cache: LayerCache | None = None) -> Tensor:
        """[batch, length, hidden_size] -> the same; `frame` comes from `PositionEncoding` and serves all layers.

        With a cache the hidden states are those of the tokens that follow the cached ones.
        """
        inputs = self._inputs(*self._heads(self.query_key_value(hidden)), frame, cache)
        out = self.backend.attend(inputs)
        return self.dense(self.share.scatter(out.transpose(1, 2)).flatten(2))

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: LayerCache | None) -> AttentionInputs:
        bias = self.share.bias(self.position_bias.distance_bias()) if self.position_bias is not None else None
        if cache is None:
            return self.method.prepare(q, k, v, frame, self.dropout if self.training else 0.0, bias)
        cached, values = cache.append(self.method.cached(k), v)
        return self.method.prepare_cached(q, cached, values, frame, bias)

    def _heads(self, projected: Tensor | tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, length, rows], packed or each -> q [batch, heads, length, head_dim], k and v [batch, kv_heads, length,
        head_dim].
        """
        if isinstance(projected, Tensor) and self.queries_per_key == 1:
            q, k, v = self.share.gather(projected.unflatten(-1, (-1, 3 * self.head_dim))).chunk(3, dim=-1)
        else:
            q, k, v = (self.share.gather(part) for part in self._parts(projected))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _parts(self, projected: Tensor | tuple[Tensor, Tensor, Tensor]) -> Sequence[Tensor]:
        """Queries, keys and values, each [batch, length, its heads, head_dim]."""
        if not isinstance(projected, Tensor):
            return [part.unflatten(-1, (-1, self.head_dim)) for part in projected]
        heads = projected.unflatten(-1, (-1, self.head_dim))
        kv_heads = heads.shape[2] // (self.queries_per_key + 2)
        return heads.split((self.queries_per_key * kv_heads, kv_heads, kv_heads), dim=2)
