"""`megatron-coca evaluate lm-eval --log-samples`: write documents, prompts and answers in the harness's format."""

import json
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megatron_coca.evaluation.results import Record, write_atomically


class LoggedFile(Record):
    """A log of samples; `file` is relative to the folder of the result file."""

    file: str
    sha256: str

    def intact(self, result: Path) -> bool:
        """Return True if the log that belongs to the result file `result` exists with this content."""
        try:
            return sha256((result.parent / self.file).read_bytes()).hexdigest() == self.sha256
        except OSError:
            return False


def log_samples(
    result: Path,
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    cut: Mapping[str, Collection[int]],
    unfinished: Mapping[str, Collection[int]],
) -> dict[str, LoggedFile]:
    """Write the samples of each task to a separate file, in a folder named after the result file `result`.

    `cut` maps each task to its documents with a truncated prompt. `unfinished` maps each task to its documents with an
    answer that had not ended after the task's number of new tokens. Raises EvaluationError if a file cannot be written.
    """
    logged = {}
    for task, rows in samples.items():
        name = f"{result.name.removesuffix('.json')}.samples/{quote(task, safe='')}.jsonl"
        ordered = sorted(rows, key=lambda row: (row["doc_id"], row["filter"]))
        marked = {"cut": cut.get(task, ()), "unfinished": unfinished.get(task, ())}
        marks = [{mark: row["doc_id"] in documents for mark, documents in marked.items()} for row in ordered]
        content = "".join(map(_line, ordered, marks)).encode()
        write_atomically(result.parent / name, content)
        logged[task] = LoggedFile(file=name, sha256=sha256(content).hexdigest())
    return logged


def _line(sample: Mapping[str, Any], marks: Mapping[str, bool]) -> str:
    """Return a sample with its `marks` as one line of JSON in the harness's format.

    The mark `cut` is true if a prompt was truncated, and `unfinished` is true if an answer had not ended.
    """
    from lm_eval.utils import handle_non_serializable, sanitize_list

    arguments = {
        f"gen_args_{number}": {f"arg_{place}": value for place, value in enumerate(values)}
        for number, values in enumerate(sample["arguments"])
    }
    row = {**deepcopy(dict(sample)), "arguments": arguments, "target": str(sample["target"]), **marks}
    row |= {name: sanitize_list(sample[name]) for name in ("resps", "filtered_resps")}
    return json.dumps(row, default=handle_non_serializable, ensure_ascii=False) + "\n"
