"""What a run depends on, measured at its start: the disk of its checkpoints, the clocks of its hosts, its network.

Each measurement is as large as the run needs, within a bound, and takes a second at most. Nothing here draws a random
number or touches what is trained.
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
"""Bytes that a host writes at most."""
CHUNK = 8 << 20
"""Bytes between two flushes: the time of each is known, so that a slow disk does not keep the run."""
REDUCED_BYTES = 32 << 20
"""Bytes that ranks add up at most."""
PATIENCE = 1.0
"""Seconds after which a measurement is not repeated."""
JUDGED = 4 << 20
"""Fewer bytes than this measure a delay more than a speed: they are reported, but lead to no warning."""
PREFIX = "health/"
"""Begins the names of the figures in metrics.jsonl."""


class Disk(NamedTuple):
    """Where checkpoints go: free bytes of the disk, the bytes of one checkpoint, and how many this launch adds."""

    folder: str
    free: int
    checkpoint: int
    added: int


class Speed(NamedTuple):
    """Bytes that were moved, and bytes a second."""

    measured: int
    rate: float


class Health(NamedTuple):
    """What was measured; None for what this run has not.

    Attributes:
        disks: one for `save` and one for `save_copy`.
        writing: into `save`, all hosts together.
        reducing: bus bandwidth of an all-reduce over all ranks.
        gradients: bytes of all gradients.
        skew: seconds between the first and the last clock of several hosts.
        clocks: the hosts that these belong to.
    """

    disks: tuple[Disk, ...]
    writing: Speed | None
    reducing: Speed | None
    gradients: int
    skew: float | None
    clocks: tuple[str, str] | None

    def figures(self) -> dict[str, float]:
        """For metrics.jsonl."""
        found: dict[str, float | None] = {
            "disk_mb_per_second": self.writing and self.writing.rate / 1e6,
            "disk_free_gib": self.disks[0].free / 2**30 if self.disks else None,
            "checkpoint_gib": self.disks[0].checkpoint / 2**30 if self.disks else None,
            "allreduce_gb_per_second": self.reducing and self.reducing.rate / 1e9,
            "clock_skew_seconds": self.skew,
        }
        return {f"{PREFIX}{name}": value for name, value in found.items() if value is not None}

    def summary(self) -> str:
        """One line for the log."""
        parts = [
            f"{disk.folder}: {_size(disk.free)} free, a checkpoint takes about {_size(disk.checkpoint)}"
            for disk in self.disks
        ]
        parts += [f"written at {_size(self.writing.rate)}/s"] if self.writing else []
        parts += [f"all-reduce {self.reducing.rate / 1e9:.3g} GB/s"] if self.reducing else []
        parts += [f"clocks within {self.skew:.2g} s"] if self.skew is not None else []
        return f"health: {'; '.join(parts)}"

    def problems(self, config: Config) -> list[str]:
        """What will cost time later, each in a line with what to do."""
        keys = config.faults
        lines = [line for disk in self.disks if (line := _space_problem(disk)) is not None]
        least = keys.health_min_disk_speed * 1e6
        if self.writing and self.writing.measured >= JUDGED and self.writing.rate < least:
            lines.append(
                f"{self.disks[0].folder}: written at {_size(self.writing.rate)}/s, so a checkpoint of "
                f"{_size(self.disks[0].checkpoint)} takes about {self.disks[0].checkpoint / self.writing.rate:.0f} s; choose "
                "a faster disk, or lower health_min_disk_speed"
            )
        least = keys.health_min_bandwidth * 1e9
        if self.reducing and self.reducing.measured >= JUDGED and self.reducing.rate < least:
            lines.append(
                f"all-reduce runs at {self.reducing.rate / 1e9:.3g} GB/s, so adding up the gradients of a step "
                f"({_size(self.gradients)}) takes about {2 * self.gradients / self.reducing.rate:.1f} s; see whether the "
                "right network is used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or lower health_min_bandwidth"
            )
        if self.skew is not None and self.clocks is not None and self.skew > keys.health_max_clock_skew:
            lines.append(
                f"the clocks of {self.clocks[0]} and {self.clocks[1]} differ by {self.skew:.1f} s; synchronise them "
                "(NTP), or raise health_max_clock_skew"
            )
        return lines


def check_health(config: Config, step: int) -> Mapping[str, float]:
    """Measure, log, and warn of what will cost time later; returns the figures. `step` is that of the start. Every rank
    must call it.
    """
    health = measure(config, step)
    if dist.is_main():
        if health.figures():
            logger.info(health.summary())
        for line in health.problems(config):
            logger.warning("health: %s", line)
    return health.figures()


def measure(config: Config, step: int) -> Health:
    """What this run needs, as it is now. Every rank must call it."""
    share, dtype = trainable_share(config), config.precision.dtype
    gradients = share.trained * BYTES[dtype]
    disks = _disks(config, step) if dist.is_main() else ()
    hosts = dist.gather_texts(dist.host_name())
    writing = _writing_speed(config.checkpoint.save, checkpoint_bytes(config), hosts)
    skew, clocks = _clock_skew(hosts) if len(set(hosts)) > 1 else (None, None)
    reducing = _reducing_speed(gradients) if dist.world_size() > 1 else None
    return Health(disks, writing, reducing, gradients, skew, clocks)


def checkpoint_bytes(config: Config) -> int:
    """About the size of a checkpoint: weights in the training dtype, and the state to resume from. The tokenizer and
    random states come on top.
    """
    share, size = trainable_share(config), BYTES[config.precision.dtype]
    state = share.trained * 4 * (1 + STATES[config.optimizer.type]) + (share.total - share.trained) * size
    return int(share.total * size + state)


def _disks(config: Config, step: int) -> tuple[Disk, ...]:
    keys, size = config.checkpoint, checkpoint_bytes(config)
    folders = [folder for folder in (keys.save, keys.save_copy) if folder is not None]
    return tuple(
        Disk(folder, shutil.disk_usage(folder).free, size, added_checkpoints(config, folder, step))
        for folder in folders
    )


def added_checkpoints(config: Config, folder: str, step: int) -> int:
    """By how many checkpoints `folder` grows at most, from `step` to the end of this launch."""
    keys, schedule = config.checkpoint, config.schedule
    assert schedule.train_iters is not None
    last = min(schedule.train_iters, config.logging.exit_interval or schedule.train_iters)
    there, due = set(native.steps(Path(folder))), due_steps(keys, step, last)
    if keys.keep_last_n_checkpoints is None or not due:
        return len(due - there)
    every = keys.keep_every_n_steps
    for_good = {number for number in there | due if every is not None and number % every == 0}
    newest = sorted((there | due) - for_good)[-keys.keep_last_n_checkpoints :]
    # One more while the next is written, before the oldest goes.
    return max(0, len(for_good) + len(newest) - len(there)) + 1


def _space_problem(disk: Disk) -> str | None:
    needed = disk.added * disk.checkpoint
    if disk.free >= needed:
        return None
    return (
        f"{disk.folder}: {_size(disk.free)} free, but this run will write {disk.added} checkpoints of about "
        f"{_size(disk.checkpoint)} ({_size(needed)}), of which {disk.free // disk.checkpoint} fit; make room, set "
        "keep_last_n_checkpoints, or save less often"
    )


def _writing_speed(save: str | None, checkpoint: int, hosts: list[str]) -> Speed | None:
    """One process of each host writes its share, all at once, to a file without a name."""
    if save is None:
        return None
    first = hosts.index(hosts[dist.rank()]) == dist.rank()
    size = min(DISK_BYTES, checkpoint // len(set(hosts)))
    written, seconds = _write(save, size) if first else (0, 0.0)
    shares = dist.gather_floats([float(written), seconds])
    total, slowest = sum(each[0] for each in shares), max(each[1] for each in shares)
    return Speed(int(total), total / slowest) if slowest > 0 else None


def _write(folder: str, size: int) -> tuple[int, float]:
    """Bytes that reached the disk, and the seconds that this took."""
    block = os.urandom(min(CHUNK, max(1, size)))  # a disk that compresses would be praised for zeros
    written, began = 0, time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while written < size and time.monotonic() - began < PATIENCE:
                written += file.write(block[: size - written])
                os.fsync(file.fileno())
    except OSError as error:
        logger.warning("health: %s: %d bytes could not be written (%s)", folder, size, error)
    return written, time.monotonic() - began


def _clock_skew(hosts: list[str]) -> tuple[float, tuple[str, str]]:
    """Seconds between the clocks that are farthest apart, and their hosts. All ranks leave a barrier within a moment; the
    shortest of several such moments counts.
    """
    found = []
    for _ in range(3):
        dist.barrier()
        found.append([row[0] for row in dist.gather_floats([time.time()])])
    times = min(found, key=lambda row: max(row) - min(row))
    return max(times) - min(times), (hosts[times.index(min(times))], hosts[times.index(max(times))])


def _reducing_speed(gradients: int) -> Speed:
    """Bus bandwidth as NCCL's tests define it: 2 (n - 1) / n of the bytes, by the time of the slowest rank."""
    values = torch.zeros(max(1, min(REDUCED_BYTES, gradients) // 4), device=dist.local_device())
    size, ranks = values.numel() * 4, dist.world_size()
    dist.timed_sum(values)  # connections are made with the first one
    best = _slowest(dist.timed_sum(values))
    for _ in range(2 if best < PATIENCE / 4 else 0):  # by the time that all ranks know
        best = min(best, _slowest(dist.timed_sum(values)))
    return Speed(size, 2 * (ranks - 1) / ranks * size / best)


def _slowest(seconds: float) -> float:
    return max(row[0] for row in dist.gather_floats([seconds]))


def _size(size: float) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1024:.3g} KiB"
