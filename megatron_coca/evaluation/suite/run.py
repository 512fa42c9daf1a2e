"""Running a suite's commands, each in a process of its own, so that one that is killed takes no other with it."""

import json
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
        print(f"\n$ {shlex.join(['python', 'evaluate.py', *command.arguments])}", flush=True)
        status = run_to_its_end([sys.executable, "-m", "megatron_coca.evaluation", *command.arguments])
        what = f"{command.task} of {command.checkpoint}" if command.checkpoint else command.task
        if status == INCOMPLETE:
            problems.append(f"{what}: incomplete, see what it said")
        elif status != 0:
            problems.append(f"{what}: {how_it_ended(status)}")
            note_failure([file for file in command.files if file.is_file()], how_it_ended(status))
    return problems


def run_to_its_end(command: Sequence[str]) -> int:
    """The exit status of a process that does not outlive this one, unless this one is killed outright."""
    before = (
        signal.signal(signal.SIGTERM, _interrupt) if threading.current_thread() is threading.main_thread() else None
    )
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (" (the host's memory may not have sufficed)" if name == "SIGKILL" else "")


def note_failure(files: Sequence[Path], reason: str) -> None:
    """Write into the last of the result files that a command began why it is not complete: those before it are."""
    if not files:
        return
    try:
        content: Mapping[str, Any] = json.loads(files[-1].read_bytes())
    except ValueError as error:
        raise EvaluationError(f"{files[-1]}: is not JSON ({error}); remove it") from error
    missing = [each for each in content.get("missing", []) if each.get("at") != "all"]
    missing.append({"at": "all", "kind": "failed", "reason": reason})
    text = json.dumps({**content, "missing": missing}, indent=2, ensure_ascii=False)
    write_atomically(files[-1], f"{text}\n".encode())
