"""Declarations of position methods: names, options, requirements and who else can express them. Imports no PyTorch.

A position method is a composition of choices, each the value of one key. A choice is declared once, here or in a file
of the user, and computed by one formula in `attention/positions`. Whatever knows choices by name reads the
declarations: the configuration and its checks, tables in the documents, reports, exporters, importers and the plugin.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

Kind = Literal["count", "whole", "positive", "share", "factor", "flag", "choice", "positives"]
"""Type and range of an option: integers from 1 or 0, numbers above 0, above 0 and up to 1, or from 1 on, true or false,
one of `choices`, a list of numbers above 0.
"""
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Option:
    """One option of a choice.

    Attributes:
        meaning: for docs/config.md.
        least, most: narrower limits of a number.
        default: if it is not given; None where `by_length` computes it or the formula does without.
        by_length: (training length L, the given options) -> the default; `shown` is its text in tables.
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
    """The place of a choice in a model, for its requirements.

    Attributes:
        options: of the choice, defaults included.
        seq_length: the training length in tokens.
        original_length: L in the formulas of frequency extensions.
        rotated: rotated features of a head.
        pos_emb: the position embedding beside the choice.
        others: names of the other choices, by key.
    """

    options: Values
    seq_length: int
    original_length: int
    rotated: int
    pos_emb: "PositionEmbedding"
    others: Mapping[str, str]


Check = Callable[[Use], str | None]
"""Returns why a choice cannot be used there, or None."""


@dataclass(frozen=True)
class Choice:
    """One value of a key.

    Attributes:
        label: in tables and figures.
        source: paper, article or code.
        options: all that it reads.
        trained: part of the training: the weights are used with it at evaluation if and only if they were trained
            with it, with the same options.
        length_dependent: what it computes depends on the length of the input.
        checks: requirements.
        huggingface: `stock` if transformers' own classes compute it, `file` if the modelling file of our exports does,
            which is assembled from the formulas, otherwise the reason why it cannot be exported.
        neox: `upstream` if GPT-NeoX computes it, `plugin` if the plugin does, otherwise the reason why neither can.
        compute: the formula of a choice from outside of the package; None: the row of its name in `attention`.
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
        """Why the program of an attribute (`huggingface`, `neox`) cannot express the choice; None if it can, as the
        attribute is one of `expressed`, for a choice from outside of this package one of `carried`.
        """
        said = getattr(self, attribute)
        if said in expressed and said not in carried and self.compute is not None:
            return f"{self.key} {self.name}: declared outside of megatron_coca"
        return None if said in expressed else f"{self.key} {self.name}: {said}"

    def option(self, name: str) -> Option | None:
        """The option of that name, or None."""
        return next((option for option in self.options if option.name == name), None)

    def resolved(self, given: Values, seq_length: int) -> dict[str, Any]:
        """The value of every option: as given, else the default for the training length."""
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
        """Required options that are not given."""
        return [option.name for option in self.options if option.required and given.get(option.name) is None]

    def refusal(self, use: Use) -> str | None:
        """Why the choice cannot be used there, or None."""
        if lacking := self.lacking(use.options):
            return f"{self.selector} {self.name} needs {lacking[0]}"
        return "; ".join(reason for check in self.checks if (reason := check(use)) is not None) or None


@dataclass(frozen=True, kw_only=True)
class PositionEmbedding(Choice):
    """A value of `pos_emb`: the operands of queries and keys, a bias, or vectors added to the embedding.

    Attributes:
        query, key_operand, bias: Q', K' and what is added to the scores, for tables.
        description: for model cards.
        rotary: rotates, so it has frequencies to extend and distances to map.
        shift_invariant: scores depend only on differences of positions.
        by_distance: scores depend on positions through attention alone. Otherwise vectors are added to the embedding.
        by_query: the bias depends on the query's position in its document too.
        weights: the learned ones belong to each layer, are one set for all layers, or a table of positions.
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
    """How transformers' own code extends frequencies.

    Attributes:
        length: the key of its L: `original_max_position_embeddings`, `max_position_embeddings`, or None without one.
        derives_factor: a missing factor is max_position_embeddings over the original length.
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
        measures_length: its formula reads L.
        switches: it has one set of frequencies up to L and one beyond, so decoding computes all tokens again there.
    """

    key: ClassVar[str] = "rope_scaling"
    selector: ClassVar[str] = "rope_type"
    rule: str
    stock: StockRope = StockRope()
    least_rotated: int = 2
    learned: bool = False
    measures_length: bool = False
    switches: bool = False

    def refusal(self, use: Use) -> str | None:
        if self.name != "default" and not use.pos_emb.rotary:
            return (
                f"rope_type {self.name} is not available with pos_emb {use.pos_emb.name}, which has no frequencies to"
                " scale; set rope_scaling to null"
            )
        if use.pos_emb.rotary and use.rotated < self.least_rotated:
            return f"rope_type {self.name} needs at least {self.least_rotated} rotated features per head"
        return super().refusal(use)


