"""Check that the tests notice faults: plant one small fault at a time and run the tests of its package.

    python tests/mutants.py [--sample 20] [--seed 0] [--files megatron_coca/attention] [--out FILE] [--list]

Faults are derived from the code: a comparison or an operator is exchanged for a similar one, a number is increased by
one, a condition is negated, min becomes max. The seed draws the faults to try. The script runs the tests of the package
in tests/unit, and for the packages that compute attention also those in tests/parity.
"""

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.patience import patience

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_coca"
TIME_LIMIT = patience(600.0)
"""Seconds for the tests of one fault; one that makes them take longer counts as noticed."""
PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Exit statuses of pytest; INTERRUPTED means that a test file cannot be imported."""
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
TURNED = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
PARITY = ("attention", "kernels", "methods")
"""Packages with tests in tests/parity too."""


@dataclass(frozen=True)
class Fault:
    """A change of one expression.

    Attributes:
        file: its file, relative to the root.
        line: its line, from 1.
        before, after: the source of the expression.
        start, end: where that stands in the file, in characters.
    """

    file: str
    line: int
    before: str
    after: str
    start: int
    end: int


@dataclass(frozen=True)
class Outcome:
    """Whether a test failed, the first one that did (None if time ran out), and the seconds taken."""

    noticed: bool
    by: str | None
    seconds: float


def changed(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the faulty forms of an expression, each with one change of its outermost part."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in SWAPPED:
            yield ast.Compare(left, [SWAPPED[type(operator)]()], [right])
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED:
            yield ast.BinOp(left, SWAPPED[type(operator)](), right)
        case ast.BoolOp(operator, operands):
            yield ast.BoolOp(SWAPPED[type(operator)](), operands)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(value) if type(value) in (int, float):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), arguments, keywords) if name in TURNED:
            yield ast.Call(ast.Name(TURNED[name]), arguments, keywords)
        case ast.Call(ast.Attribute(owner, name), arguments, keywords) if name in TURNED:
            yield ast.Call(ast.Attribute(owner, TURNED[name]), arguments, keywords)


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, but none inside an f-string, which have no exact place in the file."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.expr):
        yield node
    for inner in ast.iter_child_nodes(node):
        yield from expressions(inner)


def faults(path: Path) -> list[Fault]:
    """All faults of a file: those inside functions, apart from default values, decorators and annotations."""
    text = path.read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            if not isinstance(node, ast.expr) or isinstance(node, ast.JoinedStr) or node.end_lineno is None:
                continue
            start, end = (
                starts[node.lineno - 1] + node.col_offset,
                starts[node.end_lineno - 1] + int(node.end_col_offset or 0),
            )
            before = text.encode()[start:end].decode()
            for fault in changed(node):
                after = ast.unparse(ast.fix_missing_locations(fault))
                found.append(Fault(str(path.relative_to(ROOT)), node.lineno, before, f"({after})", start, end))
    return sorted({*found}, key=lambda fault: (fault.start, fault.after))


def text_with(fault: Fault) -> str:
    """The text of the file with the fault in it."""
    text = (ROOT / fault.file).read_bytes()
    return (text[: fault.start] + fault.after.encode() + text[fault.end :]).decode()


def drawn(files: Sequence[Path], sample: int, seed: int) -> list[Fault]:
    """`sample` faults of the files, each file as likely as any other, in valid Python."""
    draw = random.Random(seed)
    found = {file: faults(file) for file in files}
    chosen: list[Fault] = []
    while len(chosen) < sample and any(found.values()):
        each = found[draw.choice([file for file in files if found[file]])]
        fault = each.pop(draw.randrange(len(each)))
        with suppress(SyntaxError):  # an expression inside an f-string
            ast.parse(text_with(fault))
            chosen.append(fault)
    return chosen


def tests_of(fault: Fault) -> list[str]:
    """The folders of tests that may notice the fault."""
    package = Path(fault.file).parts[1]
    folders = [f"tests/unit/{package}"] + ["tests/parity"] * (package in PARITY)
    return [folder for folder in folders if (ROOT / folder).is_dir()] or ["tests/unit"]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The fault in its file; removed at the end, whatever happens."""
    path = ROOT / fault.file
    original = path.read_bytes()
    try:
        path.write_text(text_with(fault))
        yield
    finally:
        path.write_bytes(original)


def run_tests(tests: Sequence[str]) -> Outcome:
    """Run tests until the first failure, then end every process of their process group."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", "not slow and not gpu and not serial", *tests]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:  # leftover processes would keep a pipe open
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            return Outcome(True, None, time.monotonic() - began)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        report = output.read()
    if process.returncode not in (PASSED, FAILED, INTERRUPTED):
        sys.exit(f"pytest cannot run {' '.join(tests)}:\n{report[-2000:]}")
    failure = FIRST_FAILURE.search(report)
    return Outcome(process.returncode != PASSED, failure and failure[1], time.monotonic() - began)


def main() -> None:
    """Try the drawn faults that are not yet in the file of results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", nargs="+", type=Path, default=[PACKAGE], help="files or folders of the package")
    parser.add_argument("--sample", type=int, default=20, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="which faults")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON lines of results; faults in it are not tried again"
    )
    parser.add_argument("--list", action="store_true", help="print the faults only")
    given = parser.parse_args()
    files = [
        file
        for each in given.files
        for file in (sorted(each.resolve().rglob("*.py")) if each.is_dir() else [each.resolve()])
    ]
    done = {}
    if given.out and given.out.exists():
        done = {json.dumps(each["fault"]): each for each in map(json.loads, given.out.read_text().splitlines())}
    missed = 0
    for fault in drawn(files, given.sample, given.seed):
        what = f"{fault.file}:{fault.line}: {fault.before} -> {fault.after}"
        if given.list or json.dumps(asdict(fault)) in done:
            print(what)
            continue
        with planted(fault):
            outcome = run_tests(tests_of(fault))
        missed += not outcome.noticed
        print(f"{'noticed' if outcome.noticed else 'MISSED '} {outcome.seconds:5.0f} s  {what}", flush=True)
        if given.out:
            with given.out.open("a") as lines:
                lines.write(json.dumps({"fault": asdict(fault), **asdict(outcome)}) + "\n")
    if missed:
        print(f"{missed} faults that no test noticed")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a planted fault is removed then too
    main()
