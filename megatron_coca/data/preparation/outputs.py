"""The shards that grow during a preparation, one for each source, part and split that has a document."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.journal import ShardState
from megatron_coca.data.preparation.plan import shard_name
from megatron_coca.data.preparation.work import Prepared
from megatron_coca.data.shards.layout import SUFFIXES
from megatron_coca.data.shards.writer import LENGTHS_SUFFIX, ShardWriter, Written

_Key = tuple[int, str, str]


class Outputs:
    """Writers by (number of the source, part, split), opened with their first document.

    Args:
        folder: where the shards grow.
        names: of the sources.
        vocab_size: of the tokenizer.
        shards: what is there already; the files are cut to it, and other shards in the folder removed.
    """

    def __init__(self, folder: Path, names: Sequence[str], vocab_size: int, shards: Sequence[ShardState]) -> None:
        self._folder, self._names, self._vocab_size = folder, names, vocab_size
        self._writers: dict[_Key, ShardWriter] = {}
        self._bytes: dict[_Key, int] = {}
        for shard in shards:
            written = Written(shard.documents, shard.tokens)
            self._open((shard.source, shard.part, shard.split), written, shard.bytes)
        known = {self.name(shard) for shard in shards}
        for path in [path for suffix in (*SUFFIXES, LENGTHS_SUFFIX) for path in folder.glob(f"*{suffix}")]:
            if path.stem not in known:
                path.unlink()  # begun after what was saved

    def write(self, source: int, prepared: Prepared, kept: np.ndarray) -> None:
        """Append the ``kept`` (bool [documents]) documents of a chunk."""
        for number, (part, split) in enumerate(prepared.targets):
            chosen = kept & (prepared.target == number)
            if not chosen.any():
                continue
            key = (source, part, split)
            if key not in self._writers:
                self._open(key, Written(), 0)
            tokens = prepared.tokens if chosen.all() else prepared.tokens[np.repeat(chosen, prepared.lengths)]
            self._writers[key].extend(tokens, prepared.lengths[chosen])
            self._bytes[key] += int(prepared.bytes[chosen].sum())

    def sync(self) -> None:
        """Flush everything; what ``states`` tells then can be gone back to."""
        for writer in self._writers.values():
            writer.sync()

    @property
    def tokens(self) -> int:
        """In all shards."""
        return sum(writer.tokens for writer in self._writers.values())

    def states(self) -> tuple[ShardState, ...]:
        """What the shards hold, flushed or not."""
        return tuple(
            ShardState(*key, writer.documents, writer.tokens, self._bytes[key]) for key, writer in self._writers.items()
        )

    def finish(self) -> list[ShardState]:
        """Write the indices and close; the shards in the order of the sources, then by part."""
        for writer in self._writers.values():
            writer.finish()
        return sorted(self.states(), key=lambda state: (state.source, state.part))

    def close(self) -> None:
        """Close all files as they are."""
        for writer in self._writers.values():
            writer.close()

    def name(self, state: ShardState) -> str:
        """Name of a shard's files."""
        return shard_name(self._names[state.source], state.part, state.split)

    def _told(self, key: _Key) -> str:
        return f"{self._names[key[0]]}, set {key[1]!r}," if key[1] else self._names[key[0]]

    def _open(self, key: _Key, written: Written, size: int) -> None:
        name = self.name(ShardState(*key))
        taken = [other for other in self._writers if self.name(ShardState(*other)) == name]
        if taken:
            raise DataError(
                f"{self._told(taken[0])} and {self._told(key)} would both be written to {name}. "
                "Leave a set out with `sets`, or rename a source."
            )
        self._writers[key] = ShardWriter(self._folder / name, self._vocab_size, written)
        self._bytes[key] = size
