"""The rank of a process by the variables of launchers and schedulers."""

import pytest

from megatron_coca.config import ConfigError
from megatron_coca.training import launch
from megatron_coca.training.launch import environment as variables
from megatron_coca.training.launch.environment import find_location, interface_towards


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
def test_nodelist_without_a_host(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST: .*set MASTER_ADDR"):
        variables.first_host(nodelist)


@pytest.mark.parametrize(
    ("tasks", "counts"), [("8", [8, 8]), ("2(x2)", [2, 2]), ("8(x2),4", [8, 8, 4]), ("1,3(x2)", [1, 3, 3])]
)
def test_tasks_on_node(tasks: str, counts: list[int]) -> None:
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
        ({}, 0, 1, 0, 1, "127.0.0.1"),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, 0, 1, 0, 1, "127.0.0.1"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 0, 1, 0, 1, "127.0.0.1"),  # the body of a batch script
        (SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PROCID": "0"}, 0, 1, 0, 1, "127.0.0.1"),  # a shell of salloc
    ],
)
def test_rank_location(
    environment: dict[str, str], rank: int, world: int, local: int, local_world: int, master: str
) -> None:
    completed = dict(environment)
    launch.complete_environment(completed)
    numbers = [int(completed[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert (*numbers, completed["MASTER_ADDR"]) == (rank, world, local, local_world, master)
    assert 1024 < int(completed["MASTER_PORT"]) <= 65535 or completed["MASTER_PORT"] == environment["MASTER_PORT"]
    assert (find_location(environment) is not None) is (world > 1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: not set, unlike RANK"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK: not set, .*LOCAL_RANK and WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR: not set, although WORLD_SIZE is 2"),
        (TORCHRUN | {"RANK": "x"}, "RANK: 'x' is not a whole number"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 must be less than the world size 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 .*less than .*local world size 2"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT: 'http'"),
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE: 8, but srun started 4"),
        (
            {name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"},
            "MASTER_ADDR: not set, but Open MPI",
        ),
    ],
)
def test_incomplete_environment_names_the_missing_variables(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_location(environment)


def test_gloo_uses_the_interface_towards_the_first_host() -> None:
    here = PYTORCH_JOB | {"MASTER_ADDR": "127.0.0.1"}
    for given, expected in ((here, "lo"), (here | {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"), (TORCHRUN, None)):
        completed = dict(given)
        launch.complete_environment(completed)
        assert completed.get("GLOO_SOCKET_IFNAME") == expected
    assert interface_towards("::1") is None


ONE_HOST = TORCHRUN | {"WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "127.0.0.1"),
        (ONE_HOST, "127.0.0.1"),
        (ONE_HOST | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "h"),
        (SRUN | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, "127.0.0.1"),
        (PYTORCH_JOB | {"MASTER_ADDR": "localhost"}, "127.0.0.1"),
    ],
)
def test_processes_of_one_host_use_the_loopback(environment: dict[str, str], address: str) -> None:
    completed = dict(environment)
    launch.complete_environment(completed)
    assert completed["MASTER_ADDR"] == address
    assert completed["GLOO_SOCKET_IFNAME"] == completed["NCCL_SOCKET_IFNAME"] == "lo"
    chosen = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1"}
    launch.complete_environment(completed := environment | chosen)
    assert completed | chosen == completed, "interfaces that the user sets are kept"


def test_ranks_without_a_local_world_size_may_be_on_several_hosts() -> None:
    completed = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h"}
    launch.complete_environment(completed)
    assert completed["MASTER_ADDR"] == "h" and "NCCL_SOCKET_IFNAME" not in completed


def test_ports_of_slurm_jobs_and_steps_differ() -> None:
    ports = []
    for changes in ({}, {"SLURM_JOB_ID": "123457"}, {"SLURM_STEP_ID": "1"}):
        location = variables.find_location(SRUN | changes)
        assert location is not None and location == variables.find_location(SRUN | changes), "all tasks must agree"
        ports.append(location.port)
    assert len(set(ports)) == 3


def test_threads_are_shared_among_the_processes_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables.os, "sched_getaffinity", lambda _: set(range(8)))
    assert [launch.threads_per_process({"LOCAL_WORLD_SIZE": str(count)}) for count in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert launch.threads_per_process({}) == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: 99999 is not a port.* 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT: 0 is not a port"),
        ({"MASTER_PORT": "9" * 5000}, "MASTER_PORT: '9{79}.* at most 18 digits"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT: '-1' is not a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: not set, although WORLD_SIZE is 4"),
        ({"WORLD_SIZE": "9" * 32}, "WORLD_SIZE: .* at most 18 digits"),
        ({"LOCAL_WORLD_SIZE": "1" * 5000}, "LOCAL_WORLD_SIZE: .* is not a whole number"),
    ],
)
def test_variables_that_no_launcher_sets(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch.complete_environment(TORCHRUN | given)


def test_tasks_of_absurd_hosts() -> None:
    assert variables.tasks_on_node("8(x999999999),4", 5) == 8
    assert variables.tasks_on_node("8(x999999999),4", 2 * 10**9) == 4
