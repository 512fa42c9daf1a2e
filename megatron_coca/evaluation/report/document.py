"""The content of a report (tables, figures and sections), and its output as Markdown, HTML and CSV."""

import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from megatron_coca.evaluation.declaration import LAST
from megatron_coca.evaluation.report.plots.figures import COLUMN, PAGE, Figure
from megatron_coca.support.markdown_tables import escaped, format_table, in_cell
from megatron_coca.support.plain_text import plain


@dataclass(frozen=True)
class TableCell:
    """One cell. `text` shows `value`, and `detail` follows in small print, such as an interval.

    `low` and `high` are the ends of the 95% interval, if there is one. `seeds` is the number of seeds behind `value`.
    `sample` contains one sum per document or one value per case, for paired comparisons. `note` becomes a footnote: the
    reason for a missing number, or a limitation. `wide`: whether the cell contains prose.
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
    wide: bool = False

    @property
    def in_full(self) -> str:
        """Text and small print in one line."""
        if not self.detail or self.detail.startswith("±"):
            return f"{self.text} {self.detail}".rstrip()
        return f"{self.text} ({self.detail})"


FORMULA = re.compile(r"\s*[=@]|\s*[+-](?![\d.]*\Z)|[\t\r]")
"""Matches the start of a text that a spreadsheet would read as a formula. Numbers and a single minus do not match."""
EMPTY = TableCell("")
"""The cell of a column that does not apply to the row."""


@dataclass(frozen=True)
class TableRow:
    """One row. `published` is the source of published numbers, empty for our own; `detail` is small print."""

    name: str
    cells: tuple[TableCell, ...]
    published: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Measure:
    """The numbers of a table that the sentence at the top of a report is about.

    Attributes:
        quantity: what the numbers measure.
        prefix: the text before the label in the names of the rows.
        lowest: whether the lowest number is the best.
        least: the number that at least one label must reach in one column. If none does, no model has learned the
            task, and the sentence is about other numbers if there are any.
        digits: number of decimal places.
        unit: the text after each number.
        column: index of the only column that the sentence is about; by default all columns, and each is a length.
        trained: the training lengths of all models, even of models that were not measured at their training length.
    """

    quantity: str
    prefix: str = ""
    lowest: bool = False
    least: float = -math.inf
    digits: int = 2
    unit: str = ""
    column: int | None = None
    trained: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Table:
    """`header` starts with the head of the row names; `notes` follow the table; `sources` describe published rows.

    The sentence at the top of the report can be about a table with a `measure`.
    """

    name: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    measure: Measure | None = None

    def footnotes(self) -> dict[str, int]:
        notes = [cell.note for row in self.rows for cell in row.cells if cell.note]
        return {note: number for number, note in enumerate(dict.fromkeys(notes), 1)}

    def bodies(self) -> list[tuple[str, list[TableRow]]]:
        return [(published, list(rows)) for published, rows in groupby(self.rows, lambda row: row.published)]


@dataclass(frozen=True)
class ReportBlock:
    """Tables and figures for one group of results.

    `text` describes the protocol. `code` is shown as it is, after the text. `provenance` lists paths, hashes and
    devices, one per line.
    """

    text: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    heading: str = ""
    provenance: tuple[str, ...] = ()
    code: str = ""


@dataclass(frozen=True)
class Section:
    """One section of the report. `printed`: whether the console shows it too.

    `sentence` is its place in the order in which sections are tried for the sentence at the top.
    """

    name: str
    title: str
    blocks: tuple[ReportBlock, ...]
    printed: bool = True
    sentence: int = LAST


@dataclass(frozen=True)
class Headline:
    """The top of a report: a sentence, a text on its test (`basis`), a small table, and the plot of these numbers.

    The plot belongs to a section of the report, but is shown only at the top. `names` are names and their meanings.
    """

    sentence: str
    basis: str
    table: Table
    figure: Figure | None = None
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ReportDocument:
    """A report. If `measured` is false, it contains no results, and its page does not explain the marks on results."""

    title: str
    summary: str
    sections: tuple[Section, ...] = ()
    measured: bool = True
    headline: Headline | None = None

    def tables(self) -> Iterator[Table]:
        """Yield the tables of all sections, without the table of the headline, which repeats some of their columns."""
        return (table for section in self.sections for block in section.blocks for table in block.tables)

    def figures(self) -> Iterator[Figure]:
        return (figure for section in self.sections for block in section.blocks for figure in block.figures)


def markdown(document: ReportDocument) -> str:
    top, shown = document.headline, None
    parts = [f"# {escaped(document.title)}"]
    if top is not None:
        parts += [f"**{escaped(top.sentence)}**"]
        shown = top.figure
        parts += _markdown_figure(shown) if shown is not None else []
        parts.append("\n".join(f"- *{escaped(name)}*: {escaped(meaning)}" for name, meaning in top.names))
        parts += [markdown_table(top.table, escaped, escaped), escaped(top.basis)]
    parts.append(escaped(document.summary))
    for section in document.sections:
        parts.append(f"## {escaped(section.title)}")
        for block in section.blocks:
            parts += [f"### {escaped(block.heading)}"] if block.heading else []
            for figure in block.figures:
                parts += _markdown_figure(figure) if figure is not shown else []
            for table in block.tables:
                parts += [f"**{escaped(table.caption)}**", markdown_table(table, escaped, escaped)]
            parts += map(escaped, block.text)
            parts += [f"```\n{block.code}\n```"] if block.code else []
            if block.provenance:
                parts += ["Provenance:", "\n".join(f"- {escaped(line)}" for line in block.provenance)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_figure(figure: Figure) -> list[str]:
    return [f"![{escaped(figure.alt)}](figures/{figure.name}.svg)", f"*{escaped(figure.caption)}*"]


def console_text(document: ReportDocument) -> str:
    """Return the tables of the sections that the console shows."""
    parts = [document.title, *([document.headline.sentence] if document.headline is not None else [])]
    for block in (block for section in document.sections if section.printed for block in section.blocks):
        parts += [block.heading] if block.heading and block.tables else []
        parts += [text for table in block.tables for text in (table.caption, markdown_table(table))]
    return "\n\n".join(parts)


def markdown_table(table: Table, in_table: Callable[[str], str] = in_cell, below: Callable[[str], str] = str) -> str:
    """Return a table and its notes as Markdown. `in_table` escapes the text of cells, and `below` escapes notes."""
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
    """Return a table as CSV. Numbers have eight significant digits; a cell without a number contains its text.

    Extra columns contain interval ends, numbers of seeds, and notes.
    """
    columns: list[list[str | float | None]] = [
        [table.header[0], *(row.name for row in table.rows)],
        ["source", *(row.published for row in table.rows)],
    ]
    for head, *cells in zip(table.header[1:], *(row.cells for row in table.rows), strict=True):
        columns.append([head, *(cell.text if cell.value is None else cell.value for cell in cells)])
        for name in ("low", "high", "seeds"):
            values = [getattr(cell, name) for cell in cells]
            if any(value is not None and (name != "seeds" or value > 1) for value in values):
                columns.append([f"{head} {name}", *values])
        if any(cell.note and cell.value is not None for cell in cells):
            columns.append([f"{head} note", *(cell.note for cell in cells)])
    return csv_lines(zip(*columns, strict=True), digits=8)


def csv_lines(rows: Iterable[Iterable[str | float | None]], digits: int) -> str:
    """Return rows as CSV. Every text is quoted, so that a reader can tell the label "007" from a number.

    Numbers have `digits` significant digits, and None is an empty field without quotes.
    """
    return "".join(f"{','.join(_field(value, digits) for value in row)}\n" for row in rows)


def _field(value: str | float | None, digits: int) -> str:
    if isinstance(value, str):
        return '"' + in_spreadsheet(plain(value)).replace('"', '""') + '"' if value else ""
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def in_spreadsheet(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would read as a formula. Names in results are not trusted."""
    return f"'{text}" if FORMULA.match(text) else text


def from_spreadsheet(text: str) -> str:
    """Remove the apostrophe that `in_spreadsheet` added, if there is one."""
    return text[1:] if text.startswith("'") and FORMULA.match(text[1:]) else text


Drawings = Mapping[str, Mapping[str, bytes]]
"""The images of each plot, by its name and the end of the file name: `.svg` for pages, `-narrow.svg` for phones."""


def html_page(document: ReportDocument, drawings: Drawings) -> str:
    """Return report.html: a single page without scripts that embeds its style and images."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    images = {
        name: [f"data:image/svg+xml;base64,{b64encode(found[end]).decode()}" for end in (".svg", "-narrow.svg")]
        for name, found in drawings.items()
    }
    sizes = {
        figure.name: [(layout.width, figure.height(layout)) for layout in (PAGE, COLUMN)]
        for figure in document.figures()
    }
    return environment.get_template("report.html.j2").render(document=document, images=images, sizes=sizes)
