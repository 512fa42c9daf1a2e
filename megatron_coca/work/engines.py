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

from megatron_coca.support.console import write
from megatron_coca.support.errors import FAILED
from megatron_coca.support.plain_text import plain
from megatron_coca.work.settings import ClusterError, EngineSettings
from megatron_coca.work.statuses import PREEMPTED, Failure, is_temporary, status_of
from megatron_coca.work.tasks import Commands, CommandTask, status_of_task

KILLS = 20
"""Number of times that Ray starts a task again after its worker or its node died."""


def run(
    settings: EngineSettings,
    step: CommandTask,
    finish: CommandTask | None,
    logs: Path,
    second: CommandTask | None = None,
) -> int:
    """Run the parts of `step`, then the parts of `second`, and then `finish`. Return the exit status.

    With Slurm, this function submits an array for each step and a job that depends on the arrays, and returns at once.
    With the other engines, it returns at the end of the work. `second` and `finish` run even if tasks failed. `finish`
    does the work that failed tasks did not complete, and decides the exit status.

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
    failures = list[Failure]()
    with Commands() as commands:
        for step in steps:
            with ThreadPoolExecutor(workers) as pool:
                futures = [pool.submit(status_of_task, step, rank, commands) for rank in range(len(step.numbers))]
                try:
                    wait(futures)
                except BaseException:  # such as Ctrl-C
                    pool.shutdown(cancel_futures=True)
                    raise
            if commands.stopped:
                write("stopped by a signal; run the same command again to resume")
                return PREEMPTED
            failures += _report(step, [FAILED if future.exception() else future.result() for future in futures])
        return status_of(failures) if finish is None else status_of_task(finish, commands=commands)


def _ray(settings: EngineSettings, steps: Sequence[CommandTask], finish: CommandTask | None, logs: Path) -> int:
    import ray

    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    try:
        ray.init(settings.address, log_to_driver=False, logging_level="error", runtime_env={"env_vars": path})
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(f"address {settings.address}: no Ray cluster ({error}); run `ray start` first") from error
    try:
        failures = [failure for step in steps for failure in _report(step, _on_ray(ray, settings, step))]
        if finish is None:
            return status_of(failures)
        # `finish` is a task on Ray as well, because the remaining work may need the device of a task.
        last = replace(finish, logs=logs)
        status = FAILED
        try:
            status = ray.get(_remote(ray, settings, status_of_task).remote(last))
        except ray.exceptions.RayError as error:
            write(f"the last task failed: {plain(str(error))}")
        if last.log is not None and last.log.is_file():
            print(last.log.read_text(errors="replace", encoding="utf-8"), end="", flush=True)
        return int(status)
    finally:
        ray.shutdown()


def _remote(ray: Any, settings: EngineSettings, function: Callable[..., Any]) -> Any:
    return ray.remote(num_cpus=settings.cpus, num_gpus=settings.gpus, max_retries=KILLS)(function)


def _on_ray(ray: Any, settings: EngineSettings, step: CommandTask) -> list[int]:
    """Run the tasks of a step on a connected cluster. Return their exit statuses."""
    tasks = len(step.numbers)
    remote = _remote(ray, settings, status_of_task)
    waiting, running, statuses = deque(range(tasks)), dict[Any, int](), [FAILED] * tasks
    while waiting or running:
        while waiting and len(running) < (settings.workers or tasks):
            rank = waiting.popleft()
            running[remote.remote(step, rank)] = rank
        for done in ray.wait(list(running))[0]:
            rank = running.pop(done)
            with suppress(ray.exceptions.RayError):
                statuses[rank] = ray.get(done)
    return statuses


def _report(step: CommandTask, statuses: Sequence[int]) -> list[Failure]:
    """Print a line for each failed task of a step, and return the failures. `statuses` is in the order of the ranks."""
    failures = list[Failure]()
    for number, status in zip(step.numbers, statuses, strict=True):
        if status:
            log = f"{step.logs}/output/part_{number + 1}.txt"
            reason = f"part {number + 1} of {step.parts} failed; see {log}"
            failures.append(Failure(reason, status == FAILED or is_temporary(status)))
            write(failures[-1].reason)
    return failures


def _slurm(settings: EngineSettings, steps: Sequence[CommandTask], finish: CommandTask | None, logs: Path) -> int:
    from datatrove.utils.logging import logger

    from megatron_coca.work.slurm import SlurmTasks

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
