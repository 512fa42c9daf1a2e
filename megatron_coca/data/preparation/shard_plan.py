"""The plan of the shards: which blocks are written to which shards. The work is divided into tasks, and any process on
any host can do any task.

The plan is computed from the sizes of the inputs on disk, so it does not depend on the number of processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from megatron_coca.data.preparation.preparation_plan import CorpusSource

TASK_BYTES = 8 << 30
"""Small sources share a task until their total size on disk reaches this number of bytes. If the size of a shard
(`shard_gib`) is smaller, that size is the limit.
"""


@dataclass(frozen=True)
class SourcePiece:
    """The part of a source that one task writes: the documents of the source in consecutive blocks.

    The documents of each set and split in a piece become one shard. `number` is the number of the piece in the source,
    or None if the source has only one piece.
    """

    source: int
    number: int | None
    blocks: range
    bytes: int


@dataclass(frozen=True)
class ShardPlan:
    """All that a process needs to write shards from blocks.

    Attributes:
        folder: the folder for the results of the tasks. Its name is a digest of the names of the blocks and of the size
            of a shard.
        sources: the sources of the preparation.
        vocab_size: vocabulary size of the tokenizer.
        owners: number of the source of each unit, int64 [units].
        blocks: for each block, its file and the number of its first unit.
        tasks: the pieces of each task, in order.
    """

    folder: Path
    sources: Sequence[CorpusSource]
    vocab_size: int
    owners: np.ndarray
    blocks: Sequence[tuple[Path, int]]
    tasks: Sequence[Sequence[SourcePiece]]

    @property
    def last_compared(self) -> int:
        """The number of the last source from which duplicates are removed, or -1. Texts of later sources are not
        compared.
        """
        return max((n for n, source in enumerate(self.sources) if source.duplicates != "keep"), default=-1)

    def result(self, kind: str, number: int) -> Path:
        """Return the folder of the result with this kind and number. The folder appears when the result is complete."""
        return self.folder / f"{kind}-{number:06d}"


def divide(contents: Iterable[tuple[int, int, int]], shard_bytes: int | None) -> list[list[SourcePiece]]:
    """Divide a corpus into tasks. `contents` yields (source, block, bytes on disk) in order.

    A source of at least two times `shard_bytes` is divided into pieces of about this size. Small sources share a task,
    and a task has at most one piece of each source.
    """
    tasks, size, least = list[list[SourcePiece]](), 0, min(shard_bytes or TASK_BYTES, TASK_BYTES)
    for source, rows in groupby(contents, key=itemgetter(0)):
        for piece in _pieces(source, [row[1:] for row in rows], shard_bytes):
            if not tasks or size >= least or tasks[-1][-1].source == source:
                tasks.append([])
                size = 0
            tasks[-1].append(piece)
            size += piece.bytes
    return tasks


def _pieces(source: int, blocks: Sequence[tuple[int, int]], shard_bytes: int | None) -> list[SourcePiece]:
    """Divide a source into pieces of about the same size. `blocks` contains (block, bytes on disk) in order."""
    ends = np.cumsum([size for _, size in blocks])
    total = int(ends[-1])
    count = max(1, total // shard_bytes) if shard_bytes else 1
    cuts = np.searchsorted(ends, [total * number / count for number in range(1, count)], side="left") + 1
    borders = np.unique([0, *cuts[cuts < len(blocks)], len(blocks)]).tolist()
    numbers = [None] if len(borders) == 2 else range(len(borders) - 1)
    first = blocks[0][0]
    return [
        SourcePiece(source, number, range(first + begin, first + end), sum(size for _, size in blocks[begin:end]))
        for number, (begin, end) in zip(numbers, pairwise(borders), strict=True)
    ]
