"""Families that name their layers `transformer.h`, as GPT-2 does.

Each family is a row of `FAMILIES` (see `keys.Family`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.parts.defaults import (
    EPSILON,
    GPT_NAMES,
    LAYERNORM,
    SUMMARY,
    Json,
    NotSupported,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import Family
from megatron_coca.checkpoints.huggingface.families.parts.tables import (
    EMBEDDING,
    HEAD,
    POSITIONS,
    Rows,
    norms_of_sums,
    renamed,
    separate,
    with_head_bias,
)
from megatron_coca.checkpoints.huggingface.rope import MAXIMUM
from megatron_coca.checkpoints.huggingface.weight_map import (
    FUSED_TURNED,
    NEIGHBOURS,
    SINGLE,
    TURNED,
    Heads,
    Row,
    WeightPacking,
    modules_of,
    transformer,
)
from megatron_coca.config import Config
from megatron_coca.config.model import GLOBAL

GPT2 = transformer(
    "h",
    "wte",
    modules_of(
        "ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj",
        query_key_value=FUSED_TURNED,
        **dict.fromkeys(("dense", "linear1", "linear2"), TURNED),
    ),
    ("embedding.position_embeddings", "wpe"),
    ("norm", "ln_f"),
)

GROUPS = 4
"""Number of groups of heads in CodeGen's packed projection, whatever the number of heads."""


