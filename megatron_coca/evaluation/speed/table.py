"""The result of `evaluate.py speed` for the console."""

from collections.abc import Callable

from megatron_coca.evaluation.markdown import format_table
from megatron_coca.evaluation.speed.records import WHATS, Ratio, SpeedCell, SpeedResult


def tables(result: SpeedResult) -> str:
    """Markdown: a table for each kind of work, rows for each method's time, speed, ratios and memory, by length."""
    return "\n".join(_table(result, what) for what in WHATS if any(cell.what == what for cell in result.results))


def _table(result: SpeedResult, what: str) -> str:
    cells = {(cell.method, cell.length): cell for cell in result.results if cell.what == what}
    lengths = sorted({length for _, length in cells})
    methods = dict.fromkeys(method for method, _ in sorted(cells, key=lambda key: key[1]))
    rows = []
    for method in methods:
        for name, text in COLUMNS.items():
            values = [text(cells[method, length]) if (method, length) in cells else "-" for length in lengths]
            if any(value != "-" for value in values):
                rows.append([f"{method}: {name}", *values])
    title = f"{result.label}, {what}, {result.environment.device}, {result.environment.dtype}"
    shown = f"{title}\n\n{format_table(['method', *map(str, lengths)], rows)}\n"
    alone = dict.fromkeys(method for (method, _), cell in sorted(cells.items()) if cell.to_rope is None)
    return f"{shown}\n{WITHOUT_ROPE}: {', '.join(alone)}\n" if alone else shown


def _ratio_text(given: Ratio | None) -> str:
    return "-" if given is None else f"{given.median:.2f} ({given.low:.2f}-{given.high:.2f})"


WITHOUT_ROPE = "No ratio to RoPE, as at some length RoPE by the same backend was not measured"
COLUMNS: dict[str, Callable[[SpeedCell], str]] = {
    "ms": lambda cell: f"{1000 * cell.seconds:.2f}",
    "to RoPE": lambda cell: _ratio_text(cell.to_rope),
    "to contraction": lambda cell: _ratio_text(cell.to_contraction),
    "tokens/s": lambda cell: f"{cell.tokens_per_second:.0f}",
    "MiB": lambda cell: "-" if cell.peak_memory_bytes is None else f"{cell.peak_memory_bytes / 2**20:.0f}",
    "cache bytes/token": lambda cell: "-" if cell.cache_bytes_per_token is None else str(cell.cache_bytes_per_token),
}
