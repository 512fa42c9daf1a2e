"""The report section on LongPPL: perplexities of key tokens by length."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import ReportBlock
from megatron_coca.evaluation.report.metrics import Metric, measure_of, metric_of
from megatron_coca.evaluation.report.reading import ResultGroup
from megatron_coca.evaluation.report.result_tables import LengthTable, ReportOptions
from megatron_coca.evaluation.tasks.longppl.task import LONGPPL

LONG_PERPLEXITY, PERPLEXITY, _ = LONGPPL.numbers
KEY_TOKENS = metric_of(LONG_PERPLEXITY)
ALL_TOKENS: Mapping[str, Metric] = {
    "{}, perplexity of all tokens": metric_of(PERPLEXITY),
    "{}, key tokens in percent": Metric("length {}", lambda entry: 100 * entry.key_tokens / entry.tokens_scored),
}


@shared.grouped("longppl", LONGPPL.comparable)
def longppl_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return a table and a plot of LongPPL, and a table of the perplexity of all tokens and the share of key tokens."""
    protocol, count = group.first.protocol, group.first.documents.count
    finder = "each model finds its own key tokens"
    if protocol.evaluator is not None:
        finder = f"key tokens of {protocol.evaluator.path}"
    metric = replace(KEY_TOKENS, sums=attrgetter("nll_by_document")) if _same_keys(group) else KEY_TOKENS
    settings = f"short context {protocol.short}, stride {protocol.stride}, alpha {protocol.alpha:g}"
    notes = (f"{settings}, beta {protocol.beta:g}; {finder}; {count} documents",)
    title = "LongPPL by length"
    specs = (
        LengthTable(title, "LongPPL at length", {"{}": metric}, notes=notes, measure=measure_of(LONG_PERPLEXITY)),
        LengthTable("Perplexity of all tokens, and share of key tokens", "at length", ALL_TOKENS, "-all"),
    )
    tables = shared.length_tables(name, specs, group, options)
    panel = {"x_label": "length (tokens)", "y_label": "LongPPL", "log_y": True}
    figures = shared.length_figure(name, title, group, metric, panel, "Perplexity of key tokens by length.", options)
    return ReportBlock((f"Protocol: {protocol.text}; {settings}.",), tuple(figures), tuple(tables))


def _same_keys(group: ResultGroup) -> bool:
    """Return True if all models have the same key tokens, so that their losses can be compared by document."""
    entries = [entry for series in group.series for entry in series.entries()]
    return len({(entry.length, entry.keys_sha256) for entry in entries}) == len({entry.length for entry in entries})