@dataclass(frozen=True, kw_only=True)
class DistanceMap(Choice):
    """A value of `relative_positions.type`: distant pairs are scored at another distance.

    Attributes:
        rule: the far pairs, for tables.
        training_only: a model is trained with it and evaluated without.
        shifts_positions: pairs keep their distances and not their positions, so the score form must be shift-invariant.
        counts_tokens: it reads positions as numbers of tokens, so training cannot draw positions with gaps.
    """

    key: ClassVar[str] = "relative_positions"
    rule: str
    training_only: bool = False
    shifts_positions: bool = False
    counts_tokens: bool = False

    def refusal(self, use: Use) -> str | None:
        if not use.pos_emb.rotary:
            return (
                f"{self.name} needs rotary positions, and pos_emb is {use.pos_emb.name}; set relative_positions to null"
                f" or pos_emb to one of {' | '.join(sorted(names('pos_emb', rotary=True)))}"
            )
        if self.shifts_positions and not use.pos_emb.shift_invariant:
            return (
                f"{self.name} shifts positions as the cache moves, and the scores of {use.pos_emb.name} are not"
                " shift-invariant; use pos_emb coca_strict or type lm_infinite"
            )
        if find("rope_scaling", use.others["rope_scaling"]).learned:
            name = use.others["rope_scaling"]
            return f"not available with rope_type {name}, which draws positions at random in training"
        return super().refusal(use)


@dataclass(frozen=True, kw_only=True)
class LogitScaling(Choice):
    """A value of `logit_scaling`: a factor on the logits of each query by its position.

    Attributes:
        rule: the factor, for tables.
        learned: every head of every layer multiplies it by a learned number, which begins at the option `initial`.
        evaluation_only: a model is trained without it.
    """

    key: ClassVar[str] = "logit_scaling"
    rule: str = ""
    learned: bool = False
    evaluation_only: bool = False


@dataclass(frozen=True, kw_only=True)
class ForgettingGate(Choice):
    """A value of `forgetting_gate`: a learned bias on every pair by the tokens after its key, up to its query.

    Attributes:
        rule: what one of these tokens x adds to the bias of a head with weights w and b, for tables.
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
        ValueError: the name of one is taken.
    """
    for choice in choices:
        if choice.name in TABLES[choice.key]:
            raise ValueError(f"{choice.key}: {choice.name} is declared already; give yours another name")
        TABLES[choice.key][choice.name] = choice


def find(key: str, name: str) -> Any:
    """The declaration of a choice; KeyError if there is none."""
    return TABLES[key][name]


def names(key: str, **attributes: Any) -> tuple[str, ...]:
    """Names of the choices of a key whose declarations have these attributes."""
    return tuple(
        name
        for name, choice in TABLES[key].items()
        if all(getattr(choice, attribute) == value for attribute, value in attributes.items())
    )
