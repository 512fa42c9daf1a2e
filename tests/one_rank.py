"""A run of one process without a process group, for tests of the training loop."""

from dataclasses import replace
from typing import Any

from megatron_coca.config import CheckpointConfig
from megatron_coca.training.checkpointing.remote_checkpoints import RemoteCheckpoints
from megatron_coca.training.collectives import FolderLock
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.monitoring.watchdog import Watchdog
from megatron_coca.training.opened_stages import OpenedStage
from megatron_coca.training.run_context import RunContext
from megatron_coca.training.topology import Topology
from megatron_coca.work.signals import CaughtSignals


def only_stage(corpus: Corpus) -> OpenedStage:
    """The whole run on `corpus` as one stage."""
    return OpenedStage(corpus.config.run_stages()[0], corpus, corpus.config.batch.resolve(1), ())


def context_of_one_rank(keys: CheckpointConfig, preemption: CaughtSignals | None = None) -> RunContext:
    """The context of a run whose only rank is this process."""
    remotes, topology = RemoteCheckpoints(keys, keys), Topology(1, 1, 1, 1)
    return RunContext(topology, remotes, preemption or CaughtSignals(), Watchdog(None, None, 0), FolderLock(None))


def changed(corpus: Corpus, **values: Any) -> Corpus:
    """`corpus` with some keys of its configuration changed."""
    return replace(corpus, config=corpus.config.override(values))
