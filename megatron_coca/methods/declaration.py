"""Declarations of position methods: names, options, requirements and supported export formats. Imports no PyTorch.

A position method is a combination of choices, and each choice is the value of one key. A choice is declared once, here
or in a file of the user, and one formula in `attention/positions` computes it. The configuration and its checks, tables
in the documents, reports, exporters, importers and the plugin all read the declarations.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

Kind = Literal["count", "whole", "positive", "share", "factor", "flag", "choice", "positives"]
"""Type and range of an option. count: an integer from 1 on; whole: an integer from 0 on; positive: a number above 0;
share: a number above 0 and at most 1; factor: a number from 1 on; flag: true or false; choice: one of `choices`;
positives: a list of numbers above 0.
"""
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Option:
    """One option of a choice.

    Attributes:
        meaning: the description in docs/config.md.
        least, most: narrower limits of a number.
        default: the value if the option is not given. None if `by_length` computes it or the formula needs no value.
        by_length: a function of the training length L and the given options that returns the default.
        shown: the text of that default in tables.
    """

    name: str
    kind: Kind
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
    """The model around a choice, for its requirements.

    Attributes:
        options: the options of the choice with their defaults.
        seq_length: the training length in tokens.
        original_length: L in the formulas of frequency extensions.
        rotated: number of rotated features of a head.
        pos_emb: the position embedding of the model.
        others: names of all choices, by key.
    """

    options: Values
    seq_length: int
    original_length: int
    rotated: int
    pos_emb: "PositionEmbedding"
    others: Mapping[str, str]


Check = Callable[[Use], str | None]
"""A function that returns why a choice cannot be used in a model, or None."""


@dataclass(frozen=True)
class Choice:
    """One value of a key.

    Attributes:
        label: the name in tables and figures.
        source: the paper, article or code.
        options: all options that the formula reads.
        trained: the choice is part of the training. Weights are evaluated with it if and only if they were trained
            with it, with the same options.
        length_dependent: the result depends on the length of the input.
        checks: its requirements.
        huggingface: `stock` if transformers' own classes compute it; `file` if the modelling file of our exports does,
            which contains the formulas; else the reason why it cannot be exported.
        neox: `upstream` if GPT-NeoX computes it; `plugin` if the plugin does; else the reason why neither can.
        compute: the formula of a choice that a user's file declares. None for a choice of this package, which has a row
            of its name in `attention`.
    """

    key: ClassVar[str]
    selector: ClassVar[str] = "type"
    name: str
    label: str
    source: str
    _: KW_ONLY
    options: tuple[Option, ...] = ()
    trained: bool = False
    length_dependent: bool = False
    checks: tuple[Check, ...] = ()
    huggingface: str = "file"
    neox: str = "plugin"
    compute: Any = field(default=None, compare=False, repr=False)

    def not_expressed(self, attribute: str, expressed: tuple[str, ...], carried: tuple[str, ...] = ()) -> str | None:
        """Return why the program of an attribute (`huggingface`, `neox`) cannot express the choice, or None if it can.

        It can if the attribute is one of `expressed`, or for a choice of a user's file one of `carried`.
        """
        said = getattr(self, attribute)
        if said in expressed and said not in carried and self.compute is not None:
            return f"{self.key} {self.name}: declared outside of megatron_coca"
        return None if said in expressed else f"{self.key} {self.name}: {said}"

    def option(self, name: str) -> Option | None:
        """Return the option of that name, or None."""
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
        """Return why the choice cannot be used in this model, or None."""
        if lacking := self.lacking(use.options):
            return f"{self.selector} {self.name} needs {lacking[0]}; set it"
        return "; ".join(reason for check in self.checks if (reason := check(use)) is not None) or None


@dataclass(frozen=True, kw_only=True)
class PositionEmbedding(Choice):
    """A value of `pos_emb`: operands of queries and keys, a bias, or vectors that are added to the embedding.

    Attributes:
        query, key_operand, bias: Q', K' and the bias of the scores, for tables.
        description: the text for model cards.
        rotary: it rotates queries and keys, so there are frequencies to extend and distances to map.
        shift_invariant: scores depend only on differences of positions.
        by_distance: only the attention scores depend on positions. False if vectors are added to the embedding.
        biased: it adds a bias to the scores.
        by_query: the bias depends also on the query's position in its document.
        weights: learned weights are in each layer, shared by all layers, or a table of positions.
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


