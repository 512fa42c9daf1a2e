"""The notebook of a report. It redraws figures and tables from results.csv, and is saved with its outputs."""

import ast
import io
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

from megatron_coca.support.markdown_tables import escaped

NAME, CODE, TEXT = "report.ipynb", "code", "markdown"
LANGUAGE = {"display_name": "Python 3", "language": "python", "name": "python3"}
NotebookCell = tuple[str, str]
"""The kind of a cell, CODE or TEXT, and its source."""


def report_cells(title: str, claim: str, measured: Sequence[tuple[str, str]]) -> list[NotebookCell]:
    """Return the cells for a report with these tasks and metrics."""
    about = (
        f"# {escaped(title)}\n\n{escaped(claim)}\n\nThis notebook reads `results.csv` in its folder. "
        "`read_frame` reads the same file as a pandas table. Change a cell and run it again to change a figure "
        "or a table for a paper."
    )
    start = (
        "from megatron_coca.evaluation.report.redrawn import figure, frame, latex_table, read_frame, read_rows, "
        "table\n\n"
        'rows = read_rows("results.csv")\n'
        'f"{len(rows)} numbers of {len({row.label for row in rows})} labels"'
    )
    cells = [(TEXT, about), (CODE, start)]
    for task, metric in measured:
        cells += [
            (TEXT, f"## {escaped(f'{task}: {metric}')}"),
            (CODE, f"figure(rows, {task!r}, {metric!r})"),
            (CODE, f"frame(table(rows, {task!r}, {metric!r}))"),
        ]
    if measured:
        task, metric = measured[0]
        cells += [(TEXT, "## LaTeX"), (CODE, f"print(latex_table(table(rows, {task!r}, {metric!r})))")]
    return cells


def executed(cells: Sequence[NotebookCell], folder: Path) -> str:
    """Run the code cells in `folder`, one after the other in this process, and return the notebook as JSON.

    An exception of a cell ends the run.
    """
    names: dict[str, Any] = {}
    shown, count = [], 0
    for number, (kind, source) in enumerate(cells):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": _lines(source)}
        if kind == CODE:
            count += 1
            with chdir(folder):
                cell |= {"execution_count": count, "outputs": _outputs(source, names, count)}
        shown.append(cell)
    metadata = {"kernelspec": LANGUAGE, "language_info": {"name": "python"}}
    notebook = {"cells": shown, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run one cell. Return the text that it prints, and the value of its last statement if that is an expression."""
    tree, value, printed = ast.parse(source), None, io.StringIO()
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        data = {"data": _data(value), "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        outputs.append(data)
    return outputs


def _data(value: Any) -> Mapping[str, Any]:
    """Return a value as Jupyter shows it: as an image, as HTML, or as text."""
    text = {"text/plain": _lines(str(getattr(value, "alt", "")) or repr(value))}
    if hasattr(value, "_repr_png_"):
        return {"image/png": b64encode(value._repr_png_()).decode() + "\n"} | text
    if hasattr(value, "_repr_html_"):
        return {"text/html": _lines(value._repr_html_())} | text
    return text


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
