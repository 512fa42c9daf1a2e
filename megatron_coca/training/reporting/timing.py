"""Where the time of the loop goes, and how long this rank's own work takes."""

import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from megatron_coca.config import Config
from megatron_coca.model.cost import flops_per_token, peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Throughput:
    """Turns steps and seconds into figures.

    Attributes:
        tokens_per_step: of all ranks together.
        devices: number of ranks.
        flops_per_token: of forward and backward pass, as MFU counts them (`Flops.model`).
        peak: FLOP/s of one device; None where it is not known.
    """

    tokens_per_step: int
    devices: int
    flops_per_token: float
    peak: float | None

    def figures(self, steps: int, seconds: float) -> dict[str, float]:
        """Figures of `steps` that took `seconds` of training. `mfu` is left out where no peak is known."""
        rate = self.tokens_per_step * steps / max(seconds, 1e-9)
        flops = rate / self.devices * self.flops_per_token
        found = {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self.devices,
            "step_seconds": seconds / steps,
            "tflops_per_device": flops / 1e12,
        }
        return found | ({"mfu": flops / self.peak} if self.peak else {})


def measure_by(config: Config, tokens_per_step: int, devices: int) -> Throughput:
    """What the configured model's throughput is reckoned with.

    Raises:
        ConfigError: `vocab_size` is not known.
    """
    return Throughput(tokens_per_step, devices, flops_per_token(config).model, device_peak(config))


def device_peak(config: Config) -> float | None:
    """FLOP/s: `peak_theoretical_tflops`, else this GPU's data sheet's, else None."""
    given = config.logging.peak_theoretical_tflops
    if given is not None:
        return given * 1e12
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def peak_memory() -> tuple[float, float]:
    """GiB that this process has held at most, and their share of the device's memory.

    On a GPU what PyTorch has allocated there. Elsewhere the resident set, with a share of 0: how much of a machine's
    memory a process may take is not known.
    """
    if torch.cuda.is_available():
        allocated = torch.cuda.max_memory_allocated()
        return allocated / GIB, allocated / torch.cuda.get_device_properties().total_memory
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 0.0


Clock = Callable[[], float]
"""Seconds since some moment."""

TIMED_FORWARDS = 64
"""Forward passes per interval that are timed on a GPU, the newest; each needs two events."""


class Lap(NamedTuple):
    """Seconds since the lap before, and how many of them went by in each phase."""

    wall: float
    waiting: float
    saving: float
    validating: float

    @property
    def training(self) -> float:
        """Seconds in neither a save nor a validation; waits for data belong to training."""
        return self.wall - self.saving - self.validating


class Phases:
    """Divides the time of the loop into laps and phases."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._since, self._spent = clock(), dict.fromkeys(Lap._fields[1:], 0.0)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what runs inside as `phase`: waiting, saving or validating."""
        began = self._clock()
        try:
            yield
        finally:
            self._spent[phase] += self._clock() - began

    def lap(self) -> Lap:
        """The lap that ends now; the next one begins."""
        now = self._clock()
        found = Lap(now - self._since, **self._spent)
        self._since, self._spent = now, dict.fromkeys(self._spent, 0.0)
        return found


class Remaining:
    """Seconds until the last step, at the pace of this process so far, saves and validations included.

    The first step is left out once there are others: it allocates, and may compile.
    """

    def __init__(self, start: int, last: int, clock: Clock = time.perf_counter) -> None:
        self._clock, self._start, self._last = clock, start, last
        self._began = self._after_first = clock()

    def stepped(self, step: int) -> None:
        """`step` is done."""
        if step == self._start + 1:
            self._after_first = self._clock()

    def seconds(self, step: int) -> float:
        """From `step`, which is done, to the last."""
        several = step > self._start + 1
        since, done = (self._after_first, step - self._start - 1) if several else (self._began, 1)
        return (self._clock() - since) / done * max(0, self._last - step)


class ForwardTimer:
    """Times the forward passes of the trained module.

    No rank waits for another inside one (but under ZeRO 3 and tensor or sequence parallelism), while the step as a
    whole takes equally long on all: so this tells which rank is slow. On a GPU by events, which wait for nothing.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._begun: Any = None
        self._hooks: list[RemovableHandle] = []
        self._timed: deque[tuple[Any, Any]] = deque(maxlen=TIMED_FORWARDS)
        events = torch.cuda.is_available()
        self._mark: Callable[[], Any] = _event if events else clock
        self._between: Callable[[Any, Any], float] = _between_events if events else _between_times

    def watch(self, module: nn.Module) -> None:
        """Time `module` until `close`, while it is in training mode."""
        self._hooks += [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]

    def close(self) -> None:
        """Time no more: a module may outlive its timer."""
        for hook in self._hooks:
            hook.remove()

    def lap(self) -> float:
        """Mean seconds of a forward pass since the lap before, 0 without any. On a GPU it waits for the last one."""
        pairs = list(self._timed)
        self._timed.clear()
        return sum(self._between(*pair) for pair in pairs) / len(pairs) if pairs else 0.0

    @torch.compiler.disable
    def _before(self, module: nn.Module, inputs: Any) -> None:
        self._begun = self._mark() if module.training else None

    @torch.compiler.disable
    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._begun is not None:
            self._timed.append((self._begun, self._mark()))


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_events(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _between_times(begin: float, end: float) -> float:
    return end - begin
