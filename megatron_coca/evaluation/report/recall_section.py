"""The section on key-value recall: accuracy by length and by shift of positions, and the scores of retrieving heads."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.charts import Figure, Line, Panel, panels, size_with_legend
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.reading import Comparable, Replicate, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.retrieval_sections import INTERVALS, SHARES, TallyOf, tally_cell
from megatron_coca.evaluation.retrieval.recall import HeadScores, retrieving_head, scores_of

RECALL_COMPARABLE: Comparable = {
    "cases": "protocol.cases",
    "seed": "protocol.seed",
    "prompts": "protocol.prompts",
    "protocol": "protocol.text",
}
SCORES: tuple[tuple[str, Callable[[HeadScores], float | None]], ...] = (
    ("score of the fact", attrgetter("fact")),
    ("log-sum-exp of all other keys", attrgetter("rest")),
)


def recall_cell(series: Series, length: int, shift: int = 0, tally: TallyOf = lambda cell: cell) -> TableCell:
    """The accuracy of a series at a length and shift."""
    at = f"length {length}" + (f", shift {shift}" if shift else "")
    return tally_cell(series, (length, shift), at, tally)


def head_number(length: int, number: Callable[[HeadScores], float | None], replicate: Replicate) -> float | None:
    """A number of the retrieving head of one seed."""
    cells = list(replicate.cells.values())
    place, cell = retrieving_head(cells), replicate.cells.get((length, 0))
    head = None if cell is None or place is None else scores_of(cell, place)
    return None if head is None else number(head)


@shared.grouped("recall", RECALL_COMPARABLE)
def recall_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Accuracy by length, split by the distance of the fact; by shift of all positions; scores of retrieving heads."""
    protocol = group.first.protocol
    keys = group.cell_keys()
    lengths = sorted({length for length, shift in keys if shift == 0})
    chance = "" if protocol.chance is None else f" A random value is right in {protocol.chance:.3f} of the cases."
    text = f"Protocol: {protocol.text}; {protocol.prompts}; {protocol.cases} cases, seed {protocol.seed}.{chance}"
    if not keys:
        return ReportBlock((text,), (), ())
    header = ("accuracy at length", *shared.length_header(lengths, group.training_lengths()))

    def row(series: Series, label: str, tally: TallyOf = lambda cell: cell) -> TableRow:
        return TableRow(label, tuple(recall_cell(series, length, 0, tally) for length in lengths))

    rows = [row(series, series.label) for series in group.series]
    tables = [Table(name, f"Recall by length, with 95% intervals ({INTERVALS})", header, tuple(rows))]
    rows = [
        row(series, f"{series.label}, {side}", attrgetter(side))
        for side in ("inside", "beyond")
        for series in group.series
    ]
    caption = "Recall of facts within the training length of the question (inside) and before it (beyond)"
    tables.append(Table(f"{name}-split", caption, header, tuple(rows)))
    panel = {"x_label": "length (tokens)", "y_label": "accuracy", "y_range": SHARES, "level": protocol.chance}
    drawn, lines = shared.length_lines(group, recall_cell)
    caption = f"Recall by length with 95% intervals: {INTERVALS}. The horizontal line is chance."
    figures = [shared.length_figure(name, "Recall by length", drawn, lines, panel, caption)]
    trained = min(group.training_lengths())
    shifts = sorted({shift for length, shift in keys if length == trained})
    if len(shifts) > 1:
        shifted = tuple(
            TableRow(series.label, tuple(recall_cell(series, trained, shift) for shift in shifts))
            for series in group.series
        )
        caption = f"Recall at length {trained} with all positions shifted"
        tables.append(Table(f"{name}-shift", caption, ("shift", *map(str, shifts)), shifted))
    heads = [figure for figure in [heads_figure(group.measured, lengths, name)] if figure is not None]
    return ReportBlock((text,), (*figures, *heads), tuple(tables))


def heads_figure(measured: Sequence[Series], lengths: Sequence[int], name: str) -> Figure | None:
    """Score of the fact and log-sum-exp of the rest by length, a panel each, means over seeds; None if not measured."""
    drawn = []
    for title, number in SCORES:
        lines = []
        for series in measured:
            means = []
            for length in lengths:
                values = map(partial(head_number, length, number), series.replicates)
                known = [value for value in values if value is not None]
                means.append(fmean(known) if known else math.nan)
            if any(map(math.isfinite, means)):
                lines.append(Line(series.label, tuple(map(float, lengths)), tuple(means)))
        drawn.append(Panel(tuple(lines), "length (tokens)", "score", title=title))
    if not drawn[0].lines or len(lengths) < 2:
        return None
    caption = (
        "Scores of the question in the retrieving head (largest weight on the fact at the shortest length), as softmax "
        "takes them: the fact is found where its score is above the log-sum-exp of all other keys."
    )
    labels = [series.label for series in measured]
    alt = f"Score of the fact and log-sum-exp of other keys by length for {', '.join(labels)}"
    return Figure(f"{name}-heads", caption, alt, panels(drawn, columns=2), size_with_legend(labels, 3.6, 9.0))
