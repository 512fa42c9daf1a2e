"""The launches of a run. `launches.jsonl` in its folder has one line for each start and one for each recorded end.

The line of a start says how the previous launch ended. The main rank records an end that it survives. A batch script
records any other end with `megatron-coca requeue`, because a killed process writes nothing. This module does not import
PyTorch.
"""

import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from megatron_coca.support.errors import UNAVAILABLE, UNUSABLE
from megatron_coca.support.plain_text import masked
from megatron_coca.support.regular_files import open_to_append, read_regular
from megatron_coca.work.statuses import DONE, FAILED, FINAL, HUNG, INTERRUPTED, PREEMPTED, UNJOINED, meaning

logger = logging.getLogger(__name__)

LAUNCHES = "launches.jsonl"
START, END, REQUEUED, GAVE_UP = "start", "end", "requeued", "gave up"
"""Events: a start of training, an end that the main rank recorded, and the two decisions of a batch script."""

UNBLAMED = (UNAVAILABLE, PREEMPTED, HUNG, UNJOINED)
"""Exit statuses for which no node is blamed: the cause is elsewhere, or all processes end with this status."""
NO_RECORD = "killed, or its host was lost"
FAILURES_OF_A_NODE = 2
"""Number of failures after which a job no longer uses a node."""
_SRUN = re.compile(r"srun: error: (?P<nodes>\S+): tasks? [\d,-]+: (?P<end>.*)")
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (?P<node>[^\s,\[\]]+)")
_KILLS = ("srun: First task exited", "srun: Terminating", "srun: Job step aborted", "srun: Force Terminated")
"""Beginnings of the messages with which srun announces that it kills the remaining tasks."""
_RUNNING = re.compile(r"^srun: StepId=\S+ (tasks? [\d,-]+): running", re.MULTILINE)
"""Matches srun's line about a task that did not end within srun's `--wait` after another task had failed."""
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")


def read_launches(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `launches.jsonl`; a line that is incomplete or damaged is left out. Raises OSError."""
    try:
        texts = read_regular(folder / LAUNCHES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("event"), str):
            lines.append(line)
    return lines


def reason_of_start(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason of the next start: how the last launch in `lines` ended."""
    if not lines:
        return "first start"
    last = lines[-1]
    return NO_RECORD if last["event"] == START else str(last.get("why", last["event"]))


def append(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line. If a killed process left an incomplete line, end that line first. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_to_append(folder / LAUNCHES) as file:
        broken = file.tell() and not read_regular(folder / LAUNCHES).endswith(b"\n")
        text = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line})
        file.write(b"\n" * bool(broken) + text.encode() + b"\n")


class LaunchRecord:
    """Context manager that records the start of this launch, when `start` is called, and its end.

    A failed write is logged, and the training continues.
    """

    def __init__(self, folder: Path, active: bool) -> None:
        """`active` is true on the main rank, the only one that writes."""
        self._folder, self._active, self._started = folder, active, False

    def __enter__(self) -> Self:
        return self

    def start(self, step: int, last: int, nodes: Sequence[str], save: str | None) -> None:
        """Record a start from `step` in a run with `last` steps. `nodes` has the host of every rank."""
        if not self._active:
            return
        self._started = True
        try:
            why = reason_of_start(read_launches(self._folder))
        except OSError as error:
            why = f"unknown ({error})"
        logger.info("start from step %d: %s", step, why)
        hosts = {"nodes": list(dict.fromkeys(nodes)), "ranks": len(nodes), "save": save}
        self._append({"event": START, "why": why, "step": step, "last": last} | hosts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._started:
            return
        status = DONE if error is None else int(getattr(error, "status", FAILED))
        if isinstance(error, KeyboardInterrupt):
            status = INTERRUPTED
        unexpected = status in (FAILED, UNUSABLE)
        text = f": {masked(str(error).partition(chr(10))[0])[:200]}" if unexpected else ""
        self._append({"event": END, "status": status, "why": meaning(status) + text})

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            append(self._folder, {**line, "job": os.environ.get("SLURM_JOB_ID")})
        except OSError as error:
            logger.warning("%s: cannot be written (%s); the run continues", self._folder / LAUNCHES, error)


class StepFailure(NamedTuple):
    """The end of a Slurm step: the first error that srun reported, and the node of the error if it happened on a single
    node.
    """

    text: str
    node: str | None


def first_failure(errors: str) -> StepFailure | None:
    """Return the failure that ended a step, from the messages of srun.

    This is the failure of the first task that a signal ended or, if no signal ended a task, the first error of a task.
    The signal counts first because other tasks may report their errors before Slurm reports the kill. Tasks that end
    after srun began to kill tasks do not count.

    If a task did not end by itself, its host may be lost, and this may have caused the errors of the other tasks. In
    this case no node is blamed for an exit code.
    """
    running = _RUNNING.search(errors)
    found: list[tuple[bool, StepFailure]] = []
    for line in errors.splitlines():
        if line.startswith(_KILLS):
            break
        if (lost := _NODE_FAILURE.match(line)) is not None:
            found.append((False, StepFailure(f"node failure on {lost['node']}", lost["node"])))
        elif (task := _SRUN.match(line)) is not None:
            code = _EXIT_CODE.match(task["end"])
            blamed = code is None or int(code[1]) not in (*FINAL, *UNBLAMED)
            single = not set("[,") & set(task["nodes"])
            node = task["nodes"] if blamed and single else None
            text = f"{task['nodes']}: {task['end']}"
            if code is not None and running is not None:
                node, text = None, f"{text}; {running[1]} did not end"
            found.append((code is not None, StepFailure(text, node)))
    return min(found, key=lambda each: each[0])[1] if found else None


class RequeueDecision(NamedTuple):
    """Whether a job is requeued, the reason, and the nodes that the job must not use any more."""

    requeue: bool
    why: str
    excluded: tuple[str, ...] = ()


def decide(
    lines: Sequence[Mapping[str, Any]], status: int, step: int, job: str, failure: StepFailure | None, limit: int
) -> RequeueDecision:
    """Decide what happens after a Slurm step of `job` ended with `status`. `step` is the training step of the newest
    checkpoint, or 0 if there is none.
    """
    why = meaning(status) + (f" ({failure.text})" if failure is not None else "")
    if status in FINAL:
        return RequeueDecision(False, why)
    own = [line for line in lines if line["event"] == REQUEUED and str(line.get("job")) == job]
    failures = Counter(str(line["node"]) for line in own if line.get("node"))
    failures.update([failure.node] if failure is not None and failure.node is not None else [])
    excluded = tuple(sorted(node for node, number in failures.items() if number >= FAILURES_OF_A_NODE))
    without_progress = sum(line.get("step") == step for line in own)
    if without_progress >= limit:
        return RequeueDecision(
            False, f"{why}; requeued {without_progress} times without a checkpoint after step {step}"
        )
    return RequeueDecision(True, why, excluded)
