"""Run the tasks of a command on an engine, and then the command that finishes the work."""

import os
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_coca.cluster.settings import ClusterError, EngineSettings
from megatron_coca.cluster.tasks import CommandTask, run_task, status_of_task
from megatron_coca.support.console import write
from megatron_coca.support.errors import FAILED, UNUSABLE

KILLS = 20
"""Number of times that Ray starts a task again after its worker or its node died."""


def run(
    settings: EngineSettings,
    step: CommandTask,
    finish: CommandTask | None,
    logs: Path,
    second: CommandTask | None = None,
) -> int:
    """Run the parts `step.numbers`, then those of `second`, and then `finish`. Return the exit status.

    Slurm gets an array for each step and a job that depends on them, and this function returns at once. The other
    engines run until the end. `second` and `finish` run even if tasks failed. `finish` does the work that they left,
    and decides the status.

    `logs` is a folder that all hosts share; each call writes into a new folder below it. Raises ClusterError.
    """
    folder = logs.absolute() / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    steps = [replace(step, logs=folder)]
    if second is not None:
        steps.append(replace(second, logs=folder / "second"))
    tasks = ", then ".join(f"{len(each.numbers)} tasks" for each in steps)
    write(f"{tasks} on the engine {settings.engine}; their output: {folder}/output")
    try:
        return ENGINES[settings.engine](settings, steps, finish, folder)
    except ImportError as error:
        raise ClusterError(
            f"engine {settings.engine}: {error.name or error}: not installed; pip install 'megatron-coca[cluster]'"
        ) from error


def _local(settings: EngineSettings, steps: Sequence[CommandTask], finish: CommandTask | None, logs: Path) -> int:
    workers = settings.workers or max(1, len(os.sched_getaffinity(0)) // settings.cpus)
    failed = 0
    for step in steps:
        tasks = len(step.numbers)
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(step, None, rank, tasks) for rank in range(tasks)]
            try:
                wait(futures)
            except BaseException:  # such as Ctrl-C
                pool.shutdown(cancel_futures=True)
                raise
        failed += _report(step, [rank for rank, future in enumerate(futures) if future.exception() is not None])
    return _finish(failed, finish)


def _ray(settings: EngineSettings, steps: Sequence[CommandTask], finish: CommandTask | None, logs: Path) -> int:
    import ray

    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    try:
        ray.init(settings.address, log_to_driver=False, logging_level="error", runtime_env={"env_vars": path})
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(f"address {settings.address}: no Ray cluster ({error}); run `ray start` first") from error
    try:
        failed = sum([_report(step, _on_ray(ray, settings, step)) for step in steps])
        if finish is None:
            return _finish(failed, None)
        # On Ray as well, because work that is left needs the device of a task.
        last = replace(finish, logs=logs)
        status = FAILED
        with suppress(ray.exceptions.RayError):
            status = ray.get(_remote(ray, settings, status_of_task).remote(last))
        if last.log is not None and last.log.is_file():
            print(last.log.read_text(errors="replace"), end="", flush=True)
        return int(status)
    finally:
        ray.shutdown()


def _remote(ray: Any, settings: EngineSettings, function: Callable[..., Any]) -> Any:
    return ray.remote(num_cpus=settings.cpus, num_gpus=settings.gpus, max_retries=KILLS)(function)


def _on_ray(ray: Any, settings: EngineSettings, step: CommandTask) -> list[int]:
    """Run the tasks of a step on a connected cluster. Return the ranks that failed."""
    tasks = len(step.numbers)
    remote = _remote(ray, settings, run_task)
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
    return failed


def _report(step: CommandTask, failed: Sequence[int]) -> int:
    """Name the failed tasks of a step, and return their number."""
    for rank in failed:
        number = step.numbers[rank] + 1
        write(f"part {number} of {step.parts} failed; see {step.logs}/output/part_{number}.txt")
    return len(failed)


def _finish(failed: int, finish: CommandTask | None) -> int:
    """Run `finish` in this process's terminal, and return the exit status."""
    if finish is None:
        return UNUSABLE if failed else 0
    return status_of_task(finish)


def _slurm(settings: EngineSettings, steps: Sequence[CommandTask], finish: CommandTask | None, logs: Path) -> int:
    from datatrove.utils.logging import logger

    from megatron_coca.cluster.slurm import SlurmTasks

    logger.remove()
    jobs = dict[str, SlurmTasks]()
    after: SlurmTasks | None = None
    for step in steps:
        if step.numbers:
            assert step.logs is not None, "run() sets it"
            after = SlurmTasks(settings, step, len(step.numbers), step.logs, after=after)
            jobs[f"{len(step.numbers)} tasks" + (", second step" if step is not steps[0] else "")] = after
    if finish is not None:
        one = settings.model_copy(update={"workers": None})
        jobs["the end"] = SlurmTasks(one, replace(finish, logs=logs), 1, logs / "finish", after=after)
    try:
        for job in jobs.values():
            if job.job_id is None:
                job.run()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(f"engine slurm: sbatch failed ({error}); check its message and the settings") from error
    for name, job in jobs.items():
        write(f"Slurm job {job.job_id}: {name}")
    return 0


ENGINES: dict[str, Callable[[EngineSettings, Sequence[CommandTask], CommandTask | None, Path], int]] = {
    "local": _local,
    "slurm": _slurm,
    "ray": _ray,
}
