"""The report section on long-context benchmarks of lm-evaluation-harness, with tables as in the benchmarks' papers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import Measure, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import value_cell
from megatron_coca.evaluation.report.published import tables_of
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, Replicate, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.statistics import wilson_interval
from megatron_coca.evaluation.tasks.lm_eval import benchmarks
from megatron_coca.evaluation.tasks.lm_eval.scores import TaskScores
from megatron_coca.evaluation.tasks.lm_eval.section import cut_text, lm_eval_blocks, protocol_text
from megatron_coca.evaluation.tasks.lm_eval.task import LM_EVAL, HarnessProtocol

BENCHMARK_COMPARABLE: Comparable = {
    name: path for name, path in LM_EVAL.comparable.items() if path != "protocol.metadata"
}
"""The properties that all results in a table share. Metadata may differ, because its lengths become columns."""
PREFIX = "longbench_"
AVERAGE, MEAN = "Avg", "mean"
TOGETHER = "mean of the common tasks"
"""The row of means over the tasks that all labels have, if no label has all tasks of the benchmark."""
BABILONG_MEAN = benchmarks.BABILONG_TASKS[:5]
"""The tasks in BABILong's means. Only these tasks have data of all lengths."""
GROUPS = frozenset({"ruler", "babilong", "babilong_longctx", "longbench", "longbench_e"})
ScoreColumn = int | str


@dataclass(frozen=True)
class ScoreCell:
    """One number of a benchmark's table, in percent. `cut` of its `samples` samples have a truncated prompt."""

    row: str
    column: ScoreColumn
    value: float
    samples: int
    cut: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return (self.row, str(self.column))


def benchmark_of(task: str) -> str | None:
    """Return the benchmark with a table that contains this task or group of the harness, or None."""
    if task in benchmarks.RULER_TASKS or task == "ruler":
        return "ruler"
    if task in benchmarks.BABILONG_TASKS or task in GROUPS - {"longbench", "longbench_e"}:
        return "babilong"
    return "longbench" if task.startswith(PREFIX) or task == "longbench" else None


def cells_of(entry: TaskScores, protocol: HarnessProtocol) -> list[ScoreCell]:
    """Return the cells of one task. A task of RULER or LongBench-E has one cell per length. A task of BABILong or
    LongBench has one cell; for BABILong it is that of the file's length.
    """
    if entry.task in GROUPS or entry.documents_sha256 is None:
        return []
    named = short_name(entry.task)
    if entry.by_length:
        return [
            ScoreCell(named, _column(each.length), 100 * each.value, each.samples, each.cut) for each in entry.by_length
        ]
    babilong = benchmark_of(entry.task) == "babilong"
    column = str(protocol.metadata.get("max_seq_lengths", "0k")) if babilong else ""
    score = next((score for score in entry.scores if score.metric == ("acc" if babilong else "score")), None)
    if score is None or score.value is None:
        return []
    return [ScoreCell(named, column, 100 * score.value, entry.samples, entry.cut)]


def _column(length: str) -> ScoreColumn:
    return int(length) if length.isdecimal() else length


def short_name(task: str) -> str:
    """Return the name of a task without the harness's prefix for LongBench."""
    return task.removeprefix(PREFIX)


def averages(cells: Iterable[ScoreCell], row: str, tasks: Sequence[str]) -> list[ScoreCell]:
    """Return the mean over all `tasks` for each column in which all of them have a number."""
    by_column: dict[ScoreColumn, list[ScoreCell]] = {}
    for cell in cells:
        if cell.row in tasks:
            by_column.setdefault(cell.column, []).append(cell)
    return [
        ScoreCell(
            row, column, fmean(cell.value for cell in found), sum(c.samples for c in found), sum(c.cut for c in found)
        )
        for column, found in by_column.items()
        if len(found) == len(tasks) > 0
    ]


