"""What must hold between the parts that are trained and the weights that the model has."""

from collections.abc import Callable

from megatron_coca.config.position_checks import Check
from megatron_coca.config.schema import Settings
from megatron_coca.config.training import Part

LEARNED_POSITIONS = frozenset({"learned", "rpe", "kerple_log", "kerple_power"})
"""Position methods with weights of their own; CLEX, an extension of frequencies, has some too."""


def _learns_positions(settings: Settings) -> bool:
    scaling = settings.position.rope_scaling
    return settings.position.pos_emb in LEARNED_POSITIONS or (scaling is not None and scaling.rope_type == "clex")


ABSENT: dict[Part, tuple[Callable[[Settings], bool], str]] = {
    "output_head": (
        lambda settings: not settings.model.no_weight_tying,
        "output_head has no weights of its own while no_weight_tying is false: it is the embedding; name embedding",
    ),
    "norms": (
        lambda settings: settings.model.norm == "non_parametric_layernorm",
        "norms have no weights with norm non_parametric_layernorm; leave norms out",
    ),
    "positions": (
        lambda settings: not _learns_positions(settings),
        "positions have no weights with this pos_emb and rope_scaling; leave positions out",
    ),
}
"""Parts that a model may lack: when it does, and what to say."""


def _present(settings: Settings) -> str | None:
    parts = settings.optimizer.trainable or []
    return next((reason for part, (lacks, reason) in ABSENT.items() if part in parts and lacks(settings)), None)


def _named_once(settings: Settings) -> str | None:
    parts = settings.optimizer.trainable or []
    twice = sorted({part for part in parts if parts.count(part) > 1})
    return f"{' and '.join(twice)} named more than once; name each part once" if twice else None


TRAINABLE_CHECKS: tuple[Check, ...] = (
    Check(("trainable",), _named_once),
    Check(("trainable", "no_weight_tying", "norm", "pos_emb", "rope_scaling"), _present),
)
