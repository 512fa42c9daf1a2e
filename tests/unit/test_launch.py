"""How a training process comes to be: hosts, command lines and environments."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.config import ConfigError, LaunchConfig
from megatron_coca.training import launch
from megatron_coca.training.launch import environment as variables
from megatron_coca.training.launch.commands import Script, deepspeed_command, srun_command
from megatron_coca.training.launch.hosts import Host, chosen_hosts
from megatron_coca.training.launch.network import interface_towards
from megatron_coca.training.launch.start import host_plans

SCRIPT = Script("/x/train.py", ("a.yml", "lr=1"))


def configured(**keys: Any) -> LaunchConfig:
    return LaunchConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("localhost", "localhost"),
        ("gpu003", "gpu003"),
        ("gpu[003-007,9]", "gpu003"),
        ("gpu[003-007,9],login", "gpu003"),
        ("gpu[12,14]", "gpu12"),
        ("gpu[007,100-256]", "gpu007"),
        ("login,gpu[1-2]", "login"),
        ("a-1,b-2", "a-1"),
        ("a[1-2],b[3-4],c", "a1"),
        ("node[1-2].cluster.example,x", "node1.cluster.example"),
        ("rack[2-3]node[08-11],x", "rack2node08"),
        ("10.0.0.7", "10.0.0.7"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert variables.first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "[1-2]"])
def test_a_list_without_a_host(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST: .*set MASTER_ADDR"):
        variables.first_host(nodelist)


@pytest.mark.parametrize(
    ("tasks", "counts"), [("8", [8, 8]), ("2(x2)", [2, 2]), ("8(x2),4", [8, 8, 4]), ("1,3(x2)", [1, 3, 3])]
)
def test_tasks_of_every_node(tasks: str, counts: list[int]) -> None:
    assert [variables.tasks_on_node(tasks, node) for node in range(len(counts))] == counts


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "77",
}
DEEPSPEED = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"} | {"LOCAL_SIZE": "2"}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SRUN = {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
}
UNEQUAL = SRUN | {
    "SLURM_NTASKS": "8",  # of the job; the step has fewer
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
ONE_TASK_PER_HOST = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "h",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "run-0.run", "MASTER_PORT": "29500"}
# mpirun within a Slurm job: its daemons are tasks of srun, one for each host.
OPEN_MPI_IN_SLURM = SRUN | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"} | OPEN_MPI


@pytest.mark.parametrize(
    ("environment", "rank", "world", "local", "local_world", "master"),
    [
        (TORCHRUN, 3, 4, 1, 2, "h"),
        (DEEPSPEED, 3, 4, 1, 2, "h"),
        (PYTORCH_JOB, 1, 3, 0, 1, "job-master-0"),
        (SRUN, 3, 4, 1, 2, "gpu07"),
        (SRUN | {"MASTER_ADDR": "mine"}, 3, 4, 1, 2, "mine"),
        (SRUN | {"WORLD_SIZE": "4"}, 3, 4, 1, 2, "gpu07"),  # exported by the batch script, as many do
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, 3, 4, 1, 2, "gpu07"),
        (UNEQUAL, 4, 5, 0, 1, "gpu07"),
        (ONE_TASK_PER_HOST, 3, 4, 0, 1, "gpu07"),
        (OPEN_MPI, 3, 4, 1, 2, "h"),
        (OPEN_MPI_IN_SLURM, 3, 4, 1, 2, "h"),
        (HYDRA, 1, 2, 1, 2, "127.0.0.1"),
        (INDEXED_JOB, 1, 2, 0, 1, "run-0.run"),
        ({}, 0, 1, 0, 1, "127.0.0.1"),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, 0, 1, 0, 1, "127.0.0.1"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 0, 1, 0, 1, "127.0.0.1"),  # the body of a batch script
        (SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PROCID": "0"}, 0, 1, 0, 1, "127.0.0.1"),  # a shell of salloc
    ],
)
def test_places(environment: dict[str, str], rank: int, world: int, local: int, local_world: int, master: str) -> None:
    found = dict(environment)
    launch.complete_environment(found)
    numbers = [int(found[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert (*numbers, found["MASTER_ADDR"]) == (rank, world, local, local_world, master)
    assert 1024 < int(found["MASTER_PORT"]) <= 65535 or found["MASTER_PORT"] == environment["MASTER_PORT"]
    assert launch.under_launcher(environment) is (world > 1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: not set, but RANK found"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK: not set, but LOCAL_RANK and WORLD_SIZE found"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR: not set although WORLD_SIZE is 2"),
        (TORCHRUN | {"RANK": "x"}, "RANK: 'x' is not a whole number"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 is not below the world size 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 is not below the local world size 2"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT: 'http'"),
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE: 8, but srun started 4"),
        ({name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"}, "MASTER_ADDR: not set; Open MPI"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, None),
        ({name: value for name, value in INDEXED_JOB.items() if name != "MASTER_ADDR"}, "MASTER_ADDR: not set; Kube"),
    ],
)
def test_half_an_environment_names_what_is_missing(environment: dict[str, str], message: str | None) -> None:
    if message is None:
        assert not launch.under_launcher(environment)
        return
    with pytest.raises(ConfigError, match=message):
        launch.under_launcher(environment)


def test_gloo_is_told_the_way_to_the_first_host() -> None:
    here = PYTORCH_JOB | {"MASTER_ADDR": "127.0.0.1"}
    for given, expected in ((here, "lo"), (here | {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"), (TORCHRUN, None), ({}, None)):
        found = dict(given) | ({"WORLD_SIZE": "2", "RANK": "0"} if given is TORCHRUN else {})
        launch.complete_environment(found)
        assert found.get("GLOO_SOCKET_IFNAME") == expected
    assert interface_towards("no.such.host.invalid") is None


def test_ports_of_slurm_jobs_and_steps_differ() -> None:
    ports = []
    for changes in ({}, {"SLURM_JOB_ID": "123457"}, {"SLURM_STEP_ID": "1"}):
        place = variables.find_place(SRUN | changes)
        assert place is not None and place == variables.find_place(SRUN | changes), "all tasks must agree"
        ports.append(place.port)
    assert len(set(ports)) == 3


def test_threads_are_shared_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables.os, "sched_getaffinity", lambda _: set(range(8)))
    assert [launch.threads_per_process({"LOCAL_WORLD_SIZE": str(count)}) for count in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert launch.threads_per_process({}) == 8


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text("# three hosts\na slots=8\n\nb slots=8  # the second\nc slots = 2\n")
    return str(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"a": range(8), "b": range(8), "c": range(2)}),
        ({"num_nodes": 2, "num_gpus": 4}, {"a": range(4), "b": range(4)}),
        ({"include": "b@c:1"}, {"b": range(8), "c": [1]}),
        ({"include": "b:0@b:3,2"}, {"b": [0, 2, 3]}),
        ({"exclude": "a@b:0,7"}, {"b": range(1, 7), "c": range(2)}),
        ({"exclude": "c", "num_gpus": 1}, {"a": [0], "b": [0]}),
    ],
)
def test_chosen_hosts(hostfile: str, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    hosts = chosen_hosts(configured(hostfile=hostfile, **keys))
    assert hosts == [Host(name, tuple(slots)) for name, slots in expected.items()]


@pytest.mark.parametrize(
    ("keys", "slots"),
    [({}, [0]), ({"num_gpus": 3}, [0, 1, 2]), ({"include": "localhost:1,3"}, [1, 3]), ({"num_nodes": 1}, [0])],
)
def test_this_host(keys: dict[str, Any], slots: list[int]) -> None:
    assert chosen_hosts(configured(**keys)) == [Host("localhost", tuple(slots))]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hostfile": "nowhere"}, "hostfile: nowhere: no such file"),
        ({"num_nodes": 2}, "num_nodes: 2 hosts need a hostfile"),
        ({"text": "a slots=2\nb\n"}, "hosts:2: 'b' is not of the form"),
        ({"text": "a slots=2\na slots=3\n"}, "hosts:2: a is there already"),
        ({"text": "# none\n"}, "names no host"),
        ({"text": "a slots=2\n", "num_nodes": 3}, "num_nodes: 3, but there are 1 hosts"),
        ({"text": "a slots=2\n", "num_gpus": 3}, "num_gpus: 3, but a has 2 slots"),
        ({"text": "a slots=2\n", "include": "a", "exclude": "a"}, "include: contradicts exclude"),
        ({"text": "a slots=2\n", "include": "d"}, r"include: no host d \(a\)"),
        ({"text": "a slots=2\n", "exclude": "a:2"}, "exclude: a has no slot 2"),
        ({"text": "a slots=2\n", "exclude": "a"}, "exclude: leaves no slot"),
        ({"text": "a slots=2\n", "include": "a:x"}, "'a:x' is not of the form"),
    ],
)
def test_hosts_that_cannot_be_used(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    text = keys.pop("text", None) if (keys := dict(keys)) else None
    if text is not None:
        (tmp_path / "hosts").write_text(text)
        keys["hostfile"] = str(tmp_path / "hosts")
    with pytest.raises(ConfigError, match=message):
        chosen_hosts(configured(**keys))


def test_what_every_host_runs(hostfile: str) -> None:
    keys = configured(hostfile=hostfile, include="a:4,5@c", master_addr="10.0.0.1", master_port=12345)
    given = {"NCCL_DEBUG": "INFO", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "7", "WANDB_MODE": "offline"}
    first, second = host_plans(keys, chosen_hosts(keys), given, SCRIPT)
    assert (first.first_rank, second.first_rank, first.world_size, second.world_size) == (0, 2, 4, 4)
    assert (second.master, second.port) == ("10.0.0.1", 12345)
    assert second.environment == {"NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    shown = [plan._variables({"CUDA_VISIBLE_DEVICES": "8,9"}, 1) for plan in (first, second)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shown] == ["4,5", "8,9"], "only a choice of devices is imposed"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [shown[1][name] for name in names] == ["3", "4", "1", "2", "10.0.0.1", "12345"]


def test_slurm_needs_no_hostfile() -> None:
    keys = configured(launcher="slurm", num_gpus=8, num_nodes=4, comment="a b", account="lab")
    command = srun_command(keys, {"SLURM_JOB_ID": "1"}, SCRIPT)
    options = command[1 : command.index(sys.executable)]
    assert {"--ntasks-per-node=8", "--nodes=4", "--comment=a b", "--account=lab"} <= set(options)
    assert not any(option.startswith(("--gpus", "--nodelist")) for option in options), "the allocation has them"
    assert command[-3:] == ["/x/train.py", "a.yml", "lr=1"]
    assert "--gpus-per-node=8" in srun_command(keys, {}, SCRIPT)


def test_slurm_with_a_part_of_a_hostfile(hostfile: str) -> None:
    command = srun_command(configured(hostfile=hostfile, exclude="c"), {}, SCRIPT)
    assert {"--ntasks-per-node=8", "--nodes=2", "--nodelist=a,b"} <= set(command)
    with pytest.raises(ConfigError, match="as many tasks on every host"):
        srun_command(configured(hostfile=hostfile), {}, SCRIPT)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("pdsh", None),
        ("openmpi", "-x MASTER_ADDR=a -x MASTER_PORT=29500"),
        ("mvapich", "-env MASTER_ADDR=a -env MASTER_PORT=29500"),
    ],
)
def test_launchers_of_deepspeed(
    hostfile: str, monkeypatch: pytest.MonkeyPatch, kind: str, arguments: str | None
) -> None:
    keys = configured(hostfile=hostfile, launcher=kind, master_addr="a", force_multi=True, no_ssh_check=True)
    with pytest.raises(ConfigError, match=f"launcher: {kind} is not installed here"):
        deepspeed_command(keys, chosen_hosts(keys), SCRIPT)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    command = deepspeed_command(keys, chosen_hosts(keys), SCRIPT)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert command[-3:] == ["/x/train.py", "a.yml", "lr=1"]
    assert {f"--hostfile={hostfile}", f"--launcher={kind}", "--master_addr=a", "--master_port=29500"} <= set(command)
    assert {"--force_multi", "--no_ssh_check", "--no_local_rank"} <= set(command)
    assert [part for part in command if part.startswith("--launcher_args")] == (
        [f"--launcher_args={arguments}"] if arguments else []
    )


def test_mpirun_cannot_leave_out_a_host(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    keys = configured(hostfile=hostfile, launcher="openmpi", num_nodes=2)
    with pytest.raises(ConfigError, match="openmpi uses every slot"):
        deepspeed_command(keys, chosen_hosts(keys), SCRIPT)
