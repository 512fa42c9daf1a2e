"""Tables of weight names, and functions that change such tables. Several families share them."""

from collections.abc import Mapping
from dataclasses import replace

from megatron_coca.checkpoints.huggingface.weight_map import (
    BY_HEAD,
    SINGLE,
    Row,
    WeightPacking,
    layer_rows,
)

Rows = tuple[Row, ...]


def renamed(rows: Rows, names: Mapping[str, str]) -> Rows:
    """Replace each key of `names` in the Hugging Face names by its value.

    Raises ValueError if no name contains a key of `names`.
    """
    if absent := [old for old in names if not any(old in name for row in rows for name in row.theirs)]:
        example = rows[-1].theirs[0]
        raise ValueError(f"renamed: no weight name contains {absent[0]!r}; use a part of a name such as {example}")
    found = []
    for row in rows:
        theirs = row.theirs
        for old, new in names.items():
            theirs = tuple(name.replace(old, new) for name in theirs)
        found.append(replace(row, theirs=theirs))
    return tuple(found)


def with_norm_bias(rows: Rows) -> Rows:
    """Add the bias of the final norm."""
    (weight,) = (row for row in rows if row.ours == "norm.weight")
    return (*rows, Row("norm.bias", (weight.theirs[0].removesuffix("weight") + "bias",)))


def norms_of_sums(rows: Rows) -> Rows:
    """Return a table in which the two norms of a block follow the residual sums, and no norm precedes the head."""
    places = {"input_layernorm": "attention_sum_layernorm", "post_attention_layernorm": "mlp_sum_layernorm"}
    kept = [row for row in rows if not row.ours.startswith("norm.")]
    for place, of_sum in places.items():
        kept = [replace(row, ours=row.ours.replace(f".{place}.", f".{of_sum}.")) for row in kept]
    return tuple(kept)


def with_head_bias(rows: Rows) -> Rows:
    """Add the bias of the output head, which may be tied to the embedding."""
    return (*rows, *(Row(name, ("lm_head.bias",)) for name in ("final_linear.bias", "final_bias")))


def ungated(rows: Rows) -> Rows:
    """Return LLaMA's table for an MLP without a gate."""
    return tuple(
        replace(row, theirs=row.theirs[:1], packing=SINGLE) if ".linear1." in row.ours else row for row in rows
    )


QK_LAYERNORM = {
    "attention.query_layernorm": "self_attn.q_layernorm",
    "attention.key_layernorm": "self_attn.k_layernorm",
}
ONE_NORM = {"input_layernorm": "input_layernorm"}


def separate(
    prefix: str,
    attention: str,
    modules: Mapping[str, str],
    ends: Mapping[str, str],
    packing: WeightPacking = BY_HEAD,
) -> Rows:
    """Return a table for blocks below `prefix` with separate q_proj, k_proj and v_proj below `attention`.

    `modules` maps our name of each other module of the block to theirs. `ends` maps our names outside the blocks to
    theirs.
    """
    names = [f"{prefix}.{{i}}.{attention}.{name}_proj" for name in "qkv"]
    kinds = ("weight", "bias")
    return (
        *(Row(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for ours, theirs in ends.items() for kind in kinds),
        *layer_rows(f"{prefix}.{{i}}", {ours: (theirs, SINGLE) for ours, theirs in modules.items()}),
        *(
            Row(f"blocks.{{i}}.attention.query_key_value.{kind}", tuple(f"{name}.{kind}" for name in names), packing)
            for kind in kinds
        ),
    )


EMBEDDING, POSITIONS, HEAD = "embedding.word_embeddings", "embedding.position_embeddings", "final_linear"
