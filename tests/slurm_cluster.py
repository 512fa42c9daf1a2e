"""A Slurm cluster on this machine: munged, slurmctld and one slurmd for each node, in a new folder."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import patience

NODES = 8
"""More than a run uses, because a run excludes nodes on which it failed twice."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
SEARCHED = f"{os.environ['PATH']}:/usr/sbin"  # the daemons' folder is not on every user's PATH
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
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MinJobAge=3600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=2 RealMemory=64000
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
        missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
        if missing:
            raise Unavailable(f"{', '.join(missing)}: not installed; apt-get install slurm-wlm munge")
        if os.geteuid() != 0:
            raise Unavailable("slurmd needs root")
        self.folder, self._nodes, self._daemons = folder, nodes, dict[str, subprocess.Popen[bytes]]()
        self._requeued = dict[str, float]()
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCHED}

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
        options = [f"--{option}={self.folder / name}" for option, name in names.items()]
        self._daemon("munged", "munged", "-F", "-f", *options)
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged does not answer")
        self._start_controller()
        for node in range(self._nodes):
            self._start_node(f"n{node}")
        self._wait(lambda: self._states() == ["idle"] * self._nodes, "the nodes are not idle")

    def stop(self) -> None:
        """End the daemons and all steps."""
        daemons = [*reversed(self._daemons.values())]
        if any(daemon.poll() is None for daemon in daemons):
            self.command("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            self.command("scancel", "--user=root", check=False)  # jobs that wait
            deadline = time.monotonic() + patience(20)  # processes without a daemon would remain
            while self.command("squeue", "--noheader", check=False) and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in daemons:
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def command(self, *arguments: str, check: bool = True) -> str:
        """Run one of Slurm's commands, and return its output."""
        done = subprocess.run(
            arguments, env=self.environment, capture_output=True, text=True, timeout=patience(60), check=False
        )
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

    def jobs(self) -> dict[str, str]:
        """Return the states and reasons of the jobs that have not ended, by JOB or JOB_TASK.

        Starts the controller again if it has ended, as a service does: slurmctld 22.05 can crash if a node comes back
        with a step of a job that is queued again.
        """
        if self._daemons["slurmctld"].poll() is not None:
            self._start_controller()
            self._wait(lambda: bool(self._states()), "slurmctld does not answer")
        lines = self.command("squeue", "--noheader", "--array", "--format=%i %T %r").splitlines()
        return {name: state for name, _, state in (line.partition(" ") for line in lines)}

    def start_requeued(self) -> None:
        """Start the jobs that have waited for three seconds after a requeue. Slurm would wait for two minutes.

        Slurm does not start a job in the second in which it was requeued: "job credential revoked". It holds a job that
        a lost node did not start; an administrator releases it.
        """
        lines = self.command("squeue", "--noheader", "--array", "--format=%i %r", check=False).splitlines()
        found = {line.partition(" ")[0] for line in lines if line.endswith(" BeginTime")}
        self._requeued = {name: self._requeued.get(name, time.monotonic()) for name in found}
        for name in (line.partition(" ")[0] for line in lines if "held" in line):
            self.command("scontrol", "release", name, check=False)
        for name, since in self._requeued.items():
            if time.monotonic() - since > 3:
                self.command("scontrol", "update", f"JobId={name}", "StartTime=now", check=False)

    def finished(self, number: str, timeout: float) -> dict[str, str]:
        """Wait until a job has ended and will not start again. Return its fields."""
        deadline = time.monotonic() + timeout
        while (fields := self.job(number))["JobState"] in UNFINISHED:
            assert time.monotonic() < deadline, fields
            self.start_requeued()
            time.sleep(0.5)
        return fields

    def lose(self, node: str) -> None:
        """Kill a node: its daemon and all of its processes, and report it as down. Then start it again."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        found = processes(SLURM_CONF=self.environment["SLURM_CONF"], SLURMD_NODENAME=node)
        for pid in {*found, *(starter for pid in found if _name(starter := parent(pid)) == "slurmstepd")}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        self._start_node(node)
        self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _start_controller(self) -> None:
        self._daemon("slurmctld", "slurmctld", "-D", "-f", self.environment["SLURM_CONF"])

    def _start_node(self, node: str) -> None:
        self._daemon(node, "slurmd", "-D", "-f", self.environment["SLURM_CONF"], "-N", node)

    def _daemon(self, name: str, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            options: Any = {"env": self.environment, "cwd": self.folder, "stdout": log, "stderr": log}
            self._daemons[name] = subprocess.Popen(command, **options)  # a crash leaves its core in the folder

    def _states(self) -> list[str]:
        return self.command("sinfo", "--noheader", "--Node", "--format=%t", check=False).split()

    def _wait(self, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + patience(30)
        while not condition():
            ended = [str(daemon.args) for daemon in self._daemons.values() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                log = (self.folder / "daemons.log").read_text(errors="replace")[-500:]
                raise Unavailable(f"{problem}: {' '.join(ended)} {log}")
            time.sleep(0.2)


@contextmanager
def cluster(folder: Path, nodes: int = NODES) -> Iterator[Cluster]:
    """Run a cluster inside the block. Raises Unavailable."""
    made = Cluster(folder, nodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def processes(*words: str, **variables: str) -> list[int]:
    """Return the processes with all `words` as arguments and with these environment variables."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if {*words} <= {*arguments} and {f"{name}={value}" for name, value in variables.items()} <= {*environment}:
                found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    """Return the process that started another one, or 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
