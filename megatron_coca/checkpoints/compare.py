"""Which keys may change between training and evaluation without making another model of it."""

import re
from pathlib import Path

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.config import KEYS, Config
from megatron_coca.config.model import ROTATED_METHODS

EVALUATION_KEYS = frozenset(
    {
        "rope_scaling",
        "rotary_emb_base",
        "relative_positions",
        "logit_scaling",
        "attention_backend",
        "operand_kernel",
        "trainable",
    }
)
EVALUATION_GROUPS = frozenset({"data", "batch", "checkpoint", "logging", "launch"})
"""What may differ from training when a checkpoint is evaluated; anything else would be another model."""

TRAINED_CHOICES = {
    "rope_scaling": ("rope_type", frozenset({"clex"})),
    "relative_positions": ("type", frozenset({"inv_leaky_rerope"})),
    "logit_scaling": (None, frozenset({"log_n_trained"})),
}
"""Choices of those keys that belong to the weights: the key, the name inside it or None, and the choices. A model is
evaluated with them if and only if it was trained with them, options and lengths alike.
"""

LEARNED_WITH = {"rope_scaling": ("rotary_emb_base",)}
"""Further keys that a choice which belongs to the weights was learned with."""


FIXED_BY_WEIGHTS = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_kv_heads",
        "no_weight_tying",
        "activation",
        "bias_gelu_fusion",
        "gpt_j_residual",
        "gpt_j_tied",
        "norm",
    }
)
"""What a run that starts from weights must share with the one that trained them; how positions enter is its choice."""

NORM_EPSILONS = {"layernorm": "layernorm_epsilon", "rmsnorm": "rms_norm_epsilon", "scalenorm": "scalenorm_epsilon"}
POSITION_WEIGHTS = re.compile(r"positions\..+|embedding\.position_embeddings\..+|.+\.position_bias\..+")
"""Names of the weights that belong to a position method alone."""


def differing_keys(
    saved: Config, wanted: Config, free_keys: frozenset[str], free_groups: frozenset[str] = frozenset()
) -> list[str]:
    """A line for every key in which two configurations differ, the free ones aside."""
    before, after = saved.flat(), wanted.flat()
    return [
        f"{key} (saved {before[key]!r}, now {after[key]!r})"
        for key, place in KEYS.items()
        if before[key] != after[key] and key not in free_keys and place.group not in free_groups
    ]


def refuse_other_model(folder: Path, saved: Config, wanted: Config, also_free: frozenset[str] = frozenset()) -> None:
    """Check that weights trained as `saved` may be evaluated as `wanted`.

    Raises:
        CheckpointError: a key differs that the weights depend on; it names all of them.
    """
    differing = differing_keys(saved, wanted, EVALUATION_KEYS | also_free, EVALUATION_GROUPS)
    differing += [_trained_otherwise(key, saved, wanted) for key in TRAINED_CHOICES if _bound(key, saved, wanted)]
    if differing:
        raise CheckpointError(f"{folder}: its weights cannot be evaluated with another {', '.join(differing)}")


def refuse_other_architecture(folder: Path, saved: Config, wanted: Config) -> None:
    """Check that a run of `wanted` may start from weights trained as `saved`. What shapes tell is left to them.

    Raises:
        CheckpointError: a key differs that changes what the weights compute; it names all of them.
    """
    fixed = (
        FIXED_BY_WEIGHTS | {NORM_EPSILONS[saved.model.norm]} if saved.model.norm in NORM_EPSILONS else FIXED_BY_WEIGHTS
    )
    if {saved.position.pos_emb, wanted.position.pos_emb} <= ROTATED_METHODS:
        fixed |= {"rotary_pct"}
    differing = differing_keys(saved, wanted, frozenset(KEYS) - fixed)
    if differing:
        raise CheckpointError(
            f"{folder}: a run cannot start from its weights with another {', '.join(differing)}; set these as saved"
        )


def _choice(key: str, config: Config) -> str | None:
    """The choice made by `key` where it is one that belongs to the weights, else None."""
    name, trained = TRAINED_CHOICES[key]
    value = config.flat()[key]
    choice = value if name is None else (value or {}).get(name)
    return choice if choice in trained else None


def _bound(key: str, saved: Config, wanted: Config) -> bool:
    if _choice(key, saved) != _choice(key, wanted):
        return True
    if _choice(key, saved) is None:
        return False
    before, after = saved.flat(), wanted.flat()
    same = all(before[name] == after[name] for name in (key, *LEARNED_WITH.get(key, ())))
    lengths = {config.position.original_length(config.model.seq_length) for config in (saved, wanted)}
    return not same or len(lengths) > 1


def _trained_otherwise(key: str, saved: Config, wanted: Config) -> str:
    if _choice(key, saved) and _choice(key, saved) == _choice(key, wanted):
        return f"{key} (trained with other options, base or training length of {_choice(key, saved)})"
    if _choice(key, saved):
        return f"{key} (trained with {_choice(key, saved)}, which belongs to the weights)"
    return f"{key} ({_choice(key, wanted)} is learned in training, and these weights were trained without it)"
