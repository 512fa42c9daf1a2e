"""The order of training data: which sample is which, what a batch holds, and how one rank reads it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.shards import Shard

ROUNDS = 8
_MASK64 = (1 << 64) - 1


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from integers and words, the same on every machine and Python."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def _mix(values: np.ndarray, key: int) -> np.ndarray:
    """Scatter uint64 values: multiply and fold, with the constants of Steele, Lea and Flood's SplitMix64 (2014)."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _feistel(values: np.ndarray, bits: int, key: int) -> np.ndarray:
    """Permute ``[0, 2**bits)``. The halves need not be equally wide: each round changes one of them in place."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for number in range(ROUNDS):
        round_key = (key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK64
        if number % 2:
            low = low ^ (_mix(high, round_key) & low_mask)
        else:
            high = high ^ (_mix(low, round_key) & high_mask)
    return (high << low_bits) | low


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """Images of ``indices`` under the permutation of ``range(n)`` that ``key`` selects.

    Args:
        indices: integers in ``[0, n)``, of any shape.
        n: size of the range, 1 to 2**62.
        key: 64-bit key.

    Returns:
        int64, of the shape of ``indices``.
    """
    given = np.asarray(indices)
    if not 1 <= n <= 1 << 62 or (given.size and (given.min() < 0 or given.max() >= n)):
        raise ValueError(f"indices must lie in [0, {n}), and that range must have 1 to 2**62 elements")
    bits = max(2, (n - 1).bit_length())
    images = _feistel(given.astype(np.uint64).ravel(), bits, key)
    outside = np.flatnonzero(images >= n)
    while outside.size:
        images[outside] = _feistel(images[outside], bits, key)
        outside = outside[images[outside] >= n]
    return images.astype(np.int64).reshape(given.shape)


PATTERN_SLOTS = 65536  # fixed: were it chosen by the length of a run, a longer run would see another order


@dataclass(frozen=True)
class SourceShare:
    """What the first samples of a blend take from one source.

    Attributes:
        source: prefix of the shard.
        weight: share of the samples that was asked for; the weights of a blend sum to 1.
        samples: samples taken.
        fraction: share of the samples that was achieved.
        tokens: tokens read as inputs, ``samples * seq_length``.
        epochs: passes over the source's samples.
    """

    source: str
    weight: float
    samples: int
    fraction: float
    tokens: int
    epochs: float


@dataclass(frozen=True)
class Places:
    """Where some samples of a batch lie in one source.

    Attributes:
        source: number of the source.
        rows: which samples of the batch, int64 [n].
        starts: the first token of each in its shard, int64 [n].
    """

    source: int
    rows: np.ndarray
    starts: np.ndarray


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

    def places(self, indices: np.ndarray | Sequence[int]) -> list[Places]:
        """Where samples lie, by global number; one entry for each source that has any of them."""
        sources, running = self.locate(np.asarray(indices, dtype=np.int64))
        rows = [(int(number), np.flatnonzero(sources == number)) for number in np.unique(sources)]
        return [Places(number, chosen, self._sources[number].starts(running[chosen])) for number, chosen in rows]

    def tokens(self, places: Sequence[Places]) -> np.ndarray:
        """The samples at ``places``: int64 [samples, seq_length + 1]."""
        samples = np.empty((sum(len(part.rows) for part in places), self.seq_length + 1), dtype=np.int64)
        for part in places:
            samples[part.rows] = self.shards[part.source].windows(part.starts, self.seq_length + 1)
        return samples

    def document_begins(self, places: Sequence[Places]) -> np.ndarray:
        """Which inputs of the samples at ``places`` are the first of a document: bool [samples, seq_length]."""
        begins = np.empty((sum(len(part.rows) for part in places), self.seq_length), dtype=bool)
        for part in places:
            begins[part.rows] = self.shards[part.source].document_begins(part.starts, self.seq_length)
        return begins

    def batch(self, indices: np.ndarray | Sequence[int]) -> np.ndarray:
        """Samples by global number: int64 [len(indices), seq_length + 1]."""
        return self.tokens(self.places(indices))

    def sample(self, index: int) -> np.ndarray:
        """One sample: int64 [seq_length + 1]."""
        return self.batch([index])[0]

    def mixture(self, n_samples: int) -> list[SourceShare]:
        """What the first ``n_samples`` samples take from each source."""
        blocks, rest = divmod(n_samples, PATTERN_SLOTS)
        counts = blocks * self._quotas + np.bincount(self._slot_source[:rest], minlength=len(self._quotas))
        return [
            SourceShare(
                source=str(source.shard.prefix),
                weight=weight / math.fsum(self.weights),
                samples=count,
                fraction=count / max(1, n_samples),
                tokens=count * self.seq_length,
                epochs=count / source.samples,
            )
            for source, weight, count in zip(self._sources, self.weights, counts.tolist(), strict=True)
        ]
