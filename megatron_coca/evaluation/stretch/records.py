"""The result file of `megatron-coca stretch`, from which the same command resumes."""

import math
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, JsonValue

from megatron_coca.evaluation.results import (
    CheckpointRecord,
    EnvironmentRecord,
    EvaluationError,
    Record,
    differences,
    read_record,
    write_record,
)
from megatron_coca.evaluation.statistics import exponential
from megatron_coca.evaluation.stretch.measuring import CaseMargin

RESULTS = "results.json"
HOLDS = 1.10
"""A method holds at a length if its perplexity is at most this many times that of the plain model at 1x."""


class MethodRecord(Record):
    name: str
    overrides: dict[str, JsonValue]  # the config keys that the method changes, with their values
    error: str | None = None  # why the model does not support the method


class Settings(Record):
    """What is measured. A result file with other settings is not resumed."""

    checkpoint: CheckpointRecord
    tokenizer: str | None
    environment: EnvironmentRecord
    documents: str  # sha256 of their tokens
    count: int  # number of documents
    scored: int  # tokens per document
    start: int | None  # the token with which the inputs begin
    chat: bool
    to: float
    seed: int  # of the hidden facts
    text: str  # `measuring.PROTOCOL`


class Measurement(Record):
    """Results of one method at one length. Until they are `complete`, only a resumed run reads them."""

    method: str
    length: int
    seconds: float
    complete: bool

    @property
    def key(self) -> tuple[str, int]:
        return self.method, self.length


class Losses(Measurement):
    """Sums over the scored tokens of each document, in nats."""

    nlls: list[float] = Field(min_length=1)


class Retrieval(Measurement):
    """Cases in the order of their numbers."""

    cases: list[CaseMargin] = Field(min_length=1)


MeasurementType = TypeVar("MeasurementType", bound=Measurement)


class StretchResult(Record):
    settings: Settings
    methods: list[MethodRecord]
    losses: list[Losses] = []
    retrieval: list[Retrieval] = []
    left_out: list[str] = []

    @property
    def trained(self) -> int:
        return self.settings.checkpoint.seq_length

    def limited_to(self, names: Container[str]) -> "StretchResult":
        """Return the result without supported methods other than these."""
        kept = [method for method in self.methods if method.name in names or method.error is not None]
        return self.model_copy(update={"methods": kept})

    def loss(self, method: str, length: int) -> Losses | None:
        return _find(self.losses, method, length, complete=True)

    def found(self, method: str, length: int) -> Retrieval | None:
        return _find(self.retrieval, method, length, complete=True)

    def begun_loss(self, method: str, length: int) -> Losses | None:
        """Return the losses even if they are not complete."""
        return _find(self.losses, method, length)

    def begun_retrieval(self, method: str, length: int) -> Retrieval | None:
        """Return the cases even if they are not complete."""
        return _find(self.retrieval, method, length)

    def perplexity(self, method: str, length: int) -> float | None:
        loss = self.loss(method, length)
        return None if loss is None else exponential(math.fsum(loss.nlls) / (len(loss.nlls) * self.settings.scored))

    def margin(self, method: str, length: int) -> float | None:
        found = self.found(method, length)
        return None if found is None else math.fsum(case.margin for case in found.cases) / len(found.cases)

    def lengths(self) -> list[int]:
        return sorted({each.length for each in (*self.losses, *self.retrieval) if each.complete})

    def reach(self, method: str) -> int:
        """Return the greatest length up to which the method holds, or 0.

        The perplexity must not be much higher than that of the plain model at 1x, and the margin must be above 0. A
        length that was not measured ends the search.
        """
        base, reached = self.perplexity(self.methods[0].name, self.trained), 0
        for length in self.lengths():
            perplexity = self.perplexity(method, length)
            if base is None or perplexity is None or not perplexity <= HOLDS * base:
                break
            if not self._finds_facts(method, length):
                break
            reached = length
        return reached

    def _finds_facts(self, method: str, length: int) -> bool:
        """Return True if the margin is above 0, or no method has facts at the length.

        Facts at 1x are measured last. If they are missing, those of the plain model count instead.
        """
        margin = self.margin(method, length)
        if margin is None and length == self.trained:
            margin = self.margin(self.methods[0].name, length)
        if margin is None:
            return length == self.trained or all(self.found(each.name, length) is None for each in self.methods)
        return margin > 0  # not if it is NaN

    def ranked(self) -> list[str]:
        """Return the methods, best first: by reach, then by margins and perplexities from the longest length."""

        def rank(name: str) -> tuple[float, ...]:
            measured = [length for length in self.lengths() if self.loss(name, length) or self.found(name, length)]
            margins = [_known(self.margin(name, length), -math.inf) for length in reversed(self.lengths())]
            perplexities = [_known(self.perplexity(name, length), math.inf) for length in reversed(self.lengths())]
            return self.reach(name), max(measured, default=0), *margins, *(-each for each in perplexities)

        names = [method.name for method in self.methods if method.error is None]
        return sorted(names, key=rank, reverse=True)


def _known(value: float | None, worst: float) -> float:
    return worst if value is None or math.isnan(value) else value


def _find(given: Sequence[MeasurementType], method: str, length: int, complete: bool = False) -> MeasurementType | None:
    return next((each for each in given if each.key == (method, length) and each.complete >= complete), None)


class ResultFile:
    """The result file at `path`, written after every input. Only one process can use it at a time."""

    def __init__(self, path: Path, settings: Settings, methods: Sequence[MethodRecord], overwrite: bool) -> None:
        """Resume an existing file with the same settings. Raises EvaluationError for a file with other settings."""
        self.path, self.result = path, StretchResult(settings=settings, methods=list(methods))
        if path.exists() and not overwrite:
            try:
                earlier = read_record(path, StretchResult, "a result of `megatron-coca stretch`")
            except EvaluationError as error:
                raise EvaluationError(f"{error}; remove the file, or replace it with --overwrite") from error
            if differing := ", ".join(differences(_identity(earlier.settings), _identity(settings))):
                raise EvaluationError(
                    f"{path}: contains another measurement (different {differing}); name another --output, or replace "
                    "it with --overwrite"
                )
            known = {method.name: method for method in (*earlier.methods, *methods)}
            self.result = earlier.model_copy(update={"methods": list(known.values()), "left_out": []})
        self.write()

    def write(self, **changes: Any) -> None:
        self.result = self.result.model_copy(update=changes)
        write_record(self.path, self.result)

    def put_loss(self, loss: Losses) -> None:
        """Add losses, or replace those of the same method and length."""
        self.write(losses=[*(each for each in self.result.losses if each.key != loss.key), loss])

    def put_retrieval(self, found: Retrieval) -> None:
        """Add cases, or replace those of the same method and length."""
        self.write(retrieval=[*(each for each in self.result.retrieval if each.key != found.key), found])


def _identity(settings: Settings) -> dict[str, Any]:
    return settings.model_dump(exclude={"checkpoint": {"path", "seed"}})
