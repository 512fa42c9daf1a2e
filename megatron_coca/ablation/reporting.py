"""The report of an ablation, and pages rendered from its results with a Jinja2 template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateSyntaxError

from megatron_coca.ablation import declared
from megatron_coca.ablation.cells import State, measured_files, read_cell, read_curve, recorded_data, state_of, unpack
from megatron_coca.ablation.correction import entries_of, entries_of_stretch, pooled
from megatron_coca.ablation.figures import Figures
from megatron_coca.ablation.file import AblationFile, read_ablation
from megatron_coca.ablation.grid import Cell, expand
from megatron_coca.ablation.rates import found_rates, with_rates
from megatron_coca.evaluation.contrasts import corrected_once, holm, level_text, p_text
from megatron_coca.evaluation.labels import slug
from megatron_coca.evaluation.report.build import build_report
from megatron_coca.evaluation.report.curves import Curve
from megatron_coca.evaluation.report.document import ReportDocument, Table, markdown_table
from megatron_coca.evaluation.report.plots.figures import svg
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.sections import report_document
from megatron_coca.evaluation.results import EvaluationError, write_atomically
from megatron_coca.support.markdown_tables import escaped, format_table


def curves(cells: Sequence[Cell]) -> dict[str, list[Curve]]:
    """Return the existing learning curves by model, one for each seed."""
    found: dict[str, list[Curve]] = {}
    for cell in cells:
        if (curve := read_curve(cell)) is not None:
            found.setdefault(cell.model, []).append(curve)
    return found


def write_report(file: AblationFile, cells: Sequence[Cell], papers: bool | None = None) -> str:
    """Write the report of the finished tasks into the results folder, and return its tables as Markdown.

    The sentence at its top is about the first declared contrast. `papers` is passed to `build_report`. Results of an
    incomplete task are left out, and so are results with options or variants that differ from those in `file`.
    """
    measured, baseline = _measured(file, cells)
    if not measured:
        return f"no results yet: {file.results} has none of these {len(cells)} cells; look at --output and --scale"
    folder = file.results / "report"
    missing = [cell.name for cell in cells if state_of(cell) is not State.DONE]
    title = f"{file.title} ({len(cells) - len(missing)} of {len(cells)} cells)" if missing else file.title
    figures, together = Figures(file, [cell for cell in cells if cell.name not in missing]), file.testing != "sequence"
    tested = figures.declared() if together and file.contrasts else []
    sentence = declared.claim(file, tested, [] if together else figures.sequence())
    lines = [build_report(measured, folder, title, papers, curves(cells), baseline, sentence)]
    if not together:
        lines.append("\n".join(figures.outcome()))
    if missing:
        lines.append(f"not complete: {', '.join(missing)}")
    if baseline != file.baseline:
        lines.append(f"baseline {file.baseline}: no results yet, so nothing is compared with it")
    return "\n\n".join([*lines, f"wrote {folder / 'report.html'}"])


def _measured(file: AblationFile, cells: Sequence[Cell]) -> tuple[list[Path], str | None]:
    """Return the complete result files, and the baseline or, if it has no results, None."""
    measured = [path for cell in cells for path in measured_files(cell, read_cell(cell))]
    # Other models are compared with the baseline's variant "". Its files are called TASK_MODEL.json.
    plain = {path.stem.partition("_")[2] for path in measured}
    return measured, file.baseline if file.baseline is not None and slug(file.baseline) in plain else None


def figures_of_scale(path: Path, scale: str, beside: str | None = None) -> Figures:
    """Return the `Figures` of the finished cells of the file `path` at another scale. Raises EvaluationError.

    If `beside` is set, it is the path of the file to read instead, relative to the folder of `path`.
    """
    file = read_ablation(path if beside is None else path.parent / beside, scale)
    file = file if file.rates is None else with_rates(file, found_rates(file))
    unpack(file.results)
    recorded = recorded_data(file.results)
    cells = expand(file, recorded=recorded) if recorded else []
    return Figures(file, [cell for cell in cells if state_of(cell) is State.DONE])


def write_page(
    file: AblationFile, cells: Sequence[Cell], template: Path, page: Path, scale: Callable[..., Figures]
) -> None:
    """Write `page`, and its plots into `figures/NAME/` next to the page, where NAME is the page's stem.

    `scale` is `figures_of_scale` for the file. Raises EvaluationError if the template has an error or asks for a number
    that the results do not contain.
    """
    done = [cell for cell in cells if state_of(cell) is State.DONE]
    measured, baseline = _measured(file, done)
    document = ReportDocument(file.title, "")
    if measured:
        options = ReportOptions(baseline=baseline, curves=curves(done))
        document = report_document(read_results(measured), file.title, options)
    known = {"file": file, "figures": Figures(file, done), "scale": scale, "cells": cells, "done": done}
    text, plots = render(template, document, known, page.stem)
    for name, content in plots.items():
        write_atomically(page.parent / "figures" / page.stem / f"{name}.svg", content)
    write_atomically(page, text.encode())


def render(
    template: Path, document: ReportDocument, known: Mapping[str, Any], name: str
) -> tuple[str, dict[str, bytes]]:
    """Return the text of a page, and its plots by their names.

    `document` is the report of the finished cells. `known` has the values of further names in the template. Its `cells`
    and `done` are the cells and the finished cells.
    """
    cells, done = known["cells"], known["done"]
    tables = {table.name: table for table in document.tables()}
    figures = {figure.name: figure for figure in document.figures()}
    plots: dict[str, bytes] = {}

    def plot(plot_name: str, alt: str) -> str:
        if plot_name not in figures:
            raise EvaluationError(f"{template}: plot {plot_name}: unknown; the report has {', '.join(sorted(figures))}")
        plots[plot_name] = svg(figures[plot_name], "light")
        return f"![{alt}](figures/{name}/{plot_name}.svg)"

    def named(table_name: str) -> Table:
        if table_name not in tables:
            raise EvaluationError(
                f"{template}: table {table_name}: unknown; the report has {', '.join(tables) or 'none'}"
            )
        return tables[table_name]

    def chart(plot_name: str, labels: Sequence[str], alt: str, kind: str = "chart", of: Figures | None = None) -> str:
        plots[plot_name] = svg(getattr(of or known["figures"], kind)(labels), "print")
        return f"![{alt}](figures/{name}/{plot_name}.svg)"

    loader = FileSystemLoader([template.parent, template.parent.parent])  # the second has shared macros
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {
        "table": lambda table, rows=None: _markdown(named(table), rows),
        "value": lambda table, row, column: _value(named(table), row, column, template),
        "plot": plot,
        "chart": chart,
        "costs": lambda: _costs(done),
        "holm": holm,
        "pooled": pooled,
        "corrected_once": corrected_once,
        "entries_of": entries_of,
        "entries_of_stretch": entries_of_stretch,
        "hours": lambda: (
            sum(record.training_seconds + record.evaluation_seconds for record in map(read_cell, done)) / 3600
        ),
        "p_text": p_text,
        "level_text": level_text,
        **known,
        "missing": [cell.name for cell in cells if cell not in done],
    }
    try:
        return environment.get_template(template.name).render() + "\n", plots
    except EvaluationError:
        raise
    except Exception as error:  # a template is code, so it can raise any error
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(template)]
        line = error.lineno if isinstance(error, TemplateSyntaxError) else lines[-1] if lines else 1
        raise EvaluationError(f"{template}:{line}: {type(error).__name__}: {error}") from error


def _markdown(table: Table, names: Sequence[str] | None) -> str:
    """Return a table as Markdown, without published rows. If `names` is set, return only these rows in this order."""
    rows = {row.name: row for row in table.rows if not row.published}
    chosen = tuple(rows.values() if names is None else (rows[name] for name in names))
    return markdown_table(replace(table, header=("model", *table.header[1:]), rows=chosen, sources=()), below=escaped)


def _value(table: Table, name: str, column: str, template: Path) -> float:
    try:
        row = next(row for row in table.rows if row.name == name and not row.published)
        return float(row.cells[table.header[1:].index(column)].value)  # type: ignore[arg-type]
    except (StopIteration, ValueError, TypeError) as error:
        raise EvaluationError(
            f"{template}: table {table.name}: no number in row {name}, column {column}; name another row or column"
        ) from error


def _costs(done: Sequence[Cell]) -> str:
    """Return a table of the finished cells: tokens, hours of training and evaluation, and overhead seconds."""
    rows = []
    for cell in done:
        record = read_cell(cell)
        hours = (record.training_seconds / 3600, record.evaluation_seconds / 3600)
        rows.append((cell.model, cell.seed, record.tokens, *(f"{each:.2f}" for each in hours), record.overhead_seconds))
    header = ("model", "seed", "tokens", "training h", "evaluation h", "overhead s")
    return format_table(header, [(*row[:-1], f"{row[-1]:.0f}") for row in rows])
