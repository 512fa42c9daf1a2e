"""What the files of the tasks in `tasks/` hold, as SuperGLUE, CLUE and FewCLUE publish them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

BLANK = "#idiom#"


@dataclass(frozen=True)
class Kind:
    """What a field may hold, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _are_lines(value: Any) -> bool:
    lines = value if isinstance(value, list) else [value]
    return all(isinstance(line, str) for line in lines) and any(map(_is_text, lines))


def _is_index(value: Any) -> bool:
    return type(value) is int or (isinstance(value, str) and value.isdecimal())


TEXT = Kind("a text that is not empty", _is_text)
TEXTS = Kind("a list of texts that are not empty", _are_texts)
LINES = Kind("a text that is not empty, or a list of its lines", _are_lines)
INDEX = Kind("an index, counted from 0", _is_index)
BLANKED = Kind(f"a text with {BLANK} once", lambda value: isinstance(value, str) and value.count(BLANK) == 1)


class ForeignValue(ValueError):
    """Fields that do not fit each other; the message names them."""


@dataclass(frozen=True)
class Layout:
    """What a line of a task's file holds, and how it becomes documents with the index `gold` of the right choice.

    Attributes:
        fields: the names that a line must have, and what they hold; others are ignored.
        documents: of the line's fields, each of its kind; raises ForeignValue.
    """

    fields: dict[str, Kind]
    documents: Callable[[Row], list[Row]]


def _labelled(texts: dict[str, Kind], *labels: str, left_out: str | None = None) -> Layout:
    """Lines whose `label` is the right choice; those with `left_out` are no documents."""
    permitted = [*labels, *filter(None, [left_out])]
    kind = Kind(f"one of {', '.join(permitted)}", lambda value: str(value) in permitted)

    def documents(row: Row) -> list[Row]:
        label, others = str(row["label"]), {name: row[name] for name in texts}
        return [] if label == left_out else [others | {"gold": labels.index(label)}]

    return Layout(texts | {"label": kind}, documents)


def _idiom(row: Row) -> list[Row]:
    before, after = row["content"].split(BLANK)
    gold, candidates = int(row["answer"]), row["candidates"]
    if not 0 <= gold < len(candidates):
        raise ForeignValue(f"answer is {gold}, and candidates has 0 to {len(candidates) - 1}")
    return [{"before": before, "choices": [each + after for each in candidates], "gold": gold}]


def _reading(row: Row) -> list[Row]:
    context = row["context"] if isinstance(row["context"], str) else "\n".join(row["context"])
    if row["answer"] not in row["choice"]:
        raise ForeignValue(f"answer is {row['answer']!r}, which is not in choice")
    gold = row["choice"].index(row["answer"])
    return [{"context": context, "question": row["question"], "choice": row["choice"], "gold": gold}]


PAIR = {"sentence1": TEXT, "sentence2": TEXT}
INFERENCE = _labelled(PAIR, "entailment", "neutral", "contradiction", left_out="-")
"""Pairs on which the annotators did not agree are marked `-` and left out, as the benchmark does."""

LAYOUTS: dict[str, Layout] = {
    "ax_b": _labelled(PAIR, "entailment", "not_entailment"),
    "ax_g": _labelled({"premise": TEXT, "hypothesis": TEXT}, "entailment", "not_entailment"),
    "ocnli": INFERENCE,
    "cmnli": INFERENCE,
    "afqmc": _labelled(PAIR, "0", "1"),
    "csl": _labelled({"abst": TEXT, "keyword": TEXTS}, "0", "1"),
    "eprstmt": _labelled({"sentence": TEXT}, "Negative", "Positive"),
    "chid": Layout({"content": BLANKED, "candidates": TEXTS, "answer": INDEX}, _idiom),
    "c3": Layout({"context": LINES, "question": TEXT, "choice": TEXTS, "answer": TEXT}, _reading),
}
"""By the task's name."""
