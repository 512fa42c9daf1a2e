"""The table of all report sections, and the report built from results."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_coca.evaluation.report import length_sections as by_length
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report import retrieval_sections as retrieval
from megatron_coca.evaluation.report.analysis_section import ANALYSIS_COMPARABLE, analysis_blocks
from megatron_coca.evaluation.report.benchmarks_section import benchmark_blocks, other_blocks
from megatron_coca.evaluation.report.claim import headline
from megatron_coca.evaluation.report.document import ReportDocument, Section
from megatron_coca.evaluation.report.lm_eval_section import HARNESS_COMPARABLE
from megatron_coca.evaluation.report.longppl_section import LONGPPL_COMPARABLE, longppl_blocks
from megatron_coca.evaluation.report.looks import members
from megatron_coca.evaluation.report.reading import RESULT_TYPES, Comparable, LoadedResult, group_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.speed_section import speed_blocks
from megatron_coca.evaluation.report.tidy import Row, speed_rows, tidy_rows
from megatron_coca.evaluation.results import EvaluationError

NOT_PRINTED = ("summary", "training")
"""Sections that the console does not show."""
SECTIONS: dict[str, tuple[str, tuple[str, ...], shared.Builder]] = {
    "summary": ("Summary", ("perplexity", "passkey", "recall"), by_length.summary_blocks),
    "recall": ("Key-value recall", ("recall",), retrieval.recall_blocks),
    "training": ("Learning curves", tuple(RESULT_TYPES), by_length.curve_blocks),
    "perplexity": ("Perplexity beyond the training length", ("perplexity",), by_length.perplexity_blocks),
    "longppl": ("Perplexity of the tokens that need a long context", ("longppl",), longppl_blocks),
    "passkey": ("Passkey retrieval", ("passkey",), retrieval.passkey_blocks),
    "needle": ("A needle in a haystack", ("needle",), retrieval.needle_blocks),
    "ruler": ("RULER-style tasks", ("ruler",), retrieval.ruler_blocks),
    "benchmarks": ("Long-context benchmarks", ("lm-eval",), benchmark_blocks),
    "short": ("Tasks of lm-evaluation-harness", ("lm-eval",), other_blocks),
    "speed": ("Speed and memory", ("speed",), speed_blocks),
    "analysis": ("Analysis of attention", ("analyse",), analysis_blocks),
}
"""Title, tasks of the results, and builder of each section, in order. A new task needs a row here and a row in
`RESULT_TYPES`."""


COMPARABLE: dict[str, Comparable] = {
    "perplexity": by_length.PERPLEXITY_COMPARABLE,
    "longppl": LONGPPL_COMPARABLE,
    "passkey": retrieval.RETRIEVAL_COMPARABLE,
    "needle": retrieval.NEEDLE_COMPARABLE,
    "ruler": retrieval.RETRIEVAL_COMPARABLE,
    "recall": retrieval.RECALL_COMPARABLE,
    "lm-eval": HARNESS_COMPARABLE,
    "analyse": ANALYSIS_COMPARABLE,
}
"""The properties in which comparable results of a task agree; by default the whole protocol."""


def tidy(loaded: Sequence[LoadedResult]) -> list[Row]:
    """Return all numbers of the results in tidy form."""
    groups = (
        (task, group)
        for task in RESULT_TYPES
        if task != "speed"
        for group in group_results(
            [item for item in loaded if item.result.task == task], COMPARABLE.get(task, {"protocol": "protocol"})
        )
    )
    return [*tidy_rows(groups, members(item.result for item in loaded)), *speed_rows(loaded)]


def report_document(loaded: Sequence[LoadedResult], title: str, options: ReportOptions) -> ReportDocument:
    """Return the content of a report: all sections that are not empty.

    Raises EvaluationError if there is nothing to report, a label has two models, or the baseline has no results.
    """
    if not any(item.result.results or item.result.missing for item in loaded):
        raise EvaluationError("results: the files contain neither numbers nor missing entries; name other files")
    labels = dict.fromkeys(item.result.label for item in loaded)
    if options.baseline is not None and options.baseline not in labels:
        raise EvaluationError(f"baseline `{options.baseline}`: not a label; name one of {', '.join(labels)}")
    weights = {item.result.checkpoint.identity for item in loaded if item.result.task != "speed"}
    counts = {"result file": len(loaded), "label": len(labels), "set": len(weights)}
    files, labelled, sets = (f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
    origin = "All numbers were measured with megatron-coca evaluate, unless a paper is named."
    options = replace(options, members=members(item.result for item in loaded))
    sections = []
    for name, (heading, tasks, build) in SECTIONS.items():
        chosen = [item for item in loaded if item.result.task in tasks]
        if chosen and (blocks := build(chosen, options)):
            noted = [replace(block, tables=tuple(map(shared.with_seeds_note, block.tables))) for block in blocks]
            sections.append(Section(name, heading, tuple(noted), name not in NOT_PRINTED))
    summary = f"{files}: {labelled}, {sets} of weights. {origin}"
    return ReportDocument(title, summary, tuple(sections), headline=headline(sections, options))
