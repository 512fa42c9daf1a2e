"""Peak memory, and a trace of a few steps recorded by PyTorch's profiler."""

import logging
import resource

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_coca.config import Config, ConfigError
from megatron_coca.support.errors import why_not_written
from megatron_coca.support.regular_files import inside
from megatron_coca.training.sinks import run_folder

logger = logging.getLogger(__name__)

GIB = 2**30
FOLDER = "profile"


def peak_memory() -> float:
    """Return this process's peak memory in GiB: PyTorch's allocations on a GPU, otherwise the resident set size."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


class Trace:
    """Profiles steps `first` + 1 to `last` of a launch and writes a Chrome trace for https://ui.perfetto.dev."""

    def __init__(self, config: Config, start: int, rank: int) -> None:
        """Start the profiler; `start` is the number of steps completed before this launch.

        Raises:
            ConfigError: the folder for traces cannot be created, or a link to another folder is in its place. Such a
                link may have come with a downloaded run.
        """
        self._first, self._last = config.logging.profile_step_start, config.logging.profile_step_stop
        self._start, self._rank, self._done = start, rank, 0
        elsewhere = "remove the link, or choose another log_dir"
        self._folder = inside(run_folder(config), FOLDER, lambda text: ConfigError(f"profile: {text}"), elsewhere)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile: {error}; choose a writable folder") from error
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        warmup = min(1, self._first)  # the profiler distorts its first step, so that step is not recorded
        plan = schedule(wait=self._first - warmup, warmup=warmup, active=self._last - self._first, repeat=1)
        self._profile = profile(
            activities=activities, schedule=plan, on_trace_ready=self._write, record_shapes=True, profile_memory=True
        )
        self._profile.start()

    def step(self) -> None:
        self._done += 1
        if self._done <= self._last:
            self._profile.step()
        if self._done == self._last:
            self._profile.stop()

    def close(self) -> None:
        if self._done < self._last:
            self._profile.stop()
        if self._done <= self._first:
            logger.warning("profile: the launch ended before profile_step_start %d was reached", self._first)

    def _write(self, recorded: profile) -> None:
        first, last = self._start + self._first + 1, self._start + min(self._done, self._last)
        path = self._folder / f"trace_steps_{first}-{last}_rank_{self._rank}.json"
        try:
            path.unlink(missing_ok=True)  # the profiler would write through a link
            recorded.export_chrome_trace(str(path))
            logger.info("profile: %s", path)
        except (OSError, RuntimeError) as error:  # a failed trace must not end the run
            logger.warning("profile: %s: %s", path, why_not_written(error, "choose another log_dir"))
