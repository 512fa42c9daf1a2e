"""This process's rank, from the variables of launchers and schedulers, and the devices that it can use."""

import contextlib
import fcntl
import logging
import os
import random
import re
import shutil
import socket
import struct
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from megatron_coca.config import Config, ConfigError
from megatron_coca.config.base import shown

logger = logging.getLogger(__name__)

Variables = Mapping[str, str]
DEFAULT_PORT = 29500
LARGEST_PORT = 65535
LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 20000, 32767
"""Ports for rank 0. They are below Linux's ephemeral ports, which an outgoing connection could take first."""
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_RESERVED_STEPS = 0xFFFFFFF0  # slurm.h: ids from here on are for batch scripts, interactive shells, ...
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def free_port() -> int:
    """Return a random free port of this host, so that two runs rarely choose the same port.

    Raises:
        OSError: 100 random ports are all in use.
    """
    for port in random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT + 1), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"100 random ports between {FIRST_PORT} and {LAST_PORT} are all in use")


def interface_towards(address: str) -> str | None:
    """Return the network interface that routes to `address` (IPv4), or None if unknown.

    By default, Gloo would use the interface of the host's own name, which is the loopback interface on many machines.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends no packet, so any port works
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == own:
                    return name
    return None


class RankLocation(NamedTuple):
    """The rank of a process, and the address of rank 0 (None if the variables do not specify it).

    `sole_on_host`: whether the scheduler started only one process per host. That process may then start the others.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: str | None
    port: int | None
    sole_on_host: bool = False


class Launcher(NamedTuple):
    """A launcher or scheduler, with functions that detect it and that read the rank from its variables."""

    name: str
    started: Callable[[Variables], bool]
    location: Callable[[Variables], RankLocation]


