"""The fast suite's choice of cases leaves no value of a parameter out, except in tests that take long."""

import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from tests import long_tests
from tests.fast_cases import MANY, fast_cases, values

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Shape:
    heads: int
    width: int


def test_every_value_of_every_parameter_occurs() -> None:
    cases = [
        {"form": form, "length": length, "backend": backend}
        for form, length, backend in product("abcde", (1, 2, 3), ("x", "y"))
    ]
    chosen = [cases[number] for number in fast_cases(cases)]
    assert len(chosen) == 5, "as many as the parameter with most values has"
    for name in cases[0]:
        assert {case[name] for case in chosen} == {case[name] for case in cases}


def test_pairs_that_are_asked_for_all_occur() -> None:
    cases = [
        {"form": form, "length": length, "backend": backend}
        for form, length, backend in product("abcde", (1, 2, 3), ("x", "y"))
    ]
    chosen = [cases[number] for number in fast_cases(cases, [("form", "length")])]
    assert {(case["form"], case["length"]) for case in chosen} == {*product("abcde", (1, 2, 3))}
    assert {case["backend"] for case in chosen} == {"x", "y"} and len(chosen) == 15


def test_pairs_within_a_name_all_occur() -> None:
    cases = [{"name": f"{form}-{extension}"} for form, extension in product("abc", "rst")]
    assert len(fast_cases(cases)) == 3
    assert len(fast_cases(cases, [("name", "name")])) == 9


def test_a_value_that_only_one_case_has_is_never_left_out() -> None:
    cases = [{"name": "coca", "keys": {"norm": "layernorm", "bias": flag}} for flag in (0, 1, 0, 1, 0)]
    cases[3] = {"name": "coca", "keys": {"norm": "scalenorm", "bias": 1}}
    assert 3 in fast_cases(cases)


def test_a_few_cases_all_run() -> None:
    assert fast_cases([{"name": "same"}] * (MANY - 1)) == [*range(MANY - 1)]


def test_names_mappings_and_records_have_the_values_of_their_parts() -> None:
    assert values("n", "coca-yarn, log n") == {("n", "coca"), ("n", "yarn"), ("n", "log n")}
    assert values("n", {"a": {"b": 1}, "c": [2, 3]}) == {("n.a.b", "1"), ("n.c", "2"), ("n.c", "3")}
    assert values("n", Shape(2, 3)) == {("n.heads", "2"), ("n.width", "3")}


def test_long_tests_exist_and_none_always_runs() -> None:
    for test, cases in long_tests.read().items():
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text, f"{test}: remove it from tests/long_tests.yml"
        above = text[: text.index(f"def {name}(")].rpartition("\n\n\n")[2]
        assert cases >= 0 and "mark.always" not in above, test


def test_cases_with_the_most_values_go_first() -> None:
    cases = [{"form": "a", "size": 1}, {"form": "a", "size": 2}, {"form": "b", "size": 2}, {"form": "a", "size": 1}]
    assert [sorted(long_tests.telling(cases, number)) for number in range(5)] == [
        [],
        [0],
        [0, 2],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize(
    ("seconds", "cases"),
    [([0.7], 1), ([0.8], 0), ([0.1] * 4, 2), ([0.5] * 4, 1), ([2.0] * 4, 0), ([0.05] * 4, 4), ([0.05] * 100, 4)],
)
def test_long_tests_are_cut_to_the_limit(seconds: list[float], cases: int) -> None:
    assert long_tests.most_cases(seconds) == cases


SERVER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
print("done", flush=True)
sys.stdin.read()
"""


def test_children_of_a_server_that_still_runs_are_counted() -> None:
    before = long_tests.processor_time()
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdin is not None
        assert server.stdout.readline() == b"done\n"
        assert long_tests.processor_time() - before > 0.1
        server.stdin.close()


def test_the_table_comes_back_and_keeps_the_rows_of_other_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_tests, "TABLE", tmp_path / "long_tests.yml")
    long_tests.TABLE.write_text("unit/test_a.py: {test_c: 2}\nunit/test_z.py: {test_y: 3}\n")
    long_tests.write({"tests/unit/test_a.py::test_b": [0.7, 0.7], "tests/unit/test_a.py::test_c": [0.1]})
    assert long_tests.read() == {"tests/unit/test_a.py::test_b": 1, "tests/unit/test_z.py::test_y": 3}
