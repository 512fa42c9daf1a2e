"""Every command in tools/ shows its help with an example, and starts no work."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
COMMANDS = sorted(path.name for path in TOOLS.glob("*.py") if '__name__ == "__main__"' in path.read_text())


def test_every_tool_but_the_shared_module_is_a_command() -> None:
    assert {path.name for path in TOOLS.glob("*.py")} - set(COMMANDS) == {"records.py"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("--help starts a process")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(sys, "argv", [f"tools/{command}", "--help"])
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])  # as `python tools/NAME.py` has it
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOLS / command), run_name="__main__")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith("usage: ") and f"python tools/{command}" in shown
