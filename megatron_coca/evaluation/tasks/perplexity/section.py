"""The report section on perplexity by window."""

from dataclasses import replace

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import ReportBlock
from megatron_coca.evaluation.report.metrics import measure_of, metric_of
from megatron_coca.evaluation.report.reading import ResultGroup
from megatron_coca.evaluation.report.result_tables import LengthTable, ReportOptions
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.tasks.perplexity.task import PERPLEXITY

BY_WINDOW, LOSS, ACCURACY = (metric_of(number, PERPLEXITY.at) for number in PERPLEXITY.numbers)
PERCENT = replace(ACCURACY, number=lambda entry: 100 * entry.accuracy)
LOSS_CAPTION, ACCURACY_CAPTION = "Loss in nats per token by window", "Next-token accuracy in percent by window"
MAP_TABLES = (
    LengthTable(LOSS_CAPTION, "loss at window", {"{}": LOSS}, "-loss", "loss"),
    LengthTable(ACCURACY_CAPTION, "accuracy at window", {"{}": PERCENT}, "-accuracy", "next-token accuracy"),
)
"""The tables of Jianlin Su's posts on ReRoPE. A report shows them for models with a relative-position map."""


@shared.grouped("perplexity", PERPLEXITY.comparable)
def perplexity_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return our results in the form of Table 1 and Figure 1 of the CoCA paper, which show perplexity by window. The
    figure has logarithmic axes.
    """
    protocol, documents = group.first.protocol, group.first.documents
    limit = "" if protocol.vocabulary is None else f", softmax over the ids below {protocol.vocabulary} only"
    measured = f"stride {protocol.stride}{limit}"
    scored = [entry.tokens_scored for series in group.series for entry in series.entries()]
    most = f", {max(scored)} tokens scored" if scored else ""
    begun = "" if documents.start is None else f", each after the token {documents.start}"
    notes = (f"{measured}, {documents.count} documents{begun}{most}",)
    rows, title = {"{}": BY_WINDOW}, "Perplexity by window"
    measure = measure_of(PERPLEXITY.numbers[0])
    main = LengthTable(title, "perplexity at window", rows, published="perplexity", notes=notes, measure=measure)
    mapped = any(_has_map(series.header) for series in group.series)
    tables = shared.length_tables(name, (main, *(MAP_TABLES if mapped else ())), group, options)
    caption = f"Perplexity against the window size, with stride {protocol.stride}; infinite values leave a gap."
    panel = {"x_label": "window (tokens)", "y_label": "perplexity", "log_y": True}
    figures = shared.length_figure(name, title, group, BY_WINDOW, panel, caption, options)
    return ReportBlock((f"Protocol: {protocol.text}; {measured}.",), tuple(figures), tuple(tables))


def _has_map(header: Result) -> bool:
    settings = {**header.checkpoint.trained_with, **header.overrides}
    return bool(settings.get("relative_positions"))