INCOMPLETE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""If no launcher is detected but one of these is set, the environment is incomplete: a launcher sets at least RANK and
WORLD_SIZE.
"""


def find_location(environment: Variables) -> RankLocation | None:
    """Return the rank according to the variables, or None if no launcher started this process.

    Raises:
        ConfigError: a variable is missing, is not a number, or contradicts another variable.
    """
    for launcher in LAUNCHERS:
        if launcher.started(environment):
            location = launcher.location(environment)
            _check(location, launcher.name, environment)
            return location
    given = [name for name in INCOMPLETE if name in environment]
    if given:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environment]
        raise ConfigError(
            f"{' and '.join(missing)}: not set, unlike {' and '.join(given)}; set all of RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or unset them"
        )
    return None


def complete_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch.distributed reads, from the launcher's variables or for a single process.

    On a single host, processes use the loopback address, which other hosts cannot reach, and Gloo and NCCL listen only
    on the loopback interface. With several hosts, Gloo uses the interface that routes to the first host. Interfaces
    that are already set in the environment are kept.
    """
    location = find_location(environment) or RankLocation(0, 1, 0, 1, LOOPBACK, None)
    port = location.port or (free_port() if location.world_size == 1 else DEFAULT_PORT)
    # RANK and LOCAL_RANK do not determine the number of processes on each host.
    local_size_known = "RANK" not in environment or "LOCAL_WORLD_SIZE" in environment or "LOCAL_SIZE" in environment
    one_host = (
        location.world_size == 1
        or (location.world_size == location.local_world_size and local_size_known)
        or location.master in (LOOPBACK, "localhost")
    )
    # torchrun has already opened the store at its own address.
    use_loopback = one_host and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    environment["RANK"] = str(location.rank)
    environment["WORLD_SIZE"] = str(location.world_size)
    environment["LOCAL_RANK"] = str(location.local_rank)
    environment["LOCAL_WORLD_SIZE"] = str(location.local_world_size)
    environment["MASTER_ADDR"] = LOOPBACK if use_loopback else location.master or LOOPBACK
    environment["MASTER_PORT"] = str(port)
    if one_host:
        _set_interface(environment, LOOPBACK, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    elif location.world_size > location.local_world_size and location.master is not None:
        _set_interface(environment, location.master, "GLOO_SOCKET_IFNAME")


def _set_interface(environment: MutableMapping[str, str], address: str, *variables: str) -> None:
    """Set each unset variable in `variables` to the interface that routes to `address`."""
    interface = interface_towards(address)
    for name in variables:
        if interface and not environment.get(name):
            environment[name] = interface


def threads_per_process(environment: Variables) -> int:
    """Return the number of CPU threads for this process: an equal share of the host's cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", "1")))


def first_host(nodelist: str) -> str:
    """Return the first host in Slurm's compressed list: "gpu[003-007,9],login" -> "gpu003"."""
    entry = re.match(r"(?:\[[^\]]*\]|[^\[,])*", nodelist)
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", entry.group()) if entry else ""
    if not re.search(r"[^\W\d]", host) and not re.fullmatch(r"[\d.]{7,}", host):
        raise ConfigError(f"SLURM_STEP_NODELIST: cannot find a host in {nodelist!r}; set MASTER_ADDR")
    return host


def tasks_on_node(tasks: str, node: int) -> int:
    """Return the number of tasks on host number `node` from Slurm's list: "8(x3),4" means 8, 8, 8 and 4 tasks."""
    counts = [(int(count), int(times or 1)) for count, times in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", tasks)]
    if not counts:
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE: cannot read {tasks!r}; set LOCAL_WORLD_SIZE")
    ends = accumulate(times for _, times in counts)
    return next((count for (count, _), end in zip(counts, ends, strict=True) if node < end), counts[-1][0])


def _number(environment: Variables, *names: str, default: int | None = None) -> int:
    """Return the value of the first variable in `names` that is set."""
    for name in names:
        if name in environment:
            if not re.fullmatch(r"\s*\d{1,18}\s*", environment[name]):
                raise ConfigError(
                    f"{name}: {shown(environment[name])} is not a whole number of at most 18 digits; correct it"
                )
            return int(environment[name])
    if default is None:
        raise ConfigError(f"{names[0]}: not set in the environment; set it for every process, as launchers do")
    return default


def _port(environment: Variables) -> int | None:
    port = _number(environment, "MASTER_PORT", default=DEFAULT_PORT)
    if not 1 <= port <= LARGEST_PORT:
        raise ConfigError(f"MASTER_PORT: {port} is not a port number; set a number from 1 to {LARGEST_PORT}")
    return port if "MASTER_PORT" in environment else None


def _check(location: RankLocation, name: str, environment: Variables) -> None:
    if not 0 <= location.rank < location.world_size:
        raise ConfigError(
            f"{name}: rank {location.rank} must be less than the world size {location.world_size}; correct the "
            "variables"
        )
    if not 0 <= location.local_rank < location.local_world_size:
        raise ConfigError(
            f"{name}: local rank {location.local_rank} must be less than the local world size "
            f"{location.local_world_size}; correct the variables"
        )
    given = _number(environment, "WORLD_SIZE", default=location.world_size)
    if given != location.world_size:
        raise ConfigError(f"WORLD_SIZE: {given}, but {name} started {location.world_size} processes; unset WORLD_SIZE")
    if not location.master and location.world_size > location.local_world_size:
        raise ConfigError(
            f"MASTER_ADDR: not set, but {name} started processes on several hosts; set it to the first host"
        )


def _by_rank(environment: Variables) -> RankLocation:
    """Read RANK and related variables. torchrun and deepspeed set all of them; Kubernetes pods have no LOCAL_RANK."""
    world, sole = _number(environment, "WORLD_SIZE"), "LOCAL_RANK" not in environment
    local_world = _number(environment, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=1 if sole else world)
    local = _number(environment, "LOCAL_RANK", default=0)
    master = environment.get("MASTER_ADDR")
    if not master and world > 1:
        raise ConfigError(f"MASTER_ADDR: not set, although WORLD_SIZE is {world}; set it to the host of rank 0")
    return RankLocation(_number(environment, "RANK"), world, local, local_world, master, _port(environment), sole)


def _by_slurm(environment: Variables) -> RankLocation:
    """Read Slurm's variables. The variables of a job step take precedence over those of its job."""
    world = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE")
    node = _number(environment, "SLURM_NODEID", default=0)
    local = _number(environment, "SLURM_LOCALID", default=0)
    local_world = tasks_on_node(tasks, node) if tasks else local + 1
    nodes = environment.get("SLURM_STEP_NODELIST")
    # The launching host may be a login node, so it is used only if Slurm does not list the hosts of the step.
    other = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    step = _number(environment, "SLURM_STEP_ID", default=0)
    port = 20000 + (_number(environment, "SLURM_JOB_ID", default=9500) + 101 * step) % 20000
    return RankLocation(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=world,
        local_rank=local,
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", default=local_world),
        master=environment.get("MASTER_ADDR") or (first_host(nodes) if nodes else other),
        port=_port(environment) or port,
        sole_on_host=bool(tasks) and local_world == 1,
    )


def _by_mpi(names: tuple[str, ...], environment: Variables) -> RankLocation:
    rank, size, local_rank, local_size = (_number(environment, name) for name in names)
    return RankLocation(rank, size, local_rank, local_size, environment.get("MASTER_ADDR"), _port(environment))


def _has(names: tuple[str, ...], environment: Variables) -> bool:
    return all(name in environment for name in names)


def is_slurm_task(environment: Variables) -> bool:
    """Return whether srun started this process.

    Batch scripts and interactive shells also have SLURM_PROCID and SLURM_NTASKS, but a reserved step id or no step id.
    """
    step = _number(environment, "SLURM_STEP_ID", default=_RESERVED_STEPS)
    return "SLURM_PROCID" in environment and step < _RESERVED_STEPS


def _is_one_of_several_tasks(environment: Variables) -> bool:
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    return is_slurm_task(environment) and tasks > 1


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("torchrun or deepspeed", partial(_has, ("RANK", "WORLD_SIZE")), _by_rank),
    Launcher("Open MPI", partial(_has, _OPEN_MPI[:2]), partial(_by_mpi, _OPEN_MPI)),
    Launcher("srun", _is_one_of_several_tasks, _by_slurm),
    Launcher("MPICH or Intel MPI", partial(_has, _HYDRA), partial(_by_mpi, _HYDRA)),
)
"""Launchers in order of precedence. Open MPI comes before srun, because mpirun in a Slurm job starts its daemons with
srun. MPICH comes after srun, because srun sets PMI_RANK for its own tasks.
"""

ON_THE_CPU = (
    "to train on the CPU, set distributed_backend=gloo, or pass configs/cluster/cpu.yml after the model's file (this"
    " starts one process unless num_gpus is set)"
)
NEEDS = {
    "num_gpus": ("asks for GPUs", ON_THE_CPU),
    "distributed_backend": ("asks for GPUs", ON_THE_CPU),
    "precision": ("fp16 needs a GPU", "set fp16=null precision=bfloat16 (or fp32)"),
    "cuda_graphs": ("CUDA graphs need a GPU", "set cuda_graphs=false"),
}
"""For each key in `Config.gpu_keys`, the problem without a GPU and the remedy."""


def check_devices(config: Config, environment: Variables) -> None:
    """Check that this process can use a GPU if the configuration requires one; otherwise warn about an unusable GPU.

    Raises:
        ConfigError: a required GPU cannot be used, or the host has fewer GPUs than processes.
    """
    import torch

    if torch.cuda.is_available():
        count, local_rank = torch.cuda.device_count(), int(environment["LOCAL_RANK"])
        if local_rank >= count:
            problem = f"the process with local rank {local_rank} sees only {count} GPU(s), but each process needs one"
            raise ConfigError(f"num_gpus: {problem}; start fewer processes on this host")
        return
    try:
        torch.cuda.init()
        reason = "no device found"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    problem = (
        f"PyTorch {torch.__version__} cannot use any here ({reason}); check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and"
        " that the driver supports the CUDA version of PyTorch"
    )
    if config.gpu_keys:
        raise ConfigError(*(f"{key}: {NEEDS[key][0]}, but {problem}; {NEEDS[key][1]}" for key in config.gpu_keys))
    if shutil.which("nvidia-smi") and config.parallel.distributed_backend is None:
        logger.warning("training on the CPU: this host may have GPUs, but %s", problem)


def unused_gpus(config: Config, world_size: int) -> str | None:
    """Return a warning if a single process runs on a host with several GPUs, all of which GPT-NeoX would use."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world_size > 1 or found <= 1 or config.launch.num_gpus is not None:
        return None
    return f"num_gpus: not set, so only 1 of the {found} GPUs of this host is used; set num_gpus={found} to use all"


def unaligned_mlp(config: Config) -> str | None:
    """Return a warning if a row of a rank's MLP matrices, in 16 bits, does not take a multiple of 16 bytes. A GPU then
    multiplies matrices with slower kernels, which load fewer bytes at a time.
    """
    ranks = config.parallel.model_parallel_size
    width = config.model.ffn_hidden_size
    if config.precision.dtype == "fp32" or width % (8 * ranks) == 0:
        return None
    among = f", {width / ranks:g} on each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"inner width of the MLP: {width:,}{among}, is not a multiple of 8, which makes matrix products slow on a GPU; "
        f"set mlp_multiple_of={8 * ranks} ({16 * ranks} for float8)"
    )


def describe_devices(config: Config, world_size: int, attention_backend: str) -> str:
    """Return the first line that a run logs: the number and type of devices, communication backend, dtype, attention
    backend.
    """
    import torch

    devices = (
        f"{world_size} x {torch.cuda.get_device_name()} (nccl)"
        if torch.cuda.is_available()
        else (f"CPU, {world_size} process(es) of {torch.get_num_threads()} thread(s) (gloo)")
    )
    return f"device: {devices}, {config.precision.dtype}, attention backend {attention_backend}"