def _join_codegen(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """Convert CodeGen's rows, [queries | values | keys] for each group of heads, into our packed tensor."""
    groups = parts[0].view(GROUPS, 3, -1, *parts[0].shape[1:])
    q, v, k = (kind.reshape(-1, *parts[0].shape[1:]) for kind in groups.unbind(1))
    return NEIGHBOURS.join([q, k, v], heads)


def _split_codegen(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    q, k, v = NEIGHBOURS.split(packed, heads, 3)
    groups = [part.view(GROUPS, -1, *packed.shape[1:]) for part in (q, v, k)]
    return [torch.stack(groups, dim=1).reshape(packed.shape)]


CODEGEN = WeightPacking(_join_codegen, _split_codegen)


def gptj(packing: WeightPacking, *projections: str) -> Rows:
    """Return the table of GPT-J and CodeGen, which pack their `projections` in different ways."""
    modules = {"input_layernorm": "ln_1", "attention.dense": "attn.out_proj"}
    modules |= {"mlp.linear1": "mlp.fc_in", "mlp.linear2": "mlp.fc_out"}
    rows = transformer("h", "wte", {ours: (name, SINGLE) for ours, name in modules.items()}, ("norm", "ln_f"))
    names = tuple(f"transformer.h.{{i}}.attn.{name}.weight" for name in projections)
    return with_head_bias((*rows, Row("blocks.{i}.attention.query_key_value.weight", names, packing)))


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

OPENAI_GPT = norms_of_sums(
    transformer(
        "h",
        "tokens_embed",
        modules_of(
            "ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj",
            query_key_value=FUSED_TURNED,
            **dict.fromkeys(("dense", "linear1", "linear2"), TURNED),
        ),
        ("embedding.position_embeddings", "positions_embed"),
    )
)


def _gpt2(config: Json, keys: Json) -> dict[str, Any]:
    return {
        "max_position_embeddings": config[MAXIMUM],
        "attention_dropout": float(config.get("attention_dropout", 0.1)),
    }


LOCAL = "local"
"""Name of the layers with a window, in GPT-Neo's config.json and here."""


def _gptj(config: Json, keys: Json) -> dict[str, Any]:
    width, rotated = config["hidden_size"] // config["num_attention_heads"], config.get("rotary_dim", 64)
    if rotated is None:
        raise NotSupported("rotary_dim: null is not supported, because the class then uses the angles of another width")
    return {"rotary_pct": min(rotated / width, 1.0)}


def _to_gptj(config: Config) -> dict[str, Any]:
    return {"rotary_dim": int(config.model.head_dim * config.position.rotary_pct)}


def _gpt_neo(config: Json, keys: Json) -> dict[str, Any]:
    """Read which layers have a window: `attention_types` lists groups of types, each with its number of repetitions."""
    groups = config.get("attention_types") or [[["global", LOCAL], config["num_hidden_layers"] // 2]]
    names = [name for group, count in groups for name in group * count]
    unknown = sorted(set(names) - {"global", LOCAL})
    if unknown or len(names) != config["num_hidden_layers"]:
        raise NotSupported("attention_types: must name each layer global or local; correct the list")
    width = {"sliding_window_width": config.get("window_size", 256) - 1}
    found: dict[str, Any] = {"max_position_embeddings": config[MAXIMUM]}
    if set(names) == {LOCAL}:
        return found | width
    if LOCAL in names:
        found |= {"attention_config": [[names, 1]], "layer_types": {LOCAL: width}}
    return found


def _to_gpt_neo(config: Config) -> dict[str, Any]:
    kinds, names = config.layer_types, config.model.layer_names
    widths = [kind.sliding_window_width for kind in kinds.values() if kind.sliding_window_width is not None]
    local = [LOCAL if kinds[name].sliding_window_width is not None else GLOBAL for name in names]
    return {
        "attention_types": [[local, 1]],
        "attention_layers": local,
        "window_size": widths[0] + 1 if widths else 256,
    }


GPT1_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
"""The names of activations that GPT-1's class knows -> their usual names."""


def _openai_gpt(config: Json, keys: Json) -> dict[str, Any]:
    named = config.get("afn", "gelu")
    if named not in GPT1_ACTIVATIONS:
        raise NotSupported(f"afn: {named!r} is not supported; supported values: {', '.join(GPT1_ACTIVATIONS)}")
    return {
        "bias_gelu_fusion": named == "gelu",  # the class uses the approximation
        "max_position_embeddings": config[MAXIMUM],
        "attention_dropout": float(config.get("attention_dropout", 0.1)),
    }


def _to_openai_gpt(config: Config) -> dict[str, Any]:
    model = config.model
    named = model.activation if model.activation != "gelu" or model.bias_gelu_fusion else None
    return {"afn": "silu" if named == "swish" else named}


DROPOUTS = {"resid_pdrop": ("hidden_dropout", 0.0), "embd_pdrop": ("embedding_dropout", 0.0)}

GPTJ = LAYERNORM | {
    "use_bias_in_attn_linear": False,
    "gpt_j_residual": True,
    "gpt_j_tied": True,
    "use_bias_in_output_head": True,
    "pos_emb": "rotary",
}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        rows_of(GPT2),
        LAYERNORM | {"pos_emb": "learned"},
        EPSILON | {"resid_pdrop": ("hidden_dropout", 0.1), "embd_pdrop": ("embedding_dropout", 0.1)},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        GPT_NAMES,
        activation=("activation_function", "gelu_new"),
        tied=True,
        length=1024,
        rope=None,
        read=_gpt2,
        harmless=frozenset(
            {
                *("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
                *("summary_proj_to_labels", "summary_first_dropout"),
                *("n_special", "predict_special_tokens", "output_past"),
            }
        ),
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        rows_of(gptj(NEIGHBOURS, "q_proj", "k_proj", "v_proj")),
        GPTJ,
        EPSILON | DROPOUTS,
        names=GPT_NAMES,
        activation=("activation_function", "gelu_new"),
        length=2048,
        rope=None,
        read=_gptj,
        write=_to_gptj,
        harmless=SUMMARY | {"tokenizer_class"},
    ),
    "codegen": Family(
        "CodeGenForCausalLM",
        rows_of(gptj(CODEGEN, "qkv_proj")),
        GPTJ,
        EPSILON | DROPOUTS,
        names=GPT_NAMES,
        activation=("activation_function", "gelu_new"),
        length=2048,
        rope=None,
        read=_gptj,
        write=_to_gptj,
        harmless=SUMMARY,
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        rows_of(GPT_NEO),
        LAYERNORM | {"pos_emb": "learned", "use_bias_in_qkv": False, "softmax_scale": 1.0},
        EPSILON | {"resid_dropout": ("hidden_dropout", 0.0), "embed_dropout": ("embedding_dropout", 0.0)},
        names={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": None},
        activation=("activation_function", "gelu_new"),
        tied=True,
        length=2048,
        rope=None,
        read=_gpt_neo,
        write=_to_gpt_neo,
        harmless=SUMMARY | {"attention_layers"},
    ),
    "openai-gpt": Family(
        "OpenAIGPTLMHeadModel",
        rows_of(OPENAI_GPT),
        LAYERNORM | {"pos_emb": "learned", "norm_position": "residual"},
        EPSILON | {"resid_pdrop": ("hidden_dropout", 0.1), "embd_pdrop": ("embedding_dropout", 0.1)},
        names=GPT_NAMES | {"intermediate_size": None},
        activation=("afn", "gelu"),
        tied=True,
        length=512,
        rope=None,
        read=_openai_gpt,
        write=_to_openai_gpt,
        harmless=SUMMARY | {"n_special", "predict_special_tokens"},
    ),
    "ctrl": Family(
        "CTRLLMHeadModel",
        rows_of(CTRL),
        LAYERNORM | {"pos_emb": "sinusoidal", "layernorm_epsilon": 1e-6, "use_bias_in_output_head": True},
        {"resid_pdrop": ("hidden_dropout", 0.1), "embd_pdrop": ("embedding_dropout", 0.1)},
        {"layer_norm_epsilon": 1e-6},  # the class reads it only for the last norm
        GPT_NAMES | {"intermediate_size": "dff", "attention_dropout": None},
        activation=(None, "relu"),
        tied=True,
        length=256,
        rope=None,
        read=lambda config, keys: {"embedding_scale": float(config["hidden_size"]) ** 0.5},
        harmless=SUMMARY | {"attn_pdrop", "from_tf", "output_past", "num_labels"},
    ),
}
"""`model_type` -> family."""
FAMILIES["gpt-sw3"] = FAMILIES["gpt2"]  # another model_type of the same class
