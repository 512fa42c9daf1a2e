"""CoCA-Strict against CoCA-Slack: Table 3 of the CoCA paper."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_coca.evaluation.perplexity.records import PerplexityResult
from megatron_coca.evaluation.report.document import NOTHING, Block, Entry, Line, Table
from megatron_coca.evaluation.report.grouping import Comparable, Group, Series, groups
from megatron_coca.evaluation.report.parts import passkey, perplexity
from megatron_coca.evaluation.report.provenance import heading, origin
from megatron_coca.evaluation.report.published import TABLES, use_of
from megatron_coca.evaluation.report.reading import Loaded, of_type
from megatron_coca.evaluation.report.tables import (
    THEIRS,
    number,
    published_lines,
    published_table,
    starred,
    training_lengths,
)
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.retrieval.records import PasskeyResult

Read = Callable[[Series[Any], Any], Entry]
Measures = tuple[str, str, type[Result], Comparable[Any], Read]

MEASURES: tuple[Measures, ...] = (
    ("strict perplexity", "Perplexity", PerplexityResult, perplexity.COMPARABLE, perplexity.cell_entry),
    (
        "strict passkey",
        "Passkey accuracy",
        PasskeyResult,
        passkey.COMPARABLE,
        lambda _, cell: Entry(number(cell.accuracy), cell.accuracy),
    ),
)
"""Metric of the paper's table, its name, the results, what must agree, and the entry of a series' cell."""


def build(loaded: Sequence[Loaded], papers: bool) -> list[Block]:
    """A table for each group that has both forms, used in the same way."""
    blocks = []
    for metric, title, kind, comparable, read in MEASURES:
        for place, group in enumerate(groups(of_type(loaded, kind), comparable), 1):
            if pairs := _pairs(group):
                name = f"{metric.replace(' ', '-')}-{place}"
                tables = _tables(group, pairs, name, title, read, metric if papers else "")
                blocks.append(Block(heading(group), (origin(group),), (), tables))
    return blocks


def _pairs(group: Group[Any]) -> list[tuple[Series[Any], Series[Any]]]:
    """Slack and Strict of the same use and training length."""
    return [
        (slack, strict)
        for slack in group.series
        for strict in group.series
        if (use := use_of(slack.header)) is not None
        and use.pos_emb == "coca"
        and replace(use, pos_emb="coca_strict") == use_of(strict.header)
        and slack.header.checkpoint.seq_length == strict.header.checkpoint.seq_length
    ]


def _tables(
    group: Group[Any],
    pairs: Sequence[tuple[Series[Any], Series[Any]]],
    name: str,
    title: str,
    read: Read,
    metric: str,
) -> tuple[Table, ...]:
    """Ours, with the paper's rows below where the training length is the same; else its table on its own."""
    trained = training_lengths(group)
    theirs = [table for table in TABLES if table.metric == metric]
    joined = [table for table in theirs if table.training_length in trained]
    columns = sorted({key[0] for pair in pairs for each in pair for key in each.cells})
    columns = sorted({*columns, *(at for table in joined for at in table.columns if isinstance(at, int))})
    lines = [line for pair in pairs for line in _lines(*pair, columns, read)]
    lines += [line for table in joined for line in published_lines(table, columns, None)]
    sources = tuple(f"{table.name}: {table.setting}; {THEIRS}." for table in joined)
    caption = f"{title}: CoCA-Slack, and what CoCA-Strict adds to it"
    main = Table(name, caption, ("at length", *starred(columns, trained)), tuple(lines), sources=sources)
    return main, *(published_table(table, None, name) for table in theirs if table not in joined)


def _lines(slack: Series[Any], strict: Series[Any], columns: Sequence[int], read: Read) -> tuple[Line, Line]:
    first, second = (
        [read(series, series.cells[column,]) if (column,) in series.cells else NOTHING for column in columns]
        for series in (slack, strict)
    )
    differences = tuple(map(_difference, first, second))
    return Line(slack.label, tuple(first)), Line(f"{strict.label}: difference", differences)


def _difference(slack: Entry, strict: Entry) -> Entry:
    if slack.value is None or strict.value is None:
        return NOTHING
    if slack.partial or strict.partial:
        return Entry("–", note=slack.note or strict.note)
    return Entry(number(strict.value - slack.value, sign=True), strict.value - slack.value)
