"""From configuration to a position method: each key picks from its table, and the picks are put together."""

from collections.abc import Callable

from megatron_coca.attention.method import OPERAND_MAKERS, BiasSource, PositionMethod
from megatron_coca.attention.positions.bias import (
    AlibiBias,
    LearnedBuckets,
    LearnedKerpleLog,
    LearnedKerplePower,
    alibi_slopes,
)
from megatron_coca.attention.positions.clex import Clex
from megatron_coca.attention.positions.distance_maps import DISTANCE_MAPS, TRAINING_ONLY, UNMAPPED, MapSettings, Part
from megatron_coca.attention.positions.forms import LOGIT_SCALINGS, SCORE_FORMS
from megatron_coca.attention.positions.frequencies import Rotary, Scaling
from megatron_coca.config import ModelConfig, PositionConfig

LEARNED_MODULES = (LearnedBuckets, LearnedKerpleLog, LearnedKerplePower, Clex)
"""Modules that a method may add to a model; each draws its own first parameters."""

BiasChoice = Callable[[PositionConfig, ModelConfig], BiasSource]


def _alibi(position: PositionConfig, model: ModelConfig) -> BiasSource:
    return BiasSource("linear", fixed=AlibiBias(alibi_slopes(model.num_attention_heads)))


def _kerple_log(position: PositionConfig, model: ModelConfig) -> BiasSource:
    return BiasSource("log", by_layer=lambda: LearnedKerpleLog(model.num_attention_heads))


def _kerple_power(position: PositionConfig, model: ModelConfig) -> BiasSource:
    return BiasSource("power", by_layer=lambda: LearnedKerplePower(model.num_attention_heads))


def _buckets(position: PositionConfig, model: ModelConfig) -> BiasSource:
    buckets, furthest = position.rpe_num_buckets, position.rpe_max_distance
    return BiasSource(
        "buckets", shared=lambda: LearnedBuckets(model.num_attention_heads, model.head_dim, buckets, furthest)
    )


BIASES: dict[str, BiasChoice] = {
    "alibi": _alibi,
    "kerple_log": _kerple_log,
    "kerple_power": _kerple_power,
    "rpe": _buckets,
}
"""GPT-NeoX learns one T5 table for all layers; KERPLE's authors learn a kernel for each."""


def build_method(position: PositionConfig, model: ModelConfig) -> PositionMethod:
    """The method that the configuration names, for the model's head shape and training length."""
    form, parts = SCORE_FORMS[position.pos_emb], _parts(position, model.seq_length)
    evaluated = position.relative_positions is None or position.relative_positions.type not in TRAINING_ONLY
    return PositionMethod(
        name=position.pos_emb,
        form=form,
        rotary=_rotary(position, model) if form.rotary else None,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        training_length=model.seq_length,
        bias=BIASES[position.pos_emb](position, model) if position.pos_emb in BIASES else BiasSource(),
        clex=_clex(position, model),
        parts=parts if evaluated else UNMAPPED,
        trained_parts=parts,
        logit_scaling=LOGIT_SCALINGS[position.logit_scaling],
        decay=position.pos_emb == "xpos",
        operands=OPERAND_MAKERS[position.operand_kernel],
    )


def _rotary_dim(position: PositionConfig, model: ModelConfig) -> int:
    return int(model.head_dim * position.rotary_pct)


def _rotary(position: PositionConfig, model: ModelConfig) -> Rotary:
    given = position.rope_scaling
    scaling = Scaling(**given.rules()) if given is not None and given.rope_type != "clex" else Scaling()
    original = position.original_length(model.seq_length)
    return Rotary(_rotary_dim(position, model), float(position.rotary_emb_base), original, scaling)


def _clex(position: PositionConfig, model: ModelConfig) -> Callable[[], Clex] | None:
    scaling = position.rope_scaling
    if scaling is None or scaling.rope_type != "clex":
        return None
    dim, base = _rotary_dim(position, model), float(position.rotary_emb_base)
    original = position.original_length(model.seq_length)
    return lambda: Clex(dim, base, original, scaling.max_factor, scaling.ode_step)


def _parts(position: PositionConfig, training_length: int) -> tuple[Part, ...]:
    given = position.relative_positions
    if given is None:
        return UNMAPPED
    settings = MapSettings(**given.settings(training_length))
    return DISTANCE_MAPS[given.type](settings)