def categories(cells: Iterable[ScoreCell], table: Mapping[str, Sequence[str]], language: str) -> list[ScoreCell]:
    """Return the mean of each category of a LongBench table, and the average of the means if no category lacks one."""
    known = [cell for cell in cells if cell.column == ""]
    means = [replace(cell, column=name) for name, tasks in table.items() for cell in averages(known, language, tasks)]
    one_row = [replace(cell, row=str(cell.column), column=AVERAGE) for cell in means]
    return [*means, *averages(one_row, language, list(table))]


def _ruler(cells: Sequence[ScoreCell]) -> list[ScoreCell]:
    return averages(cells, MEAN, benchmarks.RULER_TASKS)


def _babilong(cells: Sequence[ScoreCell]) -> list[ScoreCell]:
    return averages(cells, MEAN, BABILONG_MEAN)


def _longbench(cells: Sequence[ScoreCell]) -> list[ScoreCell]:
    return [
        *categories(cells, benchmarks.LONGBENCH_ENGLISH, "English"),
        *categories(cells, benchmarks.LONGBENCH_CHINESE, "Chinese"),
    ]


DERIVED: Mapping[str, Callable[[Sequence[ScoreCell]], list[ScoreCell]]] = {
    "ruler": _ruler,
    "babilong": _babilong,
    "longbench": _longbench,
}
"""For each benchmark, the function that computes the means in its tables."""


def with_cells(loaded: Sequence[LoadedResult], benchmark: str) -> list[LoadedResult]:
    """Return the results that have cells of one benchmark, with these cells in place of their entries."""
    kept = []
    for item in loaded:
        result: Any = item.result
        entries = [entry for entry in result.results if benchmark_of(entry.task) == benchmark]
        cells = [cell for entry in entries for cell in cells_of(entry, result.protocol)]
        if cells:
            changed = result.model_copy(update={"results": cells, "missing": []})
            kept.append(LoadedResult(item.file, changed))
    return kept


def with_derived(group: ResultGroup, benchmark: str) -> tuple[ResultGroup, list[str]]:
    """Return (the group extended by the means of the benchmark's tables, the tasks that all labels have).

    The tasks of a label can come from several files.
    """
    common = [
        task
        for task in dict.fromkeys(entry.row for series in group.series for entry in series.entries())
        if not task.endswith("_e")  # LongBench-E repeats tasks of LongBench
        and all(any(entry.row == task for entry in series.entries()) for series in group.series)
    ]

    def extended(replicate: Replicate) -> Replicate:
        cells = list(replicate.entries.values())
        more = [*DERIVED[benchmark](cells), *averages(cells, TOGETHER, common)]
        return replace(replicate, entries=replicate.entries | {cell.key: cell for cell in more})

    series = (replace(each, replicates=tuple(map(extended, each.replicates))) for each in group.series)
    return replace(group, series=tuple(series)), common


def has_row(group: ResultGroup, row: str, column: ScoreColumn | None = None) -> bool:
    """Return True if a label has a number in this row and, if `column` is given, in this column."""
    entries = [entry for series in group.series for entry in series.entries()]
    return any(entry.row == row and column in (None, entry.column) for entry in entries)


def percent_cell(series: Series, row: str, column: ScoreColumn) -> TableCell:
    """Return the cell of a number in percent: its mean over seeds, its interval and a note on truncated prompts."""
    key = (row, str(column))

    def number(replicate: Replicate) -> float | None:
        found = replicate.entries.get(key)
        return None if found is None else float(found.value)

    cell = value_cell(series, f"task {row}", number, "{:.1f}".format)
    known = [replicate.entries[key] for replicate in series.replicates if key in replicate.entries]
    if cell.value is not None and cell.low is None and (count := sum(found.samples for found in known)):
        low, high = (100 * end for end in wilson_interval(min(max(cell.value / 100, 0.0), 1.0), count))
        cell = replace(cell, detail=f"{low:.1f}–{high:.1f}", low=low, high=high)
    worst = max(known, key=lambda found: found.cut, default=None)
    return cell if worst is None else cut_text(cell, worst.cut, worst.samples, series.header.protocol)


