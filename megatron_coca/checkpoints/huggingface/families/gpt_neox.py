"""GPT-NeoX. Folders of this architecture can also hold CoCA models, so it is not a row of `FAMILIES`."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.families.parts.keys import ConfigReader, Exporter, Json
from megatron_coca.checkpoints.huggingface.rope import (
    check_spellings,
    older_keys,
    rope_keys,
    rope_parameters,
    rope_section,
)
from megatron_coca.checkpoints.huggingface.weight_map import Row, layer_rows, modules_of
from megatron_coca.config import Config

TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    **dict.fromkeys(TANH_GELU, "gelu"),
}
POSITIONS = ("rotary", "coca")
"""Values of `pos_emb` in the config.json of a GPT-NeoX folder. Only our exports write this key."""
WRITTEN_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
"""Our activations -> GPT-NeoX's `hidden_act`, for the activations that the import supports."""
UNNEEDED = re.compile(
    r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)"
    r"|gpt_neox\.(layers\.\d+\.attention\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)
ROWS: tuple[Row, ...] = (
    Row("embedding.word_embeddings.weight", ("gpt_neox.embed_in.weight",)),
    *layer_rows(
        "gpt_neox.layers.{i}",
        modules_of(
            "input_layernorm post_attention_layernorm attention.query_key_value attention.dense mlp.dense_h_to_4h"
            " mlp.dense_4h_to_h"
        ),
    ),
    Row("norm.weight", ("gpt_neox.final_layer_norm.weight",)),
    Row("norm.bias", ("gpt_neox.final_layer_norm.bias",)),
    Row("final_linear.weight", ("embed_out.weight",)),
)


def _shape(config: Json, source: Path) -> dict[str, Any]:
    name = config.get("hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{source}: hidden_act: {name!r} is not supported; supported values: {', '.join(ACTIVATIONS)}"
        )
    return {
        "activation": ACTIVATIONS[name],
        "bias_gelu_fusion": name in TANH_GELU,
        "intermediate_size": config["intermediate_size"],
        "norm": "layernorm",
        "layernorm_epsilon": float(config.get("layer_norm_eps", 1e-5)),
        "gpt_j_residual": config.get("use_parallel_residual", True),
        "use_bias_in_attn_linear": config.get("attention_bias", True),
        "hidden_dropout": float(config.get("hidden_dropout") or 0),
    }


def _rotary_pct(config: Json) -> float:
    return float(rope_section(config).get("partial_rotary_factor", config.get("rotary_pct", 0.25)))


def _position(config: Json, source: Path, names: Collection[str]) -> dict[str, Any]:
    method = config.get("pos_emb", "rotary")
    if method not in POSITIONS:
        raise CheckpointError(
            f"{source}: pos_emb: {method!r} is not supported; supported values: {', '.join(POSITIONS)}"
        )
    keys = {"pos_emb": method, "rotary_pct": _rotary_pct(config)}
    check_spellings(config, source, ("rotary_emb_base", 10000.0), ("rotary_pct", 0.25))
    return keys | rope_keys(config, source, "rotary_emb_base")


def may_be_coca(config: Json) -> bool:
    """Return whether a folder that is read as a RoPE model could be a CoCA model by CoCA's authors.

    Their models have the same keys and weight names as plain GPT-NeoX models. Unlike Pythia and GPT-NeoX-20B, their
    models rotate all features.
    """
    return config.get("model_type") == "gpt_neox" and "pos_emb" not in config and _rotary_pct(config) == 1


def _keys(config: Config, shared: dict[str, Any]) -> dict[str, Any]:
    model, position = config.model, config.position
    tanh = model.activation == "gelu" and model.bias_gelu_fusion
    rope = rope_parameters(position, model.seq_length) | {"partial_rotary_factor": position.rotary_pct}
    return shared | {
        "hidden_act": "gelu_new" if tanh else WRITTEN_ACTIVATIONS.get(model.activation),
        "layer_norm_eps": model.layernorm_epsilon,
        "use_parallel_residual": model.gpt_j_residual,
        "attention_bias": model.use_bias_in_attn_linear,
        "hidden_dropout": model.hidden_dropout,
        "rope_parameters": rope,
        "rotary_pct": position.rotary_pct,
        **older_keys(rope, "rotary_emb_base"),
        "pos_emb": "rotary",  # transformers ignores it; our import sees that CoCA's authors did not save this folder
    }


READER = ConfigReader(_shape, _position, lambda config, names: ROWS, UNNEEDED)
EXPORTER = Exporter("GPTNeoXForCausalLM", lambda config: ROWS, _keys)
