"""The fast suite runs only some cases of tests that take long: those with the most values. The slow suite runs all.

`make test-costs` measures the processor time of every test of the fast suite, and writes into tests/long_tests.yml how
many cases of it run. A test that is not in that file runs all its cases. Fixtures are not counted, because tests share
them.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.fast_cases import fewest, wanted

LIMIT = 0.2
"""Seconds of processor time that the fast suite spends on one test with all its cases, if the test can be divided."""
LONGEST_CASE = 0.75
"""Seconds of processor time up to which the fast suite runs one case of a test whose cases take longer than LIMIT."""
TABLE = Path(__file__).with_suffix(".yml")
HEAD = f"""# Tests that take longer than {LIMIT} s of processor time, with the number of cases that the fast suite runs.
# It runs at least one if a case takes up to {LONGEST_CASE} s. With 0, only the slow suite runs the test.
# `make test-costs` writes this file. A test marked `always` is never in it.
"""


def read() -> dict[str, int]:
    """Return the numbers of cases by test, such as `tests/unit/test_a.py::test_b`."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {f"tests/{file}::{test}": cases for file, tests in table.items() for test, cases in tests.items()}


def telling(cases: Sequence[Mapping[str, Any]], number: int) -> set[int]:
    """Return the indices of `number` cases, each given by its parameters: those that together show the most values."""
    first = fewest([wanted(case, ()) for case in cases])
    return {*[*first, *(each for each in range(len(cases)) if each not in first)][:number]}


def processor_time() -> float:
    """Return the seconds that this process and all processes below it have computed, also those that have ended.

    Tests start training processes by a server that outlives them, so ended children of living children count too.
    """
    total = sum(os.times()[:4])
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def most_cases(seconds: Sequence[float]) -> int:
    """Return how many cases the fast suite runs of a test, from the processor time of each case."""
    if sum(seconds) <= LIMIT:
        return len(seconds)
    case = sum(seconds) / len(seconds)
    return int(LIMIT / case) or int(case <= LONGEST_CASE)


def write(seconds: Mapping[str, Sequence[float]]) -> None:
    """Write the table from the processor times of all cases. Tests that were not measured keep their rows."""
    long = {test: cases for test, cases in read().items() if test not in seconds}
    long |= {test: cases for test, each in seconds.items() if (cases := most_cases(each)) < len(each)}
    table: dict[str, dict[str, int]] = defaultdict(dict)
    for test in sorted(long):
        file, name = test.removeprefix("tests/").split("::", 1)
        table[file][name] = long[test]
    TABLE.write_text(HEAD + yaml.safe_dump(dict(table), width=200), encoding="utf-8")
