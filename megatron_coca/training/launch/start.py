"""Start the processes that the launch keys request: on this host, through srun, or through DeepSpeed's launcher."""

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_coca.config import ConfigError, LaunchConfig
from megatron_coca.config.base import shown
from megatron_coca.config.training import MOST_SLOTS
from megatron_coca.regular_files import read_regular
from megatron_coca.training.exit_status import CaughtSignals
from megatron_coca.training.launch.environment import (
    DEFAULT_PORT,
    RankLocation,
    find_location,
    free_port,
    is_slurm_task,
    no_gpu,
    signs_of_gpus,
)
from megatron_coca.training.launch.processes import FORWARDED, LocalProcess, run_with_restarts, supervise

NO_NAME = (
    "is not a host name: names reach the command lines of pdsh, mpirun and srun, so they consist of letters, digits and"
    " . _ - : % [ ], begin with none of - . % and may have a user before them (`user@name`)"
)


class Host(NamedTuple):
    """A host and the numbers of its devices that are used."""

    name: str
    slots: tuple[int, ...]


Script = Sequence[str]
"""The Python file that every process runs, and its arguments."""


def _python(script: Script) -> list[str]:
    """Run with this interpreter, unbuffered, so that lines of several processes arrive in order."""
    return [sys.executable, "-u", *script]


@dataclass(frozen=True)
class LocalRanks:
    """The ranks `first_rank`, ... of `world_size` that run on this host, one for each device in `slots`."""

    slots: tuple[int, ...]
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
                {**environment, **self.variables(environment, local)},
                reports=True,
            )
            for local in range(len(self.slots))
        ]

    def variables(self, environment: Mapping[str, str], local: int) -> dict[str, str]:
        """The variables of the process with this local rank."""
        own = {
            "RANK": str(self.first_rank + local),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(len(self.slots)),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
        }
        if self.slots != tuple(range(len(self.slots))):
            # Slots count within the devices that CUDA_VISIBLE_DEVICES already selects.
            visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            shown = [visible[slot] if slot < len(visible) else str(slot) for slot in self.slots]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
        return own


Starter = Callable[[Script], list[LocalProcess]]
"""Starts the processes of a script."""


def start(
    launch: LaunchConfig,
    environment: Mapping[str, str],
    script: Script,
    latest_step: Callable[[], int] | None = None,
    gpu_keys: Sequence[str] = (),
) -> int | None:
    """Start the processes that the configuration requests and wait for them.

    `latest_step` returns the step of the latest checkpoint, 0 if there is none; it is None if none are saved. With
    `gpu_keys`, the keys that need GPUs, no processes are started on this host if it has none.

    Returns:
        The run's exit status, or None if this process is to train: a launcher has started it, or one process is
        requested.

    Raises:
        ConfigError: the hosts, launcher or devices cannot be used, or restarts are requested without checkpoints.
    """
    starter = _choose_starter(launch, environment, gpu_keys)
    if starter is None:
        return None
    signals = CaughtSignals(FORWARDED)

    def run(restarted: bool = False) -> int:
        return supervise(starter([*script, *(["--auto-resume"] if restarted else [])]), signals)

    try:
        with signals:  # before the first process exists, so that none is left running
            if not launch.max_restarts:
                return run()
            if find_location(environment) is not None:
                print(
                    "max_restarts: not used; what started the processes of all hosts must restart them", file=sys.stderr
                )
                return run()
            if latest_step is None:
                message = "a restart resumes from a checkpoint, and none is saved; set save=FOLDER, or leave it out"
                raise ConfigError(f"max_restarts: {message}")
            return run_with_restarts(launch, latest_step, run, signals)
    except FileNotFoundError as error:
        raise ConfigError(f"launcher: `{error.filename}` is not installed here; see docs/launch.md") from error


