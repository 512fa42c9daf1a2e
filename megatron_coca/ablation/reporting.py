"""What is written from the results of an ablation: its report, and pages by a Jinja2 template."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateSyntaxError

from megatron_coca.ablation.cells import State, measured_files, read_cell, read_curve, recorded_data, state_of
from megatron_coca.ablation.contrasts import Figures, published_order
from megatron_coca.ablation.plan import AblationFile, Cell, expand, read_ablation
from megatron_coca.evaluation.options import slug
from megatron_coca.evaluation.report import build_report
from megatron_coca.evaluation.report.charts import svg
from megatron_coca.evaluation.report.curves import Curve
from megatron_coca.evaluation.report.document import TableCell
from megatron_coca.evaluation.report.reading import REPORT_FILE
from megatron_coca.evaluation.results import EvaluationError, write_atomically
from megatron_coca.tables import escaped, format_table, in_cell

FOLDER = "report"


def curves(cells: Sequence[Cell]) -> dict[str, list[Curve]]:
    """Return the learning curves that exist, by model, one for each seed."""
    found: dict[str, list[Curve]] = {}
    for cell in cells:
        if (curve := read_curve(cell)) is not None:
            found.setdefault(cell.model, []).append(curve)
    return found


def write_report(file: AblationFile, cells: Sequence[Cell], results: Path | None = None) -> str:
    """Write the report of the finished tasks into the folder `results`, and return its tables as Markdown.

    Files of other options or variants than those of `file`, and of tasks that are not complete, are left out.
    """
    measured = [path for cell in cells for path in measured_files(cell, read_cell(cell))]
    if not measured:
        return "no result yet: nothing to report"
    folder = (results or file.results) / FOLDER
    missing = [cell.name for cell in cells if state_of(cell) is not State.DONE]
    title = f"{file.title} ({len(cells) - len(missing)} of {len(cells)} cells)" if missing else file.title
    # The others are compared with the plain variant of the baseline, whose files are called TASK_MODEL.json.
    plain = {path.stem.partition("_")[2] for path in measured}
    baseline = file.baseline if file.baseline is not None and slug(file.baseline) in plain else None
    lines = [build_report(measured, folder, title, curves=curves(cells), baseline=baseline)]
    if missing:
        lines.append(f"not complete: {', '.join(missing)}")
    if baseline != file.baseline:
        lines.append(f"nothing is compared with the baseline {file.baseline}, which has no results yet")
    return "\n\n".join([*lines, f"{folder / 'report.html'} is written"])


def figures_of_scale(path: Path, scale: str) -> Figures:
    """Return the figures of the finished cells of another scale of the file `path`. Raises EvaluationError."""
    file = read_ablation(path, scale)
    recorded = recorded_data(file.results)
    cells = expand(file, recorded=recorded) if recorded else []
    return Figures(file, [cell for cell in cells if state_of(cell) is State.DONE])


def write_page(
    file: AblationFile, cells: Sequence[Cell], template: Path, page: Path, scale: Callable[[str], Figures]
) -> None:
    """Write `page`, and the plots that it shows into `figures/NAME/` beside it, where NAME is the page's stem.

    `scale` returns the figures of another scale of the same file, by its name. Raises EvaluationError where the
    template has a fault or asks for what the results do not have.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = [cell for cell in cells if state_of(cell) is State.DONE]
        if done:
            write_report(file, done, Path(folder))
        known = {"file": file, "figures": Figures(file, done), "scale": scale, "cells": cells, "done": done}
        text, plots = render(template, Path(folder) / FOLDER, known, page.stem)
        for name, content in plots.items():
            write_atomically(page.parent / "figures" / page.stem / f"{name}.svg", content)
    write_atomically(page, text.encode())


