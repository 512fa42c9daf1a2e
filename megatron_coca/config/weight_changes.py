"""Changes of the model between two stages, or between a loaded run and the run that continues it.

Weights and optimizer states are carried over, so both models need the same weights. Only norms of queries and keys can
be added, because they have obvious initial values.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_coca import methods
from megatron_coca.config.model import GLOBAL, ModelConfig
from megatron_coca.config.position import PositionConfig
from megatron_coca.config.schema import Settings

FORM_KEYS = frozenset({"pos_emb", "pos_emb_options", "qk_norm", "qk_norm_after_rotation", "use_qk_layernorm"})
"""Keys that may change in a later stage, or in a run that continues a loaded checkpoint. Changes that `weight_changes`
yields are not allowed.
"""
ROTARY_KEYS = frozenset({"rotary_frequencies", "rope_scaling", "relative_positions", "training_positions"})
"""Keys that may change together with `pos_emb` if only one of the two methods rotates."""
ANGLES = {"offset": ("zero", "uniform", "free"), "initial_angle": ("random",)}
"""Options of `pos_emb`, each with the values for which every head has angles as weights."""


class WeightChange(NamedTuple):
    """A key with two values that need different weights, and the reason."""

    key: str
    reason: str


def form_keys(before: Settings, after: Settings) -> frozenset[str]:
    """Return the keys that may differ between a loaded run and the run that continues it."""
    rotary = [settings.position.embedding.rotary for settings in (before, after)]
    return FORM_KEYS | (ROTARY_KEYS if rotary[0] != rotary[1] else frozenset())


def adds_norms(before: ModelConfig, after: ModelConfig) -> bool:
    """Return whether only the second model has norms of queries and keys."""
    return not _norms(before) and bool(_norms(after))


def norm_changes(before: ModelConfig, after: ModelConfig) -> Iterator[WeightChange]:
    """Yield the change of the norms of queries and keys, unless they are the same or are only added."""
    if _norms(before) != _norms(after) and not adds_norms(before, after):
        key = "qk_norm" if before.qk_norm != after.qk_norm else "use_qk_layernorm"
        values = _norms(before), _norms(after) or "none"
        yield WeightChange(key, f"norms of queries and keys can only be added, but {values[0]} becomes {values[1]}")


def weight_changes(before: Settings, after: Settings) -> Iterator[WeightChange]:
    """Yield every change of a position key or of the norms of queries and keys that needs other weights."""
    yield from norm_changes(before.model, after.model)
    names = before.model.layer_names
    if names != after.model.layer_names:
        return
    old, new = before.position.of_types(names), after.position.of_types(names)
    for name in old:
        place = "" if name == GLOBAL else f"layer_types.{name}."
        for key, reason in _type_changes(before, after, old[name], new[name]):
            yield WeightChange(f"{place}{key}", reason)


def _type_changes(
    before: Settings, after: Settings, old: PositionConfig, new: PositionConfig
) -> Iterator[tuple[str, str]]:
    """Yield the keys of one layer type that need other weights, with the reasons."""
    learns = [learner for kind in (old, new) if (learner := _learner(kind, after.model.seq_length))]
    if learns and old.score_form != new.score_form:
        shared = " | ".join(methods.names("pos_emb", weights=None))
        options = old.pos_emb == new.pos_emb
        change = f"the options of {old.pos_emb} change" if options else f"{old.pos_emb} becomes {new.pos_emb}"
        reason = f"{change}, but {learns[0]} has weights of its own (methods with the same weights: {shared})"
        yield "pos_emb_options" if options else "pos_emb", reason
    elif old.pos_emb == "learned" and before.model.max_position_embeddings != after.model.max_position_embeddings:
        rows = [settings.model.max_position_embeddings for settings in (before, after)]
        yield "max_position_embeddings", f"the table of learned positions changes from {rows[0]} to {rows[1]} rows"
    if learned := [kind.extension.name for kind in (old, new) if kind.extension.learned]:
        pairs = (old, before.model.seq_length), (new, after.model.seq_length)
        used = [(kind.rope_scaling, kind.rotary_emb_base, kind.original_length(length)) for kind, length in pairs]
        if used[0] != used[1]:
            yield "rope_scaling", f"{learned[0]} learns frequencies for one original length, base and set of options"
    if old.logit_scaling != new.logit_scaling and (old.scaling.learned or new.scaling.learned):
        names = old.scaling.name, new.scaling.name
        learner = names[0] if old.scaling.learned else names[1]
        yield "logit_scaling", f"{names[0]} becomes {names[1]}, but {learner} learns its factors"
    if old.forgetting_gate != new.forgetting_gate:
        yield "forgetting_gate", "the gates have learned weights"
    if bool(old.sink_logits) != bool(new.sink_logits):
        yield "sink_logits", "the scores of the sinks are learned"


def _learner(kind: PositionConfig, seq_length: int) -> str | None:
    """Return the position method and its option that adds weights to the model, as text; None if it adds no weights."""
    embedding, given = next(kind.choices())
    options = embedding.resolved(given, seq_length)
    angles = [name for name in ANGLES if embedding.option(name) is not None]
    if not angles:
        return kind.pos_emb if kind.embedding.weights is not None else None
    own = next((name for name in angles if options[name] in ANGLES[name]), None)
    return own and f"{kind.pos_emb} with {own} {options[own]}"


def _norms(model: ModelConfig) -> str | None:
    """Return the norm of queries and keys as text, or None if there is none."""
    return "use_qk_layernorm" if model.use_qk_layernorm else model.qk_norm and f"qk_norm {model.qk_norm}"
