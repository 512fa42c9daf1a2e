"""Convert the keys of config.json to ours and back, according to the architecture's row in `families.FAMILIES`.

The caller raises an error for every key of config.json that neither the row nor this module reads. An export reads its
config.json back and compares it with the model, so it uses a family only if the family can represent the whole model.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.families.parts.defaults import NotSupported
from megatron_coca.checkpoints.huggingface.rope import (
    MAXIMUM,
    check_consistent,
    check_spellings,
    older_keys,
    rope_keys,
    rope_parameters,
    rope_section,
)
from megatron_coca.checkpoints.huggingface.weight_map import Row
from megatron_coca.config import Config, ModelConfig
from megatron_coca.config.model import GATED_ACTIVATIONS, GLOBAL
from megatron_coca.config.position import ORIGINAL, Selected

Json = Mapping[str, Any]
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"} | dict.fromkeys(TANH_GELU, "geglu_tanh")
PLAIN = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "relu2": "relu_squared", "xielu": "xielu"}
PLAIN |= dict.fromkeys(TANH_GELU, "gelu")
"""Names of activations in transformers -> ours. If a function has several names, an export writes the family's default
name if possible, else the first name.
"""
TEMPERATURE = "llama_4_scaling_beta"
"""Option of rope_parameters: the strength of our logit scaling `temperature`. The period of the scaling is ORIGINAL."""
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Windows:
    """How an architecture selects the layers with a sliding window.

    Attributes:
        read: (config.json, number of layers) -> whether each layer has the window.
        listed: whether config.json lists the type of each layer in `layer_types`.
        switched: whether config.json turns the window on with `use_sliding_window`.
        nullable: whether the class of a `listed` window supports a model without a window.
        multiple: the factor from the window to the value of its key in config.json.
    """

    read: Callable[[Json, int], list[bool]]
    listed: bool = True
    switched: bool = False
    nullable: bool = False
    multiple: int = 1

    def written(self, slides: list[bool], width: int | None, length: int) -> dict[str, Any]:
        """Return the keys of config.json. `slides` lists whether each layer has a window of `width` tokens.

        `width` is None if no layer has a window.
        """
        # A class that reads `layer_types` but no switch builds the window's mask even if no layer has a window.
        unused = length if self.listed and not (self.switched or self.nullable) else None
        settings: dict[str, Any] = {"sliding_window": unused if width is None else width * self.multiple}
        if self.listed:
            settings["layer_types"] = [SLIDING if flag else FULL for flag in slides]
        if self.switched:
            settings["use_sliding_window"] = width is not None
        return settings


@dataclass(frozen=True)
class Rotating:
    """How an architecture selects the layers that rotate queries and keys.

    Attributes:
        read: (config.json, whether each layer has a window) -> whether each layer rotates.
        written: the key of config.json that lists 1 for each layer that rotates and 0 for each other layer; None if
            the windows determine which layers rotate.
    """

    read: Callable[[Json, list[bool]], list[bool]]
    written: str | None = None


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        architecture: name of the transformers class. If it is empty, the code of published folders computes the model,
            and the family is not exported.
        rows: our model keys -> the table of weight names.
        fixed: our keys that have the same value in all models of the architecture. The activation "gated" means that
            the MLP is gated and config.json selects its activation.
        keys: key of config.json -> our key, and the default of the class.
        only: keys of config.json -> the only supported value.
        names: common key -> the architecture's own name of the key, or None if it has no such key.
        first: key -> the common key that it overrides if both are present, as in the class.
        activation: the key of the activation, and its default. If the key is None, all models have the default.
        tied: default of tie_word_embeddings.
        length: default of the training length.
        head_dim: default of head_dim; None for hidden_size / num_attention_heads.
        rope: default of the rotary base; None if the architecture does not rotate.
        share: default of partial_rotary_factor; None if the class always rotates all features.
        rope_section: rope_parameters or rope_scaling in config.json -> the section that describes the extension. With
            `by_type`, the result is one section for each type of layer.
        rope_types: the architecture's names of extensions -> our names, if they differ.
        windows: how layers with a sliding window are selected; None if no layer can have a window.
        window: default of sliding_window.
        rotating: how layers that rotate are selected; None if all layers rotate.
        by_type: None unless the architecture has separate rope_parameters for each type of layer. Then, the top-level
            key of the rotary base of layers with a window, if there is one, and the default of this base.
        temperature: whether rope_parameters has TEMPERATURE.
        original: default of ORIGINAL at the top level, which takes precedence over ORIGINAL in rope_parameters.
        in_older: whether transformers 4 has the class.
        older: rope_scaling -> the form that the class in transformers 4 reads. The class stops with an error on an
            extension that it does not support. None if it reads every form.
        attention: the `attn_implementation` that computes the model correctly.
        read: (config.json, our keys so far) -> additional keys of ours.
        write: our configuration -> additional keys of config.json.
        harmless: keys in published folders that the class ignores.
        later_layers: whether published folders have layers after the last one that predict further tokens. The
            class ignores their weights.
        of_all_logits: whether YaRN's mscale_all_dim multiplies all logits.
    """

    architecture: str
    rows: Callable[[ModelConfig], tuple[Row, ...]]
    fixed: Mapping[str, Any]
    keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str | None] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    activation: tuple[str | None, str] = ("hidden_act", "silu")
    tied: bool = False
    length: int | None = None
    head_dim: int | None = None
    rope: float | None = 10000.0
    share: float | None = None
    rope_section: Callable[[Json], Json] = lambda section: section
    rope_types: Mapping[str, str] = field(default_factory=dict)
    windows: Windows | None = None
    window: int | None = None
    rotating: Rotating | None = None
    by_type: tuple[str | None, float] | None = None
    temperature: bool = False
    original: int | None = None
    in_older: bool = True
    older: Callable[[Json], Json] | None = None
    attention: str = "eager"
    read: Callable[[Json, Json], dict[str, Any]] = lambda config, keys: {}
    write: Callable[[Config], dict[str, Any]] = lambda config: {}
    harmless: frozenset[str] = frozenset()
    later_layers: bool = False
    of_all_logits: bool = False


