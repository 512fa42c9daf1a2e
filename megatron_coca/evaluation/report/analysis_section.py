"""Initial angles, rotary borders, decay and entropy: section 2 and Figures 3 and 7 of the CoCA paper on a checkpoint."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from megatron_coca.evaluation.analysis.records import FIGURES, AnalysisResult, LengthAnalysis
from megatron_coca.evaluation.report.document import Entry, Figure, Line, ReportBlock, Table
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, ResultGroup, Series, groups
from megatron_coca.evaluation.report.tables import checkpoint_name, data_name, environment_name, heading, lacking

COMPARABLE: Comparable[AnalysisResult] = {
    "documents (sha256)": lambda result: result.documents.sha256,
    "pairs": lambda result: result.protocol.pairs,
    "queries": lambda result: result.protocol.queries,
    "seed": lambda result: result.protocol.seed,
    "protocol": lambda result: result.protocol.text,
}

SAID = {
    "angles": "Initial angles from key to query over all layers, heads and rotated pairs, before rotation.",
    "reach": "Distances at which rotated pairs first cross their borders; k is the reach tau of the anomaly.",
    "decay": "Mean |score| by distance, with the decay bounds.",
    "entropy": "Entropy of the attention weights by how many keys a query sees.",
}
"""What each figure shows."""

Number = Callable[[LengthAnalysis], float | None]
COLUMNS: dict[str, Number] = {
    "anomalous pairs": lambda cell: cell.angles.anomalous if cell.angles is not None else None,
    "collinear pairs": lambda cell: cell.angles.collinear if cell.angles is not None else None,
    "largest angle, rad": lambda cell: cell.angles.largest if cell.angles is not None else None,
    "tau beyond training": lambda cell: cell.borders.k.beyond_training if cell.borders is not None else None,
    "score falls with distance": lambda cell: cell.decay.falling_mean,
    "entropy, nats": lambda cell: cell.entropy.mean,
}
"""The numbers of the table."""


def build(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A table and the plots of each label for each group."""
    return [_block(group, place) for place, group in enumerate(groups(loaded, COMPARABLE), 1)]


def _block(group: ResultGroup[AnalysisResult], place: int) -> ReportBlock:
    lengths = group.lengths()
    lines = [
        Line(f"{series.label}, {length} tokens", _entries(series, length))
        for series in group.series
        for length in lengths
    ]
    caption = "Anomalous pairs, falling scores and entropy (shares of pairs of tokens, means)"
    table = Table(f"analysis-{place}", caption, ("label", *COLUMNS), tuple(lines))
    figures = [
        _figure(series, name, f"analysis-{place}-{at}-{name}")
        for at, series in enumerate(group.series, 1)
        for name in FIGURES
        if series.cells
    ]
    text = (f"Protocol: {group.first.protocol.text}.",)
    return ReportBlock(heading(group), text, tuple(figures), (table,))


def _entries(series: Series[AnalysisResult], length: int) -> tuple[Entry, ...]:
    cell = series.cells.get((length,))
    if cell is None:
        return (lacking(series.why(f"length {length}")),) * len(COLUMNS)
    numbers = [read(cell) for read in COLUMNS.values()]
    return tuple(Entry("–") if number is None else Entry(f"{number:.3f}", number) for number in numbers)


def _figure(series: Series[AnalysisResult], kind: str, name: str) -> Figure:
    header = series.header
    whole = header.model_copy(update={"results": list(series.cells.values())})

    def draw(canvas: Canvas) -> None:
        axes: Axes = canvas.subplots()
        FIGURES[kind](axes, whole)
        axes.grid()

    caption = (
        f"{series.label}: {SAID.get(kind, kind)} Checkpoint: {checkpoint_name(header)}. {data_name(header)}"
        f"Computed with {environment_name(header)}."
    )
    return Figure(name, caption, f"{series.label}: {kind}", draw)
