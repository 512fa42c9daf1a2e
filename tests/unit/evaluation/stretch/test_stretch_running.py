"""The order of the measurements of `megatron-coca stretch`, with a clock that only they advance."""

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_coca.evaluation.results import Meter, Store
from megatron_coca.evaluation.stretch import running
from megatron_coca.evaluation.stretch.records import StretchResult, result_file
from megatron_coca.evaluation.tasks.margin import measure
from megatron_coca.evaluation.tasks.margin.task import CaseMargin
from tests.unit.evaluation.stretch_cases import SCORED, TRAINED, empty_result, entries_of

METHODS = ("plain", "yarn", "rerope", "ntk")
LENGTHS = (TRAINED, 2 * TRAINED)
SECONDS = {TRAINED: 1.0, 2 * TRAINED: 4.0}
"""Of each window and each fact."""
ROUND = sum(2 * len(METHODS) * seconds for seconds in SECONDS.values())
"""Seconds of one window and one fact of each method at each length."""


class World:
    """A clock, the measurements in their order, and the methods that find facts or run out of memory."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.done, self.folder = 0.0, [], folder
        self.finding: dict[str, float] = {"plain": 1.0, "yarn": 1.0, "rerope": 1.0, "ntk": 1.0}
        self.failing: set[tuple[str, str, int]] = set()
        monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(running, "Pace", lambda model: self)
        monkeypatch.setattr(measure, "measured", self.measured)
        monkeypatch.setattr(measure, "last_loss", self.last_loss)
        monkeypatch.setattr(
            running, "make_cases", lambda form, length, count, seed: [(length, each) for each in range(count)]
        )
        monkeypatch.setattr(measure, "margins", self.margins)

    def forward(self, method: str, tokens: int) -> float:
        return SECONDS[tokens]

    def facts(self, method: str, tokens: int, count: int) -> float:
        return SECONDS[tokens] * count

    def learn(self, method: str, estimate: float, seconds: float) -> None: ...

    def _take(self, kind: str, method: str, length: int) -> None:
        if (kind, method, length) in self.failing and self.done.count((kind, method, length)):
            raise MemoryError
        self.now += SECONDS[length]
        self.done.append((kind, method, length))

    @contextmanager
    def measured(self, device: torch.device) -> Iterator[Meter]:
        meter, start = Meter(), self.now
        yield meter
        meter.seconds = self.now - start

    def last_loss(self, model: str, tokens: Any, length: int, scored: int, start: None) -> float:
        self._take("window", model, length)
        return SCORED * (6.0 if (model, length) == ("plain", LENGTHS[1]) else 3.0)

    def margins(
        self, model: str, tokenizer: object, cases: Sequence[tuple[int, int]], known: Container[int]
    ) -> Iterator[CaseMargin]:
        for made_at, number in cases:
            if number not in known:
                length = made_at + measure.ANSWER_TOKENS
                self._take("fact", model, length)
                found = number % 8 < 8 * self.finding.get(model, 0.0)
                margin = 9.0 + number % 3 if found else -9.0 + number % 3
                task = "needle" if number % 2 else "passkey"
                yield CaseMargin(task=task, number=number, tokens=length, depth=0.5, margin=margin, found=found)

    def stretch(
        self,
        budget: float,
        methods: Sequence[str] = METHODS,
        documents: int = 4,
        cases: Mapping[int, int] | None = None,
    ) -> StretchResult:
        stores = {name: Store(result_file(self.folder, name), empty_result(name, documents)) for name in methods}
        device = torch.device("cpu")
        subjects: Any = [SimpleNamespace(label=name, model=name, device=device, tokenizer=name) for name in methods]
        nothing = cast(Any, None)
        return running.Runner(subjects, [np.zeros(1)] * documents, nothing, stores, budget, cases).run(LENGTHS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_each_method_has_a_window_and_a_fact_before_any_has_two(world: World) -> None:
    result = world.stretch(ROUND)
    once = [(kind, name, length) for length in LENGTHS for name in METHODS for kind in ("window", "fact")]
    assert world.done == once and world.now == ROUND
    assert not result.too_short
    planned = r"2 facts at 16384 tokens instead of 1 .*ntk, rerope, yarn .*0:00:12\)"
    assert any(re.fullmatch(planned, line) for line in result.left_out)


def test_a_budget_that_is_too_short_is_told(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything at 1x fits, and one method at 2x; the rest of 6 seconds is too short for another one."""
    result = world.stretch(8 + 8 + 6)
    assert result.too_short.startswith("The budget of 0:00:22 was too short")
    assert "Not measured: yarn, rerope, ntk at 16,384 tokens. " in result.too_short
    assert result.too_short.endswith(" 0:00:24 more.")
    kinds = Counter((kind, length) for kind, _, length in world.done)
    assert kinds["window", LENGTHS[1]] == kinds["fact", LENGTHS[1]] == 1
    errors = capsys.readouterr().err
    assert "--budget: 0:00:22 is too short" in errors and "about 0:00:40" in errors
    assert result.too_short in errors
    assert world.stretch(24).too_short == "" and not [each for each, count in Counter(world.done).items() if count > 1]


