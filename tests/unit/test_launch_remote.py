"""Processes on other hosts, behind a stand-in for ssh that runs the command here."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from launch_cases import SAVING, Launch, alive, all_ready, eventually, finish, launcher  # noqa: F401

STAND_IN = """#!/bin/sh
[ "$1" = -G ] && { echo "hostname $2.example"; exit; }
shift 2  # -o BatchMode=yes
[ "$1" = unreachable ] && { echo "ssh: no route to host" >&2; exit 255; }
echo $$ > "$FOLDER/ssh.$1"
sh -c "$2"
"""


@pytest.fixture
def over_ssh(tmp_path: Path, launch: Launch) -> Launch:
    """over_ssh(body, hosts): the launching process of scripts on two slots of each host."""

    def run(body: str, hosts: str = "a b", *keys: str, **environment: str) -> subprocess.Popen[str]:
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(STAND_IN)
        ssh.chmod(0o755)
        file = tmp_path / "hosts"
        file.write_text("".join(f"{host} slots=2\n" for host in hosts.split()))
        path = f"{ssh.parent}:{os.environ['PATH']}"
        return launch(body, f"hostfile={file}", *keys, PATH=path, FOLDER=str(tmp_path), **environment)

    return run


def test_every_process_knows_its_place(over_ssh: Launch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG")
    body = f'sys.stdout.write(" ".join(os.environ[n] for n in {names}) + "\\n")'
    status, output, _ = finish(over_ssh(body, "a b", NCCL_DEBUG="a 'b'"))
    assert status == 0, output
    expected = [f"{rank} 4 {rank % 2} 2 a.example 29500 a 'b'" for rank in range(4)]
    assert sorted(output.splitlines()) == expected


def test_a_failure_ends_the_other_hosts(over_ssh: Launch) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsys.exit(3) if rank == 2 else wait()"
    status, output, seconds = finish(over_ssh(body))
    assert status == 3 and seconds < 15
    assert "rank 2 on b ended with exit status 3" in output and "host b ended with exit status 3" in output
    assert "rank 0" not in output and "host a" not in output


def test_errors_of_other_hosts_are_shortened_where_they_follow_from_another(over_ssh: Launch) -> None:
    body = """
    from megatron_coca.training.exit_status import uncaught
    uncaught.install()
    if rank == 1:
        raise ValueError("the cause")
    time.sleep(0.5)
    exec(compile("raise RuntimeError('closed by peer')", "/torch/distributed/distributed_c10d.py", "exec"))
    """
    status, output, _ = finish(over_ssh(body))
    assert status == 1 and output.count("Traceback") == 1, output
    assert "the first error, of rank 1 on a:" in output and "rank 0 on a: RuntimeError: closed by peer" in output
    assert "rank 2 on b, rank 3 on b: RuntimeError: closed by peer" in output, output


def test_hosts_of_ranks_that_did_not_join_are_named(over_ssh: Launch) -> None:
    status, output, _ = finish(over_ssh("sys.exit(79) if rank == 0 else wait()"))
    assert status == 79 and "ranks by host: a: 0-1; b: 2-3" in output, output


def test_a_host_that_is_not_reached(over_ssh: Launch) -> None:
    status, output, _ = finish(over_ssh("wait()", "a unreachable"))
    assert status == 255
    assert "ssh: no route to host" in output
    assert "host unreachable, which ssh could not reach or lost, ended with exit status 255" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_reaches_all_hosts(over_ssh: Launch, tmp_path: Path, number: int) -> None:
    process = over_ssh(SAVING)
    all_ready(tmp_path, 4)
    process.send_signal(number)
    status, output, _ = finish(process)
    assert status == 75 and output == ""
    assert len(list(tmp_path.glob("saved.*"))) == 4


def test_when_the_launcher_is_killed_the_hosts_save_and_end(over_ssh: Launch, tmp_path: Path) -> None:
    process = over_ssh(SAVING)
    all_ready(tmp_path, 4)
    process.kill()
    assert eventually(lambda: len(list(tmp_path.glob("saved.*"))) == 4)


def test_a_lost_connection_ends_the_run(over_ssh: Launch, tmp_path: Path) -> None:
    process = over_ssh(SAVING)
    all_ready(tmp_path, 4)
    os.kill(int((tmp_path / "ssh.b").read_text()), signal.SIGKILL)
    status, output, _ = finish(process)
    assert status == 137 and "host b was ended by SIGKILL" in output
    numbers = [int(path.read_text()) for path in tmp_path.glob("ready.*")]
    assert eventually(lambda: not any(map(alive, numbers)), 10)
