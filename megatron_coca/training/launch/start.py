"""The ways to start the processes that a configuration asks for, as a literal table."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from megatron_coca.config import ConfigError, LaunchConfig
from megatron_coca.training.exit_status import UNJOINED
from megatron_coca.training.launch.environment import DEFAULT_PORT, RankLocation, find_place, free_port, is_slurm_task
from megatron_coca.training.launch.processes import (
    CaughtSignals,
    LocalProcess,
    Member,
    RestartPolicy,
    run_with_restarts,
    supervise,
)
from megatron_coca.training.launch.remote import HostPlan, RemoteHost

HERE = "localhost"
_NAME = r"(?:\w[\w.-]*@)?[\w:\[][\w.:%\]-]*"


class Host(NamedTuple):
    """A host by the name that ssh and the other hosts know, and its devices by number."""

    name: str
    slots: tuple[int, ...]


NO_NAME = (
    "is no host name: names reach the command lines of ssh, pdsh and srun, so they consist of letters, digits and"
    " . _ - : % [ ], begin with none of - . % and may have a user before them (`user@name`)"
)


def is_host_name(text: str) -> bool:
    """Whether `text` can name a host (with a user before it or without) and means nothing else to ssh or a shell."""
    return re.fullmatch(_NAME, text, re.ASCII) is not None


def chosen_hosts(launch: LaunchConfig) -> list[Host]:
    """The hosts that run the training, with the slots used on each, in the order of their ranks.

    Raises:
        ConfigError: the hostfile cannot be read, or does not have what include, exclude, num_nodes or num_gpus name, or
            a name could be taken for something else than a host.
    """
    if launch.master_addr is not None and not is_host_name(launch.master_addr):
        raise ConfigError([f"master_addr: {launch.master_addr!r} {NO_NAME}"])
    if launch.hostfile is not None:
        hosts = read_hostfile(Path(launch.hostfile))
    elif launch.num_nodes > 1:
        raise ConfigError(
            [f"num_nodes: {launch.num_nodes} hosts need a hostfile; write one line a host, `name slots=8`"]
        )
    else:
        hosts = [_this_host(launch)]
    hosts = _filtered(hosts, launch)
    if launch.num_nodes > len(hosts):
        raise ConfigError([f"num_nodes: {launch.num_nodes}, but there are {len(hosts)} hosts in {launch.hostfile}"])
    hosts = hosts[: launch.num_nodes] if launch.num_nodes > 0 else hosts
    return [_limited(host, launch.num_gpus) for host in hosts]


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file with lines `name slots=8`; # begins a comment."""
    if not path.is_file():
        raise ConfigError([f"hostfile: {path}: no such file; write one line a host, `name slots=8`"])
    hosts: dict[str, Host] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*([1-9]\d*)", text)
        if text and match is None:
            raise ConfigError([f"hostfile: {path}:{number}: {text!r} is not of the form `name slots=8`"])
        if match is not None and not is_host_name(match[1]):
            raise ConfigError([f"hostfile: {path}:{number}: {match[1]!r} {NO_NAME}"])
        if match is not None and match[1] in hosts:
            raise ConfigError([f"hostfile: {path}:{number}: {match[1]} is there already; give each host one line"])
        if match is not None:
            hosts[match[1]] = Host(match[1], tuple(range(int(match[2]))))
    if not hosts:
        raise ConfigError([f"hostfile: {path}: names no host; write one line a host, `name slots=8`"])
    return list(hosts.values())


def _this_host(launch: LaunchConfig) -> Host:
    """Without a hostfile nothing says how many devices there are but num_gpus and what include and exclude name."""
    named = [slot for text in (launch.include, launch.exclude) for _, slots in _parts(text) for slot in slots]
    return Host(HERE, tuple(range(max(launch.num_gpus or 1, *(slot + 1 for slot in named), 1))))


def _parts(text: str | None) -> list[tuple[str, tuple[int, ...]]]:
    """DeepSpeed's "a@b:0,2" -> host a with all slots (named by none), b with two."""
    parts = []
    for part in text.split("@") if text else ():
        match = re.fullmatch(r"([^:]+)(?::(\d+(?:,\d+)*))?", part.strip())
        if match is None:
            raise ConfigError([f"include or exclude: {part!r} is not of the form `host:0,1`; several are joined by @"])
        parts.append((match[1], tuple(sorted({int(slot) for slot in match[2].split(",")})) if match[2] else ()))
    return parts


