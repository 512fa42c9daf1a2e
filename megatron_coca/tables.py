"""Markdown tables, for the console and for documents."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def number(value: Any) -> str:
    """A cell: thousands apart, fractions with four digits that count, ``-`` for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage; small ones do not become 0."""
    if share is None:
        return "-"
    return f"{share:.2%}" if share == 0 or share >= 0.0001 else f"{share * 100:.1e}%"


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns under their titles, the first one to the left and the others to the right."""
    cells = [list(titles), *([number(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    lines = []
    for row in cells:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)


def excerpt(text: str, length: int = 80) -> str:
    """The beginning of a text on one line, everything that is not printable escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:length])
    return shown[:length] + ("..." if len(text) > length or len(shown) > length else "")


_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
"""What means something to Markdown or to GitHub's formulas; `_` within a word means nothing."""
_LINE_ENDS = re.compile(r"\s*[\r\n]+\s*")


def escaped(text: str) -> str:
    """Plain text as Markdown that shows it as it is, in one line. HTML becomes entities, which every renderer knows."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", escape(_LINE_ENDS.sub(" ", text), quote=False))


def in_cell(text: str) -> str:
    """Plain text in a cell of a table that people read as it is, on the console."""
    return _LINE_ENDS.sub(" ", text).replace("|", r"\|")


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first one left, the others right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]

    def cells(line: Sequence[str]) -> list[str]:
        numbers = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        return [line[0].ljust(widths[0]), *numbers]

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [cells(lines[0]), rule, *map(cells, lines[1:])])
