"""Keys that many families of `families.FAMILIES` share, and conversions that several of them need."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_coca.checkpoints.huggingface.weight_map import Row
from megatron_coca.config import Config, ModelConfig

Json = Mapping[str, Any]


class NotSupported(ValueError):
    """A value of config.json that is valid but not supported. The message is `key: problem`."""


MODERN = {
    "activation": "gated",
    "norm": "rmsnorm",
    "use_bias_in_norms": False,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
}
"""Our keys for LLaMA's block."""
PLAIN_MLP = {name: value for name, value in MODERN.items() if name != "activation"}
"""Our keys for LLaMA's block with an MLP that has no gate."""
LAYERNORM = {
    "norm": "layernorm",
    "use_bias_in_attn_linear": True,
    "use_bias_in_mlp": True,
    "use_bias_in_norms": True,
}
"""Our keys for GPT-2's block."""
RMS = {"rms_norm_eps": ("rms_norm_epsilon", 1e-6)}
RMS_5 = {"rms_norm_eps": ("rms_norm_epsilon", 1e-5)}
BIASES = {"attention_bias": ("use_bias_in_attn_linear", False)}
QKV_BIAS = {"attention_bias": ("use_bias_in_qkv", False)}
MLP_BIAS = {"mlp_bias": ("use_bias_in_mlp", False)}
EPSILON = {"layer_norm_epsilon": ("layernorm_epsilon", 1e-5)}
EPS = {"layer_norm_eps": ("layernorm_epsilon", 1e-5)}


def rows_of(rows: tuple[Row, ...]) -> Callable[[ModelConfig], tuple[Row, ...]]:
    """Return a function from a model to `rows` without the norms, activations and head biases that the model lacks."""
    return lambda model: tuple(row for row in rows if _has(model, row.ours))


def _has(model: ModelConfig, ours: str) -> bool:
    if ".query_layernorm." in ours or ".key_layernorm." in ours:
        return model.qk_norm is not None
    if ".mlp.activation." in ours:
        return model.activation == "xielu"
    if ours in ("final_linear.bias", "final_bias"):
        return model.use_bias_in_output_head and (ours == "final_linear.bias") == model.no_weight_tying
    norm = ours.startswith("norm.") or "layernorm." in ours
    return not (norm and model.norm.startswith("non_parametric"))


def one_bias(default: bool) -> dict[str, Any]:
    """Return the functions `read` and `write` of a family with one key for all biases of attention and MLP."""

    def read(config: Json, keys: Json) -> dict[str, Any]:
        return dict.fromkeys(("use_bias_in_attn_linear", "use_bias_in_mlp"), bool(config.get("use_bias", default)))

    return {"read": read, "write": lambda config: {"use_bias": config.model.use_bias_in_mlp}}


GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "attention_dropout": "attn_pdrop",
    "num_key_value_heads": None,
}
"""GPT-2's names of common keys."""
SUMMARY = frozenset(
    {
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("n_ctx", "gradient_checkpointing", "rotary", "scale_attn_weights"),
    }
)
"""Keys of GPT-2's folders that its class ignores."""


def has_qk_layernorm(config: Config) -> dict[str, Any]:
    return {"qk_layernorm": config.model.qk_norm is not None}
