"""What a model is written as in Hugging Face's terms: an exporter for each architecture, in a table.

A stock architecture is taken where it computes what the model does. Else one of the same shape is, whose positions are
computed by a modelling file beside the weights (remote.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_coca.attention.positions.bias import alibi_slopes, bucket_starts
from megatron_coca.attention.positions.clex import Clex
from megatron_coca.checkpoints import weight_map
from megatron_coca.checkpoints.exports.tokenizer import Symbols
from megatron_coca.checkpoints.huggingface_families import (
    BY_MAXIMUM,
    LEARNED_ROWS,
    MEASURED,
    NETWORK,
    NETWORK_KEYS,
    POSITION,
    POSITION_KEYS,
    REMOTE_TYPES,
    TRAINING_LENGTH,
    dense_rows,
    rows,
)
from megatron_coca.checkpoints.weights import Weights
from megatron_coca.config import Config
from megatron_coca.config.position import MAP_OPTIONS, SCALING_OPTIONS

MODELLING_FILE = Path(__file__).with_name("modeling_coca.py")
"""The file that is put into every such folder."""

CLEX_FREQUENCIES = "clex_frequencies"
ALIBI_SLOPES = "alibi_slopes"
BUCKET_STARTS = "bucket_starts"
"""These three are computed here, for the modelling file alone: reading a folder back computes them anew. Solved from the
weights; of each head; the smallest distance of each of T5's buckets.
"""


def auto_map(kind: str) -> dict[str, str]:
    """What transformers looks for in the modelling file for a folder of `model_type` `kind`."""
    prefix = {"coca_gpt_neox": "CocaGPTNeoX", "coca_llama": "CocaLlama", "coca_dense": "CocaDense"}[kind]
    classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    return {name: f"{MODELLING_FILE.stem}.{prefix}{suffix}" for name, suffix in classes.items()}


def describe_position(config: Config, weights: Weights) -> dict[str, Any]:
    """What config.json says of a model's positions; the way back of `position_keys`. Defaults that follow from the
    training length are written out, so that the modelling file need not know them. `weights` have our names.
    """
    position, length = config.position, config.model.seq_length
    told = {name: value for name, value in position.model_dump().items() if name in POSITION_KEYS}
    if (scaling := position.rope_scaling) is not None:
        names = ("rope_type", *SCALING_OPTIONS[scaling.rope_type], "original_max_position_embeddings")
        told["rope_scaling"] = _given(scaling.model_dump(), names)
    if (distances := position.relative_positions) is not None:
        values = distances.model_dump() | {n: distances.settings(length)[n] for n in ("window", "sinks")}
        told["relative_positions"] = _given(values, ("type", *MAP_OPTIONS[distances.type]))
    if position.pos_emb == "learned":
        told[LEARNED_ROWS] = config.model.max_position_embeddings
    if position.pos_emb == "alibi":
        told[ALIBI_SLOPES] = list(alibi_slopes(config.model.num_attention_heads))
    if position.pos_emb == "rpe":
        told[BUCKET_STARTS] = list(bucket_starts(position.rpe_num_buckets, position.rpe_max_distance))
    if scaling is not None and scaling.rope_type == "clex":
        told[CLEX_FREQUENCIES] = _solved(config, weights)
    return told


@torch.no_grad()
def _solved(config: Config, weights: Weights) -> list[list[float]]:
    """CLEX's frequencies for t = 1, 2, ... max_factor, in radians per position."""
    position, scaling = config.position, config.position.rope_scaling
    assert scaling is not None
    dim, length = int(config.model.head_dim * position.rotary_pct), position.original_length(config.model.seq_length)
    clex = Clex(dim, position.rotary_emb_base, length, scaling.max_factor, scaling.ode_step)
    clex.up.copy_(weights.read("positions.clex.up"))
    clex.down.copy_(weights.read("positions.clex.down"))
    return [clex.inverse_frequencies(t).tolist() for t in range(1, scaling.max_factor + 1)]


