"""What a report consists of, before it is a page or a Markdown file."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from matplotlib.figure import Figure as Canvas

from megatron_coca.tables import escaped, format_table, in_cell


@dataclass(frozen=True)
class Entry:
    """One cell of a table: `text` as it is shown, `value` behind it, `detail` in small print (an interval).

    `note` says why the cell has no number, or what its number does not cover; it becomes a footnote. `partial` is a
    number that rests on less than those of its column, and is not held against them. `wide` is text.
    """

    text: str
    value: float | None = None
    detail: str = ""
    note: str = ""
    absent: bool = False
    best: bool = False
    partial: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Line:
    """One row. `published` names the table that its numbers are taken from; empty for what was measured here.

    `detail` is small print below the name.
    """

    name: str
    entries: tuple[Entry, ...]
    published: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """`name` is for files and anchors, `caption` stands with it, `notes` below; the first column names the rows.

    `sources` say what published rows of the table are of.
    """

    name: str
    caption: str
    header: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def footnotes(self) -> dict[str, int]:
        """The notes of the entries, each once, numbered from 1 in the order of reading."""
        notes = [entry.note for line in self.lines for entry in line.entries if entry.note]
        return {note: number for number, note in enumerate(dict.fromkeys(notes), 1)}


@dataclass(frozen=True)
class Figure:
    """A plot: `draw` puts it on an empty canvas of `size` inches, `alt` says what it shows to who cannot see it."""

    name: str
    caption: str
    alt: str
    draw: Callable[[Canvas], None]
    size: tuple[float, float] = (6.0, 4.2)


@dataclass(frozen=True)
class ReportBlock:
    """What was measured in one way on the same data: figures and tables, and how."""

    heading: str = ""
    text: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Section:
    """One chapter of the report; `printed` on the console too."""

    name: str
    title: str
    blocks: tuple[ReportBlock, ...]
    printed: bool = True


@dataclass(frozen=True)
class ReportDocument:
    """The whole report."""

    title: str
    summary: str
    sections: tuple[Section, ...] = ()

    def tables(self) -> Iterator[Table]:
        """All of them, in order."""
        return (table for section in self.sections for block in section.blocks for table in block.tables)

    def figures(self) -> Iterator[Figure]:
        """All of them, in order."""
        return (figure for section in self.sections for block in section.blocks for figure in block.figures)


NOTHING = Entry("")
"""Where a column means nothing to a row."""


def entries(texts: Iterable[str]) -> tuple[Entry, ...]:
    """Cells of plain text."""
    return tuple(Entry(text, wide=True) for text in texts)


Shown = Callable[[str], str]
"""Plain text -> what is written."""


def render(document: ReportDocument) -> str:
    """The file report.md; plots by the names of their files."""
    parts = [f"# {escaped(document.title)}", escaped(document.summary)]
    for section in document.sections:
        parts.append(f"## {escaped(section.title)}")
        for block in section.blocks:
            parts += _block(block)
    return "\n\n".join(parts) + "\n"


def _block(block: ReportBlock) -> Iterator[str]:
    if block.heading:
        yield f"### {escaped(block.heading)}"
    yield from map(escaped, block.text)
    for table in block.tables:
        yield f"**{escaped(table.caption)}**"
        yield render_table(table, escaped, escaped)
    for figure in block.figures:
        yield f"![{escaped(figure.alt)}]({figure.name}.png)"
        yield f"*{escaped(figure.caption)}*"


def render_ours(document: ReportDocument) -> str:
    """The tables of what was measured here, without the papers', one after another."""
    parts = [document.title]
    for block in (block for section in document.sections if section.printed for block in section.blocks):
        ours = [_ours(table) for table in block.tables if any(not line.published for line in table.lines)]
        parts += [block.heading] if block.heading and ours else []
        parts += [part for table in ours for part in (table.caption, render_table(table))]
    return "\n\n".join(parts)


def _ours(table: Table) -> Table:
    """Without the papers' rows, and without the columns that are there for them alone."""
    lines = [line for line in table.lines if not line.published]
    asked = [at for at in range(len(table.header) - 1) if any(_tried(line.entries[at]) for line in lines)]
    header = (table.header[0], *(table.header[at + 1] for at in asked))
    kept = tuple(replace(line, entries=tuple(line.entries[at] for at in asked)) for line in lines)
    return replace(table, header=header, lines=kept, sources=())


def _tried(entry: Entry) -> bool:
    return bool(entry.text) and not (entry.absent and not entry.note)


def render_table(table: Table, in_table: Shown = in_cell, below: Shown = str) -> str:
    """A table with its notes below."""
    footnotes = table.footnotes()
    rows = [
        [_name(line, in_table), *(_cell(entry, footnotes, in_table) for entry in line.entries)] for line in table.lines
    ]
    parts = [format_table([in_table(text) for text in table.header], rows)]
    parts += [f"[{number}] {below(note)}" for note, number in footnotes.items()]
    return "\n\n".join([*parts, *map(below, (*table.notes, *table.sources))])


def _name(line: Line, shown: Shown) -> str:
    return f"*{shown(line.name)}* ({shown(line.published)})" if line.published else shown(line.name)


def _cell(entry: Entry, footnotes: dict[str, int], shown: Shown) -> str:
    text = shown(f"{entry.text} ({entry.detail})" if entry.detail else entry.text)
    return f"{text} [{footnotes[entry.note]}]" if entry.note else text