def _filtered(hosts: list[Host], launch: LaunchConfig) -> list[Host]:
    if launch.include and launch.exclude:
        raise ConfigError(["include: contradicts exclude; set one of the two"])
    if not launch.include and not launch.exclude:
        return hosts
    key = "include" if launch.include else "exclude"
    known = {host.name: host for host in hosts}
    named: dict[str, set[int]] = {}
    for name, slots in _parts(launch.include or launch.exclude):
        if name not in known:
            raise ConfigError([f"{key}: no host {name} ({', '.join(known)})"])
        absent = sorted(set(slots) - set(known[name].slots))
        if absent:
            raise ConfigError([f"{key}: {name} has no slot {absent[0]}; it has {len(known[name].slots)}"])
        named.setdefault(name, set()).update(slots or known[name].slots)
    kept = [
        Host(host.name, tuple(slot for slot in host.slots if (slot in named.get(host.name, ())) == (key == "include")))
        for host in hosts
    ]
    if not any(host.slots for host in kept):
        raise ConfigError([f"{key}: leaves no slot on any host"])
    return [host for host in kept if host.slots]


def _limited(host: Host, count: int | None) -> Host:
    if count is not None and count > len(host.slots):
        raise ConfigError([f"num_gpus: {count}, but {host.name} has {len(host.slots)} slots to use"])
    return Host(host.name, host.slots[:count])


SIGNALS_OF_SRUN: dict[int, int] = {
    signal.SIGTERM: signal.SIGUSR1,
    signal.SIGINT: signal.SIGTERM,
    signal.SIGHUP: signal.SIGUSR1,
}
"""What to send to srun: it passes SIGUSR1 on to its tasks, ends them on SIGTERM, and answers SIGINT with a report."""


class Script(NamedTuple):
    """What every process runs: a Python file with its arguments."""

    file: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """With this interpreter, its output unbuffered, so that lines of several processes come in order."""
        return (sys.executable, "-u", self.file, *self.arguments)


