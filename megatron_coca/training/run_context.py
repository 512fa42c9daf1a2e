"""The objects that all stages of a run share."""

from dataclasses import dataclass

from megatron_coca.training.exit_status import CaughtSignals
from megatron_coca.training.remote_checkpoints import RemoteCheckpoints
from megatron_coca.training.topology import Topology
from megatron_coca.training.watchdog import Watchdog


@dataclass(frozen=True)
class RunContext:
    """One per process, from the start of the run to its end.

    Attributes:
        topology: the places of all ranks in the parallel layout.
        remotes: uploads and downloads of checkpoints, if `save` is on an object store.
        preemption: the signal that asked this process to stop, if one came.
        watchdog: ends the run if no progress is reported to it.
    """

    topology: Topology
    remotes: RemoteCheckpoints
    preemption: CaughtSignals
    watchdog: Watchdog
