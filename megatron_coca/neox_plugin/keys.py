"""Add the plugin's YAML keys to GPT-NeoX, and translate this package's keys for GPT-NeoX."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

from megatron_coca import methods
from megatron_coca.checkpoints.neox.names import EXTENDING
from megatron_coca.config import KEYS, Config, ConfigError, load_config
from megatron_coca.config.base import nearest
from megatron_coca.config.position import PositionConfig

logger = logging.getLogger(__name__)

METHODS = methods.names("pos_emb", neox="plugin")
"""Values of `pos_emb` that GPT-NeoX does not have."""

BIASED = methods.names("pos_emb", biased=True, neox="upstream")
"""Values of `pos_emb` that only GPT-NeoX's own attention supports."""

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "attention_dropout")
POSITION = (
    *("pos_emb", "pos_emb_options", "rotary_pct", "rotary_emb_base", *EXTENDING, "sliding_window_width"),
    *("attention_backend", "operand_kernel"),
)
"""Keys of the position method. With the plugin active, all of them are fields of NeoXArgs."""

GROUPS_WITHOUT_EFFECT = frozenset({"faults", "checkpoint", "logging", "launch"})
KEYS_WITHOUT_EFFECT = frozenset({"loss_chunk_size", "loss_kernel", "torch_compile", "num_workers", "data_root"})
"""Keys of this package that do not change results. The plugin ignores them with a warning."""

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")

CONTRADICTING: dict[str, tuple[Any, str]] = {
    "use_mup": (
        False,
        "the plugin's attention always divides scores by sqrt(head_dim); remove the key",
    ),
    "te_mha": (False, "Transformer Engine's attention does not support the position method; remove the key"),
    "te_fp8_mha": (False, "Transformer Engine's attention does not support the position method; remove the key"),
}
"""GPT-NeoX keys that contradict the plugin's attention, each with its default and the error for other values."""

NO_POSITIONS = "GPT-NeoX's batches contain only tokens, and its model counts positions from 0; use megatron-coca train"


class NewField(NamedTuple):
    """A field that the plugin adds to NeoXArgs: the base class that gets it, its type and its default."""

    owner: str
    type: Any
    default: Any


def _choices(name: str) -> Any:
    return Literal[get_args(PositionConfig.model_fields[name].annotation)]


FIELDS: dict[str, NewField] = {
    "pos_emb_options": NewField("NeoXArgsModel", dict, None),
    "rotary_frequencies": NewField("NeoXArgsModel", dict, None),
    "rope_scaling": NewField("NeoXArgsModel", dict, None),
    "relative_positions": NewField("NeoXArgsModel", dict, None),
    "logit_scaling": NewField("NeoXArgsModel", Literal[tuple(methods.TABLES["logit_scaling"])], "none"),
    "attention_backend": NewField("NeoXArgsModel", _choices("attention_backend"), "auto"),
    "operand_kernel": NewField("NeoXArgsModel", _choices("operand_kernel"), "auto"),
    "lr_warmup_init": NewField("NeoXArgsLRScheduler", float, 0.0),
    "vocab_size": NewField("NeoXArgsTokenizer", int, None),
}
EXPECTED: dict[Any, tuple[type, str]] = {
    dict: (dict, "a mapping, for example {rope_type: dynamic, factor: 4.0} or {type: rerope, window: 256}"),
    float: (float, "a number"),
    int: (int, "an integer"),
}
"""For each type of a new field, the Python type to check and its name in messages. `problems_of` checks choices."""

NEW_CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "pos_emb": ("NeoXArgsModel", METHODS),
    "lr_decay_style": ("NeoXArgsLRScheduler", ("linear_to_min_lr",)),
}
"""Existing fields, each with the base class of NeoXArgs that has the field, and the additional values."""


def extend_fields(arguments: type) -> None:
    """Add FIELDS and NEW_CHOICES to `arguments` (NeoXArgs) and its base classes."""
    bases: dict[str, Any] = {kind.__name__: kind for kind in arguments.__bases__}
    choices: dict[str, Any] = {}
    for name, (owner, values) in NEW_CHOICES.items():
        choices[name] = Literal[(*get_args(bases[owner].__dataclass_fields__[name].type), *values)]
    for name, added in FIELDS.items():
        bases[added.owner].__annotations__[name] = added.type
        setattr(bases[added.owner], name, added.default)
    for kind in (*{bases[added.owner] for added in FIELDS.values()}, arguments):
        for method in ("__init__", "__repr__", "__eq__"):  # `dataclass` does not replace existing methods
            if method in vars(kind):
                delattr(kind, method)
        dataclass(kind)
    for kind in (arguments, *bases.values()):
        for name, annotation in choices.items():
            if name in kind.__dataclass_fields__:
                kind.__dataclass_fields__[name].type = annotation


def uses_plugin(neox_args: Any) -> bool:
    """Return whether the arguments select the plugin's attention."""
    if neox_args.pos_emb.lower() in METHODS:
        return True
    given = (neox_args.rotary_frequencies, neox_args.rope_scaling, neox_args.relative_positions)
    return any(given) or neox_args.logit_scaling != "none"


