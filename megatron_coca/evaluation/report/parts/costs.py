"""What the measurements cost."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_coca.evaluation.report.document import NOTHING, Block, Entry, Line, Table
from megatron_coca.evaluation.report.reading import Loaded
from megatron_coca.evaluation.store import Cost

MEMORY = "On a CPU by how much the process's memory grew; on CUDA the most that PyTorch held, weights included."
UNITS = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def build(loaded: Sequence[Loaded], papers: bool) -> list[Block]:
    """Rates and memory of every task that has files of costs, by label and cell."""
    with_costs = [each for each in loaded if each.costs]
    tasks = dict.fromkeys(each.result.task for each in with_costs)
    return [
        Block(f"evaluate.py {task}", tables=_tables(task, [each for each in with_costs if each.result.task == task]))
        for task in tasks
    ]


def _tables(task: str, loaded: Sequence[Loaded]) -> tuple[Table, ...]:
    rate = _table(f"cost-{task}-rate", "Tokens per second", loaded, lambda cost: _rate(cost.tokens_per_second))
    memory = _table(f"cost-{task}-memory", "Peak memory", loaded, _memory)
    return rate, replace(memory, notes=(MEMORY,))


def _table(name: str, caption: str, loaded: Sequence[Loaded], entry: Callable[[Cost], Entry]) -> Table:
    columns = dict.fromkeys(cost.at for each in loaded for cost in each.costs)
    ordered = sorted(columns, key=lambda at: (len(at), at))
    lines = []
    for each in loaded:
        costs = {cost.at: cost for cost in each.costs}
        cells = tuple(entry(costs[at]) if at in costs else NOTHING for at in ordered)
        label = each.result.label
        lines.append(Line(label, cells, detail=_place(each)))
    return Table(name, caption, ("label", *ordered), tuple(lines))


def _place(loaded: Loaded) -> str:
    environment = loaded.result.environment
    return f"{environment.device}, {environment.dtype}, {environment.backend}"


def _rate(rate: float) -> Entry:
    return Entry(f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}", rate)


def _memory(cost: Cost) -> Entry:
    if cost.peak_memory_bytes is None:
        return Entry("–", note="the device does not count it")
    return Entry(size(cost.peak_memory_bytes), float(cost.peak_memory_bytes))


def size(count: int) -> str:
    """Bytes as people read them."""
    unit, name = next((each for each in UNITS if count >= each[0]), (1, "B"))
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} B"
