"""Tables by length in the papers' layout: labels down, lengths across, the papers' rows below ours."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_coca.evaluation.report.document import NOTHING, Entry, Line, ReportBlock, Table
from megatron_coca.evaluation.report.published import PublishedTable, use_of
from megatron_coca.evaluation.report.published_tables import TABLES
from megatron_coca.evaluation.report.reading import LoadedResult, ResultGroup, Series
from megatron_coca.evaluation.results import Missing, Result

SHORT = 12
"""Digits of a hash that are shown; report.json has them all."""

_LISTED = 4


def listed(texts: Iterable[str]) -> str:
    """Each once, the first few of many."""
    known = list(dict.fromkeys(texts))
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return ", ".join(known[:_LISTED]) + more


def checkpoint_name(result: Result) -> str:
    """Folder, step and the first digits of what names the weights."""
    checkpoint = result.checkpoint
    step = f", step {checkpoint.step}" if checkpoint.step is not None else ""
    return f"{checkpoint.path}{step} (weights {checkpoint.identity[:SHORT]})"


def environment_name(result: Result) -> str:
    """dtype, backend and device."""
    environment = result.environment
    return f"{environment.dtype}, {environment.backend or 'no backend'}, {environment.device}"


def origin(group: ResultGroup[Any]) -> str:
    """Checkpoints, data and machine behind a group, for captions."""
    headers = [series.header for series in group.series]
    checkpoints = listed(checkpoint_name(header) for header in headers)
    computed = listed(environment_name(header) for header in headers if header.environment.backend)
    return f"Checkpoints: {checkpoints}. {data_name(group.first)}Computed with {computed or 'nothing'}."


def data_name(result: Any) -> str:
    """What was read, with the first digits of its hash; nothing for a task without documents."""
    documents = getattr(result, "documents", None)
    if documents is not None:
        size = f"{documents.count} documents, {documents.tokens:,} tokens"
        return f"Data: {listed(documents.sources)} (sha256 {documents.sha256[:SHORT]}; {size}). "
    haystack = getattr(result.protocol, "haystack", None)
    return f"Data: {haystack.name} (sha256 {haystack.sha256[:SHORT]}). " if haystack is not None else ""


def heading(group: ResultGroup[Any]) -> str:
    """Of a block: empty where a task has one group alone."""
    return f"Results with {group.differs}" if group.differs else ""


HEADER = (
    *("label", "task", "checkpoint", "step", "weights", "trained at", "position method", "used with"),
    *("dtype", "backend", "device", "torch", "tokenizer"),
)


def models(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A row for each file: which weights, how they were used, and on what machine."""
    lines = [_line(each.result) for each in loaded]
    unique = {(line.name, line.entries): line for line in lines}
    table = Table("models", "Checkpoints, and how they were used", HEADER, tuple(unique.values()))
    return [ReportBlock(tables=(table,))] if lines else []


def _line(result: Result) -> Line:
    checkpoint, environment = result.checkpoint, result.environment
    used = "; ".join(f"{key}: {_value(value)}" for key, value in result.overrides.items()) or "as trained"
    texts = (
        result.task,
        checkpoint.path,
        "" if checkpoint.step is None else str(checkpoint.step),
        checkpoint.identity[:SHORT],
        str(checkpoint.seq_length),
        checkpoint.pos_emb,
        used,
        environment.dtype,
        environment.backend or "none",
        environment.device,
        environment.torch,
        (result.tokenizer or "none")[:SHORT],
    )
    return Line(result.label, tuple(Entry(text, wide=True) for text in texts))


