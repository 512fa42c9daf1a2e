"""Which checkpoint a run resumes from: the first one that is valid, verified by all ranks together.

Every rank compares some of the files with their checksums, in several threads. While they do, the ranks agree at short
intervals on how much is read, so that a rank which has finished early, and waits, shows progress to its watchdog too.
"""

import heapq
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.errors import UnreadableError
from megatron_coca.checkpoints.files import Comparison
from megatron_coca.training import engine as dist
from megatron_coca.training.collectives import decode_failure, encode_failure, from_main
from megatron_coca.training.launch import threads_per_process

logger = logging.getLogger(__name__)

AGREE_SECONDS, REPORT_SECONDS = 1.0, 30.0
"""Between two agreements of the ranks on their progress, and between two reports of it."""
MOST_THREADS = 16
"""Of a process; more do not read faster."""

Beat = Callable[[str], None]
"""Tells the watchdog what was reached."""


def no_beat(what: str) -> None:
    """For callers without a watchdog."""


class Choice(NamedTuple):
    """What a run resumes from.

    Attributes:
        folder: the checkpoint, None for a start from step 0.
        unreadable: checkpoints that were preferred and could not be read. They may be valid: nothing may move them.
    """

    folder: Path | None
    unreadable: tuple[Path, ...] = ()


def first_intact(folders: Sequence[Path], beat: Beat = no_beat) -> Choice:
    """The first of `folders` whose files all are as they were written and that can be resumed; warns of those that are
    not, and of files in it that are not its own. Every rank must call it with the same folders.

    Raises:
        CheckpointError: none of them can be resumed; a run that exists is never silently started again from step 0.
            UnreadableError where one of them could not be read.
    """
    failures: dict[Path, CheckpointError] = {}
    for folder in folders:
        try:
            verify_together(folder, beat, resumable=True)
        except CheckpointError as failure:
            failures[folder] = failure
        else:
            unreadable = (path for path, failure in failures.items() if isinstance(failure, UnreadableError))
            return Choice(folder, tuple(unreadable))
        if dist.is_main() and folder is not folders[-1]:
            logger.warning("%s; falling back to the checkpoint before it", failures[folder])
    if not failures:
        return Choice(None)
    curable = [failure for failure in failures.values() if isinstance(failure, UnreadableError)]
    raise curable[0] if curable else failures[folders[-1]]


def verify_together(
    folder: Path, beat: Beat = no_beat, resumable: bool = False, threads: int | None = None
) -> tuple[int, float]:
    """Compare every file of a checkpoint with its manifest, the work divided among the ranks; with `resumable`, see that
    a run can be resumed from it too. Every rank must call it, with `threads` of its own (by default one for each of its
    cores). Returns bytes and seconds.

    Raises:
        UnreadableError: a rank cannot read a file; it may be as it was written.
        CheckpointError: as `native.verify`.
    """

    def listed() -> list[tuple[str, int, str]]:
        manifest = native.verify(folder, contents=False, links=not resumable)
        if resumable:
            native.refuse_weights_only(folder)
        for name in native.unlisted(folder):
            logger.warning("%s: is not listed in %s, and not read", folder / name, native.MANIFEST)
        digests = native.expected_digests(folder, manifest)
        return [(str(path), path.stat().st_size, digest) for path, digest in digests.items()]

    def listed_or_refused() -> list[tuple[str, int, str]]:
        try:
            return listed()
        except OSError as error:
            raise UnreadableError.of(folder, error) from error

    beat(f"verifying {folder}")
    everything = [(Path(path), size, digest) for path, size, digest in from_main(listed_or_refused)]
    shares = divide([size for _, size, _ in everything], dist.world_size())
    own = {everything[number][0]: everything[number][2] for number in shares[dist.rank()]}
    total, begun = sum(size for _, size, _ in everything), time.monotonic()
    failures = _compare(folder, own, total, beat, threads or min(MOST_THREADS, threads_per_process(os.environ)))
    if failures:
        raise next((each for each in failures if isinstance(each, UnreadableError)), failures[0])
    return total, time.monotonic() - begun


def divide(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of files of these sizes, in falling order, that each rank gets: about as many bytes each."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for number, size in enumerate(sizes):
        taken, rank = heapq.heappop(loads)
        shares[rank].append(number)
        heapq.heappush(loads, (taken + size, rank))
    return shares


def _compare(folder: Path, own: Mapping[Path, str], total: int, beat: Beat, threads: int) -> list[CheckpointError]:
    """Compare this rank's files until all ranks are done or one has failed; the failures of all ranks."""
    begun = reported = time.monotonic()
    before = 0.0
    with Comparison(own, threads) as comparison:
        while True:
            over = comparison.wait(AGREE_SECONDS)
            failed = comparison.failure is not None
            read, running, failing = dist.sum_over_ranks([comparison.bytes_read, not over, failed])
            now = time.monotonic()
            if read > before:  # a rank whose reads hang must not look busy
                before = read
                beat(f"verifying {folder}: {_rate(read, total, now - begun)}")
            if failing or not running:
                break
            if now - reported >= REPORT_SECONDS:
                reported = now
                logger.info("verifying %s: %s", folder, _rate(read, total, now - begun))
        failure = comparison.failure
    if not failing:
        logger.info(
            "verified %s: %s with %d process(es) of %d thread(s)",
            folder,
            _rate(read, total, now - begun),
            dist.world_size(),
            threads,
        )
        return []
    return [decode_failure(text) for text in dist.gather_texts(encode_failure(_located(failure))) if text]


def _rate(read: float, total: int, seconds: float) -> str:
    return f"{read / 1e9:.3f} of {total / 1e9:.3f} GB in {seconds:.1f} s, {read / 1e9 / max(seconds, 1e-9):.2f} GB/s"


def _located(failure: CheckpointError | None) -> CheckpointError | None:
    """The same, with the rank and host that could not read, where that may differ from rank to rank."""
    if not isinstance(failure, UnreadableError) or dist.world_size() == 1:
        return failure
    return UnreadableError(f"{failure} (on rank {dist.rank()}, {socket.gethostname()})")
