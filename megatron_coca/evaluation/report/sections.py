"""The table of report sections, and the section on speed."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_coca.evaluation.report import length_sections as by_length
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report import retrieval_sections as retrieval
from megatron_coca.evaluation.report.analysis_section import analysis_blocks
from megatron_coca.evaluation.report.document import ReportBlock, ReportDocument, Section, Table, TableCell, TableRow
from megatron_coca.evaluation.report.lm_eval_section import harness_blocks
from megatron_coca.evaluation.report.metrics import missing_cell
from megatron_coca.evaluation.report.published import COST, tables_of
from megatron_coca.evaluation.report.reading import RESULT_TYPES, LoadedResult
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.results import EvaluationError, Missing
from megatron_coca.evaluation.tasks.speed import WHATS, SpeedResult

# Speed and memory


def speed_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """CoCA Figure 6 and Table 6. Each file is on its own: times of two runs cannot be compared."""
    blocks = []
    for index, item in enumerate(loaded, 1):
        result: Any = item.result
        measured = [what for what in WHATS if any(cell.what == what for cell in result.results)]
        names = {what: f"speed-{index}-{re.sub('[ +]', '-', what)}" for what in measured}
        tables = [speed_table(result, names[what], what) for what in measured]
        shape, machine = result.protocol.shape, result.machine
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        text = (
            f"Protocol: {result.protocol.text}. Shape: {shape.layers} layers, hidden size {shape.hidden_size}, "
            f"{shape.heads} heads ({shape.kv_heads} of keys), {shape.parameters / 1e6:,.1f}M parameters; "
            f"batch {result.protocol.batch}, {result.protocol.rounds} rounds."
        )
        origin = f"{shared.environment_text(result)}, {machine.processor}, {machine.threads} threads, {versions}"
        heading = f"{result.label} on {result.environment.device}" if len(loaded) > 1 else ""
        blocks.append(ReportBlock((text,), (), tuple(tables), heading, (origin,)))
    if options.papers:
        theirs = tuple(shared.published_table(table, "speed") for table in tables_of("complexity"))
        blocks.append(ReportBlock((COST,), (), theirs, "Published"))
    return blocks


def speed_table(result: SpeedResult, name: str, what: str) -> Table:
    """Milliseconds of one kind of work by method and length; ratios and memory in small print."""
    cells = {(cell.method, cell.length): cell for cell in result.results if cell.what == what}
    missing = {entry.at: entry for entry in result.missing}
    lengths, rows = sorted({cell.length for cell in result.results}), []
    # In the order of the file; methods without any cell last.
    without = [entry.at.rpartition(", ")[2] for entry in result.missing]
    for method in dict.fromkeys([*(cell.method for cell in result.results), *without]):
        row = []
        for length in lengths:
            known = [missing[at] for at in (f"{what}, length {length}, {method}", method, "all") if at in missing]
            why = known[0] if known else Missing(at=method, kind="not run", reason="")
            cell = cells.get((method, length))
            row.append(TableCell(cell.milliseconds, 1000 * cell.seconds, cell.details) if cell else missing_cell(why))
        sizes = [cell.cache_bytes_per_token for (name, _), cell in cells.items() if name == method]
        cache = next((size for size in sizes if size is not None), None)
        rows.append(TableRow(method, tuple(row), detail="" if cache is None else f"cache: {cache:,} bytes a token"))
    against = next((cell.to_rope.against for cell in cells.values() if cell.to_rope is not None), None)
    small_print = f"Small print: time against {against}; peak memory; tokens a second."
    caption = f"{what[0].upper()}{what[1:]}: milliseconds by length"
    header, notes = ("method", *map(str, lengths)), () if against is None else (small_print,)
    return Table(name, caption, header, tuple(rows), notes)


# All sections

NOT_PRINTED = ("summary", "training")
"""Sections that do not appear on the console."""
SECTIONS: dict[str, tuple[str, tuple[str, ...], shared.Builder]] = {
    "summary": ("Summary", ("perplexity", "passkey"), by_length.summary_blocks),
    "recall": ("Key-value recall", ("recall",), retrieval.recall_blocks),
    "training": ("Learning curves", tuple(RESULT_TYPES), by_length.curve_blocks),
    "perplexity": ("Perplexity beyond the training length", ("perplexity",), by_length.perplexity_blocks),
    "passkey": ("Passkey retrieval", ("passkey",), retrieval.passkey_blocks),
    "needle": ("A needle in a haystack", ("needle",), retrieval.needle_blocks),
    "ruler": ("RULER-style tasks", ("ruler",), retrieval.ruler_blocks),
    "short": ("Short-context tasks", ("lm-eval",), harness_blocks),
    "speed": ("Speed and memory", ("speed",), speed_blocks),
    "analysis": ("Analysis of attention", ("analyse",), analysis_blocks),
}
"""Title, tasks whose results are read, and builder of each section, in order. A new task adds a row here and one to
`RESULT_TYPES`."""


def report_document(loaded: Sequence[LoadedResult], title: str, options: ReportOptions) -> ReportDocument:
    """The content of a report: all sections that have any.

    Raises EvaluationError where there is nothing to report, for labels that name two models, and for a baseline that no
    result has.
    """
    if not any(item.result.results or item.result.missing for item in loaded):
        raise EvaluationError("no results to report: the files have neither a number nor a reason why there is none")
    labels = dict.fromkeys(item.result.label for item in loaded)
    if options.baseline is not None and options.baseline not in labels:
        raise EvaluationError(f"baseline `{options.baseline}`: no result has this label; there are {', '.join(labels)}")
    weights = {item.result.checkpoint.identity for item in loaded if item.result.task != "speed"}
    counts = {"result file": len(loaded), "label": len(labels), "set": len(weights)}
    files, labelled, sets = (f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
    origin = "Every number is of this project's megatron-coca evaluate, unless a paper is named."
    sections = []
    for name, (heading, tasks, build) in SECTIONS.items():
        chosen = [item for item in loaded if item.result.task in tasks]
        if chosen and (blocks := build(chosen, options)):
            noted = [replace(block, tables=tuple(map(shared.with_seeds_note, block.tables))) for block in blocks]
            sections.append(Section(name, heading, tuple(noted), name not in NOT_PRINTED))
    return ReportDocument(title, f"{files}: {labelled}, {sets} of weights. {origin}", tuple(sections))
