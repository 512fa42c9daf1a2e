"""The report sections on retrieval: passkeys, needles in a haystack, and RULER-style tasks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import Measure, ReportBlock
from megatron_coca.evaluation.report.metrics import Metric, measure_of, metric_of
from megatron_coca.evaluation.report.plots.figures import Figure
from megatron_coca.evaluation.report.plots.heat_maps import heat_maps
from megatron_coca.evaluation.report.plots.panels import SHARES, short_length
from megatron_coca.evaluation.report.reading import Replicate, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import LengthTable, ReportOptions
from megatron_coca.evaluation.tasks.retrieval.task import LEARNED, NEEDLE, PASSKEY, RULER, RetrievalProtocol, whole

INTERVALS = (
    "95% intervals: Wilson's for one seed, t intervals for several seeds, Wilson's over all cases if all seeds agree."
)
FOUND = metric_of(PASSKEY.numbers[0])
PANEL: dict[str, Any] = {"x_label": "length (tokens)", "y_range": SHARES}
PASSKEYS, NEEDLES, STRINGS = (
    measure_of(PASSKEY.numbers[0]),
    Measure("mean share of needles found", least=LEARNED),
    Measure("mean share of strings found", "mean: ", least=LEARNED),
)
"""The measures of the three tasks. A measure has one name in the top sentence of a report, on axes and in tables."""


def head(measure: Measure) -> str:
    return f"{measure.quantity} at length"


def axis(measure: Measure) -> dict[str, Any]:
    """Return the fields of a panel that shows a measure."""
    return PANEL | {"y_label": measure.quantity}


def retrieval_text(protocol: RetrievalProtocol, each: str) -> str:
    parts = [
        f"{protocol.text}; {protocol.cases} cases for each {each}, seed {protocol.seed}",
        f"token {protocol.start} before every prompt" if protocol.start is not None else "",
        *shared.answer_texts(protocol),
    ]
    return f"Protocol: {'; '.join(filter(None, parts))}."


def unfinished_text(group: ResultGroup) -> tuple[str, ...]:
    """Return a sentence on the answers in chats that had not ended. The tuple is empty if there are none."""
    found = []
    for series in group.measured if group.first.protocol.chat is not None else ():
        cases = [case for entry in series.entries() for case in getattr(entry, "cases", ())]  # means have no cases
        unfinished = [case for case in cases if case.unfinished]
        if unfinished:
            wrong = sum(case.score < 1 for case in unfinished)
            found.append(f"{series.label}: {len(unfinished)} of {len(cases)}, of which {wrong} are wrong")
    if not found:
        return ()
    return (f"Answers that had not ended after {group.first.protocol.max_new_tokens} tokens: {'; '.join(found)}.",)


def by_side(metric: Metric) -> dict[str, Metric]:
    """Return the metrics of two rows. The first is for facts within the training length of the prompt's end, the second
    for earlier facts.
    """
    return {f"{{}}, {side}": replace(metric, tally=attrgetter(side)) for side in ("inside", "beyond")}


@shared.grouped("passkey", PASSKEY.comparable)
def passkey_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return our results in the form of Table 2 of the CoCA paper. A second table has the content of the paper's
    Figure 4: the accuracy for keys inside and beyond the training length.
    """
    by_length = "Passkey accuracy by length of the prompt"
    split = "Passkey accuracy for keys within the training length of the end (inside) and before it (beyond)"
    specs = (
        LengthTable(
            by_length, head(PASSKEYS), {"{}": FOUND}, published="passkey", notes=(INTERVALS,), measure=PASSKEYS
        ),
        LengthTable(split, head(PASSKEYS), by_side(FOUND), "-split"),
    )
    tables = shared.length_tables(name, specs, group, options)
    caption = "Passkey accuracy by length of the prompt."
    figures = shared.length_figure(name, "Passkey accuracy by length", group, FOUND, axis(PASSKEYS), caption, options)
    text = (retrieval_text(group.first.protocol, "length"), *unfinished_text(group))
    return ReportBlock(text, tuple(figures), tuple(tables))


