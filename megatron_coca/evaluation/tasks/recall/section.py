"""The report section on key-value recall and on the scores of the retrieval heads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from megatron_coca.data.synthetic import QUESTIONS
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableRow
from megatron_coca.evaluation.report.metrics import Metric, measure_of, metric_of
from megatron_coca.evaluation.report.plots.figures import Figure
from megatron_coca.evaluation.report.plots.looks import Member
from megatron_coca.evaluation.report.plots.panels import Line, Panel, arranged, panels
from megatron_coca.evaluation.report.reading import ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import LengthTable, ReportOptions
from megatron_coca.evaluation.tasks.recall.task import RECALL, HeadScores, RecallEntry, part_of
from megatron_coca.evaluation.tasks.retrieval.section import INTERVALS, axis, by_side, head
from megatron_coca.evaluation.tasks.retrieval.task import whole

RECALLED = measure_of(RECALL.numbers[0])
UNSHIFTED = metric_of(RECALL.numbers[0], key=lambda length: (length, 0))


@shared.grouped("recall", RECALL.comparable)
def recall_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return the accuracy by length, by distance of the fact and by shift of all positions, and the scores of the
    retrieval heads.
    """
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
        kinds = {f"{{}}, {kind}": replace(UNSHIFTED, tally=partial(part_of, part=kind)) for kind in QUESTIONS}
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
"""The two scores of a retrieval head: their names in plots, and their fields in `HeadScores`."""


def head_lines(recalls: Mapping[str, Sequence[Mapping[float, RecallEntry]]], score: str) -> list[Line]:
    """Return a `Line` for each label. It shows the field `score` of the retrieval head by length, as a mean over seeds.

    `recalls` maps a label to its seeds. Each seed maps lengths, in ascending order, to its unshifted entries.
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
    """Return pairs of panels for the retrieval heads. The first panel of a pair shows the score of the fact, the second
    the log-sum-exp of all other keys.
    """
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
        "Scores of the question in the retrieval head, in the form that enters the softmax. The retrieval head is the "
        "one with the largest weight on the fact at the shortest length. If the score of the fact equals the "
        "log-sum-exp of all other keys, the fact has half of the weight."
    )
    alt = f"Score of the fact and log-sum-exp of other keys by length for {', '.join(recalls)}"
    return [
        Figure(f"{name}-heads", caption, alt, *panels(head_panels(recalls, "length (tokens)", members), in_pairs=True))
    ]


def retrieving_head(entries: Sequence[RecallEntry]) -> tuple[int, int] | None:
    """Return (layer, head) of the head with the largest weight on the fact, or None if no entry has scored heads.

    The weights are those at the shortest length with scored heads.
    """
    heads = next((entry.heads for entry in entries if entry.heads), [])
    best = max(heads, key=lambda head: head.weight, default=None)
    return None if best is None else (best.layer, best.head)


def scores_of(entry: RecallEntry, place: tuple[int, int]) -> HeadScores | None:
    """Return the scores of the head at `place` (layer and head), or None."""
    return next((head for head in entry.heads if (head.layer, head.head) == place), None)
