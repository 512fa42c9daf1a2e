"""Documents of the tasks in `tasks/`: the user's files, in the published formats of SuperGLUE, CLUE and FewCLUE.

The harness calls `load`, which the task files name, with the value of `--task-data`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.evaluation.results import EvaluationError

Row = dict[str, Any]

BLANK = "#idiom#"
SPLIT = "evaluated"
MAX_SHOWN = 60
"""Characters of a value in an error message."""


class Field(NamedTuple):
    """The values that a field may have, in words and as a test."""

    words: str
    accepts: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_lines(value: Any) -> bool:
    lines = value if isinstance(value, list) else [value]
    return all(isinstance(line, str) for line in lines) and any(map(_is_text, lines))


TEXT = Field("a non-empty string", _is_text)
TEXTS = Field(
    "a list of non-empty strings", lambda value: isinstance(value, list) and value != [] and all(map(_is_text, value))
)
LINES = Field("a non-empty string, or a list of its lines", _are_lines)
INDEX = Field(
    "an index, counted from 0", lambda value: type(value) is int or (isinstance(value, str) and value.isdecimal())
)
BLANKED = Field(f"a string with {BLANK} once", lambda value: isinstance(value, str) and value.count(BLANK) == 1)


class Layout(NamedTuple):
    """The fields that a line must have (others are ignored), and how it becomes documents with the index `gold` of the
    right choice; `documents` raises ValueError for fields that contradict each other.
    """

    fields: dict[str, Field]
    documents: Callable[[Row], list[Row]]


def _labelled(fields: dict[str, Field], *labels: str, left_out: str | None = None) -> Layout:
    """Return a layout whose `label` is the right choice; lines with the label `left_out` are no documents."""
    permitted = [*labels, *filter(None, [left_out])]
    label_field = Field(f"one of {', '.join(permitted)}", lambda value: str(value) in permitted)

    def documents(row: Row) -> list[Row]:
        label, others = str(row["label"]), {name: row[name] for name in fields}
        return [] if label == left_out else [others | {"gold": labels.index(label)}]

    return Layout(fields | {"label": label_field}, documents)


def _idiom(row: Row) -> list[Row]:
    before, after = row["content"].split(BLANK)
    gold, candidates = int(row["answer"]), row["candidates"]
    if not 0 <= gold < len(candidates):
        raise ValueError(f"answer is {gold}, and candidates has 0 to {len(candidates) - 1}")
    return [{"before": before, "choices": [candidate + after for candidate in candidates], "gold": gold}]


def _reading(row: Row) -> list[Row]:
    context = row["context"] if isinstance(row["context"], str) else "\n".join(row["context"])
    if row["answer"] not in row["choice"]:
        raise ValueError(f"answer is {row['answer']!r}, which is not in choice")
    gold = row["choice"].index(row["answer"])
    return [{"context": context, "question": row["question"], "choice": row["choice"], "gold": gold}]


PAIR = {"sentence1": TEXT, "sentence2": TEXT}
INFERENCE = _labelled(PAIR, "entailment", "neutral", "contradiction", left_out="-")
"""Pairs that the annotators disagree on are marked `-` and left out, as in the benchmark."""

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


# The harness dumps the source of `load` into a task's configuration, and result files hold its hash: any change to the
# text of this function would make earlier results another measurement.
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
    """Read the documents of a task's file. Raises EvaluationError that names the line and the field."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: the documents of task {task} cannot be read ({error})") from error
    layout = LAYOUTS[task]
    documents: list[Row] = []
    # Not splitlines(): strings may hold U+2028 and others that it takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        at = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EvaluationError(f"{at}: is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise EvaluationError(f"{at}: is not a JSON object; see docs/harness.md for the format")
        if missing := [name for name in layout.fields if name not in row]:
            raise EvaluationError(f"{at}: has no {', '.join(missing)}; a line of {task} has {', '.join(layout.fields)}")
        for name, field in layout.fields.items():
            if not field.accepts(row[name]):
                shown = json.dumps(row[name], ensure_ascii=False)
                shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
                raise EvaluationError(f"{at}: {name} is {shown}, not {field.words}")
        try:
            documents += layout.documents(row)
        except ValueError as error:
            raise EvaluationError(f"{at}: {error}; correct it") from error
    if not documents:
        raise EvaluationError(
            f"{path}: has no document with a label; the test sets of CLUE have none, take the dev set"
        )
    return documents
