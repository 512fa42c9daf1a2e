"""Numbers of papers: what they are, and which of our measurements use the same method."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from megatron_coca.config.base import ConfigGroup
from megatron_coca.config.model import SCALING_OPTIONS, RelativePositions, RopeScaling
from megatron_coca.evaluation.results import EvaluationError, Result

DEFAULT_BASE = 10000.0
LEAKY_MAPS = frozenset({"leaky_rerope", "inv_leaky_rerope"})
"""Maps whose distances beyond the window grow by 1/leak a token."""


@dataclass(frozen=True)
class Use:
    """A position method as it is used: what the weights were trained with, and what evaluation adds.

    Two uses are one method if all fields are equal; options that a method does not have are None.

    Attributes:
        pos_emb: the score form.
        rope: the extension of the frequencies.
        factor: of the extension.
        exponent: b of `ntk_mixed`.
        base: of the rotary frequencies.
        positions: the relative-position map.
        window: of the map, as a share of the training length.
        leak: k of Leaky ReRoPE, the default or what follows from a target length filled in.
        logits: the logit scaling.
        trained: the method that the weights were trained or fine-tuned with; None for the score form alone.
    """

    pos_emb: str
    rope: str = "default"
    factor: float | None = None
    exponent: float | None = None
    base: float = DEFAULT_BASE
    positions: str = "none"
    window: float | None = None
    leak: float | None = None
    logits: str = "none"
    trained: "Use | None" = None


def use_of(result: Result) -> Use | None:
    """How a result's weights were used: as they were trained, but for what evaluation changed.

    None for a refused use: nothing was computed, and its file says what was asked for, not what that means.
    Raises EvaluationError where the file has an option that no position method has.
    """
    if result.environment.backend is None:
        return None
    before = result.checkpoint.trained_with
    trained, used = _method(before, result), _method({**before, **result.overrides}, result)
    return replace(used, trained=trained if trained != Use(trained.pos_emb) else None)


def _method(settings: Mapping[str, Any], result: Result) -> Use:
    """The method that the settings of a result file say, whatever the weights were trained with."""
    scaling = _options(RopeScaling, settings.get("rope_scaling"), result)
    relative = _options(RelativePositions, settings.get("relative_positions"), result)
    known = SCALING_OPTIONS[scaling.rope_type] if scaling is not None else ()
    length = result.checkpoint.seq_length
    mapped = relative.settings(length) if relative is not None else {}
    return Use(
        pos_emb=result.checkpoint.pos_emb,
        rope=scaling.rope_type if scaling is not None else "default",
        factor=scaling.factor if scaling is not None and "factor" in known else None,
        exponent=scaling.b if scaling is not None and "b" in known else None,
        base=float(settings.get("rotary_emb_base", DEFAULT_BASE)),
        positions=relative.type if relative is not None else "none",
        window=mapped["window"] / length if mapped else None,
        leak=mapped["leak"] if relative is not None and relative.type in LEAKY_MAPS else None,
        logits=str(settings.get("logit_scaling", "none")),
    )


G = TypeVar("G", bound=ConfigGroup)


def _options(kind: type[G], value: Any, result: Result) -> G | None:
    """A group of keys as a result file has it, with its defaults filled in."""
    if not isinstance(value, Mapping):
        return None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise EvaluationError(
            f"label `{result.label}` of {result.task}: {place}: {first['msg']}; measure it again"
        ) from error


@dataclass(frozen=True)
class PublishedRow:
    """One row as it is printed, and the use of weights that it stands for; None where no result file can say it."""

    name: str
    values: tuple[str, ...]
    use: Use | None = None

    def is_of(self, result: Result) -> bool:
        """Whether a result uses weights in the way of this row."""
        return self.use is not None and self.use == use_of(result)


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
        return any(row.use == use for row in self.rows)

    def wanted(self, training_lengths: Collection[int], uses: Iterable[Use]) -> bool:
        """Whether it stands beside measurements of these models, used like that."""
        if self.shown == "same method":
            return any(map(self.covers, uses))
        return self.shown == "always" or self.training_length in training_lengths


def row(name: str, values: str, use: Use | None = None) -> PublishedRow:
    """A row whose values are given as the paper prints them, blanks between."""
    return PublishedRow(name, tuple(values.split()), use)
