"""Measure the methods length by length within a time budget. The time of each measurement is estimated before it."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.data import Tokenizer
from megatron_coca.evaluation import results
from megatron_coca.evaluation.stretch.measuring import FOILS, CaseMargin, last_loss, make_cases, margins
from megatron_coca.evaluation.stretch.records import Losses, ResultFile, Retrieval, StretchResult
from megatron_coca.evaluation.subject import Subject
from megatron_coca.evaluation.tasks.prompts import LengthError, PromptForm
from megatron_coca.model import GPT
from megatron_coca.support.console import Progress, duration, short, write

CASE_COUNTS = (16, 8, 4)
"""Numbers of hidden facts per method and length: the largest that fits into the budget."""
CALIBRATED = 512
"""Length in tokens of the inputs that are timed first."""
ATTENTION = 2.0
"""Time of an operation of attention relative to one of a matrix product, which is faster on most devices."""
NOT_SHARED = 0.6
"""Share of the time of a prompt that remains if it shares its beginning with the prompt before, on average."""
FACT_TOKENS = 8


class Pace:
    """Estimates of the seconds of a forward pass: its operations, times the seconds per operation of each method.

    These seconds follow from the method's own results. Until it has one, they are those of the last result.
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
        """Return the time of passkeys and needles, each of which share the beginning with the prompt before."""
        answers = count * (FOILS + 1) * self.forward(method, FACT_TOKENS)
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


def missing_seconds(result: StretchResult, pace: Pace, methods: Sequence[str], facts: Mapping[int, int]) -> float:
    """Return the estimated seconds of everything that is not measured yet, also of the rest of a begun measurement.

    `facts` has the number of hidden facts by length.
    """
    seconds = 0.0
    for method, (length, count) in itertools.product(methods, facts.items()):
        losses, retrieval = result.begun_loss(method, length), result.begun_retrieval(method, length)
        documents = len(losses.nlls) if losses else 0
        each = losses.seconds / documents if losses and documents else pace.forward(method, length)
        seconds += each * (result.settings.count - documents)
        if result.found(method, length) is None:
            seconds += pace.facts(method, length, max(0, count - (len(retrieval.cases) if retrieval else 0)))
    return seconds


