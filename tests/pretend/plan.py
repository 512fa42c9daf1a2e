"""Run the plan of the GPU report on the stand-in device, kill it in every part, and write a page about it.

    python -m tests.pretend plan --page benchmarks/pretend/plan.md

The report is started again and again by the same command. In every part that it reaches, it is killed by SIGKILL after
the first result of the part.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.pretend import budgets
from tests.pretend.build import ROOT
from tools.gpu.cases import read_lines
from tools.gpu.plans import ONE_GPU, STAND_IN
from tools.gpu.runner import DONE, RUNNING, Item, items, read_record

PATIENCE = 5.0
"""Seconds after which a part is killed that has only one result, at its end: `resume` and `tests`."""
MINUTES = 600
SHOWN = {"smoke": 2, "parity": 5, "tests": 29}
"""Parts after which the page shows the answers, and the minute of the plan at which they end on a GPU at the latest."""
Results = dict[tuple[str, str], Any]
"""Finished results by run and case. A run without cases has one result, its record."""


class Watched:
    """The report, started by the same command after every kill.

    Attributes:
        found: the runs of each part.
        before: the results of each part at its kill.
        answers: the table of answers on the page when the parts of `SHOWN` have ended.
    """

    def __init__(self, output: Path, limits: float) -> None:
        options = f"--stand-in --limits {limits:g} --minutes {MINUTES} --output {output}"
        self.command = [sys.executable, "-m", "tests.pretend", "run", "tools/gpu_report.py", *options.split()]
        self.page = output / "gpu_report.md"
        every = items(ONE_GPU, output)
        self.found = {part: [item for item in every if item.part == part] for part in ONE_GPU}
        self.before: dict[str, Results] = {}
        self.answers: dict[str, str] = {}

    def run(self) -> None:
        """Run the report to its end, with a kill in each part."""
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        for part in (*ONE_GPU, None):
            process = subprocess.Popen(self.command, cwd=ROOT, env=environment)
            try:
                while process.poll() is None and not (part and self._has_result(part)):
                    self._note_answers()
                    time.sleep(0.2)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            if part:
                self.before[part] = results(self.found[part])
                print(f"killed in {part} after {len(self.before[part])} results", flush=True)
        self._note_answers()

    def _has_result(self, part: str) -> bool:
        found = self.found[part]
        if results(found):
            return True
        begun = [item.record.stat().st_mtime for item in found if read_record(item).get("status") == RUNNING]
        return len(found) == 1 and bool(begun) and time.time() - begun[0] > PATIENCE

    def _note_answers(self) -> None:
        text = self.page.read_text() if self.page.is_file() else ""
        for part in SHOWN.keys() - self.answers.keys():
            statuses = {item.title: read_record(item).get("status") for item in self.found[part]}
            if all(f"| {title} | {status} |" in text and status != RUNNING for title, status in statuses.items()):
                self.answers[part] = without_speeds(text.partition("## Answers so far\n\n")[2].partition("\n\n")[0])

    def repeated(self, part: str) -> int:
        """Return how many results of a part were measured again after its kill."""
        now = results(self.found[part])
        return sum(now.get(key) != value for key, value in self.before[part].items())


def without_speeds(text: str) -> str:
    """Return the answers without figures that a reader could take for those of a GPU."""
    return re.sub(r"\d[\d,.]*(?= tokens/s| of RoFormer| x the time|%| MiB)", "...", text)


def results(found: Sequence[Item]) -> Results:
    """Return the finished results of some runs."""
    lines = {
        (item.title, line["case"]): line
        for item in found
        for line in read_lines(item.results)
        if "case" in line and line["status"] != "started"
    }
    return lines | {(item.title, ""): record for item in found if (record := read_record(item)).get("status") == DONE}


def page(watched: Watched, limits: float) -> str:
    """Return the page in Markdown."""
    return "\n".join([*_head(limits), *_rows(watched), *_reduced(), *_answers(watched)]) + "\n"


def _head(limits: float) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in budgets.versions().items())
    yield from (
        "# The plan on the stand-in device",
        "",
        "**No GPU was used.** The stand-in device ([tests/pretend](../../tests/pretend/README.md)) computes",
        "nothing, so no value was compared. The times are of processes that shared one CPU core with other programs.",
        "They show which parts take longest on the host, and nothing about a GPU.",
        "",
        "The report was killed by SIGKILL in each part, after the part's first result, and started again by the same",
        f"command. The limits of all processes were multiplied by {limits:g}. Versions: {versions}.",
        "To write this page again:",
        "",
        "```bash",
        f"python -m tests.pretend plan --limits {limits:g} --page benchmarks/pretend/plan.md",
        "```",
    )


def _rows(watched: Watched) -> Iterator[str]:
    yield ""
    yield "| part | limit on a GPU | seconds here | CPU seconds here | results at the kill | repeated | its runs |"
    yield "|---|---|---|---|---|---|---|"
    for part, found in watched.found.items():
        records = [read_record(item) for item in found]
        seconds, used = (sum(each.get(key, 0.0) for each in records) for key in ("seconds", "processor_seconds"))
        statuses = [each.get("status", "not run") for each in records]
        counts = ", ".join(f"{statuses.count(each)} {each}" for each in sorted({*statuses}))
        kept = f"{len(watched.before[part])} | {watched.repeated(part)}"
        yield f"| `{part}` | {ONE_GPU[part].seconds} s | {seconds:.0f} | {used:.0f} | {kept} | {counts} |"
    yield ""
    yield "Seconds are those of each run's last process, so a killed process does not count. `resume` and `tests` have"
    yield "one result, at their end, so they were killed while they ran."


def _reduced() -> Iterator[str]:
    yield from ("", "## Options that differ from the plan", "", "| script | added here |", "|---|---|")
    yield from (f"| `python {script}` | `{added}` |" for script, added in STAND_IN.items())
    yield ""
    yield "All other sizes of models, batches and lengths are those of the plan."


def _answers(watched: Watched) -> Iterator[str]:
    yield from ("", "Speeds, shares and memory are replaced by `...` below, because they are not those of a GPU.")
    for part, minute in SHOWN.items():
        yield from ("", f"## The answers after `{part}`, at minute {minute} of the plan", "", watched.answers[part])


def main(output: Path, limits: float, file: Path | None) -> int:
    """Run the report and write the page; return 1 if a result was repeated or a run is not done."""
    watched = Watched(output, limits)
    watched.run()
    if file is not None:
        file.write_text(page(watched, limits))
    undone = [item for found in watched.found.values() for item in found if read_record(item).get("status") != DONE]
    return int(bool(undone) or any(watched.repeated(part) for part in watched.found))
