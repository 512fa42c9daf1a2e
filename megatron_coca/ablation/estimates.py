"""Hours of the cells that are not done, from finished ones or from the peak FLOP/s of a device."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_coca.ablation.cells import CellRecord, State, read_cell, state_of
from megatron_coca.ablation.plan import Cell
from megatron_coca.model.cost import flops_per_token
from megatron_coca.tables import format_table
from megatron_coca.training.estimate import estimate

MFU = 0.4
"""Share of the peak that is assumed, as by `megatron-coca estimate`."""


class Hours(NamedTuple):
    """Hours of training and of evaluation with overhead; None where nothing tells."""

    training: float | None
    evaluation: float | None


def hours(cell: Cell, measured: Mapping[Cell, CellRecord], peak_flops: float | None) -> Hours:
    """Estimate a cell from the finished ones: those of its model if there are any, else all, scaled by FLOPs."""
    same = {other: record for other, record in measured.items() if other.model == cell.model} or measured
    if same:
        work = sum(other.tokens * flops_per_token(other.config).executed for other in same)
        seconds = sum(record.training_seconds for record in same.values())
        training = cell.tokens * flops_per_token(cell.config).executed * seconds / work
        other = sum(record.evaluation_seconds + record.overhead_seconds for record in same.values()) / len(same)
        return Hours(training / 3600, other / 3600)
    if peak_flops is None:
        return Hours(None, None)
    modelled = estimate(cell.config, cell.ranks, peak_flops, MFU).seconds
    return Hours(None if modelled is None else modelled / 3600, None)


def dry_run(cells: Sequence[Cell], peak_flops: float | None, finished: Sequence[Cell] = ()) -> str:
    """Return a table of the cells with their state, parameters, tokens and estimated hours.

    Hours follow from the finished ones among `cells` and `finished`.
    """
    states = {cell: state_of(cell) for cell in dict.fromkeys((*cells, *finished))}
    measured = {cell: read_cell(cell) for cell, state in states.items() if state is State.DONE}
    measured = {cell: record for cell, record in measured.items() if record.training_seconds > 0}
    rows, left = [], 0.0
    unknown = False
    for cell in cells:
        count, state = cell.parameters, states[cell]
        expected = Hours(0.0, 0.0) if state is State.DONE else hours(cell, measured, peak_flops)
        unknown = unknown or None in expected
        left += sum(part or 0.0 for part in expected)
        shown = ["unknown" if part is None else f"{part:.2f}" for part in expected]
        rows.append((cell.name, state.value, count.total, count.non_embedding, cell.tokens, *shown))
    header = ("cell", "state", "parameters", "non-embedding", "tokens", "training h", "evaluation h")
    source = f"from {len(measured)} finished cells" if measured else "no cell is finished; run one"
    if not measured and peak_flops is not None:
        source = f"from {peak_flops:.3g} FLOP/s, of which {MFU:.0%} is assumed to be reached"
    amount = f"{'at least ' if unknown else ''}{left:.2f} hours" if left or not unknown else "unknown hours"
    total = f"{amount} are left, one cell at a time ({source})"
    return f"{format_table(header, rows)}\n\n{len(cells)} cells; {total}"
