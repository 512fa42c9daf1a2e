"""Speed and memory by length: Figure 6 and Table 6 of the CoCA paper."""

import re
from collections.abc import Sequence

from megatron_coca.evaluation.report.charts import Curve, Panel, height, panels
from megatron_coca.evaluation.report.document import Block, Entry, Figure, Line, Table
from megatron_coca.evaluation.report.parts.costs import size
from megatron_coca.evaluation.report.provenance import environment_name
from megatron_coca.evaluation.report.published import TABLES
from megatron_coca.evaluation.report.published.coca import COST
from megatron_coca.evaluation.report.reading import Loaded
from megatron_coca.evaluation.report.tables import lacking, published_table
from megatron_coca.evaluation.results import Missing
from megatron_coca.evaluation.speed.contraction import CONTRACTION
from megatron_coca.evaluation.speed.probing import WHOLE_SEQUENCES
from megatron_coca.evaluation.speed.records import WHATS, Ratio, SpeedCell, SpeedResult

IMPOSSIBLE = {("decode", CONTRACTION): WHOLE_SEQUENCES}
"""Work of a method that `evaluate.py speed` has no cells for, and why."""


def build(loaded: Sequence[Loaded], papers: bool) -> list[Block]:
    """Each file on its own, as times of two runs cannot be compared; then what the paper says."""
    blocks = [_block(each.result, place, len(loaded)) for place, each in enumerate(loaded, 1)]  # type: ignore[arg-type]
    if not papers:
        return blocks
    theirs = tuple(published_table(each, None, "speed") for each in TABLES if each.metric == "complexity")
    return [*blocks, Block("Published", (COST,), (), theirs)]


def _block(result: SpeedResult, place: int, of: int) -> Block:
    name, found = f"speed-{place}", [what for what in WHATS if any(cell.what == what for cell in result.results)]
    figures = [_figure(result, name, what) for what in found if _ratios(result, what)]
    tables = [_table(result, f"{name}-{what.replace(' ', '-').replace('+', '-')}", what) for what in found]
    heading = f"{result.label} on {result.environment.device}" if of > 1 else ""
    return Block(heading, (f"Protocol: {result.protocol.text}. {_where(result)}",), tuple(figures), tuple(tables))


def _where(result: SpeedResult) -> str:
    shape, machine = result.protocol.shape, result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"Shape: {shape.layers} layers, hidden size {shape.hidden_size}, {shape.heads} heads ({shape.kv_heads} of keys), "
        f"{shape.parameters / 1e6:,.1f}M parameters; batch {result.protocol.batch}, {result.protocol.rounds} rounds. "
        f"Measured with {environment_name(result)}, {machine.processor}, {machine.threads} threads, {versions}."
    )


def _methods(result: SpeedResult) -> list[str]:
    """In the order of the file, those that are missing altogether last."""
    missed = [missing.at.rpartition(", ")[2] for missing in result.missing]
    return list(dict.fromkeys([*(cell.method for cell in result.results), *missed]))


def _table(result: SpeedResult, name: str, what: str) -> Table:
    cells = {(cell.method, cell.length): cell for cell in result.results if cell.what == what}
    missed = {
        int(at[1]) for missing in result.missing if (at := re.match(rf"{re.escape(what)}, length (\d+)", missing.at))
    }
    lengths = sorted({length for _, length in cells} | missed)
    lines = tuple(
        Line(method, tuple(_entry(result, what, cells, method, at) for at in lengths), detail=_cache(cells, method))
        for method in _methods(result)
    )
    against = next((cell.to_rope.against for cell in cells.values() if cell.to_rope is not None), None)
    notes = (
        [] if against is None else [f"Small print: time against {against}, and against the contraction; peak memory."]
    )
    caption = f"{what[0].upper()}{what[1:]}: milliseconds by length"
    return Table(name, caption, ("method", *map(str, lengths)), lines, tuple(notes))


def _entry(result: SpeedResult, what: str, cells: dict[tuple[str, int], SpeedCell], method: str, length: int) -> Entry:
    cell = cells.get((method, length))
    if cell is None:
        return lacking(_why(result, what, method, length))
    small = [f"×{ratio.median:.2f}" for ratio in (cell.to_rope, cell.to_contraction) if ratio is not None]
    small += [size(cell.peak_memory_bytes)] if cell.peak_memory_bytes is not None else []
    milliseconds = cell.seconds * 1e3
    return Entry(
        f"{milliseconds:,.1f}" if milliseconds >= 10 else f"{milliseconds:.3g}", milliseconds, " · ".join(small)
    )


def _cache(cells: dict[tuple[str, int], SpeedCell], method: str) -> str:
    """The bytes that a method's cache holds of each token, the same at every length."""
    found = [cell.cache_bytes_per_token for (name, _), cell in cells.items() if name == method]
    sizes = [count for count in found if count is not None]
    return f"cache: {sizes[0]:,} bytes a token" if sizes else ""


def _why(result: SpeedResult, what: str, method: str, length: int) -> Missing:
    known = {missing.at: missing for missing in result.missing}
    places = (f"{what}, length {length}, {method}", method, "all")
    impossible = IMPOSSIBLE.get((what, method))
    unknown = Missing(at=method, kind="refused" if impossible else "not run", reason=impossible or "")
    return next((known[place] for place in places if place in known), unknown)


def _ratios(result: SpeedResult, what: str) -> dict[str, dict[int, Ratio]]:
    found: dict[str, dict[int, Ratio]] = {}
    for cell in result.results:
        if cell.what == what and cell.to_rope is not None and cell.to_rope.against != cell.method:
            found.setdefault(cell.method, {})[cell.length] = cell.to_rope
    return found


def _figure(result: SpeedResult, name: str, what: str) -> Figure:
    """Figure 6 of the paper as a ratio: 1 is as fast as RoPE."""
    ratios = _ratios(result, what)
    curves = tuple(
        Curve(
            method,
            tuple(by_length),
            tuple(ratio.median for ratio in by_length.values()),
            tuple(ratio.low for ratio in by_length.values()),
            tuple(ratio.high for ratio in by_length.values()),
        )
        for method, by_length in ratios.items()
    )
    against = next(iter(next(iter(ratios.values())).values())).against
    panel = Panel(curves, "length (tokens)", f"time against {against}", what, log_y=True, level=1.0)
    caption = (
        f"Time of {what} as a ratio to {against} in the same rounds, median and quartiles; below 1 is faster. "
        f"{result.label}: {environment_name(result)}, random weights."
    )
    file = f"{name}-{what.replace(' ', '-').replace('+', '-')}-ratio"
    alt = f"Time of {what} against {against} by length for {', '.join(ratios)}; the table has the numbers"
    return Figure(file, caption, alt, panels([panel]), (6.0, height(len(curves))))