class ConfigReader(NamedTuple):
    """Functions that read one architecture.

    Attributes:
        shape: (config.json, its path) -> our network keys.
        position: (config.json, its path, the names of the weights) -> our position keys.
        rows: (config.json, the names of the weights) -> the table of weight names.
        unneeded: names of masks and frequencies that older versions of transformers saved. They are never read.
    """

    shape: Callable[[Json, Path], dict[str, Any]]
    position: Callable[[Json, Path, Collection[str]], dict[str, Any]]
    rows: Callable[[Json, Collection[str]], tuple[Row, ...]]
    unneeded: re.Pattern[str]


class Exporter(NamedTuple):
    """Functions that export one architecture of transformers.

    Attributes:
        architecture: name of the transformers class.
        rows: our configuration -> the table of weight names.
        keys: (our configuration, the keys that all architectures have) -> content of config.json.
    """

    architecture: str
    rows: Callable[[Config], tuple[Row, ...]]
    keys: Callable[[Config, dict[str, Any]], dict[str, Any]]


# Which layers have a window -------------------------------------------------------------------------------------------


def _listed(config: Json, default: Iterable[bool]) -> list[bool]:
    types = config.get("layer_types")
    if types is None:
        return list(default)
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise NotSupported(f"layer_types: {unknown[0]!r} is not supported, only {SLIDING} and {FULL}")
    return [kind == SLIDING for kind in types]


def every(period: int, name: str | None = None) -> Windows:
    """Return a pattern in which every `period`-th layer has no window. The key `name`, if present, sets the period."""

    def layers(config: Json, count: int) -> list[bool]:
        given = config.get(name, period) if name is not None else period
        return _listed(config, (bool((i + 1) % given) for i in range(count)))

    return Windows(layers)


