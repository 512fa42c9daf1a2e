"""Names and sizes that keep the code readable: a class name means one thing, and a function is one thought."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "megatron_coca"
STANDALONE = PACKAGE / "checkpoints/huggingface/modeling_coca.py"
"""A file that exports contain: it cannot import, so it repeats the names of the classes that it stands for."""
LONGEST = 55
"""Lines of a function's body, without its signature and its docstring."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = first.end_lineno if documented else first.lineno - 1
    assert function.end_lineno is not None and start is not None
    return function.end_lineno - start


def test_the_lines_of_a_body_are_counted() -> None:
    (function,) = ast.parse('def f(\n    x,\n):\n    """Say.\n\n    More."""\n    y = x\n    return y\n').body
    assert isinstance(function, ast.FunctionDef) and body_lines(function) == 2


@pytest.mark.always
def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and path != STANDALONE:
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert len(places) > 300 and not shared, shared


@pytest.mark.always
def test_no_function_is_longer_than_one_thought() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {body_lines(node)} lines"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > LONGEST
    ]
    assert not long, long
