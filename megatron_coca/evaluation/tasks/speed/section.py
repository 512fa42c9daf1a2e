"""The report section on speed and memory."""

import re
from collections.abc import Sequence
from typing import Any

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import missing_cell
from megatron_coca.evaluation.report.published import COST, tables_of
from megatron_coca.evaluation.report.reading import LoadedResult
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.results import Missing
from megatron_coca.evaluation.tasks.speed.task import KINDS_OF_WORK, SpeedResult


def speed_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """Return our results in the form of Figure 6 and Table 6 of the CoCA paper. Times differ between runs, so each file
    has its own tables.
    """
    blocks = []
    for index, item in enumerate(loaded, 1):
        result: Any = item.result
        measured = [kind for kind in KINDS_OF_WORK if any(entry.what == kind for entry in result.results)]
        names = {kind: f"speed-{index}-{re.sub('[ +]', '-', kind)}" for kind in measured}
        tables = [speed_table(result, names[kind], kind) for kind in measured]
        shape, machine = result.protocol.shape, result.machine
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        text = (
            f"Protocol: {result.protocol.text}. Shape: {shape.layers} layers, hidden size {shape.hidden_size}, "
            f"{shape.heads} heads ({shape.kv_heads} for keys), {shape.parameters / 1e6:,.1f}M parameters; "
            f"batch {result.protocol.batch}, {result.protocol.rounds} rounds."
        )
        origin = f"{shared.environment_text(result)}, {machine.processor}, {machine.threads} threads, {versions}"
        heading = f"{result.label} on {result.environment.device}" if len(loaded) > 1 else ""
        blocks.append(ReportBlock((text,), (), tuple(tables), heading, (origin,)))
    if options.papers:
        theirs = tuple(shared.published_table(table, "speed") for table in tables_of("complexity"))
        blocks.append(ReportBlock((COST,), (), theirs, "Published"))
    return blocks


def speed_table(result: SpeedResult, name: str, kind: str) -> Table:
    """Return a table of one kind of work: milliseconds by method and length, and ratios and memory in small print."""
    entries = {(entry.method, entry.length): entry for entry in result.results if entry.what == kind}
    missing = {each.at: each for each in result.missing}
    lengths, rows = sorted({entry.length for entry in result.results}), []
    # Methods are in the order of the file. Methods without entries come last.
    without = [each.at.rpartition(", ")[2] for each in result.missing]
    for method in dict.fromkeys([*(entry.method for entry in result.results), *without]):
        row = []
        for length in lengths:
            known = [missing[at] for at in (f"{kind}, length {length}, {method}", method, "all") if at in missing]
            why = known[0] if known else Missing(at=method, kind="not run", reason="")
            entry = entries.get((method, length))
            shown = missing_cell(why)
            if entry is not None:
                shown = TableCell(entry.milliseconds, 1000 * entry.seconds, entry.details)
            row.append(shown)
        sizes = [entry.cache_bytes_per_token for (name, _), entry in entries.items() if name == method]
        cache = next((size for size in sizes if size is not None), None)
        rows.append(TableRow(method, tuple(row), detail="" if cache is None else f"cache: {cache:,} bytes per token"))
    against = next((entry.to_rope.against for entry in entries.values() if entry.to_rope is not None), None)
    small_print = f"Small print: time against {against}; peak memory; tokens per second."
    caption = f"{kind[0].upper()}{kind[1:]}: milliseconds by length"
    header, notes = ("method", *map(str, lengths)), () if against is None else (small_print,)
    return Table(name, caption, header, tuple(rows), notes)
