"""The documented commands and Python blocks, run on small models and data; tests/examples.py has the table."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environment
from tests.documents import NAMES, blocks, commands, everywhere, languages
from tests.examples import PRELUDES, QUICK, make_workspace, treatment
from tests.patience import patience

pytestmark = pytest.mark.slow

IN_ORDER = ("docs/tutorial.md", "docs/recall.md")
"""Pages whose commands build on each other."""
MAY_MISS = {
    "megatron-coca evaluate passkey": 2,  # prompts shorter than the text around the key
    "megatron-coca estimate": 1,  # does not fit
}
TIME_LIMIT = patience(600)
SINGLE = sorted({command for page, command in everywhere() if page not in IN_ORDER and treatment(command)[0] == "run"})
GUIDES = ("CONTRIBUTING.md",)
"""Pages with files that a reader adds to the package. Tests of the guides write and run these files."""
PYTHON_PAGES = [page for page in NAMES if "python" in languages(page) and page not in (*QUICK, *GUIDES)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace, not to be changed."""
    folder = tmp_path_factory.mktemp("examples") / "template"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_workspace(folder)
    return folder


@pytest.fixture
def workspace(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the present folder."""
    folder = tmp_path / "workspace"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    return folder


def execute(command: str, folder: Path) -> None:
    """Run a documented command with what its row appends; it must succeed."""
    line = f"{command} {treatment(command)[1]}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        check=False,
        cwd=folder,
        env=clean_environment({"PATH": path}),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    allowed = {status for beginning, status in MAY_MISS.items() if command.startswith(beginning)}
    assert done.returncode in {0, *allowed}, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("command", SINGLE)
def test_command(command: str, workspace: Path) -> None:
    if command.startswith("megatron-coca serve"):  # it reads what others write
        shutil.move(workspace / "made", workspace / "exported")
    execute(command, workspace)


@pytest.mark.parametrize("page", IN_ORDER)
def test_page_from_start_to_end(page: str, workspace: Path) -> None:
    for command in commands(page):
        if treatment(command)[0] == "run":
            execute(command, workspace)
    run_python(page)


@pytest.mark.parametrize("page", [page for page in PYTHON_PAGES if page not in IN_ORDER])
def test_python_of_a_page(page: str, workspace: Path) -> None:
    shutil.move(workspace / "made", workspace / "exported")
    run_python(page)


def run_python(page: str) -> None:
    """Run the Python blocks of a page in one namespace."""
    names: dict[str, Any] = {}
    for code in (PRELUDES.get(page, ""), *blocks(page, "python")):
        exec(compile(code, page, "exec"), names)
