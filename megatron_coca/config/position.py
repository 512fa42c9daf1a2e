"""Keys of the position method: the choices that `megatron_coca.methods` declares, and layer types."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from megatron_coca import methods
from megatron_coca.config.backends import BACKENDS
from megatron_coca.config.base import MAX_COUNT, ConfigGroup, Count, PathName, Positive, WholeNumber, key

ORIGINAL = "original_max_position_embeddings"
KINDS: dict[str, Any] = {
    "count": Count,
    "whole": WholeNumber,
    "positive": Positive,
    "share": Annotated[float, Field(gt=0.0, le=1.0)],
    "factor": Annotated[float, Field(ge=1.0, le=1.0e6)],
    "flag": bool,
    "angle": Annotated[float, Field(ge=-math.pi, le=math.pi)] | Literal["random"],
    "positives": list[Positive],
}
"""Type of a declared option, by its kind."""
DEFAULTS = {"rope_scaling": "default"}
"""For each key, the choice if its mapping names none."""


class Selected(ConfigGroup):
    """A choice with its options. The field `rope_type` or `type` contains the name of the choice."""

    declaration: ClassVar[methods.Choice]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @model_serializer(mode="wrap")
    def _only_set(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}

    @property
    def given(self) -> dict[str, Any]:
        """The options by name, with lists as tuples; None if an option is not set."""
        values = {option.name: getattr(self, option.name) for option in self.declaration.options}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    def settings(self, training_length: int) -> dict[str, Any]:
        """Return all options. An option that is not set has its default for the training length."""
        return self.declaration.resolved(self.given, training_length)


@cache
def _model_of(choice: methods.Choice) -> type[Selected]:
    fields: dict[str, Any] = {choice.selector: (Literal[choice.name], ...)}
    if choice.key == "rope_scaling":
        fields[ORIGINAL] = (Count | None, None)
    for option in choice.options:
        kind = Literal[option.choices] if option.kind == "choice" else KINDS[option.kind]
        if option.least is not None or option.most is not None:
            kind = Annotated[kind, Field(ge=option.least, le=option.most)]
        default = None if option.required else option.default
        fields[option.name] = (kind | None if default is None else kind, default)
    model = create_model(choice.name, __base__=Selected, **fields)
    model.declaration = choice
    return model


def _fault(kind: str, message: str, value: Any, *loc: str) -> InitErrorDetails:
    error = PydanticCustomError(kind, "{message}", {"message": message})
    return InitErrorDetails(type=error, loc=loc, input=value)


def _error(*faults: InitErrorDetails) -> ValidationError:
    return ValidationError.from_exception_data("choice", list(faults))


def read_choice(key: str, value: Any) -> Any:
    """Validate a choice, given as a mapping or only as a name.

    Raises:
        ValidationError: the choice is unknown, or an option is unknown, out of range, or belongs to another choice.
    """
    if value is None or isinstance(value, Selected):
        return value
    table = methods.TABLES[key]
    selector = next(iter(table.values())).selector
    values = {selector: value} if isinstance(value, str) else value
    if not isinstance(values, Mapping):
        raise _error(_fault("dict_type", "expected a mapping", value))
    name = values.get(selector, DEFAULTS.get(key))
    if name is None:
        raise _error(_fault("missing", "required", values, selector))
    if not isinstance(name, str) or name not in table:
        raise _error(_fault("literal_error", "unknown", name, *[selector] * (values is value)))
    choice, kept, faults, unknown = table[name], {selector: name}, [], False
    for option, given in values.items():
        readers = [other for other in table.values() if other.option(option) is not None]
        if given is None and readers:
            continue  # not set
        if option in (selector, ORIGINAL) or choice.option(option) is not None or not readers:
            kept[option] = given
            unknown |= not readers and option not in (selector, ORIGINAL)
        else:
            listed = " | ".join(reader.name for reader in readers)
            place = key if key == "pos_emb" else selector
            message = f"{option} has no effect with {place} {name}; it is an option of {listed}"
            faults.append(_fault("option", message, given))
    if faults and not (unknown and selector not in values):  # the unknown name may mean the selector, like `type`
        raise _error(*faults)
    return _model_of(choice).model_validate(kept)


def _name(key: str, value: Any) -> Any:
    if isinstance(value, str) and value not in methods.TABLES[key]:
        raise PydanticCustomError("literal_error", "unknown")
    return value


def _scaling(value: Any) -> Any:
    """Validate a logit scaling. Return the choice or, if it has no options, only its name."""
    chosen = read_choice("logit_scaling", "none" if value is None else value)
    return chosen if chosen.declaration.options else chosen.type


def _gate(value: Any) -> Any:
    chosen = read_choice("forgetting_gate", value)
    return chosen if chosen is None else chosen.type


def _options(value: Any, info: ValidationInfo) -> Any:
    """Validate the options of the position embedding, which an earlier field names."""
    if value is None or isinstance(value, Selected) or "pos_emb" not in info.data:
        return value if isinstance(value, Selected) else None
    if not isinstance(value, Mapping):
        raise PydanticCustomError("dict_type", "expected a mapping")
    return read_choice("pos_emb", {**value, "type": info.data["pos_emb"]})


Optional = SerializeAsAny[Selected] | None
if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[("auto", *BACKENDS)]


class PositionKeys(ConfigGroup):
    """The position keys that may differ between layers."""

    pos_emb: Annotated[str, BeforeValidator(partial(_name, "pos_emb"))] = key(
        "learned",
        "Position method. Positions start at 0, as in the CoCA authors' code (at 1 in their paper). `coca` is"
        " CoCA-Slack. Its scores depend on the first position; all other rotary methods are shift-invariant.",
    )
    pos_emb_options: Annotated[Optional, BeforeValidator(_options)] = key(
        None, "Options of the position method: those of `pos_emb` below, or those that a file in `imports` declares."
    )
    rotary_pct: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Fraction of the features of each head that is rotated."
    )
    rotary_emb_base: float = Field(default=10000.0, gt=1.0, le=1.0e30, description="Base of the rotary frequencies.")
    rotary_frequencies: Annotated[Optional, BeforeValidator(partial(read_choice, "rotary_frequencies"))] = key(
        None, "Rotary frequencies that replace the powers of rotary_emb_base from the first step on; options below."
    )
    rope_scaling: Annotated[Optional, BeforeValidator(partial(read_choice, "rope_scaling"))] = key(
        None, "Frequency extension beyond the training length; options below."
    )
    relative_positions: Annotated[Optional, BeforeValidator(partial(read_choice, "relative_positions"))] = key(
        None, "Distance map beyond a window; options below."
    )
    logit_scaling: Annotated[str | SerializeAsAny[Selected], BeforeValidator(_scaling)] = key(
        "none", "Position-dependent factor on the attention scores of each query; options below."
    )
    sliding_window_width: WholeNumber | None = key(
        None, "Largest distance of attention, as in GPT-NeoX: a query sees itself and this many tokens before it."
    )
    attention_chunk_size: Count | None = key(
        None,
        "Divide every document into chunks of this many tokens. A query attends only within its own chunk, as in the"
        " rotary layers of Llama 4.",
    )
    sink_logits: bool | None = key(
        None,
        "Every head learns the score of an additional key with value 0, as in gpt-oss, so that it can attend to"
        " nothing. This is not `streaming`, which keeps the first tokens.",
    )
    forgetting_gate: Annotated[str | None, BeforeValidator(_gate)] = key(
        None,
        "Every head computes a gate between 0 and 1 from the hidden state of every token. The score of a query and a"
        " key gets a bias: the sum of the gate logarithms of the tokens after the key, up to the query.",
    )
    attention_backend: BackendName = key("auto", "Attention backend.")


class LayerType(PositionKeys):
    """Position keys of one layer type. A key that is not set has the model's value."""

    @model_validator(mode="before")
    @classmethod
    def _options_with_method(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("pos_emb_options") is not None and "pos_emb" not in values:
            raise _error(_fault("option", "needs pos_emb in the same layer type; set it", values, "pos_emb_options"))
        return values

    @model_serializer(mode="wrap")
    def _only_given(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


class PositionConfig(PositionKeys):
    """The position method and the attention backend."""

    rpe_num_buckets: int = Field(default=32, ge=4, le=2**20, description="rpe: number of distance buckets.")
    rpe_max_distance: int = Field(
        default=128, ge=2, le=MAX_COUNT, description="rpe: this and all larger distances share the last bucket."
    )
    alibi_slope_scale: Positive = key(1.0, "alibi: factor on the slopes, 1 / sqrt(head_dim) in Falcon's models.")
    operand_kernel: Literal["auto", "torch", "triton"] = key(
        "auto",
        "Rotate queries and keys with PyTorch operations (torch) or one fused Triton kernel (triton). auto: triton on a"
        " GPU if it supports the method, else torch.",
    )
    layer_types: dict[str, LayerType] = key(
        {},
        "Layer types for `attention_config`, each with the position keys that differ from the model's:"
        " `{sliding: {sliding_window_width: 511, rotary_emb_base: 1.0e+6}}`.",
    )
    imports: list[PathName] = key(
        [],
        "Python files that declare position methods or sinks of metrics, relative to the file that sets this key"
        " (docs/own_methods.md).",
    )

    def of_type(self, name: str) -> "PositionConfig":
        """Return the keys of one layer type: the model's keys, overridden by those of the type.

        A type without rotation does not inherit rotary_frequencies, rope_scaling and relative_positions, which need
        rotation. A type with a window or chunks does not inherit relative_positions, which has its own window.
        """
        own = self.layer_types.get(name, LayerType())
        values = {key: getattr(own, key) for key in own.model_fields_set}
        dropped = set()
        if "pos_emb" in values:
            dropped |= {"pos_emb_options"}
            if not methods.find("pos_emb", values["pos_emb"]).rotary:
                dropped |= {"rotary_frequencies", "rope_scaling", "relative_positions"}
        if {values.get("sliding_window_width"), values.get("attention_chunk_size")} != {None}:
            dropped.add("relative_positions")
        return self.model_copy(update=dict.fromkeys(dropped) | values | {"layer_types": {}})

    def of_types(self, layer_names: Iterable[str]) -> dict[str, "PositionConfig"]:
        """Return the keys of every layer type, in the order in which the types first occur."""
        return {name: self.of_type(name) for name in dict.fromkeys(layer_names)}

    def original_length(self, seq_length: int) -> int:
        """Return L, the length to which rotary_frequencies and the extension refer. It is
        rope_scaling.original_max_position_embeddings if that is set, else seq_length.

        Distance maps, logit scaling and evaluation always use seq_length, the length of the latest training.
        """
        return (self.rope_scaling and self.rope_scaling.original_max_position_embeddings) or seq_length

    @property
    def embedding(self) -> methods.PositionEmbedding:
        """The declaration of `pos_emb`."""
        return methods.find("pos_emb", self.pos_emb)

    @property
    def frequencies(self) -> methods.TrainingFrequencies | None:
        """The declaration of `rotary_frequencies`; None for the powers of rotary_emb_base."""
        given = self.rotary_frequencies
        return methods.find("rotary_frequencies", given.type) if given is not None else None

    @property
    def extension(self) -> methods.FrequencyExtension:
        """The declaration of the frequency extension; `default` if there is none."""
        return methods.find("rope_scaling", self.rope_scaling.rope_type if self.rope_scaling else "default")

    @property
    def distance_map(self) -> methods.DistanceMap | None:
        """The declaration of the distance map, or None."""
        return methods.find("relative_positions", self.relative_positions.type) if self.relative_positions else None

    @property
    def scaling(self) -> methods.LogitScaling:
        """The declaration of the logit scaling; `none` if there is none."""
        return methods.find("logit_scaling", str(getattr(self.logit_scaling, "type", None) or self.logit_scaling))

    @property
    def gate(self) -> methods.ForgettingGate | None:
        """The declaration of the forgetting gate, or None."""
        return methods.find("forgetting_gate", self.forgetting_gate) if self.forgetting_gate else None

    @property
    def embedding_options(self) -> dict[str, Any]:
        """Options of the position embedding. Options that GPT-NeoX has are keys of this group. All other options come
        from `pos_emb_options`.
        """
        given = self.pos_emb_options.given if self.pos_emb_options is not None else {}
        names = ("rpe_num_buckets", "rpe_max_distance", "alibi_slope_scale")
        return given | {name: getattr(self, name) for name in names}

    @property
    def score_form(self) -> tuple[str, dict[str, Any]]:
        """`pos_emb`, and its options in `pos_emb_options` with their defaults."""
        given = self.pos_emb_options.given if self.pos_emb_options is not None else {}
        defaults = {option.name: option.default for option in self.embedding.options}
        return self.pos_emb, defaults | {name: value for name, value in given.items() if value is not None}

    def frequency_count(self, head_dim: int) -> int:
        """Return the number of rotary frequencies of a head with `head_dim` features."""
        return self.embedding.frequency_count(int(head_dim * self.rotary_pct), self.embedding_options)

    def mean_keys(self, length: int) -> float:
        """Return the mean number of keys that a query attends to in a sequence of `length` tokens."""
        if self.attention_chunk_size is not None:
            whole, rest = divmod(length, self.attention_chunk_size)
            chunk = self.attention_chunk_size
            return (whole * chunk * (chunk + 1) + rest * (rest + 1)) / (2 * length)
        seen = length if self.sliding_window_width is None else min(self.sliding_window_width + 1, length)
        return seen * (length - (seen - 1) / 2) / length

    def choices(self) -> Iterator[tuple[methods.Choice, dict[str, Any]]]:
        """Yield every selected choice with the options that are set."""
        yield self.embedding, self.embedding_options
        for choice, selected in (
            (self.frequencies, self.rotary_frequencies),
            (self.extension, self.rope_scaling),
            (self.distance_map, self.relative_positions),
            (self.scaling, self.logit_scaling),
            (self.gate, None),
        ):
            if choice is not None:
                yield choice, selected.given if isinstance(selected, Selected) else {}

    def reason_against(self, key: str, seq_length: int, head_dim: int) -> str | None:
        """Return why the choice of a key does not work with the other choices in a model of this shape, or None."""
        chosen = {choice.key: (choice, given) for choice, given in self.choices()}
        if key not in chosen:
            return None
        (choice, given), rotated = chosen[key], int(head_dim * self.rotary_pct)
        original = self.original_length(seq_length)
        length = original if choice.from_original_length else seq_length
        use = methods.Use(
            options=choice.resolved(given, length) if not choice.lacking(given) else given,
            seq_length=seq_length,
            original_length=original,
            rotated=rotated,
            frequencies=self.frequency_count(head_dim),
            pos_emb=self.embedding,
            others={name: other.name for name, (other, _) in chosen.items()},
        )
        return choice.reason_against(use)
