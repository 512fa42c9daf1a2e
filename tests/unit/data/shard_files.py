"""Shards of known tokens."""

from pathlib import Path

import numpy as np

from megatron_coca.data import Shard
from megatron_coca.data.shards import ShardWriter


def make_shard(prefix: Path, lengths: list[int], first: int = 0, vocab_size: int = 60000) -> Shard:
    """Documents of consecutive numbers, so that every token says where it stands."""
    writer = ShardWriter(prefix, vocab_size)
    for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        writer.add(np.arange(begin, begin + length) + first)
    writer.finish()
    return Shard(prefix)
