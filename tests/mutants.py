"""Check that the tests notice faults: plant each mutant of `mutants.json` by itself and run the tests of its topic.

    python tests/mutants.py [--only ID ...] [--out FILE] [--baseline] [--check]

A mutant is one line of one function, changed as a developer could get it wrong. It names the function but not the file,
so that it is still found after the function has moved to another file.
"""

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_coca"
MUTANTS = Path(__file__).with_suffix(".json")
TIME_LIMIT = 300.0
"""Seconds for the tests of one mutant; a mutant that makes them take longer counts as killed."""
PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Exit statuses of pytest; INTERRUPTED means that a test file cannot be imported."""
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault to plant.

    Attributes:
        id: its name.
        area: the part of the package that contains it.
        function: the qualified name of a function or method, such as `Blend.sample`.
        before: the line to change, without indentation; it occurs once in all functions of this name.
        after: the changed line.
        tests: the test files that may notice it, the likeliest first.
    """

    id: str
    area: str
    function: str
    before: str
    after: str
    tests: tuple[str, ...]


class SourceLine(NamedTuple):
    """A line of a file; `index` counts from 0."""

    path: Path
    index: int


class Outcome(NamedTuple):
    """Whether a test failed, the first one that did (None if time ran out), and the seconds taken."""

    killed: bool
    by: str | None
    seconds: float


class Refused(Exception):
    """The mutants cannot be tried; the message says why."""


def listed() -> list[Mutant]:
    """Return the mutants of `mutants.json`."""
    return [Mutant(**each | {"tests": tuple(each["tests"])}) for each in json.loads(MUTANTS.read_text())]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the qualified name and the first and last line of each function and method of a module.

    A function defined inside another belongs to the outer one.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, (node.lineno, node.end_lineno or node.lineno)
        else:
            yield from functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def find_lines(mutants: Sequence[Mutant]) -> dict[str, SourceLine]:
    """Return the line of each mutant by the mutant's id. Raises Refused unless each is found exactly once."""
    wanted = {mutant.function for mutant in mutants}
    lines: dict[tuple[str, str], list[SourceLine]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for name, (first, last) in functions(ast.parse(text)):
            for index in range(first - 1, last) if name in wanted else ():
                lines[name, text.split("\n")[index].strip()].append(SourceLine(path, index))
    found = {mutant.id: lines[mutant.function, mutant.before] for mutant in mutants}
    if wrong := [f"{name}: its line occurs {len(same)} times" for name, same in found.items() if len(same) != 1]:
        raise Refused("\n".join(wrong))
    return {name: line for name, (line,) in found.items()}


def text_with(mutant: Mutant, line: SourceLine) -> str:
    """Return the text of the file with the mutant in it. Raises Refused if that is not valid Python."""
    lines = line.path.read_text().split("\n")
    lines[line.index] = lines[line.index].replace(mutant.before, mutant.after)
    text = "\n".join(lines)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise Refused(f"{mutant.id}: {error}") from error
    return text


def run_tests(tests: Sequence[str], limit: float | None) -> Outcome:
    """Run tests until the first failure, then end every process of their process group."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", "not slow and not gpu", *tests]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:  # leftover processes would keep a pipe open
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return Outcome(True, None, time.monotonic() - began)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        report = output.read()
    if process.returncode not in (PASSED, FAILED, INTERRUPTED):
        raise Refused(f"pytest cannot run {' '.join(tests)}:\n{report[-2000:]}")
    failure = FIRST_FAILURE.search(report)
    return Outcome(process.returncode != PASSED, failure.group(1) if failure else None, time.monotonic() - began)


def run_with(mutant: Mutant, line: SourceLine) -> Outcome:
    """Plant a mutant, run its tests, and always restore the file."""
    text, original = text_with(mutant, line), line.path.read_bytes()
    try:
        line.path.write_text(text)
        return run_tests(mutant.tests, TIME_LIMIT)
    finally:
        line.path.write_bytes(original)


def record(mutant: Mutant, outcome: Outcome) -> dict[str, Any]:
    """Return the entry of a mutant in the file of results."""
    by = "the time limit" if outcome.killed and outcome.by is None else outcome.by
    result = {"killed": outcome.killed, "by": by, "seconds": round(outcome.seconds, 1)}
    return {name: getattr(mutant, name) for name in ("id", "area", "function", "before", "after")} | result


def refuse_changed_files() -> None:
    """Raise Refused if a tracked file has uncommitted changes, which could be confused with a mutant."""
    status = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    if changed := subprocess.run(status, capture_output=True, text=True, check=True).stdout:
        raise Refused(f"commit or undo these changes first:\n{changed}")


def main() -> None:
    """Try the chosen mutants that are not yet in the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID", help="try only these mutants")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of results; mutants in it are not tried again")
    parser.add_argument("--baseline", action="store_true", help="first check that the tests pass without any mutant")
    parser.add_argument("--check", action="store_true", help="only check that the line of every mutant is found")
    given = parser.parse_args()
    mutants = listed()
    if unknown := set(given.only or ()) - {mutant.id for mutant in mutants}:
        raise Refused(f"no mutant is called {', '.join(sorted(unknown))}")
    found = find_lines(mutants)
    for mutant in mutants:
        text_with(mutant, found[mutant.id])
    if given.check:
        return
    refuse_changed_files()
    results = json.loads(given.out.read_text()) if given.out is not None and given.out.exists() else []
    done = {each["id"] for each in results}
    mutants = [each for each in mutants if each.id not in done and (given.only is None or each.id in given.only)]
    if given.baseline:
        whole = run_tests(sorted({test for mutant in mutants for test in mutant.tests}), None)
        if whole.killed:
            raise Refused(f"{whole.by} fails without any mutant")
    for mutant in mutants:
        results.append(record(mutant, run_with(mutant, found[mutant.id])))
        verdict = f"killed by {results[-1]['by']}" if results[-1]["killed"] else "survived"
        print(f"{mutant.id}: {verdict} ({results[-1]['seconds']:.0f} s)", flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{sum(each['killed'] for each in results)} of {len(results)} killed")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a planted mutant is removed then too
    try:
        main()
    except Refused as refusal:
        sys.exit(str(refusal))
