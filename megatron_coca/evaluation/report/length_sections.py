"""The sections of numbers by window: perplexity, and loss with distance maps."""

from dataclasses import replace
from operator import attrgetter

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.charts import Figure
from megatron_coca.evaluation.report.document import ReportBlock, Table
from megatron_coca.evaluation.report.intervals import FEWEST_DOCUMENTS, RESAMPLES
from megatron_coca.evaluation.report.published import method_key, tables_of
from megatron_coca.evaluation.report.reading import Comparable, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import Metric, ReportOptions

PERPLEXITY_COMPARABLE: Comparable = {
    "documents (sha256)": "documents.sha256",
    "stride": "protocol.stride",
    "protocol": "protocol.text",
}
WINDOW, NLL, LOSSES = "window {}", attrgetter("nll"), attrgetter("nll_by_document")
PERPLEXITY = Metric(WINDOW, NLL, sums=LOSSES, log=True, lowest=True)
LOSS = Metric(WINDOW, NLL, "{:.4f}".format, sums=LOSSES, lowest=True)
ACCURACY = Metric(WINDOW, lambda cell: 100 * cell.accuracy, sums=attrgetter("correct_by_document"))


def baseline_of(group: ResultGroup, options: ReportOptions) -> Series | None:
    """The series that the others are compared with."""
    return next((series for series in group.series if series.label == options.baseline), None)


def with_baseline_note(table: Table, baseline: str | None) -> Table:
    """A table with numbers that could be marked: with a note on MARK."""
    reference = next((row for row in table.rows if row.name == baseline and not row.published), None)
    others = [row for row in table.rows if reference is not None and row is not reference]
    pairs = [pair for row in others for pair in zip(row.cells, reference.cells, strict=True)] if reference else []
    if not any(min(len(cell.sample), len(base.sample)) >= FEWEST_DOCUMENTS for cell, base in pairs):
        return table
    note = (
        f"{shared.MARK} differs from {baseline} on these documents: the 95% interval of the difference of the loss "
        f"excludes 0 ({RESAMPLES:,} paired bootstrap samples of the documents). Losses are averaged over seeds first, "
        "so it speaks for other documents, not for other seeds; it is not corrected for the number of comparisons."
    )
    return replace(table, notes=(*table.notes, note))


@shared.grouped("perplexity", PERPLEXITY_COMPARABLE)
def perplexity_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """CoCA Table 1 and Figure 1: perplexity against the window, both logarithmic."""
    protocol, documents = group.first.protocol, group.first.documents
    metric = "perplexity" if options.papers else ""
    reference = baseline_of(group, options)
    main, *others = shared.length_table(
        name, "Perplexity by window", "perplexity at window", group, PERPLEXITY, metric, reference
    )
    cells = [(series, cell) for series in group.series for cell in series.cells()]
    complete = [cell for series, cell in cells if not shared.interrupted(cell, series)]
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
        figures = shared.length_figure(file, "Perplexity by window", drawn, [*lines, *theirs], panel, caption)
    text = (f"Protocol: {protocol.text}; stride {protocol.stride}.",)
    caption = "Perplexity of variants as a multiple of that of the plain model"
    paired = shared.paired_tables(name, caption, group, PERPLEXITY, "{:.3f}".format)
    return ReportBlock(text, tuple(figures), (main, *paired, *others))


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
    published, reference = "loss" if options.papers else "", baseline_of(group, options)
    main, *others = shared.length_table(
        name, "Loss in nats per token by window", "loss at window", group, LOSS, published, reference
    )
    tables = [with_baseline_note(main, options.baseline), *others]
    caption, head = "Next-token accuracy in percent by window", "accuracy at window"
    tables += shared.length_table(f"{name}-accuracy", caption, head, group, ACCURACY)
    theirs = tables_of("next-token accuracy") if options.papers else []
    tables += [shared.published_table(table, group, name) for table in theirs]
    text = (REPEATED,) if theirs else ()
    return ReportBlock(text, (), tuple(tables))
