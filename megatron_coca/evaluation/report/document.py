"""The content of a report: tables, figures and sections, and their forms as Markdown, JSON, HTML, CSV and LaTeX."""

import csv
import io
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from pydantic import SerializeAsAny

from megatron_coca.evaluation.report.charts import Figure
from megatron_coca.evaluation.report.curves import Curve
from megatron_coca.evaluation.results import Record, Result
from megatron_coca.markdown_tables import escaped, format_table, in_cell


@dataclass(frozen=True)
class TableCell:
    """One cell: `text` as shown, the `value` behind it, and `detail` in small print (an interval).

    `low` and `high` are the ends of the 95% interval if there is one, `seeds` the number of seeds that `value` is of.
    `sample` has what was measured of each document, for paired comparisons. `note` becomes a footnote: why there is no
    number, or what it does not cover. A `partial` number is not compared with the others of its column. `wide` cells
    are text.
    """

    text: str
    value: float | None = None
    detail: str = ""
    low: float | None = None
    high: float | None = None
    seeds: int | None = None
    sample: tuple[float, ...] = ()
    note: str = ""
    absent: bool = False
    best: bool = False
    partial: bool = False
    wide: bool = False

    @property
    def in_full(self) -> str:
        """Text and small print on one line."""
        if not self.detail or self.detail.startswith("±"):
            return f"{self.text} {self.detail}".rstrip()
        return f"{self.text} ({self.detail})"


MOST_WRAPPED = 24
"""Characters in a line of a text that wraps: names of rows, and `wide` cells."""
EMPTY = TableCell("")
"""Content of a cell whose column does not apply to the row."""


@dataclass(frozen=True)
class TableRow:
    """One row. `published` names the source of published numbers, empty for ours; `detail` is small print."""

    name: str
    cells: tuple[TableCell, ...]
    published: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """`header` starts with the column of row names; `notes` follow the table, `sources` describe published rows."""

    name: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def footnotes(self) -> dict[str, int]:
        notes = [cell.note for row in self.rows for cell in row.cells if cell.note]
        return {note: number for number, note in enumerate(dict.fromkeys(notes), 1)}

    @property
    def characters(self) -> int:
        """About how wide the table is when texts wrap where they may, with two characters between columns."""
        total = min(MOST_WRAPPED, max((len(row.name) for row in self.rows), default=0))
        for column, head in enumerate(self.header[1:]):
            cells = [row.cells[column] for row in self.rows]
            texts = [
                min(MOST_WRAPPED, len(cell.text)) if cell.wide else max(len(cell.text), len(cell.detail))
                for cell in cells
            ]
            total += 2 + max([*map(len, head.split()), *texts], default=0)
        return total

    def bodies(self) -> list[tuple[str, list[TableRow]]]:
        return [(published, list(rows)) for published, rows in groupby(self.rows, lambda row: row.published)]


@dataclass(frozen=True)
class ReportBlock:
    """Tables and figures of one group of results. `text` says how they were measured, `provenance` from what: paths,
    hashes and devices, one line each.
    """

    text: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    heading: str = ""
    provenance: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """One section of the report; `printed` ones appear on the console too."""

    name: str
    title: str
    blocks: tuple[ReportBlock, ...]
    printed: bool = True


@dataclass(frozen=True)
class ReportDocument:
    """A report. Without `measured` it shows no results, and its page explains no marks of results."""

    title: str
    summary: str
    sections: tuple[Section, ...] = ()
    measured: bool = True

    def tables(self) -> Iterator[Table]:
        return (table for section in self.sections for block in section.blocks for table in block.tables)

    def figures(self) -> Iterator[Figure]:
        return (figure for section in self.sections for block in section.blocks for figure in block.figures)


def markdown(document: ReportDocument) -> str:
    parts = [f"# {escaped(document.title)}", escaped(document.summary)]
    for section in document.sections:
        parts.append(f"## {escaped(section.title)}")
        for block in section.blocks:
            parts += [f"### {escaped(block.heading)}"] if block.heading else []
            parts += map(escaped, block.text)
            for table in block.tables:
                parts += [f"**{escaped(table.caption)}**", markdown_table(table, escaped, escaped)]
            for figure in block.figures:
                parts += [f"![{escaped(figure.alt)}]({figure.name}.png)", f"*{escaped(figure.caption)}*"]
            if block.provenance:
                parts += ["Provenance:", "\n".join(f"- {escaped(line)}" for line in block.provenance)]
    return "\n\n".join(parts) + "\n"


def console_text(document: ReportDocument) -> str:
    """The tables of our own results, without published rows."""
    parts = [document.title]
    for block in (block for section in document.sections if section.printed for block in section.blocks):
        ours = [_without_published(table) for table in block.tables if any(not row.published for row in table.rows)]
        parts += [block.heading] if block.heading and ours else []
        parts += [text for table in ours for text in (table.caption, markdown_table(table))]
    return "\n\n".join(parts)


