"""The report sections on retrieval: passkeys, needles in a haystack, RULER-style tasks, and key-value recall."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from megatron_coca.data.synthetic import QUESTIONS
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.charts import (
    SHARES,
    Figure,
    Line,
    Panel,
    arranged,
    heat_maps,
    panels,
    short_length,
)
from megatron_coca.evaluation.report.document import Measure, ReportBlock, Table, TableRow
from megatron_coca.evaluation.report.looks import Member
from megatron_coca.evaluation.report.metrics import Metric, whole
from megatron_coca.evaluation.report.reading import Comparable, Replicate, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import LengthTable, ReportOptions
from megatron_coca.evaluation.tasks.recall import RecallEntry, retrieving_head, scores_of
from megatron_coca.evaluation.tasks.retrieval import RetrievalProtocol, Tally

RETRIEVAL_COMPARABLE: Comparable = {
    "cases": "protocol.cases",
    "seed": "protocol.seed",
    "new tokens": "protocol.max_new_tokens",
    "answer stub": "protocol.answer_stub",
    "haystack (sha256)": "protocol.haystack.sha256",
    "tokenizer": "tokenizer",  # lengths are counted in the tokenizer's tokens
    "dynamic length": "protocol.dynamic_length",
    "start token": "protocol.start",
    "chat": "protocol.chat",
    "protocol": "protocol.text",
}
NEEDLE_COMPARABLE: Comparable = {**RETRIEVAL_COMPARABLE, "depths": "protocol.depths"}

LEARNED = 0.5
"""Accuracy that one label must reach at some length: a task that no model has learned says nothing about lengths."""
INTERVALS = (
    "95% intervals: Wilson's for one seed, t intervals for several seeds, Wilson's over all cases if all seeds agree."
)
PASSKEY = Metric("length {}", tally=whole)
PANEL: dict[str, Any] = {"x_label": "length (tokens)", "y_range": SHARES}
PASSKEYS, NEEDLES, STRINGS, RECALLED = (
    Measure("passkey accuracy", least=LEARNED),
    Measure("mean share of needles found", least=LEARNED),
    Measure("mean share of strings found", "mean: ", least=LEARNED),
    Measure("recall", least=LEARNED),
)
"""The quantities have the same names in the sentence, at the axis and in the tables."""


def head(measure: Measure) -> str:
    return f"{measure.quantity} at length"


def axis(measure: Measure) -> dict[str, Any]:
    """Return the fields of panels for a measure."""
    return PANEL | {"y_label": measure.quantity}


def retrieval_text(protocol: RetrievalProtocol, each: str) -> str:
    parts = [
        f"{protocol.text}; {protocol.cases} cases for each {each}, seed {protocol.seed}",
        f"token {protocol.start} before every prompt" if protocol.start is not None else "",
        *shared.answer_texts(protocol),
    ]
    return f"Protocol: {'; '.join(filter(None, parts))}."


def by_side(metric: Metric) -> dict[str, Metric]:
    """Return separate rows for facts inside and beyond the training length from the end of the prompt."""
    return {f"{{}}, {side}": replace(metric, tally=attrgetter(side)) for side in ("inside", "beyond")}


@shared.grouped("passkey", RETRIEVAL_COMPARABLE)
def passkey_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return CoCA Table 2, and Figure 4 as a table (keys inside and beyond the training length), for our results."""
    by_length = "Passkey accuracy by length of the prompt"
    split = "Passkey accuracy for keys within the training length of the end (inside) and before it (beyond)"
    specs = (
        LengthTable(
            by_length, head(PASSKEYS), {"{}": PASSKEY}, published="passkey", notes=(INTERVALS,), measure=PASSKEYS
        ),
        LengthTable(split, head(PASSKEYS), by_side(PASSKEY), "-split"),
    )
    tables = shared.length_tables(name, specs, group, options)
    caption = "Passkey accuracy by length of the prompt."
    figures = shared.length_figure(name, "Passkey accuracy by length", group, PASSKEY, axis(PASSKEYS), caption, options)
    return ReportBlock((retrieval_text(group.first.protocol, "length"),), tuple(figures), tuple(tables))


Key = Callable[[Any, Any], tuple[Any, ...]]
MEAN_DEPTH = -1
"""The depth of the mean over all depths, in the keys of entries."""


def _needle_at(depth: int) -> Metric:
    return replace(PASSKEY, key=lambda length: (length, depth))


def _found_in(task: str) -> Metric:
    return Metric("{}, length {}", key=lambda length: (task, length), tally=whole)


@shared.grouped("needle", NEEDLE_COMPARABLE)
def needle_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return tables of the share of needles found, as means and by depth, and a heat map for each label."""
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
    text = (retrieval_text(group.first.protocol, "length and depth"),)
    if not maps:
        return ReportBlock(text, (), tuple(tables))
    caption = "Share of needles found, by prompt length and needle depth (0% is the beginning)."
    alt = f"Heat maps of needles found by {', '.join(label for label, _ in maps)}; the table contains the numbers"
    heads, percents = list(map(short_length, lengths)), [f"{depth}%" for depth in depths]
    drawing = heat_maps(maps, percents, heads, "length (tokens)", "depth of the needle", "share found")
    return ReportBlock(text, (Figure(name, caption, alt, *drawing),), tuple(tables))


@shared.grouped("ruler", RETRIEVAL_COMPARABLE)
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
    return ReportBlock((retrieval_text(group.first.protocol, "task and length"),), tuple(figures), tuple(tables))


def with_means(group: ResultGroup, parts: Sequence[Any], mean: Any, key: Key) -> ResultGroup:
    """Return a group with an entry for the part `mean` at each length at which all parts were measured.

    `key` returns the key of an entry from its length and part, such as a task or a depth.
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


