"""The report section on the analysis of attention."""

from collections.abc import Callable

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import Metric
from megatron_coca.evaluation.report.plots.figures import Figure
from megatron_coca.evaluation.report.plots.panels import Line, Panel, arranged, panels
from megatron_coca.evaluation.report.reading import ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.tasks.analysis.task import ANALYSE, LengthAnalysis

COLUMNS: dict[str, Callable[[LengthAnalysis], float | None]] = {
    "anomalous pairs": lambda entry: entry.angles.anomalous if entry.angles is not None else None,
    "collinear pairs": lambda entry: entry.angles.collinear if entry.angles is not None else None,
    "largest angle, rad": lambda entry: entry.angles.largest if entry.angles is not None else None,
    "tau beyond training": lambda entry: entry.borders.k.beyond_training if entry.borders is not None else None,
    "score falls with distance": lambda entry: entry.decay.falling_mean,
    "entropy, nats": lambda entry: entry.entropy.mean,
}


def analysis_cell(series: Series, length: int, number: Callable[[LengthAnalysis], float | None]) -> TableCell:
    cell = Metric("length {}", number, "{:.3f}".format).cell(series, length)
    return TableCell("–") if cell.absent and (length,) in series.keys else cell


@shared.grouped("analysis", ANALYSE.comparable)
def analysis_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return a table of our numbers for section 2 of the CoCA paper, and plots of scores by distance and of entropy."""
    rows = []
    for series in group.series:
        for length in group.lengths():
            cells = [analysis_cell(series, length, number) for number in COLUMNS.values()]
            rows.append(TableRow(f"{series.label}, {length} tokens", tuple(cells)))
    caption = "Anomalous pairs, falling scores and entropy (shares of token pairs, means)"
    table = Table(name, caption, ("label", *COLUMNS), tuple(rows))
    figures = [*decay_figure(group, name, options), *entropy_figure(group, name, options)]
    return ReportBlock((f"Protocol: {group.first.protocol.text}.",), tuple(figures), (table,))


def _marks(group: ResultGroup) -> dict[float, str]:
    return {float(length): f"trained at {length:,}" for length in sorted(group.training_lengths())}


def decay_figure(group: ResultGroup, name: str, options: ReportOptions) -> list[Figure]:
    """Return a plot of measured scores by distance, which the CoCA paper calls a(s). Earlier result files have no such
    scores; for these, the list is empty.
    """
    lines = [line for series in group.measured if (line := decay_line(series)) is not None]
    if not lines:
        return []
    caption = (
        "Score by distance: the mean change of the score when the same query and key are moved apart, at the greatest "
        "length, for the first seed. Bands: the middle half of all layers, heads and pairs."
    )
    alt = f"Change of the score by distance for {', '.join(line.label for line in lines)}"
    panel = Panel((), "distance (tokens)", "change of the score", marks=_marks(group), level=0.0)
    return [Figure(f"{name}-decay", caption, alt, *panels(arranged(lines, options.members, panel)))]


def decay_line(series: Series) -> Line | None:
    decay = last_entry(series).decay
    if decay.change is None or decay.low is None or decay.high is None:
        return None
    columns = zip(decay.distances, decay.change, decay.low, decay.high, strict=True)
    known = [
        (float(distance), change, low, high)
        for distance, change, low, high in columns
        if distance > 0 and change is not None and low is not None and high is not None
    ]
    if not known:
        return None
    distances, changes, lows, highs = zip(*known, strict=True)
    return Line(series.label, distances, changes, lows, highs)


def entropy_figure(group: ResultGroup, name: str, options: ReportOptions) -> list[Figure]:
    lines = [entropy_line(series) for series in group.measured]
    if not lines:
        return []
    caption = "Entropy of the attention weights by query position at the greatest length, for the first seed."
    alt = f"Entropy by position for {', '.join(line.label for line in lines)}"
    panel = Panel((), "keys that the query sees", "entropy (nats)", marks=_marks(group), linear_x=True)
    return [Figure(f"{name}-entropy", caption, alt, *panels(arranged(lines, options.members, panel)))]


def last_entry(series: Series) -> LengthAnalysis:
    """Return the entry of the first seed at the greatest length."""
    *_, entry = next(replicate for replicate in series.replicates if replicate.entries).entries.values()
    return entry


def entropy_line(series: Series) -> Line:
    entry = last_entry(series)
    return Line(series.label, tuple(at + 1 for at in entry.entropy.positions), tuple(entry.entropy.by_position))
