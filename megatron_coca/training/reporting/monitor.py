"""What a run tells of itself while it trains."""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch.nn as nn
from torch import Tensor

from megatron_coca.config import Config, ConfigError
from megatron_coca.training.reporting import sinks
from megatron_coca.training.reporting.console import Console, open_console
from megatron_coca.training.reporting.oddities import Interval, Oddities, RankTimes
from megatron_coca.training.reporting.profiling import open_profilers
from megatron_coca.training.reporting.sinks import (
    UNSAVED,
    RankFigures,
    Sink,
    StepFigures,
    as_number,
    last_step,
    run_folder,
)
from megatron_coca.training.reporting.timing import Clock, ForwardTimer, Lap, Phases, Remaining, measure_by, peak_memory


class Reporters:
    """All sinks of one run; does nothing on ranks other than the first."""

    def __init__(self, config: Config, start: int, active: bool) -> None:
        """`start` is the number of completed steps.

        Raises:
            ConfigError: a library is missing, or a place cannot be reached or written.
        """
        self._console: Console | None = open_console(config, start) if active else None
        self._sinks: list[Sink] = [self._console] if self._console else []
        for key, build in _sinks(config, start) if active else ():
            self._sinks.append(_opened(key, build))

    def advance(self) -> None:
        """One step is done."""
        if self._console:
            self._console.advance()

    def report(self, step: int, **figures: float | None) -> None:
        """Hand the figures of `step` to every sink."""
        for sink in self._sinks:
            sink.report(step, figures)

    def note(self, step: int, message: str) -> None:
        """Hand a line on something odd to every sink."""
        for sink in self._sinks:
            sink.note(step, message)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def _sinks(config: Config, start: int) -> list[tuple[str, Callable[[], Sink]]]:
    """The sinks that the configuration asks for, each with the key that does."""
    keys, folder = config.logging, run_folder(config)
    # Lines in the common folder are those of another run, which this one does not continue.
    known = start if folder != UNSAVED else 0
    found: list[tuple[str, Callable[[], Sink]]] = [("log_dir", lambda: sinks.JsonLines(folder, known))]
    if keys.tensorboard_dir is not None:
        tensorboard = keys.tensorboard_dir
        found.append(("tensorboard_dir", lambda: sinks.TensorBoard(tensorboard, start)))
    if keys.use_wandb:
        found.append(("use_wandb", lambda: sinks.WandB(config, folder, known)))
    return found


def _opened(key: str, build: Callable[[], Sink]) -> Sink:
    try:
        return build()
    except ImportError as error:
        raise ConfigError([f"{key}: {error}; install the extra: pip install 'megatron-coca[logging]'"]) from error
    except OSError as error:
        raise ConfigError([f"{key}: {error}; a folder that can be written is needed"]) from error


logger = logging.getLogger(__name__)

HOST_LETTERS = 64