def resolve(neox_args: Any) -> Config:
    """Return the settings of the plugin's attention as a configuration of this package.

    Raises ConfigError if the keys are not valid, or if the plugin's attention does not support them.
    """
    problems = [
        f"{name}: {reason}"
        for name, (default, reason) in CONTRADICTING.items()
        if getattr(neox_args, name, default) != default
    ]
    kinds = set(neox_args.attention_config or ()) - {"global", "flash"}
    problems += [f"attention_config: {', '.join(sorted(kinds))} is not supported; use global or flash"] if kinds else []
    scaling = neox_args.rope_scaling or {}
    given = {
        "rotary_frequencies": (neox_args.rotary_frequencies or {}).get("type"),
        "rope_scaling": scaling.get("rope_type", scaling.get("type")),
        "relative_positions": (neox_args.relative_positions or {}).get("type"),
        "logit_scaling": neox_args.logit_scaling,
    }
    chosen = [methods.TABLES[key][name] for key, name in given.items() if name in methods.TABLES[key]]
    problems += [f"{choice.key}: {choice.name}: {choice.neox}" for choice in chosen if choice.neox != "plugin"]
    if (neox_args.pos_emb_options or {}).get("initial_angle") == "random":
        problems.append("pos_emb_options: GPT-NeoX would train random angles too; set initial_angle to a number")
    if neox_args.pos_emb.lower() in BIASED:
        problems.append(
            f"pos_emb: {neox_args.pos_emb} needs GPT-NeoX's own attention, which does not support "
            f"{', '.join(EXTENDING)}; remove these keys"
        )
    if problems:
        raise ConfigError(*problems)
    values = {name: getattr(neox_args, name) for name in (*SHAPE, *POSITION)}
    values |= {"pos_emb": neox_args.pos_emb.lower(), "make_vocab_size_divisible_by": 1}
    # GPT-NeoX's seq_length is the longest input of a run. In generation it may exceed the training length. Then only
    # original_max_position_embeddings contains the training length.
    values["seq_length"] = scaling.get("original_max_position_embeddings") or values["seq_length"]
    return load_config([], {name: value for name, value in values.items() if value is not None})


def translated(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the values of a YAML file to keyword arguments of NeoXArgs; `known` maps its fields to their types.

    Raises ConfigError if a key is unknown or has no counterpart in GPT-NeoX, or if a value is not valid.
    """
    problems = problems_of(values, known)
    if problems:
        raise ConfigError(*problems)
    ignored = [name for name in values if name not in known and _without_effect(name)]
    if ignored:
        logger.warning("%s: no effect in GPT-NeoX", ", ".join(ignored))
    translated: dict[str, Any] = {}
    if all(values.get(name) is not None for name in BATCH_SIZES):
        # GPT-NeoX's default of 1 would contradict the two sizes. With null, GPT-NeoX derives the number from them, as
        # we do.
        translated["gradient_accumulation_steps"] = None
    for name, value in values.items():
        if name not in ignored and not _unset(name, value):
            translated[name] = _typed(name, value)
    if translated.get("max_position_embeddings") is None and "seq_length" in translated:
        translated["max_position_embeddings"] = translated["seq_length"]  # GPT-NeoX has no default
    return translated


def problems_of(values: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Return an error message for each invalid key or choice; `known` maps the fields of NeoXArgs to their types."""
    embedding = methods.TABLES["pos_emb"].get(str(values.get("pos_emb")))
    if embedding is not None and embedding.neox not in ("upstream", "plugin"):
        return [f"pos_emb: {embedding.name}: {embedding.neox}"]
    problems = [
        f"{name}: not a key of GPT-NeoX or the plugin{nearest(name, known)}"
        for name in values
        if name not in known and name not in KEYS
    ]
    for name in (*NEW_CHOICES, *FIELDS):  # case-insensitive, as in GPT-NeoX
        choices, value = (get_args(known[name]) if get_origin(known[name]) is Literal else ()), values.get(name)
        if not choices or name not in values or _unset(name, value):
            continue
        if not isinstance(value, str) or value.lower() not in {choice.lower() for choice in choices}:
            problems.append(f"{name}: `{value}` is not one of {' | '.join(choices)}{nearest(str(value), choices)}")
    if values.get("training_positions") is not None:
        problems.append(f"training_positions: {NO_POSITIONS}")
    foreign = [name for name in values if name not in known and name in KEYS and not _without_effect(name)]
    foreign = [name for name in foreign if name != "training_positions"]
    if foreign:
        problems.append(f"{', '.join(foreign)}: supported by megatron-coca train, not by GPT-NeoX; remove it")
    return problems


def _without_effect(name: str) -> bool:
    return name in KEYS and (KEYS[name].group in GROUPS_WITHOUT_EFFECT or name in KEYS_WITHOUT_EFFECT)


def _unset(name: str, value: Any) -> bool:
    """Return whether a plugin key is null, which means "not set". For GPT-NeoX's own keys, null keeps its meaning."""
    return name in FIELDS and value is None


def _typed(name: str, value: Any) -> Any:
    """Check the type of a value and return it. GPT-NeoX's own check does not support these types.

    GPT-NeoX's YAML reader returns 1e-7 as a string, so a string is converted if the field is a float.
    """
    if name not in FIELDS or FIELDS[name].type not in EXPECTED:
        return value
    kind, expected = EXPECTED[FIELDS[name].type]
    if kind is float and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")
    return value
