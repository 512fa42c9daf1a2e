"""Short-context tasks through lm-evaluation-harness, and means of groups as in Table 5 of the CoCA paper."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from megatron_coca.evaluation.harness.records import HarnessResult, Score
from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report.document import Entry, Line, ReportBlock, Table
from megatron_coca.evaluation.report.published_tables import AVERAGED_GROUPS, SHORT_CONTEXT, TASKS_BY_GROUP
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, ResultGroup, Series, groups
from megatron_coca.evaluation.report.tables import (
    THEIRS,
    heading,
    lacking,
    marked,
    number,
    origin,
    published_lines,
    published_table,
)

COMPARABLE: Comparable[HarnessResult] = {
    "version of lm-eval": lambda result: result.protocol.lm_eval,
    "examples": lambda result: result.protocol.num_fewshot,
    "limit": lambda result: result.protocol.limit,
    "seed": lambda result: result.protocol.seed,
    "longest context": lambda result: result.protocol.max_length,
    "dynamic length": lambda result: result.protocol.dynamic_length,
    "protocol": lambda result: result.protocol.text,
}
Column = tuple[str, str, str]
"""Task, metric, filter."""
ACCURACY = ("acc", "none")
"""Metric and filter that means of groups are made of."""


def build(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A table for each group: a row for each task and metric, a column for each label."""
    return [_block(group, place, papers) for place, group in enumerate(groups(loaded, COMPARABLE), 1)]


def _block(group: ResultGroup[HarnessResult], place: int, papers: bool) -> ReportBlock:
    name, protocol = f"short-{place}", group.first.protocol
    columns = _columns(group)
    lines = [Line(each.label, tuple(_entry(each, column) for column in columns)) for each in group.series]
    lowest = [_lowest(group, column) for column in columns]
    header = ("label", *(_head(column) for column in columns))
    notes = ("Small print: standard errors of the harness. A task's version, samples and hashes are in report.json.",)
    table = Table(name, "Scores of lm-evaluation-harness", header, _marked(lines, lowest), notes)
    shots = "as the tasks say" if protocol.num_fewshot is None else str(protocol.num_fewshot)
    limit = "" if protocol.limit is None else f", the first {protocol.limit} samples of each task"
    seen = dynamic_length_text(protocol.dynamic_length)
    how = f"Protocol: {protocol.text}; lm-eval {protocol.lm_eval}, examples: {shots}{limit}, seed {protocol.seed}; {seen}."
    return ReportBlock(
        heading(group),
        (f"{how} {origin(group)}",),
        (),
        (table, *_by_group(group, name, papers)),
    )


def _by_group(group: ResultGroup[HarnessResult], name: str, papers: bool) -> list[Table]:
    """The tasks of Table 5 by its groups, and the means of groups with the paper's below; without any of these tasks the
    paper's table alone.
    """
    asked = {task for tasks in TASKS_BY_GROUP.values() for task in tasks}
    if not any(task in asked for series in group.series for (task,) in series.cells):
        return [published_table(SHORT_CONTEXT, group, name)] if papers else []
    labels = tuple(series.label for series in group.series)
    lines = [
        Line(f"{title}: {task}", tuple(_percent(series, task) for series in group.series))
        for title, tasks in TASKS_BY_GROUP.items()
        for task in tasks
    ]
    caption = "Accuracy in percent on the tasks of the CoCA paper's Table 5, by group"
    return [Table(f"{name}-tasks", caption, ("group and task", *labels), tuple(lines)), _means(group, name, papers)]


