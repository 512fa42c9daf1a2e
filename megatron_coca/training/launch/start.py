"""Start the processes that the launch keys request: on this host, through srun, or through DeepSpeed's launcher."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_coca.config import ConfigError, LaunchConfig
from megatron_coca.config.base import shown
from megatron_coca.support.regular_files import read_regular
from megatron_coca.training.launch.environment import (
    DEFAULT_PORT,
    RankLocation,
    find_location,
    free_port,
    is_slurm_task,
)
from megatron_coca.training.launch.processes import supervise
from megatron_coca.work.processes import LocalProcess
from megatron_coca.work.signals import FORWARDED, CaughtSignals


class Host(NamedTuple):
    """A host and its number of processes, one for each device."""

    name: str
    slots: int


Script = Sequence[str]
"""The Python file that every process runs, followed by its arguments."""


def _python(script: Script) -> list[str]:
    """Return the command that runs `script` with this interpreter. Its output is unbuffered, so that the lines of
    several processes appear in order.
    """
    return [sys.executable, "-u", *script]


@dataclass(frozen=True)
class LocalRanks:
    """The `count` ranks on this host, starting with `first_rank`, out of `world_size` ranks."""

    count: int
    first_rank: int
    world_size: int
    master: str
    port: int

    def start(self, script: Script, environment: Mapping[str, str]) -> list[LocalProcess]:
        """Start one process per rank."""
        return [
            LocalProcess(
                f"rank {self.first_rank + local}",
                _python(script),
                {**environment, **self.variables(local)},
                reports=True,
            )
            for local in range(self.count)
        ]

    def variables(self, local: int) -> dict[str, str]:
        """Return the environment variables for the process with local rank `local`."""
        return {
            "RANK": str(self.first_rank + local),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
        }


Starter = Callable[[Script], list[LocalProcess]]
"""A function that starts the processes of a script."""


def start(launch: LaunchConfig, environment: Mapping[str, str], script: Script) -> int | None:
    """Start the processes that the configuration requests, and wait for them.

    Returns:
        The run's exit status, or None if this process must train itself, because a launcher started it or only one
        process is requested.

    Raises:
        ConfigError: the hosts, launcher or devices cannot be used.
    """
    starter = _choose_starter(launch, environment)
    if starter is None:
        return None
    signals = CaughtSignals(FORWARDED, last=True)
    try:
        with signals:  # entered before the first process exists, so that no process is left running
            return supervise(starter(script), signals)
    except FileNotFoundError as error:
        raise ConfigError(f"launcher: `{error.filename}` is not installed here; see docs/launch.md") from error


def _choose_starter(launch: LaunchConfig, environment: Mapping[str, str]) -> Starter | None:
    """Choose how to start the processes; None if this process trains itself."""
    location = find_location(environment)
    count = launch.num_gpus or 1
    if location is not None:
        if not location.sole_on_host or count == 1:
            return None
        ranks = ranks_of_host(location, count)
        return lambda script: ranks.start(script, environment)
    launch = without_missing_hostfile(launch)
    if launch.launcher == "slurm" or launch.deepspeed_slurm:
        if is_slurm_task(environment):
            return None
        return lambda script: [
            LocalProcess("srun", srun_command(launch, environment, script), environment, SIGNALS_OF_SRUN)
        ]
    hosts = chosen_hosts(launch)
    if len(hosts) > 1:
        return lambda script: [
            LocalProcess("DeepSpeed's launcher", deepspeed_command(launch, hosts, script), environment)
        ]
    count = hosts[0].slots
    if count == 1:
        return None
    return lambda script: LocalRanks(count, 0, count, "127.0.0.1", free_port()).start(script, environment)


def without_missing_hostfile(launch: LaunchConfig) -> LaunchConfig:
    """Remove a hostfile that does not exist from the configuration, with a warning. As in GPT-NeoX, the run then uses
    only this host.

    If `num_nodes` requests several hosts, the key is kept, and `chosen_hosts` raises an error.
    """
    path = launch.hostfile
    if path is None or launch.num_nodes > 1 or Path(path).is_file():
        return launch
    print(f"hostfile: {path}: not found; using only this host (one process, or num_gpus)", file=sys.stderr)
    return launch.model_copy(update={"hostfile": None})


def ranks_of_host(location: RankLocation, count: int) -> LocalRanks:
    """Return `count` ranks for a host on which a scheduler started one process (a pod, or one Slurm task per node)."""
    first, world_size = location.rank * count, location.world_size * count
    master, port = location.master or "127.0.0.1", location.port or DEFAULT_PORT
    return LocalRanks(count, first, world_size, master, port)


def configured_ranks(launch: LaunchConfig) -> int:
    """Return the number of processes on all hosts that the launch keys request.

    Raises:
        ConfigError: see `chosen_hosts`.
    """
    if launch.launcher == "slurm" and launch.hostfile is None and launch.num_nodes > 0:
        return launch.num_nodes * (launch.num_gpus or 1)
    return sum(host.slots for host in chosen_hosts(launch))


def chosen_hosts(launch: LaunchConfig) -> list[Host]:
    """Return the hosts on which the run trains and the number of processes on each, in rank order.

    Raises:
        ConfigError: the hostfile cannot be read, or has fewer hosts or slots than num_nodes or num_gpus requests.
    """
    launch = without_missing_hostfile(launch)
    if launch.hostfile is None and launch.num_nodes > 1:
        raise ConfigError(
            f"num_nodes: {launch.num_nodes} hosts need a hostfile; set hostfile to a file with one line per host, "
            "`name slots=8`"
        )
    if launch.hostfile is None:
        return [Host("localhost", launch.num_gpus or 1)]
    hosts = read_hostfile(Path(launch.hostfile))
    if launch.num_nodes > len(hosts):
        raise ConfigError(
            f"num_nodes: {launch.num_nodes}, but {launch.hostfile} has {len(hosts)} hosts; lower it, or add hosts"
        )
    hosts = hosts[: launch.num_nodes] if launch.num_nodes > 0 else hosts
    for host in hosts:
        if launch.num_gpus is not None and launch.num_gpus > host.slots:
            raise ConfigError(
                f"num_gpus: {launch.num_gpus}, but {host.name} has only {host.slots} slots; lower it, or add slots"
            )
    return [Host(host.name, launch.num_gpus or host.slots) for host in hosts]


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts in a file with lines of the form `name slots=8`; # begins a comment."""
    if not path.is_file():
        raise ConfigError(f"hostfile: {path}: not found; create it with one line per host, `name slots=8`")
    hosts: dict[str, Host] = {}
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile: {path}: cannot be read as UTF-8 text ({error}); check the file") from error
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\w\S*)\s+slots\s*=\s*([1-9]\d{0,3})", text)
        if match is None:
            raise ConfigError(f"hostfile: {path}:{number}: {shown(text)} must have the form `name slots=8`")
        name = match[1]
        if name in hosts:
            raise ConfigError(f"hostfile: {path}:{number}: {name} is listed twice; write one line per host")
        hosts[name] = Host(name, int(match[2]))
    if not hosts:
        raise ConfigError(f"hostfile: {path}: contains no hosts; write one line per host, `name slots=8`")
    return list(hosts.values())


