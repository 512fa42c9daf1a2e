"""Monitoring a training run: timings of the loop, and figures for the sinks."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

from megatron_coca.config import Config
from megatron_coca.model.cost import flops_per_token, peak_flops
from megatron_coca.training.profiling import open_profilers, peak_memory
from megatron_coca.training.sinks import open_sinks

logger = logging.getLogger(__name__)

DATA_WAIT, SECONDS_JUDGED = 0.10, 10.0
"""Share of the training time spent waiting for data that is warned of, and the least training time that is judged."""
MEMORY = 0.92
"""Share of the device's memory that is warned of."""


class RankTimes(NamedTuple):
    """Figures of one rank: seconds waited for data, memory in GiB and as a share."""

    waited: float
    memory_gib: float
    memory_share: float


class Monitor:
    """Times the training loop and reports its figures. All ranks call `stepped` together; only rank 0 reports."""

    def __init__(
        self,
        config: Config,
        start: int,
        tokens_per_step: int,
        gather: Callable[[list[float]], Sequence[Sequence[float]]],
        hosts: Sequence[str],
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
        self._hosts, self._trained, self._waited = hosts, 0.0, 0.0
        self._warned: set[str] = set()
        self._tokens, self._flops = tokens_per_step, flops_per_token(config).model
        self._peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        if config.logging.peak_theoretical_tflops is not None:
            self._peak = config.logging.peak_theoretical_tflops * 1e12
        self._skipped_before, self._skipped, self._reported = skipped, 0, start
        self._sinks = open_sinks(config, start) if rank == 0 else []
        self._profilers = open_profilers(config, start, rank)
        self._spent = {"waiting": 0.0, "saving": 0.0, "validating": 0.0}
        self._begin = self._after_first = self._lap = clock()

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
        for profiler in self._profilers:
            profiler.close()
        for sink in self._sinks:
            sink.close()

    def _report(self, step: int, figures: Mapping[str, float | None]) -> None:
        now, spent, steps, skipped = self._clock(), self._spent, step - self._reported, self._skipped
        wall, self._lap, self._spent = now - self._lap, now, dict.fromkeys(self._spent, 0.0)
        training = wall - spent["saving"] - spent["validating"]
        own = RankTimes(spent["waiting"], *peak_memory())
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
        self._warn(step, training, ranks)

    def _warn(self, step: int, training: float, ranks: Sequence[RankTimes]) -> None:
        """Note what slows or may end the run, each once, with the rank where it is worst."""
        slowest = max(ranks, key=lambda times: times.waited)
        fullest = max(ranks, key=lambda times: times.memory_share)
        self._trained, self._waited = self._trained + training, self._waited + slowest.waited
        warnings: dict[str, tuple[RankTimes, str, str]] = {}
        if self._trained >= SECONDS_JUDGED and self._waited > DATA_WAIT * self._trained:
            text = f"{self._waited / self._trained:.0%} of the time is spent waiting for data"
            warnings["data"] = slowest, text, "raise num_workers, or check the disks"
        if fullest.memory_share > MEMORY:
            text = f"{fullest.memory_share:.0%} of the device's memory was in use"
            warnings["memory"] = fullest, text, "reduce the micro-batch or set checkpoint_activations"
        for name in warnings.keys() - self._warned:
            worst, text, remedy = warnings[name]
            self._warned.add(name)
            rank = ranks.index(worst)
            self.note(step, f"{text} on rank {rank} ({self._hosts[rank]}); {remedy}")
