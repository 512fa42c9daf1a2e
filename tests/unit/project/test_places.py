"""The tests of a package's folder are found in the folder of the same name."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[3]
OTHERS = {"project", "tools"}
"""Folders of tests that do not belong to the package."""


TOP = {
    *(".ci", ".github", ".gitignore", ".pre-commit-config.yaml"),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"),
    *("benchmarks", "configs", "docker", "docs", "megatron_coca", "studies", "tests", "tools"),
    *("train.py", "evaluate.py", "pyproject.toml", "requirements.txt", "requirements-dev.txt"),
}
"""All that git keeps at the top level."""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
def test_git_keeps_nothing_else_at_the_top_level() -> None:
    """A crash leaves a core dump in the working folder, for example, and `git add --all` takes it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.partition("/")[0] for name in listed.splitlines()} == TOP


def test_folders_of_tests_are_folders_of_the_package() -> None:
    tests = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    assert len(folders) > 20
    for folder in folders:
        assert folder.parts[0] in OTHERS or (ROOT / "megatron_coca" / folder).is_dir(), folder


def test_names_of_test_files_are_unique() -> None:
    """pytest imports test files by their name, and stops if two in different folders have the same."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


def test_every_package_has_tests() -> None:
    for package in (ROOT / "megatron_coca").iterdir():
        if (package / "__init__.py").exists():
            assert list((ROOT / "tests" / "unit" / package.name).rglob("test_*.py")), package.name


def test_files_that_begin_first_exist() -> None:
    assert {*LONGEST} <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_configurations_that_sources_name_exist() -> None:
    """Docstrings, messages and helps of the package, and comments of the configurations."""
    places = [*(ROOT / "megatron_coca").rglob("*.py"), *(ROOT / "configs").rglob("*.*")]
    places += [path for suffix in ("yml", "j2") for path in (ROOT / "studies").rglob(f"*.{suffix}")]
    form = re.compile(r"(?:configs|studies)/[\w/.-]+\.(?:yml|yaml|sbatch|md|j2)")
    named = {name for path in places for name in form.findall(path.read_text())}
    assert len(named) > 50
    assert not [name for name in named if not (ROOT / name).is_file()]
