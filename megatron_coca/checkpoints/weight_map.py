"""Names of the weights here and in Hugging Face folders: one two-way table per architecture.

A row is (ours, theirs). `{i}` is the block; a row with several names on their side packs them: `packing` says how.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """How many heads the rows of a packed projection belong to."""

    query: int
    key: int


@dataclass(frozen=True)
class Packing:
    """How one tensor of ours is made of theirs, and the way back: `split(join(parts, heads), heads, len(parts))` gives
    equal parts, bit by bit.
    """

    join: Callable[[Sequence[Tensor], Heads], Tensor]
    split: Callable[[Tensor, Heads, int], Sequence[Tensor]]


def _join_heads(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """q, k, v rows -> [q | k | v] head by head where all have as many heads, else all q, all k, all v (the packing
    of SelfAttention).
    """
    if heads.query != heads.key:
        return torch.cat(list(parts), dim=0)
    per_head = [part.view(heads.query, -1, *part.shape[1:]) for part in parts]
    return torch.cat(per_head, dim=1).reshape(-1, *parts[0].shape[1:])


def _split_heads(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    width = len(packed) // (heads.query + 2 * heads.key)
    if heads.query != heads.key:
        return packed.split([heads.query * width, heads.key * width, heads.key * width])
    per_head = packed.view(heads.query, count, width, *packed.shape[1:])
    return [part.reshape(-1, *packed.shape[1:]) for part in per_head.unbind(1)]


ALONE = Packing(lambda parts, heads: parts[0], lambda packed, heads, count: [packed])
STACKED = Packing(lambda parts, heads: torch.cat(list(parts)), lambda packed, heads, count: packed.chunk(count))
BY_HEAD = Packing(_join_heads, _split_heads)


@dataclass(frozen=True)
class Row:
    """One weight of ours and the weight or weights of theirs that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    packing: Packing = ALONE


GPT_NEOX: tuple[Row, ...] = (
    Row("embedding.word_embeddings.weight", ("gpt_neox.embed_in.weight",)),
    *(
        Row(f"blocks.{{i}}.{ours}.{kind}", (f"gpt_neox.layers.{{i}}.{theirs}.{kind}",))
        for kind in ("weight", "bias")
        for ours, theirs in (
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("attention.query_key_value", "attention.query_key_value"),
            ("attention.dense", "attention.dense"),
            ("mlp.linear1", "mlp.dense_h_to_4h"),
            ("mlp.linear2", "mlp.dense_4h_to_h"),
        )
    ),
    Row("norm.weight", ("gpt_neox.final_layer_norm.weight",)),
    Row("norm.bias", ("gpt_neox.final_layer_norm.bias",)),
    Row("final_linear.weight", ("embed_out.weight",)),
)


def llama(key_projection: str) -> tuple[Row, ...]:
    """LLaMA's table; the CoCA authors' folders call the key projection `t_proj`."""
    attention = "model.layers.{i}.self_attn"
    projections = tuple(f"{attention}.{name}.weight" for name in ("q_proj", key_projection, "v_proj"))
    return (
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
        Row("blocks.{i}.input_layernorm.weight", ("model.layers.{i}.input_layernorm.weight",)),
        Row("blocks.{i}.post_attention_layernorm.weight", ("model.layers.{i}.post_attention_layernorm.weight",)),
        Row("blocks.{i}.attention.query_key_value.weight", projections, BY_HEAD),
        Row("blocks.{i}.attention.dense.weight", (f"{attention}.o_proj.weight",)),
        Row(
            "blocks.{i}.mlp.linear1.weight",
            ("model.layers.{i}.mlp.up_proj.weight", "model.layers.{i}.mlp.gate_proj.weight"),
            STACKED,
        ),
        Row("blocks.{i}.mlp.linear2.weight", ("model.layers.{i}.mlp.down_proj.weight",)),
        Row("norm.weight", ("model.norm.weight",)),
        Row("final_linear.weight", ("lm_head.weight",)),
    )


def expand(rows: Sequence[Row], num_layers: int) -> list[Row]:
    """The rows with `{i}` written out for every block."""
    expanded = []
    for row in rows:
        blocks = range(num_layers) if "{i}" in row.ours else (0,)
        for i in blocks:
            expanded.append(
                Row(row.ours.replace("{i}", str(i)), tuple(n.replace("{i}", str(i)) for n in row.theirs), row.packing)
            )
    return expanded
