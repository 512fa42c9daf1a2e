"""Processes that end together: statuses, signals, failures."""

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launch_cases import ROOT, SAVING, Launch, alive, all_ready, eventually, finish, launcher  # noqa: F401

from megatron_coca.training.launch.processes import SETTLE


def test_every_process_knows_its_place(launch: Launch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    body = f'sys.stdout.write(" ".join(os.environ[n] for n in {names}) + f" {{sys.argv[1:]}}\\n")'
    status, output, _ = finish(launch(body, "num_gpus=3"))
    assert status == 0
    expected = [f"{rank} 3 {rank} 3 127.0.0.1 ['argument']" for rank in range(3)]
    assert sorted(output.splitlines()) == expected


def test_one_process_trains_where_it_is(launch: Launch) -> None:
    assert finish(launch("", "num_gpus=1"))[0] == 99


def test_a_pod_starts_the_others_of_its_host(launch: Launch) -> None:
    body = 'sys.stdout.write(f\'{rank} {os.environ["WORLD_SIZE"]} {os.environ["MASTER_ADDR"]}\\n\')'
    pod = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "master-0", "MASTER_PORT": "1234"}
    status, output, _ = finish(launch(body, **pod))
    assert status == 0 and sorted(output.splitlines()) == ["2 6 master-0", "3 6 master-0"]
    assert finish(launch(body, LOCAL_RANK="0", **pod))[0] == 99, "torchrun and deepspeed start every process themselves"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(75)", 75, ""),
        ("sys.exit(2)", 2, "rank . ended with exit status 2"),
        ("sys.exit(75 if rank else 3)", 3, "rank 0 ended with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, r"was ended by SIGSEGV, exit status 139"),
    ],
)
def test_exit_statuses_are_kept(launch: Launch, body: str, status: int, message: str) -> None:
    found, output, _ = finish(launch(body))
    assert found == status
    assert output == "" if not message else re.search(message, output)


def test_one_failure_ends_the_others(launch: Launch) -> None:
    """Processes that do not answer are killed."""
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN) if rank else os.kill(os.getpid(), 9)\nwait()"
    status, output, seconds = finish(launch(body))
    assert status == 137 and seconds < 50, "the other would sleep for 60 seconds"
    assert output.startswith("rank 0 was ended by SIGKILL (") and output.count("\n") == 1
    assert "exit status 137; stopping the others" in output


def test_the_cause_is_named_not_its_consequences(launch: Launch, tmp_path: Path) -> None:
    body = """
    if rank:
        (folder / "begun").write_text(str(os.getpid()))
        (folder / "begun").rename(folder / "cause")
        os.kill(os.getpid(), 9)
    while not (folder / "cause").exists():
        time.sleep(0.01)
    while Path("/proc", (folder / "cause").read_text()).exists():  # until the launcher has taken note of its end
        time.sleep(0.01)
    (folder / "last").write_text(str(time.time()))
    sys.exit("connection closed by peer")
    """
    status, output, _ = finish(launch(body))
    waited = time.time() - float((tmp_path / "last").read_text())
    assert status == 137 and "rank 1 was ended by SIGKILL" in output and "rank 0" not in output
    assert "connection closed by peer" in output, "the others may print their own errors"
    assert waited < SETTLE, "the launcher does not wait for processes that have ended"


REPORTING = """
from megatron_coca.work import error_report
error_report.install()
def fail_in(file):
    exec(compile("raise RuntimeError('connection closed by peer')", file, "exec"))
"""


def test_the_first_error_is_shown_whole_and_the_others_in_a_line(launch: Launch) -> None:
    body = """
    cause = Path(__file__).with_name("cause")
    if rank == 1:
        cause.with_suffix(".begun").write_text(str(os.getpid()))
        cause.with_suffix(".begun").rename(cause)
        raise ValueError("the cause")
    while not cause.exists():
        time.sleep(0.01)
    while Path("/proc", cause.read_text()).exists():  # until the launcher has taken note of its end
        time.sleep(0.01)
    raise RuntimeError(f"closed by peer\\nat length")
    """
    status, output, _ = finish(launch(REPORTING + textwrap.dedent(body), "num_gpus=4"))
    assert status == 1 and output.count("Traceback") == 1, output
    heading, _, rest = output.partition("the first error, of rank 1:\nTraceback")
    assert heading == "rank 1 ended with exit status 1; stopping the others\n", output
    assert rest.splitlines()[-2:] == ["ValueError: the cause", "rank 0, rank 2, rank 3: RuntimeError: closed by peer"]


