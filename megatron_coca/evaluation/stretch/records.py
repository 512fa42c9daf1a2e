"""The results of `megatron-coca stretch`, one result file of `megatron-coca evaluate margin` for each method."""

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
"""Largest perplexity at which a method holds, as a multiple of the plain model's at the training length (1x)."""


def result_file(folder: Path, method: str) -> Path:
    return folder / RESULTS / f"margin_{slug(method)}.json"


def read_plain(folder: Path) -> MarginResult:
    """Return the results of the plain model. Raises EvaluationError."""
    return read_record(result_file(folder, PLAIN), MarginResult, "a result of `megatron-coca stretch`")


def read_results(folder: Path, methods: Sequence[str]) -> "StretchResult":
    """Return the results of the plain model and of these methods. Raises EvaluationError."""
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
        costs: the costs of each method, by the name that a cost has in the cost file.
        left_out: the measurements that were left out, with the reasons.
        too_short: a sentence that says that the budget was too short for one window and one fact of every method, or ""
            if it was long enough.
    """

    results: Mapping[str, MarginResult]
    costs: Mapping[str, Mapping[str, Cost]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    too_short: str = ""

    @property
    def plain(self) -> str:
        """The name of the model without an extension. Its result is always the first."""
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
        """The methods that the model does not support, each with the reason."""
        return {name: each.reason for name, own in self.results.items() for each in own.missing if each.at == "all"}

    @property
    def supported(self) -> list[str]:
        return [name for name in self.results if name not in self.unsupported]

    def entry(self, method: str, length: int) -> MarginEntry | None:
        return next((entry for entry in self.results[method].results if entry.length == length), None)

    def facts(self, method: str, length: int) -> list[CaseMargin]:
        """Return the cases up to the first missing case number, so that methods are compared on the same facts."""
        entry = self.entry(method, length)
        return entry.facts if entry else []

    def margins(self, method: str, length: int) -> Sequence[float]:
        """Return the margin of each of the `facts` in nats."""
        entry = self.entry(method, length)
        return MARGIN.values(entry) if entry else []

    def margin(self, method: str, length: int) -> float | None:
        return self._value(MARGIN, method, length)

    def share(self, method: str, length: int) -> float | None:
        """Return the share of the facts that greedy decoding finds, or None if no facts were measured."""
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
        """Return the logarithm of the perplexity ratio to the plain model at 1x, for each window that both have."""
        own, base = self.losses(method, length), self.losses(self.plain, self.trained)
        return [one - other for one, other in zip(own, base, strict=False)]

    def perplexity(self, method: str, length: int) -> float | None:
        """Return the perplexity, or None if no window was measured.

        If the plain model at 1x has another number of windows, its perplexity is multiplied by the mean ratio in the
        windows that both have.
        """
        own, base = self.losses(method, length), self.losses(self.plain, self.trained)
        if not own:
            return None
        if not base or len(own) == len(base):
            return exponential(mean(own))
        return exponential(mean(base) + mean(self.loss_ratios(method, length)))

    def window_seconds(self, method: str, length: int) -> float | None:
        """Return the mean time to measure a window, or None if it is not known."""
        return self._seconds(method, windows_at(length), self.windows(method, length))

    def fact_seconds(self, method: str, length: int) -> float | None:
        """Return the mean time to measure a fact, or None if it is not known."""
        return self._seconds(method, facts_at(length), self.cases(method, length))

    def _seconds(self, method: str, at: str, count: int) -> float | None:
        cost = self.costs.get(method, {}).get(at)
        return cost.seconds / count if cost is not None and count else None

    def cases(self, method: str, length: int) -> int:
        """Return the number of all measured facts, even if a case number before them is missing."""
        entry = self.entry(method, length)
        return len(entry.cases) if entry else 0

    def lengths(self) -> list[int]:
        entries = (entry for name in self.supported for entry in self.results[name].results)
        return sorted({entry.length for entry in entries if entry.nlls or entry.facts})

    def reach(self, method: str) -> int:
        """Return the greatest length up to which the method holds, or 0.

        To hold at a length, the perplexity must be at most HOLDS times that of the plain model at 1x, and the mean
        margin of the facts must be above 0. A method does not hold at a length without a measured perplexity.
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
        """Return True if the mean margin is above 0, or if no method has facts at the length.

        If the method has no facts at 1x, the margin of the plain model is used instead.
        """
        margin = self.margin(method, length)
        if margin is None and length == self.trained:
            margin = self.margin(self.plain, length)
        if margin is None:
            return length == self.trained or not any(self.facts(name, length) for name in self.supported)
        return margin > 0  # False for NaN

    def ranked(self) -> list[str]:
        """Return the methods, best first. They are ordered by reach.

        Methods with the same reach are ordered by the share of facts found, the margin and the perplexity at that
        length. Further ties are broken by the longest measured length, then by the same three values at all lengths,
        starting at the longest. The order can depend on chance; `decision.decide` tests which methods differ.
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