def _given(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names if values[name] is not None}


STOCK_SCALINGS = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
NOT_THEIRS = frozenset({"ramp"})
"""Options of extensions that transformers has no name for."""

Obstacle = Callable[[Config], bool]
"""Whether a configuration has something that an architecture cannot express."""


@dataclass(frozen=True)
class Exporter:
    """One architecture of transformers.

    Attributes:
        architecture: the class that loads it.
        rows: its names of the weights of a model.
        obstacles: what it cannot express.
        shape: its config.json without positions, apart from what all have in common.
        positions: what its config.json says of positions, from the weights by their names here.
    """

    architecture: str
    rows: Callable[[Config], tuple[weight_map.Row, ...]]
    obstacles: tuple[Obstacle, ...]
    shape: Callable[[Config], dict[str, Any]]
    positions: Callable[[Config, Weights], dict[str, Any]]


def _is(name: str, *allowed: Any) -> Obstacle:
    """An obstacle where a key of the model has none of these values."""
    return lambda config: getattr(config.model, name) not in allowed


def _scaling(config: Config) -> str:
    scaling = config.position.rope_scaling
    return scaling.rope_type if scaling is not None else "default"


POSITION_OBSTACLES: tuple[Obstacle, ...] = (
    lambda config: config.position.pos_emb != "rotary",
    lambda config: config.position.relative_positions is not None,
    lambda config: config.position.logit_scaling != "none",
    lambda config: _scaling(config) not in STOCK_SCALINGS,
    lambda config: _scaling(config) == "yarn" and getattr(config.position.rope_scaling, "ramp", None) != "dimension",
)
"""Of stock models."""

NEOX_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
"""Ours to theirs. Only what is read back as well."""

NEOX_OBSTACLES: tuple[Obstacle, ...] = (
    _is("norm", "layernorm"),
    _is("activation", *NEOX_ACTIVATIONS),
    _is("use_bias_in_norms", True),
    _is("use_bias_in_mlp", True),
    lambda config: config.model.num_kv_heads != config.model.num_attention_heads,
    lambda config: config.model.gpt_j_residual and config.model.gpt_j_tied,
)
LLAMA_OBSTACLES: tuple[Obstacle, ...] = (
    _is("norm", "rmsnorm"),
    _is("activation", "swiglu"),
    _is("gpt_j_residual", False),
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
        "attention_bias": config.model.use_bias_in_attn_linear,
        "mlp_bias": config.model.use_bias_in_mlp,
    }


def _neox_rope(config: Config, weights: Weights) -> dict[str, Any]:
    """With `pos_emb`, which transformers ignores: without it, such a folder could be one of the CoCA authors'."""
    rope = _rope_parameters(config) | {"partial_rotary_factor": config.position.rotary_pct}
    return {"rope_parameters": rope, "pos_emb": config.position.pos_emb}


def _llama_rope(config: Config, weights: Weights) -> dict[str, Any]:
    return {"rope_parameters": _rope_parameters(config)}


def _network(config: Config) -> dict[str, Any]:
    flat = config.flat()
    return {name: flat[name] for name in NETWORK_KEYS}


def _dense_keys(config: Config) -> dict[str, Any]:
    """Without `hidden_act` and `rms_norm_eps`: these models need not have them."""
    unsaid = ("hidden_act", "rms_norm_eps")
    return {key: value for key, value in _llama_keys(config).items() if key not in unsaid} | {NETWORK: _network(config)}


Rows = Callable[[Config], tuple[weight_map.Row, ...]]


