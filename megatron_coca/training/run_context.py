"""The objects shared by all stages of a run."""

from dataclasses import dataclass

from megatron_coca.training.exit_status import CaughtSignals
from megatron_coca.training.remote_checkpoints import RemoteCheckpoints
from megatron_coca.training.topology import Topology
from megatron_coca.training.watchdog import Watchdog


@dataclass(frozen=True)
class RunContext:
    """Objects that exist once per process, from the start of a run to its end.

    Attributes:
        topology: the coordinates of all ranks in the parallel layout.
        remotes: uploads and downloads checkpoints if `save` is on an object store.
        preemption: records the signal that asked this process to stop.
        watchdog: ends the run if no progress is reported to it.
    """

    topology: Topology
    remotes: RemoteCheckpoints
    preemption: CaughtSignals
    watchdog: Watchdog
