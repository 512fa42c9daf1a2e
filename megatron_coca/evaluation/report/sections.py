"""The table of report sections, and the sections on speed, costs, analysis and models."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.report import length_sections as by_length
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report import retrieval_sections as retrieval
from megatron_coca.evaluation.report import short_sections as short
from megatron_coca.evaluation.report.analysis_section import analysis_blocks
from megatron_coca.evaluation.report.charts import Figure, Line, Panel, panels, size_with_legend
from megatron_coca.evaluation.report.document import (
    EMPTY,
    ReportBlock,
    ReportDocument,
    Section,
    Table,
    TableCell,
    TableRow,
)
from megatron_coca.evaluation.report.metrics import missing_cell
from megatron_coca.evaluation.report.published import COST, tables_of
from megatron_coca.evaluation.report.reading import RESULT_TYPES, LoadedResult
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.results import Cost, EvaluationError, Missing, Result
from megatron_coca.evaluation.speed import CONTRACTION, WHATS, WHOLE_SEQUENCES, SpeedResult, bytes_text

# Speed and memory


def speed_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """CoCA Figure 6 and Table 6. Each file is on its own: times of two runs cannot be compared."""
    blocks = []
    for index, item in enumerate(loaded, 1):
        result: Any = item.result
        measured = [what for what in WHATS if any(cell.what == what for cell in result.results)]
        names = {what: f"speed-{index}-{re.sub('[ +]', '-', what)}" for what in measured}
        figures = [figure for what in measured if (figure := speed_figure(result, f"{names[what]}-ratio", what))]
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
        blocks.append(ReportBlock((text,), tuple(figures), tuple(tables), heading, (origin,)))
    if options.papers:
        theirs = tuple(shared.published_table(table, None, "speed") for table in tables_of("complexity"))
        blocks.append(ReportBlock((COST,), (), theirs, "Published"))
    return blocks


def speed_table(result: SpeedResult, name: str, what: str) -> Table:
    """Milliseconds of one kind of work by method and length; ratios and memory in small print."""
    cells = {(cell.method, cell.length): cell for cell in result.results if cell.what == what}
    missing = [re.match(rf"{re.escape(what)}, length (\d+)", entry.at) for entry in result.missing]
    lengths = sorted({length for _, length in cells} | {int(match[1]) for match in missing if match})
    # In the order of the file; methods without any cell last.
    without = [entry.at.rpartition(", ")[2] for entry in result.missing]
    rows = []
    for method in dict.fromkeys([*(cell.method for cell in result.results), *without]):
        sizes = [cell.cache_bytes_per_token for (name, _), cell in cells.items() if name == method]
        known = [size for size in sizes if size is not None]
        row = tuple(
            TableCell(cell.milliseconds, 1000 * cell.seconds, cell.details)
            if (cell := cells.get((method, length)))
            else missing_cell(why_not_timed(result, what, method, length))
            for length in lengths
        )
        rows.append(TableRow(method, row, detail=f"cache: {known[0]:,} bytes a token" if known else ""))
    against = next((cell.to_rope.against for cell in cells.values() if cell.to_rope is not None), None)
    small_print = f"Small print: time against {against}, and against the contraction; peak memory; tokens a second."
    caption = f"{what[0].upper()}{what[1:]}: milliseconds by length"
    notes = () if against is None else (small_print,)
    return Table(name, caption, ("method", *map(str, lengths)), tuple(rows), notes)


def why_not_timed(result: SpeedResult, what: str, method: str, length: int) -> Missing:
    known = {missing.at: missing for missing in result.missing}
    places = (f"{what}, length {length}, {method}", method, "all")
    unknown = Missing(at=method, kind="not run", reason="")
    if (what, method) == ("decode", CONTRACTION):
        unknown = Missing(at=method, kind="refused", reason=WHOLE_SEQUENCES)
    return next((known[at] for at in places if at in known), unknown)


def speed_figure(result: SpeedResult, name: str, what: str) -> Figure | None:
    """CoCA Figure 6 as a ratio to RoPE; None where no method has one."""
    ratios: dict[str, dict[int, Any]] = {}
    for cell in result.results:
        if cell.what == what and cell.to_rope is not None and cell.to_rope.against != cell.method:
            ratios.setdefault(cell.method, {})[cell.length] = cell.to_rope
    if not ratios:
        return None
    lines = []
    for method, cells in ratios.items():
        median, low, high = zip(*((ratio.median, ratio.low, ratio.high) for ratio in cells.values()), strict=True)
        lines.append(Line(method, tuple(cells), median, low, high))
    against = next(ratio.against for cells in ratios.values() for ratio in cells.values())
    panel = Panel(
        tuple(lines), "length (tokens)", f"time as a multiple of that of {against}", what, log_y=True, level=1.0
    )
    caption = (
        f"Time of {what} as a ratio to {against} in the same rounds, median and quartiles; below 1 is faster. "
        f"{result.label}, random weights."
    )
    alt = f"Time of {what} against {against} by length for {', '.join(ratios)}; the table has the numbers"
    return Figure(name, caption, alt, panels([panel]), size_with_legend(list(ratios)))


SMALLEST_GROWTH = 1024**2
"""Bytes below which the growth of a process on the CPU says nothing: it keeps the memory that it frees."""
COST_CAPTION = (
    "Tokens per second, and the peak memory: on CUDA the most that PyTorch held, weights included; on the CPU the "
    "growth of the process's memory, so that only the first label measured in a process shows the whole"
)


def cost_cell(costs: Sequence[Cost], on_cpu: bool) -> TableCell:
    if not costs:
        return EMPTY
    rate = fmean(cost.tokens_per_second for cost in costs)
    peaks = [cost.peak_memory_bytes for cost in costs if cost.peak_memory_bytes is not None]
    known = [peak for peak in peaks if not on_cpu or peak >= SMALLEST_GROWTH]
    memory = bytes_text(fmean(known)) if known else ""
    return TableCell(f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}", rate, memory, seeds=len(costs))


def cost_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """Rates and memory of every task with files of costs, by label, device and cell; means over seeds."""
    blocks = []
    for task in dict.fromkeys(item.result.task for item in loaded if item.costs):
        by_row: dict[tuple[str, str, str], list[Cost]] = {}
        for item in (item for item in loaded if item.costs and item.result.task == task):
            shown = shared.environment_text(item.result)
            by_row.setdefault((item.result.label, shown, item.result.environment.device), []).extend(item.costs)
        columns = sorted({cost.at for costs in by_row.values() for cost in costs}, key=lambda at: (len(at), at))
        rows = []
        for (label, shown, device), costs in by_row.items():
            cells = [cost_cell([cost for cost in costs if cost.at == at], device == "cpu") for at in columns]
            rows.append(TableRow(label, tuple(cells), detail=shown))
        table = Table(f"cost-{task}", COST_CAPTION, ("label", *columns), tuple(rows))
        blocks.append(ReportBlock(tables=(table,), heading=f"evaluate.py {task}"))
    return blocks


# Models

MODELS_HEADER = ("label", "position method", "used with", "trained at", "step", "seeds", "tasks")


def model_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """A row for each label: what it is, and what was measured of it."""
    by_row: dict[tuple[str, ...], list[Result]] = {}
    for result in (item.result for item in loaded):
        checkpoint = result.checkpoint
        key = (result.label, checkpoint.pos_emb, overrides_text(result), str(checkpoint.seq_length))
        by_row.setdefault((*key, "" if checkpoint.step is None else str(checkpoint.step)), []).append(result)
    rows = []
    for (label, *texts), results in by_row.items():
        seeds = sorted({result.checkpoint.seed for result in results if result.checkpoint.seed is not None})
        texts += [", ".join(map(str, seeds)), ", ".join(dict.fromkeys(result.task for result in results))]
        rows.append(TableRow(label, tuple(TableCell(text, wide=True) for text in texts)))
    table = Table("models", "Models, and what was measured of them", MODELS_HEADER, tuple(rows))
    return [ReportBlock(tables=(table,))]


def overrides_text(result: Result) -> str:
    overrides = []
    for key, value in result.overrides.items():
        options = value.items() if isinstance(value, Mapping) else ()
        shown = ", ".join(f"{name} {option}" for name, option in options if option is not None)
        overrides.append(f"{key}: {shown if isinstance(value, Mapping) else value}")
    return "; ".join(overrides) or "as trained"


# All sections

NOT_PRINTED = ("summary", "training", "models", "costs")
"""Sections that do not appear on the console."""
SECTIONS: dict[str, tuple[str, tuple[str, ...], shared.Builder]] = {
    "summary": ("Summary", ("perplexity", "passkey"), by_length.summary_blocks),
    "recall": ("Key-value recall", ("recall",), retrieval.recall_blocks),
    "training": ("Learning curves", tuple(RESULT_TYPES), by_length.curve_blocks),
    "perplexity": ("Perplexity beyond the training length", ("perplexity",), by_length.perplexity_blocks),
    "rerope": ("Loss with windowed relative positions", ("perplexity",), by_length.map_blocks),
    "passkey": ("Passkey retrieval", ("passkey",), retrieval.passkey_blocks),
    "needle": ("A needle in a haystack", ("needle",), retrieval.needle_blocks),
    "ruler": ("RULER-style tasks", ("ruler",), retrieval.ruler_blocks),
    "short": ("Short-context tasks", ("lm-eval",), short.harness_blocks),
    "speed": ("Speed and memory", ("speed",), speed_blocks),
    "analysis": ("Analysis of attention", ("analyse",), analysis_blocks),
    "models": ("What was measured", tuple(task for task in RESULT_TYPES if task != "speed"), model_blocks),
    "costs": ("What measuring cost", tuple(RESULT_TYPES), cost_blocks),
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
    origin = "Every number is of this project's evaluate.py, unless a paper is named."
    sections = []
    for name, (heading, tasks, build) in SECTIONS.items():
        chosen = [item for item in loaded if item.result.task in tasks]
        if chosen and (blocks := build(chosen, options)):
            noted = [replace(block, tables=tuple(map(shared.with_seeds_note, block.tables))) for block in blocks]
            sections.append(Section(name, heading, tuple(noted), name not in NOT_PRINTED))
    return ReportDocument(title, f"{files}: {labelled}, {sets} of weights. {origin}", tuple(sections))
