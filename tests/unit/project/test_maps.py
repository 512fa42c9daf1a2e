"""Names and files in megatron_coca/README.md and CONTRIBUTING.md exist where these pages say."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ["megatron_coca/README.md", "CONTRIBUTING.md"]
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
PLACED = re.compile(
    r"((?:`[A-Za-z_][\w.]*`(?:, | and )?)+)(?: \([^)]*\))? (?:in|\() ?(?:the file )?`([\w./-]+\.(?:py|yaml))`"
)
"""Names followed by their file: "`NORMS`, `GATED` in `model/layers.py`", or "`fit` (`training/run.py`)"."""
FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|yml|yaml|md))`")
TEMPLATE = "NAME"


def text_of(page: str) -> str:
    return FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))


@cache
def files() -> list[str]:
    folders = ("megatron_coca", "tests", "tools", "configs", "docs", "studies")
    return [str(path.relative_to(ROOT)) for name in folders for path in sorted((ROOT / name).rglob("*.*"))]


def located(name: str) -> list[str]:
    """Return the files that a page may mean, which leaves out `megatron_coca/` and sometimes the folder."""
    return [path for path in files() if path == name or path.endswith(f"/{name}")]


@cache
def defined(path: str) -> set[str]:
    """Return the names that a file defines, also in its classes, the classes that it calls, and the keys of a YAML
    file.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".py"):
        return set(re.findall(r"^(\w+):", text, re.MULTILINE))
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Call(func=ast.Name(id=name)) if name[0].isupper():
                names.add(name)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_files_of_a_page_exist(page: str) -> None:
    named = [name for name in FILE.findall(text_of(page)) if TEMPLATE not in name]
    assert len(named) > 10
    assert not [name for name in named if not located(name)]


@pytest.mark.parametrize("page", PAGES)
def test_names_of_a_page_are_defined_where_it_says(page: str) -> None:
    found = [
        (name, file)
        for names, file in PLACED.findall(text_of(page))
        for name in re.findall(r"[A-Za-z_][\w.]*", names.replace(" and ", " "))
    ]
    assert len(found) > 5
    missing = [
        f"{name} in {file}"
        for name, file in found
        if not any(set(name.split(".")) <= defined(path) for path in located(file))
    ]
    assert not missing