def _value(value: Any) -> str:
    """A key's value; of a group of keys those that say something."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    return str(value)


SHOWN = {"refused": "refused", "out of memory": "OOM", "not run": "not run", "failed": "failed"}
"""How a table names why a cell is missing."""

THEIRS = "numbers of another model and other data than ours, for orientation"


def number(value: float, digits: int = 2, sign: bool = False) -> str:
    """A number of a table; infinite ones are `inf`."""
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def lacking(missing: Missing) -> Entry:
    """A cell that was not measured, with the reason."""
    return Entry(SHOWN[missing.kind], note=missing.reason, absent=True)


def marked(lines: Sequence[Line], lowest: bool) -> tuple[Line, ...]:
    """The lines with the best finite value of each column marked, where it has at least two that may be compared."""
    best: dict[int, float] = {}
    for place in range(len(lines[0].entries) if lines else 0):
        values = [_compared(line.entries[place]) for line in lines]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if len(finite) > 1 and len(set(finite)) > 1:
            best[place] = min(finite) if lowest else max(finite)
    return tuple(replace(line, entries=_marked(line.entries, best)) for line in lines)


def _marked(entries: Sequence[Entry], best: dict[int, float]) -> tuple[Entry, ...]:
    return tuple(
        replace(entry, best=True) if place in best and _compared(entry) == best[place] else entry
        for place, entry in enumerate(entries)
    )


def _compared(entry: Entry) -> float | None:
    return None if entry.partial else entry.value


def training_lengths(group: ResultGroup[Any]) -> set[int]:
    """Of all models of a group."""
    return {series.header.checkpoint.seq_length for series in group.series}


def starred(lengths: Iterable[int], trained: set[int]) -> tuple[str, ...]:
    """Column heads; training lengths have an asterisk."""
    return tuple(f"{length}*" if length in trained else str(length) for length in lengths)


def length_table(
    name: str,
    caption: str,
    head: str,
    group: ResultGroup[Any],
    entry: Callable[[Series[Any], int], Entry],
    lengths: Sequence[int],
    metric: str,
    papers: bool,
    lowest: bool = True,
) -> list[Table]:
    """Ours by length, with the papers' rows of the same training length; then papers' tables of other settings.

    `entry` is the cell of a series at a length.
    """
    trained = training_lengths(group)
    joined, apart = beside(group, metric) if papers else ([], [])
    columns = sorted(set(lengths) | {length for table in joined for length in table.columns if isinstance(length, int)})
    ours = [Line(each.label, tuple(entry(each, length) for length in columns)) for each in group.series]
    lines = [*marked(ours, lowest), *(line for table in joined for line in published_lines(table, columns, group))]
    notes = [f"* training length ({', '.join(map(str, sorted(trained)))})"] if trained & set(columns) else []
    sources = tuple(f"{table.name}: {table.setting}; {THEIRS}." for table in joined)
    main = Table(name, caption, (head, *starred(columns, trained)), tuple(lines), tuple(notes), sources)
    return [main, *(published_table(table, group, name) for table in apart)]


def beside(group: ResultGroup[Any], metric: str) -> tuple[list[PublishedTable], list[PublishedTable]]:
    """The papers' tables of a metric: of the training length of ours, and others that have something of ours."""
    trained = training_lengths(group)
    uses = [use for series in group.series if (use := use_of(series.header)) is not None]
    wanted = [table for table in TABLES if table.metric == metric and table.wanted(trained, uses)]
    joined = [table for table in wanted if table.training_length in trained]
    return joined, [table for table in wanted if table.training_length not in trained]


def published_lines(table: PublishedTable, columns: Sequence[int | str], group: ResultGroup[Any] | None) -> list[Line]:
    """Rows of a paper in our columns; the small print names ours of the same method."""
    lines = []
    for row in table.rows:
        values = dict(zip(table.columns, row.values, strict=True))
        alike = [series.label for series in (group.series if group is not None else ()) if row.is_of(series.header)]
        detail = f"the method of: {', '.join(alike)}" if alike else ""
        cells = tuple(Entry(values[column]) if column in values else NOTHING for column in columns)
        lines.append(Line(row.name, cells, f"{table.source}, {table.name}", detail))
    return lines


def published_table(table: PublishedTable, group: ResultGroup[Any] | None, beside_name: str) -> Table:
    """A paper's table on its own."""
    name = "-".join([beside_name, *"".join(c if c.isalnum() else " " for c in table.name.lower()).split()])
    caption = f"Published, {table.source}: {table.name}"
    header = ("method", *map(str, table.columns))
    remark = f"; {THEIRS}" if table.measured else ""
    notes = (f"{table.setting[0].upper()}{table.setting[1:]}{remark}.",)
    return Table(name, caption, header, tuple(published_lines(table, table.columns, group)), notes)
