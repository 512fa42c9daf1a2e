"""What the measurements cost."""

from collections.abc import Callable, Sequence

from megatron_coca.evaluation.report.document import NOTHING, Block, Entry, Line, Table
from megatron_coca.evaluation.report.reading import Loaded
from megatron_coca.evaluation.store import Cost

MEMORY = "Peak memory: on CUDA the most that PyTorch held, weights included"
GROWTH = (
    "Peak memory: on the CPU it is the growth of the process's memory, so that only the first label measured in a process "
    "shows the whole"
)
KEPT = "the process held what this needed already"
NOTICED = 1024**2
"""Bytes by which a process on the CPU has to grow, to say anything: it keeps the memory that it frees."""
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
    rate = _table(f"cost-{task}-rate", "Tokens per second", loaded, _rate)
    devices = sorted({_on_cpu(each) for each in loaded})
    caption = "; ".join(GROWTH if on_cpu else MEMORY for on_cpu in devices)
    return rate, _table(f"cost-{task}-memory", caption, loaded, _memory)


def _on_cpu(loaded: Loaded) -> bool:
    return loaded.result.environment.device == "cpu"


def _table(name: str, caption: str, loaded: Sequence[Loaded], entry: Callable[[Cost, bool], Entry]) -> Table:
    columns = dict.fromkeys(cost.at for each in loaded for cost in each.costs)
    ordered = sorted(columns, key=lambda at: (len(at), at))
    lines = []
    for each in loaded:
        costs = {cost.at: cost for cost in each.costs}
        cells = tuple(entry(costs[at], _on_cpu(each)) if at in costs else NOTHING for at in ordered)
        label = each.result.label
        lines.append(Line(label, cells, detail=_place(each)))
    return Table(name, caption, ("label", *ordered), tuple(lines))


def _place(loaded: Loaded) -> str:
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