SIGNALS_OF_SRUN: dict[int, int] = dict.fromkeys(FORWARDED, signal.SIGUSR1)
"""The signal that is sent to srun instead of each forwarded signal. srun forwards SIGUSR1 to its tasks. On SIGTERM it
would kill them, and on SIGINT it would only print a report.
"""


def srun_command(launch: LaunchConfig, environment: Mapping[str, str], script: Script) -> list[str]:
    """Return the command for a Slurm job step with one task per GPU, in this allocation or in a new one.

    Slurm knows the hosts; a hostfile, if set, selects some of them.
    """
    hosts = chosen_hosts(launch) if launch.hostfile is not None else []
    counts = {host.slots for host in hosts} or {launch.num_gpus or 1}
    if len(counts) > 1:
        raise ConfigError("launcher: slurm starts the same number of tasks on every host; set num_gpus")
    tasks = counts.pop()
    options = {
        "--ntasks-per-node": tasks,
        "--nodes": len(hosts) or max(launch.num_nodes, 0) or None,
        "--nodelist": ",".join(host.name for host in hosts) or None,
        "--gpus-per-node": tasks if launch.num_gpus and "SLURM_JOB_ID" not in environment else None,
        "--comment": launch.comment,
        "--account": launch.account,
        # A preempted task exits with a nonzero status, but the other tasks must finish saving.
        "--kill-on-bad-exit": 0,
        "--wait": 60,
    }
    return ["srun", *(f"{name}={value}" for name, value in options.items() if value is not None), *_python(script)]


def deepspeed_command(launch: LaunchConfig, hosts: Sequence[Host], script: Script) -> list[str]:
    """Return the command line of DeepSpeed's multi-host launcher, which uses pdsh.

    Raises:
        ConfigError: pdsh is not installed, or a shell would execute part of the command line.
    """
    if shutil.which("pdsh") is None:
        raise ConfigError(
            "launcher: pdsh is not installed here; install it, start train.py on every host with torchrun, or use "
            "`launcher: slurm`"
        )
    # DeepSpeed joins the arguments of pdsh into one line, and quotes only those with spaces.
    for text in (os.getcwd(), sys.executable, *script):
        if re.search(r"[$`;&|<>()\\\n]", text):
            raise ConfigError(
                f"launcher: pdsh passes {text!r} to a shell on every host, which would execute part of it; "
                "put this value into a YAML file, or use `launcher: slurm`"
            )
    options: dict[str, object] = {
        "--hostfile": launch.hostfile,
        "--num_gpus": launch.num_gpus,
        "--num_nodes": launch.num_nodes if launch.num_nodes > 0 else None,
        "--master_addr": launch.master_addr or hosts[0].name.rpartition("@")[2],
        "--master_port": launch.master_port,
        "--launcher": "pdsh",
    }
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    # The equals sign is needed because a value may begin with a dash.
    command += [f"{name}={value}" for name, value in options.items() if value is not None]
    command += ["--no_ssh_check"] if launch.no_ssh_check else []
    return [*command, "--no_local_rank", *script]
