"""The result file of `megatron-coca stretch`, from which the same command resumes."""

import math
from collections.abc import Container, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, JsonValue

from megatron_coca.evaluation.results import (
    OPEN,
    CheckpointRecord,
    EnvironmentRecord,
    EvaluationError,
    Record,
    differences,
    read_record,
    write_record,
)
from megatron_coca.evaluation.statistics import exponential
from megatron_coca.evaluation.tasks.margin.task import CaseMargin

RESULTS = "results.json"
HOLDS = 1.10
"""A method holds at a length if its perplexity is at most this many times that of the plain model at 1x."""


class MethodRecord(Record):
    name: str
    overrides: dict[str, JsonValue]  # the config keys that the method changes, with their values
    error: str | None = None  # why the model does not support the method


class StretchSettings(Record):
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
    """Results of one method at one length, so far."""

    model_config = OPEN  # earlier versions also wrote whether it was complete

    method: str
    length: int
    seconds: float

    @property
    def key(self) -> tuple[str, int]:
        return self.method, self.length


class Losses(Measurement):
    """Sums over the scored tokens of the first documents, one window each, in nats."""

    nlls: list[float] = Field(min_length=1)


class Retrieval(Measurement):
    """Cases in the order of their numbers. Numbers are missing while more facts are measured."""

    cases: list[CaseMargin] = Field(min_length=1)


MeasurementType = TypeVar("MeasurementType", bound=Measurement)


class StretchResult(Record):
    settings: StretchSettings
    methods: list[MethodRecord]
    losses: list[Losses] = []
    retrieval: list[Retrieval] = []
    left_out: list[str] = []
    too_short: str = (
        ""  # if the budget was too short for one window and one fact of every method: a sentence that says so
    )

    @property
    def trained(self) -> int:
        return self.settings.checkpoint.seq_length

    @property
    def plain(self) -> str:
        """The name of the model without an extension, which is always the first."""
        return self.methods[0].name

    @property
    def supported(self) -> list[str]:
        return [method.name for method in self.methods if method.error is None]

    def limited_to(self, names: Container[str]) -> "StretchResult":
        """Return the result with only these of the supported methods."""
        kept = [method for method in self.methods if method.name in names or method.error is not None]
        return self.model_copy(update={"methods": kept})

    def loss(self, method: str, length: int) -> Losses | None:
        return _find(self.losses, method, length)

    def begun_retrieval(self, method: str, length: int) -> Retrieval | None:
        """Return all cases, including those after a missing number."""
        return _find(self.retrieval, method, length)

    def facts(self, method: str, length: int) -> list[CaseMargin]:
        """Return the cases before the first missing number, so that methods are compared by the same facts."""
        begun = self.begun_retrieval(method, length)
        numbered = enumerate(begun.cases if begun else ())
        return [case for _, case in takewhile(lambda pair: pair[0] == pair[1].number, numbered)]

    def margins(self, method: str, length: int) -> list[float]:
        """Return the margins of `facts` in nats."""
        return [case.margin for case in self.facts(method, length)]

    def token_losses(self, method: str, length: int) -> list[float]:
        """Return the loss of each window in nats per token."""
        loss = self.loss(method, length)
        return [] if loss is None else [nll / self.settings.scored for nll in loss.nlls]

    def loss_ratios(self, method: str, length: int) -> list[float]:
        """Return the logarithms of the perplexity relative to the plain model at 1x, one for each common window."""
        own, base = self.loss(method, length), self.loss(self.plain, self.trained)
        if own is None or base is None:
            return []
        pairs = zip(own.nlls, base.nlls, strict=False)  # one of them can have more windows
        return [(nll - other) / self.settings.scored for nll, other in pairs]

    def perplexity(self, method: str, length: int) -> float | None:
        """Return the perplexity. With fewer windows than the plain model at 1x, compute it from the ratio in common
        windows.
        """
        own, base = self.loss(method, length), self.loss(self.plain, self.trained)
        if own is None:
            return None
        if base is None or len(own.nlls) == len(base.nlls):
            return exponential(_mean(own.nlls) / self.settings.scored)
        return exponential(_mean(base.nlls) / self.settings.scored + _mean(self.loss_ratios(method, length)))

    def margin(self, method: str, length: int) -> float | None:
        margins = self.margins(method, length)
        return _mean(margins) if margins else None

    def share(self, method: str, length: int) -> float | None:
        """Return the share of the facts that greedy decoding finds."""
        cases = self.facts(method, length)
        return _mean([case.found for case in cases]) if cases else None

    def lengths(self) -> list[int]:
        facts = {each.length for each in self.retrieval if self.facts(*each.key)}
        return sorted({each.length for each in self.losses} | facts)

    def reach(self, method: str) -> int:
        """Return the greatest length up to which the method holds, or 0.

        The perplexity must not be much higher than that of the plain model at 1x, and the margin must be above 0. A
        length that was not measured ends the search.
        """
        base, reached = self.perplexity(self.plain, self.trained), 0
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

        If a method's facts at 1x are missing, the facts of the plain model count instead.
        """
        margin = self.margin(method, length)
        if margin is None and length == self.trained:
            margin = self.margin(self.plain, length)
        if margin is None:
            return length == self.trained or not any(self.facts(name, length) for name in self.supported)
        return margin > 0  # not if it is NaN

    def ranked(self) -> list[str]:
        """Return the methods, best first: by reach, then by the facts found, the margin and the perplexity there, and
        last by those of all lengths from the longest. Small differences mean nothing; `decision.decide` says which
        methods differ.
        """

        def at(name: str, length: int) -> tuple[float, float, float]:
            perplexity = _known(self.perplexity(name, length), math.inf)
            return _known(self.share(name, length), -1.0), _known(self.margin(name, length), -math.inf), -perplexity

        def rank(name: str) -> tuple[float, ...]:
            reach, lengths = self.reach(name), self.lengths()
            measured = [length for length in lengths if self.loss(name, length) or self.facts(name, length)]
            longest_first = [value for length in reversed(lengths) for value in at(name, length)]
            return reach, *at(name, reach), max(measured, default=0), *longest_first

        return sorted(self.supported, key=rank, reverse=True)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _known(value: float | None, worst: float) -> float:
    return worst if value is None or math.isnan(value) else value


def _find(given: Sequence[MeasurementType], method: str, length: int) -> MeasurementType | None:
    return next((each for each in given if each.key == (method, length)), None)


class ResultFile:
    """The result file at `path`, written after every input. Only one process can use it at a time."""

    def __init__(self, path: Path, settings: StretchSettings, methods: Sequence[MethodRecord], overwrite: bool) -> None:
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
            self.result = earlier.model_copy(update={"methods": list(known.values()), "left_out": [], "too_short": ""})
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


def _identity(settings: StretchSettings) -> dict[str, Any]:
    return settings.model_dump(exclude={"checkpoint": {"path", "seed"}})
