"""The sections of numbers by window: perplexity, loss with maps, and CoCA-Strict against CoCA-Slack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from statistics import fmean

from megatron_coca.evaluation.perplexity import PerplexityResult, WindowResult
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.charts import Figure
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.intervals import FEWEST_DOCUMENTS, RESAMPLES, differ
from megatron_coca.evaluation.report.published import method_key, tables_of
from megatron_coca.evaluation.report.reading import (
    Comparable,
    LoadedResult,
    Replicate,
    ResultGroup,
    Series,
    group_results,
)
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.retrieval_sections import RETRIEVAL_COMPARABLE, accuracy_at
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.retrieval.retrieval_tasks import PasskeyResult

PERPLEXITY_COMPARABLE: Comparable = {
    "documents (sha256)": "documents.sha256",
    "stride": "protocol.stride",
    "protocol": "protocol.text",
}

# Perplexity and loss


def interrupted(cell: WindowResult, series: Series) -> str:
    """The note on a window of which only some documents are scored; empty for a complete one."""
    count = series.header.documents.count
    return f"interrupted: the first {cell.documents} of {count} documents" if cell.documents < count else ""


@dataclass(frozen=True)
class WindowMetric:
    """A number of a window.

    Attributes:
        number: of all scored tokens.
        sums: of each document.
        show: as text.
        log: `number` is the logarithm of what is shown.
    """

    number: Callable[[WindowResult], float]
    sums: Callable[[WindowResult], Sequence[float]]
    show: shared.Show = shared.TWO_DIGITS
    log: bool = False

    def cell(self, series: Series, window: int) -> TableCell:
        """The table cell of a series.

        An interrupted window is left out of a mean over seeds; if all are, the number is marked and not compared.
        """
        notes = [interrupted(result, series) for result in results_at(series, window)]
        partial = bool(notes) and all(notes)

        def complete(replicate: Replicate) -> float | None:
            result = replicate.cells.get((window,))
            return None if result is None or (interrupted(result, series) and not partial) else self.number(result)

        value = shared.value_cell(series, f"window {window}", complete, self.show, self.log)
        interruptions = "; ".join(dict.fromkeys(filter(None, notes)))
        return replace(
            value, note=interruptions or value.note, partial=partial, sample=self.document_means(series, window)
        )

    def marked_cell(self, series: Series, window: int, reference: Series | None) -> TableCell:
        """The table cell with MARK where the losses of documents differ from those of `reference`."""
        found = self.cell(series, window)
        if reference is None or series is reference:
            return found
        if not differ(found.sample, self.document_means(reference, window)):
            return found
        return replace(found, text=found.text + MARK)

    def document_means(self, series: Series, window: int) -> tuple[float, ...]:
        """The sums of every document, means over the seeds with all documents; empty without one."""
        complete = [self.sums(result) for result in results_at(series, window) if not interrupted(result, series)]
        return tuple(fmean(values) for values in zip(*complete, strict=True))


def results_at(series: Series, window: int) -> list[WindowResult]:
    return [replicate.cells[window,] for replicate in series.replicates if (window,) in replicate.cells]


nll, losses = attrgetter("nll"), attrgetter("nll_by_document")
PERPLEXITY = WindowMetric(nll, losses, log=True)
LOSS = WindowMetric(nll, losses, "{:.4f}".format)
ACCURACY = WindowMetric(lambda cell: 100 * cell.accuracy, attrgetter("correct_by_document"))


MARK = "†"
"""Not an asterisk, which marks training lengths."""


def marked(metric: WindowMetric, group: ResultGroup, baseline: str | None) -> shared.CellFunction:
    """The cells of a metric, compared with those of the series with the baseline's label, if there is one."""
    reference = next((series for series in group.series if series.label == baseline), None)
    return partial(metric.marked_cell, reference=reference)


def with_baseline_note(table: Table, baseline: str | None) -> Table:
    """A table with numbers that could be marked: with a note on MARK."""
    reference = next((row for row in table.rows if row.name == baseline and not row.published), None)
    others = [row for row in table.rows if reference is not None and row is not reference]
    pairs = [pair for row in others for pair in zip(row.cells, reference.cells, strict=True)] if reference else []
    if not any(min(len(cell.sample), len(base.sample)) >= FEWEST_DOCUMENTS for cell, base in pairs):
        return table
    note = (
        f"{MARK} differs from {baseline} on these documents: the 95% interval of the difference of the loss excludes 0 "
        f"({RESAMPLES:,} paired bootstrap samples of the documents). Losses are averaged over seeds first, so it "
        "speaks for other documents, not for other seeds; it is not corrected for the number of comparisons."
    )
    return replace(table, notes=(*table.notes, note))


