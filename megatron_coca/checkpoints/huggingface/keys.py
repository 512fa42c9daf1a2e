"""What the config.json of a Hugging Face folder says of a model, in keys of ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.huggingface.files import has_t_projection, weight_files
from megatron_coca.checkpoints.native import read_json
from megatron_coca.config.position import SCALING_OPTIONS

ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
ROPE_BOOKKEEPING = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
"""Names in transformers' rope parameters that are no option of an extension."""

TANH_GELU = frozenset({"gelu_new", "gelu_fast", "gelu_pytorch_tanh"})


def is_huggingface_folder(path: Path) -> bool:
    """Whether `path` holds a Hugging Face config.json."""
    return (path / "config.json").is_file()


def read_keys(folder: Path) -> dict[str, Any]:
    """Our configuration keys for the model in `folder`.

    CoCA is recognised in LLaMA folders by their T projection. The authors' GPT-NeoX folders look like plain ones:
    say pos_emb=coca.
    """
    config = read_json(folder / "config.json")
    readers = {"gpt_neox": _neox_keys, "llama": _llama_keys}
    kind = config.get("model_type")
    if kind not in readers:
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type {kind!r} is not supported; known: {', '.join(sorted(readers))}"
        )
    try:
        return _common_keys(config) | _rope_keys(config, folder / "config.json") | readers[kind](config, folder)
    except KeyError as missing:
        raise CheckpointError(f"{folder / 'config.json'}: has no {missing}") from missing


def _common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "seq_length": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 1,
        "no_weight_tying": not config.get("tie_word_embeddings", False),
    }


def _rope_keys(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Rotary base and extension, from either spelling that transformers has used."""
    parameters = config.get("rope_parameters") or {}
    base = parameters.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000)))
    given = config.get("rope_scaling") or parameters
    scaling = {name: value for name, value in given.items() if name not in ROPE_BOOKKEEPING and value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return {"rotary_emb_base": float(base)}
    unread = sorted(scaling.keys() - set(SCALING_OPTIONS.get(kind, ())) - {"original_max_position_embeddings"})
    if kind not in SCALING_OPTIONS or unread:
        raise CheckpointError(f"{source}: rope_type {kind!r} {_with(unread)}is not supported")
    if kind == "longrope":
        scaling = _longrope_keys(config, scaling) | scaling
    return {"rotary_emb_base": float(base), "rope_scaling": {"rope_type": kind} | scaling}


def _with(names: list[str]) -> str:
    return f"with {', '.join(names)} " if names else ""


def _longrope_keys(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """L beside or inside the section, and the factor that transformers derives from it where none is given."""
    original = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if original is None:
        return {}
    return {"original_max_position_embeddings": original, "factor": config["max_position_embeddings"] / original}


def _neox_keys(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or {}
    return {
        "pos_emb": "rotary",
        "rotary_pct": float(config.get("rotary_pct", parameters.get("partial_rotary_factor", 0.25))),
        "intermediate_size": config["intermediate_size"],
        "norm": "layernorm",
        "layernorm_epsilon": float(config.get("layer_norm_eps", 1e-5)),
        "gpt_j_residual": config.get("use_parallel_residual", True),
        "use_bias_in_attn_linear": config.get("attention_bias", True),
        **_activation_keys(config, folder),
    }


def _llama_keys(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise CheckpointError(f"{folder / 'config.json'}: LLaMA with attention_bias or mlp_bias is not supported")
    if (
        config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) * config["num_attention_heads"]
        != config["hidden_size"]
    ):
        raise CheckpointError(
            f"{folder / 'config.json'}: head_dim other than hidden_size / num_attention_heads is not supported"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{folder / 'config.json'}: hidden_act {config['hidden_act']!r} is not supported for LLaMA; known: silu"
        )
    return {
        "pos_emb": "coca" if has_t_projection(weight_files(folder)) else "rotary",
        "intermediate_size": 3 * config["intermediate_size"],  # upstream counts both halves of a gated layer, times 3/2
        "activation": "swiglu",
        "norm": "rmsnorm",
        "rms_norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        "use_bias_in_norms": False,
    }


def _activation_keys(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    name = config.get("hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{folder / 'config.json'}: hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    return {"activation": ACTIVATIONS[name], "bias_gelu_fusion": name in TANH_GELU}