def _remote(
    kind: str, names: Rows, obstacles: tuple[Obstacle, ...], shape: Callable[[Config], dict[str, Any]]
) -> Exporter:
    """An architecture of the modelling file; what stock transformers would read of positions says nothing."""

    def positions(config: Config, weights: Weights) -> dict[str, Any]:
        plain = {"rope_type": "default", "rope_theta": config.position.rotary_emb_base}
        return {"auto_map": auto_map(kind), "rope_parameters": plain, POSITION: describe_position(config, weights)}

    return Exporter(auto_map(kind)["AutoModelForCausalLM"].rpartition(".")[2], names, obstacles, shape, positions)


EXPORTERS: dict[str, Exporter] = {
    "gpt_neox": Exporter(
        "GPTNeoXForCausalLM",
        lambda config: weight_map.GPT_NEOX,
        (*POSITION_OBSTACLES, *NEOX_OBSTACLES),
        _neox_keys,
        _neox_rope,
    ),
    "llama": Exporter(
        "LlamaForCausalLM",
        lambda config: weight_map.llama("k_proj"),
        (*POSITION_OBSTACLES, lambda config: config.position.rotary_pct != 1, *LLAMA_OBSTACLES),
        _llama_keys,
        _llama_rope,
    ),
    "coca_gpt_neox": _remote("coca_gpt_neox", lambda config: rows("coca_gpt_neox"), NEOX_OBSTACLES, _neox_keys),
    "coca_llama": _remote("coca_llama", lambda config: rows("coca_llama"), LLAMA_OBSTACLES, _llama_keys),
    "coca_dense": _remote("coca_dense", lambda config: dense_rows(_network(config)), (), _dense_keys),
}
"""Every architecture that a model may be written as, by its `model_type`; the first that can express it is taken. The
last one can express every network that there is here.
"""


def choose(config: Config) -> str:
    """The `model_type` that expresses a model."""
    return next(kind for kind, exporter in EXPORTERS.items() if not any(has(config) for has in exporter.obstacles))


def describe(config: Config, kind: str, symbols: Symbols, weights: Weights) -> dict[str, dict[str, Any]]:
    """The contents of config.json and generation_config.json, by these names; `weights` are those that are written, by
    their names here.
    """
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
        "max_position_embeddings": _longest(config, kind),
        "tie_word_embeddings": not model.no_weight_tying,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_method_std,
        **{f"{name}_token_id": value for name, value in symbols._asdict().items()},
        **exporter.shape(config),
        **exporter.positions(config, weights),
    }
    if settings["max_position_embeddings"] != model.seq_length:
        settings[TRAINING_LENGTH] = model.seq_length
    unused = list(range(known, model.padded_vocab_size))
    # The end of text stands in for a pad token here alone: in config.json it would freeze that row of the embedding.
    end = symbols.eos[0] if isinstance(symbols.eos, list) else symbols.eos
    pad = end if symbols.pad is None else symbols.pad
    generation = {"do_sample": False, "eos_token_id": symbols.eos, "pad_token_id": pad}
    generation |= {"bos_token_id": symbols.bos} if symbols.bos is not None else {}
    generation |= {"suppress_tokens": unused} if unused else {}
    return {"config.json": settings, "generation_config.json": generation}


def _longest(config: Config, kind: str) -> int:
    """`max_position_embeddings`: the training length, except where stock transformers measures the extension by it."""
    trained, original = config.model.seq_length, config.position.original_length(config.model.seq_length)
    if kind in REMOTE_TYPES:
        return trained
    if _scaling(config) in MEASURED:
        return max(trained, original)
    return original if _scaling(config) in BY_MAXIMUM else trained


def _rope_parameters(config: Config) -> dict[str, Any]:
    position = config.position
    found: dict[str, Any] = {"rope_type": _scaling(config), "rope_theta": position.rotary_emb_base}
    for name in SCALING_OPTIONS[_scaling(config)]:
        value = getattr(position.rope_scaling, name)
        if value is not None and name not in NOT_THEIRS:
            found[name] = value
    if _scaling(config) in MEASURED:
        found["original_max_position_embeddings"] = position.original_length(config.model.seq_length)
    return found
