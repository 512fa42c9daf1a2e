"""Engines: run many tasks of a command on this machine, on Slurm or on Ray, and then one task that finishes the work.

datatrove submits the tasks to Slurm, and Ray runs them by its own interface (extra `cluster`). A task is the same
command with `--part I/N`, so the result files decide which work is complete, on every engine and without an engine.
"""

from megatron_coca.cluster.engines import run
from megatron_coca.cluster.parts import part_of
from megatron_coca.cluster.settings import (
    ClusterError,
    EngineSettings,
    add_engine_options,
    engine_of,
    without_engine,
)
from megatron_coca.cluster.tasks import CommandTask, Failure, is_temporary, status_of
