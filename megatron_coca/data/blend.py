"""The order of training data, as a pure function of (seed, sample number).

A *sample* is ``seq_length + 1`` consecutive tokens of a source's concatenated documents. Epoch ``e`` of a source begins
at an offset drawn from (seed, source, e), so that epochs cut the text at different places, and visits its samples in
the order of a keyed permutation. Sources are mixed by a fixed pattern of slots. No array grows with the corpus or with
the run, and sample ``g`` does not depend on what was read before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.permutation import derive_key, permute
from megatron_coca.data.shards import Shard

PATTERN_SLOTS = 65536  # fixed: were it chosen by the length of a run, a longer run would see another order


@dataclass(frozen=True)
class SourceShare:
    """What the first samples of a blend take from one source: their number, their fraction, and the passes over it."""

    source: str
    samples: int
    fraction: float
    epochs: float


def _quotas(weights: Sequence[float], slots: int) -> np.ndarray:
    """Whole numbers in proportion to ``weights`` that sum to ``slots``, by largest remainder: int64 [sources]."""
    exact = np.asarray(weights, dtype=np.float64) / math.fsum(weights) * slots
    quotas = np.floor(exact).astype(np.int64)
    short = slots - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:short]] += 1
    return quotas


class _Source:
    """One shard, cut into samples."""

    def __init__(self, shard: Shard, number: int, seq_length: int, seed: int) -> None:
        if shard.len_tokens < seq_length + 1:
            raise DataError(
                f"{shard.prefix}: {shard.len_tokens} tokens do not fill a sample of seq_length + 1 = {seq_length + 1}. "
                "Take a larger corpus or a smaller seq_length."
            )
        self.shard, self._seq_length = shard, seq_length
        self._identity = (seed, number)
        # The same number in every epoch, whatever its offset, so that an epoch is found by one division.
        self.samples = max(1, (shard.len_tokens - seq_length) // seq_length)
        self._offsets = min(seq_length, shard.len_tokens - self.samples * seq_length)

    def starts(self, running: np.ndarray) -> np.ndarray:
        """First token of each sample by its running number in this source: int64 [n] to int64 [n]."""
        epochs, within = np.divmod(running, self.samples)
        starts = np.empty_like(running)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            offset = derive_key("offset", *self._identity, int(epoch)) % self._offsets
            order = permute(within[chosen], self.samples, derive_key("order", *self._identity, int(epoch)))
            starts[chosen] = offset + order * self._seq_length
        return starts


class Blend:
    """Several shards mixed by weight, in an order that depends on nothing but the arguments.

    Args:
        shards: the sources.
        weights: positive, one per shard; normalised to sum 1.
        seq_length: tokens that a model reads at once; a sample has one more, its last target.
        seed: selects the order.

    Raises:
        DataError: a shard too short for one sample; weights that are not positive, not as many as the shards, or too
            small to get one slot in ``PATTERN_SLOTS``.
    """

    def __init__(self, shards: Sequence[Shard], weights: Sequence[float], seq_length: int, seed: int) -> None:
        if not shards or len(shards) != len(weights):
            raise DataError(f"A blend needs one weight per shard: {len(shards)} shards, {len(weights)} weights.")
        if not all(math.isfinite(w) and w > 0 for w in weights):
            raise DataError(f"Blend weights must be positive numbers, not {list(weights)}.")
        if seq_length < 1:
            raise DataError(f"seq_length must be at least 1, not {seq_length}.")
        self.seq_length, self.seed = seq_length, seed
        self.shards, self.weights = tuple(shards), tuple(float(weight) for weight in weights)
        self._sources = [_Source(shard, number, seq_length, seed) for number, shard in enumerate(shards)]
        self._quotas = _quotas(weights, PATTERN_SLOTS)
        if not self._quotas.all():
            small = shards[int(np.argmin(self._quotas))].prefix
            raise DataError(f"{small}: its weight is under one part in {PATTERN_SLOTS} of the blend. Raise or drop it.")
        self._slot_source, self._slot_number = self._pattern()

    def _pattern(self) -> tuple[np.ndarray, np.ndarray]:
        """Per slot its source, and its number among that source's slots; each source's slots lie evenly spread."""
        source = np.repeat(np.arange(len(self._quotas)), self._quotas)
        number = np.concatenate([np.arange(quota) for quota in self._quotas])
        order = np.lexsort((source, (number + 0.5) / self._quotas[source]))
        return source[order], number[order]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and running number within it of each global sample number: int64 [n] to two of int64 [n]."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and indices.min() < 0:
            raise DataError(f"Sample numbers begin at 0, not {indices.min()}.")
        blocks, slots = np.divmod(indices, PATTERN_SLOTS)
        source = self._slot_source[slots]
        return source, blocks * self._quotas[source] + self._slot_number[slots]

    def batch(self, indices: np.ndarray | Sequence[int]) -> np.ndarray:
        """Samples by global number: int64 [len(indices), seq_length + 1]."""
        sources, running = self.locate(np.asarray(indices, dtype=np.int64))
        rows = np.empty((len(sources), self.seq_length + 1), dtype=np.int64)
        for number in np.unique(sources):
            chosen = np.flatnonzero(sources == number)
            source = self._sources[number]
            for row, start in zip(chosen, source.starts(running[chosen]), strict=True):
                rows[row] = source.shard.tokens(int(start), self.seq_length + 1)
        return rows

    def sample(self, index: int) -> np.ndarray:
        """One sample: int64 [seq_length + 1]."""
        return self.batch([index])[0]

    def mixture(self, n_samples: int) -> list[SourceShare]:
        """What the first ``n_samples`` samples take from each source."""
        blocks, rest = divmod(n_samples, PATTERN_SLOTS)
        counts = blocks * self._quotas + np.bincount(self._slot_source[:rest], minlength=len(self._quotas))
        return [
            SourceShare(
                str(source.shard.prefix), int(count), int(count) / max(1, n_samples), int(count) / source.samples
            )
            for source, count in zip(self._sources, counts, strict=True)
        ]
