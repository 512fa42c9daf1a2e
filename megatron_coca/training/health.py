"""Health check at the start of a run: disk of the checkpoints, clocks of the hosts, network.

Each measurement moves at most as much data as the run needs and takes about a second. Nothing here draws a random
number or changes the training state.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_coca.checkpoints import native
from megatron_coca.config import Config
from megatron_coca.model.cost import BYTES
from megatron_coca.training.engine import group as dist
from megatron_coca.training.estimate import STATES
from megatron_coca.training.optimizer import trainable_share
from megatron_coca.training.saving import due_steps

logger = logging.getLogger(__name__)

DISK_BYTES = 64 << 20
"""Most bytes that a host writes."""
CHUNK_BYTES = 8 << 20
"""Bytes between two flushes, after each of which a slow disk can end the measurement."""
REDUCED_BYTES = 32 << 20
"""Most bytes in an all-reduce."""
TIME_LIMIT = 1.0
"""Seconds after which a measurement ends."""
MIN_JUDGED_BYTES = 4 << 20
"""Fewer bytes measure latency rather than bandwidth: they are reported, but lead to no warning."""
PREFIX = "health/"
"""Prefix of the figures in metrics.jsonl."""


class Disk(NamedTuple):
    """A folder of checkpoints: free bytes, the size of one checkpoint, and how many this launch adds."""

    folder: str
    free: int
    checkpoint: int
    added: int


class Bandwidth(NamedTuple):
    """Bytes that were moved, and bytes per second."""

    measured: int
    rate: float


class Health(NamedTuple):
    """Measurements; None for what this run does not have.

    Attributes:
        disks: one for `save` and one for `save_copy`.
        writing: into `save`, all hosts together.
        reducing: bus bandwidth of an all-reduce over all ranks.
        gradients: bytes of all gradients.
        skew: seconds between the earliest and the latest clock of several hosts.
        clocks: the hosts of these clocks.
    """

    disks: tuple[Disk, ...]
    writing: Bandwidth | None
    reducing: Bandwidth | None
    gradients: int
    skew: float | None
    clocks: tuple[str, str] | None

    def figures(self) -> dict[str, float]:
        """Return the measurements by their names in metrics.jsonl."""
        figures: dict[str, float] = {}
        if self.writing:
            figures["disk_mb_per_second"] = self.writing.rate / 1e6
        if self.disks:
            figures["disk_free_gib"] = self.disks[0].free / 2**30
            figures["checkpoint_gib"] = self.disks[0].checkpoint / 2**30
        if self.reducing:
            figures["allreduce_gb_per_second"] = self.reducing.rate / 1e9
        if self.skew is not None:
            figures["clock_skew_seconds"] = self.skew
        return {f"{PREFIX}{name}": value for name, value in figures.items()}

    def summary(self) -> str:
        """Return one line for the log."""
        phrases = [
            f"{disk.folder}: {_size(disk.free)} free, a checkpoint takes about {_size(disk.checkpoint)}"
            for disk in self.disks
        ]
        phrases += [f"written at {_size(self.writing.rate)}/s"] if self.writing else []
        phrases += [f"all-reduce {self.reducing.rate / 1e9:.3g} GB/s"] if self.reducing else []
        phrases += [f"clocks within {self.skew:.2g} s"] if self.skew is not None else []
        return f"health: {'; '.join(phrases)}"

    def problems(self, config: Config) -> list[str]:
        """Return one line with a remedy for each problem that will slow the run."""
        limits, lines = config.faults, []
        for disk in self.disks:
            needed = disk.added * disk.checkpoint
            if disk.free < needed:
                lines.append(
                    f"{disk.folder}: {_size(disk.free)} free, but this run will write {disk.added} checkpoints of "
                    f"about {_size(disk.checkpoint)} ({_size(needed)}), of which {disk.free // disk.checkpoint} fit; "
                    "free some space, set keep_last_n_checkpoints, or save less often"
                )
        writing, reducing = self.writing, self.reducing
        if writing and writing.measured >= MIN_JUDGED_BYTES and writing.rate < limits.health_min_disk_speed * 1e6:
            size = self.disks[0].checkpoint
            lines.append(
                f"{self.disks[0].folder}: written at {_size(writing.rate)}/s, so a checkpoint of {_size(size)} takes "
                f"about {size / writing.rate:.0f} s; choose a faster disk, or lower health_min_disk_speed"
            )
        if reducing and reducing.measured >= MIN_JUDGED_BYTES and reducing.rate < limits.health_min_bandwidth * 1e9:
            lines.append(
                f"all-reduce runs at {reducing.rate / 1e9:.3g} GB/s, so reducing the gradients of a step "
                f"({_size(self.gradients)}) takes about {2 * self.gradients / reducing.rate:.1f} s; check that the "
                "right network is used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or lower health_min_bandwidth"
            )
        if self.skew is not None and self.clocks is not None and self.skew > limits.health_max_clock_skew:
            lines.append(
                f"the clocks of {self.clocks[0]} and {self.clocks[1]} differ by {self.skew:.1f} s; synchronise them "
                "(NTP), or raise health_max_clock_skew"
            )
        return lines


def check_health(config: Config, step: int) -> Mapping[str, float]:
    """Measure, log, and warn of problems that will slow the run; return the figures. Every rank must call it.

    Args:
        step: the step that this launch starts from.
    """
    health = measure(config, step)
    figures = health.figures()
    if dist.is_main():
        if figures:
            logger.info(health.summary())
        for line in health.problems(config):
            logger.warning("health: %s", line)
    return figures


def measure(config: Config, step: int) -> Health:
    """Measure disk, clocks and network. Every rank must call it."""
    size, keys = checkpoint_bytes(config), config.checkpoint
    disks: list[Disk] = []
    gradients = trainable_share(config).trained * BYTES[config.precision.dtype]
    for folder in (keys.save, keys.save_copy) if dist.is_main() else ():
        if folder is not None:
            free, added = shutil.disk_usage(folder).free, added_checkpoints(config, folder, step)
            disks.append(Disk(folder, free, size, added))
    hosts = dist.gather_texts(dist.host_name())
    writing = None if keys.save is None else _disk_bandwidth(keys.save, size, hosts)
    skew, clocks = _clock_skew(hosts) if len(set(hosts)) > 1 else (None, None)
    reducing = _reduce_bandwidth(gradients) if dist.world_size() > 1 else None
    return Health(tuple(disks), writing, reducing, gradients, skew, clocks)


MOST_COUNTED = 100_000


def checkpoint_bytes(config: Config) -> int:
    """Estimate the size of a checkpoint: weights in the training dtype, and the state to resume from. The tokenizer and
    random states come on top.
    """
    share, size = trainable_share(config), BYTES[config.precision.dtype]
    state = share.trained * 4 * (1 + STATES[config.optimizer.type]) + (share.total - share.trained) * size
    return int(share.total * size + state)


def added_checkpoints(config: Config, folder: str, step: int) -> int:
    """Return the largest number of checkpoints that this launch, which starts from `step`, adds to `folder`.

    Of regular saves at most `MOST_COUNTED` are counted.
    """
    keys, schedule = config.checkpoint, config.schedule
    assert schedule.train_iters is not None
    last = min(schedule.train_iters, config.logging.exit_interval or schedule.train_iters)
    if keys.checkpoint_factor is not None and keys.checkpoint_scale == "linear":
        last = min(last, step + MOST_COUNTED * keys.checkpoint_factor)
    saved, due = set(native.steps(Path(folder))), due_steps(keys, step, last)
    if keys.keep_last_n_checkpoints is None or not due:
        return len(due - saved)
    every = keys.keep_every_n_steps
    permanent = {number for number in saved | due if every is not None and number % every == 0}
    newest = sorted((saved | due) - permanent)[-keys.keep_last_n_checkpoints :]
    # One more while the next is written, before the oldest is removed.
    return max(0, len(permanent) + len(newest) - len(saved)) + 1


def _disk_bandwidth(save: str, checkpoint: int, hosts: list[str]) -> Bandwidth | None:
    """Measure one process of each host writing its share, all at once, to an unnamed file."""
    is_first = hosts.index(hosts[dist.rank()]) == dist.rank()
    size = min(DISK_BYTES, checkpoint // len(set(hosts)))
    written, seconds = _write(save, size) if is_first else (0, 0.0)
    shares = dist.gather_floats([float(written), seconds])
    total, slowest = sum(share[0] for share in shares), max(share[1] for share in shares)
    return Bandwidth(int(total), total / slowest) if slowest > 0 else None


def _write(folder: str, size: int) -> tuple[int, float]:
    """Write `size` bytes to a file that is removed; return the bytes that reached the disk and the seconds taken."""
    block = os.urandom(min(CHUNK_BYTES, max(1, size)))  # random, in case the disk compresses
    written, start = 0, time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while written < size and time.monotonic() - start < TIME_LIMIT:
                written += file.write(block[: size - written])
                os.fsync(file.fileno())
    except OSError as error:
        logger.warning("health: %s: %d bytes could not be written (%s)", folder, size, error)
    return written, time.monotonic() - start


def _clock_skew(hosts: list[str]) -> tuple[float, tuple[str, str]]:
    """Return the seconds between the clocks that are farthest apart, and their hosts.

    All ranks leave a barrier at nearly the same time; the smallest spread of three barriers counts.
    """
    rounds = []
    for _ in range(3):
        dist.barrier()
        rounds.append([row[0] for row in dist.gather_floats([time.time()])])
    times = min(rounds, key=lambda row: max(row) - min(row))
    return max(times) - min(times), (hosts[times.index(min(times))], hosts[times.index(max(times))])


def _reduce_bandwidth(gradients: int) -> Bandwidth:
    """Measure bus bandwidth as NCCL's tests define it: 2 (n - 1) / n of the bytes, by the time of the slowest rank."""
    values = torch.zeros(max(1, min(REDUCED_BYTES, gradients) // 4), device=dist.local_device())
    size, ranks = values.numel() * 4, dist.world_size()
    dist.timed_sum(values)  # opens the connections
    best = float("inf")
    for repeat in range(3):
        if repeat == 1 and best >= TIME_LIMIT / 4:  # the same decision on every rank
            break
        best = min(best, max(row[0] for row in dist.gather_floats([dist.timed_sum(values)])))
    return Bandwidth(size, 2 * (ranks - 1) / ranks * size / best)


def _size(size: float) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1024:.3g} KiB"
