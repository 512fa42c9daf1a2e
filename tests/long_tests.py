"""The fast suite runs only some cases of tests that take long. The slow suite runs all others.

`make test-costs` measures the processor time of every test of the fast suite and writes the file.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

LIMIT = 1.5
"""Seconds of processor time that the fast suite spends on one test with all its cases, if the test can be divided."""
TABLE = Path(__file__).with_suffix(".yml")
HEAD = f"""# Tests that take longer than {LIMIT} s of processor time, with the number of cases that the fast suite runs.
# With 0, only the slow suite runs them. `make test-costs` writes this file. A test marked `always` is never in it.
"""


def read() -> dict[str, int]:
    """Return the numbers of cases by test, such as `tests/unit/test_a.py::test_b`."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {f"tests/{file}::{test}": cases for file, tests in table.items() for test, cases in tests.items()}


def spread(cases: int, wanted: int) -> set[int]:
    """Return `wanted` numbers below `cases`, at equal distances from the first to the last."""
    wanted = min(wanted, cases)
    return {round(each * (cases - 1) / max(wanted - 1, 1)) for each in range(wanted)}


def processor_time() -> float:
    """Return the seconds that this process has computed, and all its children that have ended."""
    return sum(os.times()[:4])


def most_cases(seconds: Sequence[float]) -> int:
    """Return how many cases the fast suite runs of a test, from the processor time of each case."""
    if sum(seconds) <= LIMIT:
        return len(seconds)
    if len(seconds) == 1 or sum(seconds) / len(seconds) > LIMIT:
        return 0
    return min(len(seconds), max(1, int(LIMIT * len(seconds) / sum(seconds))))


def write(seconds: Mapping[str, Sequence[float]]) -> None:
    """Write the table from the processor times of all cases. Files that were not measured keep their rows."""
    measured = {test.partition("::")[0] for test in seconds}
    long = {test: cases for test, cases in read().items() if test.partition("::")[0] not in measured}
    long |= {test: cases for test, each in seconds.items() if (cases := most_cases(each)) < len(each)}
    table: dict[str, dict[str, int]] = defaultdict(dict)
    for test in sorted(long):
        file, name = test.removeprefix("tests/").split("::", 1)
        table[file][name] = long[test]
    TABLE.write_text(HEAD + yaml.safe_dump(dict(table), width=200), encoding="utf-8")
