"""Read and write the rotary base and the extension in config.json.

transformers 5 reads the section `rope_parameters`, which includes the rotary base. transformers 4 reads the base at the
top level and the extension in the section `rope_scaling`. Version 5 supports these older keys too, and `rope_scaling`
takes precedence. Exports contain the keys of both versions.
"""

from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any

from megatron_coca import methods
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.config import PositionConfig
from megatron_coca.config.position import ORIGINAL

Json = Mapping[str, Any]
TRAINING_LENGTH = "training_length"
"""Key in an exported config.json for the training length, if it differs from max_position_embeddings."""
MAXIMUM = "max_position_embeddings"
NO_OPTIONS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL})
"""Keys in the section on rotation that are not options of an extension."""
AXES = ("mrope_section", "mrope_interleaved")
"""Options of a rotation with three axes: time, height and width. A token of text has the same position on each axis, so
text is rotated in the usual way.
"""
OUR_OPTIONS = frozenset({"ramp", "resonance"})
"""Extension options that transformers does not have. Its classes ignore them."""


def rope_section(config: Json) -> Json:
    """Return the section `rope_scaling` (transformers 4 and older) or `rope_parameters` (transformers 5)."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def without_axes(section: Any) -> Any:
    """Return a section on rotation without the axes, which do not affect text. Anything but a mapping is unchanged."""
    if not isinstance(section, Mapping):
        return section
    kept = {name: value for name, value in section.items() if name not in AXES}
    named = {name: "default" for name in ("rope_type", "type") if kept.get(name) == "mrope"}
    return kept | named


def check_consistent(source: Path, given: Mapping[str, Any]) -> None:
    """Raise CheckpointError if keys of config.json that mean the same have different values. None means no value."""
    said = {place: value for place, value in given.items() if value is not None}
    place, value = next(iter(said.items()), ("", None))
    for other, another in said.items():
        if another != value:
            raise CheckpointError(
                f"{source}: {place} {value!r} contradicts {other} {another!r}, and transformers 4 and 5 read different "
                "keys; remove the wrong key"
            )


def check_spellings(config: Json, source: Path, base: tuple[str, float], share: tuple[str, float]) -> None:
    """Raise CheckpointError if the keys of transformers 4 and 5 are both present and describe different rotations.

    `base` is the top-level key of the rotary base and its default in the class. `share` is the top-level key of the
    fraction of rotated features and its default.
    """
    older, newer = (config.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    for (top, default), name in ((base, "rope_theta"), (share, "partial_rotary_factor")):
        given = {top: config.get(top), f"rope_scaling.{name}": older.get(name)}
        if older and newer and list(given.values()) == [None, None]:
            given = {f"{top} (by default)": default}
        check_consistent(source, given | {f"rope_parameters.{name}": newer.get(name)})
    if older and newer:
        check_consistent(source, {"rope_scaling": _meaning(older, config), "rope_parameters": _meaning(newer, config)})


def _meaning(section: Json, config: Json) -> dict[str, Any]:
    """Return an extension with defaults for missing options, so that equivalent extensions give equal results."""
    kind = section.get("rope_type") or section.get("type") or "default"
    given = {name: value for name, value in section.items() if name not in NO_OPTIONS and value is not None}
    if kind not in methods.names("rope_scaling", huggingface="stock") or kind == "default":
        return {"rope_type": kind} | given
    extension = methods.find("rope_scaling", kind)
    defaults = {option.name: option.default for option in extension.options if option.name not in OUR_OPTIONS}
    meant = {"rope_type": kind} | {name: value for name, value in defaults.items() if value is not None} | given
    if extension.stock.length == ORIGINAL:
        meant[ORIGINAL] = config.get(ORIGINAL) or section.get(ORIGINAL) or config.get(MAXIMUM)
        if extension.stock.derives_factor and "factor" not in given and meant[ORIGINAL]:
            meant["factor"] = config[MAXIMUM] / meant[ORIGINAL]
    return meant


def rope_keys(config: Json, source: Path, base_name: str, of_all_logits: bool = False) -> dict[str, Any]:
    """Return our keys for the rotary base and the extension.

    `base_name` is the architecture's top-level key of the base. `of_all_logits` is whether YaRN's mscale_all_dim
    multiplies all logits, as in DeepSeek. Raises CheckpointError if the type or an option of the
    extension is not supported.
    """
    section = rope_section(config)
    base = {"rotary_emb_base": float(section.get("rope_theta") or config.get(base_name) or 10000)}
    kind = section.get("rope_type") or section.get("type") or "default"
    options = {name: value for name, value in section.items() if name not in NO_OPTIONS and value is not None}
    known = methods.names("rope_scaling", huggingface="stock")
    if kind not in known:
        raise CheckpointError(f"{source}: rope_type: {kind!r} is not supported; supported values: {', '.join(known)}")
    extension = methods.find("rope_scaling", kind)
    if kind == "yarn":
        options.pop("finetuned", None)  # from YaRN's authors; no class of transformers reads it
        # DeepSeek and Mistral have these two options. Transformers uses them only if both are given without
        # attention_factor.
        scales = [options.pop(name, None) for name in ("mscale", "mscale_all_dim")]
        if of_all_logits and scales[1]:
            of_all = {"mscale_all_dim": scales[1]}
            options |= of_all if "attention_factor" in options or not scales[0] else of_all | {"mscale": scales[0]}
        elif all(scales) and "factor" in options:
            mscale, of_all = (0.1 * scale * max(log(options["factor"]), 0.0) + 1 for scale in scales)
            options.setdefault("attention_factor", mscale / of_all)
    listed = [option.name for option in extension.options if option.name not in OUR_OPTIONS]
    unread = sorted(options.keys() - set(listed))
    if unread:
        raise CheckpointError(
            f"{source}: rope_type {kind!r} with {', '.join(unread)} is not supported (supported options: "
            f"{', '.join(listed) or 'none'}); remove keys that have no effect"
        )
    if kind == "default":
        return base
    scaling: dict[str, Any] = {"rope_type": kind}
    original = config.get(ORIGINAL) or section.get(ORIGINAL)  # the top level takes precedence, as in transformers
    if extension.stock.length == MAXIMUM and TRAINING_LENGTH in config:
        scaling[ORIGINAL] = config[MAXIMUM]
    elif extension.stock.length == ORIGINAL and original is not None:
        scaling[ORIGINAL] = original
        if extension.stock.derives_factor:
            scaling["factor"] = config[MAXIMUM] / original
    scaling |= options
    lacking = [option.name for option in extension.options if option.required and option.name not in scaling]
    if lacking:
        raise CheckpointError(
            f"{source}: rope_type {kind!r} needs {' and '.join(lacking)}; copy it from the original model"
        )
    return base | {"rope_scaling": scaling}


def rope_parameters(position: PositionConfig, seq_length: int) -> dict[str, Any]:
    """Return the section `rope_parameters` for transformers. This is the inverse of `rope_keys`."""
    extension = position.extension
    parameters: dict[str, Any] = {"rope_type": extension.name, "rope_theta": position.rotary_emb_base}
    for name, value in position.rope_scaling.given.items() if position.rope_scaling is not None else ():
        if value is not None and name not in OUR_OPTIONS:
            parameters[name] = list(value) if isinstance(value, tuple) else value
    if extension.stock.length == ORIGINAL:
        parameters[ORIGINAL] = position.original_length(seq_length)
    return parameters


def older_keys(parameters: Json, base_name: str = "rope_theta") -> dict[str, Any]:
    """Convert a section `rope_parameters` to the keys of transformers 4: the base, and the extension if there is one.

    `base_name` is the architecture's top-level key of the base.
    """
    apart = ("rope_theta", "partial_rotary_factor")
    section = {name: value for name, value in parameters.items() if name not in apart}
    keys: dict[str, Any] = {base_name: parameters["rope_theta"]}
    if section["rope_type"] != "default":
        keys["rope_scaling"] = section
    if section["rope_type"] == "longrope":  # transformers 4 reads this key at the top level
        keys[ORIGINAL] = section[ORIGINAL]
    return keys