@shared.grouped("perplexity", PERPLEXITY_COMPARABLE)
def perplexity_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """CoCA Table 1 and Figure 1: perplexity against the window, both logarithmic."""
    protocol, documents = group.first.protocol, group.first.documents
    metric = "perplexity" if options.papers else ""
    cell = marked(PERPLEXITY, group, options.baseline)
    main, *others = shared.length_table(
        name, "Perplexity by window", "perplexity at window", group, cell, metric, lowest=True
    )
    cells = [(series, cell) for series in group.series for cell in series.cells()]
    complete = [cell for series, cell in cells if not interrupted(cell, series)]
    scored = f", {max(cell.tokens_scored for cell in complete)} tokens scored" if complete else ""
    main = replace(main, notes=(*main.notes, f"stride {protocol.stride}, {documents.count} documents{scored}"))
    main = with_baseline_note(main, options.baseline)
    figures: list[Figure] = []
    drawn, lines = shared.length_lines(group, PERPLEXITY.cell)
    if drawn:
        theirs = shared.published_lines(group, drawn, metric)
        caption = (
            f"Perplexity against the window, sliding by {protocol.stride} tokens; an infinite one leaves a gap."
            f"{'' if len(complete) == len(cells) else ' Interrupted windows are left out.'}"
            f"{shared.bands_text(drawn, cut_off=True)}{shared.DASHED if theirs else ''}"
        )
        panel = {"x_label": "window (tokens)", "y_label": "perplexity", "log_y": True}
        # The first plot of a report has been report.png since reports had one plot.
        file = "report" if name.endswith("-1") else name.replace("perplexity-", "report_")
        figures.append(shared.length_figure(file, "Perplexity by window", drawn, [*lines, *theirs], panel, caption))
    text = (f"Protocol: {protocol.text}; stride {protocol.stride}.",)
    caption = "Perplexity of variants as a multiple of that of the plain model"
    paired = shared.paired_tables(name, caption, group, complete_nll, "{:.3f}".format, log=True)
    return ReportBlock(text, tuple(figures), (main, *paired, *others))


def complete_nll(replicate: Replicate, window: int) -> float | None:
    cell = replicate.cells.get((window,))
    return None if cell is None or cell.documents < replicate.header.documents.count else cell.nll


REPEATED = (
    "Su counts the tokens that are predicted right, on texts of the training length, on longer ones, and on longer "
    "ones that repeat their beginning (`--repeat`, a table of its own here)."
)


def has_map(group: ResultGroup) -> bool:
    methods = [method_key(series.header) for series in group.series]
    return any(method is not None and method.positions != "none" for method in methods)


@shared.grouped("rerope", PERPLEXITY_COMPARABLE, has_map)
def map_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """The tables of Su's pages on ReRoPE: loss and next-token accuracy by window."""
    cell = marked(LOSS, group, options.baseline)
    main, *others = shared.length_table(
        *(name, "Loss in nats per token by window", "loss at window", group, cell),
        metric="loss" if options.papers else "",
        lowest=True,
    )
    tables = [with_baseline_note(main, options.baseline), *others]
    caption, head = "Next-token accuracy in percent by window", "accuracy at window"
    tables += shared.length_table(f"{name}-accuracy", caption, head, group, ACCURACY.cell, metric="", lowest=False)
    published = tables_of("next-token accuracy") if options.papers else []
    tables += [shared.published_table(table, group, name) for table in published]
    text = (REPEATED,) if published else ()
    return ReportBlock(text, (), tuple(tables))


# CoCA-Strict against CoCA-Slack

StrictMetric = tuple[str, str, type[Result], Comparable, shared.CellFunction]
STRICT_METRICS: tuple[StrictMetric, ...] = (
    ("strict perplexity", "Perplexity", PerplexityResult, PERPLEXITY_COMPARABLE, PERPLEXITY.cell),
    (
        *("strict passkey", "Passkey accuracy", PasskeyResult, RETRIEVAL_COMPARABLE),
        lambda series, length: shared.value_cell(series, "", partial(accuracy_at, (length,))),
    ),
)
"""Metric of the published table, its name, the type of results, what must agree, and the cell of a series."""


def strict_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """CoCA Table 3: a table for each group that has both forms with the same settings."""
    blocks = []
    for metric, title, kind, comparable, cell in STRICT_METRICS:
        results = [item for item in loaded if isinstance(item.result, kind)]
        for index, group in enumerate(group_results(results, comparable), 1):
            pairs = [(slack, strict) for slack in group.series for strict in group.series if is_pair(slack, strict)]
            if not pairs:
                continue
            name, trained = f"{metric.replace(' ', '-')}-{index}", group.training_lengths()
            theirs = tables_of(metric) if options.papers else []
            joined = [table for table in theirs if table.training_length in trained]
            measured = {length for pair in pairs for series in pair for (length,) in series.keys}
            lengths = sorted({*measured, *shared.published_lengths(joined)})
            rows = [row for pair in pairs for row in strict_rows(*pair, lengths, cell)]
            for table in joined:
                rows += shared.published_rows(table, lengths)
            caption, header = (
                f"{title}: CoCA-Slack, and what CoCA-Strict adds to it",
                shared.length_header(lengths, trained),
            )
            main = Table(name, caption, ("at length", *header), tuple(rows), (), tuple(map(shared.source_text, joined)))
            others = [shared.published_table(table, None, name) for table in theirs if table not in joined]
            blocks.append(ReportBlock((), (), (main, *others), group.heading, shared.provenance(group)))
    return blocks


def is_pair(slack: Series, strict: Series) -> bool:
    method = method_key(slack.header)
    return (
        method is not None
        and method.pos_emb == "coca"
        and replace(method, pos_emb="coca_strict") == method_key(strict.header)
        and slack.header.checkpoint.seq_length == strict.header.checkpoint.seq_length
    )


def strict_rows(
    slack: Series, strict: Series, lengths: Sequence[int], cell: shared.CellFunction
) -> tuple[TableRow, TableRow]:
    first, second = (
        [cell(series, length) if (length,) in series.keys else EMPTY for length in lengths]
        for series in (slack, strict)
    )
    differences = []
    for before, after in zip(first, second, strict=True):
        if before.value is None or after.value is None:
            differences.append(EMPTY)
        elif before.partial or after.partial:
            differences.append(TableCell("–", note=before.note or after.note))
        else:
            difference = after.value - before.value
            differences.append(TableCell(f"{difference:+.2f}", difference))
    return TableRow(slack.label, tuple(first)), TableRow(f"{strict.label}: difference", tuple(differences))
