"""Measure the methods length by length within a time budget. The time of each measurement is estimated before it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.data import Tokenizer
from megatron_coca.evaluation import results
from megatron_coca.evaluation.stretch.measuring import FOILS, CaseMargin, last_loss, make_cases, margins
from megatron_coca.evaluation.stretch.records import Losses, ResultFile, Retrieval
from megatron_coca.evaluation.subject import Subject
from megatron_coca.evaluation.tasks.prompts import LengthError, PromptForm
from megatron_coca.model import GPT
from megatron_coca.support.console import Progress, duration, write

CASE_COUNTS = (16, 8, 4)
"""Numbers of hidden facts per method and length: the largest that fits into the budget."""
CALIBRATED = 512
"""Input length in tokens whose time is measured first."""
ATTENTION = 2.0
"""Time of an operation of attention relative to one of a matrix product, which is faster on most devices."""
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
        """Half of the tokens of all but the first prompt are shared."""
        answers = count * (FOILS + 1) * self.forward(method, FACT_TOKENS)
        return self.forward(method, tokens) * (1 + (count - 1) / 2) + answers

    def learn(self, method: str, estimate: float, seconds: float) -> None:
        self._last = self._seconds.get(method, self._last) * seconds / max(estimate, 1e-9)
        self._seconds[method] = self._last


@torch.inference_mode()
def _seconds(model: GPT, tokens: int) -> float:
    ids = torch.ones(1, tokens, dtype=torch.int64, device=next(model.parameters()).device)
    start = time.perf_counter()
    model.logits(model.hidden_states(ids, last=1)).sum().item()
    return time.perf_counter() - start


def _has(found: Retrieval | None, count: int) -> bool:
    return found is not None and len(found.cases) >= count


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
        self._lengths: Sequence[int] = ()

    def run(self, lengths: Sequence[int]) -> None:
        """Measure perplexity and retrieval at each length, from the shortest to the longest. Retrieval at the shortest
        length, which the model was trained for, is measured last.
        """
        self._lengths = lengths
        with Progress("stretch", unit="inputs") as progress:
            for length in lengths:
                self._losses(length, progress)
                if length != lengths[0]:
                    self._retrieval(length, progress)
            self._retrieval(lengths[0], progress)
        self.file.write(left_out=self._left_out)
        for line in self._left_out:
            write(f"left out: {line}")

    def _losses(self, length: int, progress: Progress) -> None:
        def cost(method: str) -> float:
            return self.pace.forward(method, length) * len(self.documents)

        scored = self.file.result.settings.scored
        waiting = [each for each in self.subjects if self.file.result.loss(each.label, length) is None]
        for subject in self._fitting(waiting, f"perplexity at {length} tokens", cost):
            progress.begin(f"{subject.label}, perplexity at {length} tokens")
            nlls: list[float] = []

            def measure(subject: Subject = subject, nlls: list[float] = nlls) -> None:
                for tokens in self.documents:
                    nlls.append(last_loss(subject.model, tokens, length, scored))
                    self._advance(progress)

            seconds = self._timed(subject, f"perplexity at {length} tokens", cost(subject.label), measure)
            if seconds is not None:
                self.file.add_loss(Losses(method=subject.label, length=length, nlls=nlls, seconds=seconds))

    def _retrieval(self, length: int, progress: Progress) -> None:
        found = self.file.result.found
        left = self._ends - time.monotonic()

        def total(count: int) -> float:
            return sum(self.pace.facts(each.label, length, count) for each in self.subjects)

        def cost(method: str) -> float:
            return self.pace.facts(method, length, count)

        earlier = [len(each.cases) for each in self.file.result.retrieval if each.length == length]
        fitting = next((count for count in CASE_COUNTS if total(count) <= left), CASE_COUNTS[-1])
        count = self._cases.get(length) or max(earlier, default=fitting)
        waiting = [each for each in self.subjects if not _has(found(each.label, length), count)]
        try:
            cases = make_cases(self.form, length - FACT_TOKENS, count) if waiting else []
        except LengthError as error:
            self._left_out.append(f"retrieval at {length} tokens: {error}")
            return
        for subject in self._fitting(waiting, f"retrieval at {length} tokens", cost):
            progress.begin(f"{subject.label}, {count} facts in {length} tokens")
            made: list[CaseMargin] = []

            def measure(subject: Subject = subject, made: list[CaseMargin] = made) -> None:
                made += margins(subject.model, self.tokenizer, cases, lambda: self._advance(progress))

            seconds = self._timed(subject, f"retrieval at {length} tokens", cost(subject.label), measure)
            if seconds is not None:
                entry = Retrieval(method=subject.label, length=length, cases=made, seconds=seconds)
                self.file.add_retrieval(entry)

    def _advance(self, progress: Progress) -> None:
        progress.advance()
        progress.remaining(min(self._ends - time.monotonic(), self._estimate()))

    def _estimate(self) -> float:
        """Return the estimated seconds of everything that is not measured yet."""
        seconds, result = 0.0, self.file.result
        for subject, length in ((subject, length) for subject in self.subjects for length in self._lengths):
            if result.loss(subject.label, length) is None:
                seconds += self.pace.forward(subject.label, length) * len(self.documents)
            if result.found(subject.label, length) is None:
                seconds += self.pace.facts(subject.label, length, CASE_COUNTS[-1])
        return seconds

    def _fitting(self, waiting: Sequence[Subject], what: str, cost: Callable[[str], float]) -> Iterator[Subject]:
        """Yield the subjects that fit into the rest of the budget: the plain model, then the best so far."""
        ranked = self.file.result.ranked()
        plain = self.file.result.methods[0].name
        order = sorted(waiting, key=lambda each: (each.label != plain, ranked.index(each.label)))
        for subject in order:
            if (seconds := cost(subject.label)) <= self._ends - time.monotonic():
                yield subject
            else:
                self._left_out.append(f"{what} of {subject.label} (about {duration(seconds)})")

    def _timed(self, subject: Subject, what: str, estimate: float, measure: Callable[[], None]) -> float | None:
        """Return the seconds of a measurement; None if the model has no such positions or memory runs out."""
        start = time.monotonic()
        try:
            measure()
        except PositionRangeError as error:
            self._left_out.append(f"{what} of {subject.label}: {error}")
            return None
        except (RuntimeError, MemoryError) as error:
            if not results.out_of_memory(error):
                raise
            self._left_out.append(f"{what} of {subject.label}: out of memory")
            return None
        seconds = time.monotonic() - start
        self.pace.learn(subject.label, estimate, seconds)
        return seconds