def test_an_error_of_communication_is_a_consequence_even_if_it_comes_first(launch: Launch) -> None:
    body = """
    fail_in("/torch/distributed/distributed_c10d.py") if rank == 0 else time.sleep(0.5)
    raise ValueError("the cause")
    """
    status, output, _ = finish(launch(REPORTING + textwrap.dedent(body)))
    assert status == 1 and output.count("Traceback") == 1, output
    assert "the first error, of rank 1:" in output and "rank 0: RuntimeError: connection closed by peer" in output


def test_an_error_of_communication_without_another_is_shown_whole(launch: Launch) -> None:
    status, output, _ = finish(launch(REPORTING + 'fail_in("/torch/distributed/distributed_c10d.py")'))
    assert status == 1 and output.count("Traceback") == 1, output
    assert output.count("RuntimeError: connection closed by peer") == 1, output


def test_an_input_error_is_told_once(launch: Launch) -> None:
    body = 'error_report.tell("hidden_size: must be even\\nheads: must divide it")\nsys.exit(2)'
    status, output, _ = finish(launch(REPORTING + body, "num_gpus=3"))
    assert status == 2 and output.splitlines()[1:] == ["hidden_size: must be even", "heads: must divide it"], output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_reaches_all_and_is_waited_for(launch: Launch, tmp_path: Path, number: int) -> None:
    process = launch(SAVING)
    all_ready(tmp_path)
    process.send_signal(number)
    status, output, _ = finish(process)
    assert status == 75 and output == ""
    assert (tmp_path / "saved.0").exists() and (tmp_path / "saved.1").exists()


def test_a_failure_while_saving_is_a_failure(launch: Launch, tmp_path: Path) -> None:
    process = launch(SAVING.replace("sys.exit(75)", "sys.exit(75 if rank == 0 else 2)"))
    all_ready(tmp_path)
    process.send_signal(signal.SIGTERM)
    status, output, _ = finish(process)
    assert status == 2 and "rank 1 ended with exit status 2" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preempted_before_anything_could_be_saved(launch: Launch, tmp_path: Path, number: int) -> None:
    """The signal ends processes that have no handler yet, which is not a failure."""
    process = launch("wait()")
    all_ready(tmp_path)
    process.send_signal(number)
    status, output, _ = finish(process)
    assert status == 75 and output == ""


def test_ctrl_c_is_quiet_and_comes_once(launch: Launch, tmp_path: Path) -> None:
    body = """
    count = 0
    def note(number, frame):
        global count
        count += 1
        write(f"interrupt{count}")
    signal.signal(signal.SIGINT, note)
    write("ready")
    while not count:
        time.sleep(0.01)
    time.sleep(0.3)
    sys.exit(130)
    """
    process = launch(body)
    all_ready(tmp_path)
    process.send_signal(signal.SIGINT)
    status, output, _ = finish(process)
    assert status == 130 and output == ""
    assert not list(tmp_path.glob("interrupt2.*"))


def test_a_second_ctrl_c_kills(launch: Launch, tmp_path: Path) -> None:
    process = launch("signal.signal(signal.SIGINT, lambda *_: write('asked'))\nwhile True:\n    wait()")
    all_ready(tmp_path)
    process.send_signal(signal.SIGINT)
    assert eventually(lambda: len(list(tmp_path.glob("asked.*"))) == 2)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_a_single_interrupted_rank_is_the_cause_of_the_errors_of_others(launch: Launch, tmp_path: Path) -> None:
    body = """
    write("ready")
    sys.exit(1) if rank else time.sleep(0.5)
    sys.exit(130)
    """
    assert finish(launch(body))[0] == 130


def test_a_failure_after_ctrl_c_is_a_failure(launch: Launch, tmp_path: Path) -> None:
    body = SAVING.replace("signal.SIGTERM", "signal.SIGINT")
    process = launch(body.replace("sys.exit(75)", "sys.exit(130 if rank == 0 else 2)"))
    all_ready(tmp_path)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 2


def test_a_killed_launcher_leaves_nobody_and_no_file_behind(launch: Launch, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait()", TMPDIR=str(temporary))
    all_ready(tmp_path)
    process.kill()
    numbers = [int(path.read_text()) for path in tmp_path.glob("ready.*")]
    assert eventually(lambda: not any(map(alive, numbers)), 5)
    assert not list(temporary.iterdir())


def test_ignored_signals_stay_ignored(launch: Launch, tmp_path: Path) -> None:
    """nohup ignores SIGHUP for whatever it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launch("write('ready')\ntime.sleep(1)")
    finally:
        signal.signal(signal.SIGHUP, before)
    all_ready(tmp_path)
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 0


@pytest.mark.parametrize("module", ["training.monitoring.watchdog", "training.launch", "work.statuses", "work.engines"])
def test_the_launcher_loads_no_torch(module: str) -> None:
    code = f"import sys, megatron_coca.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
