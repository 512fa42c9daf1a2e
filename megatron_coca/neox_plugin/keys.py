"""The YAML keys that the plugin adds to GPT-NeoX's, and what becomes of ours that it does not have."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

from megatron_coca.config import KEYS, Config, ConfigError, load_config
from megatron_coca.config.base import nearest
from megatron_coca.config.model import PositionConfig

logger = logging.getLogger(__name__)

METHODS = ("coca", "coca_strict", "xpos")
"""Values of `pos_emb` that GPT-NeoX does not have."""

BIASED = ("alibi", "rpe")
"""Values of `pos_emb` that GPT-NeoX has and that only its own attention computes."""

LEARNING = ("kerple_log", "kerple_power")
"""Values of `pos_emb` of ours with weights that GPT-NeoX has no place for."""

EXTENDING = ("rope_scaling", "relative_positions", "logit_scaling")
"""Keys that ask for the plugin's attention, whatever `pos_emb` is."""

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "attention_dropout")
POSITION = ("pos_emb", "rotary_pct", "rotary_emb_base", *EXTENDING, "attention_backend", "operand_kernel")
"""What a position method is built from; all of them are fields of NeoXArgs once the plugin is active."""

WITHOUT_EFFECT = frozenset({"faults", "checkpoint", "logging", "launch"})
"""Groups of our keys that change no result: those that GPT-NeoX has not are left out there."""

ALSO_WITHOUT_EFFECT = frozenset({"loss_chunk_size", "torch_compile", "num_workers", "data_root"})


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


class Added(NamedTuple):
    """A new field: the class of NeoXArgs's that gets it, its type and its default."""

    owner: str
    type: Any
    default: Any


def _choices(name: str) -> Any:
    return Literal[get_args(PositionConfig.model_fields[name].annotation)]


FIELDS: dict[str, Added] = {
    "rope_scaling": Added("NeoXArgsModel", dict, None),
    "relative_positions": Added("NeoXArgsModel", dict, None),
    "logit_scaling": Added("NeoXArgsModel", _choices("logit_scaling"), "none"),
    "attention_backend": Added("NeoXArgsModel", _choices("attention_backend"), "auto"),
    "operand_kernel": Added("NeoXArgsModel", _choices("operand_kernel"), "torch"),
    "lr_warmup_init": Added("NeoXArgsLRScheduler", float, 0.0),
    "vocab_size": Added("NeoXArgsTokenizer", int, None),
}
EXPECTED: dict[Any, tuple[type, str]] = {
    dict: (dict, "a mapping, for example {rope_type: dynamic, factor: 4.0} or {type: rerope, window: 256}"),
    float: (float, "a number"),
    int: (int, "a whole number"),
}
"""What values of a type have to be, and how it is told; choices are checked by upstream."""

CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "pos_emb": ("NeoXArgsModel", METHODS),
    "lr_decay_style": ("NeoXArgsLRScheduler", ("linear_to_min_lr",)),
}
"""Further values of fields that are there: their class, and the values."""


def extend(arguments: type, groups: Mapping[str, type]) -> None:
    """Add the fields and choices to `arguments` (NeoXArgs), whose bases by name are `groups`."""
    for name, (owner, values) in CHOICES.items():
        field = groups[owner].__dataclass_fields__[name]  # type: ignore[attr-defined]
        field.type = Literal[(*get_args(field.type), *values)]
    for name, added in FIELDS.items():
        groups[added.owner].__annotations__[name] = added.type
        setattr(groups[added.owner], name, added.default)
    choices = {name: groups[owner].__dataclass_fields__[name].type for name, (owner, _) in CHOICES.items()}  # type: ignore[attr-defined]
    for owner in {added.owner for added in FIELDS.values()}:
        _made_anew(groups[owner])
    _made_anew(arguments)
    for kind in (arguments, *groups.values()):
        for name, annotation in choices.items():
            if name in kind.__dataclass_fields__:  # type: ignore[attr-defined]
                kind.__dataclass_fields__[name].type = annotation  # type: ignore[attr-defined]


def _made_anew(kind: type) -> None:
    """A dataclass with the fields that its annotations name now; `dataclass` replaces no method that is there."""
    for method in ("__init__", "__repr__", "__eq__"):
        if method in vars(kind):
            delattr(kind, method)
    dataclass(kind)


def is_asked_for(neox_args: Any) -> bool:
    """Whether a configuration wants something of the plugin's attention."""
    if neox_args.pos_emb.lower() in METHODS:
        return True
    return bool(neox_args.rope_scaling or neox_args.relative_positions or neox_args.logit_scaling != "none")