@dataclass(frozen=True)
class StockRope:
    """The frequency extension in transformers' own code.

    Attributes:
        length: the key of L: `original_max_position_embeddings`, `max_position_embeddings`, or None without L.
        derives_factor: a missing factor is max_position_embeddings / original length.
        by_longest: the frequencies of a batch follow its longest text; our modelling file takes each row's length.
    """

    length: str | None = None
    derives_factor: bool = False
    by_longest: bool = False


@dataclass(frozen=True, kw_only=True)
class FrequencyExtension(Choice):
    """A value of `rope_scaling.rope_type`: other rotary frequencies.

    Attributes:
        rule: the frequencies, for tables.
        stock: how transformers computes it, if `huggingface` is `stock`.
        least_rotated: rotated features of a head that it needs.
        learned: its frequencies are weights of the model.
        measures_length: its formula depends on L.
        switches: it has one set of frequencies up to L and another beyond, so decoding recomputes all tokens at L.
    """

    key: ClassVar[str] = "rope_scaling"
    selector: ClassVar[str] = "rope_type"
    rule: str
    stock: StockRope = StockRope()
    least_rotated: int = 2
    learned: bool = False
    measures_length: bool = False
    switches: bool = False

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
class DistanceMap(Choice):
    """A value of `relative_positions.type`: the scores of distant pairs use another distance.

    Attributes:
        rule: the formula for distant pairs, for tables.
        training_only: models are trained with it and evaluated without it.
        shifts_positions: pairs keep their distances but not their positions, so scores must be shift-invariant.
        counts_tokens: it takes positions as numbers of tokens, so training positions cannot have gaps.
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
    """A value of `logit_scaling`: a factor on the logits of each query by its position.

    Attributes:
        rule: the formula of the factor, for tables.
        learned: every head of every layer multiplies the factor by a learned number, initially the option `initial`.
        evaluation_only: models are trained without it.
    """

    key: ClassVar[str] = "logit_scaling"
    rule: str = ""
    learned: bool = False
    evaluation_only: bool = False


@dataclass(frozen=True, kw_only=True)
class ForgettingGate(Choice):
    """A value of `forgetting_gate`: a learned bias of every pair, a sum over the tokens after its key, up to its query.

    Attributes:
        rule: the term of a token x in this sum, for a head with weights w and b, for tables.
    """

    key: ClassVar[str] = "forgetting_gate"
    rule: str = ""


TABLES: dict[str, dict[str, Any]] = {
    "pos_emb": {},
    "rope_scaling": {},
    "relative_positions": {},
    "logit_scaling": {},
    "forgetting_gate": {},
}
"""Every declared choice by key and name."""


def declare(choices: Iterable[Choice]) -> None:
    """Add choices to the tables.

    Raises:
        ValueError: the name of a choice is taken.
    """
    for choice in choices:
        if choice.name in TABLES[choice.key]:
            raise ValueError(f"{choice.key}: {choice.name} is already declared; use another name")
        TABLES[choice.key][choice.name] = choice


def find(key: str, name: str) -> Any:
    """Return the declaration of a choice. Raises KeyError if there is none."""
    return TABLES[key][name]


def names(key: str, **attributes: Any) -> tuple[str, ...]:
    """Return the names of the choices of a key that have these attributes."""
    return tuple(
        name
        for name, choice in TABLES[key].items()
        if all(getattr(choice, attribute) == value for attribute, value in attributes.items())
    )
