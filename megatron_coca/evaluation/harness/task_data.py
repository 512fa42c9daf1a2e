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

SPLIT = "evaluated"
BLANK = "#idiom#"


@dataclass(frozen=True)
class Layout:
    """What a line of a task's file holds, and how it becomes documents with the index `gold` of the right choice.

    Attributes:
        fields: the names that a line must have.
        documents: raises KeyError, ValueError or IndexError where a value is not one of those published.
    """

    fields: tuple[str, ...]
    documents: Callable[[Row], list[Row]]


def _labelled(*labels: str) -> Callable[[Row], list[Row]]:
    return lambda row: [row | {"gold": labels.index(str(row["label"]))}]


def _inference(row: Row) -> list[Row]:
    """Pairs on which the annotators did not agree are marked `-` and left out, as the benchmark does."""
    return [] if row["label"] == "-" else _labelled("entailment", "neutral", "contradiction")(row)


def _idiom(row: Row) -> list[Row]:
    before, after = row["content"].split(BLANK)
    gold = int(row["answer"])
    row["candidates"][gold]
    return [{"before": before, "choices": [each + after for each in row["candidates"]], "gold": gold}]


def _reading(row: Row) -> list[Row]:
    context = row["context"] if isinstance(row["context"], str) else "\n".join(row["context"])
    return [row | {"context": context, "gold": row["choice"].index(row["answer"])}]


PAIR = ("sentence1", "sentence2", "label")
LAYOUTS: dict[str, Layout] = {
    "ax_b": Layout(PAIR, _labelled("entailment", "not_entailment")),
    "ax_g": Layout(("premise", "hypothesis", "label"), _labelled("entailment", "not_entailment")),
    "ocnli": Layout(PAIR, _inference),
    "cmnli": Layout(PAIR, _inference),
    "afqmc": Layout(PAIR, _labelled("0", "1")),
    "csl": Layout(("abst", "keyword", "label"), _labelled("0", "1")),
    "eprstmt": Layout(("sentence", "label"), _labelled("Negative", "Positive")),
    "chid": Layout(("content", "candidates", "answer"), _idiom),
    "c3": Layout(("context", "question", "choice", "answer"), _reading),
}
"""By the task's name."""


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
    """The documents of a task's file. Raises EvaluationError that names the line."""
    layout, found = LAYOUTS[task], []
    for number, row in _rows(task, path):
        missing = [name for name in layout.fields if name not in row]
        if missing:
            raise EvaluationError(
                f"{path}, line {number}: has no {', '.join(missing)}; a line of {task} has {', '.join(layout.fields)}"
            )
        try:
            found += [_only_texts(document) for document in layout.documents(row)]
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise EvaluationError(f"{path}, line {number}: is not a line of {task} ({error}); correct it") from error
    if not found:
        raise EvaluationError(
            f"{path}: has no document with a label; the test sets of CLUE have none, take the dev set"
        )
    return found


def _only_texts(document: Row) -> Row:
    """Texts, lists of texts and the gold index: what else a line has may differ in type from line to line."""
    kept = (str, list, int)
    return {name: value for name, value in document.items() if isinstance(value, kept) and name != "label"}


def _rows(task: str, path: Path) -> Iterator[tuple[int, Row]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: the documents of task {task} cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EvaluationError(f"{path}, line {number}: is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise EvaluationError(f"{path}, line {number}: is not a JSON object; see docs/harness.md for the format")
        yield number, row