def resolve(neox_args: Any) -> Config:
    """Our configuration of what the plugin builds.

    Raises:
        ConfigError: the keys are not valid, or GPT-NeoX is told to do what the plugin's attention cannot.
    """
    problems = [reason for name, (default, reason) in REFUSED.items() if getattr(neox_args, name, default) != default]
    kinds = set(neox_args.attention_config or ()) - {"global", "flash"}
    problems += [f"attention_config: {', '.join(sorted(kinds))} is not served; use global or flash"] if kinds else []
    given = {name: getattr(neox_args, name) for name in (*SHAPE, *POSITION)}
    given |= {"pos_emb": neox_args.pos_emb.lower(), "make_vocab_size_divisible_by": 1}
    scaling = neox_args.rope_scaling or {}
    if scaling.get("rope_type", scaling.get("type")) == "clex":
        problems.append("rope_scaling: clex learns frequencies for all layers at once, which GPT-NeoX has no place for")
    if neox_args.pos_emb.lower() in BIASED:
        problems.append(
            f"pos_emb: {neox_args.pos_emb} is a bias of GPT-NeoX's own attention, which takes none of {EXTENDING}"
        )
    if problems:
        raise ConfigError(problems)
    # Upstream's seq_length is the longest input of a run, which for generation exceeds the length that was trained at.
    # The plugin has one key that names the latter, so everything measures against it there.
    given["seq_length"] = scaling.get("original_max_position_embeddings") or given["seq_length"]
    return load_config([], {name: value for name, value in given.items() if value is not None})


REFUSED: dict[str, tuple[Any, str]] = {
    "sliding_window_width": (None, "sliding_window_width: not with the plugin's attention; leave it out"),
    "use_mup": (
        False,
        "use_mup: not with the plugin's attention, which divides scores by sqrt(head_dim); leave it out",
    ),
    "te_mha": (False, "te_mha: Transformer Engine's attention takes no other positions; leave it out"),
    "te_fp8_mha": (False, "te_fp8_mha: Transformer Engine's attention takes no other positions; leave it out"),
}
"""Keys of GPT-NeoX that contradict the plugin's attention: their default, and what is said."""


def translated(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of NeoXArgs (whose fields and their types are `known`) from those of a YAML file of ours.

    Raises:
        ConfigError: a key is unknown, a key of ours would change results and is unknown to GPT-NeoX, or a value is none
            that the key takes.
    """
    problems = problems_of(values, known)
    if problems:
        raise ConfigError(problems)
    left_out = [name for name in values if name not in known and _is_left_out(name)]
    if left_out:
        logger.warning("%s: without effect in GPT-NeoX", ", ".join(left_out))
    kept = {name: value for name, value in values.items() if name not in left_out}
    return _dividing(values) | {name: _typed(name, value) for name, value in kept.items() if not _unset(name, value)}


def problems_of(values: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """A line for each key or value that GPT-NeoX with the plugin does not take, whatever the other keys are; `known` are
    the fields of NeoXArgs and their types.
    """
    if values.get("pos_emb") in LEARNING:
        return [f"pos_emb: {values['pos_emb']} learns weights that GPT-NeoX has no place for; use our own trainer"]
    refused = [name for name in values if name not in known and name in KEYS and not _is_left_out(name)]
    problems = _unknown(values, known) + _not_a_choice(values, known)
    if refused:
        problems.append(
            f"{', '.join(refused)}: megatron_coca's own trainer has this, GPT-NeoX has not; leave it out here"
        )
    return problems


def _is_left_out(name: str) -> bool:
    """Whether a key that GPT-NeoX has not is one of ours that changes no result."""
    return name in KEYS and (KEYS[name].group in WITHOUT_EFFECT or name in ALSO_WITHOUT_EFFECT)


def _unknown(values: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """A line for each key that neither GPT-NeoX nor this package has; upstream's own error names only the first."""
    return [
        f"{name}: neither GPT-NeoX nor the plugin has this key{nearest(name, known)}"
        for name in values
        if name not in known and name not in KEYS
    ]


def _not_a_choice(values: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """A line for each value that is none of its key's, of the keys whose choices the plugin sets or adds to. Case does not
    matter, as upstream has it.
    """
    problems = []
    for name in (*CHOICES, *FIELDS):
        choices, value = (get_args(known[name]) if get_origin(known[name]) is Literal else ()), values.get(name)
        if not choices or name not in values or _unset(name, value):
            continue
        if not isinstance(value, str) or value.lower() not in {choice.lower() for choice in choices}:
            problems.append(f"{name}: `{value}` is not one of {' | '.join(choices)}{nearest(str(value), choices)}")
    return problems


def _unset(name: str, value: Any) -> bool:
    """Null means `not set` for our keys, as in our own trainer; upstream's keep theirs."""
    return name in FIELDS and value is None


def _typed(name: str, value: Any) -> Any:
    """The value of one of our keys in its type: upstream's own check of such a type ends in an AttributeError, and its
    YAML reader takes 1e-7 for text.
    """
    if name not in FIELDS or FIELDS[name].type not in EXPECTED:
        return value
    kinds, told = EXPECTED[FIELDS[name].type]
    if kinds is float and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float if kinds is float else kinds):
        raise ConfigError([f"{name}: expected {told}, got {value!r}"])
    return value


def _dividing(values: Mapping[str, Any]) -> dict[str, None]:
    """Upstream's default of 1 accumulation step contradicts two given sizes; null lets it divide them, as ours does."""
    given = all(values.get(name) is not None for name in SIZES)
    return {"gradient_accumulation_steps": None} if given else {}