SortKey = Callable[[Any, Any], tuple[Any, ...]]
MEAN_DEPTH = -1
"""The value that replaces the depth in the keys of means over all depths."""


def _needle_at(depth: int) -> Metric:
    return replace(FOUND, key=lambda length: (length, depth))


def _found_in(task: str) -> Metric:
    return Metric("{}, length {}", key=lambda length: (task, length), tally=whole)


@shared.grouped("needle", NEEDLE.comparable)
def needle_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return tables of the share of needles found, one of means and one by depth, and a heat map for each label."""
    depths, lengths = group.first.protocol.depths, group.lengths()
    group = with_means(group, depths, MEAN_DEPTH, lambda length, depth: (length, depth))
    at_depth = {depth: _needle_at(depth) for depth in depths}
    rows = {f"{{}}, {depth}%": metric for depth, metric in at_depth.items()}
    means = "Share of needles found: mean over all depths by length"
    specs = (
        LengthTable(means, head(NEEDLES), {"{}": _needle_at(MEAN_DEPTH)}, notes=(INTERVALS,), measure=NEEDLES),
        LengthTable("Share of needles found by depth and length", "share at length", rows, "-depths"),
    )
    tables = shared.length_tables(name, specs, group, options)
    maps = [
        (series.label, [[metric.cell(series, length).value for length in lengths] for metric in at_depth.values()])
        for series in group.measured
    ]
    text = (retrieval_text(group.first.protocol, "length and depth"), *unfinished_text(group))
    if not maps:
        return ReportBlock(text, (), tuple(tables))
    caption = "Share of needles found, by prompt length and needle depth (0% is the beginning)."
    alt = f"Heat maps of needles found by {', '.join(label for label, _ in maps)}; the table contains the numbers"
    heads, percents = list(map(short_length, lengths)), [f"{depth}%" for depth in depths]
    drawing = heat_maps(maps, percents, heads, "length (tokens)", "depth of the needle", "share found")
    return ReportBlock(text, (Figure(name, caption, alt, *drawing),), tuple(tables))


@shared.grouped("ruler", RULER.comparable)
def ruler_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return a table of all tasks and their mean by length, and a plot of the means."""
    tasks = list(dict.fromkeys(task for task, _ in group.entry_keys()))
    group = with_means(group, tasks, "mean", lambda length, task: (task, length))
    of_task = {task: _found_in(task) for task in (*tasks, "mean")}
    rows = {f"{task}: {{}}": metric for task, metric in of_task.items()}
    notes = (f"{INTERVALS} A mean covers all tasks of the table, and is absent if a task is missing.",)
    title = "Share of the expected strings in the answers"
    spec = LengthTable(title, "share found at length", rows, "", notes=notes, measure=STRINGS)
    caption = f"Mean over {len(tasks)} tasks ({', '.join(tasks)}) by length."
    panel = axis(STRINGS)
    figures = shared.length_figure(name, "Mean share found by length", group, of_task["mean"], panel, caption, options)
    tables = shared.length_tables(name, [spec], group, options)
    text = (retrieval_text(group.first.protocol, "task and length"), *unfinished_text(group))
    return ReportBlock(text, tuple(figures), tuple(tables))


def with_means(group: ResultGroup, parts: Sequence[Any], mean: Any, key: SortKey) -> ResultGroup:
    """Return the group with an additional entry, for the part `mean`, at each length at which all parts were measured.

    `key` returns an entry's key from the entry's length and its part, which is a task or a depth.
    """
    lengths = group.lengths()

    def means(replicate: Replicate) -> dict[tuple[Any, ...], Any]:
        found = {}
        for length in lengths:
            entries = [replicate.entries[at] for part in parts if (at := key(length, part)) in replicate.entries]
            if len(entries) == len(parts):
                accuracy, count = fmean(entry.accuracy for entry in entries), sum(entry.count for entry in entries)
                found[key(length, mean)] = SimpleNamespace(accuracy=accuracy, count=count)
        return found

    def extended(series: Series) -> Series:
        replicates = (replace(each, entries=each.entries | means(each)) for each in series.replicates)
        return replace(series, replicates=tuple(replicates))

    return replace(group, series=tuple(map(extended, group.series)))