def address(host: str) -> str:
    """The name behind a nickname of ssh's configuration; the other hosts know only that one."""
    if shutil.which("ssh") is None:
        return host
    found = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, check=False)
    names = [line.split(maxsplit=1)[1] for line in found.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host


def srun_command(launch: LaunchConfig, environment: Mapping[str, str], script: Script) -> list[str]:
    """A job step with one task for each GPU, in this allocation or, outside one, in an allocation of its own.

    Slurm knows the hosts; a hostfile, where there is one, picks some of them.
    """
    hosts = chosen_hosts(launch) if launch.hostfile is not None else []
    counts = {len(host.slots) for host in hosts} or {launch.num_gpus or 1}
    if len(counts) > 1 or any(host.slots != tuple(range(len(host.slots))) for host in hosts):
        raise ConfigError(["launcher: slurm starts as many tasks on every host and chooses the devices itself"])
    tasks, nodes = counts.pop(), len(hosts) or max(launch.num_nodes, 0)
    options = {
        "--ntasks-per-node": tasks,
        "--nodes": nodes or None,
        "--nodelist": ",".join(host.name for host in hosts) or None,
        "--gpus-per-node": tasks if launch.num_gpus and "SLURM_JOB_ID" not in environment else None,
        "--comment": launch.comment,
        "--account": launch.account,
        # A task that was preempted ends with a status of its own: the others must finish saving.
        "--kill-on-bad-exit": 0,
        "--wait": 60,
    }
    return ["srun", *(f"{name}={value}" for name, value in options.items() if value is not None), *script.command]


def deepspeed_command(launch: LaunchConfig, hosts: Sequence[Host], script: Script) -> list[str]:
    """The command line of DeepSpeed's launcher.

    Raises:
        ConfigError: what it calls is not installed, cannot leave out a part of the hosts, or would give an argument to a
            shell that runs a part of it.
    """
    kind = DEEPSPEED[launch.launcher]
    if shutil.which(kind.program) is None:
        raise ConfigError(
            [f"launcher: {launch.launcher} is not installed here (no `{kind.program}`); try `launcher: ssh`"]
        )
    if not kind.selects and hosts != read_hostfile(Path(launch.hostfile or "")):
        raise ConfigError(
            [
                f"launcher: {launch.launcher} uses every slot of the hostfile; leave include, exclude, num_nodes and num_gpus out"
            ]
        )
    if launch.launcher == "pdsh":
        _refuse_shell_syntax(script)
    master = launch.master_addr or address(hosts[0].name)
    options: dict[str, object] = {
        "--hostfile": launch.hostfile,
        "--include": launch.include,
        "--exclude": launch.exclude,
        "--num_gpus": launch.num_gpus if kind.selects else None,
        "--num_nodes": launch.num_nodes if kind.selects and launch.num_nodes > 0 else None,
        "--master_addr": master,
        "--master_port": launch.master_port,
        "--launcher": launch.launcher,
        "--launcher_args": shlex.join(kind.arguments(master, launch.master_port)),
    }
    flags = {"--force_multi": launch.force_multi, "--no_ssh_check": launch.no_ssh_check, "--no_local_rank": True}
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    # With an equals sign: a value may begin with a dash.
    command += [f"{name}={value}" for name, value in options.items() if value not in (None, "")]
    command += [name for name, on in flags.items() if on]
    return [*command, script.file, *script.arguments]


def _refuse_shell_syntax(script: Script) -> None:
    """Raise a ConfigError for text that the shells of other hosts would run, in place of passing it on: DeepSpeed joins
    what pdsh gets to one line, and quotes only arguments with spaces.
    """
    for text in (os.getcwd(), sys.executable, script.file, *script.arguments):
        if re.search(r"[$`;&|<>()\\\n]", text):
            raise ConfigError(
                [
                    f"launcher: pdsh gives {text!r} to a shell on every host, which would run a part of it; "
                    "put such a value into a file of keys, or use `launcher: ssh`"
                ]
            )


class DeepSpeedLauncher(NamedTuple):
    """What DeepSpeed's launcher needs for one way to reach hosts: a program, whether it can leave out hosts and
    slots, and the arguments that hand on the address and port of the first process.
    """

    program: str
    selects: bool
    arguments: Callable[[str, int], list[str]]


DEEPSPEED: dict[str, DeepSpeedLauncher] = {
    "pdsh": DeepSpeedLauncher("pdsh", True, lambda master, port: []),
    "openmpi": DeepSpeedLauncher("ompi_info", False, lambda master, port: _given("-x", master, port)),
    "mvapich": DeepSpeedLauncher("mpiname", False, lambda master, port: _given("-env", master, port)),
}
"""mpirun hands on no variables by itself, and no process can know the first host without them."""


def _given(option: str, master: str, port: int) -> list[str]:
    return [option, f"MASTER_ADDR={master}", option, f"MASTER_PORT={port}"]


EXPORTED = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "OMP_", "CUDA_", "HF_", "WANDB_", "TRITON_", "PYTHON", "MLFLOW_")
"""Beginnings of the variables that other hosts get; all else there is that of their own shells."""
NOT_EXPORTED = frozenset({"CUDA_VISIBLE_DEVICES", "PYTHONPATH"})


def start(
    launch: LaunchConfig,
    environment: Mapping[str, str],
    file: str,
    arguments: Sequence[str],
    newest: Callable[[], int] | None = None,
) -> int | None:
    """Start the processes that the configuration asks for and wait for them.

    `newest` gives the step of the newest checkpoint, 0 where there is none yet; it is None where none are written.

    Returns:
        The run's exit status, or None where this process is the one that trains: a launcher has started it, or one
        process is asked for.

    Raises:
        ConfigError: what is asked for cannot be started; see `chosen_hosts` and `find_place`. Or restarts are asked for
            without checkpoints to resume from.
    """
    script = Script(file, tuple(arguments))
    starter = _starter(launch, environment)
    if starter is None:
        return None
    # Signals are caught before the first process exists, so that none is left behind.
    signals = CaughtSignals()
    try:
        if not launch.max_restarts:
            return _run(starter, script, signals)
        if find_place(environment) is not None:
            print("max_restarts: not used; what started the processes of all hosts must restart them", file=sys.stderr)
            return _run(starter, script, signals)
        if newest is None:
            raise ConfigError(
                [
                    "max_restarts: a restart resumes from a checkpoint, and none is written; set save=FOLDER, or leave it out"
                ]
            )
        resuming = Script(file, (*arguments, "--auto-resume"))
        policy = RestartPolicy(launch.max_restarts, launch.restart_delay, newest)
        return run_with_restarts(policy, lambda again: _run(starter, resuming if again else script, signals), signals)
    except FileNotFoundError as error:
        raise ConfigError([f"launcher: `{error.filename}` is not installed here; see docs/launch.md"]) from error
    finally:
        signals.release()


Starter = Callable[[Script, Path], list[Member]]
"""Starts the processes of a script; they may write their errors to files in the folder that is given."""


