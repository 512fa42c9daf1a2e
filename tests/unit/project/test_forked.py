"""The tests of a run in copies of a process (tests/forked.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

HOOKS = "from tests.forked import pytest_addoption, pytest_runtestloop\n"
FIRST = """
import os, warnings, pytest

@pytest.fixture(scope="session")
def made(tmp_path_factory):
    (tmp_path_factory.getbasetemp() / "made").touch()
    yield os.getpid()
    print("torn down")

def test_a(made, tmp_path, request):
    (tmp_path / "mine").touch()
    assert made == os.getpid() != PARENT
    warnings.warn("take care")

def test_b(made):
    print("said before")
    assert made == 0
"""
SECOND = """
def test_c():
    pass

def test_d():
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

def test_e():
    pass
"""

THIRD = """
import pytest

@pytest.fixture(scope="session")
def made():
    yield
    assert not 1

def test_f(made):
    pass
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder)]
    base = ["--basetemp", str(folder / "temporary"), "-p", "no:cacheprovider", str(folder)]
    command += [*options, *base]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forked")
    (folder / "conftest.py").write_text(f"{HOOKS}import builtins, os\nbuiltins.PARENT = os.getpid()\n")
    (folder / "test_first.py").write_text(FIRST)
    (folder / "test_second.py").write_text(SECOND)
    return folder


def test_results_are_those_of_one_process(folder: Path) -> None:
    status, output = run(folder, "--forks", "2", "--deselect", "test_second.py::test_d")
    assert status == 1 and "1 failed, 3 passed, 1 deselected, 1 warning" in output
    assert "said before" in output and "take care" in output and "assert made == 0" in output
    assert len([*folder.glob("temporary/*/made")]) == 1, "the other copy runs the other file"


def test_a_copy_that_dies_is_a_failure(folder: Path) -> None:
    status, output = run(folder, "--forks", "2")
    assert status == 1 and "2 failed, 2 passed" in output
    assert "test_second.py::test_d" in output and "the process of the test ended" in output


def test_an_error_after_the_last_test_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_third.py").write_text(THIRD)
    status, output = run(tmp_path, "--forks", "2")
    assert status == 1 and "assert not 1" in output and "a process of tests failed" in output


def test_all_failures_are_chosen_again_and_the_first_one_stops(folder: Path) -> None:
    status, output = run(folder, "--forks", "1", "-x")
    assert status == 1 and "1 failed, 1 passed" in output and "stopping after 1 failures" in output
    assert run(folder, "--forks", "3", "-k", "test_c")[0] == 0
