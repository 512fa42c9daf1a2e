"""Tables of a report as files of their own: CSV for programs and spreadsheets, LaTeX (booktabs) for papers."""

import csv
import io
import re

from megatron_coca.evaluation.report.document import Table, TableCell, TableRow


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