def render(template: Path, report: Path, known: Mapping[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Return the text of a page, and the plots that it shows by their names.

    `report` is the folder of a report of the cells `done`, `known` what else the template can use.
    """
    cells, done = known["cells"], known["done"]
    content = json.loads((report / REPORT_FILE).read_bytes()) if done else {"tables": []}
    tables = {table["name"]: table for table in content["tables"]}
    plots: dict[str, bytes] = {}

    def plot(plot_name: str, alt: str) -> str:
        try:
            plots[plot_name] = (report / "figures" / f"{plot_name}.svg").read_bytes()
        except FileNotFoundError as error:
            known = ", ".join(sorted(path.stem for path in (report / "figures").glob("*.svg")))
            raise EvaluationError(f"{template}: plot {plot_name}: the report has {known}") from error
        return f"![{alt}](figures/{name}/{plot_name}.svg)"

    def chart(plot_name: str, labels: Sequence[str], alt: str) -> str:
        plots[plot_name] = svg(known["figures"].chart(labels), "print")
        return f"![{alt}](figures/{name}/{plot_name}.svg)"

    loader = FileSystemLoader(template.parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {
        "table": lambda table, rows=None: _markdown(_named(tables, table, template), rows),
        "value": lambda table, row, column: _value(_named(tables, table, template), row, column, template),
        "plot": plot,
        "chart": chart,
        "costs": lambda: _costs(done),
        "published_order": published_order,
        **known,
        "missing": [cell.name for cell in cells if cell not in done],
    }
    try:
        return environment.get_template(template.name).render() + "\n", plots
    except EvaluationError:
        raise
    except Exception as error:  # a template is code: it can raise anything
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(template)]
        line = error.lineno if isinstance(error, TemplateSyntaxError) else lines[-1] if lines else 1
        raise EvaluationError(f"{template}:{line}: {type(error).__name__}: {error}") from error


def _named(tables: Mapping[str, Any], name: str, template: Path) -> Mapping[str, Any]:
    if name not in tables:
        raise EvaluationError(f"{template}: table {name}: the report has {', '.join(tables) or 'none'}")
    return tables[name]


def _markdown(table: Mapping[str, Any], rows: Sequence[str] | None) -> str:
    """A table of report.json with its notes; `rows` chooses rows by name, in this order."""
    by_name = {row["name"]: row for row in table["rows"] if not row["published"]}
    chosen = list(by_name.values()) if rows is None else [by_name[name] for name in rows]
    notes = {note: number for number, note in enumerate(dict.fromkeys(_notes(chosen)), 1)}
    lines = []
    for row in chosen:
        cells = [(TableCell(cell["text"], detail=cell["detail"]).in_full, cell["note"]) for cell in row["cells"]]
        lines.append([row["name"], *(f"{text} [{notes[note]}]" if note else text for text, note in cells)])
    text = format_table(["model", *table["columns"]], [[in_cell(part) for part in line] for line in lines])
    below = [*map(escaped, table["notes"]), *(f"[{number}] {escaped(note)}" for note, number in notes.items())]
    return "\n\n".join([text, *below])


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [cell["note"] for row in rows for cell in row["cells"] if cell["note"]]


def _value(table: Mapping[str, Any], row: str, column: str, template: Path) -> float:
    try:
        cells = next(each["cells"] for each in table["rows"] if each["name"] == row and not each["published"])
        return float(cells[table["columns"].index(column)]["value"])
    except (StopIteration, ValueError, TypeError) as error:
        raise EvaluationError(f"{template}: table {table['name']} has no number at {row}, {column}") from error


def _costs(done: Sequence[Cell]) -> str:
    """A row for each finished cell: tokens, hours, and the seconds beyond training and evaluation."""
    rows = []
    for cell in done:
        record = read_cell(cell)
        hours = (record.training_seconds / 3600, record.evaluation_seconds / 3600)
        rows.append((cell.model, cell.seed, record.tokens, *(f"{each:.2f}" for each in hours), record.overhead_seconds))
    header = ("model", "seed", "tokens", "training h", "evaluation h", "overhead s")
    return format_table(header, [(*row[:-1], f"{row[-1]:.0f}") for row in rows])
