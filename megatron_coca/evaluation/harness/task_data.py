"""Documents of the tasks in `tasks/`: files of the user's, in the form in which SuperGLUE, CLUE and FewCLUE publish them.

The harness calls `load`, which the task files name, with what `--task-data` said.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_coca.evaluation.harness.layouts import LAYOUTS, ForeignValue, Row
from megatron_coca.evaluation.results import EvaluationError

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
