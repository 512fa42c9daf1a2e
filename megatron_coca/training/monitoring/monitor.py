"""Monitoring of a training run: times the training loop and reports metrics to the sinks."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from megatron_coca.config import Config
from megatron_coca.model.cost import flops_per_token, peak_flops
from megatron_coca.support.crowded_cores import CrowdedCores
from megatron_coca.support.output import losses
from megatron_coca.training.monitoring.profiling import Trace, peak_memory
from megatron_coca.training.sinks import open_sinks

logger = logging.getLogger(__name__)


class IntervalMean:
    """The mean loss since the last multiple of `log_interval`, over the steps that changed weights, as in GPT-NeoX.

    Checkpoints contain its `state`, so that a run that is resumed within an interval reports the same mean. If
    `log_interval` has changed, the first mean includes only the steps since the run was resumed.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._sum, self._count = interval, 0.0, 0

    def add(self, step: int, loss: float | None, skipped: bool) -> float | None:
        """Add the loss of step `step`, counted from 1 (None if the step had no labels). Return the mean, or this loss
        if no step has counted yet.
        """
        if (step - 1) % self._interval == 0:
            self._sum, self._count = 0.0, 0
        if not skipped and loss is not None:
            self._sum, self._count = self._sum + loss, self._count + 1
        return self._sum / self._count if self._count else loss

    def state(self) -> list[float]:
        """Return the state for `restore`. It can be stored in JSON without loss of precision."""
        return [self._sum, self._count, self._interval]

    def restore(self, state: Sequence[float]) -> None:
        """Restore a saved state. If it is for a different `log_interval`, ignore it and start a new interval."""
        known = len(state) == 3 and state[2] == self._interval
        self._sum, self._count = (float(state[0]), int(state[1])) if known else (0.0, 0)


class Monitor:
    """Times the training loop and reports metrics. All ranks call `stepped` together; only rank 0 reports."""

    def __init__(
        self,
        config: Config,
        start: int,
        tokens_per_step: int,
        gather: Callable[[list[float]], Sequence[Sequence[float]]],
        rank: int,
        skipped: int = 0,
        run: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open the sinks and, on profiled ranks, the profiler.

        Args:
            start: number of completed steps, of which `skipped` did not change any weights.
            tokens_per_step: number of tokens per step on all ranks.
            run: the id of the run.
            gather: returns the values of all ranks, indexed by rank; all ranks pass the same number of values.

        Raises:
            ConfigError: a sink or profiler that the logging keys request is not available.
        """
        steps = config.schedule.train_iters
        assert steps is not None, "already checked at the start of training"
        self._config, self._gather, self._rank, self._clock = config, gather, rank, clock
        self._start, self._last = start, config.logging.last_step(start, steps)
        self._tokens, self._flops = tokens_per_step, flops_per_token(config).model
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._peak = peak_flops(device) if device is not None else None
        if config.logging.peak_theoretical_tflops is not None:
            self._peak = config.logging.peak_theoretical_tflops * 1e12
        elif device is not None and self._peak is None and rank == 0:
            logger.warning("mfu: unknown, because the peak of %s is not known; set peak_theoretical_tflops", device)
        self._skipped_before, self._skipped, self._reported = skipped, 0, start
        self._sinks = open_sinks(config, start, run) if rank == 0 else []
        profiled = config.logging.profile and rank in config.logging.profile_ranks
        self._trace = Trace(config, start, rank) if profiled else None
        self._spent = {"waiting": 0.0, "saving": 0.0, "validating": 0.0}
        # Only rank 0 on a CPU reports crowded cores: one rank is enough, and with a GPU the cores hardly compute.
        self._cores = CrowdedCores(1 if rank > 0 or device is not None else torch.get_num_threads())
        self._begin = self._after_first = self._lap = clock()

    @contextmanager
    def during(self, phase: Literal["waiting", "saving", "validating"]) -> Iterator[None]:
        """Count the time of a `with` block as waiting for data, saving or validating. Saving and validating are not
        training time.
        """
        start = self._clock()
        try:
            with self._cores.aside():
                yield
        finally:
            self._spent[phase] += self._clock() - start

    def stepped(self, step: int, figures: Mapping[str, float | None], skipped: bool) -> None:
        """Record an optimizer step, and report its metrics at multiples of `log_interval` and at the last step.

        `step` is the number of completed steps; `skipped` means that this step left the weights unchanged.
        """
        if self._trace is not None:
            self._trace.step()
        self._skipped += skipped
        if step == self._start + 1:
            self._after_first = self._clock()
            self._cores.restart()
        elif (crowded := self._cores.look()) is not None:
            logger.warning(crowded)
        for sink in self._sinks:
            sink.advance()
        if self.reports(step):
            self._report(step, figures)

    def reports(self, step: int) -> bool:
        """Return whether `stepped` reports the metrics of this step."""
        return step % self._config.logging.log_interval == 0 or step == self._last

    def report(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Report metrics by name."""
        for sink in self._sinks:
            sink.report(step, figures)

    def note(self, step: int, message: str) -> None:
        """Report a one-line message in the log and as `event` in metrics.jsonl."""
        if self._rank == 0:
            logger.warning("step %d: %s", step, message)
        for sink in self._sinks:
            sink.note(step, message)

    def close(self) -> None:
        """Flush and close the sinks and the profiler."""
        if self._trace is not None:
            self._trace.close()
        for sink in self._sinks:
            sink.close()

    def _report(self, step: int, figures: Mapping[str, float | None]) -> None:
        now, spent, steps, skipped = self._clock(), self._spent, step - self._reported, self._skipped
        wall, self._lap, self._spent = now - self._lap, now, dict.fromkeys(self._spent, 0.0)
        training = wall - spent["saving"] - spent["validating"]
        waited, memory = zip(*self._gather([spent["waiting"], peak_memory()]), strict=True)
        self._reported, self._skipped, self._skipped_before = step, 0, self._skipped_before + skipped
        if self._rank != 0:
            return
        rate = self._tokens * steps / max(training, 1e-9)
        flops = rate / len(waited) * self._flops
        done = step - self._start - 1
        # The pace includes saves and validations. The first step, which may compile, counts only if it is the only one.
        pace = (now - self._after_first) / done if done > 0 else now - self._begin
        measured = {
            "skipped_steps": self._skipped_before,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / len(waited),
            "step_seconds": training / steps,
            "tflops_per_device": flops / 1e12,
        }
        if self._peak:
            measured["mfu"] = flops / self._peak
        measured |= {
            "peak_memory_gib": max(memory),
            "data_wait": max(waited) / max(training, 1e-9),
            "save_share": spent["saving"] / max(wall, 1e-9),
            "eval_share": spent["validating"] / max(wall, 1e-9),
            "eta_seconds": pace * max(0, self._last - step),
        }
        self.report(step, {**figures, **measured})
        for loss in losses():
            self.note(step, loss)
