"""The top of a report: a sentence that the report's numbers support, the plot of these numbers, and a small table."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_coca.evaluation.contrasts import level_text, simultaneous
from megatron_coca.evaluation.labels import in_sentence
from megatron_coca.evaluation.report.document import Headline, Measure, Section, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import MARK, decimal
from megatron_coca.evaluation.report.names import explained
from megatron_coca.evaluation.report.plots.looks import Member
from megatron_coca.evaluation.report.result_tables import ReportOptions, differ_significantly, mark_best, testable
from megatron_coca.evaluation.statistics import FEWEST_DOCUMENTS

MOST_ROWS = 8
"""Largest number of rows of the small table, unless the sentence names more labels."""


def headline(sections: Sequence[Section], options: ReportOptions) -> Headline | None:
    """Return the top of a report, or None if no table has numbers for a sentence."""
    ordered = sorted(sections, key=lambda section: section.sentence)
    known = []
    for block in (block for section in ordered for block in section.blocks if block.tables):
        measure = block.tables[0].measure
        if measure is not None and _measured(table := _ours(block.tables[0], measure)):
            known.append((measure, table, block))
    if not known:
        return None
    measure, table, block = next((each for each in known if _learned(each[1], each[0])), known[0])
    columns = _measured(table)
    sentence, basis, told = _claim(table, columns[-1], measure, options)
    if "no significant difference" in sentence.lower():
        basis += " No significant difference: the test cannot tell these numbers apart."
    if block.heading:  # there are other groups of results, such as those on other documents
        basis = f"{block.heading}. {basis}".strip()
    sentence, basis, told = (options.claim, "", measure) if options.claim else (sentence, basis, told)
    small = _small(_shown(table, measure, told), columns, measure, sentence, options.members)
    names = explained((options.members[row.name] for row in table.rows), sentence)
    return Headline(sentence, basis, small, next(iter(block.figures), None), names)


def _learned(table: Table, measure: Measure) -> bool:
    values = [cell.value for row in table.rows for cell in row.cells if cell.value is not None]
    return not all(value < measure.least for value in values)  # NaN counts as learned, so that the page shows it


def _ours(table: Table, measure: Measure) -> Table:
    """Return the part of a table that a measure is about, without published rows. Its rows are named by label only."""
    rows = [row for row in table.rows if not row.published and row.name.startswith(measure.prefix)]
    named = [replace(row, name=row.name.removeprefix(measure.prefix)) for row in rows]
    if (at := measure.column) is None:
        return replace(table, rows=tuple(named))
    chosen = tuple(replace(row, cells=row.cells[at : at + 1]) for row in named)
    return replace(table, header=(table.header[0], table.header[at + 1]), rows=chosen)


def _finite(cell: TableCell) -> bool:
    return cell.value is not None and math.isfinite(cell.value)


def _measured(table: Table) -> list[int]:
    """Return the indices of the columns with the most numbers; empty if no column has a number.

    An infinite perplexity counts as a number. Otherwise the top of the page would hide the length at which a model
    fails.
    """
    counts = [sum(row.cells[at].value is not None for row in table.rows) for at in range(len(table.header) - 1)]
    most = max(counts, default=0)
    return [at for at, count in enumerate(counts) if count == most > 0]


def _length(head: str) -> int:
    return int(head.rstrip("*"))


def _place(table: Table, column: int, measure: Measure) -> str:
    """Return a column's length in words: `at 1,024 tokens, 16 times the training length`; empty if it has no length."""
    heads = table.header[1:]
    if not heads[column].rstrip("*").isdecimal():
        return f"at a length of {heads[column]}" if heads[column][:1].isdecimal() else ""
    length, trained = _length(heads[column]), {_length(head) for head in heads if head.endswith("*")}
    if len(trained) != 1 or len(measure.trained) > 1:
        return f"at {length:,} tokens"
    times = length / trained.pop()
    return f"at {length:,} tokens, " + ("the training length" if times == 1 else f"{times:g} times the training length")


Claim = tuple[str, str, Measure]
"""A sentence, a text on how it was tested, and the measure with the number of digits in the sentence."""


def _claim(table: Table, column: int, measure: Measure, options: ReportOptions) -> Claim:
    """Return the claim about the numbers in one column."""
    measured = {row.name: row.cells[column] for row in table.rows if row.cells[column].value is not None}
    if len(measured) == 1:
        (label,) = measured
        return _single(table, column, label, measure)
    cells = {label: cell for label, cell in measured.items() if _finite(cell)}
    infinite = [label for label in measured if label not in cells]
    parts, told = [], measure
    if cells:
        statement, told = _comparison(cells, measure, options.members, options.baseline)
        parts.append(statement)
    if infinite:
        name = in_sentence(infinite[0]) if len(infinite) == 1 else f"{len(infinite)} labels"
        parts.append(f"{name} {'has' if len(infinite) == 1 else 'have'} no finite {measure.quantity}")
    pairs = _pairs(cells, measure)
    sentence = ", ".join(filter(None, (_place(table, column, measure), "; ".join(parts))))
    return f"{_capital(sentence)}.", _basis(cells, pairs), told


