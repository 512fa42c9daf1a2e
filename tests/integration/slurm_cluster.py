"""A Slurm cluster on one machine: munged, slurmctld and some slurmd, in a folder of their own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NODES = 2
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=1
MinJobAge=3600
NodeName=DEFAULT CPUs=2 RealMemory=64000 State=UNKNOWN
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}]
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class CannotStart(Exception):
    """The reason why no Slurm can be started here."""


@dataclass(frozen=True)
class Slurm:
    """A running cluster. `environment` has the variables that its programs need."""

    environment: Mapping[str, str]

    def run(self, *command: str) -> str:
        return subprocess.run(
            command, env={**os.environ, **self.environment}, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def jobs(self) -> dict[str, str]:
        """The states of the jobs that have not ended, by JOB or JOB_TASK."""
        lines = self.run("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait(self, seconds: float) -> None:
        """Wait until no job is left."""
        deadline = time.monotonic() + seconds
        while jobs := self.jobs():
            assert time.monotonic() < deadline, f"still there after {seconds} s: {jobs}"
            time.sleep(0.5)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start a cluster, and stop it at the end. Raises CannotStart."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        raise CannotStart(f"{', '.join(absent)}: not installed; apt-get install slurm-wlm")
    if os.geteuid() != 0:
        raise CannotStart("slurmd must be started by root")
    folder = folder.absolute()
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host, config = socket.gethostname().partition(".")[0], folder / "slurm.conf"
    first = 20000 + os.getpid() % 20000 * 2
    ports = (first, first + 1, first + NODES)
    config.write_text(CONFIG.format(folder=folder, host=host, ports=ports, last=NODES - 1))
    environment = {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munge = ["munged", "-F", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("log", "pid", "seed")]
    commands = [munge, ["slurmctld", "-D", "-i", "-f", str(config)]]
    commands += [["slurmd", "-D", "-f", str(config), "-N", f"n{node}"] for node in range(NODES)]
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            (folder / f"spool-n{number}").mkdir()
            log = stack.enter_context((folder / f"{number}-{command[0]}.txt").open("wb"))
            process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
            stack.callback(_stop, process)
            time.sleep(0.5)
        cluster = Slurm(environment)
        _wait_until_idle(cluster, folder)
        yield cluster
        subprocess.run(["scancel", "--user=root"], env={**os.environ, **environment}, check=False)


def _wait_until_idle(cluster: Slurm, folder: Path) -> None:
    for _ in range(60):
        try:
            states = cluster.run("sinfo", "--noheader", "--Node", "--format=%T").split()
        except subprocess.SubprocessError:
            states = []
        if states == ["idle"] * NODES:
            return
        time.sleep(0.5)
    logs = "\n".join(path.read_text()[-1000:] for path in sorted(folder.glob("*-*.txt")))
    raise CannotStart(f"the nodes are not idle after 30 s:\n{logs}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
