"""Documents of the tasks in `tasks/`: files of the user's, in the form in which SuperGLUE, CLUE and FewCLUE publish them.

The harness calls `load`, which the task files name, with what `--task-data` said.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_coca.evaluation.results import EvaluationError

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

SPLIT = "evaluated"
SHOWN = 60
"""Characters of a value that an error shows."""


def load(task: str, task_data: str | None = None, **_: Any) -> dict[str, Any]:
    """The dataset of one task, as the harness wants it. Raises EvaluationError for a missing or foreign file."""
    from datasets import Dataset

    if task_data is None:
        raise EvaluationError(
            f"task {task}: its documents are not part of this project; put them into {task}.jsonl and name the folder "
            "with --task-data"
        )
    return {SPLIT: Dataset.from_list(read_documents(task, Path(task_data) / f"{task}.jsonl"))}


def read_documents(task: str, path: Path) -> list[Row]:
    """The documents of a task's file. Raises EvaluationError that names the line and the field."""
    layout, found = LAYOUTS[task], []
    for number, row in _rows(task, path):
        missing = [name for name in layout.fields if name not in row]
        if missing:
            raise EvaluationError(
                f"{path}, line {number}: has no {', '.join(missing)}; a line of {task} has {', '.join(layout.fields)}"
            )
        for name, kind in layout.fields.items():
            if not kind.holds(row[name]):
                raise EvaluationError(f"{path}, line {number}: {name} is {_shown(row[name])}, and not {kind.words}")
        try:
            found += layout.documents(row)
        except ForeignValue as error:
            raise EvaluationError(f"{path}, line {number}: {error}; correct it") from error
    if not found:
        raise EvaluationError(
            f"{path}: has no document with a label; the test sets of CLUE have none, take the dev set"
        )
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _rows(task: str, path: Path) -> Iterator[tuple[int, Row]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: the documents of task {task} cannot be read ({error})") from error
    # Texts may hold U+2028 and its like, which splitlines() takes for ends of lines.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EvaluationError(f"{path}, line {number}: is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise EvaluationError(f"{path}, line {number}: is not a JSON object; see docs/harness.md for the format")
        yield number, row