class Runner:
    """Fills a result file. All subjects share their weights."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        documents: Sequence[np.ndarray],
        form: PromptForm,
        tokenizer: Tokenizer,
        file: ResultFile,
        budget: float,
        cases: Mapping[int, int],
    ) -> None:
        """`cases` has the number of hidden facts by length; for other lengths it follows from the budget."""
        self.subjects, self.documents, self.form, self.tokenizer = list(subjects), documents, form, tokenizer
        self.file, self.pace = file, Pace(subjects[0].model)
        self._cases = cases
        self._ends = time.monotonic() + budget
        self._left_out: list[str] = []
        self._tokens = 0
        self._lengths: Sequence[int] = ()

    def run(self, lengths: Sequence[int]) -> None:
        """Measure perplexity and retrieval at each length, from the shortest to the longest. Retrieval at the shortest
        length, which the model was trained for, is measured last.
        """
        self._lengths = lengths
        with Progress("stretch", unit="windows") as progress:
            for length in lengths:
                self._losses(length, progress)
                if length != lengths[0]:
                    self._retrieval(length, progress)
            self._retrieval(lengths[0], progress)
        self.file.write(left_out=self._left_out)
        for line in self._left_out:
            write(f"left out: {line}")

    def _losses(self, length: int, progress: Progress) -> None:
        result, at = self.file.result, f"perplexity at {length} tokens"
        settings = result.settings

        def cost(method: str) -> float:
            begun = self.file.result.begun_loss(method, length)
            return self.pace.forward(method, length) * (len(self.documents) - (len(begun.nlls) if begun else 0))

        waiting = [each for each in self.subjects if result.loss(each.label, length) is None]
        for subject in self._fitting(waiting, at, cost):
            progress.begin(f"{subject.label}, {at}")
            begun = self.file.result.begun_loss(subject.label, length)
            nlls, before = (list(begun.nlls), begun.seconds) if begun else ([], 0.0)

            def measure(subject: Subject = subject, nlls: list[float] = nlls, before: float = before) -> None:
                start = time.monotonic()
                for tokens in self.documents[len(nlls) :]:
                    if self._spent(f"{at} of {subject.label}", len(nlls), len(self.documents)):
                        return
                    nlls.append(last_loss(subject.model, tokens, length, settings.scored, settings.start))
                    seconds, complete = before + time.monotonic() - start, len(nlls) == len(self.documents)
                    at_length: dict[str, Any] = {"method": subject.label, "length": length}
                    self.file.put_loss(Losses(seconds=seconds, complete=complete, nlls=list(nlls), **at_length))
                    self._advance(progress, length)

            self._timed(subject, at, cost(subject.label), measure)

    def _retrieval(self, length: int, progress: Progress) -> None:
        result, at = self.file.result, f"retrieval at {length} tokens"
        left = self._ends - time.monotonic()

        def total(count: int) -> float:
            return sum(self.pace.facts(each.label, length, count) for each in self.subjects)

        def cost(method: str) -> float:
            begun = self.file.result.begun_retrieval(method, length)
            return self.pace.facts(method, length, count - (len(begun.cases) if begun else 0))

        earlier = [len(each.cases) for each in result.retrieval if each.length == length and each.complete]
        fitting = next((count for count in CASE_COUNTS if total(count) <= left), CASE_COUNTS[-1])
        count = self._cases.get(length) or max(earlier, default=fitting)
        waiting = [each for each in self.subjects if not _has(result.found(each.label, length), count)]
        try:
            seed = result.settings.seed
            cases = make_cases(self.form, length - FACT_TOKENS, count, seed) if waiting else []
        except LengthError as error:
            self._left_out.append(f"{at}: {error}")
            return
        for subject in self._fitting(waiting, at, cost):
            progress.begin(f"{subject.label}, {count} facts in {length} tokens")
            begun = self.file.result.begun_retrieval(subject.label, length)
            made = [case for case in begun.cases if case.number < count] if begun else []
            before = begun.seconds if begun else 0.0

            def measure(subject: Subject = subject, made: list[CaseMargin] = made, before: float = before) -> None:
                start = time.monotonic()

                def put() -> None:
                    made.sort(key=lambda case: case.number)
                    seconds, complete = before + time.monotonic() - start, len(made) == count
                    at_length: dict[str, Any] = {"method": subject.label, "length": length}
                    found = Retrieval(seconds=seconds, complete=complete, cases=list(made), **at_length)
                    self.file.put_retrieval(found)

                if len(made) == count:  # they were measured for a larger number of facts
                    put()
                for case in margins(subject.model, self.tokenizer, cases, {case.number for case in made}):
                    made.append(case)
                    put()
                    self._advance(progress, case.tokens)
                    if len(made) < count and self._spent(f"{at} of {subject.label}", len(made), count):
                        return

            self._timed(subject, at, cost(subject.label), measure)

    def _spent(self, entry: str, done: int, count: int) -> bool:
        """Return True if the budget is spent, and list the measurement as left out."""
        if spent := time.monotonic() >= self._ends:
            self._left_out.append(f"{entry} ({done} of {count} are measured)")
        return spent

    def _advance(self, progress: Progress, tokens: int) -> None:
        self._tokens += tokens
        progress.details = [f"{short(self._tokens)} tokens"]
        missing = missing_seconds(
            self.file.result,
            self.pace,
            [each.label for each in self.subjects],
            {length: self._cases.get(length, CASE_COUNTS[-1]) for length in self._lengths},
        )
        progress.remaining(min(self._ends - time.monotonic(), missing))
        progress.advance()

    def _fitting(self, waiting: Sequence[Subject], entry: str, cost: Callable[[str], float]) -> Iterator[Subject]:
        """Yield the subjects that fit into the rest of the budget: the plain model, then the best so far."""
        ranked = self.file.result.ranked()
        plain = self.file.result.methods[0].name
        order = sorted(waiting, key=lambda each: (each.label != plain, ranked.index(each.label)))
        for subject in order:
            if (seconds := cost(subject.label)) <= self._ends - time.monotonic():
                yield subject
            else:
                self._left_out.append(f"{entry} of {subject.label} (about {duration(math.ceil(seconds))})")

    def _timed(self, subject: Subject, entry: str, estimate: float, measure: Callable[[], None]) -> None:
        """Measure, and list the entry as left out if the model has no such positions or memory runs out."""
        start = time.monotonic()
        try:
            measure()
        except PositionRangeError as error:
            self._left_out.append(f"{entry} of {subject.label}: {error}")
        except (RuntimeError, MemoryError) as error:
            if not results.out_of_memory(error):
                raise
            self._left_out.append(f"{entry} of {subject.label}: out of memory")
        else:
            self.pace.learn(subject.label, estimate, time.monotonic() - start)


def _has(found: Retrieval | None, count: int) -> bool:
    return found is not None and len(found.cases) >= count
