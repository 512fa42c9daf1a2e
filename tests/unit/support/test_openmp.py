"""OpenMP threads sleep sooner at a barrier in every command and its child processes, unless the user chose."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_coca.support.openmp import SETTINGS, SPIN_COUNT, limit_spinning
from tests.conftest import clean_environment

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "package": ["-m", "megatron_coca", "generate", "--checkpoint", "missing", "--prompt", "a"],
    "train.py": [
        "train.py",
        "configs/quickstart/roformer.yml",
        *(f"{part}_data_paths=[missing]" for part in ("train", "valid", "test")),
    ],
    "evaluate.py": ["evaluate.py", "speed", "--checkpoint", "missing", "--lengths", "8"],
}


@pytest.mark.parametrize("own", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_settings_of_the_user_are_kept(own: dict[str, str]) -> None:
    environment = dict(own)
    limit_spinning(environment)
    assert environment == own


def test_an_empty_setting_is_none() -> None:
    environment = {"OMP_WAIT_POLICY": ""}
    limit_spinning(environment)
    assert environment == {"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": SPIN_COUNT}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("own", "expected"), [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_the_library_has_read_it(command: str, own: dict[str, str], expected: str) -> None:
    """libgomp prints its settings when it is loaded, so this fails if PyTorch is imported before they are set."""
    inherited = {name: value for name, value in clean_environment().items() if name not in SETTINGS}
    environment = inherited | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)} | own
    done = subprocess.run(
        [sys.executable, *COMMANDS[command]], cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr
