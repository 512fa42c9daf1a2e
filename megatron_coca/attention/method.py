"""A position method: independent choices (score form, frequencies, bias) composed into one `prepare`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, DistanceBias
from megatron_coca.attention.positions.bias import AlibiBias, alibi_slopes
from megatron_coca.attention.positions.forms import SCORE_FORMS, ScoreForm
from megatron_coca.attention.positions.frequencies import Rotary
from megatron_coca.attention.rotary import RotaryTables, rotary_tables
from megatron_coca.config import ModelConfig, PositionConfig


@dataclass(frozen=True)
class PositionMethod:
    """How positions enter the attention of a model. Stateless: the same call gives the same result at any time.

    Attributes:
        name: the value of `pos_emb`.
        form: how queries and keys become operands.
        rotary: the frequencies, or None where the form turns nothing.
        bias: the score bias, or None.
        scale: multiplier of the dot products, 1/sqrt(head_dim).
    """

    name: str
    form: ScoreForm
    rotary: Rotary | None
    bias: DistanceBias | None
    scale: float

    def tables(self, positions: Tensor, length: int, dtype: torch.dtype) -> RotaryTables | None:
        """The tables that all layers of one forward pass share, or None.

        `positions` is [length] or [batch, length], integer; `length` is that of the whole sequence being scored
        (dynamic extensions look at it); `dtype` is the operands'.
        """
        if self.rotary is None:
            return None
        return rotary_tables(positions, self.rotary.inverse_frequencies(length), dtype)

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, tables: RotaryTables | None, dropout: float = 0.0
    ) -> AttentionInputs:
        """q [batch, heads, length, head_dim], k and v [batch, kv_heads, length, head_dim] -> the inputs of a
        backend.
        """
        query, key = self.form.operands(q, k, tables)
        return AttentionInputs(query, key, v, self.scale, self.bias, dropout)


def build_method(position: PositionConfig, model: ModelConfig) -> PositionMethod:
    """The method that the configuration names, for the model's head shape and training length."""
    form = SCORE_FORMS[position.pos_emb]
    return PositionMethod(
        name=position.pos_emb,
        form=form,
        rotary=_build_rotary(position, model) if form.rotary else None,
        bias=AlibiBias(alibi_slopes(model.num_attention_heads)) if position.pos_emb == "alibi" else None,
        scale=1.0 / math.sqrt(model.head_dim),
    )


def _build_rotary(position: PositionConfig, model: ModelConfig) -> Rotary:
    dim = int(model.head_dim * position.rotary_pct)
    scaling = position.rope_scaling
    if scaling is None:
        return Rotary(dim, float(position.rotary_emb_base), training_length=model.seq_length)
    return Rotary(
        dim,
        float(position.rotary_emb_base),
        scaling.rope_type,
        float(scaling.factor),
        scaling.original_max_position_embeddings or model.seq_length,
    )
