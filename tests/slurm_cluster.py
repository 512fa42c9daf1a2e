"""A Slurm cluster on this machine: munged, slurmctld and one slurmd for each node, in a folder of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
UNFINISHED = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=2
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ReturnToService=2
KillWait=10
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Unavailable(Exception):
    """Slurm cannot run on this machine; the message says why."""


class Cluster:
    """The running cluster.

    Attributes:
        environment: variables with which Slurm's commands find this cluster.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing:
            raise Unavailable(f"{', '.join(missing)}: not installed; apt-get install slurm-wlm munge")
        if os.geteuid() != 0:
            raise Unavailable("slurmd needs root")
        self.folder, self._nodes, self._daemons = folder, nodes, list[subprocess.Popen[bytes]]()
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle. Raises Unavailable."""
        last, ports = self._nodes - 1, _free_ports(self._nodes + 1)
        text = CONFIGURATION.format(
            folder=self.folder,
            host=socket.gethostname(),
            port=ports[-1],
            nodes=f"n[0-{last}]",
            ports=f"[{','.join(map(str, ports[:-1]))}]",
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
        names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        self._daemon("munged", "-F", "-f", *(f"--{option}={self.folder / name}" for option, name in names.items()))
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged does not answer")
        self._daemon("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        for node in range(self._nodes):
            self._daemon("slurmd", "-D", "-f", self.environment["SLURM_CONF"], "-N", f"n{node}")
        self._wait(lambda: self._states() == ["idle"] * self._nodes, "the nodes are not idle")

    def stop(self) -> None:
        """End the daemons and all steps."""
        if any(daemon.poll() is None for daemon in self._daemons):
            self.command("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def command(self, *arguments: str, check: bool = True) -> str:
        """Run one of Slurm's commands, and return its output."""
        done = subprocess.run(arguments, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 or not check, (arguments, done.stderr)
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, folder: Path, variables: Mapping[str, str], after: list[str]) -> str:
        """Submit a script with options of sbatch before it and arguments `after` it. Return the id of the job."""
        given = ",".join(("ALL", *(f"{name}={value}" for name, value in variables.items())))
        arguments = ("--parsable", f"--chdir={folder}", f"--export={given}", *options, str(script), *after)
        return self.command("sbatch", *arguments)

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job, as scontrol shows them."""
        fields = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(field.partition("=")[::2] for field in fields if "=" in field)

    def finished(self, number: str, timeout: float) -> dict[str, str]:
        """Wait until a job has ended and will not start again. Return its fields."""
        deadline = time.monotonic() + timeout
        while (fields := self.job(number))["JobState"] in UNFINISHED:
            assert time.monotonic() < deadline, fields
            time.sleep(0.5)
        return fields

    def _daemon(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _states(self) -> list[str]:
        return self.command("sinfo", "--noheader", "--Node", "--format=%t", check=False).split()

    def _wait(self, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            ended = [str(daemon.args) for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                log = (self.folder / "daemons.log").read_text(errors="replace")[-500:]
                raise Unavailable(f"{problem}: {' '.join(ended)} {log}")
            time.sleep(0.2)


@contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[Cluster]:
    """Run a cluster inside the block. Raises Unavailable."""
    made = Cluster(folder, nodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
