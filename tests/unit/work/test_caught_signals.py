"""CaughtSignals records signals and restores handlers."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_coca.work.signals import PREEMPTION, CaughtSignals
from tests.patience import patience

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", PREEMPTION)
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


def test_a_process_that_ends_after_a_signal_ignores_its_repetitions() -> None:
    code = """
import os, signal, sys
from megatron_coca.work.signals import CaughtSignals
from megatron_coca.work.statuses import Preempted
with CaughtSignals(last=True):
    if sys.argv[1] == "this rank":
        os.kill(os.getpid(), signal.SIGXCPU)
    else:
        sys.excepthook = lambda *_: os.kill(os.getpid(), signal.SIGXCPU)
        raise Preempted("on another rank")
os.kill(os.getpid(), signal.SIGXCPU)
"""
    for rank, status in (("this rank", 0), ("another rank", 1)):
        assert subprocess.run([sys.executable, "-c", code, rank], check=False, cwd=ROOT).returncode == status


def test_handlers_are_restored_after_an_error_too() -> None:
    before = [signal.getsignal(number) for number in (*PREEMPTION, signal.SIGINT)]
    with pytest.raises(KeyError), CaughtSignals():
        assert signal.getsignal(signal.SIGINT) == before[-1], "Ctrl-C still raises KeyboardInterrupt"
        raise KeyError
    assert [signal.getsignal(number) for number in (*PREEMPTION, signal.SIGINT)] == before


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
from megatron_coca.work.signals import CaughtSignals
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
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.stdout == f"{-signal.SIGTERM} None\n", done.stderr
