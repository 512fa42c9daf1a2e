"""Traces of a few steps, by configuration: PyTorch's profiler, and the history of GPU memory."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_coca.config import Config, ConfigError
from megatron_coca.training.reporting.sinks import run_folder

logger = logging.getLogger(__name__)

FOLDER = "profile"
ALLOCATIONS = 100_000
"""Events of the memory history that are kept, the newest."""


class Profiler(Protocol):
    """Records some steps of a launch."""

    def step(self) -> None:
        """One step is done."""
        ...

    def close(self) -> None:
        """The run ends; what was recorded of an unfinished window is written."""
        ...


class Window(NamedTuple):
    """The steps of a launch that are recorded: those after `first`, up to and with `last`. `start` were done before it."""

    first: int
    last: int
    start: int

    def file(self, kind: str, done: int, rank: int, suffix: str) -> str:
        """A file's name with the steps of the run that it holds, of which the launch has done `done`."""
        return f"{kind}_steps_{self.start + self.first + 1}-{self.start + min(done, self.last)}_rank_{rank}.{suffix}"


class Trace:
    """PyTorch's profiler: a Chrome trace, for https://ui.perfetto.dev or chrome://tracing."""

    def __init__(self, folder: Path, window: Window, rank: int) -> None:
        self._folder, self._window, self._rank, self._done = folder, window, rank, 0
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        # The profiler's own start distorts the step in which it happens: that one is not recorded.
        warmup = min(1, window.first)
        plan = schedule(wait=window.first - warmup, warmup=warmup, active=window.last - window.first, repeat=1)
        self._profile = profile(
            activities=activities, schedule=plan, on_trace_ready=self._write, record_shapes=True, profile_memory=True
        )
        self._profile.start()

    def step(self) -> None:
        self._done += 1
        if self._done <= self._window.last:
            self._profile.step()
        if self._done == self._window.last:
            self._profile.stop()

    def close(self) -> None:
        if self._done < self._window.last:
            self._profile.stop()
        if self._done <= self._window.first:
            logger.warning("profile: the launch ended before profile_step_start %d was reached", self._window.first)

    def _write(self, recorded: profile) -> None:
        path = self._folder / self._window.file("trace", self._done, self._rank, "json")
        recorded.export_chrome_trace(str(path))
        logger.info("profile: %s", path)


class MemoryHistory:
    """Allocations on the GPU, for https://pytorch.org/memory_viz."""

    def __init__(self, folder: Path, window: Window, rank: int) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(["memory_profiling: there is no GPU here; leave it out"])
        self._folder, self._window, self._rank, self._done = folder, window, rank, 0
        self._recording = False
        self._begin_if_due()

    def step(self) -> None:
        self._done += 1
        self._begin_if_due()
        if self._done == self._window.last:
            self.close()

    def close(self) -> None:
        if self._recording:
            path = self._folder / self._window.file("memory", self._done, self._rank, "pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False
            logger.info("memory_profiling: %s", path)

    def _begin_if_due(self) -> None:
        if self._done == self._window.first:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
            self._recording = True


def open_profilers(config: Config, start: int, rank: int) -> list[Profiler]:
    """The profilers that the configuration asks of this rank; `start` is the number of steps done before the launch.

    Raises:
        ConfigError: their folder cannot be made; memory is to be recorded where there is no GPU.
    """
    keys = config.logging
    window = Window(keys.profile_step_start, keys.profile_step_stop, start)
    folder = run_folder(config) / FOLDER
    memory = Path(keys.memory_profiling_path) if keys.memory_profiling_path is not None else folder
    wanted: tuple[tuple[str, bool, Path, Callable[[Path, Window, int], Profiler]], ...] = (
        ("profile", keys.profile, folder, Trace),
        ("memory_profiling", keys.memory_profiling, memory, MemoryHistory),
    )
    mine = rank in keys.profile_ranks
    return [build(_made(key, place), window, rank) for key, asked, place, build in wanted if asked and mine]


def _made(key: str, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{key}: {error}; a folder that can be written is needed"]) from error
    return folder
