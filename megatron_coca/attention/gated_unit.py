"""The gated attention unit: a single attention head with gated values that replaces both attention and MLP."""

from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.inputs import Backend, Segment
from megatron_coca.attention.layer import CachedTokens, SelfAttention
from megatron_coca.attention.method import PositionMethod


class GatedAttentionUnit(SelfAttention):
    """O = (U * A V) W_o for hidden states X [batch, length, hidden_size] (Hua et al. 2022, arXiv:2202.10447, sec. 3).

    [U | V | Z] = silu(X W), where U and V have `width` features and Z has the method's head_dim. Q and K are Z times a
    learned scale per feature, plus a learned offset if `bias`. A is the causal softmax of the position method's scores
    of Q and K; the paper uses the squared ReLU instead. For CoCA, K is T.

    Backends need values that are as wide as queries, so V is split into pieces of that width, all with the same Q' and
    K'.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        method: PositionMethod,
        backend: Backend,
        bias: bool = True,
    ) -> None:
        """`width` must be a multiple of the method's head_dim, and the method must have one head."""
        super().__init__(hidden_size, 1, 1, method, backend, bias)
        del self.query_key_value
        self.width = width
        self.gate_value_base = nn.Linear(hidden_size, 2 * width + self.head_dim, bias=bias)
        self.dense = nn.Linear(width, hidden_size, bias=bias)
        self.query_scale, self.key_scale = (nn.Parameter(torch.ones(self.head_dim)) for _ in range(2))
        offsets = (nn.Parameter(torch.zeros(self.head_dim)) if bias else None for _ in range(2))
        self.query_offset, self.key_offset = offsets

    def forward(self, hidden: Tensor, context: PositionContext, cache: CachedTokens | None = None) -> Tensor:
        """See `SelfAttention.forward`. The cache contains one head of K' and all values."""
        widths = self.width, self.width, self.head_dim
        gate, value, base = F.silu(self.gate_value_base(hidden)).split(widths, dim=-1)
        query, key = base * self.query_scale, base * self.key_scale
        if self.query_offset is not None and self.key_offset is not None:
            query, key = query + self.query_offset, key + self.key_offset
        pieces = value.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        inputs = self._inputs(query[:, None], key[:, None], pieces, context, cache, hidden)
        copies = pieces.shape[1]
        segments = tuple(_copied(each, copies) for each in inputs.segments)
        out = self._attend(inputs.replace(segments=segments), cache, context.length)
        return self.dense(gate * out.transpose(1, 2).flatten(2))


def _copied(segment: Segment, copies: int) -> Segment:
    """Repeat the single head of a segment `copies` times."""
    turns = segment.turns
    if turns is not None and turns.offset is not None:
        turns = replace(turns, offset=turns.offset.expand(copies, -1))
    query, key = (x.expand(-1, copies, -1, -1) for x in (segment.query, segment.key))
    return replace(segment, query=query, key=key, turns=turns)
