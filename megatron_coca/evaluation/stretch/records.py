"""The results of all methods of `megatron-coca stretch`, in result files of `megatron-coca evaluate margin`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_coca.evaluation.labels import slug
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.results import Cost, read_costs, read_record
from megatron_coca.evaluation.statistics import exponential
from megatron_coca.evaluation.stretch.choices import PLAIN
from megatron_coca.evaluation.tasks.margin.task import (
    FOUND,
    LOSS,
    MARGIN,
    CaseMargin,
    MarginEntry,
    MarginResult,
    facts_at,
    mean,
    windows_at,
)

RESULTS = "results"
"""Name of the folder with a result file for each method."""
HOLDS = 1.10
"""A method holds at a length if its perplexity is at most this many times that of the plain model at 1x."""


def result_file(folder: Path, method: str) -> Path:
    return folder / RESULTS / f"margin_{slug(method)}.json"


def read_plain(folder: Path) -> MarginResult:
    """Return the results of the plain model. Raises EvaluationError."""
    return read_record(result_file(folder, PLAIN), MarginResult, "a result of `megatron-coca stretch`")


def read_results(folder: Path, methods: Sequence[str]) -> "StretchResult":
    """Return the results of these methods and the plain model. Raises EvaluationError."""
    results, costs = {}, {}
    for name in dict.fromkeys((PLAIN, *methods)):
        file = result_file(folder, name)
        results[name] = read_record(file, MarginResult, "a result of `megatron-coca stretch`")
        found = read_costs(file)
        costs[name] = {cost.at: cost for cost in found.costs} if found is not None else {}
    return StretchResult(results, costs)


@dataclass(frozen=True)
class StretchResult:
    """The results of all methods, the plain model first.

    Attributes:
        results: the result of each method, by its name.
        costs: the costs of each method, by their names in the cost file.
        left_out: what was not measured, and why.
        too_short: a sentence that says that the budget was too short for one window and one fact of every method; empty
            if it was long enough.
    """

    results: Mapping[str, MarginResult]
    costs: Mapping[str, Mapping[str, Cost]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    too_short: str = ""

    @property
    def plain(self) -> str:
        """The name of the model without an extension, which is always the first."""
        return next(iter(self.results))

    @property
    def header(self) -> MarginResult:
        """The result with the checkpoint and the settings that all methods share."""
        return self.results[self.plain]

    @property
    def trained(self) -> int:
        return self.header.checkpoint.seq_length

    @property
    def unsupported(self) -> dict[str, str]:
        """The methods that the model does not support, with the reasons."""
        return {name: each.reason for name, own in self.results.items() for each in own.missing if each.at == "all"}

    @property
    def supported(self) -> list[str]:
        return [name for name in self.results if name not in self.unsupported]

    def entry(self, method: str, length: int) -> MarginEntry | None:
        return next((entry for entry in self.results[method].results if entry.length == length), None)

    def facts(self, method: str, length: int) -> list[CaseMargin]:
        """Return the cases before the first missing number, so that methods are compared by the same facts."""
        entry = self.entry(method, length)
        return entry.facts if entry else []

    def margins(self, method: str, length: int) -> Sequence[float]:
        """Return the margins of `facts` in nats."""
        entry = self.entry(method, length)
        return MARGIN.values(entry) if entry else []

    def margin(self, method: str, length: int) -> float | None:
        return self._value(MARGIN, method, length)

    def share(self, method: str, length: int) -> float | None:
        """Return the share of the facts that greedy decoding finds."""
        return self._value(FOUND, method, length)

    def _value(self, number: Number, method: str, length: int) -> float | None:
        entry = self.entry(method, length)
        return number.value(entry) if entry else None

    def windows(self, method: str, length: int) -> int:
        return len(self.losses(method, length))

    @property
    def most_windows(self) -> int:
        """The largest number of windows of any method at any length."""
        return max((self.windows(name, length) for name in self.supported for length in self.lengths()), default=0)

    def losses(self, method: str, length: int) -> list[float]:
        """Return the loss of each window in nats per token."""
        entry = self.entry(method, length)
        return [nll / entry.scored for nll in LOSS.values(entry)] if entry else []

    def loss_ratios(self, method: str, length: int) -> list[float]:
        """Return the logarithms of the perplexity relative to the plain model at 1x, one for each common window."""
        own, base = self.losses(method, length), self.losses(self.plain, self.trained)
        return [one - other for one, other in zip(own, base, strict=False)]

    def perplexity(self, method: str, length: int) -> float | None:
        """Return the perplexity. With fewer windows than the plain model at 1x, compute it from the ratio in common
        windows.
        """
        own, base = self.losses(method, length), self.losses(self.plain, self.trained)
        if not own:
            return None
        if not base or len(own) == len(base):
            return exponential(mean(own))
        return exponential(mean(base) + mean(self.loss_ratios(method, length)))

    def window_seconds(self, method: str, length: int) -> float | None:
        """Return the mean time of a window; None if it is not known."""
        return self._seconds(method, windows_at(length), self.windows(method, length))

    def fact_seconds(self, method: str, length: int) -> float | None:
        """Return the mean time of a fact; None if it is not known."""
        return self._seconds(method, facts_at(length), self.cases(method, length))

    def _seconds(self, method: str, at: str, count: int) -> float | None:
        cost = self.costs.get(method, {}).get(at)
        return cost.seconds / count if cost is not None and count else None

    def cases(self, method: str, length: int) -> int:
        """Return the number of measured facts, including those after a missing number."""
        entry = self.entry(method, length)
        return len(entry.cases) if entry else 0

    def lengths(self) -> list[int]:
        entries = (entry for name in self.supported for entry in self.results[name].results)
        return sorted({entry.length for entry in entries if entry.nlls or entry.facts})

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
        """Return the methods, best first: by reach, then by the facts found, the margin and the perplexity at this
        length.

        Ties are broken by a method's longest measured length, then by the same three numbers at all lengths, from the
        longest. Small differences mean nothing; `decision.decide` says which methods differ.
        """

        def at(name: str, length: int) -> tuple[float, float, float]:
            perplexity = _known(self.perplexity(name, length), math.inf)
            return _known(self.share(name, length), -1.0), _known(self.margin(name, length), -math.inf), -perplexity

        def rank(name: str) -> tuple[float, ...]:
            reach, lengths = self.reach(name), self.lengths()
            measured = [length for length in lengths if self.windows(name, length) or self.facts(name, length)]
            longest_first = [value for length in reversed(lengths) for value in at(name, length)]
            return reach, *at(name, reach), max(measured, default=0), *longest_first

        return sorted(self.supported, key=rank, reverse=True)


def _known(value: float | None, worst: float) -> float:
    return worst if value is None or math.isnan(value) else value