def _means(group: ResultGroup[HarnessResult], name: str, papers: bool) -> Table:
    columns = (*SHORT_CONTEXT.columns, *(title for title in TASKS_BY_GROUP if title not in SHORT_CONTEXT.columns))
    lines = []
    for series in group.series:
        means = {title: _mean(series, tasks) for title, tasks in TASKS_BY_GROUP.items()}
        means[str(SHORT_CONTEXT.columns[-1])] = _average(means)
        lines.append(Line(series.label, tuple(means[str(column)] for column in columns)))
    theirs = published_lines(SHORT_CONTEXT, columns, group) if papers else []
    sources = (f"{SHORT_CONTEXT.name}: {SHORT_CONTEXT.setting}; {THEIRS}.",) if papers else ()
    note = f"Average: mean of {', '.join(map(str, AVERAGED_GROUPS))}, as in the paper; each task counts the same in its group."
    header = ("mean of accuracies, percent", *map(str, columns))
    caption = "Means of the groups of the CoCA paper's Table 5"
    return Table(f"{name}-groups", caption, header, (*marked(lines, lowest=False), *theirs), (note,), sources)


def _percent(series: Series[HarnessResult], task: str) -> Entry:
    score = _found(series, (task, *ACCURACY))
    if score is None:
        return lacking(series.why(f"task {task}"))
    spread = "" if score.stderr is None else f"± {100 * score.stderr:.2f}"
    return Entry(number(100 * score.value), 100 * score.value, detail=spread)


def _mean(series: Series[HarnessResult], tasks: Sequence[str]) -> Entry:
    """Of a group of tasks; absent where one of them has no accuracy."""
    scores = {task: _found(series, (task, *ACCURACY)) for task in tasks}
    known = [100 * score.value for score in scores.values() if score is not None]
    if len(known) == len(tasks):
        return Entry(number(fmean(known)), fmean(known))
    without = ", ".join(task for task, score in scores.items() if score is None)
    return Entry("–", note=f"without an accuracy of {without}", absent=True)


def _average(means: Mapping[str, Entry]) -> Entry:
    groups = [means[str(title)] for title in AVERAGED_GROUPS]
    values = [entry.value for entry in groups if entry.value is not None]
    if len(values) == len(groups):
        return Entry(number(fmean(values)), fmean(values))
    return Entry("–", note="; ".join(dict.fromkeys(entry.note for entry in groups if entry.note)), absent=True)


def _columns(group: ResultGroup[HarnessResult]) -> list[Column]:
    """Of all scores, and one for each task that nobody has a score of."""
    cells = [cell for series in group.series for cell in series.cells.values()]
    columns = [(cell.task, score.metric, score.filter) for cell in cells for score in cell.scores]
    missed = [at.removeprefix("task ") for series in group.series for at in series.missing if at.startswith("task ")]
    known = {cell.task for cell in cells}
    return list(dict.fromkeys([*columns, *((task, "", "none") for task in missed if task not in known)]))


def _head(column: Column) -> str:
    task, metric, name = column
    return f"{task} {metric}".strip() if name == "none" else f"{task} {metric} ({name})"


def _found(series: Series[HarnessResult], column: Column) -> Score | None:
    cell = series.cells.get((column[0],))
    scores = cell.scores if cell is not None else []
    return next((score for score in scores if (score.metric, score.filter) == column[1:]), None)


def _lowest(group: ResultGroup[HarnessResult], column: Column) -> bool:
    scores = [score for series in group.series if (score := _found(series, column)) is not None]
    return any(score.higher_is_better is False for score in scores)


def _entry(series: Series[HarnessResult], column: Column) -> Entry:
    score = _found(series, column)
    if score is None:
        return lacking(series.why(f"task {column[0]}"))
    spread = "" if score.stderr is None else f"± {score.stderr:.3f}"
    return Entry(f"{score.value:.3f}", score.value, detail=spread)


def _marked(lines: Sequence[Line], lowest: Sequence[bool]) -> tuple[Line, ...]:
    """The best of each column, which for some metrics is the smallest."""
    low, high = marked(lines, lowest=True), marked(lines, lowest=False)
    return tuple(
        Line(
            line.name,
            tuple(one if small else other for one, other, small in zip(line.entries, top.entries, lowest, strict=True)),
        )
        for line, top in zip(low, high, strict=True)
    )
