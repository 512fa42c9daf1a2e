r"""Tables of a report as LaTeX for papers: \usepackage{booktabs}, and one row group for each source of numbers."""

import re

import pandas as pd

from megatron_coca.evaluation.report.document import Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import MARK

GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "θ": "theta", "κ": "kappa"}
GREEK |= {"λ": "lambda", "μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "varphi", "ω": "omega"}
SYMBOLS = {
    MARK: r"\textsuperscript{\dag}",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "²": r"\textsuperscript{2}",
    "ᵀ": r"\textsuperscript{T}",
    "∘": r"$\circ$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "→": r"$\rightarrow$",
    "≈": r"$\approx$",
    "·": r"$\cdot$",
    "∞": r"$\infty$",
    **{letter: rf"$\{name}$" for letter, name in GREEK.items()},
    "[": "{[}",  # after the end of a row it would begin an option, as the asterisk
    "*": r"\textsuperscript{*}",
}
"""Characters that the fonts of LaTeX lack, or that have a meaning there, besides those that pandas escapes."""
_SYMBOLS = re.compile("|".join(map(re.escape, SYMBOLS)))
_SPECIAL = re.compile(r"([&%$#_{}])|(~)|(\^)|(\\)")
_REPLACED = (r"\{}", r"\textasciitilde{}", r"\textasciicircum{}", r"\textbackslash{}")
COLUMN_CHARACTERS = 60
"""Characters in a line of a table that fits into a column of a paper; wider tables span both columns."""
SMALL, HEADINGS = r"\footnotesize", r"\multicolumn{{{count}}}{{l}}{{\emph{{{text}}}}} \\"


def latex(text: str) -> str:
    """Escape plain text for one line of LaTeX."""

    def special(match: re.Match[str]) -> str:
        kind = next(number for number, part in enumerate(match.groups()) if part)
        return f"\\{match[0]}" if kind == 0 else _REPLACED[kind]

    parts = re.split(f"({_SYMBOLS.pattern})", " ".join(text.split()))
    return "".join(SYMBOLS[part] if part in SYMBOLS else _SPECIAL.sub(special, part) for part in parts)


def latex_table(table: Table) -> str:
    """Return a table environment for a paper, with the notes below the table.

    Numbers are bold if they differ significantly from all others of their column. Published rows follow ours, in
    italics below the name of their source.
    """
    footnotes = table.footnotes()

    def shown(cell: TableCell) -> str:
        text = rf"\textbf{{{latex(cell.text)}}}" if cell.best else latex(cell.text)
        text += rf" {{\scriptsize {latex(cell.detail)}}}" if cell.detail else ""
        return rf"{text}\textsuperscript{{{footnotes[cell.note]}}}" if cell.note else text

    def name(row: TableRow) -> str:
        return rf"\emph{{{latex(row.name)}}}" if row.published else latex(row.name)

    header = list(map(latex, table.header))
    lines = [[name(row), *map(shown, row.cells)] for row in table.rows]
    wide = [any(row.cells[at].wide for row in table.rows) for at in range(len(header) - 1)]
    # The positions of columns are their names, because heads may be equal.
    frame = pd.DataFrame(lines, columns=range(len(header)), dtype=object)
    text = frame.style.hide(axis="index").to_latex(
        hrules=True,
        column_format="l" + "".join("l" if each else "r" for each in wide),
        environment="table" if _characters(table) <= COLUMN_CHARACTERS else "table*",
        position="t",
        position_float="centering",
        caption=latex(table.caption),
        label=f"tab:{table.name}",
    )
    return _with_notes(_with_groups(text, header, table), table, footnotes)


def _characters(table: Table) -> float:
    """Return the width of a table in characters, about: three quarters of a character for one of small print."""
    columns = zip(*(row.cells for row in table.rows), strict=True)
    widths = [
        max([len(head), *(len(cell.text) + 0.75 * len(cell.detail) for cell in cells)])
        for head, cells in zip(table.header[1:], columns, strict=True)
    ]
    return max([len(table.header[0]), *(len(row.name) for row in table.rows)]) + sum(width + 2 for width in widths)


def _with_groups(text: str, header: list[str], table: Table) -> str:
    """Put in the heads of the columns, and a rule with the source before each group of published rows."""
    lines = text.splitlines()
    first = lines.index(r"\midrule")
    lines[first - 1] = " & ".join(header) + r" \\"
    at = first + 1
    for number, (published, rows) in enumerate(table.bodies()):
        if published:
            rule = [r"\midrule"] if number else []
            lines[at:at] = [*rule, HEADINGS.format(count=len(header), text=latex(published))]
            at += 1 + len(rule)
        at += len(rows)
    return "\n".join(lines)


def _with_notes(text: str, table: Table, footnotes: dict[str, int]) -> str:
    notes = [rf"\textsuperscript{{{number}}} {latex(note)}" for note, number in footnotes.items()]
    notes += map(latex, (*table.notes, *table.sources))
    below = "".join(f"\\par\\smallskip{{{SMALL} {note}\\par}}\n" for note in notes)
    begin, end = r"\begin{tabular}", r"\end{table"
    sized = text.replace(begin, f"{SMALL}\\setlength{{\\tabcolsep}}{{3pt}}\n{begin}")
    return sized.replace(end, below + end) + "\n"
