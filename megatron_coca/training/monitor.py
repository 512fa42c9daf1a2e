"""Monitoring a training run: timings of the loop, figures for the sinks, and anomalies worth a line in the log."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

import torch
import torch.nn as nn

from megatron_coca.config import Config
from megatron_coca.model.cost import flops_per_token, peak_flops
from megatron_coca.training.profiling import ForwardTimer, open_profilers, peak_memory
from megatron_coca.training.sinks import open_sinks

logger = logging.getLogger(__name__)

SECONDS_JUDGED = 10.0
"""Minimum training time that a rule about time looks at: shorter ones are noise."""
SECONDS_QUIET = 600.0
"""Training time for which a rule stays silent after it has reported."""
DATA_WAIT, STRAGGLER, MEMORY, SLOWDOWN = 0.10, 1.2, 0.92, 0.5
"""Limits of the rules: share of time, ratio to the median rank, share of memory, ratio to the median speed."""
MEDIAN_OF = 3
"""Judged intervals that the run's median speed needs before a slowdown is reported."""


class RankTimes(NamedTuple):
    """Figures of one rank: seconds waited for data, mean seconds of a forward pass, memory in GiB and as a share."""

    waited: float
    forward: float
    memory_gib: float
    memory_share: float


@dataclass(frozen=True)
class Interval:
    """Consecutive steps that the rules judge, with their training time, how many changed no weight, the last loss, the
    figures by rank, and the speeds (steps per second) of the intervals judged before.
    """

    steps: int
    seconds: float
    skipped: int
    loss: float
    ranks: tuple[RankTimes, ...]
    speeds: tuple[float, ...] = ()

    @property
    def speed(self) -> float:
        """Steps per second."""
        return self.steps / max(self.seconds, 1e-9)

    def __add__(self, later: "Interval") -> "Interval":
        """Join two intervals; forward times are averaged by steps."""
        steps = self.steps + later.steps
        ranks = tuple(
            two._replace(
                waited=one.waited + two.waited, forward=(one.forward * self.steps + two.forward * later.steps) / steps
            )
            for one, two in zip(self.ranks, later.ranks, strict=True)
        )
        seconds, skipped = self.seconds + later.seconds, self.skipped + later.skipped
        return replace(later, steps=steps, seconds=seconds, skipped=skipped, ranks=ranks)


Hosts = Sequence[str]
Rule = Callable[[Interval, Hosts], str | None]


def _largest(values: Sequence[float], hosts: Hosts) -> tuple[str, float]:
    """The rank with the largest value, named with its host, and the value."""
    rank = max(range(len(values)), key=lambda number: values[number])
    return f"rank {rank} ({hosts[rank]})", values[rank]


def slow_data(interval: Interval, hosts: Hosts) -> str | None:
    """A rank that waits for batches."""
    rank, share = _largest([times.waited / interval.seconds for times in interval.ranks], hosts)
    if share <= DATA_WAIT:
        return None
    return f"{share:.0%} of the time is spent waiting for data, on {rank}; raise num_workers, or check the disks"


def straggler(interval: Interval, hosts: Hosts) -> str | None:
    """A rank whose forward pass is slower than those of the others."""
    seconds = [times.forward for times in interval.ranks]
    usual, (rank, longest) = median(seconds), _largest(seconds, hosts)
    if usual <= 0 or longest <= STRAGGLER * usual:
        return None
    ratio = longest / usual
    return f"{rank} is slow: a forward pass takes {ratio:.2f} times the median of all ranks, which wait for it"


def full_memory(interval: Interval, hosts: Hosts) -> str | None:
    """A device that is almost full."""
    rank, share = _largest([times.memory_share for times in interval.ranks], hosts)
    if share <= MEMORY:
        return None
    used = f"{share:.0%} of the device's memory was in use on {rank}"
    return f"{used}; reduce the micro-batch or set checkpoint_activations"


def slowdown(interval: Interval, hosts: Hosts) -> str | None:
    """A run that became slow."""
    if len(interval.speeds) < MEDIAN_OF or interval.speed > SLOWDOWN * (usual := median(interval.speeds)):
        return None
    return f"a step takes {1 / interval.speed:.3g} s; the run's median is {1 / usual:.3g} s"


def skipped_steps(interval: Interval, hosts: Hosts) -> str | None:
    """Steps that changed no weight."""
    skipped = interval.skipped
    return f"{skipped} of the last {interval.steps} steps changed no weight" if skipped else None


def loss_not_finite(interval: Interval, hosts: Hosts) -> str | None:
    """A loss that is NaN or infinite."""
    return None if math.isfinite(interval.loss) else f"the loss is {interval.loss}"


RULES: tuple[Rule, ...] = (loss_not_finite, skipped_steps, full_memory)
"""Judge the interval of every report."""
TIMED_RULES: tuple[Rule, ...] = (slow_data, straggler, slowdown)
"""Judge intervals of at least `SECONDS_JUDGED`."""


class Anomalies:
    """Applies the rules at every report; none repeats itself within `SECONDS_QUIET`."""

    def __init__(self, hosts: Hosts) -> None:
        """`hosts` are the host names by rank."""
        self.hosts = hosts
        self._window: Interval | None = None
        self._speeds: list[float] = []
        self._seconds = 0.0
        self._reported: dict[Rule, float] = {}

    def find(self, interval: Interval) -> Iterator[str]:
        """The anomalies of the newest interval, or of those since timed rules were last applied."""
        self._seconds += interval.seconds
        yield from self._apply(RULES, interval)
        self._window = self._window + interval if self._window else interval
        if self._window.seconds >= SECONDS_JUDGED:
            window, self._window = replace(self._window, speeds=tuple(self._speeds)), None
            yield from self._apply(TIMED_RULES, window)
            self._speeds.append(window.speed)

    def _apply(self, rules: Sequence[Rule], interval: Interval) -> Iterator[str]:
        for rule in rules:
            quiet = rule in self._reported and self._seconds - self._reported[rule] < SECONDS_QUIET
            line = None if quiet else rule(interval, self.hosts)
            if line is not None:
                self._reported[rule] = self._seconds
                yield line


