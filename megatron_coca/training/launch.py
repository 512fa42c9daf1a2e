"""How a training process comes to be: as it is, under a launcher, or by launching itself through DeepSpeed's."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from megatron_coca.config import ConfigError, LaunchConfig

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What deepspeed and torchrun set for every process."""


def under_launcher(environment: Mapping[str, str]) -> bool:
    """Whether deepspeed, torchrun or srun with more than one task started this process.

    The body of a batch script is no task: it has SLURM_PROCID and SLURM_NTASKS too, but no SLURM_STEP_ID.
    """
    under_srun = "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
    return all(name in environment for name in LAUNCHED) or (
        under_srun and int(environment.get("SLURM_NTASKS", "1")) > 1
    )


def launcher_command(launch: LaunchConfig, script: str, arguments: Sequence[str]) -> list[str] | None:
    """The DeepSpeed launcher's command line for this configuration, or None where one process is asked for."""
    if launch.hostfile is None and (launch.num_gpus or 1) <= 1:
        return None
    if launch.hostfile is not None and not os.path.isfile(launch.hostfile):
        raise ConfigError([f"hostfile: {launch.hostfile}: no such file; write one line a host, `name slots=8`"])
    options: dict[str, object] = {
        "--hostfile": launch.hostfile,
        "--include": launch.include,
        "--exclude": launch.exclude,
        "--num_gpus": launch.num_gpus,
        "--num_nodes": launch.num_nodes if launch.num_nodes > 0 else None,
        "--master_addr": launch.master_addr,
        "--master_port": launch.master_port if launch.hostfile else _free_port(),
        "--launcher": launch.launcher if launch.hostfile else None,
    }
    flags = {"--force_multi": launch.force_multi, "--no_ssh_check": launch.no_ssh_check, "--no_local_rank": True}
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += [part for name, value in options.items() if value is not None for part in (name, str(value))]
    command += [name for name, on in flags.items() if on]
    return [*command, script, *arguments]


def relaunch(command: Sequence[str]) -> int:
    """Run the launcher and give its exit status."""
    return subprocess.run(command, check=False).returncode


def complete_environment(environment: dict[str, str]) -> None:
    """Fill in what the process group needs: from SLURM's variables under srun, or as a group of one."""
    if "RANK" not in environment:
        slurm = under_launcher(environment)
        environment["RANK"] = environment["SLURM_PROCID"] if slurm else "0"
        environment["WORLD_SIZE"] = environment["SLURM_NTASKS"] if slurm else "1"
        environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0") if slurm else "0"
        if slurm:
            tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE", "1")
            environment.setdefault("LOCAL_WORLD_SIZE", re.split(r"\D", tasks)[0])
            environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "localhost")))
            environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "9500")) % 20000))
    environment.setdefault("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", environment["WORLD_SIZE"]))
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", str(_free_port()))


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compressed list: "gpu[003-007,9],login" -> "gpu003"."""
    match = re.fullmatch(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?.*", nodelist)
    if match is None:
        raise ConfigError([f"SLURM_STEP_NODELIST: cannot find a host in {nodelist!r}; set MASTER_ADDR"])
    return "".join(part or "" for part in match.groups())


def threads_per_process(environment: Mapping[str, str]) -> int:
    """CPU threads for this process where several share one machine."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", "1")))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