def _from_layer(config: Json, count: int) -> list[bool]:
    first, used = config.get("max_window_layers", 28), config.get("use_sliding_window", False)
    listed = _listed(config, (i >= first for i in range(count)))
    return listed if used else [False] * count


def _without_rotation(config: Json, count: int) -> list[bool]:
    used = config.get("use_sliding_window", False)
    # SmolLM 3's class builds the mask from the list only, so a list takes precedence over `use_sliding_window`.
    return _listed(config, (used and not rotates for rotates in _rope_interval(config, [False] * count)))


def _rope_interval(config: Json, sliding: list[bool]) -> list[bool]:
    interval, listed = config.get("no_rope_layer_interval", 4), config.get("no_rope_layers")
    return [bool(flag) for flag in listed] if listed else [bool((i + 1) % interval) for i in range(len(sliding))]


def _has_section(config: Json, sliding: list[bool]) -> list[bool]:
    sections, kinds = config.get("rope_parameters") or {}, [SLIDING if slides else FULL for slides in sliding]
    if absent := [kind for kind in kinds if kind not in sections]:
        raise NotSupported(f"rope_parameters: has no section {absent[0]}; add it, or null for layers without rotation")
    return [sections[kind] is not None for kind in kinds]


ALL_LAYERS = Windows(lambda config, count: [True] * count, listed=False)
"""All layers have the window, as in Mistral."""
SWITCHED = Windows(
    lambda config, count: [bool(config.get("use_sliding_window", False))] * count, listed=False, switched=True
)
"""All layers have the window if it is switched on, as in Qwen 3 with experts."""
FROM_LAYER = Windows(_from_layer, switched=True)
"""Layers from number `max_window_layers` on have the window, as in Qwen."""
FROM_LAST = Windows(
    lambda config, count: _listed(config, (i >= config.get("max_window_layers", 62) for i in range(count)))
)
"""Layers from number `max_window_layers` on have the window unless `layer_types` is given, as in dots.llm1."""
FIRST_OF_TWO = Windows(lambda config, count: _listed(config, (i % 2 == 0 for i in range(count))))
"""Every other layer, from the first on, has the window, as in gpt-oss."""
LISTED = Windows(lambda config, count: _listed(config, [True] * count))
"""All layers have the window unless `layer_types` gives other types, as in Ministral."""
NO_LAYERS = Windows(lambda config, count: _listed(config, [False] * count))
"""Only layers that `layer_types` marks as sliding have the window, as in Cohere Compass."""
FIRST_WITHOUT = Windows(lambda config, count: _listed(config, (bool(i % 4) for i in range(count))))
"""Every fourth layer, from the first on, has no window, as in CWM."""
FIRST_OF_PERIOD = Windows(
    lambda config, count: _listed(
        config, (bool(i % config.get("global_attn_every_n_layers", 3)) for i in range(count))
    ),
    multiple=2,
)
"""Every third layer, from the first on, has no window, as in ModernBERT. A key may set another period. The window is
half of the value in config.json, because the encoder's value counts the tokens on both sides.
"""
PERIOD_OR_NONE = replace(every(4, "sliding_window_pattern"), nullable=True)
"""Every fourth layer has no window, or no layer has one, as in EXAONE 4."""
WITHOUT_ROTATION = Windows(_without_rotation, switched=True)
"""Layers without rotation have the window, as in SmolLM 3."""
ROPE_INTERVAL = Rotating(_rope_interval, "no_rope_layers")
"""All layers except every `no_rope_layer_interval`-th layer rotate, as in SmolLM 3."""
WITH_WINDOW = Rotating(lambda config, sliding: sliding)
"""Layers with a window rotate, as in Cohere 2."""
WITH_BASE = Rotating(
    lambda config, sliding: [bool(base) for base in config.get("layer_rope_theta") or [1] * len(sliding)]
)
"""Layers rotate if `layer_rope_theta` lists a rotary base for them, as in Granite with windows."""
WITH_SECTION = Rotating(_has_section)
"""Layers rotate unless the section of their type in rope_parameters is null, as in Cohere Compass."""
WITH_WINDOW_IF_ANY = Rotating(
    lambda config, sliding: sliding if config.get("sliding_window", 0) is not None else [True] * len(sliding)
)
"""Layers with a window rotate; in a model without a window, all layers rotate, as in EXAONE 4."""


