"""Families that name their layers as fairseq does. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from typing import Any

from megatron_coca.checkpoints.huggingface.families.parts.defaults import LAYERNORM, Json, NotSupported, rows_of
from megatron_coca.checkpoints.huggingface.families.parts.keys import Family
from megatron_coca.checkpoints.huggingface.families.parts.tables import (
    EMBEDDING,
    HEAD,
    POSITIONS,
    Rows,
    norms_of_sums,
    separate,
)
from megatron_coca.checkpoints.huggingface.rope import MAXIMUM
from megatron_coca.checkpoints.huggingface.weight_map import Row
from megatron_coca.config import Config, ModelConfig

FAIRSEQ_MODULES = {
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
    return separate(f"{prefix}.layers", "self_attn", FAIRSEQ_MODULES, ends)


def opt(model: ModelConfig) -> Rows:
    """Return the table of OPT. The model OPT 350M has other norms and a narrow embedding."""
    rows = fairseq("model.decoder", "final_layer_norm")
    rows = norms_of_sums(rows) if model.norm_position == "residual" else rows
    if model.embedding_width is None:
        return rows
    narrow = {"embedding.projection": "project_in", "output_transform": "project_out"}
    return (*rows, *(Row(f"{ours}.weight", (f"model.decoder.{theirs}.weight",)) for ours, theirs in narrow.items()))


OFFSET = 2
"""Number of rows before the row of position 0 in the position table of fairseq's models."""


def _opt(config: Json, keys: Json) -> dict[str, Any]:
    before, width = config.get("do_layer_norm_before", True), config.get("word_embed_proj_dim")
    bias, plain = bool(config.get("enable_bias", True)), not config.get("layer_norm_elementwise_affine", True)
    found: dict[str, Any] = dict.fromkeys(("use_bias_in_attn_linear", "use_bias_in_mlp"), bias)
    found |= {"embedding_width": None if width == config["hidden_size"] else width}
    found |= {"norm_position": "pre" if before else "residual"}
    return found | _fairseq_positions(config, keys) | ({"norm": "non_parametric_layernorm"} if plain else {})


def _to_opt(config: Config) -> dict[str, Any]:
    return {
        "enable_bias": config.model.use_bias_in_mlp,
        "layer_norm_elementwise_affine": config.model.norm == "layernorm",
        "word_embed_proj_dim": config.model.token_width,
        "do_layer_norm_before": config.model.norm_position != "residual",
    }


def _fairseq_positions(config: Json, keys: Json) -> dict[str, Any]:
    return {"max_position_embeddings": config[MAXIMUM] + OFFSET, "opt_pos_emb_offset": OFFSET}


def _biogpt(config: Json, keys: Json) -> dict[str, Any]:
    scale = float(config["hidden_size"]) ** 0.5 if config.get("scale_embedding", True) else 1.0
    dropout = float(config.get("attention_dropout", 0.1))
    return {"embedding_scale": scale, "attention_dropout": dropout} | _fairseq_positions(config, keys)


def _xglm(config: Json, keys: Json) -> dict[str, Any]:
    # The class reaches the frequency 1 / 10000 one step earlier than our formula does with the base 10000.
    pairs, pad = config["hidden_size"] // 2, config.get("pad_token_id")
    if pad is not None and pad not in range(OFFSET):
        raise NotSupported(
            f"pad_token_id: {pad!r} is not supported, because the class then replaces the vector of a position by "
            "zeros; set it to 1, as in the published models"
        )
    scale = float(config["hidden_size"]) ** 0.5 if config.get("scale_embedding", True) else 1.0
    return {
        "embedding_scale": scale,
        "attention_dropout": float(config.get("attention_dropout", 0.1)),
        "sinusoidal_base": 10000.0 ** (pairs / (pairs - 1)),
        "opt_pos_emb_offset": OFFSET,
    }


def _to_biogpt(config: Config) -> dict[str, Any]:
    return {"scale_embedding": config.model.embedding_scale != 1.0}


def _to_xglm(config: Config) -> dict[str, Any]:
    # With the id here, the class could replace the vector of a position by zeros. generation_config.json has the id.
    return _to_biogpt(config) | {"pad_token_id": None}


FAIRSEQ_BLOCK = LAYERNORM | {"pos_emb": "learned", "layernorm_epsilon": 1e-5}

FAMILIES: dict[str, Family] = {
    "opt": Family(
        "OPTForCausalLM",
        lambda model: rows_of(opt(model))(model),
        FAIRSEQ_BLOCK,
        {"dropout": ("hidden_dropout", 0.1)},
        {"_remove_final_layer_norm": False, "layerdrop": 0.0},
        {"intermediate_size": "ffn_dim", "num_key_value_heads": None},
        activation=("activation_function", "relu"),
        tied=True,
        length=2048,
        rope=None,
        read=_opt,
        write=_to_opt,
        harmless=frozenset({"init_std", "activation_dropout"}),
    ),
    "xglm": Family(
        "XGLMForCausalLM",
        rows_of(fairseq("model", "layer_norm")),
        FAIRSEQ_BLOCK | {"pos_emb": "sinusoidal"},
        {"dropout": ("hidden_dropout", 0.1)},
        {"layerdrop": 0.0, "activation_dropout": 0.0, "add_cross_attention": False},
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "attention_heads",
            "intermediate_size": "ffn_dim",
            "num_key_value_heads": None,
        },
        activation=("activation_function", "gelu"),
        tied=True,
        length=2048,
        rope=None,
        read=_xglm,
        write=_to_xglm,
        harmless=frozenset({"init_std"}),
    ),
    "biogpt": Family(
        "BioGptForCausalLM",
        rows_of(fairseq("biogpt", "layer_norm", "output_projection")),
        FAIRSEQ_BLOCK,
        {"hidden_dropout_prob": ("hidden_dropout", 0.1)},
        {"layerdrop": 0.0, "activation_dropout": 0.0},
        {"attention_dropout": "attention_probs_dropout_prob", "num_key_value_heads": None},
        activation=("hidden_act", "gelu"),
        tied=True,
        length=1024,
        rope=None,
        read=_biogpt,
        write=_to_biogpt,
        harmless=frozenset({"layer_norm_eps"}),
    ),
}
"""`model_type` -> family."""
