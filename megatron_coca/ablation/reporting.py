"""The report of an ablation, from the files of its cells."""

from collections.abc import Sequence
from pathlib import Path

from megatron_coca.ablation.cells import read_curve
from megatron_coca.ablation.plan import AblationFile, Cell
from megatron_coca.evaluation.report import build_report
from megatron_coca.evaluation.report.curves import Curve

FOLDER = "report"


def curves(cells: Sequence[Cell]) -> dict[str, list[Curve]]:
    """Return the learning curves that exist, by model, one for each seed."""
    found: dict[str, list[Curve]] = {}
    for cell in cells:
        if (curve := read_curve(cell)) is not None:
            found.setdefault(cell.model, []).append(curve)
    return found


def write_report(file: AblationFile, cells: Sequence[Cell]) -> str:
    """Write the report of all result files that exist, and return its tables as Markdown."""
    of_model: dict[str, list[Path]] = {}
    for cell in cells:
        of_model.setdefault(cell.model, []).extend(
            path for command in cell.commands for path in command.files if path.is_file()
        )
    measured = [path for files in of_model.values() for path in files]
    if not measured:
        return "no result yet: nothing to report"
    folder = file.results / FOLDER
    baseline = file.baseline if file.baseline is not None and of_model.get(file.baseline) else None
    tables = build_report(measured, folder, file.title, curves=curves(cells), baseline=baseline)
    return f"{tables}\n\n{folder / 'report.html'} is written"
