"""Training sets for GPT-NeoX's trainer and for ours, from which both read the same samples in the same order.

Each trainer shuffles in its own way, so each gets its own file. Its layout makes the shuffled samples have the common
order. All samples begin with the same token, which is also the last label of the sample before, so files can be cut and
joined between samples.
"""

from pathlib import Path

import numpy as np

from megatron_coca.data import Shard
from megatron_coca.data.blend import Blend
from megatron_coca.data.shards import ShardWriter

FIRST = 3


def samples(tokens: np.ndarray, length: int, count: int) -> np.ndarray:
    """Samples [count, length] of a text, the first token of each replaced by FIRST."""
    found = tokens[: count * length].reshape(count, length).copy()
    found[:, 0] = FIRST
    return found


def write(prefix: Path, ordered: np.ndarray, vocabulary: int, before: int = 0, after: int = 1) -> None:
    """A shard with one document: `before` tokens, these samples one after the other, `after` tokens FIRST."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(prefix, vocabulary)
    writer.add(np.concatenate([np.full(before, FIRST), ordered.flatten(), np.full(after, FIRST)]).tolist())
    writer.finish()


def write_for_us(prefix: Path, wanted: np.ndarray, vocabulary: int, seed: int) -> None:
    """Write a shard from which our trainer, with this seed, reads `wanted` [count, length] in order."""
    count, length = wanted.shape
    write(prefix, wanted, vocabulary, after=length)  # of the final size; nobody reads its content
    blend = Blend([Shard(prefix)], [1.0], length, seed)
    (places,) = blend.by_source(np.arange(count))
    offset = int(places.starts.min())
    order = (places.starts - offset) // length
    assert sorted(order) == list(range(count)), "one epoch is read, all of it"
    stored = np.empty_like(wanted)
    stored[order] = wanted
    write(prefix, stored, vocabulary, before=offset, after=length - offset)
    assert (Blend([Shard(prefix)], [1.0], length, seed).batch(np.arange(count))[:, :-1] == wanted).all()