# Position keys --------------------------------------------------------------------------------------------------------


def _layer_keys(family: Family, config: Json, source: Path, count: int) -> dict[str, Any]:
    """Return our position keys for all layers. If all layers are of one type, the keys apply to the whole model."""
    window = config.get("sliding_window", family.window) if family.windows is not None else None
    sliding = family.windows.read(config, count) if family.windows is not None else [False] * count
    sliding = sliding if window is not None else [False] * count
    rotating = [True] * count if family.rotating is None else family.rotating.read(config, sliding)
    if len(sliding) != count or len(rotating) != count:
        raise CheckpointError(
            f"{source}: layer_types or no_rope_layers must have {count} entries, one for each layer; correct the list"
        )
    changes: dict[str, dict[str, Any]] = {GLOBAL: {}}
    ropes = _ropes(family, config, source)
    if window is not None:
        other = ropes.get(SLIDING)
        # With a section for each type, an override of the model's extension does not apply to layers with a window.
        own = {} if other is None else {"rope_scaling": None} | other
        assert family.windows is not None
        changes["sliding"] = {"sliding_window_width": window // family.windows.multiple - 1} | own
        changes["sliding_nope"] = changes["sliding"] | {"pos_emb": "none", "rope_scaling": None}
    changes["nope"] = {"pos_emb": "none", "rope_scaling": None}
    names = [
        (("sliding" if slides else GLOBAL) if rotates else ("sliding_nope" if slides else "nope"))
        for slides, rotates in zip(sliding, rotating, strict=True)
    ]
    keys = {"pos_emb": "rotary"} | ropes[FULL]
    used = dict.fromkeys(names)
    if len(used) == 1:
        return keys | changes[names[0]]
    return keys | {
        "attention_config": [[names, 1]],
        "layer_types": {name: changes[name] for name in used if name != GLOBAL},
    }


def _ropes(family: Family, config: Json, source: Path) -> dict[str, dict[str, Any]]:
    """Return our RoPE keys for each type of layer."""
    base, share = ("rope_theta", family.rope or 10000.0), ("partial_rotary_factor", family.share or 1.0)
    if family.by_type is None:
        check_spellings(config, source, base, share)
        return {FULL: _rope(family, config, family.rope_section(rope_section(config)), source)}
    section = family.rope_section(config.get("rope_parameters") or {})
    extension = config.get("rope_scaling") or {}
    if unread := sorted(section.keys() - {FULL, SLIDING}):
        raise CheckpointError(
            f"{source}: rope_parameters has {', '.join(unread)}, but {family.architecture} reads only the sections "
            f"{FULL} and {SLIDING}; move the keys into these sections"
        )
    # In a config.json for transformers 4, the extension and the base apply to layers without a window.
    name, default = family.by_type
    check_spellings({**config, "rope_parameters": section.get(FULL)}, source, base, share)
    if name is not None:
        inner = (section.get(SLIDING) or {}).get("rope_theta")
        check_consistent(source, {name: config.get(name), f"rope_parameters.{SLIDING}.rope_theta": inner})
    local = {"rope_theta": (config.get(name) if name is not None else None) or default}
    parts = {FULL: (section.get(FULL) or {}) | extension, SLIDING: local | (section.get(SLIDING) or {})}
    if ignored := [kind for kind, part in parts.items() if part.get("truncate") is False]:
        raise CheckpointError(
            f"{source}: rope_parameters.{ignored[0]}.truncate: {family.architecture} ignores the value false; remove it"
        )
    config = {name: value for name, value in config.items() if name != ORIGINAL}  # the sections have this key
    return {kind: _rope(family, config, part, source) for kind, part in parts.items()}


def _rope(family: Family, config: Json, section: Json, source: Path) -> dict[str, Any]:
    section = {name: value for name, value in section.items() if name != MAXIMUM}
    if family.temperature and not section:
        raise CheckpointError(
            f"{source}: rope_parameters: missing, so {family.architecture} would use an extension and {TEMPERATURE} "
            "0.1; add the section"
        )
    strength = section.pop(TEMPERATURE, None) or 0.0
    if strength and not family.temperature:
        raise CheckpointError(f"{source}: {TEMPERATURE}: {family.architecture} ignores this key; remove it")
    extended = (section.get("rope_type") or section.get("type")) in ("llama3", "longrope", "yarn")
    # For these extensions, the key at the top level takes precedence.
    period = (config.get(ORIGINAL) if extended else None) or section.get(ORIGINAL)
    if strength and period is None:
        raise CheckpointError(f"{source}: {TEMPERATURE}: needs {ORIGINAL}; add it")
    scaling = {"logit_scaling": {"type": "temperature", "strength": strength, "period": period}} if strength else {}
    share = section.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or family.share or 1.0
    if share != 1 and family.share is None:
        raise CheckpointError(
            f"{source}: partial_rotary_factor: {share} is not supported, because {family.architecture} rotates all "
            "features; remove it"
        )
    named = str(section.get("rope_type") or section.get("type"))
    if named in family.rope_types:
        section |= {"rope_type": family.rope_types[named]}
    values = {"rope_theta": family.rope, **config, "rope_parameters": section, "rope_scaling": None}
    if family.original is not None:
        values.setdefault(ORIGINAL, family.original)
    return (
        rope_keys(values, source, "rope_theta", family.of_all_logits)
        | ({"rotary_pct": float(share)} if share != 1 else {})
        | scaling
    )


# Reading and writing --------------------------------------------------------------------------------------------------


def read_keys(family: Family, config: Json, source: Path) -> dict[str, Any]:
    """Return our network and position keys, except those that all architectures share.

    `config` is read with common key names. Raises CheckpointError if the family does not support a value.
    """
    for name, value in family.only.items():
        found = config.get(name)
        if found is not None and found != value:
            raise CheckpointError(f"{source}: {name}: {found!r} is not supported, only {value!r}; use another model")
    keys = dict(family.fixed) | {ours: config.get(theirs, default) for theirs, (ours, default) in family.keys.items()}
    keys |= _mlp_keys(family, config, source)
    given = config.get("head_dim", family.head_dim) if family.rope is not None else None
    if given is not None and given * config["num_attention_heads"] != config["hidden_size"]:
        keys["kv_channels"] = given
    if family.rope is not None:
        keys |= _layer_keys(family, config, source, config["num_hidden_layers"])
    return keys | family.read(config, keys)


def _mlp_keys(family: Family, config: Json, source: Path) -> dict[str, Any]:
    name, default = family.activation
    named = config.get(name, default) if name is not None else default
    gated = family.fixed.get("activation") == "gated"
    known = GATED if gated else PLAIN
    if named not in known:
        raise CheckpointError(f"{source}: {name}: {named!r} is not supported; supported values: {', '.join(known)}")
    inner = config.get("intermediate_size") or 4 * config["hidden_size"]
    return {
        "activation": known[named],
        "bias_gelu_fusion": not gated and named in TANH_GELU,
        "intermediate_size": (3 if gated else 1) * inner,  # GPT-NeoX's key is 3 times the width of a gated MLP
    }


def write_keys(family: Family, config: Config, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json. This is the inverse of `read_keys`.

    `shared` contains the keys that all architectures have, under their common names.
    """
    flat, model = config.flat(), config.model
    settings = dict(shared) | {theirs: flat[ours] for theirs, (ours, _) in family.keys.items()} | dict(family.only)
    activation, (name, default) = model.activation, family.activation
    if name is not None:
        known = GATED if activation in GATED_ACTIVATIONS else PLAIN
        tanh = activation == "geglu_tanh" or (activation == "gelu" and model.bias_gelu_fusion)
        named = [theirs for theirs, ours in known.items() if ours == activation and (theirs in TANH_GELU) == tanh]
        settings[name] = default if default in named else next(iter(named), default)
    if family.rope is not None:
        settings |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
        if model.kv_lora_rank is not None:
            settings |= {"qk_nope_head_dim": model.unrotated_dim, "qk_rope_head_dim": model.head_dim}
            settings |= {"v_head_dim": model.value_dim}
        settings |= _written_layers(family, config)
    settings |= family.write(config)
    renamed = {family.names.get(name, name): value for name, value in settings.items()}
    return {name: value for name, value in renamed.items() if name is not None}


def _written_layers(family: Family, config: Config) -> dict[str, Any]:
    kinds, names, length = config.layer_types, config.model.layer_names, config.model.seq_length
    rotary = [kind for kind in kinds.values() if kind.embedding.rotary] or [config.position]
    full = next((kind for kind in rotary if kind.sliding_window_width is None), rotary[0])
    sections = {FULL: rope_parameters(full, length)}
    windows = [kind for kind in kinds.values() if kind.sliding_window_width is not None]
    sections[SLIDING] = rope_parameters(windows[0] if windows else full, length)
    settings: dict[str, Any] = {"rope_parameters": sections if family.by_type else sections[FULL]}
    if full.rotary_pct != (family.share or 1.0) and not family.by_type:
        settings["rope_parameters"]["partial_rotary_factor"] = full.rotary_pct
        settings["partial_rotary_factor"] = full.rotary_pct  # for transformers 4
    if family.in_older:
        settings |= _older_keys(family, sections)
    if family.temperature:  # the class needs TEMPERATURE and ORIGINAL
        chosen = full.logit_scaling
        options = chosen.settings(length) if isinstance(chosen, Selected) and chosen.type == "temperature" else {}
        own = {TEMPERATURE: options.get("strength", 0.0), ORIGINAL: options.get("period", length)}
        settings["rope_parameters"] = own | settings["rope_parameters"]
    if family.windows is not None:
        width = windows[0].sliding_window_width if windows else None
        slides = [kinds[name].sliding_window_width is not None for name in names]
        settings |= family.windows.written(slides, None if width is None else width + 1, length)
    if family.rotating is not None and family.rotating.written is not None:
        settings[family.rotating.written] = [int(kinds[name].embedding.rotary) for name in names]
    return settings


def _older_keys(family: Family, sections: Mapping[str, Json]) -> dict[str, Any]:
    """Return the keys of transformers 4, in which layers with a window can differ only by their rotary base.

    If these keys cannot represent the model, the rotary base is null. The class of transformers 4 then stops with an
    error instead of computing wrong results.
    """
    full, sliding = sections[FULL], sections[SLIDING]
    keys = older_keys(full)
    if "rope_scaling" in keys and family.older is not None:
        keys["rope_scaling"] = family.older(keys["rope_scaling"])
    if family.by_type is None:
        return keys
    name, _ = family.by_type
    if sliding["rope_type"] != "default" or (name is None and full["rope_theta"] != sliding["rope_theta"]):
        return {"rope_theta": None}
    return keys if name is None else keys | {name: sliding["rope_theta"]}


def readable_by_older(family: Family, settings: Json) -> bool:
    """Return whether transformers 4 can run the model that an exported config.json describes, without an error."""
    if not family.in_older or ("rope_theta" in settings and settings["rope_theta"] is None):
        return False
    return family.older is None or "rope_type" not in (settings.get("rope_scaling") or {})
