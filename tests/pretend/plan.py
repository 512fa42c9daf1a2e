"""Run the plan of the GPU report on the stand-in device, kill every part once, and write a page about it.

    python -m tests.pretend plan --output build/pretend/plan --page benchmarks/pretend/plan.md

Each part is started, killed by SIGKILL after its first result, and started again with the same command. The times say
nothing about a GPU. They include the time that other programs used the CPU core.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.pretend import budgets
from tests.pretend.build import ROOT
from tools.gpu.cases import read_lines
from tools.gpu.plans import ONE_GPU, STAND_IN
from tools.gpu.runner import DONE, RUNNING, Item, items, read_record

PATIENCE = 45.0
"""Seconds after which a process without a result is killed: `resume` and `tests` have only one result, at their end."""
MINUTES = 180
SHOWN = {"smoke": 2, "parity": 5, "tests": 28}
"""Parts after which the page shows the answers, and the minute of the plan at which they end on a GPU at the latest."""


class Outcome(NamedTuple):
    """How a part went.

    Attributes:
        statuses: the final status of each run, by its name.
        seconds: the sum of the runs' times, after the kill.
        processor: seconds of CPU time of the second call, with its processes.
        before: results that existed at the kill.
        repeated: those of them that were measured again.
        answers: the answers of the page after the part.
    """

    statuses: dict[str, str]
    seconds: float
    processor: float
    before: int
    repeated: int
    answers: str


def command(part: str, output: Path, limits: float) -> list[str]:
    """Return the command of the report for one part."""
    options = f"--stand-in --limits {limits:g} --minutes {MINUTES} --only {part} --output {output}"
    return [sys.executable, "-m", "tests.pretend", "run", "tools/gpu_report.py", *options.split()]


def results(found: Sequence[Item]) -> dict[tuple[str, str], Any]:
    """Return the finished results of a part by run and case. A run without cases counts if it is done."""
    lines = {
        (item.title, line["case"]): line
        for item in found
        for line in read_lines(item.results)
        if "case" in line and line["status"] != "started"
    }
    ended = {(item.title, ""): record for item in found if (record := read_record(item)).get("status") == DONE}
    return lines | ended


def kill_after_a_result(part: str, found: Sequence[Item], output: Path, limits: float) -> dict[tuple[str, str], Any]:
    """Start a part, kill the report by SIGKILL, and return the results until then."""
    process = subprocess.Popen(command(part, output, limits), cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    begun: float | None = None
    try:
        while process.poll() is None and not results(found):
            if begun is None and any(read_record(item).get("status") == RUNNING for item in found):
                begun = time.monotonic()
            if begun is not None and time.monotonic() - begun > PATIENCE and len(found) == 1:
                break
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return results(found)


def measure(part: str, output: Path, limits: float) -> Outcome:
    """Kill a part and let it continue."""
    found = [item for item in items(ONE_GPU, output) if item.part == part]
    before = kill_after_a_result(part, found, output, limits)
    start = processor_seconds()
    subprocess.run(command(part, output, limits), cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    after, records = results(found), {item.name: read_record(item) for item in found}
    return Outcome(
        {name: record.get("status", "not run") for name, record in records.items()},
        sum(record.get("seconds", 0.0) for record in records.values()),
        processor_seconds() - start,
        len(before),
        sum(after.get(key) != value for key, value in before.items()),
        answers((output / "gpu_report.md").read_text()),
    )


def processor_seconds() -> float:
    """Return the CPU time of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def answers(page: str) -> str:
    """Return the table of answers of a page."""
    return page.partition("## Answers so far\n\n")[2].partition("\n\n")[0]


def page(outcomes: dict[str, Outcome], limits: float) -> str:
    """Return the page in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in budgets.versions().items())
    return "\n".join([*_head(limits, versions), *_rows(outcomes), *_reduced(), *_answers(outcomes)]) + "\n"


def _head(limits: float, versions: str) -> Iterator[str]:
    yield "# The plan on the stand-in device"
    yield ""
    yield "This page is written by `python -m tests.pretend plan`. **No GPU was used.** The stand-in device"
    yield "([pretend.md](../../docs/pretend.md)) computes nothing, so no value was compared. Times are those of one CPU core"
    yield "that other programs used at the same time. They show which parts take longest on the host, and nothing about a"
    yield "GPU."
    yield ""
    yield "Each part was started, killed by SIGKILL after its first result, and started again with the same command. A"
    yield f"result that existed at the kill is not repeated. All limits were multiplied by {limits:g}. Versions: {versions}."
    yield ""
    yield "```bash"
    yield f"python -m tests.pretend plan --limits {limits:g} --page benchmarks/pretend/plan.md"
    yield "```"


def _rows(outcomes: dict[str, Outcome]) -> Iterator[str]:
    yield ""
    yield "| part | limit on a GPU | seconds here | CPU seconds here | results at the kill | repeated | runs |"
    yield "|---|---|---|---|---|---|---|"
    for part, outcome in outcomes.items():
        counts = [f"{list(outcome.statuses.values()).count(each)} {each}" for each in {*outcome.statuses.values()}]
        figures = f"{ONE_GPU[part].seconds} s | {outcome.seconds:.0f} | {outcome.processor:.0f}"
        yield f"| `{part}` | {figures} | {outcome.before} | {outcome.repeated} | {', '.join(sorted(counts))} |"
    yield ""
    yield "The CPU seconds contain the start of the report, and not the time until the kill."


def _reduced() -> Iterator[str]:
    yield ""
    yield "## Options that differ from the plan"
    yield ""
    yield "| script | added here |"
    yield "|---|---|"
    yield from (f"| `python {script}` | `{added}` |" for script, added in STAND_IN.items())
    yield ""
    yield "The sizes of all other models, batches and lengths are those of the plan."


def _answers(outcomes: dict[str, Outcome]) -> Iterator[str]:
    for part, minute in SHOWN.items():
        if part in outcomes:
            yield ""
            yield f"## The answers after `{part}`, at minute {minute} of the plan"
            yield ""
            yield outcomes[part].answers


def main(output: Path, limits: float, parts: Sequence[str], file: Path | None) -> int:
    """Run the parts and write the page after each; return 1 if a result was repeated or a run is not done."""
    outcomes: dict[str, Outcome] = {}
    for part in parts:
        outcomes[part] = measure(part, output, limits)
        print(part, outcomes[part]._replace(answers=""), flush=True)
        if file is not None:
            file.write_text(page(outcomes, limits))
    complete = all({*outcome.statuses.values()} == {DONE} and not outcome.repeated for outcome in outcomes.values())
    return int(not complete)
