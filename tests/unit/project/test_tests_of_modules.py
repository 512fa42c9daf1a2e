"""The tests of every module are found: by its name, or in the map tests/places.yml."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from megatron_coca.cli import COMMANDS
from tests.conftest import ROOT

PACKAGE, TESTS = ROOT / "megatron_coca", ROOT / "tests"
MAP: dict[str, list[str]] = yaml.safe_load((TESTS / "places.yml").read_text(encoding="utf-8"))
"""Paths or patterns of modules below the package -> paths of their tests below tests/."""
SUBCOMMANDS = {f"{PACKAGE.name}.{module}": name for name, (module, _) in COMMANDS.items()}


@cache
def statements(path: Path) -> list[ast.stmt]:
    """The statements of a module but its docstring and imports."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    texts = (each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)))
    return [each for each in texts if not isinstance(each, ast.Import | ast.ImportFrom)]


@cache
def modules() -> list[str]:
    """The paths of all modules that do more than import others."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "configs" not in path.relative_to(PACKAGE).parts)
    return [str(path.relative_to(PACKAGE)) for path in paths if statements(path)]


@cache
def mirrored(module: str) -> bool:
    """Whether a test has the name of a module, in the folder that mirrors the module's.

    File names of tests are unique, so the name of the folder may stand before or behind that of the module.
    """
    path = Path(module)
    path = path.parent if path.name == "__init__.py" else path.with_suffix("")
    name, folder = path.name, path.parent.name
    names = {name, *(f"{each}_{name}" for each in (folder, folder.removesuffix("s"))), f"{name}_{folder[:-1]}"}
    return any((TESTS / "unit" / path.parent / f"test_{each}.py").is_file() for each in names)


DECLARING = ("config/", "methods/", "checkpoints/huggingface/families/")
"""Folders of declarations, which tests name by their keys: fields of a class, keys of a table, names of choices."""


def names_in(module: str) -> Iterator[str]:
    """The names that a module defines for others: functions, classes, constants, and what `DECLARING` describes."""
    for node in statements(PACKAGE / module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node.value, ast.Constant):
                yield str(node.value.value)
        if module.startswith(DECLARING) and not isinstance(node, ast.FunctionDef):
            yield from _declared(node)


def _declared(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield from (
            str(each.target.id)
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        )
        return
    for each in ast.walk(node):
        keys: list[ast.expr | None] = []
        if isinstance(each, ast.Dict):
            keys = each.keys
        elif isinstance(each, ast.Call):
            keys = [*each.args[:1], *(word.value for word in each.keywords if word.arg == "name")]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


@cache
def words(test: Path) -> frozenset[str]:
    """The words of a test and of the files of tests/ that it imports."""
    text = test.read_text(encoding="utf-8")
    helpers = [
        Path(ROOT, *name.split(".")).with_suffix(".py")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests.")
        for name in (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
    ]
    texts = [
        text,
        *(path.read_text(encoding="utf-8") for path in helpers if path.is_file() and path.name != "conftest.py"),
    ]
    return frozenset(re.findall(r"[\w.-]+", " ".join(texts)))


@cache
def importers() -> dict[str, set[str]]:
    """The dotted names of modules -> those of the modules that import them, or name them in a declaration."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        source = dotted(str(path.relative_to(PACKAGE)))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom):
                targets = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and source.endswith(".task"):
                targets = [f"{PACKAGE.name}.evaluation.tasks.{node.value.rpartition('.')[0]}"]
            for target in targets:
                found.setdefault(target, set()).add(source)
    return found


def dotted(module: str) -> str:
    name = ".".join((PACKAGE.name, *Path(module).with_suffix("").parts))
    return name.removesuffix(".__init__").removesuffix(".__main__")


@cache
def defined(module: str) -> frozenset[str]:
    return frozenset(each for each in names_in(module) if len(each) > 3 and each != "main")


def uses(test: Path, module: str) -> bool:
    """Whether a test has the name of a module, calls its command, imports it or a module or package that imports it, or
    mentions a name that it defines.
    """
    found, name = words(test), dotted(module)
    command = SUBCOMMANDS.get(name)
    if test.name == f"test_{Path(module).stem}.py" or (
        command is not None and f'"{command}"' in test.read_text("utf-8")
    ):
        return True
    imported = {name, *importers().get(name, ())}
    packages = {each.rpartition(".")[0] for each in imported if each.count(".") > 2}
    return not found.isdisjoint({*defined(module), *imported, *packages})


@cache
def entries(module: str) -> list[str]:
    """The entry of a module's own path, else those of the patterns of its folder."""
    patterns = [each for each in MAP if Path(module).match(each) and module.count("/") == each.count("/")]
    return [module] if module in MAP else patterns


@pytest.mark.always
def test_every_module_has_a_test_with_its_name_or_one_entry() -> None:
    found = {module: entries(module) for module in modules() if not mirrored(module)}
    assert not (missing := [module for module, keys in found.items() if not keys]), "add entries to tests/places.yml"
    assert not (several := {module: keys for module, keys in found.items() if len(keys) > 1}), (missing, several)


def test_no_entry_is_unneeded() -> None:
    needed = Counter(key for module in modules() if not mirrored(module) for key in entries(module))
    assert not MAP.keys() - needed.keys(), "remove these entries from tests/places.yml"


def test_every_named_test_exists_and_uses_the_modules() -> None:
    absent = [name for names in MAP.values() for name in names if not (TESTS / name).is_file()]
    assert not absent
    unused = [
        f"{module}: {MAP[key]}"
        for module in modules()
        if not mirrored(module)
        for key in entries(module)
        if not any(uses(TESTS / name, module) for name in MAP[key])
    ]
    assert not unused, "none of these tests uses the module"
    idle = [
        f"{key}: {name}"
        for key, names in MAP.items()
        for name in names
        if not any(uses(TESTS / name, module) for module in modules() if key in entries(module))
    ]
    assert not idle, "these tests use no module of their entry"
