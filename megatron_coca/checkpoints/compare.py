"""Compare configurations: which keys may differ between training and later use, and whether two models are the same."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_coca import methods
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.config import KEYS, Config, ModelConfig, norm_changes
from megatron_coca.config.model import DENSE, EXPERTS, GATED_ACTIVATIONS, GAU, GLOBAL
from megatron_coca.config.position import LayerType, PositionConfig, Selected

LAYER_KEYS = frozenset(
    ("rotary_frequencies", "rope_scaling", "rotary_emb_base", "relative_positions", "logit_scaling")
) | {"sliding_window_width", "attention_chunk_size", "attention_backend"}
"""Position keys that may change for evaluation, for the whole model or for one layer type."""
EVALUATION_KEYS = LAYER_KEYS | {"operand_kernel", "trainable", "lora", "layer_types", "imports"}
EVALUATION_GROUPS = frozenset({"data", "batch", "checkpoint", "logging", "launch"})
"""Keys and groups of keys that may change for evaluation. Changing any other key gives a different model."""

TRAINED_CHOICES = ("rope_scaling", "relative_positions", "logit_scaling", "forgetting_gate", "rotary_frequencies")
"""Configuration keys with at least one choice whose declaration has `trained`. A model must use such a choice at
evaluation if and only if it was trained with it. The options and the training length must be the same.
"""

FIXED_BY_WEIGHTS = frozenset(
    ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "kv_channels", "no_weight_tying", "activation")
) | {
    *("bias_gelu_fusion", "gpt_j_residual", "gpt_j_tied", "norm", "norm_position", "zero_centered_norms"),
    *("use_embedding_norm", "embedding_scale", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping"),
    *("attention_output_gate", "final_logit_scale", "opt_pos_emb_offset", "gau_width", "gau_key_width"),
    *("residual_scale", "clip_qkv", "use_bias_in_output_head", "sinusoidal_base", "embedding_width"),
    *("use_output_transform", "skip_first_norm"),
    *("head_shapes", "values_from_keys", "value_norm", "layer_scale", "unweighted_qk_norm"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm_epsilon"),
    *("mlp_config", "moe_num_experts", "moe_expert_interval", "moe_intermediate_size", "moe_shared_intermediate_size"),
    *("moe_top_k", "moe_shared_gate", "moe_router_scores", "moe_router_bias", "moe_norm_topk_prob"),
    *(
        "moe_routed_scaling_factor",
        "moe_weights_on_input",
        "moe_num_groups",
        "moe_top_k_groups",
        "moe_group_scores",
        "swiglu_limit",
        "swiglu_alpha",
    ),
}
"""Keys that must have the same values in finetuning and in the run that trained the weights. The position method may
change, and norms of queries and keys may be added.
"""
NORM_EPSILONS = {
    "layernorm": "layernorm_epsilon",
    "rmsnorm": "rms_norm_epsilon",
    "scalenorm": "scalenorm_epsilon",
    "non_parametric_layernorm": "layernorm_epsilon",
    "non_parametric_rmsnorm": "rms_norm_epsilon",
}
COMPARED = (
    *("no_weight_tying", "use_bias_in_attn_linear", "use_bias_in_qkv", "use_bias_in_mlp", "gpt_j_residual", "norm"),
    *("norm_position", "zero_centered_norms", "qk_norm", "use_qk_layernorm", "use_embedding_norm"),
    *("embedding_scale", "attn_logit_softcapping", "final_logit_softcapping", "final_logit_scale"),
    *("hidden_dropout", "attention_dropout", "embedding_dropout", "residual_scale", "attention_output_gate"),
    *("clip_qkv", "qk_norm_after_rotation", "use_bias_in_output_head", "embedding_width"),
    *("use_output_transform", "skip_first_norm"),
    *("value_norm", "layer_scale", "unweighted_qk_norm"),
)
"""Keys that have equal values in all models that compute the same function."""
PLAIN_FREQUENCIES = methods.find("rope_scaling", "default")
POSITION_WEIGHTS = re.compile(
    r"positions\..+|embedding\.position_embeddings\..+|.+\.position_(bias|sinks|factor|gates|offsets)\..+"
)
"""Pattern of the names of weights that belong to a position method."""


def differing_keys(
    saved: Config, wanted: Config, free_keys: frozenset[str], free_groups: frozenset[str] = frozenset()
) -> list[str]:
    """Return a description of each key with different values in two configurations.

    The keys in `free_keys` and the keys of the groups in `free_groups` are skipped.
    """
    before, after = saved.flat(), wanted.flat()
    return [
        f"{key} (saved {before[key]!r}, now {after[key]!r})"
        for key, place in KEYS.items()
        if before[key] != after[key] and key not in free_keys and place.group not in free_groups
    ]


def extension_note(saved: Config, wanted: Config) -> str | None:
    """Return a note if overrides replace the model's own frequency extension or combine it with another method, else
    None.

    The note states the length from which each extension extends.
    """
    before, after = saved.position, wanted.position
    keys = [key for key in ("relative_positions", "logit_scaling") if getattr(before, key) != getattr(after, key)]
    added = " and ".join(f"{choice.key} {choice.name}" for choice, _ in after.choices() if choice.key in keys)
    replaced = before.rope_scaling != after.rope_scaling
    if before.extension == PLAIN_FREQUENCIES or not (replaced or added):
        return None
    change = f"is replaced by {_with_length(wanted)}" if replaced else f"is used together with {added}"
    return f"the model's own rope_scaling {_with_length(saved)} {change}"


def _with_length(config: Config) -> str:
    extension, length = config.position.extension, config.position.original_length(config.model.seq_length)
    return f"{extension.name} (from a length of {length:,})" if extension.measures_length else extension.name


def check_same_model(folder: Path, saved: Config, wanted: Config, also_free: frozenset[str] = frozenset()) -> None:
    """Check that weights trained with the configuration `saved` can be evaluated with the configuration `wanted`.

    Raises CheckpointError, which names all keys that differ but must not.
    """
    differing = differing_keys(saved, wanted, EVALUATION_KEYS | also_free, EVALUATION_GROUPS)
    for name, before in saved.layer_types.items():
        after, where = wanted.position.of_type(name), "" if name == GLOBAL else f"layer_types.{name}."
        if name != GLOBAL:
            own, used = before.model_dump(), after.model_dump()
            differing += [
                f"{where}{key} (saved {own[key]!r}, now {used[key]!r})"
                for key in LayerType.model_fields
                if own[key] != used[key] and key not in LAYER_KEYS | also_free
            ]
        lengths = [config.position.original_length(config.model.seq_length) for config in (saved, wanted)]
        found = (_learned_difference(key, before, after, lengths) for key in TRAINED_CHOICES)
        differing += [f"{where}{problem}" for problem in found if problem]
    if differing:
        raise CheckpointError(
            f"{folder}: its weights cannot be evaluated with another {', '.join(differing)}; set the saved values"
        )


def check_same_architecture(folder: Path, saved: Config, wanted: Config) -> None:
    """Check that a run with `wanted` can start from weights trained with `saved`.

    Only keys that change how the weights are used are compared. Shape mismatches are found when the weights are loaded.
    `rotary_pct` may become smaller. This does not happen by accident, because its default is 1.

    Raises CheckpointError, which names all keys that differ but must not.
    """
    fixed = set(FIXED_BY_WEIGHTS)
    fixed |= epsilons(saved.model)
    rotary = saved.position.embedding.rotary and wanted.position.embedding.rotary
    if rotary and wanted.position.rotary_pct > saved.position.rotary_pct:
        fixed.add("rotary_pct")
    if saved.position.pos_emb == wanted.position.pos_emb and saved.model.qk_norm is not None:
        fixed.add("qk_norm_after_rotation")
    differing = differing_keys(saved, wanted, frozenset(KEYS) - fixed)
    differing += [f"{key} ({reason})" for key, reason in norm_changes(saved.model, wanted.model)]
    inner = [config.model.ffn_hidden_size for config in (saved, wanted)]
    if inner[0] != inner[1]:
        gated = 3 if saved.model.activation in GATED_ACTIVATIONS else 1
        differing.append(f"intermediate_size (saved {gated * inner[0]}, now a width of {inner[1]} inside the MLP)")
    if differing:
        raise CheckpointError(
            f"{folder}: a run cannot start from its weights with another {', '.join(differing)}; set the saved values"
        )


def _learned_difference(key: str, before: PositionConfig, after: PositionConfig, lengths: list[int]) -> str | None:
    """Return the part of an error message that describes a difference in the `trained` choice of `key`, or None.

    `lengths` are the training lengths of `before` and `after`.
    """
    trained, used = (
        next((choice.name for choice, _ in position.choices() if choice.key == key and choice.trained), None)
        for position in (before, after)
    )
    if trained != used and trained is not None:
        return f"{key} (trained with {trained}, which the weights depend on)"
    if trained != used:
        return f"{key} ({used} must be used in training, but these weights were trained without it)"
    same = getattr(before, key) == getattr(after, key) and lengths[0] == lengths[1]
    if trained is None or (same and (key != "rope_scaling" or before.rotary_emb_base == after.rotary_emb_base)):
        return None
    return f"{key} ({trained} was trained with other options, another base or another training length)"


def epsilons(model: ModelConfig) -> set[str]:
    """Return the configuration keys of the epsilons that a model uses in its norms."""
    of_qk = {"layernorm": "layernorm", "layernorm_by_head": "layernorm"}.get(model.qk_norm or "", "rmsnorm")
    unweighted = {NORM_EPSILONS["rmsnorm"]} if model.value_norm or model.unweighted_qk_norm else set()
    return {NORM_EPSILONS[model.norm]} | ({NORM_EPSILONS[of_qk]} if model.qk_norm is not None else set()) | unweighted


def comparable(config: Config) -> dict[str, Any]:
    """Return a description of the function that a model computes.

    Models that compute the same function have equal descriptions. An export compares the description of the model with
    the description of the exported configuration.
    """
    flat, model = config.flat(), config.model
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    lengths = ("seq_length", "padded_vocab_size")
    kinds = config.layer_types
    positions = []
    for name in model.layer_names:
        kind = kinds[name]
        own = kind.model_dump(exclude={"layer_types", "imports", "attention_backend", "operand_kernel"})
        shape = model.with_heads(name)
        own["heads"] = (shape.num_kv_heads, shape.head_dim, shape.values_from_keys)
        own["latent"] = _comparable_latents(shape)
        own["softmax_scale"] = model.softmax_scale or shape.score_dim**-0.5
        own["rope_scaling"] = None
        if (scaling := kind.rope_scaling) is not None and kind.extension.name != "default":
            measured = kind.original_length(model.seq_length) if kind.extension.measures_length else None
            own["rope_scaling"] = scaling.settings(model.seq_length) | {"name": kind.extension.name, "L": measured}
        if (chosen := kind.rotary_frequencies) is not None:
            original = kind.original_length(model.seq_length)
            own["rotary_frequencies"] = {"name": chosen.type, "L": original} | chosen.settings(original)
        if (distances := kind.relative_positions) is not None:
            own["relative_positions"] = {"name": distances.type} | distances.settings(model.seq_length)
        if isinstance(kind.logit_scaling, Selected):
            own["logit_scaling"] = {"name": kind.logit_scaling.type} | kind.logit_scaling.settings(model.seq_length)
        if not kind.embedding.rotary:
            own = {key: value for key, value in own.items() if not key.startswith(("rotary_", "rope_"))}
        positions.append(own)
    keys = (*COMPARED, *sorted(epsilons(model)))
    shown: dict[str, Any] = {name: getattr(model, name) for name in names + lengths} | {key: flat[key] for key in keys}
    shown["activation"] = "silu" if model.activation == "swish" else model.activation
    shown["tanh"] = model.activation == "gelu" and model.bias_gelu_fusion
    shown["one_norm"] = model.gpt_j_residual and model.gpt_j_tied
    shown["norm_bias"] = model.norm == "layernorm" and model.use_bias_in_norms
    absolute = {kind.pos_emb for kind in kinds.values()} & {"learned", "sinusoidal"}
    shown["offset"] = model.opt_pos_emb_offset if absolute else None
    shown["sinusoidal_base"] = model.sinusoidal_base if "sinusoidal" in absolute else None
    shown["rows"] = model.max_position_embeddings if config.position.embedding.weights == "table" else None
    return shown | _comparable_mlps(model) | {"positions": positions, "units": model.layer_names.count(GAU)}


def _comparable_latents(shape: ModelConfig) -> tuple[float | None, ...] | None:
    """Return the widths of latent attention and the epsilon of its norms, or None if there is no latent attention."""
    ranks = (shape.kv_lora_rank, shape.q_lora_rank)
    own = (*ranks, shape.unrotated_dim, shape.value_dim, shape.latent_norm_epsilon)
    return None if shape.kv_lora_rank is None else own


def _comparable_mlps(model: ModelConfig) -> dict[str, Any]:
    """Return the part of the description that covers the types of MLPs and the mixtures of experts."""
    kinds: dict[str, Any] = {"mlps": model.mlp_names}
    if EXPERTS not in model.mlp_names:
        return kinds
    several = model.moe_num_groups > 1
    groups = (model.moe_num_groups, *((model.moe_top_k_groups, model.moe_group_scores) if several else ()))
    clamped = (model.swiglu_limit, model.swiglu_alpha) if model.activation == "clamped_swiglu" else None
    return kinds | {
        "ffn_hidden_size": model.ffn_hidden_size if DENSE in model.mlp_names else None,
        "experts": (model.moe_num_experts, model.moe_top_k, model.expert_width, *groups, clamped),
        "shared": (model.moe_shared_intermediate_size, model.moe_shared_gate),
        "router": (model.moe_router_scores, model.moe_router_bias, model.moe_correction_bias),
        "weights": (model.moe_norm_topk_prob, model.moe_routed_scaling_factor, model.moe_weights_on_input),
    }


def contradicts(described: Mapping[str, Any], keys: Mapping[str, Any]) -> bool:
    """Return whether `keys` certainly describe another model than `described`. If the result is False, they still may.

    `described` is a result of `comparable`, and `keys` need not be validated. This check takes a hundredth of the time
    of `comparable`.
    """
    methods_differ = any(own["pos_emb"] != keys.get("pos_emb") for own in described["positions"])
    if methods_differ and "pos_emb" in keys and "attention_config" not in keys:  # one method for all layers
        return True
    return any(isinstance(keys.get(key), bool | str) and keys[key] != described[key] for key in COMPARED)
