"""Families of ModernBERT. Each is a row (see `keys.Family`)."""

from typing import Any

from megatron_coca.checkpoints.huggingface.families.defaults import (
    BIASES,
    MLP_BIAS,
    MODERN,
    Json,
    NotSupported,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.keys import FIRST_OF_PERIOD, FULL, GATED, Family
from megatron_coca.checkpoints.huggingface.families.tables import EMBEDDING, HEAD, separate
from megatron_coca.checkpoints.huggingface.weight_map import GATE_FIRST, Row, layer_rows
from megatron_coca.config import Config

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


def _modernbert(config: Json, keys: Json) -> dict[str, Any]:
    """Read the older name of the rotary base of layers without a window. The head must be like the MLP."""
    for head, block, default in (("bias", "mlp_bias", False), ("activation", "hidden_activation", "gelu")):
        if config.get(f"classifier_{head}", default) != config.get(block, default):
            raise NotSupported(f"classifier_{head}: differs from {block}, which is not supported")
    if config.get("rope_scaling") is not None:
        raise NotSupported("rope_scaling: is not supported; move it to the sections of rope_parameters")
    if not config.get("local_attention", 128):
        raise NotSupported(
            "local_attention: null is not supported; set the window, and list full layers in layer_types"
        )
    section = (config.get("rope_parameters") or {}).get(FULL) or {}
    base, slides = config.get("global_rope_theta"), "sliding_window_width" in keys  # in all layers
    return {} if slides or base is None or "rope_theta" in section else {"rotary_emb_base": float(base)}


def _to_modernbert(config: Config) -> dict[str, Any]:
    named = (theirs for theirs, ours in GATED.items() if ours == config.model.activation)
    return {
        "classifier_bias": config.model.use_bias_in_mlp,
        "classifier_activation": next(named, None),
        "rope_scaling": None,  # the class would use it for all layers
    }


FAMILIES: dict[str, Family] = {
    "modernbert-decoder": Family(
        "ModernBertDecoderForCausalLM",
        rows_of(MODERNBERT),
        MODERN
        | {"norm": "layernorm", "use_embedding_norm": True, "skip_first_norm": True, "use_output_transform": True},
        {
            "norm_eps": ("layernorm_epsilon", 1e-5),
            "norm_bias": ("use_bias_in_norms", False),
            "decoder_bias": ("use_bias_in_output_head", True),
            "embedding_dropout": ("embedding_dropout", 0.0),
        }
        | BIASES
        | MLP_BIAS,
        {"attention_dropout": 0.0, "mlp_dropout": 0.0},
        {"sliding_window": "local_attention", "head_dim": None, "num_key_value_heads": None},
        activation=("hidden_activation", "gelu"),
        tied=True,
        rope=160000.0,
        windows=FIRST_OF_PERIOD,
        window=128,
        by_type=("local_rope_theta", 10000.0),
        read=_modernbert,
        write=_to_modernbert,
        harmless=frozenset({"sliding_window", "initializer_cutoff_factor", "cls_token_id", "classifier_pooling"}),
    ),
}
"""`model_type` -> family."""
