"""Names and sizes that keep the code readable: a type's name means one thing, and a function is one thought."""

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


def named_types(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Classes and type aliases of a module: the name, its line, and what it stands for ("" for a class)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, ""
    for statement in tree.body:
        name = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
        if isinstance(statement, ast.Assign) and name[0].isupper() and not name.isupper():
            yield name, statement.lineno, ast.unparse(statement.value)


@pytest.mark.always
def test_no_two_types_share_a_name() -> None:
    """Modules that do not import one another may have the same alias."""
    places: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path, tree in trees():
        for name, line, value in named_types(tree) if path != STANDALONE else ():
            places[name].append((value, f"{path.relative_to(PACKAGE)}:{line}"))
    shared = {name: found for name, found in places.items() if len({value for value, _ in found}) > 1}
    twice = {name: found for name, found in places.items() if sum(value == "" for value, _ in found) > 1}
    assert len(places) > 300 and not shared and not twice, shared | twice


@pytest.mark.always
def test_no_function_is_longer_than_one_thought() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {body_lines(node)} lines"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > LONGEST
    ]
    assert not long, long
