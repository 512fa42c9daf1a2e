"""CoCA computed as its paper does: one contraction of three operands by opt_einsum, over N x N scores.

The CoCA paper, equation 18 and appendix C. The models here run CoCA as ordinary attention with other operands; this is
what that is held against.
"""

from dataclasses import dataclass
from typing import Any

import opt_einsum
import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.frame import Frame
from megatron_coca.attention.inputs import BackendError
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.method import PositionMethod
from megatron_coca.attention.pairs import rotate
from megatron_coca.attention.positions.forms import coefficients
from megatron_coca.attention.rotary import RotaryTables

CONTRACTION, EINSUM = "contraction", "opt_einsum"
"""Its names among the methods, and among the backends."""


def contracted_attention(
    q: Tensor, t: Tensor, v: Tensor, query: RotaryTables, key: RotaryTables, scale: float
) -> Tensor:
    """Causal CoCA-Slack attention [batch, heads, length, head_dim] in the dtype of q, O(length^2) memory.

    q is [batch, heads, length, head_dim], t (the T projection) and v are [batch, kv_heads, length, head_dim], the tables
    those of their positions.
    """
    groups, length = q.shape[1] // t.shape[1], q.shape[2]
    t, v = t.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    turned_t = rotate(coefficients(t).repeat(1, 1, 1, 2), key).to(q.dtype)
    turned_q = rotate(q, query).to(q.dtype)
    scores = opt_einsum.contract("bhmd,bhnd,bhmd->bhmn", q, turned_t, turned_q) * scale
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return opt_einsum.contract("bhmn,bhnd->bhmd", weights, v)


@dataclass(frozen=True)
class _Operands:
    q: Tensor
    t: Tensor
    v: Tensor
    frame: Frame


class _Unprepared:
    """In the place of a layer's position method: leaves the operands as the projections give them."""

    def __init__(self, method: PositionMethod) -> None:
        self.scale = method.scale

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, *rest: Any) -> _Operands:
        return _Operands(q, k, v, frame)


class _Contracting:
    """In the place of a layer's backend."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def attend(self, given: _Operands) -> Tensor:
        tables = given.frame.segments[0]
        assert tables.query is not None and tables.key is not None
        return contracted_attention(given.q, given.t, given.v, tables.query, tables.key, self.scale)


def contract(model: nn.Module) -> None:
    """Let all layers of a CoCA model attend by the contraction, for good; it then computes the same as before.

    Raises:
        BackendError: the model is not plain CoCA on all features, which is all that the paper's listing computes.
    """
    for layer in [module for module in model.modules() if isinstance(module, SelfAttention)]:
        method = layer.method
        if method.name != "coca" or method.rotary_dim != method.head_dim or len(method.parts) > 1:
            raise BackendError("the contraction computes pos_emb coca with rotary_pct 1 and without a map alone")
        layer.method = _Unprepared(method)  # type: ignore[assignment]
        layer.backend = _Contracting(method.scale)  # type: ignore[assignment]