def _capital(text: str) -> str:
    """Return a text with a capital at its start, unless it starts with a label."""
    return text[0].upper() + text[1:] if text.startswith(("at ", "no ")) else text


def _basis(cells: Mapping[str, TableCell], pairs: Sequence[tuple[TableCell, TableCell]]) -> str:
    """Return a text that says how the pairs were tested, and for which labels the test does not cover other seeds."""
    if not pairs:
        return ""
    untested = sum(not testable(*pair) for pair in pairs)
    needed = f"a test needs 95% intervals, or the losses of at least {FEWEST_DOCUMENTS} documents"
    if untested == len(pairs):
        return f"Not tested: {needed}."
    count = len(pairs)
    basis = "Tested with 95% intervals."
    if count > 1:
        basis = (
            f"Tested with {level_text(simultaneous(count))} intervals: 5% for {count} comparisons with the best number "
            "together (Bonferroni). The intervals in tables and plots are not corrected (95%)."
        )
    if untested:
        basis += f" Not tested: {untested} of them, because {needed}."
    single = [label for label, cell in cells.items() if (cell.seeds or 1) == 1]
    if len(single) == len(cells):
        return f"{basis} There is one seed for each model, so the test does not cover other seeds."
    names = " and ".join(single) if len(single) < 3 else f"{len(single)} labels with one seed"
    return f"{basis} The test does not cover other seeds of {names}." if single else basis


def _single(table: Table, column: int, label: str, measure: Measure) -> Claim:
    """Return the claim about a single label, which compares its numbers at the first and the last length."""
    cells = next(row.cells for row in table.rows if row.name == label)
    first, end = next((at for at, cell in enumerate(cells) if _finite(cell)), column), cells[column]
    start, place = cells[first], _place(table, column, measure)
    label = in_sentence(label)
    known = f"{label} has a {measure.quantity} of {_number(start, measure)} {_place(table, first, measure)}".rstrip()
    if not _finite(end):
        none = f"no finite {measure.quantity} {place}."
        return (f"{label} has {none}" if first == column else f"{known}, and {none}"), "", measure
    if first == column:
        return f"{known}.", "", measure
    basis = _basis({label: end}, [(start, end)])
    places = f"{_place(table, first, measure)}, and {_number(end, measure)} {place}"
    if not testable(start, end):
        text = f"{label} has a {measure.quantity} of {_number(start, measure)} {places}; this was not tested."
        return text, basis, measure
    if not differ_significantly(start, end):
        text = f"No significant difference in {measure.quantity} of {label} is shown"
        return f"{text}: {_number(start, measure)} {places}.", basis, measure
    verb, measure = "falls" if (end.value or 0.0) < (start.value or 0.0) else "rises", _exact(measure, start, end)
    first_place, last_place = (
        f"{_number(start, measure)} {_place(table, first, measure)}",
        f"{_number(end, measure)} {place}",
    )
    return f"The {measure.quantity} of {label} {verb} from {first_place}, to {last_place}.", basis, measure


MOST_DIGITS = 6


def _exact(measure: Measure, one: TableCell, other: TableCell) -> Measure:
    """Return the measure with the fewest digits after the decimal point that make the two numbers look different."""
    found = [replace(measure, digits=digits) for digits in range(measure.digits, MOST_DIGITS + 1)]
    return next((each for each in found if _number(one, each) != _number(other, each)), found[-1])


def _number(cell: TableCell, measure: Measure) -> str:
    assert cell.value is not None
    return decimal(cell.value, measure.digits) + measure.unit


def _shown(table: Table, measure: Measure, told: Measure) -> Table:
    """Return the table with as many decimal places as the sentence, if the sentence has more than the table."""
    if told.digits == measure.digits:
        return table

    def again(cell: TableCell) -> TableCell:
        if not _finite(cell):
            return cell
        return replace(cell, text=cell.text.replace(_number(cell, measure), _number(cell, told), 1))

    return replace(table, rows=tuple(replace(row, cells=tuple(map(again, row.cells))) for row in table.rows))


def _order(cells: Mapping[str, TableCell], measure: Measure) -> list[str]:
    return sorted(cells, key=lambda label: cells[label].value or 0.0, reverse=not measure.lowest)


def _pairs(cells: Mapping[str, TableCell], measure: Measure) -> list[tuple[TableCell, TableCell]]:
    """Return pairs of the best number and each other number."""
    order = [cells[label] for label in _order(cells, measure)]
    return [(order[0], other) for other in order[1:]]


