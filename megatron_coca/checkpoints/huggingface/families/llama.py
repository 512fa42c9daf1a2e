"""LLaMA. Folders of this architecture can also hold CoCA models, so it is not a row of `FAMILIES`."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.families.keys import ConfigReader, Exporter, Json
from megatron_coca.checkpoints.huggingface.rope import (
    check_spellings,
    older_keys,
    rope_keys,
    rope_parameters,
    rope_section,
)
from megatron_coca.checkpoints.huggingface.weight_map import llama
from megatron_coca.config import Config

ACTIVATIONS = ("silu", "swish")  # two names of one function
UNNEEDED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def other_head_dim(config: Json) -> dict[str, Any]:
    """Return our key of the width of a head, if it is not hidden_size / num_attention_heads."""
    given = config.get("head_dim")
    return {} if given in (None, config["hidden_size"] // config["num_attention_heads"]) else {"kv_channels": given}


def _shape(config: Json, source: Path) -> dict[str, Any]:
    if config.get("hidden_act", "silu") not in ACTIVATIONS:
        raise CheckpointError(
            f"{source}: hidden_act: {config['hidden_act']!r} is not supported for LLaMA; supported values: "
            f"{', '.join(ACTIVATIONS)}"
        )
    return other_head_dim(config) | {
        "activation": "swiglu",
        "intermediate_size": 3 * config["intermediate_size"],  # GPT-NeoX's key is 3 times the width of a gated MLP
        "norm": "rmsnorm",
        "rms_norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "use_bias_in_attn_linear": config.get("attention_bias") or False,
        "use_bias_in_mlp": config.get("mlp_bias") or False,
        "use_bias_in_norms": False,
    }


def _has_t_projection(names: Iterable[str]) -> bool:
    """Return whether a model is a LLaMA model by CoCA's authors, who call the key projection `t_proj`."""
    return any(name.endswith("self_attn.t_proj.weight") for name in names)


def _position(config: Json, source: Path, names: Collection[str]) -> dict[str, Any]:
    check_spellings(config, source, ("rope_theta", 10000.0), ("partial_rotary_factor", 1.0))
    share = rope_section(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise CheckpointError(
            f"{source}: partial_rotary_factor: {share} is not supported, because LLaMA rotates all features; remove it"
        )
    return {"pos_emb": "coca" if _has_t_projection(names) else "rotary", **rope_keys(config, source, "rope_theta")}


def llama_keys(config: Config, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json. `shared` contains the keys that all architectures have."""
    model, rope = config.model, rope_parameters(config.position, config.model.seq_length)
    return shared | {
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_epsilon,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
        "rope_parameters": rope,
        **older_keys(rope),
    }


READER = ConfigReader(
    _shape,
    _position,
    lambda config, names: llama("t_proj" if _has_t_projection(names) else "k_proj"),
    UNNEEDED,
)
EXPORTER = Exporter("LlamaForCausalLM", lambda config: llama("k_proj"), llama_keys)
