"""Tables of weight names of the families in `families_llama.py` and `families_gpt.py`, and their packings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_coca.checkpoints.huggingface import weight_map
from megatron_coca.checkpoints.huggingface.weight_map import (
    GATE_FIRST,
    NEIGHBOURS,
    PRE,
    SINGLE,
    Heads,
    Packing,
    Row,
    in_halves,
    in_pairs,
    join_heads,
    layer_rows,
    like_llama,
    shapes_by_head,
    split_heads,
)
from megatron_coca.config import ModelConfig

# Packings -------------------------------------------------------------------------------------------------------------

EACH_HEAD = Packing(
    lambda parts, heads: torch.stack(list(parts)),
    lambda packed, heads, count: packed.unbind(),
    lambda shapes, heads: [shapes[0] or (0,)] * len(shapes),
)
"""A weight for each head, in a list."""


def _of_features(weight: Tensor, heads: Heads, halves: bool) -> Tensor:
    turned = (in_halves if halves else in_pairs)(weight.flatten(), weight.numel() // weight.shape[-1], heads.rotated)
    return turned.view(weight.shape)


NEIGHBOUR_FEATURES = Packing(
    lambda parts, heads: _of_features(parts[0], heads, True),
    lambda packed, heads, count: [_of_features(packed, heads, False)],
)
"""A weight [..., head_dim] of a norm, in a model that rotates pairs of neighbouring features."""


def _swapped(rows: Tensor, heads: int) -> Tensor:
    return rows.view(heads, 2, -1, *rows.shape[1:]).flip(1).reshape(rows.shape)


def _split_swapped(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    q, k, v = split_heads(packed, heads, count)
    return [_swapped(q, heads.query), _swapped(k, heads.key), v]


SWAPPED = Packing(
    lambda parts, heads: join_heads([_swapped(parts[0], heads.query), _swapped(parts[1], heads.key), parts[2]], heads),
    _split_swapped,
    shapes_by_head,
)
"""Queries and keys of a model that rotates by the negative angle: with swapped halves, the angle is positive."""

GROUPS = 4
"""Groups of heads in CodeGen's packed projection, whatever the number of heads is."""