def table_of(
    name: str,
    caption: str,
    group: ResultGroup,
    rows: Mapping[str, str],
    columns: Sequence[ScoreColumn],
    head: str,
    measure: Measure | None = None,
) -> Table:
    """Return a table with a row for each label and each entry of `rows`.

    `rows` maps a pattern for the names of table rows to the `row` of their cells. In the pattern, {} is the label.
    """
    made = []
    for pattern, row in rows.items():
        ours = [
            TableRow(pattern.format(series.label), tuple(percent_cell(series, row, column) for column in columns))
            for series in group.series
            if any((row, str(column)) in series.keys for column in columns)
        ]
        made += shared.mark_best(ours, False)
    return Table(name, caption, (head, *map(str, columns)), tuple(made), (NOTE,), measure=measure)


NOTE = (
    "Scores in percent. Intervals: for one seed Wilson's over all samples, which is wider than needed for scores "
    "between 0 and 1; for several seeds t intervals."
)


def _means(
    name: str,
    title: str,
    tasks: str,
    of: int,
    extended: tuple[ResultGroup, list[str]],
    columns: Sequence[ScoreColumn],
    head: str = "length",
) -> Table:
    """Return a table of means by length over all `of` tasks of a benchmark, which `tasks` describes in words. If no
    label has all of them, the means are over the tasks that all labels have.
    """
    group, common = extended
    row, few = (
        (MEAN, "") if has_row(group, MEAN) else (TOGETHER, f" over {len(common)} task{'s' if len(common) > 1 else ''}")
    )
    over = tasks if row == MEAN else f"{len(common)} of {of} tasks"
    measure = Measure(f"mean {title} score{few}", digits=1, unit="%")
    return table_of(name, f"{title}: means over {over} by length", group, {"{}": row}, columns, head, measure)


def with_published(table: Table, metric: str, columns: Sequence[ScoreColumn], group: ResultGroup) -> Table:
    """Add published rows for the same columns.

    They are added only if our results cover all documents and use each task's own number of few-shot examples.
    """
    protocol = group.first.protocol
    if not table.rows or protocol.limit is not None or protocol.num_fewshot is not None:
        return table
    theirs = tables_of(metric)
    rows = [row for each in theirs for row in shared.published_rows(each, columns)]
    shown = tuple(row for row in rows if any(cell.text for cell in row.cells))
    sources = tuple(map(shared.source_text, theirs)) if shown else ()
    return replace(table, rows=(*table.rows, *shown), sources=sources)


def _columns(group: ResultGroup, rows: Iterable[str]) -> list[ScoreColumn]:
    """Return the columns in which these rows have cells. They are lengths in ascending order."""
    chosen = set(rows)
    cells = [entry for series in group.series for entry in series.entries() if entry.row in chosen]
    return sorted({cell.column for cell in cells}, key=_size)


def _size(column: ScoreColumn) -> tuple[int, str]:
    digits = "".join(character for character in str(column).partition("-")[0] if character.isdecimal())
    return int(digits or 0), str(column)


@shared.grouped("benchmarks-ruler", BENCHMARK_COMPARABLE)
def ruler_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return two tables of RULER. The main table has means over its 13 tasks by length, and published rows. The other
    table has all tasks.
    """
    columns = _columns(group, benchmarks.RULER_TASKS)
    extended = with_derived(group, "ruler")
    means = _means(name, "RULER", "its 13 tasks", len(benchmarks.RULER_TASKS), extended, columns, "length in tokens")
    each = {f"{task}: {{}}": task for task in benchmarks.RULER_TASKS}
    tasks = table_of(f"{name}-tasks", "RULER: tasks by length", group, each, columns, "length in tokens")
    if options.papers is not False and has_row(extended[0], MEAN):
        means = with_published(means, "ruler", columns, group)
    return _block(group, [means, tasks])


@shared.grouped("benchmarks-babilong", BENCHMARK_COMPARABLE)
def babilong_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return the tables of BABILong: the mean of its first five tasks, and all tasks, by length."""
    columns = _columns(group, benchmarks.BABILONG_TASKS)
    each = {f"{task.removeprefix('babilong_')}: {{}}": task for task in benchmarks.BABILONG_TASKS}
    means = _means(name, "BABILong", "qa1 to qa5", len(BABILONG_MEAN), with_derived(group, "babilong"), columns)
    return _block(
        group, [means, table_of(f"{name}-tasks", "BABILong: tasks by length", group, each, columns, "length")]
    )