# Recall

RECALL_COMPARABLE: Comparable = {
    "cases": "protocol.cases",
    "seed": "protocol.seed",
    "prompts": "protocol.prompts",
    "protocol": "protocol.text",
}
UNSHIFTED = replace(PASSKEY, key=lambda length: (length, 0))


def of_question(kind: str, entry: RecallEntry) -> Tally | None:
    """Return the tally of one kind of question of ordered recall."""
    return (entry.questions or {}).get(kind)


@shared.grouped("recall", RECALL_COMPARABLE)
def recall_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return accuracy by length, distance of the fact and shift of all positions, and scores of retrieving heads."""
    protocol, keys, trained = group.first.protocol, group.entry_keys(), min(group.training_lengths())
    guessed = "" if protocol.chance is None else f" A random value is correct in {protocol.chance:.3f} of the cases."
    text = f"Protocol: {protocol.text}; {protocol.prompts}; {protocol.cases} cases, seed {protocol.seed}.{guessed}"
    caption = "Recall of facts within the training length before the question (inside) and of earlier facts (beyond)"
    specs = [
        LengthTable("Recall by length", head(RECALLED), {"{}": UNSHIFTED}, notes=(INTERVALS,), measure=RECALLED),
        LengthTable(caption, head(RECALLED), by_side(UNSHIFTED), "-split"),
    ]
    if any(
        entry.questions for series in group.measured for each in series.replicates for entry in each.entries.values()
    ):
        caption = "Recall by the kind of question: the latest value of a key, its first value, the value k facts before"
        kinds = {f"{{}}, {kind}": replace(UNSHIFTED, tally=partial(of_question, kind)) for kind in QUESTIONS}
        specs.append(LengthTable(caption, head(RECALLED), kinds, "-questions"))
    tables = shared.length_tables(name, specs, group, options)
    caption = "Recall (share of correct answers) by length. The dotted line is chance."
    chance = "" if protocol.chance is None else f"chance {protocol.chance:.2f}"
    panel = axis(RECALLED) | {"level": protocol.chance, "level_name": chance}
    figures = shared.length_figure(name, "Recall by length", group, UNSHIFTED, panel, caption, options)
    shifts = sorted({shift for length, shift in keys if length == trained})
    if len(shifts) > 1:
        shifted = Metric("length {}, shift {}", key=lambda shift: (trained, shift), tally=whole)
        rows = [
            TableRow(series.label, tuple(shifted.cell(series, shift) for shift in shifts)) for series in group.series
        ]
        caption = f"Recall at length {trained} with all positions shifted"
        tables.append(Table(f"{name}-shift", caption, ("shift", *map(str, shifts)), tuple(rows)))
    figures += heads_figures(group.measured, name, options.members)
    return ReportBlock((text,), tuple(figures), tuple(tables))


SCORES = {"score of the fact": "fact", "log-sum-exp of all other keys": "rest"}
"""The two numbers of a retrieving head, by their names."""


def head_lines(recalls: Mapping[str, Sequence[Mapping[float, RecallEntry]]], score: str) -> list[Line]:
    """Return a line for each label: one number of its retrieving head by length, as a mean over seeds.

    `recalls` contains the unshifted entries of each seed by label, in ascending order of length.
    """
    lines = []
    for label, seeds in recalls.items():
        found: dict[float, list[float]] = {}
        for entries in seeds:
            place = retrieving_head(list(entries.values()))
            for length, entry in entries.items():
                head = None if place is None else scores_of(entry, place)
                if head is not None and getattr(head, score) is not None:
                    found.setdefault(length, []).append(getattr(head, score))
        if found:
            lines.append(Line(label, tuple(found), tuple(map(fmean, found.values()))))
    return lines


def head_panels(
    recalls: Mapping[str, Sequence[Mapping[float, RecallEntry]]], x_label: str, members: Mapping[str, Member]
) -> list[Panel]:
    """Return panels for the retrieving heads, in pairs: the score of the fact, the log-sum-exp of all other keys."""
    sides = []
    for title, score in SCORES.items():
        shown = arranged(head_lines(recalls, score), members, Panel((), x_label, "score"))
        sides.append([replace(each, title=f"{each.title}: {title}" if each.title else title) for each in shown])
    return [panel for pair in zip(*sides, strict=True) for panel in pair]


def heads_figures(measured: Sequence[Series], name: str, members: Mapping[str, Member]) -> list[Figure]:
    recalls = {
        series.label: [
            {float(length): entry for (length, shift), entry in replicate.entries.items() if not shift}
            for replicate in series.replicates
        ]
        for series in measured
    }
    if len({x for line in head_lines(recalls, "fact") for x in line.x}) < 2:
        return []
    caption = (
        "Scores of the question in the retrieving head (largest weight on the fact at the shortest length), as the "
        "softmax takes them. If the score equals the log-sum-exp of all other keys, the fact has half of the weight."
    )
    alt = f"Score of the fact and log-sum-exp of other keys by length for {', '.join(recalls)}"
    return [
        Figure(f"{name}-heads", caption, alt, *panels(head_panels(recalls, "length (tokens)", members), in_pairs=True))
    ]
