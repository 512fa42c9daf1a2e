"""Run named cases one after the other, and write a JSON line for each as soon as it ends.

A script of cases can be killed at any time. The same command then continues after the last finished case.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GpuCase = Callable[[], Mapping[str, Any] | None]
"""A function that checks or measures something. It returns its figures, and raises an error if a check fails."""
MOST = 8
"""Maximum number of processes that share the cases of a script."""
TRIES = 2
"""How often a case is started before it counts as one that ends or blocks the process."""


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if it does not exist. An incomplete last line is left out."""
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def write_line(file: Path, **values: Any) -> None:
    """Append a line and flush it to the operating system, so that it is kept if this process is killed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cut = file.is_file() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
    with file.open("a") as output:
        output.write("\n" * cut + json.dumps(values) + "\n")


def run_cases(cases: Mapping[str, GpuCase], file: Path) -> int:
    """Run the cases that `file` does not contain yet. Return 1 if a case failed in this run or an earlier one, else 0.

    After a CUDA error no kernel can run in this process, so the script starts itself again for the other cases.
    """
    for name, case in cases.items():
        lines = [line for line in read_lines(file) if line.get("case") == name]
        if any(line["status"] != "started" for line in lines):
            continue
        if len(lines) >= TRIES:
            write_line(
                file, case=name, status="failed", error=f"the process was killed or ended {TRIES} times in this case"
            )
            continue
        write_line(file, case=name, status="started")
        start = time.perf_counter()
        try:
            figures: dict[str, Any] = {"status": "ok", **(case() or {})}
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            memory = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
            figures = {"status": "out of memory" if memory else "failed", "error": message}
        write_line(file, case=name, seconds=round(time.perf_counter() - start, 2), **figures)
        print(name, figures["status"], figures.get("error", ""), flush=True)
        if "CUDA error" in figures.get("error", ""):
            os.execv(sys.executable, [sys.executable, *sys.argv])
    return int(any_failed(file))


def any_failed(file: Path) -> bool:
    """Return whether a case in `file` failed."""
    return any(line.get("status") == "failed" for line in read_lines(file))


def count_started(file: Path) -> int:
    """Return how often a case was started."""
    return sum(line.get("status") == "started" for line in read_lines(file))


def _run_to_the_end(commands: list[list[str]], file: Path) -> None:
    """Run the commands at the same time. If a signal ends a command in a case, it runs again, at most `TRIES` times per
    case.
    """
    started = -1
    while commands and started < (started := count_started(file)):
        processes = [subprocess.Popen(command) for command in commands]
        statuses = [process.wait() for process in processes]
        commands = [command for command, status in zip(commands, statuses, strict=True) if status < 0]


def run_in_parallel(cases: Mapping[str, GpuCase], file: Path, share: str | None) -> int:
    """Run the cases as `run_cases` does, but in several processes, because most of their time is compilation.

    This function starts the same command several times with the option --share. `share` is the value of that option:
    "INDEX/COUNT" in the processes that were started, otherwise None. The number of processes is half the number of CPU
    cores, at most `MOST`.
    """
    count = max(1, min(MOST, len(os.sched_getaffinity(0)) // 2, len(cases)))
    if share is None and count > 1:
        commands = ([sys.executable, *sys.argv, "--share", f"{index}/{count}"] for index in range(count))
        _run_to_the_end(list(commands), file)
        unfinished = {*cases} - {line.get("case") for line in read_lines(file) if line.get("status") != "started"}
        for name in sorted(unfinished):
            write_line(file, case=name, status="failed", error="the process ended before this case")
        return int(any_failed(file))
    index, _, every = (share or "0/1").partition("/")
    return run_cases(dict(list(cases.items())[int(index) :: int(every)]), file)
