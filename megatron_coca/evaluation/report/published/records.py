"""Numbers of papers: what they are, and which of our measurements use the same method."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_coca.evaluation.results import Result


@dataclass(frozen=True)
class Use:
    """A position method as it is used: the form that was trained, and what evaluation adds.

    A field that is None in the row of a paper matches anything. `window` is a share of the training length.
    """

    pos_emb: str | None = None
    rope: str | None = "default"
    factor: float | None = None
    positions: str | None = "none"
    window: float | None = None
    leak: float | None = None
    logits: str | None = "none"

    def covers(self, other: "Use") -> bool:
        """Whether `other` is a use of this kind."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(wanted is None or wanted == given for wanted, given in pairs)


DEFAULT_WINDOWS = {"rerope": 0.5, "leaky_rerope": 0.5, "self_extend": 0.25}
"""Shares of the training length that a map takes where its options name no window."""


def use_of(result: Result) -> Use | None:
    """How a result's weights were used: as they were trained, but for what evaluation changed.

    None for a refused use: nothing was computed, and its file says what was asked for, not what that means.
    """
    if result.environment.backend is None:
        return None
    settings = {**result.checkpoint.trained_with, **result.overrides}
    scaling, relative = (_mapping(settings.get(key)) for key in ("rope_scaling", "relative_positions"))
    kind = str(relative.get("type", "none"))
    window = relative.get("window")
    return Use(
        pos_emb=result.checkpoint.pos_emb,
        rope=str(scaling.get("rope_type", "default")),
        factor=scaling.get("factor"),
        positions=kind,
        window=window / result.checkpoint.seq_length if window else DEFAULT_WINDOWS.get(kind),
        leak=relative.get("leak"),
        logits=str(settings.get("logit_scaling", "none")),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class PublishedRow:
    """One row as it is printed, and the use of weights that it stands for; None where no result file can say it."""

    name: str
    values: tuple[str, ...]
    use: Use | None = None

    def is_of(self, result: Result) -> bool:
        """Whether a result uses weights in the way of this row."""
        given = use_of(result)
        return self.use is not None and given is not None and self.use.covers(given)


@dataclass(frozen=True)
class PublishedTable:
    """A table, or a part of one, of a paper.

    Attributes:
        name: what the paper calls it.
        source: paper or page.
        metric: what the numbers are; the sections of the report ask for it.
        setting: model, training and data behind the numbers.
        training_length: of the models, in tokens.
        columns: lengths in tokens, or what else is measured.
        shown: beside which measurements of its metric it stands: all, those of models of its training length, or those
            that use weights as one of its rows does.
        measured: whether its numbers are measurements.
    """

    name: str
    source: str
    metric: str
    setting: str
    training_length: int
    columns: tuple[int | str, ...]
    rows: tuple[PublishedRow, ...]
    shown: Literal["always", "same length", "same method"] = "always"
    measured: bool = True

    def covers(self, use: Use) -> bool:
        """Whether a row of it has this use of weights."""
        return any(row.use is not None and row.use.covers(use) for row in self.rows)

    def wanted(self, training_lengths: Collection[int], uses: Iterable[Use]) -> bool:
        """Whether it stands beside measurements of these models, used like that."""
        if self.shown == "same method":
            return any(map(self.covers, uses))
        return self.shown == "always" or self.training_length in training_lengths


def row(name: str, values: str, use: Use | None = None) -> PublishedRow:
    """A row whose values are given as the paper prints them, blanks between."""
    return PublishedRow(name, tuple(values.split()), use)
