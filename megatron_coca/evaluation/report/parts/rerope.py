"""Windowed relative positions and extensions of one model: the tables of Su's pages on ReRoPE."""

from collections.abc import Sequence

from megatron_coca.evaluation.perplexity.records import PerplexityResult
from megatron_coca.evaluation.report.document import Block, Entry
from megatron_coca.evaluation.report.grouping import Group, Series, groups
from megatron_coca.evaluation.report.parts.perplexity import COMPARABLE, marked_partial
from megatron_coca.evaluation.report.provenance import heading, origin
from megatron_coca.evaluation.report.published import TABLES, use_of
from megatron_coca.evaluation.report.reading import Loaded
from megatron_coca.evaluation.report.tables import lacking, length_table, number, published_table

ACCURACY = (
    "Su counts the tokens that are predicted right, on texts of the training length, on longer ones, and on longer ones "
    "that repeat their beginning (`--repeat`, a table of its own here)."
)


def build(loaded: Sequence[Loaded], papers: bool) -> list[Block]:
    """A table of losses for each group in which a model is used with a relative-position map."""
    chosen = [group for group in groups(loaded, COMPARABLE) if any(map(_mapped, group.series))]
    return [_block(group, place, papers) for place, group in enumerate(chosen, 1)]


def _mapped(series: Series[PerplexityResult]) -> bool:
    use = use_of(series.header)
    return use is not None and use.positions != "none"


def _block(group: Group[PerplexityResult], place: int, papers: bool) -> Block:
    windows, name = group.lengths(), f"rerope-{place}"
    tables = length_table(
        name, "Loss in nats per token by window", "loss at window", group, _loss, windows, "loss", papers
    )
    caption, head = "Next-token accuracy in percent by window", "accuracy at window"
    tables += length_table(f"{name}-accuracy", caption, head, group, _accuracy, windows, "", False, lowest=False)
    published = [table for table in TABLES if table.metric == "next-token accuracy"] if papers else []
    tables += [published_table(table, group, name) for table in published]
    return Block(heading(group), (*([ACCURACY] if published else []), origin(group)), (), tuple(tables))


def _loss(series: Series[PerplexityResult], window: int) -> Entry:
    cell = series.cells.get((window,))
    if cell is None:
        return lacking(series.why(f"window {window}"))
    return marked_partial(Entry(number(cell.nll, 4), cell.nll), series, cell)


def _accuracy(series: Series[PerplexityResult], window: int) -> Entry:
    cell = series.cells.get((window,))
    if cell is None:
        return lacking(series.why(f"window {window}"))
    return marked_partial(Entry(number(100 * cell.accuracy), cell.accuracy), series, cell)
