"""Check that the tests notice faults: plant each mutant in `mutants.json` and run the tests that may see it.

    python tests/mutants.py [--only ID ...] [--out FILE] [--baseline] [--check]

A mutant is one line of one function, changed as a developer could get it wrong. It names its function and not its file,
so that it is found again wherever the function has been moved to.
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
"""Seconds that the tests of a mutant may take; one that makes them hang is killed."""
PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Exit statuses of pytest; it is interrupted where a test file cannot be imported."""
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault to plant.

    Attributes:
        id: its name.
        area: the part of the package that it is in.
        function: the qualified name of a function or method, such as `Blend.sample`.
        before: the line that is changed, without its indentation; no other in the functions of this name is like it.
        after: what it becomes.
        tests: the test files that may notice, the likeliest first.
    """

    id: str
    area: str
    function: str
    before: str
    after: str
    tests: tuple[str, ...]


class Place(NamedTuple):
    """Where a mutant goes: a file and the index of the line in it."""

    path: Path
    line: int


class Outcome(NamedTuple):
    """What the tests said: whether one failed, the first that did (None where time ran out), and the seconds taken."""

    killed: bool
    by: str | None
    seconds: float


class Refused(Exception):
    """The mutants cannot be tried as things are."""


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """All functions and methods of a module by their qualified names, with their first and last line; what is defined
    within a function is a part of it.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, (node.lineno, node.end_lineno or node.lineno)
        else:
            yield from functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def places(mutants: Sequence[Mutant]) -> dict[str, Place]:
    """Where each mutant goes, by its id. Raises Refused where the line of one is not found exactly once."""
    wanted = {mutant.function for mutant in mutants}
    lines: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for name, (first, last) in functions(ast.parse(text)):
            for number in range(first - 1, last) if name in wanted else ():
                lines[name, text.split("\n")[number].strip()].append(Place(path, number))
    found = {mutant.id: lines[mutant.function, mutant.before] for mutant in mutants}
    if wrong := [f"{name}: its line is there {len(at)} times" for name, at in found.items() if len(at) != 1]:
        raise Refused("\n".join(wrong))
    return {name: at for name, (at,) in found.items()}


def planted(mutant: Mutant, place: Place) -> str:
    """The text of the file with the mutant in it. Raises Refused where that is no Python."""
    lines = place.path.read_text().split("\n")
    lines[place.line] = lines[place.line].replace(mutant.before, mutant.after)
    text = "\n".join(lines)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise Refused(f"{mutant.id}: {error}") from error
    return text


def run_tests(tests: Sequence[str], limit: float | None) -> Outcome:
    """Run tests up to the first failure; no process that they started in their group outlives them."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", "not slow and not gpu", *tests]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:  # a pipe would be kept open by processes that are left over
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
        said = output.read()
    if process.returncode not in (PASSED, FAILED, INTERRUPTED):
        raise Refused(f"pytest cannot run {' '.join(tests)}:\n{said[-2000:]}")
    failure = FIRST_FAILURE.search(said)
    return Outcome(process.returncode != PASSED, failure.group(1) if failure else None, time.monotonic() - began)


def tried(mutant: Mutant, place: Place) -> Outcome:
    """Plant a mutant, run its tests, and take it out again, whatever happens."""
    text, original = planted(mutant, place), place.path.read_bytes()
    try:
        place.path.write_text(text)
        return run_tests(mutant.tests, TIME_LIMIT)
    finally:
        place.path.write_bytes(original)


def record(mutant: Mutant, outcome: Outcome) -> dict[str, Any]:
    """A mutant and what became of it, as it is written to the file of results."""
    by = "the time limit" if outcome.killed and outcome.by is None else outcome.by
    said = {"killed": outcome.killed, "by": by, "seconds": round(outcome.seconds, 1)}
    return {name: getattr(mutant, name) for name in ("id", "area", "function", "before", "after")} | said


def refuse_changed_files() -> None:
    """Raise Refused where a tracked file differs from the commit: a mutant could hide the change."""
    status = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    if changed := subprocess.run(status, capture_output=True, text=True, check=True).stdout:
        raise Refused(f"commit or undo these changes first:\n{changed}")


def main() -> None:
    """Try the mutants that are asked for and not yet in the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID", help="try these mutants")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of results; those in it are not tried again")
    parser.add_argument("--baseline", action="store_true", help="first see that the tests pass without any mutant")
    parser.add_argument("--check", action="store_true", help="only see that the line of every mutant is there")
    given = parser.parse_args()
    mutants = [Mutant(**each | {"tests": tuple(each["tests"])}) for each in json.loads(MUTANTS.read_text())]
    if unknown := set(given.only or ()) - {mutant.id for mutant in mutants}:
        raise Refused(f"no mutant is called {', '.join(sorted(unknown))}")
    found = places(mutants)
    for mutant in mutants:
        planted(mutant, found[mutant.id])
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
        results.append(record(mutant, tried(mutant, found[mutant.id])))
        said = f"killed by {results[-1]['by']}" if results[-1]["killed"] else "survived"
        print(f"{mutant.id}: {said} ({results[-1]['seconds']:.0f} s)", flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{sum(each['killed'] for each in results)} of {len(results)} killed")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a mutant is taken out then too
    try:
        main()
    except Refused as refusal:
        sys.exit(str(refusal))
