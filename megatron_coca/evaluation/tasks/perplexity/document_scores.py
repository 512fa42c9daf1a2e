"""Scores of single documents. The parts of a divided evaluation write them, and the command without a part merges them.

A score is a small file in `.RESULT.scores/DIGEST`, next to the result file. DIGEST identifies the measurement, so a
score of another model, document or device is never used.
"""

import json
import shutil
from hashlib import sha256
from pathlib import Path

from megatron_coca.evaluation.results import EvaluationError, Meter, Record, Result, read_record, write_atomically


class DocumentRecord(Record):
    """The score of a document for one window, and the time and memory that its measurement took."""

    nll: float
    correct: int
    seconds: float
    peak_memory_bytes: int | None


class DocumentScores:
    """The scores of the documents of one result file. If `path` is None, nothing is kept."""

    def __init__(self, path: Path | None, empty: Result) -> None:
        identity = json.dumps(empty.measurement(), sort_keys=True)
        self._all = None if path is None else path.with_name(f".{path.name}.scores")
        self._folder = None if self._all is None else self._all / sha256(identity.encode()).hexdigest()[:24]

    def get(self, window: int, document: int) -> tuple[float, int, Meter] | None:
        """Return (nll, correct predictions, time and memory), or None if the document has no valid score."""
        path = self._path(window, document)
        if path is None or not path.is_file():
            return None
        try:
            found = read_record(path, DocumentRecord, "the score of a document")
        except EvaluationError:  # the file is damaged, so the score is computed again
            return None
        return found.nll, found.correct, Meter(found.seconds, found.peak_memory_bytes)

    def put(self, window: int, document: int, nll: float, correct: int, meter: Meter) -> None:
        path = self._path(window, document)
        assert path is not None, "a part has an output"
        record = DocumentRecord(
            nll=nll, correct=correct, seconds=meter.seconds, peak_memory_bytes=meter.peak_memory_bytes
        )
        write_atomically(path, record.model_dump_json().encode())

    def remove(self) -> None:
        """Remove all scores of the result file, which must be complete."""
        if self._all is not None:
            shutil.rmtree(self._all, ignore_errors=True)

    def _path(self, window: int, document: int) -> Path | None:
        return None if self._folder is None else self._folder / f"{window}_{document}.score"
