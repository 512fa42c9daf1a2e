"""The Slurm engine: datatrove's executor with the options of sbatch that its tasks need."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from datatrove.executor import SlurmPipelineExecutor

from megatron_coca.work.processes import MAIN
from megatron_coca.work.settings import EngineSettings
from megatron_coca.work.statuses import FINAL
from megatron_coca.work.tasks import CommandTask, TaskFailed

REQUEUES = 20
"""Number of times that Slurm starts a task again."""
SAVING_SECONDS = 120
"""A task receives the signal to save this number of seconds before its time limit."""


class SlurmTasks(SlurmPipelineExecutor):
    """An array of tasks.

    A task that ends with a status that is not in FINAL is requeued by its batch script. If Slurm also kills the script,
    the job that depends on the array does the work of the task. That job starts even if tasks failed.
    """

    def __init__(
        self, settings: EngineSettings, step: CommandTask, tasks: int, logs: Path, after: "SlurmTasks | None" = None
    ) -> None:
        self._more = {"signal": f"USR1@{SAVING_SECONDS}", "open-mode": "append", **settings.sbatch_args}
        super().__init__(
            pipeline=[step],
            tasks=tasks,
            time=settings.time,
            partition=settings.partition,
            cpus_per_task=settings.cpus,
            gpus_per_task=settings.gpus,
            workers=settings.workers or -1,
            job_name=f"coca-{step.arguments[0]}" + ("-finish" if step.parts is None else ""),
            qos="",
            logging_dir=str(logs),
            sbatch_args=self._more,
            srun_args={"cpus-per-task": settings.cpus},  # srun does not read the option of sbatch
            env_command=_environment(),
            depends=after,
            run_on_dependency_fail=True,
            requeue_signals=None,  # the command saves first, and then the script requeues it
        )

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        """Leave out options without a value, and also the memory limit unless `sbatch_args` sets one."""
        values = super().get_sbatch_args(max_array)
        if "mem-per-cpu" not in self._more:
            del values["mem-per-cpu"]
        return {name: value for name, value in values.items() if value is not None}

    def launch_merge_stats(self) -> None:
        """Submit no job for statistics, because the tasks have none."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        try:
            return super()._run_for_rank(rank, local_rank, node_rank)
        except TaskFailed as error:
            sys.exit(error.status)


def _environment() -> str:
    """Return the line of the batch script that finds this program, and that requeues the task when the script ends.

    The line identifies the task as ARRAY_INDEX, because the SLURM_JOB_ID of an array's last task is the number of the
    array.
    """
    path = f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    root = shlex.quote(os.fspath(Path(MAIN).parents[1]))
    modules = f"export PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}"
    final = "|".join(map(str, FINAL))
    requeue = (
        f'requeue() {{ status=$?; case $status in {final}) ;; *) [ "${{SLURM_RESTART_COUNT:-0}}" -ge {REQUEUES} ] || '
        'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" ;; esac; exit $status; }; trap requeue EXIT'
    )
    return f"{path}; {modules}; {requeue}"
