"""YAML keys: those that the plugin adds to GPT-NeoX, and the translation of this package's keys."""

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
"""Values of `pos_emb` that only GPT-NeoX's own attention computes."""

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "attention_dropout")
POSITION = (
    *("pos_emb", "rotary_pct", "rotary_emb_base", *EXTENDING, "sliding_window_width"),
    *("attention_backend", "operand_kernel"),
)
"""Keys of the position method. With the plugin all of them are fields of NeoXArgs."""

GROUPS_WITHOUT_EFFECT = frozenset({"faults", "checkpoint", "logging", "launch"})
KEYS_WITHOUT_EFFECT = frozenset({"loss_chunk_size", "loss_kernel", "torch_compile", "num_workers", "data_root"})
"""Keys of this package that do not change results. GPT-NeoX runs without them."""

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")

CONTRADICTING: dict[str, tuple[Any, str]] = {
    "use_mup": (
        False,
        "the plugin's attention divides scores by sqrt(head_dim); leave it out",
    ),
    "te_mha": (False, "Transformer Engine's attention does not support these positions; leave it out"),
    "te_fp8_mha": (False, "Transformer Engine's attention does not support these positions; leave it out"),
}
"""Keys of GPT-NeoX that contradict the plugin's attention -> their default, and the error message."""

NO_POSITIONS = (
    "GPT-NeoX's data path carries tokens only, and its model counts positions from 0 on the device; "
    "use megatron-coca train"
)


class NewField(NamedTuple):
    """A field that the plugin adds: its base class of NeoXArgs, its type and its default."""

    owner: str
    type: Any
    default: Any


def _choices(name: str) -> Any:
    return Literal[get_args(PositionConfig.model_fields[name].annotation)]


FIELDS: dict[str, NewField] = {
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
"""Types of new fields, and their names in messages. GPT-NeoX itself checks choices."""

NEW_CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "pos_emb": ("NeoXArgsModel", METHODS),
    "lr_decay_style": ("NeoXArgsLRScheduler", ("linear_to_min_lr",)),
}
"""Additional values of existing fields, with the base class of NeoXArgs that has the field."""


def extend_fields(arguments: type) -> None:
    """Add FIELDS and NEW_CHOICES to `arguments` (NeoXArgs) and its bases."""
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
    """Return whether a NeoXArgs selects the plugin's attention."""
    if neox_args.pos_emb.lower() in METHODS:
        return True
    return bool(neox_args.rope_scaling or neox_args.relative_positions or neox_args.logit_scaling != "none")


def resolve(neox_args: Any) -> Config:
    """Return this package's configuration of the plugin's attention.

    Raises ConfigError if the keys are not valid, or the plugin's attention does not support them.
    """
    problems = [
        f"{name}: {reason}"
        for name, (default, reason) in CONTRADICTING.items()
        if getattr(neox_args, name, default) != default
    ]
    kinds = set(neox_args.attention_config or ()) - {"global", "flash"}
    problems += [f"attention_config: {', '.join(sorted(kinds))} is not supported; use global or flash"] if kinds else []
    scaling = neox_args.rope_scaling or {}
    given = {"rope_scaling": scaling.get("rope_type", scaling.get("type"))}
    given["relative_positions"] = (neox_args.relative_positions or {}).get("type")
    chosen = [methods.TABLES[key][name] for key, name in given.items() if name in methods.TABLES[key]]
    problems += [f"{choice.key}: {choice.name}: {choice.neox}" for choice in chosen if choice.neox != "plugin"]
    if neox_args.pos_emb.lower() in BIASED:
        problems.append(
            f"pos_emb: {neox_args.pos_emb} is computed by GPT-NeoX's own attention, which does not have "
            f"{', '.join(EXTENDING)}; leave them out"
        )
    if problems:
        raise ConfigError(*problems)
    values = {name: getattr(neox_args, name) for name in (*SHAPE, *POSITION)}
    values |= {"pos_emb": neox_args.pos_emb.lower(), "make_vocab_size_divisible_by": 1}
    # GPT-NeoX's seq_length is the longest input of a run. In generation it is more than the training length, and only
    # original_max_position_embeddings can name that length, so everything refers to it.
    values["seq_length"] = scaling.get("original_max_position_embeddings") or values["seq_length"]
    return load_config([], {name: value for name, value in values.items() if value is not None})


def translated(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a YAML file's values to keyword arguments of NeoXArgs; `known` are its fields with their types.

    Raises ConfigError if a key is unknown or has no counterpart in GPT-NeoX, or a value is not valid.
    """
    problems = problems_of(values, known)
    if problems:
        raise ConfigError(*problems)
    ignored = [name for name in values if name not in known and _without_effect(name)]
    if ignored:
        logger.warning("%s: no effect in GPT-NeoX", ", ".join(ignored))
    translated: dict[str, Any] = {}
    if all(values.get(name) is not None for name in BATCH_SIZES):
        # GPT-NeoX's default of 1 contradicts two given sizes; null lets it divide them, as in this package.
        translated["gradient_accumulation_steps"] = None
    for name, value in values.items():
        if name not in ignored and not _unset(name, value):
            translated[name] = _typed(name, value)
    if translated.get("max_position_embeddings") is None and "seq_length" in translated:
        translated["max_position_embeddings"] = translated["seq_length"]  # the default here; GPT-NeoX has none
    return translated


def problems_of(values: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Return a line for each invalid key or choice; `known` are the fields of NeoXArgs with their types."""
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
        problems.append(f"{', '.join(foreign)}: supported by megatron-coca train, not by GPT-NeoX; leave it out")
    return problems


def _without_effect(name: str) -> bool:
    return name in KEYS and (KEYS[name].group in GROUPS_WITHOUT_EFFECT or name in KEYS_WITHOUT_EFFECT)


def _unset(name: str, value: Any) -> bool:
    """Return whether a key of the plugin is null, which means "not set". GPT-NeoX's keys keep their own meaning."""
    return name in FIELDS and value is None


def _typed(name: str, value: Any) -> Any:
    """Check the type of a value: GPT-NeoX's own check fails on these types, and its YAML reader reads 1e-7 as text."""
    if name not in FIELDS or FIELDS[name].type not in EXPECTED:
        return value
    kind, expected = EXPECTED[FIELDS[name].type]
    if kind is float and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")
    return value
