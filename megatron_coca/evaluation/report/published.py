"""Numbers that papers report, as printed, matched to our results with the same position method."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megatron_coca.config.position import Selected, read_choice
from megatron_coca.evaluation.results import EvaluationError, Result
from megatron_coca.safe_yaml import read_yaml

SOURCE = "CoCA paper, arXiv:2309.08646v3"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
DEFAULT_BASE = 10000.0


@dataclass(frozen=True)
class MethodKey:
    """A position method at evaluation; two results use the same method if their keys are equal.

    Options that a method does not have are None.
    """

    pos_emb: str  # the score form
    rope: str = "default"  # rope_type of the frequency extension
    factor: float | None = None  # of the extension
    exponent: float | None = None  # b of ntk_mixed
    base: float = DEFAULT_BASE
    positions: str = "none"  # the relative-position map
    window: float | None = None  # of the map, as a share of the training length
    leak: float | None = None  # k of Leaky ReRoPE, with the default or the value that a target length gives filled in
    logits: str = "none"
    trained: "MethodKey | None" = None  # what the weights were trained with; None for the score form alone


def method_key(result: Result) -> MethodKey | None:
    """The method that a result was measured with; None for a refused variant, for which nothing was computed, and for
    layers that differ.

    Raises EvaluationError where the file has an option that no position method has.
    """
    if result.environment.backend is None:
        return None
    before = result.checkpoint.trained_with
    settings = {**before, **result.overrides}
    others = {"layer_types", "sliding_window_width", "attention_chunk_size", "sink_logits", "forgetting_gate"}
    if settings.keys() & others:
        return None  # no paper's table has such models
    trained, used = _key(before, result), _key(settings, result)
    return replace(used, trained=trained if trained != MethodKey(trained.pos_emb) else None)


def _key(settings: Mapping[str, Any], result: Result) -> MethodKey:
    """The method of the settings in a result file, without what the weights were trained with."""
    scaling = _selected("rope_scaling", settings, result)
    relative = _selected("relative_positions", settings, result)
    extended = scaling.given if scaling is not None else {}
    length = result.checkpoint.seq_length
    mapped = relative.settings(length) if relative is not None else {}
    if "target_length" in mapped:
        mapped["leak"] = length / (2 * mapped["target_length"])
    return MethodKey(
        pos_emb=result.checkpoint.pos_emb,
        rope=scaling.rope_type if scaling is not None else "default",
        factor=extended.get("factor"),
        exponent=extended.get("b"),
        base=float(settings.get("rotary_emb_base", DEFAULT_BASE)),
        positions=relative.type if relative is not None else "none",
        window=mapped["window"] / length if mapped else None,
        leak=mapped.get("leak"),
        logits=str(settings.get("logit_scaling", "none")),
    )


def _selected(key: str, settings: Mapping[str, Any], result: Result) -> Selected | None:
    if not isinstance(settings.get(key), Mapping):
        return None
    try:
        return read_choice(key, settings[key])
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (key, *first["loc"])))
        raise EvaluationError(
            f"label `{result.label}` of {result.task}: {name}: {first['msg']}; measure it again"
        ) from error


@dataclass(frozen=True)
class PublishedRow:
    """One row as printed, and its method; None where no result file can express it."""

    name: str
    values: tuple[str, ...]
    method: MethodKey | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values of a row of perplexities or accuracies, NaN where the model ran out of memory."""
        return tuple(math.nan if value == "OOM" else float(value) for value in self.values)

    def is_method_of(self, result: Result) -> bool:
        return self.method is not None and self.method == method_key(result)


@dataclass(frozen=True)
class PublishedTable:
    """A table, or a section of one, of a paper."""

    name: str  # as in the paper
    metric: str  # unit of the numbers, by which report sections select tables
    setting: str  # model, training and data behind the numbers
    training_length: int
    rows: tuple[PublishedRow, ...] = ()
    columns: tuple[int | str, ...] = LENGTHS  # lengths in tokens, or other column heads
    source: str = SOURCE
    # With measurements of all models, of those of the same training length, or of those of a method among the rows.
    shown: Literal["always", "same length", "same method"] = "always"
    apart: bool = False  # never in one table with ours: rows of differences
    measured: bool = True  # False for a table of formulas

    def is_shown_with(self, training_lengths: Collection[int], methods: Iterable[MethodKey]) -> bool:
        if self.shown == "same method":
            return any(row.method == method for row in self.rows for method in methods)
        return self.shown == "always" or self.training_length in training_lengths


def _row(row: Mapping[str, Any]) -> PublishedRow:
    fields = row.get("method")
    method = None if fields is None else _method(fields)
    return PublishedRow(row["name"], tuple(str(row["values"]).split()), method)


def _method(fields: Mapping[str, Any]) -> MethodKey:
    trained = fields.get("trained")
    own = MethodKey(**{name: value for name, value in fields.items() if name != "trained"})
    return replace(own, trained=own if trained == "same" else MethodKey(**trained)) if trained else own


def _table(table: Mapping[str, Any]) -> PublishedTable:
    sequences = {"rows": tuple(map(_row, table["rows"])), "columns": tuple(table.get("columns", LENGTHS))}
    return PublishedTable(**{**table, **sequences})


TABLES = {table["name"]: _table(table) for table in read_yaml(Path(__file__).with_suffix(".yaml"))}
"""Every published table by its name, in the order of a report."""


def tables_of(metric: str) -> list[PublishedTable]:
    return [table for table in TABLES.values() if table.metric == metric]


SHORT_CONTEXT = TABLES["Table 5"]
TASKS_BY_GROUP: dict[str, tuple[str, ...]] = {
    "Reasoning": ("copa", "sglue_rte", "ax_b", "ax_g", "ocnli", "cmnli"),
    "Understanding": ("c3", "csl", "eprstmt"),
    "Language": ("wic", "wsc", "chid", "afqmc"),
    "Examination": ("mmlu", "cmmlu", "ceval-valid"),
    "Knowledge": ("boolq",),
}
"""The 17 tasks behind Table 5 by their names in lm-evaluation-harness and this project, in the groups that the README
of OpenCompass has for them. arXiv version 3 prints neither the tasks nor their values, only means of groups, and no
Knowledge. It reports accuracies.
"""

AVERAGED_GROUPS = SHORT_CONTEXT.columns[:-1]
"""The groups whose means Table 5 averages, each counting the same: so its own four averages come out."""

COST = (
    "Published (CoCA paper, arXiv:2309.08646v3, Figure 6 and appendix C): CoCA is about 5% to 10% slower than vanilla "
    "self-attention at inference, and needs about 60 GB of GPU memory at a length of 32k with the opt_einsum "
    "contraction (350M parameters)."
)
