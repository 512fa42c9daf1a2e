r"""Tables of a report as LaTeX for papers. They need \usepackage{booktabs}. Rows are grouped by their source."""

import re

import pandas as pd

from megatron_coca.evaluation.report.document import Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import MARK
from megatron_coca.support.plain_text import plain

GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "θ": "theta", "κ": "kappa"}
GREEK |= {"λ": "lambda", "μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "varphi", "ω": "omega"}
GREEK |= {"ζ": "zeta", "η": "eta", "ι": "iota", "ν": "nu", "ξ": "xi", "υ": "upsilon", "χ": "chi", "ψ": "psi"}
GREEK |= {"Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi"}
GREEK |= {"Ψ": "Psi", "Ω": "Omega"}
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
    "−": "$-$",
    "µ": r"$\mu$",
    "≈": r"$\approx$",
    "·": r"$\cdot$",
    "∞": r"$\infty$",
    **{letter: rf"$\{name}$" for letter, name in GREEK.items()},
    "[": "{[}",  # after the end of a row, LaTeX would read "[" or "*" as an option
    "*": r"\textsuperscript{*}",
}
"""Characters that LaTeX's fonts lack or that LaTeX reads as syntax, besides those in _SPECIAL."""
_SYMBOLS = re.compile("|".join(map(re.escape, SYMBOLS)))
LETTERS = (
    "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝßàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿĀāĂăĆćĈĉĊċČčĎďĒēĔĕĖėĚěĜĝĞğĠġĤĥĨĩĪīĬĭİıĴĵĹĺŁłŃńŅņŇňŌōŎŏŐő"
    "ŒœŔŕŘřŚśŜŝŞşŠšŢţŤťŨũŪūŬŭŮůŰűŴŵŶŷŸŹźŻżŽžȘșȚț—‘’“”…"
)
"""Characters besides ASCII that pdfLaTeX prints without a package, in every font encoding."""
_OTHERS = re.compile(rf"[^\x20-\x7e{LETTERS}]+")
UNICODE = r"""% The letters in \nonlatin appear with LuaLaTeX and XeLaTeX and a font that has them, such as
% \usepackage{fontspec}\setmainfont{Noto Serif CJK SC}. pdfLaTeX prints their code points.
\providecommand{\nonlatin}[2]{\ifdefined\Umathchar #1\else #2\fi}
"""
"""The start of a table with characters beyond ASCII and LETTERS. With it, the table compiles with every engine."""
_SPECIAL = re.compile(r"([&%$#_{}])|(~)|(\^)|(\\)")
_REPLACED = (r"\{}", r"\textasciitilde{}", r"\textasciicircum{}", r"\textbackslash{}")
COLUMN_CHARACTERS = 50
"""Largest width, in characters, of a table that fits into a column of a paper. Wider tables span both columns."""
PAGE_CHARACTERS = 100
"""Largest width, in characters, of a table that spans both columns. Wider tables are scaled, which needs graphicx."""
SMALL, HEADINGS = r"\footnotesize", r"\multicolumn{{{count}}}{{{kind}}}{{\emph{{{text}}}}} \\"


def latex(text: str) -> str:
    """Escape plain text for one line of LaTeX."""

    def special(match: re.Match[str]) -> str:
        kind = next(number for number, part in enumerate(match.groups()) if part)
        return f"\\{match[0]}" if kind == 0 else _REPLACED[kind]

    def other(match: re.Match[str]) -> str:
        codes = " ".join(f"U+{ord(letter):04X}" for letter in match[0])
        return rf"\nonlatin{{{match[0]}}}{{{codes}}}"

    parts = re.split(f"({_SYMBOLS.pattern})", plain(" ".join(text.split())))
    escaped = (SYMBOLS[part] if part in SYMBOLS else _SPECIAL.sub(special, part) for part in parts)
    return _OTHERS.sub(other, "".join(escaped))


def latex_table(table: Table) -> str:
    """Return a table environment for a paper, with the notes below the table.

    A column's best number is bold if it differs significantly from all others. Published rows follow our rows, below
    the name of their source, and their names are in italics.
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
    # Columns are named by their positions, because two heads may be equal.
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
    whole = _with_notes(_with_groups(text, header, table), table, footnotes)
    return UNICODE + whole if r"\nonlatin" in whole else whole


def _characters(table: Table) -> float:
    """Return the approximate width of a table in characters. A character of small print counts as three quarters."""
    columns = zip(*(row.cells for row in table.rows), strict=True)
    widths = [
        max([_width(head), *(_width(cell.text) + 0.75 * len(cell.detail) for cell in cells)])
        for head, cells in zip(table.header[1:], columns, strict=True)
    ]
    return max([_width(table.header[0]), *(_width(row.name) for row in table.rows)]) + sum(each + 2 for each in widths)


def _width(text: str) -> int:
    """Return the number of printed characters. A letter without a font is printed as its code point."""
    return len(text) + 6 * sum(map(len, _OTHERS.findall(text)))


def _with_groups(text: str, header: list[str], table: Table) -> str:
    """Insert the heads of the columns, and before each group of published rows a rule and the name of the source."""
    lines = text.splitlines()
    first = lines.index(r"\midrule")
    lines[first - 1] = " & ".join(header) + r" \\"
    at = first + 1
    for number, (published, rows) in enumerate(table.bodies()):
        if published:
            rule = [r"\midrule"] if number else []
            kind = "l" if _width(published) < _characters(table) else r"p{0.95\linewidth}"
            lines[at:at] = [*rule, HEADINGS.format(count=len(header), kind=kind, text=latex(published))]
            at += 1 + len(rule)
        at += len(rows)
    return "\n".join(lines)


def _with_notes(text: str, table: Table, footnotes: dict[str, int]) -> str:
    notes = [rf"\textsuperscript{{{number}}} {latex(note)}" for note, number in footnotes.items()]
    notes += map(latex, (*table.notes, *table.sources))
    below = "".join(f"\\par\\smallskip{{{SMALL} {note}\\par}}\n" for note in notes)
    begin, end = r"\begin{tabular}", r"\end{table"
    if _characters(table) > PAGE_CHARACTERS:
        text = text.replace(begin, f"\\resizebox{{\\textwidth}}{{!}}{{%\n{begin}")
        text = text.replace(r"\end{tabular}", r"\end{tabular}}")
        begin = r"\resizebox"
    sized = text.replace(begin, f"{SMALL}\\setlength{{\\tabcolsep}}{{3pt}}\n{begin}")
    return sized.replace(end, below + end) + "\n"