def _choose_starter(launch: LaunchConfig, environment: Mapping[str, str], gpu_keys: Sequence[str]) -> Starter | None:
    """The way in which processes are started; None where this process trains."""
    location = find_location(environment)
    count = launch.num_gpus or 1
    if location is not None:
        if not location.sole_on_host or count == 1:
            return None
        _require_gpu(gpu_keys)
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
    if len(hosts) > 1 or launch.force_multi:
        return lambda script: [
            LocalProcess("DeepSpeed's launcher", deepspeed_command(launch, hosts, script), environment)
        ]
    slots = hosts[0].slots
    _require_gpu(gpu_keys)
    one = launch.hostfile is None and len(slots) == 1 and not (launch.include or launch.exclude)
    if one and not launch.max_restarts:  # a process that was killed cannot restart itself
        return None
    return lambda script: LocalRanks(slots, 0, len(slots), "127.0.0.1", free_port()).start(script, environment)


def _require_gpu(keys: Sequence[str]) -> None:
    """Raise a ConfigError if `keys` need a GPU and this host shows no sign of one; PyTorch finds a broken driver."""
    if keys and not signs_of_gpus():
        raise no_gpu(keys)


def without_missing_hostfile(launch: LaunchConfig) -> LaunchConfig:
    """Return the keys without a hostfile that does not exist, with a warning, as GPT-NeoX runs on this host then.

    It is kept, and an error, if other keys select hosts.
    """
    path, selecting = launch.hostfile, launch.num_nodes > 1 or launch.include or launch.exclude
    if path is None or selecting or Path(path).is_file():
        return launch
    print(f"hostfile: {path}: no such file; using this host only (one process, or num_gpus)", file=sys.stderr)
    return launch.model_copy(update={"hostfile": None})


def ranks_of_host(location: RankLocation, count: int) -> LocalRanks:
    """The `count` ranks of a host where a scheduler started one process (a pod, a Slurm task per node)."""
    first, world_size = location.rank * count, location.world_size * count
    master, port = location.master or "127.0.0.1", location.port or DEFAULT_PORT
    return LocalRanks(tuple(range(count)), first, world_size, master, port)


def configured_ranks(launch: LaunchConfig) -> int:
    """The number of processes that the launch keys request, over all hosts.

    Raises:
        ConfigError: as `chosen_hosts`.
    """
    if launch.launcher == "slurm" and launch.hostfile is None and launch.num_nodes > 0:
        return launch.num_nodes * (launch.num_gpus or 1)
    return sum(len(host.slots) for host in chosen_hosts(launch))


