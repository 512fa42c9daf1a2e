"""How a training process comes to be: command lines and environments."""

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.config import ConfigError, LaunchConfig
from megatron_coca.training import launch


def configured(**keys: Any) -> LaunchConfig:
    return LaunchConfig.model_validate(keys)


def option(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("localhost", "localhost"),
        ("gpu003", "gpu003"),
        ("gpu[003-007,9]", "gpu003"),
        ("gpu[003-007,9],login", "gpu003"),
        ("gpu[12,14]", "gpu12"),
        ("login,gpu[1-2]", "login"),
        ("a-1,b-2", "a-1"),
        ("node[1-2].cluster.example,x", "node1.cluster.example"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert launch.first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "[1-2]"])
def test_a_list_without_a_host(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST: .*set MASTER_ADDR"):
        launch.first_host(nodelist)


@pytest.mark.parametrize("keys", [{}, {"num_gpus": 1}])
def test_one_process_needs_no_launcher(keys: dict[str, Any]) -> None:
    assert launch.launcher_command(configured(**keys), "train.py", ["a.yml"]) is None


def test_several_processes_on_this_machine() -> None:
    command = launch.launcher_command(configured(num_gpus=2), "/x/train.py", ["a.yml", "--num_gpus", "2", "lr=1"])
    assert command is not None
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert command[-5:] == ["/x/train.py", "a.yml", "--num_gpus", "2", "lr=1"]
    before = command[: command.index("/x/train.py")]
    assert option(before, "--num_gpus") == "2" and "--no_local_rank" in before
    assert 0 < int(option(before, "--master_port") or 0) <= 65535
    assert not {"--hostfile", "--launcher", "--num_nodes", "--force_multi"} & set(before)


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text("a slots=8\n")
    return str(path)


def test_a_missing_hostfile_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hostfile: nowhere: no such file"):
        launch.launcher_command(configured(hostfile="nowhere"), "train.py", [])


def test_several_hosts(hostfile: str) -> None:
    keys = {
        "hostfile": hostfile,
        "include": "a:0",
        "num_nodes": 4,
        "num_gpus": 8,
        "master_addr": "a",
        "master_port": 12345,
    }
    flags = {"launcher": "openmpi", "force_multi": True, "no_ssh_check": True}
    command = launch.launcher_command(configured(**keys, **flags), "train.py", [])
    assert command is not None
    for name, value in (keys | {"launcher": "openmpi"}).items():
        assert option(command, f"--{name}") == str(value)
    assert {"--force_multi", "--no_ssh_check"} <= set(command) and "--exclude" not in command


def test_a_hostfile_alone_starts_the_launcher(hostfile: str) -> None:
    command = launch.launcher_command(configured(hostfile=hostfile), "train.py", [])
    assert command is not None and option(command, "--hostfile") == hostfile and "--num_gpus" not in command


def test_exit_status_of_the_launcher_is_passed_on() -> None:
    assert launch.relaunch([sys.executable, "-c", "raise SystemExit(2)"]) == 2


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "77",
}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "77",
}
SRUN = {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0"}, False),
        (TORCHRUN, True),
        (DEEPSPEED, True),
        (SRUN, True),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"SLURM_NTASKS": "4"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False),
    ],
)
def test_under_launcher(environment: dict[str, str], expected: bool) -> None:
    assert launch.under_launcher(environment) is expected


def completed(environment: dict[str, str]) -> dict[str, str]:
    environment = dict(environment)
    launch.complete_environment(environment)
    return environment


def test_torchrun_is_left_as_it_is() -> None:
    assert completed(TORCHRUN) == TORCHRUN


def test_deepspeed_gets_the_local_world_size() -> None:
    assert completed(DEEPSPEED) == DEEPSPEED | {"LOCAL_WORLD_SIZE": "2"}


def test_srun() -> None:
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"}
    found = completed(SRUN)
    assert {name: found[name] for name in expected} == expected
    assert completed(SRUN)["MASTER_PORT"] == found["MASTER_PORT"], "all tasks must agree on it"
    assert 1024 < int(found["MASTER_PORT"]) <= 65535
    other_job = completed(SRUN | {"SLURM_JOB_ID": "123457"})
    assert other_job["MASTER_PORT"] != found["MASTER_PORT"]
    assert completed(SRUN | {"MASTER_ADDR": "mine", "MASTER_PORT": "9"})["MASTER_ADDR"] == "mine"


@pytest.mark.parametrize("environment", [{}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}])
def test_alone(environment: dict[str, str]) -> None:
    found = completed(environment)
    expected = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    assert {name: found[name] for name in expected} == expected
    assert 1024 < int(found["MASTER_PORT"]) <= 65535


def test_threads_are_shared_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(8)))
    assert [launch.threads_per_process({"LOCAL_WORLD_SIZE": str(count)}) for count in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert launch.threads_per_process({}) == 8
