"""Run the processes of a plan one after the other, each within its time limit, and write a record of each.

A run has three files in the output folder: PART.RUN.json (its record), PART.RUN.log (its output) and PART.RUN.jsonl
(its results). The process itself writes the log, and writes each result as soon as it is measured.
"""

import contextlib
import importlib.util
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_coca.support.atomic_write import write_file
from tools.gpu.cases import count_started
from tools.gpu.contents import ROOT, digest
from tools.gpu.plans import PlanPart, Run

ItemRecord = dict[str, Any]
DONE, RUNNING, FAILED, LATE, MISSING = "done", "running", "failed", "ended at its limit", "not run"
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Environment variable -> name of a folder for compiled kernels, below the output folder. A resumed run finds them
there and does not compile them again.
"""
LOCAL = ("*.so", "*.best_config")
"""Files in these folders that fit only the machine that wrote them: libraries built for its C library, and choices of
the kernels that were fastest there.
"""


class Item(NamedTuple):
    """A run of a part. `place` is the path of its files without their suffixes."""

    part: str
    name: str
    run: Run
    place: Path

    @property
    def title(self) -> str:
        return f"{self.part}.{self.name}"

    @property
    def record(self) -> Path:
        return self.place.with_name(f"{self.title}.json")

    @property
    def results(self) -> Path:
        return self.place.with_name(f"{self.title}.jsonl")

    @property
    def log(self) -> Path:
        return self.place.with_name(f"{self.title}.log")

    def command(self) -> list[str]:
        """The command of the process."""
        words = {"FILE": str(self.results), "FOLDER": str(self.place.with_name(f"{self.title}.scratch"))}
        return [sys.executable, *(words.get(word, word) for word in shlex.split(self.run.command))]


def items(plan: Mapping[str, PlanPart], output: Path) -> list[Item]:
    """Return all runs of a plan in order."""
    return [
        Item(part, name, run, output.resolve() / f"{part}.{name}")
        for part, each in plan.items()
        for name, run in each.runs.items()
    ]


def read_record(item: Item) -> ItemRecord:
    """Return the record of a run; empty if no valid record exists."""
    try:
        return dict(json.loads(item.record.read_text()))
    except (OSError, TypeError, ValueError):
        return {}


def identity(item: Item, here: Mapping[str, Any]) -> ItemRecord:
    """Return everything that a result depends on: the code that runs, the library versions and the GPU. A commit
    that changes other files does not matter.
    """
    versions = {name: text for name, text in here["versions"].items() if name != "commit"}
    return {"content": digest(item.run.command, item.run.reads), "versions": versions, "gpu": here.get("gpu")}


def waiting(found: Sequence[Item], here: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the runs that are not done: first those that have not been tried with the present code, then those that
    failed.
    """
    tried: list[Item] = []
    for item in found:
        record = read_record(item)
        same = record.get("identity") == identity(item, here)
        if not same or record.get("status") in (RUNNING, MISSING):
            yield item
        elif record["status"] != DONE:
            tried.append(item)
    yield from tried


def missing_packages(run: Run) -> list[str]:
    """Return the packages that a run needs and that are not installed."""
    return [name for name in run.needs if importlib.util.find_spec(name) is None]


def execute(item: Item, here: Mapping[str, Any]) -> ItemRecord:
    """Run a process within its limit, and return its record, which is written before and after the process runs.

    If an earlier process of the same code was killed or reached its limit, its results are kept, and the new process
    continues after them. If a signal ends a process in a case, for example because the driver crashed, the process is
    started again for the other cases.
    """
    before = read_record(item)
    record: ItemRecord = {"identity": identity(item, here), "machine": dict(here)}
    end_orphan(before)
    if before.get("identity") != record["identity"] or before.get("status") not in (RUNNING, LATE):
        item.results.unlink(missing_ok=True)
    if absent := missing_packages(item.run):
        return _written(item, record | {"status": MISSING, "seconds": 0.0, "missing": absent})
    item.place.parent.mkdir(parents=True, exist_ok=True)
    start, cases, used = time.monotonic(), -1, _processor_seconds()
    status: int | None = -1
    with item.log.open("w") as log:
        while status is not None and status < 0 and cases < (cases := count_started(item.results)):
            status = _process(item, record, log, start + item.run.seconds - time.monotonic())
    ends = {0: DONE, None: LATE}
    record |= {"status": ends.get(status, FAILED), "seconds": time.monotonic() - start, "exit": status}
    return _written(item, record | {"processor_seconds": _processor_seconds() - used})


def _processor_seconds() -> float:
    """Return the CPU time of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _process(item: Item, record: ItemRecord, log: IO[str], seconds: float) -> int | None:
    """Run the process of an item once, and return its exit status; None if its time was over."""
    command = item.command()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(item.place.parent),
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _written(item, record | {"status": RUNNING, "seconds": 0.0, "process": process.pid, "command": command})
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end = end_tree if process.poll() is None else end_group  # an ended process's number may be in use again
        end(process.pid)
        process.wait()


def _written(item: Item, record: ItemRecord) -> ItemRecord:
    item.record.parent.mkdir(parents=True, exist_ok=True)
    write_file(item.record, json.dumps(record, indent=1))
    return record


def carry_caches(source: Path, output: Path) -> None:
    """Let a report begin with the compiled kernels in `source`, if that folder exists and the report has none yet.

    PyTorch and Triton use a kernel only for the same versions and type of GPU, and compile all others.
    """
    target, partial = output / "cache", output / "cache.part"
    if source.is_dir() and not target.exists():
        shutil.rmtree(partial, ignore_errors=True)  # left by a call that was killed
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(*LOCAL))
        partial.rename(target)


def _environment(output: Path) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    folders = {name: str(output / "cache" / folder) for name, folder in CACHES.items()}
    return folders | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def end_tree(root: int) -> None:
    """Kill a process and everything that it started. A training run starts its ranks in sessions of their own."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
    tree = [root]
    for process in tree:  # the list grows meanwhile
        tree += [child for child, parent in parents.items() if parent == process]
    for process in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    end_group(root)


def end_group(group: int) -> None:
    """Kill the processes that are left in a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_orphan(record: ItemRecord) -> None:
    """Kill the process of a record if it still runs, because this program was killed before the process ended."""
    number = record.get("process")
    if record.get("status") != RUNNING or number is None:
        return
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return
    if [word.decode(errors="replace") for word in words] == record.get("command"):
        end_tree(number)