class Monitor:
    """Times the loop and hands its figures to the sinks.

    One per run and rank. Ranks other than the first only time, and profile where they are asked to. All ranks
    construct it, and call `stepped`, together: a report collects figures of every rank.
    """

    def __init__(
        self,
        config: Config,
        start: int,
        tokens_per_step: int,
        ranks: RankFigures,
        rank: int,
        skipped: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`start` is the number of completed steps, `tokens_per_step` that of all ranks, `skipped` that of steps
        skipped before the launch.

        Raises:
            ConfigError: something that the logging keys ask for cannot be had.
        """
        self._config, self._ranks, self._rank, self._last = config, ranks, rank, last_step(config)
        hosts = _hosts(ranks)
        self._throughput = measure_by(config, tokens_per_step, len(hosts))
        self._oddities = Oddities(hosts)
        self._skipped_before, self._reported = skipped, start
        self._skipped: int | Tensor = 0
        self._reporters = Reporters(config, start, rank == 0)
        self._profilers = open_profilers(config, start, rank)
        self._phases, self._remaining = Phases(clock), Remaining(start, self._last, clock)
        self._forward = ForwardTimer(clock)

    def watch(self, module: nn.Module) -> None:
        """Time the forward passes of the trained module, to find ranks that are slow.

        Not with pipeline stages: these have unequal work.
        """
        if self._config.parallel.pipe_parallel_size <= 1:
            self._forward.watch(module)

    def waiting(self) -> AbstractContextManager[None]:
        """Around the fetch of a batch."""
        return self._phases.during("waiting")

    def saving(self) -> AbstractContextManager[None]:
        """Around the part of a save that the loop waits for."""
        return self._phases.during("saving")

    def validating(self) -> AbstractContextManager[None]:
        """Around a validation, so that it does not count as training."""
        return self._phases.during("validating")

    def stepped(self, step: int, result: StepFigures) -> None:
        """After every optimizer step, `step` of them being complete; reports at `log_interval` and at the last one."""
        for profiler in self._profilers:
            profiler.step()
        self._skipped = self._skipped + result.skipped
        self._remaining.stepped(step)
        self._reporters.advance()
        if step % self._config.logging.log_interval == 0 or step == self._last:
            self._report(step, result)

    def validated(self, step: int, losses: Mapping[str, float]) -> None:
        """Report the losses of a validation after `step`, by name."""
        self.report(step, losses)

    def report(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Report other figures, by name."""
        self._reporters.report(step, **figures)

    def note(self, step: int, message: str) -> None:
        """Tell what is odd, in one line: in the log, and as `event` in metrics.jsonl."""
        if self._rank == 0:
            logger.warning("step %d: %s", step, message)
            self._reporters.note(step, message)

    def close(self) -> None:
        """Write what is left and let go."""
        self._forward.close()
        for profiler in self._profilers:
            profiler.close()
        self._reporters.close()

    def _report(self, step: int, result: StepFigures) -> None:
        # Reading the loss waits for the GPU, so it comes before the clock.
        loss, skipped = float(result.loss), int(self._skipped)
        lap, steps = self._phases.lap(), step - self._reported
        own = RankTimes(lap.waiting, self._forward.lap(), *peak_memory())
        ranks = tuple(RankTimes(*row) for row in self._ranks(list(own)))
        self._reported, self._skipped, self._skipped_before = step, 0, self._skipped_before + skipped
        if self._rank != 0:
            return
        figures = _of_step(result, loss) | {"skipped_steps": self._skipped_before}
        self.report(step, figures | self._timings(step, steps, lap, ranks))
        for line in self._oddities.find(Interval(steps, lap.training, skipped, loss, ranks)):
            self.note(step, line)

    def _timings(self, step: int, steps: int, lap: Lap, ranks: Sequence[RankTimes]) -> dict[str, float]:
        """The figures named in `TIMINGS`; memory and waits are those of the rank that has most."""
        wall, training = max(lap.wall, 1e-9), max(lap.training, 1e-9)
        return self._throughput.figures(steps, lap.training) | {
            "peak_memory_gib": max(each.memory_gib for each in ranks),
            "data_wait": max(each.waited for each in ranks) / training,
            "save_share": lap.saving / wall,
            "eval_share": lap.validating / wall,
            "eta_seconds": self._remaining.seconds(step),
        }


def _of_step(result: StepFigures, loss: float) -> dict[str, float | None]:
    scale = {"loss_scale": result.loss_scale} if result.loss_scale is not None else {}
    return {"loss": loss, "grad_norm": as_number(result.grad_norm), "lr": result.lr} | scale


def _hosts(ranks: RankFigures) -> list[str]:
    """The host name of every rank; sent as numbers, because numbers are what ranks send."""
    own = socket.gethostname().encode()[:HOST_LETTERS].ljust(HOST_LETTERS, b"\0")
    return [
        bytes(int(letter) for letter in row).rstrip(b"\0").decode(errors="replace")
        for row in ranks(list(map(float, own)))
    ]