def _without_published(table: Table) -> Table:
    rows = [row for row in table.rows if not row.published]

    def asked_for(column: int) -> bool:
        cells = [row.cells[column] for row in rows]
        return any(cell.text and (cell.note or not cell.absent) for cell in cells)

    kept = [column for column in range(len(table.header) - 1) if asked_for(column)]
    header = (table.header[0], *(table.header[column + 1] for column in kept))
    shown = tuple(replace(row, cells=tuple(row.cells[column] for column in kept)) for row in rows)
    return replace(table, header=header, rows=shown, sources=())


def markdown_table(table: Table, in_table: Callable[[str], str] = in_cell, below: Callable[[str], str] = str) -> str:
    """A table and its notes; `in_table` and `below` escape texts in cells and in notes."""
    footnotes = table.footnotes()
    lines = []
    for row in table.rows:
        name = in_table(row.name)
        line = [f"*{name}* ({in_table(row.published)})" if row.published else name]
        for cell in row.cells:
            text = in_table(cell.in_full)
            line.append(f"{text} [{footnotes[cell.note]}]" if cell.note else text)
        lines.append(line)
    parts = [format_table([in_table(text) for text in table.header], lines)]
    parts += [f"[{number}] {below(note)}" for note, number in footnotes.items()]
    return "\n\n".join([*parts, *map(below, (*table.notes, *table.sources))])


def csv_table(table: Table) -> str:
    """Numbers with eight digits, texts where there is none; extra columns hold the ends of intervals and the seeds."""
    columns = [[table.header[0], *(row.name for row in table.rows)], ["source", *(row.published for row in table.rows)]]
    for head, *cells in zip(table.header[1:], *(row.cells for row in table.rows), strict=True):
        columns.append([head, *(cell.text if cell.value is None else _number(cell.value) for cell in cells)])
        for name in ("low", "high", "seeds"):
            values = [getattr(cell, name) for cell in cells]
            if any(value is not None and (name != "seeds" or value > 1) for value in values):
                columns.append([f"{head} {name}", *map(_number, values)])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
    return text.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.8g}"


LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",  # after the end of a row it would begin an option, as the asterisk
    "*": "{*}",
    "--": "-{}-",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "†": r"\textsuperscript{\dag}",
    "·": r"$\cdot$",
}
_LATEX_SPECIAL = re.compile("|".join(map(re.escape, LATEX)))


def latex(text: str) -> str:
    """Escape plain text for one line of LaTeX."""
    return _LATEX_SPECIAL.sub(lambda match: LATEX[match[0]], " ".join(text.splitlines()))


def latex_table(table: Table) -> str:
    r"""A table environment for \usepackage{booktabs}, with its notes below."""
    footnotes = table.footnotes()

    def cell(value: TableCell) -> str:
        text = rf"\textbf{{{latex(value.text)}}}" if value.best else latex(value.text)
        text += latex(value.in_full.removeprefix(value.text))
        return rf"{text}\textsuperscript{{{footnotes[value.note]}}}" if value.note else text

    def line(row: TableRow) -> str:
        return " & ".join([latex(row.name), *map(cell, row.cells)]) + r" \\"

    wide = [any(row.cells[column].wide for row in table.rows) for column in range(len(table.header) - 1)]
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{l{''.join('l' if is_wide else 'r' for is_wide in wide)}}}",
        r"\toprule",
        " & ".join(map(latex, table.header)) + r" \\",
    ]
    for published, rows in table.bodies():
        lines.append(r"\midrule")
        if published:
            lines.append(rf"\multicolumn{{{len(table.header)}}}{{l}}{{\emph{{{latex(published)}}}}} \\")
        lines += map(line, rows)
    lines += [r"\bottomrule", r"\end{tabular}"]
    notes = [rf"\textsuperscript{{{number}}} {latex(note)}" for note, number in footnotes.items()]
    notes += map(latex, (*table.notes, *table.sources))
    lines += [rf"\par\smallskip{{\footnotesize {note}\par}}" for note in notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def html_page(document: ReportDocument, drawings: Mapping[str, Mapping[str, bytes]]) -> str:
    """The file report.html: one page with its style and images inside, without scripts.

    `drawings` has the SVG of every plot by its name and style.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    images = {
        name: {style: f"data:image/svg+xml;base64,{b64encode(image).decode()}" for style, image in each.items()}
        for name, each in drawings.items()
    }
    return environment.get_template("report.html.j2").render(document=document, images=images)


class Report(Record):
    """The file report.json: tables, file names of the plots, learning curves by label, and results by their files."""

    title: str
    tables: list[dict[str, Any]]
    figures: list[str]
    curves: dict[str, list[Curve]]
    results: dict[str, SerializeAsAny[Result]]


def table_record(table: Table) -> dict[str, Any]:
    """A table as it is in report.json: every cell with its text, value, small print and note."""
    fields = ("text", "value", "detail", "low", "high", "seeds", "note")
    rows = []
    for row in table.rows:
        cells = [{name: getattr(cell, name) for name in fields} for cell in row.cells]
        rows.append({"name": row.name, "published": row.published, "cells": cells})
    columns = table.header[1:]
    return {"name": table.name, "caption": table.caption, "columns": columns, "rows": rows, "notes": table.notes}
