"""The top of a report: one sentence that its numbers support, the plot of these numbers, and a small table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_coca.evaluation.report.document import Headline, Section, Table, TableCell, TableRow
from megatron_coca.evaluation.report.looks import Member
from megatron_coca.evaluation.report.metrics import MARK
from megatron_coca.evaluation.report.result_tables import ReportOptions, differ_significantly


@dataclass(frozen=True)
class Measure:
    """The numbers of a section that the sentence is about: their name, the start of their row names, the best end."""

    quantity: str
    prefix: str = ""
    lowest: bool = False


MEASURES = {
    "recall": Measure("recall"),
    "passkey": Measure("passkey accuracy"),
    "ruler": Measure("mean share of strings found", "mean: "),
    "perplexity": Measure("perplexity", lowest=True),
}
"""The sections with a sentence. A report has the sentence of the first of them that a label has learned."""
LEARNED = 0.5
"""Accuracy that one label must reach at some length: a task that no model has learned says nothing about lengths."""


def headline(sections: Sequence[Section], options: ReportOptions) -> Headline | None:
    """Return the top of a report, or None if no section has numbers by length."""
    blocks = {section.name: section.blocks[0] for section in sections}
    found = [
        (measure, _ours(blocks[name].tables[0], measure), blocks[name].figures)
        for name, measure in MEASURES.items()
        if name in blocks and blocks[name].tables
    ]
    known = [each for each in found if _measured(each[1])]
    if not known:
        return None
    measure, table, figures = next((each for each in known if _learned(each[1], each[0])), known[0])
    columns = _measured(table)
    sentence, basis = _claim(table, columns[-1], measure, options)
    small = _small(table, columns, measure)
    return Headline(options.claim or sentence, "" if options.claim else basis, small, figures[0] if figures else None)


def _learned(table: Table, measure: Measure) -> bool:
    values = [cell.value for row in table.rows for cell in row.cells if cell.value is not None]
    return measure.lowest or max(values) >= LEARNED


def _ours(table: Table, measure: Measure) -> Table:
    """Return the rows of one measure without published rows; each is named by its label only."""
    rows = [row for row in table.rows if not row.published and row.name.startswith(measure.prefix)]
    return replace(table, rows=tuple(replace(row, name=row.name.removeprefix(measure.prefix)) for row in rows))


def _known(cell: TableCell) -> bool:
    return cell.value is not None and math.isfinite(cell.value)


def _measured(table: Table) -> list[int]:
    """Return the columns in which the largest number of rows has a number, in order; empty if there is no number."""
    counts = [sum(_known(row.cells[at]) for row in table.rows) for at in range(len(table.header) - 1)]
    most = max(counts, default=0)
    return [at for at, count in enumerate(counts) if count == most > 0]


def _length(head: str) -> int:
    return int(head.rstrip("*"))


def _place(table: Table, column: int) -> str:
    """Return the length of a column in words: `1,024 tokens, 16 times the training length`."""
    heads = table.header[1:]
    length, trained = _length(heads[column]), {_length(head) for head in heads if head.endswith("*")}
    if len(trained) != 1:
        return f"{length:,} tokens"
    times = length / trained.pop()
    return f"{length:,} tokens, " + ("the training length" if times == 1 else f"{times:g} times the training length")


def _claim(table: Table, column: int, measure: Measure, options: ReportOptions) -> tuple[str, str]:
    """Return the sentence on one column, and how it was tested."""
    cells = {row.name: row.cells[column] for row in table.rows if _known(row.cells[column])}
    seeds = max((cell.seeds or 1 for cell in cells.values()), default=1)
    scope = "" if seeds > 1 else " There is one seed for each model, so the test does not cover other seeds."
    if len(cells) == 1:
        (label,) = cells
        return _alone(table, column, label, measure), f"Tested with 95% intervals.{scope}"
    sentence = f"At {_place(table, column)}, {_comparison(cells, measure, options.members, options.baseline)}."
    others = len(cells) - 1
    corrected = f", corrected for {others} comparisons with the best number (Bonferroni)" if others > 1 else ""
    return sentence, f"Tested with 95% intervals{corrected}.{scope}"


def _alone(table: Table, column: int, label: str, measure: Measure) -> str:
    """Return the sentence on a single label: its first against its last length."""
    cells = next(row.cells for row in table.rows if row.name == label)
    first = next(at for at, cell in enumerate(cells) if _known(cell))
    if first == column:
        return f"{label} has a {measure.quantity} of {_number(cells[first])} at {_place(table, first)}."
    start, end = cells[first], cells[column]
    places = f"{_place(table, first)}, and {_place(table, column)}"
    if not differ_significantly(start, end):
        numbers = f"{_number(start)} and {_number(end)}"
        return f"No difference in {measure.quantity} of {label} is shown between {places}: {numbers}."
    verb = "falls" if (end.value or 0.0) < (start.value or 0.0) else "rises"
    return f"The {measure.quantity} of {label} {verb} from {_number(start)} to {_number(end)} between {places}."


def _number(cell: TableCell) -> str:
    return f"{cell.value:.2f}"


def _comparison(
    cells: Mapping[str, TableCell], measure: Measure, members: Mapping[str, Member], baseline: str | None
) -> str:
    """Return the statement on several labels: the best, those that do not differ from it, and one that does."""
    order = sorted(cells, key=lambda label: cells[label].value or 0.0, reverse=not measure.lowest)
    best, *others = order
    worse = [label for label in others if differ_significantly(cells[best], cells[label], len(others))]
    tied = [label for label in others if label not in worse]
    if not worse:
        numbers = f"{_number(cells[order[0]])} to {_number(cells[order[-1]])}"
        return f"no difference in {measure.quantity} is shown between {len(cells)} labels ({numbers})"
    end = "lowest" if measure.lowest else "highest"
    parts = [f"{best} has the {end} {measure.quantity}, {_number(cells[best])}"]
    if tied:
        shown = tied if len(tied) < 3 else [label for label in tied if label == baseline]
        names = [f"{label} ({_number(cells[label])})" for label in shown]
        if more := len(tied) - len(shown):
            names.append(f"{more} {'other labels' if shown else 'labels'}")
        parts.append(f"no difference from {' and '.join(names)} is shown")
    parts.append(_beaten(worse, cells, members, best, baseline))
    return "; ".join(parts)


def _beaten(
    worse: Sequence[str], cells: Mapping[str, TableCell], members: Mapping[str, Member], best: str, baseline: str | None
) -> str:
    """Return the statement on a label that is worse than the best: the baseline, a model as trained, or the next."""
    trained = [label for label in cells if not members[label].variant]
    if baseline is not None and baseline in worse:
        return f"the baseline {baseline} has {_number(cells[baseline])}"
    if members[best].variant and trained and all(label in worse for label in trained):
        first = next(label for label in worse if label in trained)
        name = "the model as trained" if len(trained) == 1 else "the best model as trained"
        return f"{name}, {first}, has {_number(cells[first])}"
    return f"the next label, {worse[0]}, has {_number(cells[worse[0]])}"


def _small(table: Table, columns: Sequence[int], measure: Measure) -> Table:
    """Return the first and the last of the columns, with the best label of the last column first."""
    chosen = sorted({columns[0], columns[-1]})
    header = (table.header[0], *(table.header[at + 1] for at in chosen))
    sign = 1.0 if measure.lowest else -1.0

    def place(row: TableRow) -> float:
        value = row.cells[chosen[-1]].value
        return math.inf if value is None else sign * value

    rows = [replace(row, cells=tuple(row.cells[at] for at in chosen)) for row in sorted(table.rows, key=place)]
    caption = f"{measure.quantity[0].upper()}{measure.quantity[1:]} at {' and '.join(header[1:])} tokens"
    notes = tuple(note for note in table.notes if note.startswith(("*", MARK)))
    return Table("headline", caption, header, tuple(rows), notes)
