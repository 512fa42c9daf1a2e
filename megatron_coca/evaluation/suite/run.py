"""Running a suite's commands, each in a process of its own, so that one that is killed takes no other with it."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_coca.evaluation.results import EvaluationError, write_atomically
from megatron_coca.evaluation.suite.plan import Command

INCOMPLETE = 2
"""The exit status of a command that told by itself what is missing."""


def run_commands(commands: Iterable[Command]) -> list[str]:
    """Runs one command after another; returns one line for each that did not end well."""
    problems = []
    for command in commands:
        if command.checkpoint is None and all(file.is_file() for file in command.files):
            print(f"# {command.task}: {command.files[0]} is there already")
            continue
        shown = shlex.join(["evaluate.py", *command.arguments])
        print(f"\n$ python {shown}", flush=True)
        status = subprocess.run([sys.executable, "-m", "megatron_coca.evaluation", *command.arguments]).returncode
        if status == 0:
            continue
        what = f"{command.task} of {command.checkpoint}" if command.checkpoint else command.task
        if status == INCOMPLETE:
            problems.append(f"{what}: incomplete, see what it said")
        else:
            reason = how_it_ended(status)
            problems.append(f"{what}: {reason}")
            for file in command.files:
                note_failure(file, reason)
    return problems


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (" (the host's memory may not have sufficed)" if name == "SIGKILL" else "")


def note_failure(file: Path, reason: str) -> None:
    """Write into a result file why it is not complete; one that was never begun stays absent."""
    if not file.is_file():
        return
    try:
        content: Mapping[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise EvaluationError(f"{file}: is not JSON ({error}); remove it") from error
    missing = [each for each in content.get("missing", []) if each.get("kind") != "failed"]
    missing.append({"at": "all", "kind": "failed", "reason": reason})
    write_atomically(file, (json.dumps({**content, "missing": missing}, indent=2) + "\n").encode())
