"""Timers of forward passes, peak memory, and traces of a few steps: PyTorch's profiler and the GPU memory history."""

import logging
import resource
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.hooks import RemovableHandle

from megatron_coca.config import Config, ConfigError
from megatron_coca.training.sinks import run_folder

logger = logging.getLogger(__name__)

GIB = 2**30
FOLDER = "profile"
ALLOCATIONS = 100_000
"""The newest events of the memory history that are kept."""
TIMED_FORWARDS = 64
"""The newest forward passes per report that are timed."""


def peak_memory() -> tuple[float, float]:
    """Peak memory of this process in GiB, and as a share of the device's memory.

    On a GPU what PyTorch has allocated there, else the resident set with a share of 0: how much of a machine's memory a
    process may take is unknown.
    """
    if torch.cuda.is_available():
        allocated = torch.cuda.max_memory_allocated()
        return allocated / GIB, allocated / torch.cuda.get_device_properties().total_memory
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 0.0


class ForwardTimer:
    """Times the forward passes of a module, to find slow ranks: in a forward pass no rank waits for another, except
    under ZeRO 3 and tensor or sequence parallelism. On a GPU it uses events, which do not block.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start: Any = None
        self._hooks: list[RemovableHandle] = []
        self._timed: deque[tuple[Any, Any]] = deque(maxlen=TIMED_FORWARDS)

    def watch(self, module: nn.Module) -> None:
        """Time `module` while it is in training mode, until `close`."""
        self._hooks += [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]

    def close(self) -> None:
        """Remove the hooks: a module may outlive its timer."""
        for hook in self._hooks:
            hook.remove()

    def lap(self) -> float:
        """Mean seconds of a forward pass since the last call, 0 without any. On a GPU it waits for the last one."""
        seconds = []
        for start, end in self._timed:
            if torch.cuda.is_available():
                end.synchronize()
                seconds.append(start.elapsed_time(end) / 1e3)
            else:
                seconds.append(end - start)
        self._timed.clear()
        return sum(seconds) / len(seconds) if seconds else 0.0

    def _mark(self) -> Any:
        if not torch.cuda.is_available():
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @torch.compiler.disable
    def _before(self, module: nn.Module, inputs: Any) -> None:
        self._start = self._mark() if module.training else None

    @torch.compiler.disable
    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._start is not None:
            self._timed.append((self._start, self._mark()))


class Trace:
    """PyTorch's profiler over steps `first` + 1 to `last` of a launch: a Chrome trace for https://ui.perfetto.dev."""

    def __init__(self, folder: Path, first: int, last: int, file: Callable[[int], str]) -> None:
        self._folder, self._first, self._last, self._file, self._done = folder, first, last, file, 0
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        warmup = min(1, first)  # the step in which the profiler starts is distorted, and not recorded
        plan = schedule(wait=first - warmup, warmup=warmup, active=last - first, repeat=1)
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
        path = self._folder / f"trace_{self._file(self._done)}.json"
        recorded.export_chrome_trace(str(path))
        logger.info("profile: %s", path)


class MemoryHistory:
    """Allocations on the GPU over steps `first` + 1 to `last` of a launch, for https://pytorch.org/memory_viz."""

    def __init__(self, folder: Path, first: int, last: int, file: Callable[[int], str]) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("memory_profiling: there is no GPU here; remove the key")
        self._folder, self._first, self._last, self._file, self._done = folder, first, last, file, -1
        self._recording = False
        self.step()

    def step(self) -> None:
        self._done += 1
        if self._done == self._first:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
            self._recording = True
        if self._done == self._last:
            self.close()

    def close(self) -> None:
        if self._recording:
            path = self._folder / f"memory_{self._file(self._done)}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False
            logger.info("memory_profiling: %s", path)


def open_profilers(config: Config, start: int, rank: int) -> list[Trace | MemoryHistory]:
    """Start the profilers that are configured for this rank; `start` is the number of steps before the launch.

    Raises:
        ConfigError: a folder cannot be made, or memory is to be recorded without a GPU.
    """
    keys = config.logging
    folder, first, last = run_folder(config) / FOLDER, keys.profile_step_start, keys.profile_step_stop

    def file(done: int) -> str:
        return f"steps_{start + first + 1}-{start + min(done, last)}_rank_{rank}"

    profilers: list[Trace | MemoryHistory] = []
    for key, wanted, path, build in (
        ("profile", keys.profile, folder, Trace),
        ("memory_profiling", keys.memory_profiling, Path(keys.memory_profiling_path or folder), MemoryHistory),
    ):
        if wanted and rank in keys.profile_ranks:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{key}: {error}; a folder that can be written is needed") from error
            profilers.append(build(path, first, last, file))
    return profilers