def _comparison(
    cells: Mapping[str, TableCell], measure: Measure, members: Mapping[str, Member], baseline: str | None
) -> tuple[str, Measure]:
    """Return a statement that compares labels, and the measure with the number of digits in the statement.

    The statement names the best label, labels that do not differ significantly from it, and one label that does.
    """
    best, *others = order = _order(cells, measure)
    if not others:
        return f"{in_sentence(best)} has a {measure.quantity} of {_number(cells[best], measure)}", measure
    if not any(testable(cells[best], cells[label]) for label in others):
        name, other = _beaten(others, cells, members, best, baseline)
        number = _number(cells[other], measure)
        has = "the same when rounded" if number == _number(cells[best], measure) else number
        return f"{_best(best, cells, measure)}; {name} has {has}; this difference was not tested", measure
    worse = [label for label in others if differ_significantly(cells[best], cells[label], len(others))]
    tied = [label for label in others if label not in worse]
    if not worse:
        numbers = f"{_number(cells[order[-1]], measure)} to {_number(cells[order[0]], measure)}"
        if measure.lowest:
            numbers = f"{_number(cells[order[0]], measure)} to {_number(cells[order[-1]], measure)}"
        text = f"no significant difference in {measure.quantity} is shown between {len(cells)} labels ({numbers})"
        return text, measure
    measure = _exact(measure, cells[best], cells[worse[0]])
    parts = [_best(best, cells, measure)]
    if tied:
        shown = tied if len(tied) < 3 else [label for label in tied if label == baseline]
        names = [f"{in_sentence(label)} ({_number(cells[label], measure)})" for label in shown]
        if more := len(tied) - len(shown):
            names.append(f"{more} {'other labels' if shown else 'labels'}")
        parts.append(f"no significant difference from {' and '.join(names)} is shown")
    name, other = _beaten(worse, cells, members, best, baseline)
    parts.append(f"{name} has {_number(cells[other], measure)}")
    return "; ".join(parts), measure


def _best(label: str, cells: Mapping[str, TableCell], measure: Measure) -> str:
    end = "lowest" if measure.lowest else "highest"
    return f"{in_sentence(label)} has the {end} {measure.quantity}, {_number(cells[label], measure)}"


def _beaten(
    worse: Sequence[str], cells: Mapping[str, TableCell], members: Mapping[str, Member], best: str, baseline: str | None
) -> tuple[str, str]:
    """Return a phrase for a label that is worse than the best one, and the label itself.

    The label is the baseline, a model as trained, or the next label.
    """
    trained = [label for label in cells if not members[label].variant]
    if baseline is not None and baseline in worse:
        return f"the baseline {in_sentence(baseline)}", baseline
    if members[best].variant and trained and all(label in worse for label in trained):
        first = next(label for label in worse if label in trained)
        name = "the model as trained" if len(trained) == 1 else "the best model as trained"
        return f"{name}, {in_sentence(first)},", first
    return f"the next label, {in_sentence(worse[0])},", worse[0]


def _small(
    table: Table, columns: Sequence[int], measure: Measure, sentence: str, members: Mapping[str, Member]
) -> Table:
    """Return a table of the first and the last of the columns. The best label in the last column comes first.

    Bold numbers are tested like the numbers in the sentence, with correction for several comparisons. If there are too
    many labels, those in the sentence are kept first, then models as trained, then the best of the remaining labels.
    """
    chosen = sorted({columns[0], columns[-1]})
    header = (table.header[0], *(table.header[at + 1] for at in chosen))
    sign = 1.0 if measure.lowest else -1.0

    def place(row: TableRow) -> float:
        cell = row.cells[chosen[-1]]
        return sign * (cell.value or 0.0) if _finite(cell) else math.inf

    rows = [replace(row, cells=tuple(row.cells[at] for at in chosen)) for row in sorted(table.rows, key=place)]
    marked = mark_best(rows, measure.lowest, corrected=True)
    named = [re.search(rf"(?<!\w){re.escape(row.name)}(?!\w| \+)", sentence) is not None for row in marked]
    importance = [(not told, bool(members[row.name].variant)) for row, told in zip(marked, named, strict=True)]
    chosen = sorted(range(len(marked)), key=importance.__getitem__)[: max(MOST_ROWS, sum(named))]
    kept = [marked[at] for at in sorted(chosen)]
    caption = f"{measure.quantity[0].upper()}{measure.quantity[1:]}"
    if lengths := [head for head in header[1:] if head.rstrip("*").isdecimal()]:
        caption += f" at {' and '.join(lengths)} tokens"
    notes = tuple(note for note in table.notes if note.startswith(("*", MARK)))
    if len(kept) < len(marked):
        notes += (f"{len(kept)} of {len(marked)} labels; the full table has all of them.",)
    return Table("headline", caption, header, tuple(kept), notes)