class Monitor:
    """Times the training loop and reports its figures. All ranks call `stepped` together; only rank 0 reports."""

    def __init__(
        self,
        config: Config,
        start: int,
        tokens_per_step: int,
        gather: Callable[[list[float]], Sequence[Sequence[float]]],
        hosts: Hosts,
        rank: int,
        skipped: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open the sinks and profilers.

        Args:
            start: completed steps, of which `skipped` changed no weight.
            tokens_per_step: of all ranks.
            gather: returns equally many values of every rank, by rank.
            hosts: host names by rank.

        Raises:
            ConfigError: a sink or profiler of the logging keys is not available.
        """
        steps = config.schedule.train_iters
        assert steps is not None, "training has checked it"
        self._config, self._gather, self._rank, self._clock = config, gather, rank, clock
        self._start, self._last = start, min(steps, config.logging.exit_interval or steps)
        self._anomalies = Anomalies(hosts)
        self._tokens, self._flops = tokens_per_step, flops_per_token(config).model
        self._peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        if config.logging.peak_theoretical_tflops is not None:
            self._peak = config.logging.peak_theoretical_tflops * 1e12
        self._skipped_before, self._skipped, self._reported = skipped, 0, start
        self._sinks = open_sinks(config, start) if rank == 0 else []
        self._profilers = open_profilers(config, start, rank)
        self._forward = ForwardTimer(clock)
        self._spent = {"waiting": 0.0, "saving": 0.0, "validating": 0.0}
        self._begin = self._after_first = self._lap = clock()

    def watch(self, module: nn.Module) -> None:
        """Time the forward passes of `module`, to find slow ranks; not with pipeline stages, whose work is unequal."""
        if self._config.parallel.pipe_parallel_size <= 1:
            self._forward.watch(module)

    @contextmanager
    def during(self, phase: Literal["waiting", "saving", "validating"]) -> Iterator[None]:
        """Count a block as waiting for data, saving or validating; the last two are no training time."""
        start = self._clock()
        try:
            yield
        finally:
            self._spent[phase] += self._clock() - start

    def stepped(self, step: int, figures: Mapping[str, float | None], skipped: bool) -> None:
        """Call after every optimizer step, with its loss and other figures; reports at `log_interval` and at the last.

        `step` is the number of completed steps; `skipped` means that this one left the weights unchanged.
        """
        for profiler in self._profilers:
            profiler.step()
        self._skipped += skipped
        if step == self._start + 1:
            self._after_first = self._clock()
        for sink in self._sinks:
            sink.advance()
        if step % self._config.logging.log_interval == 0 or step == self._last:
            self._report(step, figures)

    def report(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Report figures by name."""
        for sink in self._sinks:
            sink.report(step, figures)

    def note(self, step: int, message: str) -> None:
        """Report a one-line message: in the log, and as `event` in metrics.jsonl."""
        if self._rank == 0:
            logger.warning("step %d: %s", step, message)
        for sink in self._sinks:
            sink.note(step, message)

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        """Report prompts with their continuations: in the log, and in every sink that takes texts."""
        for prompt, text in pairs:
            logger.info("step %d: %s -> %s", step, *(json.dumps(part, ensure_ascii=False) for part in (prompt, text)))
        for sink in self._sinks if pairs else ():
            sink.samples(step, pairs)

    def close(self) -> None:
        """Flush and close sinks and profilers."""
        self._forward.close()
        for profiler in self._profilers:
            profiler.close()
        for sink in self._sinks:
            sink.close()

    def _report(self, step: int, figures: Mapping[str, float | None]) -> None:
        now, spent, steps, skipped = self._clock(), self._spent, step - self._reported, self._skipped
        wall, self._lap, self._spent = now - self._lap, now, dict.fromkeys(self._spent, 0.0)
        training = wall - spent["saving"] - spent["validating"]
        own = RankTimes(spent["waiting"], self._forward.lap(), *peak_memory())
        ranks = tuple(RankTimes(*row) for row in self._gather(list(own)))
        self._reported, self._skipped, self._skipped_before = step, 0, self._skipped_before + skipped
        if self._rank != 0:
            return
        rate = self._tokens * steps / max(training, 1e-9)
        flops = rate / len(ranks) * self._flops
        done = step - self._start - 1
        # Saves and validations included. The first step, which may compile, counts only while there is no other.
        pace = (now - self._after_first) / done if done > 0 else now - self._begin
        measured = {
            "skipped_steps": self._skipped_before,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / len(ranks),
            "step_seconds": training / steps,
            "tflops_per_device": flops / 1e12,
        }
        if self._peak:
            measured["mfu"] = flops / self._peak
        measured |= {
            "peak_memory_gib": max(times.memory_gib for times in ranks),
            "data_wait": max(times.waited for times in ranks) / max(training, 1e-9),
            "save_share": spent["saving"] / max(wall, 1e-9),
            "eval_share": spent["validating"] / max(wall, 1e-9),
            "eta_seconds": pace * max(0, self._last - step),
        }
        self.report(step, {**figures, **measured})
        loss = figures["loss"]
        assert loss is not None
        for line in self._anomalies.find(Interval(steps, training, skipped, loss, ranks)):
            self.note(step, line)