def test_only_what_is_undecided_is_doubled(world: World) -> None:
    """Two methods find all facts, one finds none at 2x, and plain has failed by its perplexity."""
    world.finding = {"plain": 1.0, "yarn": 1.0, "rerope": 1.0}
    result = world.stretch(10_000)
    numbers = {name: len(result.facts(name, LENGTHS[1])) for name in METHODS}
    assert numbers["yarn"] == numbers["rerope"] == running.MOST_FACTS and numbers["plain"] == 1
    assert 1 < numbers["ntk"] < running.MOST_FACTS, "more facts show that it finds fewer"
    assert len(result.facts("yarn", TRAINED)) == 1, "nothing is decided at 1x"
    assert not result.left_out
    done = len(world.done)
    assert world.stretch(10_000) == result and len(world.done) == done, "everything is decided or measured"


def test_as_many_facts_as_fit_are_added_for_all(world: World) -> None:
    """After 8 facts of each method, 5 more fit."""
    result = world.stretch(ROUND + 3 * 4 * (7 + 5) + 11)
    assert [len(result.facts(name, LENGTHS[1])) for name in METHODS[1:]] == [13, 13, 13]


def test_a_ratio_near_the_limit_gets_more_windows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexity windows of a method at the limit are doubled, and those of the reference."""

    def near(model: str, *rest: Any) -> float:
        return world.last_loss(model, *rest) + SCORED * (0.09 if model == "ntk" else 0.0)

    monkeypatch.setattr(measure, "last_loss", near)
    result = world.stretch(10_000)
    numbers = {key: len(entry.nlls) for key, entry in entries_of(result).items()}
    assert numbers["ntk", LENGTHS[1]] == numbers["plain", TRAINED] == 4 and numbers["yarn", LENGTHS[1]] == 1


def test_no_memory_for_more_facts_ends_the_doubling(world: World) -> None:
    world.failing = {("fact", name, LENGTHS[1]) for name in METHODS}
    result = world.stretch(10_000)
    assert all(len(result.facts(name, LENGTHS[1])) == 1 for name in METHODS)
    assert "retrieval at 16384 tokens of yarn: out of memory" in result.left_out


def test_a_single_method_is_measured_at_all_lengths(world: World) -> None:
    result = world.stretch(10_000, methods=["plain"])
    assert [len(result.facts("plain", length)) for length in LENGTHS] == [running.MOST_ALONE] * 2
    assert all(len(entry.nlls) == 4 for entry in entries_of(result).values())


def test_a_plan_is_measured_wholly(world: World) -> None:
    """After one of each; the facts at 1x come last."""
    result = world.stretch(10_000, cases={TRAINED: 3, LENGTHS[1]: 6})
    assert all(len(entry.nlls) == 4 for entry in entries_of(result).values()) and not result.left_out
    assert {key: len(entry.cases) for key, entry in entries_of(result).items()} == {
        (name, length): 3 if length == TRAINED else 6 for name in METHODS for length in LENGTHS
    }
    assert set(world.done[-8:]) == {("fact", name, TRAINED) for name in METHODS}
    left_out = world.stretch(0, cases={TRAINED: 4, LENGTHS[1]: 6}).left_out
    assert sorted(left_out) == sorted(f"retrieval at 8192 tokens of {name} (about 0:00:01)" for name in METHODS)
