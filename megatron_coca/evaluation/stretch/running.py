"""Measure the methods within a time budget.

First, one window and one fact of each method are measured at each length. Then, more are measured until the comparison
is decided. The time of each measurement is estimated before it starts.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from megatron_coca.evaluation.results import Store
from megatron_coca.evaluation.stretch.decision import MethodAtLength, open_facts, open_windows
from megatron_coca.evaluation.stretch.records import StretchResult
from megatron_coca.evaluation.subject import Subject, noting_missing
from megatron_coca.evaluation.tasks.margin.measure import (
    ANSWER_TOKENS,
    FOILS,
    REMEDY,
    Cases,
    make_cases,
    score_facts,
    score_windows,
)
from megatron_coca.evaluation.tasks.margin.task import MarginResult, facts_at, windows_at
from megatron_coca.evaluation.tasks.retrieval.prompts import LengthError, PromptForm
from megatron_coca.model import GPT
from megatron_coca.support.console import Progress, duration, short, write

MOST_FACTS = 64
"""Largest number of hidden facts for each method and length, unless a plan sets it."""
MOST_ALONE = 16
"""Largest number of hidden facts for each length if there is only one method."""
CALIBRATED = 512
"""Length in tokens of the first timed input."""
ATTENTION = 2.0
"""Assumed time of an operation in attention, relative to one in a matrix product."""
NOT_SHARED = 0.6
"""Average time of a prompt that begins like the prompt before it, relative to the time of a whole prompt."""


class Pace:
    """Estimates of the seconds of a forward pass: its operations, times the seconds per operation of the method.

    The seconds per operation are updated after each measurement of the method. Before its first measurement, those of
    the method that was measured last are used. Before any measurement, they are computed from a timed pass.
    """

    def __init__(self, model: GPT) -> None:
        blocks = sum(weight.numel() for weight in model.blocks.parameters())
        width = sum(method.num_heads * method.head_dim for method in model.methods.values()) / len(model.methods)
        self._linear, self._square = 2.0 * blocks, 2.0 * len(model.blocks) * width * ATTENTION
        self._seconds: dict[str, float] = {}
        _seconds(model, CALIBRATED)  # the first pass also allocates memory
        self._last = min(_seconds(model, CALIBRATED) for _ in range(2)) / self._operations(CALIBRATED)

    def _operations(self, tokens: int) -> float:
        return self._linear * tokens + self._square * tokens**2

    def forward(self, method: str, tokens: int) -> float:
        return self._operations(tokens) * self._seconds.get(method, self._last)

    def facts(self, method: str, tokens: int, count: int) -> float:
        """Return the seconds for `count` facts.

        After the first passkey and the first needle, each prompt shares its beginning with an earlier prompt.
        """
        answers = count * (FOILS + 1) * self.forward(method, ANSWER_TOKENS)
        return self.forward(method, tokens) * (min(count, 2) + NOT_SHARED * max(count - 2, 0)) + answers

    def learn(self, method: str, estimate: float, seconds: float) -> None:
        self._last = self._seconds.get(method, self._last) * seconds / max(estimate, 1e-9)
        self._seconds[method] = self._last


@torch.inference_mode()
def _seconds(model: GPT, tokens: int) -> float:
    ids = torch.ones(1, tokens, dtype=torch.int64, device=next(model.parameters()).device)
    start = time.perf_counter()
    model.logits(model.hidden_states(ids, last=1)).sum().item()
    return time.perf_counter() - start


class Goal(NamedTuple):
    """How many windows and facts of a method are to be measured at a length."""

    windows: int = 0
    facts: int = 0


def missing_seconds(result: StretchResult, pace: Pace, goals: Mapping[MethodAtLength, Goal]) -> float:
    """Return the estimated seconds of all windows and facts in `goals` that are not measured yet."""
    seconds = 0.0
    for (method, length), goal in goals.items():
        facts = missing_facts(result, (method, length), goal.facts)
        each = result.window_seconds(method, length) or pace.forward(method, length)
        seconds += each * max(0, goal.windows - result.windows(method, length))
        seconds += pace.facts(method, length, facts) if facts else 0.0
    return seconds


def missing_facts(result: StretchResult, key: MethodAtLength, count: int) -> int:
    """Return how many of the first `count` facts are not measured yet."""
    entry = result.entry(*key)
    known = {case.number for case in entry.cases} if entry else set()
    return sum(number not in known for number in range(count))


class Runner:
    """Measures the methods and fills their result files. All subjects share their weights."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        documents: Sequence[np.ndarray],
        form: PromptForm,
        stores: Mapping[str, Store[MarginResult]],
        budget: float,
        cases: Mapping[int, int] | None,
    ) -> None:
        """`stores` has the result files of all methods, even of methods that the model does not support.

        `cases` is None without a plan. With a plan, all windows are measured, and `cases` has the numbers of hidden
        facts for some lengths. Other numbers are doubled until the comparison is decided. `budget` is in seconds.
        """
        self.subjects, self.documents, self.form = list(subjects), documents, form
        self._stores, self.pace = stores, Pace(subjects[0].model)
        self._planned = cases
        self._budget, self._ends = budget, time.monotonic() + budget
        self._left_out: list[str] = []
        self._skipped: list[MethodAtLength] = []
        self._tokens = 0
        self._goals: dict[MethodAtLength, Goal] = {}
        self._made: dict[int, Cases] = {}

    def run(self, lengths: Sequence[int]) -> StretchResult:
        """Measure until the comparison and the plan are finished, or the budget is spent. Return the results."""
        with Progress("stretch", unit="windows") as progress:
            self._progress = progress
            self._first(lengths)
            if self._planned is not None:
                self._plan(lengths, self._planned)
            while self._double():
                pass
        result = replace(self._result, left_out=tuple(self._left_out), too_short=self._too_short(lengths))
        for line in filter(None, (result.too_short, *(f"left out: {line}" for line in result.left_out))):
            write(line)
        return result

    @property
    def _result(self) -> StretchResult:
        """The results so far."""
        stores = self._stores.items()
        return StretchResult({name: each.result for name, each in stores}, {name: each.costs for name, each in stores})

    def _first(self, lengths: Sequence[int]) -> None:
        """Measure one window and one fact of each method at each length, the shortest length first."""
        one = Goal(1, 1)
        self._goals = {(subject.label, length): one for subject in self.subjects for length in lengths}
        if (needed := self._missing(self._goals)) > self._left():
            write(
                f"--budget: {_duration(self._budget)} is too short for one window and one fact of each method at each "
                f"length, which need about {_duration(needed)}; what fits is measured"
            )
        for length in lengths:
            for subject in self._in_order():
                key = (subject.label, length)
                if (needed := self._missing({key: one})) > self._left():
                    self._skipped.append(key)
                    self._leave_out(f"one window and one fact at {length} tokens of {subject.label}", needed)
                    continue
                self._windows(subject, length, 1)
                self._facts(subject, length, 1)
                if self._left() <= 0:
                    self._skipped.append(key)

    def _too_short(self, lengths: Sequence[int]) -> str:
        """Return "", or a sentence if the budget was too short for one window and one fact of every method."""
        skipped = {key: self._missing({key: Goal(1, 1)}) for key in self._skipped}
        skipped = {key: seconds for key, seconds in skipped.items() if seconds}
        if not skipped:
            return ""
        absent = []
        for length in lengths:
            names = [method for method, at in skipped if at == length]
            if names:
                every = len(names) == len(self.subjects)
                absent.append(f"{'all methods' if every else ', '.join(names)} at {length:,} tokens")
        return (
            f"The budget of {_duration(self._budget)} was too short for one window and one fact of each method at each "
            f"length. Not measured: {'; '.join(absent)}. They need about {_duration(sum(skipped.values()))} more."
        )

    def _plan(self, lengths: Sequence[int], cases: Mapping[int, int]) -> None:
        """Measure all windows and the planned facts.

        The facts at the shortest length are measured last, because the model was trained for this length.
        """
        windows = len(self.documents)
        self._goals = {
            (subject.label, length): Goal(windows, cases.get(length, 1))
            for subject in self.subjects
            for length in lengths
        }
        self._left_out.clear()  # measurements that still do not fit are listed again below
        for length in lengths:
            self._each(length, Goal(windows=windows))
            if length != lengths[0]:
                self._each(length, Goal(facts=cases.get(length, 1)))
        self._each(lengths[0], Goal(facts=cases.get(lengths[0], 1)))

    def _each(self, length: int, goal: Goal) -> None:
        """Measure the windows or facts of each method, unless the rest of the budget is too short for the method."""
        for subject in self._in_order():
            if (needed := self._missing({(subject.label, length): goal})) > self._left():
                name = "perplexity" if goal.windows else "retrieval"
                self._leave_out(f"{name} at {length} tokens of {subject.label}", needed)
            else:
                self._windows(subject, length, goal.windows)
                self._facts(subject, length, goal.facts)

    def _double(self) -> bool:
        """Double the numbers of facts and windows on which the decision depends. Return False if none was added."""
        planned = self._planned or {}
        most = MOST_ALONE if len(self.subjects) == 1 else MOST_FACTS
        added = False
        for length, methods in _by_length(key for key in open_facts(self._result) if key[1] not in planned):
            added |= self._grow(length, methods, "facts", most)
        for length, methods in _by_length(open_windows(self._result) if self._planned is None else ()):
            added |= self._grow(length, methods, "windows", len(self.documents))
        return added

    def _grow(self, length: int, methods: Sequence[str], name: str, most: int) -> bool:
        """Double the number of facts or windows of these methods, or add as many as fit into the budget.

        If the numbers of the methods differ, smaller ones are first raised to the largest. Return False if nothing was
        added.
        """

        def done() -> list[int]:
            return [self._done((method, length), name) for method in methods]

        def goals(count: int) -> dict[MethodAtLength, Goal]:
            return {(method, length): Goal(**{name: count}) for method in methods}

        before = done()
        goal = min(most, max(before) if min(before) < max(before) else 2 * max(before))
        fitting = range(goal, min(before), -1)
        count = next((each for each in fitting if self._missing(goals(each)) <= self._left()), None)
        if count is None:
            if fitting:
                entry = f"{goal} {name} at {length} tokens instead of {min(before)} of {', '.join(methods)}"
                self._leave_out(entry, self._missing(goals(goal)))
            return False
        self._goals = goals(count)
        for subject in (each for each in self._in_order() if each.label in methods):
            (self._facts if name == "facts" else self._windows)(subject, length, count)
        return done() != before

    def _done(self, key: MethodAtLength, name: str) -> int:
        """Return the number of facts or windows that are measured."""
        return len(self._result.facts(*key)) if name == "facts" else self._result.windows(*key)

    def _windows(self, subject: Subject, length: int, count: int) -> None:
        """Score the first `count` documents in windows of `length` tokens."""
        name, at = subject.label, f"perplexity at {length} tokens"
        if (done := self._result.windows(name, length)) < count:
            self._progress.begin(f"{name}, {at}")
            scores = score_windows(subject, self._stores[name], self.documents[:count], length)
            estimate = self.pace.forward(name, length) * (count - done)
            self._measure(subject, f"{at} of {name}", windows_at(length), scores, (done, count), estimate)

    def _facts(self, subject: Subject, length: int, count: int) -> None:
        """Measure the first `count` facts in `length` tokens."""
        name, missing = subject.label, missing_facts(self._result, (subject.label, length), count)
        if missing and (cases := self._cases(length, count)) is not None:
            self._progress.begin(f"{name}, {count} facts in {length} tokens")
            scores = score_facts(subject, self._stores[name], cases, length)
            estimate, entry = self.pace.facts(name, length, missing), f"retrieval at {length} tokens of {name}"
            self._measure(subject, entry, facts_at(length), scores, (count - missing, count), estimate)

    def _measure(
        self, subject: Subject, entry: str, at: str, scores: Iterator[int], counts: tuple[int, int], estimate: float
    ) -> None:
        """Advance `scores`, which measures one input at a time, until all inputs are measured or the budget is spent.

        `counts` are the number of inputs that are already measured and the number of all inputs. If the budget is
        spent, the model does not support such positions, or memory runs out, `entry` is listed as left out. The pace is
        updated only if all inputs were measured.
        """
        start, (done, count), store = time.monotonic(), counts, self._stores[subject.label]
        noted = len(store.noted)
        with noting_missing(store, at, REMEDY):
            while done < count and self._left() > 0:
                self._advance(next(scores))
                done += 1
            if done == count:
                self.pace.learn(subject.label, estimate, time.monotonic() - start)
            else:
                self._leave_out(f"{entry} ({done} of {count} are measured)")
        for each in store.noted[noted:]:
            self._leave_out(f"{entry}: {each.kind if each.kind == 'out of memory' else each.reason}")

    def _cases(self, length: int, count: int) -> Cases | None:
        """Return the first `count` cases, or None if the length is too short for them."""
        if len(self._made.get(length, ())) < count:
            try:
                self._made[length] = make_cases(
                    self.form, length - ANSWER_TOKENS, count, self._result.header.protocol.seed
                )
            except LengthError as error:
                self._leave_out(f"retrieval at {length} tokens: {error}")
                return None
        return self._made[length][:count]

    def _in_order(self) -> list[Subject]:
        """Return the plain model, then the other methods, best first by the results so far."""
        ranked, plain = self._result.ranked(), self._result.plain
        return sorted(self.subjects, key=lambda each: (each.label != plain, ranked.index(each.label)))

    def _missing(self, goals: Mapping[MethodAtLength, Goal]) -> float:
        return missing_seconds(self._result, self.pace, goals)

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _leave_out(self, entry: str, seconds: float | None = None) -> None:
        """List a measurement as left out. An earlier line for the same measurement is replaced."""
        self._left_out = [line for line in self._left_out if not line.startswith(entry)]
        self._left_out.append(entry if seconds is None else f"{entry} (about {_duration(seconds)})")

    def _advance(self, tokens: int) -> None:
        self._tokens += tokens
        self._progress.details = [f"{short(self._tokens)} tokens"]
        self._progress.remaining(min(self._left(), self._missing(self._goals)))
        self._progress.advance()


def _by_length(keys: Iterable[MethodAtLength]) -> list[tuple[int, list[str]]]:
    """Return the methods of each length, the shortest length first."""
    pairs = sorted({(length, method) for method, length in keys})
    return [(length, [method for _, method in group]) for length, group in groupby(pairs, key=itemgetter(0))]


def _duration(seconds: float) -> str:
    return duration(math.ceil(seconds))
