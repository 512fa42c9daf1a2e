"""Speed and memory by length: Figure 6 and Table 6 of the CoCA paper."""

import re
from collections.abc import Callable, Sequence

from megatron_coca.evaluation.report.charts import Curve, Panel, height, panels
from megatron_coca.evaluation.report.document import NOTHING, Entry, Figure, Line, ReportBlock, Table
from megatron_coca.evaluation.report.published_tables import COST, TABLES
from megatron_coca.evaluation.report.reading import LoadedResult
from megatron_coca.evaluation.report.tables import environment_name, lacking, published_table
from megatron_coca.evaluation.results import Cost, Missing
from megatron_coca.evaluation.speed.cases import CONTRACTION
from megatron_coca.evaluation.speed.probing import WHOLE_SEQUENCES
from megatron_coca.evaluation.speed.records import WHATS, Ratio, SpeedCell, SpeedResult

MEMORY = "Peak memory: on CUDA the most that PyTorch held, weights included"
GROWTH = (
    "Peak memory: on the CPU it is the growth of the process's memory, so that only the first label measured in a process "
    "shows the whole"
)
KEPT = "the process held what this needed already"
NOTICED = 1024**2
"""Bytes by which a process on the CPU has to grow, to say anything: it keeps the memory that it frees."""
UNITS = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def build(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """Rates and memory of every task that has files of costs, by label and cell."""
    with_costs = [each for each in loaded if each.costs]
    tasks = dict.fromkeys(each.result.task for each in with_costs)
    return [
        ReportBlock(
            f"evaluate.py {task}", tables=_tables(task, [each for each in with_costs if each.result.task == task])
        )
        for task in tasks
    ]


def _tables(task: str, loaded: Sequence[LoadedResult]) -> tuple[Table, ...]:
    rate = _table(f"cost-{task}-rate", "Tokens per second", loaded, _rate)
    devices = sorted({_on_cpu(each) for each in loaded})
    caption = "; ".join(GROWTH if on_cpu else MEMORY for on_cpu in devices)
    return rate, _table(f"cost-{task}-memory", caption, loaded, _memory)


def _on_cpu(loaded: LoadedResult) -> bool:
    return loaded.result.environment.device == "cpu"


def _table(name: str, caption: str, loaded: Sequence[LoadedResult], entry: Callable[[Cost, bool], Entry]) -> Table:
    columns = dict.fromkeys(cost.at for each in loaded for cost in each.costs)
    ordered = sorted(columns, key=lambda at: (len(at), at))
    lines = []
    for each in loaded:
        costs = {cost.at: cost for cost in each.costs}
        cells = tuple(entry(costs[at], _on_cpu(each)) if at in costs else NOTHING for at in ordered)
        label = each.result.label
        lines.append(Line(label, cells, detail=_place(each)))
    return Table(name, caption, ("label", *ordered), tuple(lines))


def _place(loaded: LoadedResult) -> str:
    environment = loaded.result.environment
    return f"{environment.device}, {environment.dtype}, {environment.backend}"


def _rate(cost: Cost, on_cpu: bool) -> Entry:
    rate = cost.tokens_per_second
    return Entry(f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}", rate)


def _memory(cost: Cost, on_cpu: bool) -> Entry:
    if cost.peak_memory_bytes is None:
        return Entry("–", note="the device does not count it")
    if on_cpu and cost.peak_memory_bytes < NOTICED:
        return Entry("–", note=KEPT)
    return Entry(size(cost.peak_memory_bytes), float(cost.peak_memory_bytes))


def size(count: int) -> str:
    """Bytes as people read them."""
    unit, name = next((each for each in UNITS if count >= each[0]), (1, "B"))
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} B"


IMPOSSIBLE = {("decode", CONTRACTION): WHOLE_SEQUENCES}
"""Work of a method that `evaluate.py speed` has no cells for, and why."""


def build_speed(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """Each file on its own, as times of two runs cannot be compared; then what the paper says."""
    blocks = [_block(each.result, place, len(loaded)) for place, each in enumerate(loaded, 1)]  # type: ignore[arg-type]
    if not papers:
        return blocks
    theirs = tuple(published_table(each, None, "speed") for each in TABLES if each.metric == "complexity")
    return [*blocks, ReportBlock("Published", (COST,), (), theirs)]


def _block(result: SpeedResult, place: int, of: int) -> ReportBlock:
    name, found = f"speed-{place}", [what for what in WHATS if any(cell.what == what for cell in result.results)]
    figures = [_figure(result, name, what) for what in found if _ratios(result, what)]
    tables = [_speed_table(result, f"{name}-{what.replace(' ', '-').replace('+', '-')}", what) for what in found]
    heading = f"{result.label} on {result.environment.device}" if of > 1 else ""
    return ReportBlock(heading, (f"Protocol: {result.protocol.text}. {_where(result)}",), tuple(figures), tuple(tables))


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


def _speed_table(result: SpeedResult, name: str, what: str) -> Table:
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
