"""The numbers that tasks declare: their names in results.csv, and how they are read from entries."""

import math
from operator import attrgetter
from types import SimpleNamespace

import pytest

from megatron_coca.evaluation.declaration import LAST, Task
from megatron_coca.evaluation.numbers import Number, Reading
from megatron_coca.evaluation.tasks import TASKS
from tests.unit.evaluation.report_cases import every_result


def test_a_name_with_a_field_is_the_name_of_every_entry() -> None:
    number = Number("accuracy, depth {entry.depth}%", tally=lambda entry: entry)
    entry = SimpleNamespace(length=64, depth=50, accuracy=0.25, low=0.1, high=0.4)
    assert number.reading(entry) == Reading("accuracy, depth 50%", 64, 0.25, 0.1, 0.4)
    assert number.is_named("accuracy, depth 50%") and not number.is_named("accuracy")
    assert not Number("a.b").is_named("aXb"), "a name is no pattern"


def test_an_entry_without_the_number_has_no_reading() -> None:
    assert Number("inside", tally=lambda entry: None).reading(SimpleNamespace(length=64)) is None
    assert Number("angle", lambda entry: None).reading(SimpleNamespace(length=64)) is None


def test_seeds_are_averaged_by_logarithm_where_a_number_has_one() -> None:
    overflown = SimpleNamespace(length=64, perplexity=math.inf, nll=800.0)
    number = Number("perplexity", attrgetter("perplexity"), logarithm=attrgetter("nll"))
    assert number.averaged(overflown) == 800.0
    assert Number("perplexity", attrgetter("perplexity")).averaged(overflown) == math.inf
    assert Number("inside", tally=lambda entry: None).averaged(overflown) is None


@pytest.mark.parametrize("task", [task for task in TASKS.values() if task.numbers], ids=lambda task: task.name)
def test_every_number_of_a_result_is_declared_once(task: Task) -> None:
    results = [result for result in every_result().values() if result.task == task.name]
    names = {reading.name for result in results for entry in result.results for reading in task.read(entry)}
    assert names, "report_cases has a result of every task"
    for name in names:
        assert sum(number.is_named(name) for number in task.numbers) == 1, name


def test_places_are_of_one_task_or_section_each() -> None:
    sections = [section for task in TASKS.values() for section in task.sections]
    for places in ([task.place for task in TASKS.values()], [section.place for section in sections]):
        declared = [place for place in places if place != LAST]
        assert len(set(declared)) == len(declared)
