"""The objects shared by all stages of a run."""

from dataclasses import dataclass

from megatron_coca.training.checkpointing.remote_checkpoints import RemoteCheckpoints
from megatron_coca.training.collectives import FolderLock
from megatron_coca.training.monitoring.watchdog import Watchdog
from megatron_coca.training.topology import Topology
from megatron_coca.work.signals import CaughtSignals


@dataclass(frozen=True)
class RunContext:
    """Objects that exist once per process, from the start of a run to its end.

    Attributes:
        topology: the coordinates of all ranks in the parallel layout.
        remotes: uploads and downloads checkpoints if `save` is on an object store.
        preemption: records the signal that asked this process to stop.
        watchdog: ends the run if no progress is reported to it.
        lock: keeps other runs out of the folders of this run.
    """

    topology: Topology
    remotes: RemoteCheckpoints
    preemption: CaughtSignals
    watchdog: Watchdog
    lock: FolderLock
