"""Find the documents that repeat the text of an earlier document. The result is exact. The required memory does not
depend on the size of the corpus.

First, each *group* of blocks is sorted: the digests and positions of its documents are written as sorted runs, and each
digest occurs only once in a run. Then the digests are divided into *ranges*. In each range, the digests of all runs are
compared. If documents have the same digest, only the document with the first position is kept. Groups do not depend on
other groups, and ranges do not depend on other ranges, so any process on any host can process them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_coca.data.preparation.block_files import read_digests
from megatron_coca.data.preparation.shard_plan import ShardPlan

SORTED, DROPPED = "sorted", "dropped"
"""The two kinds of results. A `SORTED` result contains the runs of a group and, for each run, the positions of the
documents that were dropped from it. A `DROPPED` result contains the positions of the documents that were dropped from a
range.
"""
GROUP = 16
"""Number of blocks in a group."""
RUN = 1 << 22
"""Approximate number of documents in a run, and average number of documents in a range. Sorting takes about 80 bytes of
memory for each document.
"""
_ROWS = 3
"""Number of rows of a run. A run is an array [3, documents] of unsigned 64-bit integers. The first two rows contain the
halves of the digests, and the third row contains the positions.

A position is `block << 33 | document << 1 | keep`. `document` is the number of the document within its block. `keep` is
1 if its source keeps duplicates.
"""
_INDEX = (1 << 32) - 1


def count_groups(plan: ShardPlan) -> int:
    """Return the number of groups; 0 if no source removes duplicates."""
    return 0 if plan.last_compared < 0 else -(-len(plan.blocks) // GROUP)


def sort_group(plan: ShardPlan, number: int, folder: Path, advance: Callable[[float], None]) -> None:
    """Write the runs of a group of blocks into `folder`."""
    kept = np.array([source.duplicates == "keep" for source in plan.sources], dtype=np.uint64)
    waiting, runs = list[np.ndarray](), 0
    for block in range(number * GROUP, min((number + 1) * GROUP, len(plan.blocks))):
        path, first = plan.blocks[block]
        documents = read_digests(path)
        sources = plan.owners[first + documents["unit"]]
        positions = np.uint64(block << 33) | np.arange(len(documents), dtype=np.uint64) << np.uint64(1)
        rows = np.stack([documents["high"], documents["low"], positions | kept[sources]])
        waiting.append(rows[:, sources <= plan.last_compared])
        if sum(rows.shape[1] for rows in waiting) >= RUN:
            runs = _write_run(folder, runs, waiting)
    _write_run(folder, runs, waiting)
    advance(1)


def _write_run(folder: Path, number: int, waiting: list[np.ndarray]) -> int:
    """Write run `number` with all documents in `waiting`, and empty this list. Return the number of the next run."""
    rows = np.concatenate([np.empty((_ROWS, 0), dtype=np.uint64), *waiting], axis=1)
    waiting.clear()
    if not rows.shape[1]:
        return number
    rows, again = _sorted(rows)
    rows[:, ~again].astype("<u8", copy=False).tofile(folder / f"{number:06d}.run")
    _write_positions(folder / f"{number:06d}.dropped", rows[2, again])
    return number + 1


def _sorted(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents sorted by digest, and a mask that is True for documents with the digest of an earlier
    document.

    Documents with equal digests stay in the order of their positions.
    """
    rows = rows[:, np.lexsort((rows[1], rows[0]))]
    again = np.zeros(rows.shape[1], dtype=bool)
    again[1:] = (rows[:2, 1:] == rows[:2, :-1]).all(axis=0)
    return rows, again


def _write_positions(path: Path, positions: np.ndarray) -> None:
    """Write sorted positions, but leave out the documents of sources that keep their duplicates."""
    np.sort(positions[positions & np.uint64(1) == 0]).astype("<u8", copy=False).tofile(path)


def _runs(plan: ShardPlan) -> Iterator[Path]:
    """Yield the paths of all runs, in the order of their blocks."""
    for group in range(count_groups(plan)):
        yield from sorted(plan.result(SORTED, group).glob("*.run"))


def count_ranges(plan: ShardPlan) -> int:
    """Return the number of ranges of digests. All groups must be sorted."""
    documents = sum(run.stat().st_size for run in _runs(plan)) // (8 * _ROWS)
    return -(-documents // RUN)


def compare_range(plan: ShardPlan, number: int, folder: Path, advance: Callable[[float], None]) -> None:
    """Find the documents that are dropped from a range of digests, and write their sorted positions into `folder`."""
    count = count_ranges(plan)
    limits = np.array([(number << 64) // count, (number + 1 << 64) // count - 1], dtype=np.uint64)
    found = []
    for run in _runs(plan):
        rows = np.memmap(run, dtype="<u8", mode="r").reshape(_ROWS, -1)
        begin, end = np.searchsorted(rows[0], limits[0], "left"), np.searchsorted(rows[0], limits[1], "right")
        found.append(np.array(rows[:, begin:end]))
    rows, again = _sorted(np.concatenate(found, axis=1))
    _write_positions(folder / "positions.dropped", rows[2, again])
    advance(1)


class Dropped:
    """Looks up the documents that are dropped from a block. The results of all ranges must be complete. Look-ups are
    fast if blocks are requested in order, because only the positions of one group are kept in memory.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._ranges = [plan.result(DROPPED, n) / "positions.dropped" for n in range(count_ranges(plan))]
        self._groups = [plan.result(SORTED, n) for n in range(count_groups(plan))]
        self._blocks, self._positions = range(0), np.empty(0, dtype=np.uint64)

    def of(self, block: int) -> np.ndarray:
        """Return the numbers of the documents that are dropped from a block, in order."""
        if self._groups and block not in self._blocks:
            group = block // GROUP
            self._blocks = range(group * GROUP, (group + 1) * GROUP)
            self._positions = np.sort(self._within(group))
        begin, end = np.searchsorted(self._positions, _limits(range(block, block + 1)))
        return (self._positions[begin:end] >> np.uint64(1) & np.uint64(_INDEX)).astype(np.int64)

    def _within(self, group: int) -> np.ndarray:
        """Return the positions of the documents that are dropped from a group of blocks."""
        found, within = [np.empty(0, dtype=np.uint64)], sorted(self._groups[group].glob("*.dropped"))
        for path in (*self._ranges, *within):
            if path.stat().st_size:  # an empty file cannot be mapped
                positions = np.memmap(path, dtype="<u8", mode="r")
                begin, end = np.searchsorted(positions, _limits(self._blocks))
                found.append(np.array(positions[begin:end]))
        return np.concatenate(found)


def _limits(blocks: range) -> np.ndarray:
    """Return the first position of the blocks, and the first position after them."""
    return np.array([blocks.start << 33, blocks.stop << 33], dtype=np.uint64)
