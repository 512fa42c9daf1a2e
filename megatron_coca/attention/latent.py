"""Latent attention: keys and values are linear maps of a small latent. Decoding caches only the latent and a key that
all heads share.
"""

import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.inputs import Backend
from megatron_coca.attention.layer import CachedTokens, SelfAttention
from megatron_coca.attention.method import PositionMethod

DECODING = ReferenceBackend()
"""The backend that decodes a single token over latents. Some other backends do not support such wide heads."""


class LatentAttention(SelfAttention):
    """Causal self-attention over hidden states x [batch, length, hidden_size] with latents (DeepSeek-AI 2024,
    arXiv:2405.04434, section 2.1).

    With (c | k') = `key_value_down` x and c normalised, every head h has the key (k_h | k') and the value v_h, where
    (k_h | v_h) = `key_value_up` c. The queries are `query` x or, if they have a latent too, `query_up`
    norm(`query_down` x). The position method acts on k', which all heads share, and on the last features of the
    queries. The other features have no positions: their dot product is added to the score. For CoCA, k' is the T
    projection.

    A cache contains c and k' of every token. For a single new token, the maps of keys and values are applied to its
    queries and outputs instead of to every cached token: q . (W c) = (W^T q) . c.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        method: PositionMethod,
        backend: Backend,
        bias: bool = True,
        dropout: float = 0.0,
        down_bias: bool | None = None,
        query_rank: int | None = None,
        epsilon: float = 1e-6,
        output_gates: int = 0,
    ) -> None:
        """`method.latent` must be set. `down_bias` says whether the maps to the latents and to k' have biases; None
        means the value of `bias`. `query_rank` is the number of features of the queries' latent, or None if they have
        no latent. `epsilon` belongs to the norms of the latents. See `SelfAttention` for `output_gates`.
        """
        super().__init__(hidden_size, num_heads, num_heads, method, backend, bias, dropout, down_bias)
        widths = method.latent
        assert widths is not None
        self.widths, down_bias = widths, bias if down_bias is None else down_bias
        queries = num_heads * (widths.unrotated + self.head_dim)
        del self.query_key_value
        self.query = nn.Linear(hidden_size, queries, bias=False) if query_rank is None else None
        if query_rank is not None:
            self.query_down = nn.Linear(hidden_size, query_rank, bias=down_bias)
            self.query_down_layernorm = nn.RMSNorm(query_rank, epsilon)
            self.query_up = nn.Linear(query_rank, queries, bias=False)
        self.key_value_down = nn.Linear(hidden_size, widths.rank + self.head_dim, bias=down_bias)
        self.key_value_down_layernorm = nn.RMSNorm(widths.rank, epsilon)
        self.key_value_up = nn.Linear(widths.rank, num_heads * (widths.unrotated + widths.value), bias=False)
        self.dense = nn.Linear(num_heads * widths.value, hidden_size, bias=bias)
        self.output_gate = nn.Linear(hidden_size, output_gates, bias=down_bias) if output_gates else None

    def split_projection(self) -> None:
        """Do nothing: queries already have their own layers, and keys and values are trained together."""

    def forward(self, hidden: Tensor, context: PositionContext, cache: CachedTokens | None = None) -> Tensor:
        """See `SelfAttention.forward`. The cache contains one head of latents and one head of shared keys."""
        queries = self.query(hidden) if self.query is not None else self.query_up(self._query_latent(hidden))
        each = (self.widths.unrotated, self.head_dim)
        q_rest, q = self._of_heads(queries, sum(each)).split(each, -1)
        down = self.key_value_down(hidden)[:, None]
        latent, k = down.split((self.widths.rank, self.head_dim), -1)
        latent, of_layer = self.key_value_down_layernorm(latent), self._of_layer(hidden)
        if cache is not None:
            gates = of_layer.pop("gates", None)
            latent, k, *seen = cache.append(latent, k, *(() if gates is None else (gates[..., None],)))
            of_layer["gates"] = seen[0][..., 0] if seen else None
        if cache is not None and hidden.shape[1] == 1:
            key_up, value_up = self._maps()
            unrotated = q_rest @ key_up, latent
            inputs = self.method.prepare(q, k, latent, context, unrotated=unrotated, **of_layer)
            out = cache.attend(DECODING, inputs) @ value_up.mT
        else:
            up = self._of_heads(self.key_value_up(latent[:, 0]), self.widths.unrotated + self.widths.value)
            k_rest, v = up.split((self.widths.unrotated, self.widths.value), -1)
            if self.share.count > 1:  # `gather` exchanges tokens for heads, so every head needs a copy
                copies = k.transpose(1, 2).expand(-1, -1, q.shape[1] * self.share.count, -1)
                k = self.share.gather(copies).transpose(1, 2)
            dropout = self.dropout if self.training else 0.0
            inputs = self.method.prepare(q, k, v, context, dropout, unrotated=(q_rest, k_rest), **of_layer)
            out = self._attend(inputs, cache, context.length)
        out = self.share.scatter(out.transpose(1, 2))
        if self.output_gate is not None:
            out = out * self.output_gate(hidden).sigmoid().unflatten(-1, (out.shape[2], -1))
        return self.dense(out.flatten(2))

    def _of_heads(self, projected: Tensor, width: int) -> Tensor:
        """Map a projection [batch, length, rows] to [batch, heads, length, width], for this rank's heads."""
        return self.share.gather(projected.unflatten(-1, (-1, width))).transpose(1, 2)

    def _query_latent(self, hidden: Tensor) -> Tensor:
        """Return the normalised latent of queries, [batch, length, query_rank]."""
        return self.query_down_layernorm(self.query_down(hidden))

    def _maps(self) -> tuple[Tensor, Tensor]:
        """Return the maps from the latent to the unrotated keys and to the values, [heads, width, rank] each."""
        assert type(self.key_value_up) is nn.Linear, "an adapter would be ignored here; merge it before decoding"
        each = (self.widths.unrotated, self.widths.value)
        key_up, value_up = self.key_value_up.weight.unflatten(0, (-1, sum(each))).split(each, 1)
        return key_up, value_up
