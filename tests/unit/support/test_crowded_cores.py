"""The warning about crowded cores, with a fake clock and fake usage."""

import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import pytest

from megatron_coca.support import crowded_cores
from megatron_coca.support.crowded_cores import SLICE, WINDOW, CrowdedCores

BUSY = {"cores": 1.0, "interruptions": 250.0}
"""Two threads beside one busy process on two cores."""


class Machine:
    """A clock and the usage of a process, which `work` moves on."""

    def __init__(self, threads: int = 2, environment: Mapping[str, str] | None = None) -> None:
        self.now, self.used, self.interrupted = 100.0, 50.0, 7.0
        self.cores = CrowdedCores(
            threads, lambda: self.now, lambda: (self.used, int(self.interrupted)), environment or {}
        )

    def pass_time(self, seconds: float, cores: float, interruptions: float) -> None:
        self.now += seconds
        self.used += cores * seconds
        self.interrupted += interruptions * seconds

    def work(self, seconds: float, cores: float, interruptions: float, step: float = 0.5) -> list[str]:
        """Compute in steps and return the messages."""
        messages = []
        for _ in range(round(seconds / step)):
            self.pass_time(step, cores, interruptions)
            messages.append(self.cores.look())
        return [message for message in messages if message is not None]


def test_crowded_cores_are_reported_once() -> None:
    machine = Machine()
    assert machine.work(WINDOW - 1, **BUSY) == []
    (message,) = machine.work(2, **BUSY)
    assert re.match(r"busy cores: .*30 s, 2 threads .*1\.0 cores .*250 times", message)
    assert "set OMP_WAIT_POLICY=passive before the command" in message
    assert machine.work(10 * WINDOW, **BUSY) == []


@pytest.mark.parametrize(
    "quiet",
    [
        {"cores": 1.9, "interruptions": 5.0},  # idle cores
        {"cores": 1.0, "interruptions": 5.0},  # threads that wait for the main thread
        {"cores": 1.9, "interruptions": 250.0},  # another thread of this process needs a core
    ],
)
def test_other_work_is_not_reported(quiet: dict[str, float]) -> None:
    assert Machine().work(10 * WINDOW, **quiet) == []


def test_every_slice_of_the_window_is_crowded() -> None:
    machine = Machine()
    for _ in range(20):
        assert machine.work(WINDOW - SLICE, **BUSY) == []
        assert machine.work(SLICE, cores=1.9, interruptions=5.0) == []
    assert len(machine.work(WINDOW, **BUSY)) == 1


def test_work_aside_does_not_count() -> None:
    """Saves, validations and waits neither make a window crowded nor end it."""
    idle, crowded = Machine(), Machine()
    messages: dict[Machine, list[str]] = {idle: [], crowded: []}
    for _ in range(20):
        for machine in (idle, crowded):
            messages[machine] += machine.work(
                4, **({"cores": 1.9, "interruptions": 100.0} if machine is idle else BUSY)
            )
            with machine.cores.aside():
                machine.pass_time(60, **(BUSY if machine is idle else {"cores": 2.0, "interruptions": 0.0}))
    assert messages[idle] == []
    (message,) = messages[crowded]
    assert re.search(r"30 s, 2 threads .*1\.0 cores .*250 times", message)


def test_a_restart_begins_a_new_window() -> None:
    machine = Machine()
    for _ in range(20):
        assert machine.work(WINDOW - 1, **BUSY) == []
        machine.cores.restart()
    assert len(machine.work(WINDOW, **BUSY)) == 1


@pytest.mark.parametrize(
    ("environment", "threads"), [({}, 1), ({"OMP_WAIT_POLICY": "active"}, 2), ({"GOMP_SPINCOUNT": "0"}, 2)]
)
def test_nothing_is_said_without_a_remedy(environment: dict[str, str], threads: int) -> None:
    assert Machine(threads, environment).work(10 * WINDOW, cores=threads / 2, interruptions=250.0) == []


def test_a_process_with_little_processor_time_is_interrupted_less() -> None:
    assert len(Machine().work(WINDOW, cores=0.2, interruptions=20.0)) == 1
    assert Machine().work(10 * WINDOW, cores=0.2, interruptions=1.0) == []


def test_many_threads_are_interrupted_more_often_on_idle_cores() -> None:
    assert Machine(64).work(10 * WINDOW, cores=60.0, interruptions=200.0) == []
    assert len(Machine(64).work(2 * WINDOW, cores=60.0, interruptions=400.0)) == 1


def test_one_long_step_is_a_window() -> None:
    machine = Machine()
    machine.pass_time(2 * WINDOW, **BUSY)
    message = machine.cores.look()
    assert message is not None and "for 60 s" in message


def test_threads_beside_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowded_cores, "WINDOW", 1.0)
    monkeypatch.setattr(crowded_cores, "SLICE", 0.25)
    threads, ended, content = max(2, len(os.sched_getaffinity(0))), threading.Event(), bytes(1 << 20)

    def compute() -> None:
        while not ended.is_set():
            hashlib.sha256(content)  # releases Python's lock

    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(threads)]
    computing = [threading.Thread(target=compute) for _ in range(threads)]
    try:
        for thread in computing:
            thread.start()
        watch, deadline, message = CrowdedCores(threads, environment={}), time.monotonic() + 60, None
        while message is None and time.monotonic() < deadline:
            time.sleep(0.05)
            message = watch.look()
    finally:
        ended.set()
        for thread in computing:
            thread.join()
        for other in others:
            other.kill()
            other.wait()
    assert message is not None and f"{threads} threads ran on" in message
