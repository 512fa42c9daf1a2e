"""Checks of the maximal update parametrization: its own keys, and the keys that it does not support."""

from functools import partial

from megatron_coca.config.checks.layers import types_of
from megatron_coca.config.checks.recording import Check
from megatron_coca.config.model import GAU, ModelConfig
from megatron_coca.config.schema import Settings

WITHOUT_A_DEVIATION = frozenset({"orthogonal", "scaled_orthogonal", "xavier_uniform", "xavier_normal"})
"""Initialization methods whose spread follows from the shape of each matrix."""
FACTORS = {
    "embedding_scale": ("derived_embedding_scale", "mup_embedding_mult"),
    "softmax_scale": ("derived_softmax_scale", "mup_attn_temp"),
    "final_logit_scale": ("derived_logit_scale", "mup_output_temp"),
}
"""The keys that `use_mup` sets. Each has the property that returns its value, and the key that changes this value."""
OWN = ("mup_init_scale", "mup_attn_temp", "mup_output_temp", "mup_embedding_mult")


def _base(settings: Settings) -> str | None:
    model = settings.model
    if model.use_mup and model.mup_base_hidden_size is None:
        return (
            "not set; with use_mup, set it to the hidden_size of the model for which the learning rate was chosen,"
            " which GPT-NeoX reads from base_shapes_file"
        )
    unused = model.mup_base_hidden_size is not None and not model.use_mup
    return "has no effect without use_mup; set use_mup=true, or remove it" if unused else None


def _own(key: str, settings: Settings) -> str | None:
    unused = not settings.model.use_mup and getattr(settings.model, key) != ModelConfig.model_fields[key].default
    return "has no effect without use_mup; set use_mup=true, or remove it" if unused else None


def _factor(key: str, settings: Settings) -> str | None:
    model = settings.model
    if not model.use_mup:
        return None
    given, (name, own) = getattr(model, key), FACTORS[key]
    expected = getattr(model, name)
    return None if given == expected else f"use_mup sets it to {expected}, not {given}; remove it, and set {own}"


def _initialization(key: str, settings: Settings) -> str | None:
    method = getattr(settings.model, key)
    if not settings.model.use_mup or method not in WITHOUT_A_DEVIATION:
        return None
    return f"{method} is not supported with use_mup, which scales standard deviations; set {key}=normal"


def _mup(settings: Settings) -> str | None:
    """Check what the parametrization does not support."""
    model = settings.model
    if not model.use_mup:
        return None
    if settings.optimizer.type == "sgd":
        return (
            "not supported with optimizer.type sgd: its steps grow with the gradient, and gradient_clipping changes the"
            " gradient by a factor that depends on the width; set optimizer.type=AdamW"
        )
    if GAU in model.layer_names:
        return "not supported with layers of type gau, which scale by their own key width; remove one of the two"
    if model.embedding_width is not None:
        return "not supported with embedding_width, which is a second width; remove one of the two"
    if any(shape.kv_channels is not None for shape in model.head_shapes.values()):
        return "not supported with head_shapes that set kv_channels: layers would need their own softmax_scale"
    if any(kind.pos_emb == "rpe" for kind in types_of(settings).values()):
        return "not supported with pos_emb rpe, whose bias grows with the width of a head; set another pos_emb"
    return None


CHECKS = (
    Check("use_mup", _mup),
    Check("mup_base_hidden_size", _base),
    *(Check(key, partial(_own, key)) for key in OWN),
    *(Check(key, partial(_factor, key)) for key in FACTORS),
    *(Check(key, partial(_initialization, key)) for key in ("init_method", "output_layer_init_method")),
)
