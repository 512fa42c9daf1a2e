"""Checks of latent attention: its widths, and the features that it does not support."""

from functools import partial

from megatron_coca.config.checks.layers import types_of
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.model import GAU
from megatron_coca.config.optimization import TrainablePart
from megatron_coca.config.schema import Settings

WIDTHS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SHARED: tuple[TrainablePart, TrainablePart] = ("key", "value")


def _width(key: str, settings: Settings) -> str | None:
    absent = getattr(settings.model, key) is not None and settings.model.kv_lora_rank is None
    return "has no effect without latent attention; set kv_lora_rank, or remove it" if absent else None


def _values(settings: Settings) -> str | None:
    model = settings.model
    if model.kv_lora_rank is None or model.value_dim <= model.score_dim:
        return None
    return (
        f"{model.value_dim} exceeds the {model.score_dim} features of queries and keys, and kernels do not support"
        " wider values; lower it"
    )


def _latent(settings: Settings) -> str | None:
    """Check what latent attention does not support."""
    model, parallel = settings.model, settings.parallel
    if model.kv_lora_rank is None:
        return None
    per_head = "the key of a head has features of its own and features that all heads share"
    unsupported = {
        "num_kv_heads": (model.num_kv_heads != model.num_attention_heads, "every head has a key and a value"),
        "kv_channels": (model.kv_channels, "qk_nope_head_dim, qk_rope_head_dim and v_head_dim are its widths"),
        "head_shapes": (model.head_shapes, "all layers have the same heads"),
        "use_qk_layernorm": (model.use_qk_layernorm, per_head),
        "qk_norm": (model.qk_norm, per_head),
        "unweighted_qk_norm": (model.unweighted_qk_norm, per_head),
        "clip_qkv": (model.clip_qkv, "a cache keeps latents, and clipped features are not linear maps of them"),
        "values_from_keys": (model.values_from_keys, "keys and values have maps of their own"),
        "value_norm": (model.value_norm, "a cache keeps latents, and normalised values are not linear maps of them"),
        "model_parallel_size": (parallel.model_parallel_size > 1, "all heads read the same latents"),
    }
    found = next((f"{name}, because {reason}" for name, (given, reason) in unsupported.items() if given), None)
    if found is not None:
        return f"not supported with {found}; remove one of the two"
    if GAU in model.layer_names:
        return "not supported with layers of type gau, which have one head; remove one of the two"
    if len({settings.optimizer.trains(part) for part in SHARED}) > 1:
        return "one matrix computes keys and values; train both key and value, or neither"
    lora = settings.optimizer.lora
    if lora is not None and len({part in lora.targets for part in SHARED}) > 1:
        return "one matrix computes keys and values; list both key and value in lora.targets, or neither"
    return None


def _strengths(settings: Settings) -> str | None:
    for position in types_of(settings).values():
        given = position.rope_scaling.given if position.rope_scaling is not None else {}
        own, of_all = given.get("mscale"), given.get("mscale_all_dim")
        if of_all is not None and settings.model.kv_lora_rank is None:
            return "mscale_all_dim is only for latent attention; set attention_factor instead, or kv_lora_rank"
        if own is not None and (of_all is None or given.get("attention_factor") is not None):
            return "mscale has an effect only with mscale_all_dim and without attention_factor; remove it"
    return None


CHECKS = (
    Check("kv_lora_rank", _latent),
    *(Check(key, partial(_width, key)) for key in WIDTHS),
    Check("v_head_dim", _values),
    Check("rope_scaling", _strengths),
)
