"""Run the tasks of a command on an engine, and then the command that finishes the work."""

import os
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_coca.cluster.settings import ClusterError, EngineSettings
from megatron_coca.cluster.tasks import CommandTask, TaskFailed, run_task
from megatron_coca.support.console import write
from megatron_coca.support.errors import UNUSABLE

KILLS = 20
"""Number of times that Ray starts a task again after its worker or its node died."""


def run(settings: EngineSettings, step: CommandTask, finish: CommandTask | None, logs: Path) -> int:
    """Run the parts `step.numbers`, and then `finish`. Return the exit status.

    Slurm gets an array and a job that depends on it, and this function returns at once. The other engines run until the
    end. `finish` runs even if tasks failed, does the work that they left, and decides the status.

    `logs` is a folder that all hosts share; each call writes into a new folder below it. Raises ClusterError.
    """
    folder = logs.absolute() / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    write(f"{len(step.numbers)} tasks on the engine {settings.engine}; their output: {folder}/output")
    try:
        return ENGINES[settings.engine](settings, replace(step, logs=folder), finish, folder)
    except ImportError as error:
        raise ClusterError(
            f"engine {settings.engine}: {error.name or error}: not installed; pip install 'megatron-coca[cluster]'"
        ) from error


def _local(settings: EngineSettings, step: CommandTask, finish: CommandTask | None, logs: Path) -> int:
    tasks = len(step.numbers)
    workers = settings.workers or max(1, len(os.sched_getaffinity(0)) // settings.cpus)
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(step, None, rank, tasks) for rank in range(tasks)]
        try:
            wait(futures)
        except BaseException:  # such as Ctrl-C
            pool.shutdown(cancel_futures=True)
            raise
    failed = [rank for rank, future in enumerate(futures) if future.exception() is not None]
    return _finish(step, failed, finish, logs)


def _ray(settings: EngineSettings, step: CommandTask, finish: CommandTask | None, logs: Path) -> int:
    import ray

    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    try:
        ray.init(settings.address, log_to_driver=False, logging_level="error", runtime_env={"env_vars": path})
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(f"address {settings.address}: no Ray cluster ({error}); run `ray start` first") from error
    try:
        tasks = len(step.numbers)
        remote = ray.remote(num_cpus=settings.cpus, num_gpus=settings.gpus, max_retries=KILLS)(run_task)
        waiting, running, failed = deque(range(tasks)), dict[Any, int](), list[int]()
        while waiting or running:
            while waiting and len(running) < (settings.workers or tasks):
                rank = waiting.popleft()
                running[remote.remote(step, rank, tasks)] = rank
            for done in ray.wait(list(running))[0]:
                rank = running.pop(done)
                try:
                    ray.get(done)
                except ray.exceptions.RayError:
                    failed.append(rank)
    finally:
        ray.shutdown()
    return _finish(step, failed, finish, logs)


def _finish(step: CommandTask, failed: Sequence[int], finish: CommandTask | None, logs: Path) -> int:
    """Name the failed tasks, and run `finish` in this process's terminal."""
    for rank in failed:
        number = step.numbers[rank] + 1
        write(f"part {number} of {step.parts} failed; see {logs}/output/part_{number}.txt")
    if finish is None:
        return UNUSABLE if failed else 0
    try:
        finish(None, 0, 1)
    except TaskFailed as error:
        return error.status
    return 0


def _slurm(settings: EngineSettings, step: CommandTask, finish: CommandTask | None, logs: Path) -> int:
    from datatrove.utils.logging import logger

    from megatron_coca.cluster.slurm import SlurmTasks

    logger.remove()
    array = SlurmTasks(settings, step, len(step.numbers), logs) if step.numbers else None
    last = None
    if finish is not None:
        one = settings.model_copy(update={"workers": None})
        last = SlurmTasks(one, replace(finish, logs=logs), 1, logs / "finish", after=array)
    try:
        for job in (array, last):
            if job is not None and job.job_id is None:
                job.run()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(f"engine slurm: sbatch failed ({error}); check its message and the settings") from error
    for job, name in ((array, f"{len(step.numbers)} tasks"), (last, "the end")):
        if job is not None:
            write(f"Slurm job {job.job_id}: {name}")
    return 0


ENGINES: dict[str, Callable[[EngineSettings, CommandTask, CommandTask | None, Path], int]] = {
    "local": _local,
    "slurm": _slurm,
    "ray": _ray,
}
