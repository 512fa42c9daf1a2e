"""Format Markdown tables and the text in their cells, for the console and for documents."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from megatron_coca.support.plain_text import plain

_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
"""Characters with a meaning in Markdown or in GitHub's formulas; ``_`` within a word is not included."""
_LINE_ENDS = re.compile(r"\s*[\r\n]+\s*")


def number(value: Any) -> str:
    """Return the text of a table cell: thousands separators, four significant digits for floats, ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def percent(share: float | None) -> str:
    """Return a fraction of 1 as a percentage. A small fraction is not rounded to 0."""
    if share is None:
        return "-"
    return f"{share:.2%}" if share == 0 or share >= 0.0001 else f"{share * 100:.1e}%"


def escaped(text: str) -> str:
    """Escape plain text for one line of Markdown. HTML becomes entities, and control characters become escapes, because
    files are shown on terminals too.
    """
    return _MARKUP.sub(lambda found: f"\\{found[0]}", escape(plain(_LINE_ENDS.sub(" ", text)), quote=False))


def in_cell(text: str) -> str:
    """Escape plain text for a table cell on the console, where Markdown is not rendered."""
    return _LINE_ENDS.sub(" ", text).replace("|", r"\|")


def format_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table with aligned columns, the first to the left and all others to the right. A line end in a
    cell becomes a space, because a name from a file must not look like output of the program.
    """
    rows_of_text = [[number(value) for value in row] for row in rows]
    lines = [[_LINE_ENDS.sub(" ", text) for text in line] for line in (header, *rows_of_text)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]

    def cells(line: Sequence[str]) -> list[str]:
        numbers = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        return [line[0].ljust(widths[0]), *numbers]

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [cells(lines[0]), rule, *map(cells, lines[1:])])