def _starter(launch: LaunchConfig, environment: Mapping[str, str]) -> Starter | None:
    place = find_place(environment)
    if place is not None:
        several = place.sole_on_host and (launch.num_gpus or 1) > 1
        return _local(lambda script: _rest_of_host(launch, place, script), environment) if several else None
    kind = "slurm" if launch.deepspeed_slurm else launch.launcher
    if kind == "slurm":
        return None if is_slurm_task(environment) else lambda script, _: [_srun(launch, environment, script)]
    hosts = chosen_hosts(launch)
    if len(hosts) == 1 and not launch.force_multi:
        one = launch.hostfile is None and len(hosts[0].slots) == 1 and not (launch.include or launch.exclude)
        # A process that is killed cannot start itself again.
        alone = one and not launch.max_restarts
        return None if alone else _local(lambda script: _start_this_host(hosts[0], script), environment)
    return lambda script, _: LAUNCHERS[kind](launch, hosts, environment, script)


def _local(plan: Callable[[Script], HostPlan], environment: Mapping[str, str]) -> Starter:
    return lambda script, errors: list(plan(script).start(environment, errors))


def _run(starter: Starter, script: Script, signals: CaughtSignals) -> int:
    with TemporaryDirectory(prefix="errors-") as errors:
        members = starter(script, Path(errors))
        status = supervise(members, signals)
        plans = [member.plan for member in members if isinstance(member, RemoteHost)]
        if status == UNJOINED and plans:
            print(f"ranks by host: {'; '.join(map(str, plans))}", file=sys.stderr)
        return status


def _start_this_host(host: Host, script: Script) -> HostPlan:
    return HostPlan(
        name=host.name,
        command=script.command,
        slots=host.slots,
        first_rank=0,
        world_size=len(host.slots),
        master="127.0.0.1",
        port=free_port(),
        folder=os.getcwd(),
        environment={},
        bind=host.slots != tuple(range(len(host.slots))),
    )


def _rest_of_host(launch: LaunchConfig, place: RankLocation, script: Script) -> HostPlan:
    """One process for each host was started (a pod, a Slurm task): it starts `num_gpus` of them."""
    count = launch.num_gpus or 1
    return HostPlan(
        name="this host",
        command=script.command,
        slots=tuple(range(count)),
        first_rank=place.rank * count,
        world_size=place.world_size * count,
        master=place.master or "127.0.0.1",
        port=place.port or DEFAULT_PORT,
        folder=os.getcwd(),
        environment={},
    )


def host_plans(
    launch: LaunchConfig, hosts: Sequence[Host], environment: Mapping[str, str], script: Script
) -> list[HostPlan]:
    """What runs on each host; ranks count through the hosts in their order."""
    firsts = [sum(len(host.slots) for host in hosts[:index]) for index in range(len(hosts))]
    exported = {
        name: value for name, value in environment.items() if name.startswith(EXPORTED) and name not in NOT_EXPORTED
    }
    return [
        HostPlan(
            name=host.name,
            command=script.command,
            slots=host.slots,
            first_rank=first,
            world_size=sum(len(each.slots) for each in hosts),
            master=launch.master_addr or address(hosts[0].name),
            port=launch.master_port,
            folder=os.getcwd(),
            environment=exported,
            bind=host.slots != tuple(range(len(host.slots))),
        )
        for host, first in zip(hosts, firsts, strict=True)
    ]


def _ssh(launch: LaunchConfig, hosts: Sequence[Host], environment: Mapping[str, str], script: Script) -> list[Member]:
    return [RemoteHost(plan) for plan in host_plans(launch, hosts, environment, script)]


def _srun(launch: LaunchConfig, environment: Mapping[str, str], script: Script) -> LocalProcess:
    command = srun_command(launch, environment, script)
    return LocalProcess("srun", command, environment, translated=SIGNALS_OF_SRUN)


def _deepspeed(
    launch: LaunchConfig, hosts: Sequence[Host], environment: Mapping[str, str], script: Script
) -> list[Member]:
    return [LocalProcess("DeepSpeed's launcher", deepspeed_command(launch, hosts, script), environment)]


LAUNCHERS: dict[str, Callable[[LaunchConfig, Sequence[Host], Mapping[str, str], Script], list[Member]]] = {
    "ssh": _ssh,
    "pdsh": _deepspeed,
    "openmpi": _deepspeed,
    "mvapich": _deepspeed,
}
"""How several hosts are reached; slurm is none of these, because it needs no hostfile."""
