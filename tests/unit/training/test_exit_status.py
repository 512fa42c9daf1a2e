"""CaughtSignals records signals and restores handlers; exit statuses are documented."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_coca.training.exit_status import (
    EXIT_STATUSES,
    SIGNALS,
    CaughtSignals,
    Diverged,
    Preempted,
    Stopped,
    Unsaved,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted(number: signal.Signals) -> None:
    with CaughtSignals() as preemption:
        assert preemption.requested is None
        os.kill(os.getpid(), number)
        assert preemption.requested == number.name


def test_the_first_signal_counts_and_none_interrupts() -> None:
    done = []
    with CaughtSignals() as preemption:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
            done.append(number)
    assert len(done) == 3 and preemption.requested == "SIGUSR1"


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with CaughtSignals() as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
        assert preemption.requested is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_restored_after_an_error_too() -> None:
    before = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)]
    with pytest.raises(KeyError), CaughtSignals():
        assert signal.getsignal(signal.SIGINT) == before[-1], "Ctrl-C still raises KeyboardInterrupt"
        raise KeyError
    assert [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)] == before


def test_the_handler_of_ctrl_c_is_restored_after_two_stages() -> None:
    before = signal.getsignal(signal.SIGINT)
    with CaughtSignals() as preemption:
        preemption.save_on_interrupt()
        preemption.save_on_interrupt()
    assert signal.getsignal(signal.SIGINT) == before


def test_in_another_thread_it_notes_nothing() -> None:
    found = []

    def enter() -> None:
        with CaughtSignals() as preemption:
            found.append((preemption.requested, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(None, before)]


def test_a_forked_worker_still_ends_by_the_signal() -> None:
    code = """
import multiprocessing, time
from megatron_coca.training.exit_status import CaughtSignals
context = multiprocessing.get_context("fork")
ready = context.Event()
def work():
    ready.set()
    time.sleep(60)
with CaughtSignals() as preemption:
    worker = context.Process(target=work)
    worker.start()
    ready.wait()
    worker.terminate()
    worker.join(10)
    print(worker.exitcode, preemption.requested)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{-signal.SIGTERM} None\n", done.stderr


@pytest.mark.parametrize(("kind", "status"), [(Preempted, 75), (Diverged, 77), (Unsaved, 78)])
def test_orderly_ends_of_a_run_know_their_status(kind: type[Stopped], status: int) -> None:
    with pytest.raises(Stopped) as caught:
        raise kind("SIGTERM")
    assert caught.value.status == status and status in EXIT_STATUSES


def test_every_exit_status_is_documented() -> None:
    section = (ROOT / "docs" / "faults.md").read_text().partition("## Exit statuses")[2].partition("##")[0]
    statuses = re.findall(r"^\| (\d+) \| \S.* \| \S.* \|$", section, re.MULTILINE)
    assert tuple(map(int, statuses)) == EXIT_STATUSES


@pytest.mark.parametrize("module", ["exit_status", "watchdog", "launch"])
def test_the_launcher_loads_no_torch(module: str) -> None:
    code = f"import sys, megatron_coca.training.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
