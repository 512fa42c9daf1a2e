"""What stock Hugging Face transformers can express: an exporter for each architecture, in a table.

A model of a position method that no stock architecture has would be one more row, with code of its own beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import weight_map
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.weights import Weights
from megatron_coca.config import Config
from megatron_coca.config.position import SCALING_OPTIONS

STOCK_SCALINGS = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
NOT_THEIRS = frozenset({"ramp"})
"""Options of extensions that transformers has no name for."""

Obstacle = tuple[Callable[[Config], bool], Callable[[Config], str]]
"""Whether a configuration has it, and how it is told."""


@dataclass(frozen=True)
class Exporter:
    """One architecture of transformers.

    Attributes:
        architecture: the class that loads it.
        rows: its names of the weights.
        obstacles: what it cannot express.
        keys: its config.json, apart from what all have in common.
    """

    architecture: str
    rows: tuple[weight_map.Row, ...]
    obstacles: tuple[Obstacle, ...]
    keys: Callable[[Config], dict[str, Any]]

    def reasons(self, config: Config) -> list[str]:
        """Why a model cannot be written; none where it can."""
        return [told(config) for has, told in (*POSITION_OBSTACLES, *self.obstacles) if has(config)]


def _is(name: str, *allowed: Any) -> Obstacle:
    """An obstacle where a key of the model has none of these values."""
    return (
        lambda config: getattr(config.model, name) not in allowed,
        lambda config: f"{name} is {getattr(config.model, name)!r}, not {' or '.join(map(repr, allowed))}",
    )


def _scaling(config: Config) -> str:
    scaling = config.position.rope_scaling
    return scaling.rope_type if scaling is not None else "default"


POSITION_OBSTACLES: tuple[Obstacle, ...] = (
    (
        lambda config: config.position.pos_emb != "rotary",
        lambda config: f"pos_emb {config.position.pos_emb!r} is in no stock model, only 'rotary' is",
    ),
    (
        lambda config: config.position.relative_positions is not None,
        lambda config: "relative_positions is set, and no stock model has such a map",
    ),
    (
        lambda config: config.position.logit_scaling != "none",
        lambda config: f"logit_scaling {config.position.logit_scaling!r} is in no stock model",
    ),
    (
        lambda config: _scaling(config) not in STOCK_SCALINGS,
        lambda config: f"rope_type {_scaling(config)!r} is not known to transformers, which has {_stock()}",
    ),
    (
        lambda config: (
            _scaling(config) == "yarn" and getattr(config.position.rope_scaling, "ramp", None) != "dimension"
        ),
        lambda config: "yarn with ramp 'rotations' is not known to transformers, which has 'dimension'",
    ),
)


def _stock() -> str:
    return ", ".join(sorted(STOCK_SCALINGS))


NEOX_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
"""Ours to theirs. Only what is read back as well."""

NEOX_OBSTACLES: tuple[Obstacle, ...] = (
    _is("norm", "layernorm"),
    _is("activation", *NEOX_ACTIVATIONS),
    _is("use_bias_in_norms", True),
    _is("use_bias_in_mlp", True),
    (
        lambda config: config.model.num_kv_heads != config.model.num_attention_heads,
        lambda config: (
            f"num_kv_heads is {config.model.num_kv_heads}, not num_attention_heads ({config.model.num_attention_heads})"
        ),
    ),
    (
        lambda config: config.model.gpt_j_residual and config.model.gpt_j_tied,
        lambda config: "gpt_j_tied: attention and MLP have one norm",
    ),
)
LLAMA_OBSTACLES: tuple[Obstacle, ...] = (
    _is("norm", "rmsnorm"),
    _is("activation", "swiglu"),
    _is("gpt_j_residual", False),
    _is("use_bias_in_attn_linear", False),
    _is("use_bias_in_mlp", False),
    (
        lambda config: config.position.rotary_pct != 1,
        lambda config: f"rotary_pct is {config.position.rotary_pct}, not 1",
    ),
)


def _neox_keys(config: Config) -> dict[str, Any]:
    model = config.model
    tanh = model.activation == "gelu" and model.bias_gelu_fusion
    return {
        "hidden_act": "gelu_new" if tanh else NEOX_ACTIVATIONS[model.activation],
        "layer_norm_eps": model.layernorm_epsilon,
        "use_parallel_residual": model.gpt_j_residual,
        "attention_bias": model.use_bias_in_attn_linear,
        "hidden_dropout": model.hidden_dropout,
    }


def _llama_keys(config: Config) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "rms_norm_eps": config.model.rms_norm_epsilon,
        "num_key_value_heads": config.model.num_kv_heads,
        "head_dim": config.model.head_dim,
        "attention_bias": False,
        "mlp_bias": False,
    }


EXPORTERS: dict[str, Exporter] = {
    "gpt_neox": Exporter("GPTNeoXForCausalLM", weight_map.GPT_NEOX, NEOX_OBSTACLES, _neox_keys),
    "llama": Exporter("LlamaForCausalLM", weight_map.llama("k_proj"), LLAMA_OBSTACLES, _llama_keys),
}
"""Every architecture that a model may be written as, by its `model_type`; the first that can express it is taken."""


def choose(config: Config, source: Path) -> str:
    """The `model_type` that expresses a model.

    Raises:
        CheckpointError: none does; it names what stands against the one that is nearest.
    """
    reasons = {kind: exporter.reasons(config) for kind, exporter in EXPORTERS.items()}
    fitting = next((kind for kind, against in reasons.items() if not against), None)
    if fitting is None:
        nearest = min(reasons, key=lambda kind: len(reasons[kind]))
        against = "; ".join(reasons[nearest])
        raise CheckpointError(
            f"{source}: no model of stock transformers computes what this one does; against {nearest}, the nearest: {against}"
        )
    return fitting


def describe(config: Config, kind: str, end: int | list[int] | None, weights: Weights) -> dict[str, dict[str, Any]]:
    """The contents of config.json and generation_config.json, by these names; `end` is what ends a text."""
    model, exporter = config.model, EXPORTERS[kind]
    known = model.vocab_size or model.padded_vocab_size
    settings = {
        "model_type": kind,
        "architectures": [exporter.architecture],
        "dtype": str(next(iter(weights.entries.values())).dtype).removeprefix("torch."),
        "vocab_size": model.padded_vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": config.position.training_length(model.seq_length),
        "tie_word_embeddings": not model.no_weight_tying,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "rope_parameters": _rope_parameters(config, kind),
        **{"bos_token_id": None, "eos_token_id": end, "pad_token_id": None},
        **exporter.keys(config),
    }
    padding = list(range(known, model.padded_vocab_size))
    generation = {"do_sample": False, "eos_token_id": end} | ({"suppress_tokens": padding} if padding else {})
    return {"config.json": settings, "generation_config.json": generation}


def _rope_parameters(config: Config, kind: str) -> dict[str, Any]:
    position = config.position
    found: dict[str, Any] = {"rope_type": _scaling(config), "rope_theta": position.rotary_emb_base}
    found |= {"partial_rotary_factor": position.rotary_pct} if kind == "gpt_neox" else {}
    for name in SCALING_OPTIONS[_scaling(config)]:
        value = getattr(position.rope_scaling, name)
        if value is not None and name not in NOT_THEIRS:
            found[name] = value
    if _scaling(config) in ("yarn", "longrope", "llama3"):
        found["original_max_position_embeddings"] = position.training_length(config.model.seq_length)
    return found
