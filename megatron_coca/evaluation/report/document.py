"""What a report consists of, before it is a page or a Markdown file."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure as Canvas


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
class Block:
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
    blocks: tuple[Block, ...]
    printed: bool = True


@dataclass(frozen=True)
class Document:
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
