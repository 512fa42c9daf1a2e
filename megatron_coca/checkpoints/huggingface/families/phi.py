"""Families of Phi. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from typing import Any

from megatron_coca.checkpoints.huggingface.families.parts.defaults import (
    EPS,
    LAYERNORM,
    MODERN,
    Json,
    has_qk_layernorm,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import ALL_LAYERS, Family
from megatron_coca.checkpoints.huggingface.families.parts.tables import (
    ONE_NORM,
    QK_LAYERNORM,
    renamed,
    ungated,
    with_head_bias,
    with_norm_bias,
)
from megatron_coca.checkpoints.huggingface.weight_map import FUSED, GATE_FIRST, PRE, layer_rows, like_llama
from megatron_coca.config import Config
from megatron_coca.config.position import ORIGINAL

_PHI3 = {
    "attention.query_key_value": ("self_attn.qkv_proj", FUSED),
    "mlp.linear1": ("mlp.gate_up_proj", GATE_FIRST),
}

PHI3 = (
    *(row for row in like_llama(PRE) if not any(f".{ours}." in row.ours for ours in _PHI3)),
    *layer_rows("model.layers.{i}", _PHI3),
)

PHI = with_head_bias(
    with_norm_bias(
        renamed(
            ungated(like_llama(ONE_NORM | QK_LAYERNORM)),
            {"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "model.norm": "model.final_layernorm"},
        )
    )
)


def _to_phi3(config: Config) -> dict[str, Any]:
    # Phi 3's class reads the original length only at the top level of config.json, and has a default for it.
    return {ORIGINAL: config.position.original_length(config.model.seq_length)}


def _three_keys(scaling: Json) -> Json:
    """Return only the three keys that Phi 3's class in transformers 4 accepts. The class derives the factor itself."""
    if scaling["rope_type"] != "longrope" or "attention_factor" in scaling:
        return scaling
    return {"type": "longrope"} | {name: scaling[name] for name in ("short_factor", "long_factor")}


FAMILIES: dict[str, Family] = {
    "phi3": Family(
        "Phi3ForCausalLM",
        rows_of(PHI3),
        MODERN,
        {
            "rms_norm_eps": ("rms_norm_epsilon", 1e-5),
            "resid_pdrop": ("hidden_dropout", 0.0),
            "embd_pdrop": ("embedding_dropout", 0.0),
        },
        {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
        windows=ALL_LAYERS,
        share=1.0,
        rope_types={"su": "longrope", "yarn": "longrope"},
        original=4096,
        older=_three_keys,
        write=_to_phi3,
        harmless=frozenset({"full_attn_mod", "interpolate_factor"}),
    ),
    "phi": Family(
        "PhiForCausalLM",
        rows_of(PHI),
        LAYERNORM | {"gpt_j_residual": True, "gpt_j_tied": True, "use_bias_in_output_head": True},
        EPS | {"resid_pdrop": ("hidden_dropout", 0.0), "embd_pdrop": ("embedding_dropout", 0.0)},
        names={"head_dim": None},
        activation=("hidden_act", "gelu_new"),
        share=0.5,
        read=lambda config, keys: {"qk_norm": "layernorm" if config.get("qk_layernorm") else None},
        write=has_qk_layernorm,
    ),
}
"""`model_type` -> family."""
