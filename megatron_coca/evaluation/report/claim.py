"""The top of a report: one sentence that its numbers support, the plot of these numbers, and a small table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_coca.evaluation.report.document import Headline, Section, Table, TableCell, TableRow
from megatron_coca.evaluation.report.looks import Member
from megatron_coca.evaluation.report.metrics import MARK, decimal
from megatron_coca.evaluation.report.result_tables import ReportOptions, differ_significantly, mark_best, testable
from megatron_coca.evaluation.statistics import FEWEST_DOCUMENTS


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
        (measure, _ours(blocks[name].tables[0], measure), blocks[name])
        for name, measure in MEASURES.items()
        if name in blocks and blocks[name].tables
    ]
    known = [each for each in found if _measured(each[1])]
    if not known:
        return None
    measure, table, block = next((each for each in known if _learned(each[1], each[0])), known[0])
    columns = _measured(table)
    sentence, basis = _claim(table, columns[-1], measure, options)
    if block.heading:  # there are other groups of results, such as those on other documents
        basis = f"{block.heading}. {basis}".strip()
    small, figure = _small(table, columns, measure), next(iter(block.figures), None)
    return Headline(options.claim or sentence, "" if options.claim else basis, small, figure)


def _learned(table: Table, measure: Measure) -> bool:
    values = [cell.value for row in table.rows for cell in row.cells if cell.value is not None]
    return measure.lowest or max(values) >= LEARNED


def _ours(table: Table, measure: Measure) -> Table:
    """Return the rows of one measure without published rows; each is named by its label only."""
    rows = [row for row in table.rows if not row.published and row.name.startswith(measure.prefix)]
    return replace(table, rows=tuple(replace(row, name=row.name.removeprefix(measure.prefix)) for row in rows))


def _finite(cell: TableCell) -> bool:
    return cell.value is not None and math.isfinite(cell.value)


def _measured(table: Table) -> list[int]:
    """Return the columns in which the largest number of rows has a number, in order; empty if there is no number.

    An infinite perplexity is a number: without it, the top of the page would hide the length at which a model fails.
    """
    counts = [sum(row.cells[at].value is not None for row in table.rows) for at in range(len(table.header) - 1)]
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
    measured = {row.name: row.cells[column] for row in table.rows if row.cells[column].value is not None}
    if len(measured) == 1:
        (label,) = measured
        return _single(table, column, label, measure)
    cells = {label: cell for label, cell in measured.items() if _finite(cell)}
    infinite = [label for label in measured if label not in cells]
    parts = [_comparison(cells, measure, options.members, options.baseline)] if cells else []
    if infinite:
        name = infinite[0] if len(infinite) == 1 else f"{len(infinite)} labels"
        parts.append(f"{name} {'has' if len(infinite) == 1 else 'have'} no finite {measure.quantity}")
    pairs = _pairs(cells, measure)
    return f"At {_place(table, column)}, {'; '.join(parts)}.", _basis(cells, pairs)


def _basis(cells: Mapping[str, TableCell], pairs: Sequence[tuple[TableCell, TableCell]]) -> str:
    """Return how the pairs were tested, and for which labels a test does not cover other seeds."""
    if not pairs:
        return ""
    untested = sum(not testable(*pair) for pair in pairs)
    needed = f"a test needs 95% intervals, or the losses of at least {FEWEST_DOCUMENTS} documents"
    if untested == len(pairs):
        return f"Not tested: {needed}."
    count = len(pairs)
    corrected = f", corrected for {count} comparisons with the best number (Bonferroni)" if count > 1 else ""
    basis = f"Tested with 95% intervals{corrected}."
    if untested:
        basis += f" Not tested: {untested} of them, because {needed}."
    single = [label for label, cell in cells.items() if (cell.seeds or 1) == 1]
    if len(single) == len(cells):
        return f"{basis} There is one seed for each model, so the test does not cover other seeds."
    names = " and ".join(single) if len(single) < 3 else f"{len(single)} labels with one seed"
    return f"{basis} The test does not cover other seeds of {names}." if single else basis


def _single(table: Table, column: int, label: str, measure: Measure) -> tuple[str, str]:
    """Return the sentence on a single label, its first against its last length, and how it was tested."""
    cells = next(row.cells for row in table.rows if row.name == label)
    first, end = next((at for at, cell in enumerate(cells) if _finite(cell)), column), cells[column]
    start, place = cells[first], _place(table, column)
    known = f"{label} has a {measure.quantity} of {_number(start)} at {_place(table, first)}"
    if not _finite(end):
        none = f"no finite {measure.quantity} at {place}."
        return (f"{label} has {none}" if first == column else f"{known}, and {none}"), ""
    if first == column:
        return f"{known}.", ""
    places, basis = f"{_place(table, first)}, and {place}", _basis({label: end}, [(start, end)])
    if not differ_significantly(start, end):
        numbers = f"{_number(start)} and {_number(end)}"
        return f"No difference in {measure.quantity} of {label} is shown between {places}: {numbers}.", basis
    verb, digits = "falls" if (end.value or 0.0) < (start.value or 0.0) else "rises", _digits(start, end)
    numbers = f"from {_number(start, digits)} to {_number(end, digits)}"
    return f"The {measure.quantity} of {label} {verb} {numbers} between {places}.", basis


DIGITS = range(2, 7)
"""Digits after the decimal point: the fewest that show a difference."""


def _digits(one: TableCell, other: TableCell) -> int:
    return next((count for count in DIGITS if _number(one, count) != _number(other, count)), DIGITS[-1])


def _number(cell: TableCell, digits: int = DIGITS[0]) -> str:
    assert cell.value is not None
    return decimal(cell.value, digits)


def _order(cells: Mapping[str, TableCell], measure: Measure) -> list[str]:
    return sorted(cells, key=lambda label: cells[label].value or 0.0, reverse=not measure.lowest)


def _pairs(cells: Mapping[str, TableCell], measure: Measure) -> list[tuple[TableCell, TableCell]]:
    """Return the best number with each of the others."""
    order = [cells[label] for label in _order(cells, measure)]
    return [(order[0], other) for other in order[1:]]


def _comparison(
    cells: Mapping[str, TableCell], measure: Measure, members: Mapping[str, Member], baseline: str | None
) -> str:
    """Return the statement on several labels: the best, those that do not differ from it, and one that does."""
    best, *others = order = _order(cells, measure)
    if not others:
        return f"{best} has a {measure.quantity} of {_number(cells[best])}"
    worse = [label for label in others if differ_significantly(cells[best], cells[label], len(others))]
    tied = [label for label in others if label not in worse]
    if not worse:
        numbers = f"{_number(cells[order[0]])} to {_number(cells[order[-1]])}"
        return f"no difference in {measure.quantity} is shown between {len(cells)} labels ({numbers})"
    end = "lowest" if measure.lowest else "highest"
    digits = _digits(cells[best], cells[worse[0]])
    parts = [f"{best} has the {end} {measure.quantity}, {_number(cells[best], digits)}"]
    if tied:
        shown = tied if len(tied) < 3 else [label for label in tied if label == baseline]
        names = [f"{label} ({_number(cells[label], digits)})" for label in shown]
        if more := len(tied) - len(shown):
            names.append(f"{more} {'other labels' if shown else 'labels'}")
        parts.append(f"no difference from {' and '.join(names)} is shown")
    other = _beaten(worse, cells, members, best, baseline)
    parts.append(f"{other[0]} has {_number(cells[other[1]], digits)}")
    return "; ".join(parts)


def _beaten(
    worse: Sequence[str], cells: Mapping[str, TableCell], members: Mapping[str, Member], best: str, baseline: str | None
) -> tuple[str, str]:
    """Return the name of a label that is worse than the best: the baseline, a model as trained, or the next label.

    The second value is the label itself.
    """
    trained = [label for label in cells if not members[label].variant]
    if baseline is not None and baseline in worse:
        return f"the baseline {baseline}", baseline
    if members[best].variant and trained and all(label in worse for label in trained):
        first = next(label for label in worse if label in trained)
        name = "the model as trained" if len(trained) == 1 else "the best model as trained"
        return f"{name}, {first},", first
    return f"the next label, {worse[0]},", worse[0]


def _small(table: Table, columns: Sequence[int], measure: Measure) -> Table:
    """Return the first and the last of the columns, with the best label of the last column first.

    Bold numbers are tested as the sentence is, with correction for several comparisons.
    """
    chosen = sorted({columns[0], columns[-1]})
    header = (table.header[0], *(table.header[at + 1] for at in chosen))
    sign = 1.0 if measure.lowest else -1.0

    def place(row: TableRow) -> float:
        cell = row.cells[chosen[-1]]
        return sign * (cell.value or 0.0) if _finite(cell) else math.inf

    rows = [replace(row, cells=tuple(row.cells[at] for at in chosen)) for row in sorted(table.rows, key=place)]
    caption = f"{measure.quantity[0].upper()}{measure.quantity[1:]} at {' and '.join(header[1:])} tokens"
    notes = tuple(note for note in table.notes if note.startswith(("*", MARK)))
    return Table("headline", caption, header, tuple(mark_best(rows, measure.lowest, corrected=True)), notes)