def _join_codegen(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """Pack CodeGen's rows [queries | values | keys] of each group of heads."""
    groups = parts[0].view(GROUPS, 3, -1, *parts[0].shape[1:])
    q, v, k = (kind.reshape(-1, *parts[0].shape[1:]) for kind in groups.unbind(1))
    return NEIGHBOURS.join([q, k, v], heads)


def _split_codegen(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    q, k, v = NEIGHBOURS.split(packed, heads, 3)
    groups = [part.view(GROUPS, -1, *packed.shape[1:]) for part in (q, v, k)]
    return [torch.stack(groups, dim=1).reshape(packed.shape)]


CODEGEN = Packing(_join_codegen, _split_codegen)
XIELU = Packing(
    lambda parts, heads: torch.cat([part.view(-1) for part in parts]),
    lambda packed, heads, count: [packed[:1], packed[1:2], packed[2], packed[3]],
    lambda shapes, heads: [(1,), (1,), (), ()],
)
"""The two trained parameters of xIELU, and its two constants."""

# Tables ---------------------------------------------------------------------------------------------------------------

Rows = tuple[Row, ...]


def renamed(rows: Rows, names: Mapping[str, str]) -> Rows:
    """Replace each key of `names` in the Hugging Face names by its value."""
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


def packed_gate(rows: Rows) -> Rows:
    """Return LLaMA's table for an MLP with gate and up projection in one matrix, the gate first."""
    others = tuple(row for row in rows if ".linear1." not in row.ours)
    return (*others, *layer_rows("model.layers.{i}", {"mlp.linear1": ("mlp.gate_up_proj", GATE_FIRST)}))


def norms_of_heads(model: ModelConfig) -> Rows:
    """Return rows for a norm of each head, as in StableLM."""
    heads = {"query": ("q", model.num_attention_heads), "key": ("k", model.num_kv_heads)}
    return tuple(
        Row(
            f"blocks.{{i}}.attention.{ours}_layernorm.weight",
            tuple(f"model.layers.{{i}}.self_attn.{theirs}_layernorm.norms.{j}.weight" for j in range(count)),
            EACH_HEAD,
        )
        for ours, (theirs, count) in heads.items()
    )


QK_LAYERNORM = {
    "attention.query_layernorm": "self_attn.q_layernorm",
    "attention.key_layernorm": "self_attn.k_layernorm",
}
ONE_NORM = {"input_layernorm": "input_layernorm"}

GRANITE_SWA = (
    *like_llama(PRE),
    Row("blocks.{i}.attention.position_sinks.weight", ("model.layers.{i}.self_attn.sinks",)),
)
_GRANITE_HYBRID = {
    "mlp.linear1": ("shared_mlp.input_linear", GATE_FIRST),
    "mlp.linear2": ("shared_mlp.output_linear", SINGLE),
}
GRANITE_HYBRID = (
    *(row for row in like_llama(PRE) if ".mlp." not in row.ours),
    *layer_rows("model.layers.{i}", _GRANITE_HYBRID),
)
COHERE = (
    *like_llama(ONE_NORM, NEIGHBOURS),
    *layer_rows(
        "model.layers.{i}",
        {
            f"attention.{ours}_layernorm": (f"self_attn.{theirs}_norm", NEIGHBOUR_FEATURES)
            for ours, theirs in (("query", "q"), ("key", "k"))
        },
    ),
)

_PERSIMMON = {"attention.query_key_value": "self_attn.query_key_value", "mlp.linear1": "mlp.dense_h_to_4h"}
PERSIMMON = with_norm_bias(
    renamed(
        (
            *(row for row in like_llama(PRE | QK_LAYERNORM) if not any(f".{n}." in row.ours for n in _PERSIMMON)),
            *layer_rows("model.layers.{i}", {ours: (theirs, SINGLE) for ours, theirs in _PERSIMMON.items()}),
        ),
        {"o_proj": "dense", "mlp.down_proj": "mlp.dense_4h_to_h", "model.norm": "model.final_layernorm"},
    )
)
PHI = with_head_bias(
    with_norm_bias(
        renamed(
            ungated(like_llama(ONE_NORM | QK_LAYERNORM)),
            {"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "model.norm": "model.final_layernorm"},
        )
    )
)


def gptj(packing: Packing, *projections: str) -> Rows:
    """Return the table of GPT-J and CodeGen, which pack their `projections` in different ways."""
    modules = {"input_layernorm": "ln_1", "attention.dense": "attn.out_proj"}
    modules |= {"mlp.linear1": "mlp.fc_in", "mlp.linear2": "mlp.fc_out"}
    rows = weight_map.transformer(
        "h", "wte", {ours: (name, SINGLE) for ours, name in modules.items()}, ("norm", "ln_f")
    )
    names = tuple(f"transformer.h.{{i}}.attn.{name}.weight" for name in projections)
    return with_head_bias((*rows, Row("blocks.{i}.attention.query_key_value.weight", names, packing)))


GPT_BIGCODE = weight_map.transformer(
    "h",
    "wte",
    weight_map.modules_of("ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"),
    ("embedding.position_embeddings", "wpe"),
    ("norm", "ln_f"),
)


def separate(
    prefix: str,
    attention: str,
    modules: Mapping[str, str],
    ends: Mapping[str, str],
    packing: Packing = weight_map.BY_HEAD,
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
GPT_NEO = separate(
    "transformer.h",
    "attn.attention",
    {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "attention.dense": "attn.attention.out_proj"}
    | {"mlp.linear1": "mlp.c_fc", "mlp.linear2": "mlp.c_proj"},
    {EMBEDDING: "transformer.wte", POSITIONS: "transformer.wpe", "norm": "transformer.ln_f", HEAD: "lm_head"},
)
CTRL = (
    *renamed(
        separate(
            "transformer.h",
            "multi_head_attention",
            {"input_layernorm": "layernorm1", "post_attention_layernorm": "layernorm2"}
            | {"attention.dense": "multi_head_attention.dense", "mlp.linear1": "ffn.0", "mlp.linear2": "ffn.2"},
            {EMBEDDING: "transformer.w", "norm": "transformer.layernorm", HEAD: "lm_head"},
        ),
        {f"{name}_proj": f"W{name}" for name in "qkv"},
    ),
    Row("final_bias", ("lm_head.bias",)),
)
_MODERNBERT = {
    EMBEDDING: "model.embeddings.tok_embeddings",
    "embedding.embedding_layernorm": "model.embeddings.norm",
    "norm": "model.final_norm",
    "output_transform.dense": "lm_head.dense",
    "output_transform.norm": "lm_head.norm",
    HEAD: "decoder",
}
MODERNBERT = (
    *separate(
        "model.layers",
        "attn",
        {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
        | {"attention.dense": "attn.Wo", "mlp.linear2": "mlp.Wo"},
        _MODERNBERT,
    ),
    *layer_rows("model.layers.{i}", {"mlp.linear1": ("mlp.Wi", GATE_FIRST)}),
    Row("final_bias", ("decoder.bias",)),
)
FAIRSEQ = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "attention.dense": "self_attn.out_proj",
    "mlp.linear1": "fc1",
    "mlp.linear2": "fc2",
}


def fairseq(prefix: str, norm: str, head: str = "lm_head") -> Rows:
    """Return the table of OPT, XGLM and BioGPT. `norm` is the name of the final norm."""
    names = {EMBEDDING: "embed_tokens", POSITIONS: "embed_positions", "norm": norm}
    ends = {ours: f"{prefix}.{theirs}" for ours, theirs in names.items()} | {HEAD: head}
    return separate(f"{prefix}.layers", "self_attn", FAIRSEQ, ends)


def opt(model: ModelConfig) -> Rows:
    """Return the table of OPT, which has other norms and a narrow embedding in OPT 350M."""
    rows = fairseq("model.decoder", "final_layer_norm")
    rows = norms_of_sums(rows) if model.norm_position == "residual" else rows
    if model.embedding_width is None:
        return rows
    narrow = {"embedding.projection": "project_in", "output_transform": "project_out"}
    return (*rows, *(Row(f"{ours}.weight", (f"model.decoder.{theirs}.weight",)) for ours, theirs in narrow.items()))


OPENAI_GPT = norms_of_sums(
    weight_map.transformer(
        "h",
        "tokens_embed",
        weight_map.modules_of(
            "ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj",
            query_key_value=weight_map.FUSED_TURNED,
            **dict.fromkeys(("dense", "linear1", "linear2"), weight_map.TURNED),
        ),
        ("embedding.position_embeddings", "positions_embed"),
    )
)
APERTUS = (
    *renamed(
        ungated(like_llama(PRE | weight_map.QK_HEAD)),
        {"layers.{i}.input_layernorm": "layers.{i}.attention_layernorm"}
        | {"layers.{i}.post_attention_layernorm": "layers.{i}.feedforward_layernorm"},
    ),
    Row(
        "blocks.{i}.mlp.activation.weight",
        tuple(f"model.layers.{{i}}.mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")),
        XIELU,
    ),
)
