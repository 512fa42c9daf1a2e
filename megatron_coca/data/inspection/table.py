"""Numbers as plain text for people to read."""

from collections.abc import Sequence
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
