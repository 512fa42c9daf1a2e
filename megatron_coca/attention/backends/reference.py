"""Dense attention with the N x N scores spelled out: slow, any dtype, the measure of the other backends."""

import math

import opt_einsum
import torch
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, Needs


class ReferenceBackend:
    """softmax(scale * Q' K'^T + bias) V with opt_einsum contractions, in the inputs' own dtype. O(N^2) memory."""

    def supports(self, needs: Needs) -> str | None:
        """None: it runs whatever the contract can express."""
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """[batch, heads, query_length, head_dim] in the query's dtype."""
        groups = inputs.query.shape[1] // inputs.key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (inputs.key, inputs.value))
        scores = opt_einsum.contract("bhmd,bhnd->bhmn", inputs.query, key) * inputs.scale
        distance = _distances(scores.shape[-2], scores.shape[-1], scores.device)
        if inputs.bias is not None:
            wide = torch.promote_types(scores.dtype, torch.float32)
            scores = scores + inputs.bias.at(distance.to(wide))
        weights = torch.softmax(scores.masked_fill(distance < 0, -math.inf), dim=-1).to(value.dtype)
        weights = torch.dropout(weights, inputs.dropout, train=inputs.dropout > 0)
        return opt_einsum.contract("bhmn,bhnd->bhmd", weights, value)


def _distances(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """r = m - n for every pair, the queries being the last rows, [query_length, key_length] int64."""
    rows = torch.arange(key_length - query_length, key_length, device=device)
    return rows[:, None] - torch.arange(key_length, device=device)[None, :]