@shared.grouped("benchmarks-longbench", BENCHMARK_COMPARABLE)
def longbench_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return LongBench's tables of categories with published rows, of all tasks, and of LongBench-E by length.

    The first table gives the sentence at the top of the report. It is the table of a language with an average. If no
    language has one, it is the table with the mean of the tasks that all labels have.
    """
    (group, common), tables = with_derived(group, "longbench"), []
    for language, table_parts in (("English", benchmarks.LONGBENCH_ENGLISH), ("Chinese", benchmarks.LONGBENCH_CHINESE)):
        columns = [AVERAGE, *table_parts]
        caption = f"LongBench, {language}: means of the categories"
        average = Measure(f"mean LongBench score ({language})", digits=1, unit="%", column=0)
        measure = average if has_row(group, language, AVERAGE) else None
        table = table_of(f"{name}-{language.lower()}", caption, group, {"{}": language}, columns, "label", measure)
        if options.papers is not False:
            table = with_published(table, f"longbench {language.lower()}", columns, group)
        tables.append(table)
    tables.sort(key=lambda table: table.measure is None)
    if common and tables[0].measure is None:
        head = f"mean of {len(common)} task{'s' if len(common) > 1 else ''}"
        measure = Measure(f"LongBench score ({head})", digits=1, unit="%", column=0)
        together = table_of(f"{name}-common", f"LongBench: {head}", group, {"{}": TOGETHER}, [""], "label", measure)
        tables.insert(0, replace(together, header=("label", head)))
    parts = [*benchmarks.LONGBENCH_ENGLISH.values(), *benchmarks.LONGBENCH_CHINESE.values()]
    names = dict.fromkeys(task for tasks in parts for task in tasks)
    each = {f"{task}: {{}}": task for task in names}
    tables.append(
        replace(table_of(f"{name}-tasks", "LongBench: tasks", group, each, [""], "task"), header=("task", "score"))
    )
    by_length = {f"{task}_e: {{}}": f"{task}_e" for task in names}
    buckets = list(benchmarks.LONGBENCH_BUCKETS)
    tables.append(table_of(f"{name}-e", "LongBench-E: tasks by length in words", group, by_length, buckets, "task"))
    return _block(group, tables)


def _block(group: ResultGroup, tables: Sequence[Table]) -> ReportBlock:
    return ReportBlock((protocol_text(group.first.protocol),), (), tuple(table for table in tables if table.rows))


BUILDERS: Mapping[str, shared.ResultBuilder] = {
    "ruler": ruler_blocks,
    "babilong": babilong_blocks,
    "longbench": longbench_blocks,
}


def benchmark_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """Return the blocks of all benchmarks that the results contain."""
    return [block for name, build in BUILDERS.items() for block in build(with_cells(loaded, name), options)]


def without_benchmarks(loaded: Sequence[LoadedResult]) -> list[LoadedResult]:
    """Return the results without the tasks that the tables of benchmarks show."""
    kept = []
    for item in loaded:
        result: Any = item.result
        entries = [entry for entry in result.results if benchmark_of(entry.task) is None]
        if entries or result.missing or not result.results:
            kept.append(LoadedResult(item.file, result.model_copy(update={"results": entries})))
    return kept


def other_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """Return the blocks of all other tasks of the harness."""
    return lm_eval_blocks(without_benchmarks(loaded), options)
