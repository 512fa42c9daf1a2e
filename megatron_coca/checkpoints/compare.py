"""Configuration keys that may differ between training and later use of the weights."""

import re
from pathlib import Path

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.config import KEYS, Config
from megatron_coca.config.load import Overrides
from megatron_coca.config.model import ROTATED_METHODS
from megatron_coca.config.source import given_values

EVALUATION_KEYS = frozenset(
    ("rope_scaling", "rotary_emb_base", "relative_positions", "logit_scaling", "attention_backend", "operand_kernel")
) | {"trainable"}
EVALUATION_GROUPS = frozenset({"data", "batch", "checkpoint", "logging", "launch"})
"""Keys, and groups of keys, that may differ at evaluation; any other difference makes it another model."""

TRAINED_CHOICES = {
    "rope_scaling": ("rope_type", frozenset({"clex"})),
    "relative_positions": ("type", frozenset({"inv_leaky_rerope"})),
    "logit_scaling": (None, frozenset({"log_n_trained"})),
}
"""Learned values of those keys: key, option (or None), values. They are used at evaluation if and only if they were in
training, with the same options and training length.
"""
LEARNED_WITH = {"rope_scaling": ("rotary_emb_base",)}
"""Further keys that must be the same for such a value."""

FIXED_BY_WEIGHTS = frozenset(
    ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "no_weight_tying", "activation")
) | {"bias_gelu_fusion", "gpt_j_residual", "gpt_j_tied", "norm"}
"""Keys that finetuning must share with the run that trained the weights; the position method may differ."""
NORM_EPSILONS = {"layernorm": "layernorm_epsilon", "rmsnorm": "rms_norm_epsilon", "scalenorm": "scalenorm_epsilon"}
POSITION_WEIGHTS = re.compile(r"positions\..+|embedding\.position_embeddings\..+|.+\.position_bias\..+")
"""Names of weights that belong to a position method."""


def differing_keys(
    saved: Config, wanted: Config, free_keys: frozenset[str], free_groups: frozenset[str] = frozenset()
) -> list[str]:
    """A line for every key in which two configurations differ, except free ones."""
    before, after = saved.flat(), wanted.flat()
    return [
        f"{key} (saved {before[key]!r}, now {after[key]!r})"
        for key, place in KEYS.items()
        if before[key] != after[key] and key not in free_keys and place.group not in free_groups
    ]


def changes_of(overrides: Overrides, saved: Config, config: Config) -> tuple[str, ...]:
    """A line for every key that overrides change from the configuration of a checkpoint."""
    kept = frozenset(key for key in KEYS if key.partition(".")[0] not in given_values(overrides))
    return tuple(differing_keys(saved, config, kept))


def refuse_other_model(folder: Path, saved: Config, wanted: Config, also_free: frozenset[str] = frozenset()) -> None:
    """Raise CheckpointError, naming all keys, if weights trained as `saved` cannot be evaluated as `wanted`."""
    differing = differing_keys(saved, wanted, EVALUATION_KEYS | also_free, EVALUATION_GROUPS)
    differing += [problem for key in TRAINED_CHOICES if (problem := _learned_difference(key, saved, wanted))]
    if differing:
        raise CheckpointError(f"{folder}: its weights cannot be evaluated with another {', '.join(differing)}")


def refuse_other_architecture(folder: Path, saved: Config, wanted: Config) -> None:
    """Raise CheckpointError, naming all keys, if a run of `wanted` cannot start from weights trained as `saved`.

    Only keys that change what the weights compute; differences of shape are found when they are loaded.
    """
    fixed = set(FIXED_BY_WEIGHTS)
    if saved.model.norm in NORM_EPSILONS:
        fixed.add(NORM_EPSILONS[saved.model.norm])
    if {saved.position.pos_emb, wanted.position.pos_emb} <= ROTATED_METHODS:
        fixed.add("rotary_pct")
    differing = differing_keys(saved, wanted, frozenset(KEYS) - fixed)
    if differing:
        raise CheckpointError(
            f"{folder}: a run cannot start from its weights with another {', '.join(differing)}; set these as saved"
        )


def _learned_difference(key: str, saved: Config, wanted: Config) -> str | None:
    """The difference in a key of `TRAINED_CHOICES`, None if there is none."""
    before, after = saved.flat(), wanted.flat()
    option, learned = TRAINED_CHOICES[key]
    trained, used = (
        value if value in learned else None
        for value in (values[key] if option is None else (values[key] or {}).get(option) for values in (before, after))
    )
    if trained != used and trained is not None:
        return f"{key} (trained with {trained}, which belongs to the weights)"
    if trained != used:
        return f"{key} ({used} is learned in training, and these weights were trained without it)"
    lengths = {config.position.original_length(config.model.seq_length) for config in (saved, wanted)}
    same = all(before[name] == after[name] for name in (key, *LEARNED_WITH.get(key, ())))
    if trained is None or (same and len(lengths) == 1):
        return None
    return f"{key} (trained with other options, base or training length of {trained})"
