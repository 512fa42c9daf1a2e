"""The watchdog, in processes of their own that really hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_coca.training.monitoring.watchdog import Watchdog
from megatron_coca.work.statuses import HUNG
from tests.patience import patience

ROOT = Path(__file__).parents[3]
TIMEOUT, GRACE, LONG_GRACE = patience(0.4), patience(0.3), patience(2.0)
HEAD = f"""
import ctypes, os, sys, threading, time
from pathlib import Path
from megatron_coca.training.monitoring.watchdog import Watchdog

def watchdog(rank=3, grace={GRACE}):
    return Watchdog({TIMEOUT}, Path(sys.argv[1]), rank, grace=grace)

def stuck(action):
    with watchdog() as dog:
        dog.beat("step 11")
        dog.beat("step 12")
        action()
"""
HANGS = {
    "sleep": ("stuck(lambda: time.sleep(60))", "is in <lambda>"),
    "lock": ("lock = threading.Lock()\nlock.acquire()\nstuck(lock.acquire)", "is in stuck"),
    "C without the global lock": ("stuck(lambda: ctypes.CDLL(None).sleep(60))", "is in <lambda>"),
    "another thread": (
        "def waits_for_ever(): threading.Event().wait()\n"
        "thread = threading.Thread(target=waits_for_ever, daemon=True)\nthread.start()\nstuck(thread.join)",
        "in waits_for_ever",
    ),
}


def start(code: str, folder: Path, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HEAD + code, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=patience(60))
    return process.returncode, output, errors


def run(code: str, folder: Path) -> tuple[int, str, str]:
    return finish(start(code, folder))


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """Every hang's report folder, exit status and standard error; they hang at the same time."""
    folders = {name: tmp_path_factory.mktemp("hang") / "run" for name in HANGS}
    started = {name: start(code, folders[name]) for name, (code, _) in HANGS.items()}
    ended = {name: finish(process) for name, process in started.items()}
    return {name: (folders[name], status, errors) for name, (status, _, errors) in ended.items()}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_reported_and_ends_the_process(name: str, hung: dict[str, tuple[Path, int, str]]) -> None:
    folder, status, errors = hung[name]
    assert status == HUNG, errors
    assert (
        "rank 3 on " in errors and "the last heartbeat was 'step 12', number 3" in errors and HANGS[name][1] in errors
    )
    assert "most recent call first" in errors
    assert (folder / "hang_rank_3.txt").read_text() == errors


def test_c_code_that_keeps_the_global_lock(tmp_path: Path) -> None:
    status, _, errors = run("stuck(lambda: ctypes.PyDLL(None).sleep(60))", tmp_path)
    assert status == -signal.SIGALRM
    assert errors.startswith(f"rank 3: ended after no answer for {TIMEOUT + 3 * GRACE:g} s") and "in stuck" in errors


def test_c_code_that_keeps_the_global_lock_while_nobody_reads_the_stacks(tmp_path: Path) -> None:
    code = """
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
stuck(lambda: ctypes.PyDLL(None).sleep(60))
"""
    process = start(code, tmp_path)
    assert process.wait(timeout=patience(30)) == -signal.SIGKILL
    process.communicate()


def test_progress_keeps_it_quiet(tmp_path: Path) -> None:
    code = f"""
with watchdog() as dog:
    for step in range(5):
        time.sleep({TIMEOUT / 3})
        dog.beat(f"step {{step}}")
time.sleep({TIMEOUT * 1.5})
print("done")
"""
    assert run(code, tmp_path) == (0, "done\n", "")
    assert not list(tmp_path.iterdir())


def test_progress_after_the_report_lets_the_run_go_on(tmp_path: Path) -> None:
    code = f"""
with watchdog(grace={2 * GRACE}) as dog:
    while not Path(sys.argv[1], "hang_rank_3.txt").exists():  # the report may come late on a busy machine
        time.sleep(0.02)
    for _ in range(12):  # six times GRACE, so that the grace ends
        dog.beat("step 1")
        time.sleep({GRACE / 2})
print("done")
"""
    status, output, errors = run(code, tmp_path)
    assert (status, output) == (0, "done\n")
    assert "no progress" in errors and "continues with 'step 1'; increase watchdog_timeout" in errors


