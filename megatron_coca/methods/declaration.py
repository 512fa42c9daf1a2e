"""Declarations of position methods: names, options, requirements and supported export formats. Imports no PyTorch.

A position method is a combination of choices, and each choice is the value of one key. A choice is declared once, here
or in a file of the user, and one formula in `attention/positions` computes it. The configuration and its checks, tables
in the documents, reports, exporters, importers and the plugin all read the declarations.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

OptionKind = Literal["count", "whole", "positive", "share", "factor", "flag", "choice", "positives", "angle"]
"""Type and range of an option. count: an integer of at least 1; whole: an integer of at least 0; positive: a number
above 0; share: a number above 0 and at most 1; factor: a number of at least 1; flag: true or false; choice: one of
`choices`; positives: a list of numbers above 0; angle: radians from -pi to pi, or `random`.
"""
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Option:
    """One option of a choice.

    Attributes:
        meaning: the description in docs/config.md.
        least, most: limits of a number, if they are narrower than the limits of its kind.
        default: the value if the option is not set. None if `by_length` computes it or the formula needs no value.
        by_length: a function of the training length L and the given options that returns the default.
        shown: the text that tables show for a default from `by_length`.
    """

    name: str
    kind: OptionKind
    meaning: str
    default: Any = None
    required: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    by_length: Callable[[int, Values], Any] | None = None
    shown: str = ""


@dataclass(frozen=True)
class Use:
    """Facts about the model in which a choice is used. The checks of the choice read them.

    Attributes:
        options: the options of the choice with their defaults.
        seq_length: the training length in tokens.
        original_length: L in the formulas of frequency extensions.
        rotated: number of rotated features per head.
        frequencies: number of rotary frequencies per head.
        pos_emb: the position embedding of the model.
        others: names of all choices in the model, by key.
    """

    options: Values
    seq_length: int
    original_length: int
    rotated: int
    frequencies: int
    pos_emb: "PositionEmbedding"
    others: Mapping[str, str]


UseCheck = Callable[[Use], str | None]
"""A function that returns the reason why a choice cannot be used in a model, or None."""


@dataclass(frozen=True)
class Choice:
    """One value of a key.

    Attributes:
        label: the name in tables and figures.
        source: the paper, article or code from which the choice comes.
        meaning: a few words that explain the label below a report.
        options: all options that the formula reads.
        trained: whether the choice is part of training. Weights are evaluated with it if and only if they were trained
            with it, with the same options.
        length_dependent: whether the result depends on the input length.
        checks: functions that check the requirements of the choice.
        huggingface: `stock` if transformers' own classes implement the choice; `file` if the modelling file of our
            exports implements it; else the reason why the choice cannot be exported.
        neox: `upstream` if GPT-NeoX implements the choice; `plugin` if our plugin implements it; else the reason why
            neither does. The default is `plugin`, except for biases, which the plugin does not compute.
        compute: the formula of a choice that a user's file declares. None for a choice of this package, because its
            formula is in a table of `attention`.
    """

    key: ClassVar[str]
    selector: ClassVar[str] = "type"
    from_original_length: ClassVar[bool] = False  # whether L is the original length, and not the training length
    name: str
    label: str
    source: str
    _: KW_ONLY
    meaning: str = ""
    options: tuple[Option, ...] = ()
    trained: bool = False
    length_dependent: bool = False
    checks: tuple[UseCheck, ...] = ()
    huggingface: str = "file"
    neox: str = "plugin"
    compute: Any = field(default=None, compare=False, repr=False)

    def not_expressed(self, attribute: str, expressed: tuple[str, ...], carried: tuple[str, ...] = ()) -> str | None:
        """Return the reason why an export cannot represent the choice, or None if it can.

        `attribute` is `huggingface` or `neox`. The export can represent the choice if the value of the attribute is in
        `expressed` and, for a user's choice, also in `carried`.
        """
        said = getattr(self, attribute)
        if said in expressed and said not in carried and self.compute is not None:
            return f"{self.key} {self.name}: declared outside megatron_coca"
        return None if said in expressed else f"{self.key} {self.name}: {said}"

    def option(self, name: str) -> Option | None:
        """Return the option with this name, or None."""
        return next((option for option in self.options if option.name == name), None)

    def resolved(self, given: Values, seq_length: int) -> dict[str, Any]:
        """Return the value of every option: the given value, else the default for the training length."""
        values: dict[str, Any] = {}
        for option in self.options:
            value = given.get(option.name)
            value = option.default if value is None else value
            values[option.name] = value
        for option in self.options:
            if values[option.name] is None and option.by_length is not None:
                values[option.name] = option.by_length(seq_length, values)
        return values

    def lacking(self, given: Values) -> list[str]:
        """Return the names of required options that are not given."""
        return [option.name for option in self.options if option.required and given.get(option.name) is None]

    def reason_against(self, use: Use) -> str | None:
        """Return the reason why the choice cannot be used in this model, or None."""
        if lacking := self.lacking(use.options):
            return f"{self.selector} {self.name} needs {lacking[0]}; set it"
        return "; ".join(reason for check in self.checks if (reason := check(use)) is not None) or None


NO_BIAS = "GPT-NeoX has no such bias; use megatron-coca train"


@dataclass(frozen=True, kw_only=True)
class PositionEmbedding(Choice):
    """A value of `pos_emb`: operands of queries and keys, a bias, or vectors that are added to the embedding.

    Attributes:
        query, key_operand, bias: Q', K' and the bias of the scores, for tables.
        description: the text for model cards; by default the label.
        rotary: whether queries and keys are rotated, so that frequencies can be extended and distances mapped.
        shift_invariant: whether scores depend only on differences of positions.
        by_distance: whether only attention scores depend on positions. False if vectors are added to the embedding.
        biased: whether a bias is added to the scores.
        by_query: whether the bias also depends on the query's position in its document.
        weights: where the learned weights are: in each layer, shared by all layers, or in a table of positions. None if
            the embedding has no learned weights.
        frequencies: whether each pair of rotated features or each single feature has a frequency. If the embedding has
            an option `frequencies`, the option overrides this attribute.
    """

    key: ClassVar[str] = "pos_emb"
    query: str = "`q`"
    key_operand: str = "`k`"
    bias: str = ""
    description: str = ""
    rotary: bool = False
    shift_invariant: bool = True
    by_distance: bool = True
    biased: bool = False
    by_query: bool = False
    weights: Literal["layer", "shared", "table"] | None = None
    frequencies: Literal["pair", "feature"] = "pair"

    def __post_init__(self) -> None:
        if not self.description:
            object.__setattr__(self, "description", self.label)
        if self.biased and self.neox == "plugin":
            object.__setattr__(self, "neox", NO_BIAS)

    def frequency_count(self, rotated: int, options: Values) -> int:
        """Return the number of frequencies of a head with this number of rotated features."""
        return rotated if options.get("frequencies", self.frequencies) == "feature" else rotated // 2


@dataclass(frozen=True)
class StockRope:
    """How transformers' own code implements a frequency extension.

    Attributes:
        length: the key that contains L: `original_max_position_embeddings` or `max_position_embeddings`. None if the
            formula has no L.
        derives_factor: whether a missing factor is computed as max_position_embeddings / original length.
        by_longest: whether the longest text of a batch sets the frequencies of all rows. Our modelling file uses the
            length of each row.
    """

    length: str | None = None
    derives_factor: bool = False
    by_longest: bool = False


@dataclass(frozen=True, kw_only=True)
class FrequencyExtension(Choice):
    """A value of `rope_scaling.rope_type`: changed rotary frequencies.

    Attributes:
        rule: the formula of the frequencies, for tables.
        stock: how transformers implements the extension, if `huggingface` is `stock`.
        least_rotated: minimum number of rotated features per head.
        learned: whether the frequencies are weights of the model.
        measures_length: whether the formula depends on L.
        switches: whether inputs beyond L use other frequencies than inputs up to L, so that decoding recomputes all
            tokens at L.
        of_training: whether the rule itself chooses the frequencies of training, so that it cannot extend those of
            `rotary_frequencies`.
    """

    key: ClassVar[str] = "rope_scaling"
    selector: ClassVar[str] = "rope_type"
    rule: str
    stock: StockRope = StockRope()
    least_rotated: int = 2
    learned: bool = False
    measures_length: bool = False
    switches: bool = False
    of_training: bool = False

    def reason_against(self, use: Use) -> str | None:
        if self.name != "default" and not use.pos_emb.rotary:
            return (
                f"rope_type {self.name} is not supported with pos_emb {use.pos_emb.name}, which has no frequencies to"
                " scale; set rope_scaling to null"
            )
        if use.pos_emb.rotary and use.rotated < self.least_rotated:
            return (
                f"rope_type {self.name} needs at least {self.least_rotated} rotated features per head; raise rotary_pct"
            )
        return super().reason_against(use)


@dataclass(frozen=True, kw_only=True)
class TrainingFrequencies(Choice):
    """A value of `rotary_frequencies.type`: rotary frequencies for training, which extensions change further.

    The formula returns the fastest frequency and the base: theta_j = fastest * base^(-2j/d).

    Attributes:
        rule: the formula of the frequencies, for tables.
    """

    key: ClassVar[str] = "rotary_frequencies"
    from_original_length: ClassVar[bool] = True
    rule: str

    def reason_against(self, use: Use) -> str | None:
        if not use.pos_emb.rotary:
            return (
                f"{self.name} is not supported with pos_emb {use.pos_emb.name}, which has no frequencies; set"
                " rotary_frequencies to null"
            )
        extension = find("rope_scaling", use.others["rope_scaling"])
        if extension.of_training:
            return (
                f"{self.name} is not supported with rope_type {extension.name}, which chooses the frequencies of"
                " training itself; remove one of them"
            )
        if extension.compute is not None:
            return (
                f"{self.name} is not supported with rope_type {extension.name} of a file in imports, which computes"
                " frequencies from rotary_emb_base; remove one of them"
            )
        return super().reason_against(use)


@dataclass(frozen=True, kw_only=True)
class DistanceMap(Choice):
    """A value of `relative_positions.type`: the scores of distant pairs use a different distance.

    Attributes:
        rule: the formula for distant pairs, for tables.
        training_only: whether models are trained with the map and evaluated without it.
        shifts_positions: whether positions shift and only distances are kept, so that scores must be shift-invariant.
        counts_tokens: whether positions are used as token counts, so that training positions cannot have gaps.
    """

    key: ClassVar[str] = "relative_positions"
    rule: str
    training_only: bool = False
    shifts_positions: bool = False
    counts_tokens: bool = False

    def reason_against(self, use: Use) -> str | None:
        if not use.pos_emb.rotary:
            return (
                f"{self.name} needs rotary positions, but pos_emb is {use.pos_emb.name}; set relative_positions to null"
                f" or pos_emb to one of {' | '.join(sorted(names('pos_emb', rotary=True)))}"
            )
        if self.shifts_positions and not use.pos_emb.shift_invariant:
            return (
                f"{self.name} shifts positions as the cache moves, but the scores of {use.pos_emb.name} are not"
                " shift-invariant; use pos_emb coca_strict or type lm_infinite"
            )
        if find("rope_scaling", use.others["rope_scaling"]).learned:
            name = use.others["rope_scaling"]
            return f"not supported with rope_type {name}, which is trained with random positions; remove one of them"
        return super().reason_against(use)


@dataclass(frozen=True, kw_only=True)
class LogitScaling(Choice):
    """A value of `logit_scaling`: a factor on the logits of each query, which depends on the query's position.

    Attributes:
        rule: the formula of the factor, for tables.
        learned: whether each head multiplies the factor by a learned number. The option `initial` is its initial value.
        evaluation_only: whether models are trained without the factor.
    """

    key: ClassVar[str] = "logit_scaling"
    rule: str = ""
    learned: bool = False
    evaluation_only: bool = False


@dataclass(frozen=True, kw_only=True)
class ForgettingGate(Choice):
    """A value of `forgetting_gate`: a learned bias, summed over the tokens after the key, up to the query.

    Attributes:
        rule: the formula of a token's term in this sum, for tables. x is the token's hidden state; w and b are the
            weights of a head.
    """

    key: ClassVar[str] = "forgetting_gate"
    rule: str = ""


TABLES: dict[str, dict[str, Any]] = {
    "pos_emb": {},
    "rotary_frequencies": {},
    "rope_scaling": {},
    "relative_positions": {},
    "logit_scaling": {},
    "forgetting_gate": {},
}
"""Every declared choice by key and name."""


def declare(choices: Iterable[Choice]) -> None:
    """Add choices to the tables.

    Raises:
        ValueError: a choice of the same name is already declared.
    """
    for choice in choices:
        if choice.name in TABLES[choice.key]:
            raise ValueError(f"{choice.key}: {choice.name} is already declared; use another name")
        TABLES[choice.key][choice.name] = choice


def find(key: str, name: str) -> Any:
    """Return the declaration of a choice. Raises KeyError if the choice is not declared."""
    return TABLES[key][name]


def names(key: str, **attributes: Any) -> tuple[str, ...]:
    """Return the names of a key's choices that have these attribute values."""
    return tuple(
        name
        for name, choice in TABLES[key].items()
        if all(getattr(choice, attribute) == value for attribute, value in attributes.items())
    )