def chosen_hosts(launch: LaunchConfig) -> list[Host]:
    """The hosts that train and the devices used on each, in rank order.

    Raises:
        ConfigError: the hostfile cannot be read or lacks what include, exclude, num_nodes or num_gpus name, or a name
            is no host name.
    """
    if launch.master_addr is not None and not _is_host_name(launch.master_addr):
        raise ConfigError(f"master_addr: {launch.master_addr!r} {NO_NAME}")
    launch = without_missing_hostfile(launch)
    if launch.hostfile is not None:
        hosts = read_hostfile(Path(launch.hostfile))
    elif launch.num_nodes > 1:
        raise ConfigError(f"num_nodes: {launch.num_nodes} hosts need a hostfile; write one line a host, `name slots=8`")
    else:
        # Without a hostfile the number of devices is what num_gpus, include and exclude name.
        named = [slot for text in (launch.include, launch.exclude) for _, slots in _selections(text) for slot in slots]
        hosts = [Host("localhost", tuple(range(max(launch.num_gpus or 1, *(slot + 1 for slot in named), 1))))]
    hosts = _selected(hosts, launch)
    if launch.num_nodes > len(hosts):
        raise ConfigError(f"num_nodes: {launch.num_nodes}, but there are {len(hosts)} hosts in {launch.hostfile}")
    hosts = hosts[: launch.num_nodes] if launch.num_nodes > 0 else hosts
    for host in hosts:
        if launch.num_gpus is not None and launch.num_gpus > len(host.slots):
            raise ConfigError(f"num_gpus: {launch.num_gpus}, but {host.name} has {len(host.slots)} slots to use")
    return [Host(host.name, host.slots[: launch.num_gpus]) for host in hosts]


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file with lines `name slots=8`; # begins a comment."""
    if not path.is_file():
        raise ConfigError(f"hostfile: {path}: no such file; write one line a host, `name slots=8`")
    hosts: dict[str, Host] = {}
    try:
        lines = read_regular(path).decode().splitlines()
    except OSError as error:
        raise ConfigError(f"hostfile: {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"hostfile: {path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*([1-9]\d*)", text)
        if match is None:
            raise ConfigError(f"hostfile: {path}:{number}: {shown(text)} is not of the form `name slots=8`")
        name = match[1]
        if not _is_host_name(name):
            raise ConfigError(f"hostfile: {path}:{number}: {name!r} {NO_NAME}")
        if name in hosts:
            raise ConfigError(f"hostfile: {path}:{number}: {name} is listed twice; give each host one line")
        if len(match[2]) > 4:
            raise ConfigError(f"hostfile: {path}:{number}: a host has at most {MOST_SLOTS} slots")
        hosts[name] = Host(name, tuple(range(int(match[2]))))
    if not hosts:
        raise ConfigError(f"hostfile: {path}: names no host; write one line a host, `name slots=8`")
    return list(hosts.values())


def _is_host_name(text: str) -> bool:
    return re.fullmatch(r"(?:\w[\w.-]*@)?[\w:\[][\w.:%\]-]*", text, re.ASCII) is not None


def _selections(text: str | None) -> list[tuple[str, tuple[int, ...]]]:
    """Parse DeepSpeed's "a@b:0,2": all slots of host a (an empty tuple), two of b."""
    selections = []
    for selection in text.split("@") if text else ():
        match = re.fullmatch(r"([^:]+)(?::(\d{1,4}(?:,\d{1,4})*))?", selection.strip())
        if match is None:
            form = f"is not of the form `host:0,1` with slots up to {MOST_SLOTS}; join several with @"
            raise ConfigError(f"include or exclude: {shown(selection)} {form}")
        slots = tuple(sorted({int(slot) for slot in match[2].split(",")})) if match[2] else ()
        selections.append((match[1], slots))
    return selections


def _selected(hosts: list[Host], launch: LaunchConfig) -> list[Host]:
    """Apply `include` or `exclude`."""
    if launch.include and launch.exclude:
        raise ConfigError("include: contradicts exclude; set one of the two")
    if not launch.include and not launch.exclude:
        return hosts
    key = "include" if launch.include else "exclude"
    known = {host.name: host for host in hosts}
    named: dict[str, set[int]] = {}
    for name, slots in _selections(launch.include or launch.exclude):
        if name not in known:
            raise ConfigError(f"{key}: no host {name} ({', '.join(known)})")
        absent = sorted(set(slots) - set(known[name].slots))
        if absent:
            raise ConfigError(f"{key}: {name} has no slot {absent[0]}; it has {len(known[name].slots)}")
        named.setdefault(name, set()).update(slots or known[name].slots)
    kept = [
        Host(host.name, tuple(slot for slot in host.slots if (slot in named.get(host.name, ())) == (key == "include")))
        for host in hosts
    ]
    if not any(host.slots for host in kept):
        raise ConfigError(f"{key}: leaves no slot on any host")
    return [host for host in kept if host.slots]


SIGNALS_OF_SRUN: dict[int, int] = {
    signal.SIGTERM: signal.SIGUSR1,
    signal.SIGINT: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGUSR1,
}
"""srun forwards SIGUSR1 to its tasks, kills them on SIGTERM, and answers SIGINT with a report."""


def srun_command(launch: LaunchConfig, environment: Mapping[str, str], script: Script) -> list[str]:
    """A Slurm job step with one task per GPU, in this allocation or in a new one.

    Slurm knows the hosts; a hostfile, if given, selects some of them.
    """
    hosts = chosen_hosts(launch) if launch.hostfile is not None else []
    counts = {len(host.slots) for host in hosts} or {launch.num_gpus or 1}
    if len(counts) > 1 or any(host.slots != tuple(range(len(host.slots))) for host in hosts):
        raise ConfigError(
            "launcher: slurm starts the same number of tasks on every host and chooses the devices itself"
        )
    tasks = counts.pop()
    options = {
        "--ntasks-per-node": tasks,
        "--nodes": len(hosts) or max(launch.num_nodes, 0) or None,
        "--nodelist": ",".join(host.name for host in hosts) or None,
        "--gpus-per-node": tasks if launch.num_gpus and "SLURM_JOB_ID" not in environment else None,
        "--comment": launch.comment,
        "--account": launch.account,
        # A preempted task exits with a status of its own: the others must finish saving.
        "--kill-on-bad-exit": 0,
        "--wait": 60,
    }
    return ["srun", *(f"{name}={value}" for name, value in options.items() if value is not None), *_python(script)]


DEEPSPEED_PROGRAMS = {"pdsh": "pdsh", "openmpi": "ompi_info", "mvapich": "mpiname"}
"""The program that must be installed for each `launcher` that DeepSpeed drives."""
MPI_EXPORT = {"openmpi": "-x", "mvapich": "-env"}
"""The option with which mpirun exports a variable; without it no process knows the first host."""


def deepspeed_command(launch: LaunchConfig, hosts: Sequence[Host], script: Script) -> list[str]:
    """The command line of DeepSpeed's multi-host launcher.

    Raises:
        ConfigError: the program is not installed, cannot use a part of the hosts, or would pass text to a shell that
            executes it.
    """
    kind = launch.launcher
    if shutil.which(DEEPSPEED_PROGRAMS[kind]) is None:
        raise ConfigError(
            f"launcher: {kind} is not installed here (no `{DEEPSPEED_PROGRAMS[kind]}`);"
            " install it, start train.py on every host with torchrun, or use `launcher: slurm`"
        )
    selects = kind == "pdsh"
    if not selects and hosts != read_hostfile(Path(launch.hostfile or "")):
        raise ConfigError(
            f"launcher: {kind} uses every slot of the hostfile; remove include, exclude, num_nodes and num_gpus"
        )
    # DeepSpeed joins what pdsh receives to one line and quotes only arguments with spaces.
    for text in (os.getcwd(), sys.executable, *script) if selects else ():
        if re.search(r"[$`;&|<>()\\\n]", text):
            raise ConfigError(
                f"launcher: pdsh passes {text!r} to a shell on every host, which would execute a part of it; "
                "put such a value into a YAML file, or use `launcher: slurm`"
            )
    master, port = launch.master_addr or hosts[0].name.rpartition("@")[2], launch.master_port
    export = MPI_EXPORT.get(kind)
    arguments = [export, f"MASTER_ADDR={master}", export, f"MASTER_PORT={port}"] if export else []
    options: dict[str, object] = {
        "--hostfile": launch.hostfile,
        "--include": launch.include,
        "--exclude": launch.exclude,
        "--num_gpus": launch.num_gpus if selects else None,
        "--num_nodes": launch.num_nodes if selects and launch.num_nodes > 0 else None,
        "--master_addr": master,
        "--master_port": port,
        "--launcher": kind,
        "--launcher_args": shlex.join(arguments),
    }
    flags = {"--force_multi": launch.force_multi, "--no_ssh_check": launch.no_ssh_check, "--no_local_rank": True}
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    # With an equals sign: a value may begin with a dash.
    command += [f"{name}={value}" for name, value in options.items() if value not in (None, "")]
    command += [name for name, on in flags.items() if on]
    return [*command, *script]
