"""Markdown tables, for the console and for documents."""

from collections.abc import Iterable, Sequence


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first one left, the others right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]

    def cells(line: Sequence[str]) -> list[str]:
        numbers = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        return [line[0].ljust(widths[0]), *numbers]

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [cells(lines[0]), rule, *map(cells, lines[1:])])