def test_a_full_pipe_does_not_keep_the_process(tmp_path: Path) -> None:
    """The full pipe causes the hang, and writing the report to it would hang again."""
    process = start("stuck(lambda: os.write(2, b'x' * 2**20))", tmp_path)
    assert process.wait(timeout=patience(30)) == HUNG
    assert "the last heartbeat was 'step 12'" in (tmp_path / "hang_rank_3.txt").read_text()
    process.communicate()


def child_of(process: int) -> int:
    """Return the number of the process that watches a process from outside."""
    (child,) = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("both", [False, True], ids=["alone", "with the process that watches it"])
@pytest.mark.parametrize("grace", [LONG_GRACE, GRACE], ids=["short", "beyond all limits"])
def test_a_suspended_process_has_not_hung(grace: float, both: bool, tmp_path: Path) -> None:
    """The process sleeps in small pieces: a single sleep could end during the suspension, and a beat would follow at
    once. Of the suspension, at most half of the timeout counts; the pieces take less than a third of it.
    """
    suspension = TIMEOUT * 2 if grace == LONG_GRACE else 2 * (TIMEOUT + 3 * GRACE)
    code = f"""
with watchdog(grace={grace}) as dog:
    print("ready", flush=True)
    for _ in range(10):
        time.sleep({TIMEOUT / 40})
    dog.beat("step 1")
"""
    process = start(code, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    processes = [process.pid, *([child_of(process.pid)] if both else [])]
    for each in processes:
        os.kill(each, signal.SIGSTOP)
    time.sleep(suspension)
    for each in reversed(processes):
        os.kill(each, signal.SIGCONT)
    assert finish(process) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_that_watches_ends_with_the_process(number: signal.Signals, tmp_path: Path) -> None:
    process = start(f'with watchdog(grace={LONG_GRACE}):\n    print("ready", flush=True)\n    time.sleep(60)', tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    child = child_of(process.pid)
    process.send_signal(number)
    assert process.communicate() == ("", "") and process.returncode == -number  # it inherits standard error, too
    deadline = time.monotonic() + patience(30)
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, errors = run(HANGS["sleep"][0], tmp_path / "file" / "run")
    assert status == HUNG and "no progress" in errors and "hang_rank_3.txt: cannot be written" in errors


WAITING = f"""
import torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{{sys.argv[1]}}/meet", rank=rank, world_size=2)
with watchdog(rank, grace={LONG_GRACE} * (1 + rank)) as dog:
    dist.barrier()
    dog.beat("step 1")
    time.sleep(60) if rank == 1 else dist.barrier()
"""


def test_a_hanging_rank_is_told_from_one_that_waits(tmp_path: Path) -> None:
    """The rank that waits ends first: the end of the other one would be an error in its barrier."""
    command = [sys.executable, "-c", HEAD + WAITING, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [rank.communicate(timeout=patience(120))[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [HUNG, HUNG], errors
    reports = [(tmp_path / f"hang_rank_{rank}.txt").read_text() for rank in range(2)]
    assert "the main thread waits for other ranks in " in reports[0]
    assert "the main thread is in <module>" in reports[1]
    assert all("the last heartbeat was 'step 1', number 2" in report for report in reports)


def test_without_a_timeout_it_does_nothing() -> None:
    with Watchdog(None, None, 0) as dog:
        dog.beat("step 1")


def test_a_job_in_the_background_that_hangs_ends_a_run_that_makes_progress(tmp_path: Path) -> None:
    code = """
with watchdog() as dog:
    dog.follow("saving step 8: writing the state")
    while True:
        dog.beat("a step")
        time.sleep(0.01)
"""
    status, _, errors = run(code, tmp_path)
    assert status == HUNG and "heartbeat was 'saving step 8: writing the state', number 1" in errors


def test_a_job_that_makes_progress_or_is_done_has_not_hung(tmp_path: Path) -> None:
    code = f"""
with watchdog(grace={LONG_GRACE}) as dog:
    for number in range(40):
        dog.beat("a step")
        dog.follow("saving" if number < 20 else None)
        time.sleep({TIMEOUT / 10})
"""
    assert run(code, tmp_path) == (0, "", "")
