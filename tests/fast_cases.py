"""Choose the cases of a test that the fast suite runs: the fewest in which every value of every parameter occurs.

tests/long_tests.py then leaves out more of those that take long.

A name such as "coca-yarn" or "dense, rmsnorm" has several values, its parts. A mapping and a dataclass have the values
of their fields. `@pytest.mark.pairs("name", "length")` above a test also asks for every pair of values of these
parameters that some case has. The same parameter twice means all pairs of parts of one name.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations, product
from typing import Any

MANY = 4
"""A test with fewer cases runs all of them."""

Value = tuple[Hashable, ...]


def values(name: str, given: Any) -> frozenset[Value]:
    """What a parameter's value says, as (path, part) pairs."""
    if isinstance(given, str):
        return frozenset((name, part) for part in re.split(r", |(?<=\w)-(?=[a-z])", given))
    if isinstance(given, Mapping):
        return frozenset().union(*(values(f"{name}.{key}", value) for key, value in given.items()))
    if is_dataclass(given) and not isinstance(given, type):
        return frozenset().union(*(values(f"{name}.{each.name}", getattr(given, each.name)) for each in fields(given)))
    if isinstance(given, list | tuple):
        return frozenset().union(*(values(name, each) for each in given))
    return frozenset({(name, getattr(given, "__qualname__", None) or repr(given))})


def wanted(case: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> frozenset[Value]:
    """All that a case shows: the values of its parameters, and the pairs of them that the test asks for."""
    each = {name: values(name, given) for name, given in case.items()}
    found = set().union(*each.values())
    for first, second in pairs:
        both = combinations(sorted(each[first]), 2) if first == second else product(each[first], each[second])
        found |= {("pair", *map(frozenset, [pair])) for pair in both}
    return frozenset(found)


def fewest(cases: Sequence[frozenset[Value]]) -> list[int]:
    """Numbers of cases that together show all that any case shows, in this order: the one that adds most goes first.

    Not the smallest number possible, which takes long to find, but within a few of it.
    """
    missing, chosen = set().union(*cases), []
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(cases[number] & missing), -number))
        missing -= cases[best]
        chosen.append(best)
    return chosen


def fast_cases(cases: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str]] = ()) -> list[int]:
    """Numbers of the cases, each a value of every parameter by its name, that the fast suite runs."""
    return [*range(len(cases))] if len(cases) < MANY else sorted(fewest([wanted(case, pairs) for case in cases]))
