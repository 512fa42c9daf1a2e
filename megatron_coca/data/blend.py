"""The order of the training data. Every sample follows from the seed and its number, so no state has to be saved."""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.permutation import derive_key, permute
from megatron_coca.data.shards import MASKED, Shard

ANSWER_BLOCK = 1 << 22
"""Number of labels that `_has_answer` reads at a time."""
# Number of slots in the pattern that assigns samples to sources. It is a constant. If it depended on the length of the
# run, a longer run would read the samples in a different order.
PATTERN_SLOTS = 65536


@dataclass(frozen=True)
class SourceShare:
    """The share of one source in the first samples of a `Blend`.

    Attributes:
        source: name of the shard (its prefix or URL).
        weight: requested share of the samples; the weights of all sources sum to 1.
        samples: number of samples taken from this source.
        fraction: actual share of the samples.
        tokens: number of input tokens, `samples * seq_length`.
        epochs: number of passes over the samples of this source.
    """

    source: str
    weight: float
    samples: int
    fraction: float
    tokens: int
    epochs: float


@dataclass(frozen=True)
class SourceSamples:
    """The samples in a batch that come from one source.

    Attributes:
        source: number of the source.
        rows: the rows of the batch that contain these samples, int64 [n].
        starts: offset in the shard of each sample's first token, int64 [n]. For samples of whole documents, it is the
            number of the sample in the shard instead.
    """

    source: int
    rows: np.ndarray
    starts: np.ndarray


class UncheckedBatch(NamedTuple):
    """Samples as read from the shards. Their token ids are not checked yet.

    Attributes:
        tokens: int64 [n, seq_length + 1].
        begins: mask of the inputs that start a document, bool [n, seq_length], or None.
        loss_mask: mask of the inputs with a target that counts in the loss, bool [n, seq_length], or None.
    """

    tokens: np.ndarray
    begins: np.ndarray | None = None
    loss_mask: np.ndarray | None = None


class _SampledShard:
    """One shard, cut into samples."""

    def __init__(self, shard: Shard, number: int, seq_length: int, seed: int) -> None:
        if shard.len_tokens < seq_length + 1:
            raise DataError(
                f"{shard.prefix}: only {shard.len_tokens} tokens, fewer than one sample of seq_length + 1 = "
                f"{seq_length + 1}; leave the shard out, merge it with another shard, or set a smaller seq_length"
            )
        self.shard, self._seq_length, self._stride = shard, seq_length, seq_length
        self._identity = (seed, number)
        # Every epoch begins at a random offset but has the same number of samples, so one division finds a sample's
        # epoch.
        self.samples = max(1, (shard.len_tokens - seq_length) // seq_length)
        self._offsets = min(seq_length, shard.len_tokens - self.samples * seq_length)

    def starts(self, running: np.ndarray) -> np.ndarray:
        """Return the offset of each sample's first token, int64 [n]. `running`, int64 [n], has the numbers of the
        samples in this source, counted over all epochs.
        """
        epochs, within = np.divmod(running, self.samples)
        starts = np.empty_like(running)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            offset = derive_key("offset", *self._identity, int(epoch)) % self._offsets
            order = permute(within[chosen], self.samples, derive_key("order", *self._identity, int(epoch)))
            starts[chosen] = offset + order * self._stride
        return starts

    def tokens(self, starts: np.ndarray) -> np.ndarray:
        """Read the samples that begin at `starts`, int64 [n]. Returns [n, seq_length + 1]."""
        return self.shard.windows(starts, self._seq_length + 1)

    def begins(self, starts: np.ndarray) -> np.ndarray:
        """Return a mask of the inputs that start a document, bool [n, seq_length]."""
        return self.shard.document_begins(starts, self._seq_length)

    def loss_mask(self, starts: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        """Return a mask of the inputs with a target that counts in the loss, bool [n, seq_length], or None if all
        targets count. `tokens` is the result of `tokens(starts)`.
        """
        labels = self.shard.labels
        return None if labels is None else self._answers(labels.windows(starts, self._seq_length + 1), tokens)

    def _answers(self, labels: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        kept = labels >= 0
        if (labels != tokens)[kept].any():
            assert self.shard.labels is not None
            raise DataError(
                f"{self.shard.labels.prefix}: a label is neither negative nor equal to the token at the same "
                f"position in {self.shard.prefix}; prepare both shards together"
            )
        return kept[:, 1:]


class _WholeDocuments(_SampledShard):
    """One shard, cut into samples of whole documents, which are in a fixed random order. Each sample has one document
    or, with `together`, as many documents as fit. With `allow_chopped`, documents that are too long are cut at the end;
    otherwise they are left out. Documents without a target that counts in the loss are left out.
    """

    def __init__(
        self, shard: Shard, number: int, seq_length: int, seed: int, together: bool, allow_chopped: bool
    ) -> None:
        self.shard, self._seq_length, self._stride, self._offsets = shard, seq_length, 1, 1
        self._identity = (seed, number)
        lengths = shard.document_lengths(0, shard.documents)
        usable = lengths > 1 if allow_chopped else (lengths > 1) & (lengths <= seq_length + 1)
        if shard.labels is not None:
            usable &= _has_answer(shard.labels, lengths, seq_length + 1)
        chosen = np.flatnonzero(usable)
        if not chosen.size:
            raise DataError(
                f"{shard.prefix}: no document fits into seq_length {seq_length} and has an unmasked token to "
                "predict; set pack_impl=packed, allow_chopped=true or a larger seq_length"
            )
        self._documents = chosen[permute(np.arange(chosen.size), chosen.size, derive_key("pack", *self._identity))]
        ends = np.concatenate(([0], np.cumsum(np.minimum(lengths[self._documents], seq_length + 1))))
        edges = [0]
        while edges[-1] < chosen.size:
            fitting = np.searchsorted(ends, ends[edges[-1]] + seq_length + 1, side="right") - 1
            edges.append(int(fitting) if together else edges[-1] + 1)
        self._edges, self.samples = np.array(edges), len(edges) - 1

    def _parts(self, starts: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        """Yield (row, first column, end column, document) for each document in the samples `starts`."""
        for row, sample in enumerate(starts.tolist()):
            column = 0
            for document in self._documents[self._edges[sample] : self._edges[sample + 1]].tolist():
                length = int(self.shard.document_lengths(document, document + 1)[0])
                end = min(column + length, self._seq_length + 1)
                yield row, column, end, document
                column = end

    def _filled(self, shard: Shard, starts: np.ndarray, padding: int) -> np.ndarray:
        rows = np.full((len(starts), self._seq_length + 1), padding, dtype=np.int64)
        for row, column, end, document in self._parts(starts):
            rows[row, column:end] = shard.document(document)[: end - column]
        return rows

    def tokens(self, starts: np.ndarray) -> np.ndarray:
        """Read the samples with the numbers `starts`. Zeros fill the rest of a sample, as in GPT-NeoX."""
        return self._filled(self.shard, starts, 0)

    def begins(self, starts: np.ndarray) -> np.ndarray:
        """Return the mask that the base class describes. The padding counts as a separate document."""
        begins = np.zeros((len(starts), self._seq_length + 2), dtype=bool)
        for row, column, end, _ in self._parts(starts):
            begins[row, [column, end]] = True
        return begins[:, : self._seq_length]

    def loss_mask(self, starts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the mask that the base class describes. The padding does not count in the loss."""
        if self.shard.labels is not None:
            return self._answers(self._filled(self.shard.labels, starts, MASKED), tokens)
        kept = np.zeros((len(starts), self._seq_length), dtype=bool)
        for row, column, end, _ in self._parts(starts):
            kept[row, max(0, column - 1) : end - 1] = True
        return kept


def _has_answer(labels: Shard, lengths: np.ndarray, longest: int) -> np.ndarray:
    """Return a mask of the documents with an answer, bool [documents]. An answer is a non-negative label of any of the
    first `longest` tokens of a document, except the first token.
    """
    ends = np.cumsum(lengths)
    # For each block of labels, the number of the document in which it begins.
    blocks = np.searchsorted(ends, np.arange(0, labels.len_tokens, ANSWER_BLOCK))
    found = np.zeros(len(lengths), dtype=bool)
    for first, last in pairwise([*np.unique(blocks).tolist(), len(lengths)]):
        begin = int(ends[first] - lengths[first])
        kept = labels.tokens(begin, int(ends[last - 1]) - begin) >= 0
        counts = np.concatenate(([0], np.cumsum(kept)))
        start = ends[first:last] - lengths[first:last] - begin
        length = lengths[first:last]
        found[first:last] = counts[start + np.minimum(length, longest)] > counts[start + np.minimum(length, 1)]
    return found


class Blend:
    """A mixture of shards by weight. The order of the samples depends only on the arguments.

    Args:
        shards: the shards to mix; each is one source.
        weights: one positive weight per shard; they are normalised to sum to 1.
        seq_length: number of input tokens of a sample; the sample has one more token, the last target.
        seed: determines the order.
        pack_impl: GPT-NeoX's key. `packed` cuts the concatenated documents into samples, `pack_until_overflow` fills
            each sample with whole documents, and `unpacked` puts one document into each sample.
        allow_chopped: GPT-NeoX's key, which is not used with `packed`. Documents that are longer than a sample are cut
            if this is true, else they are left out.

    Raises `DataError` if a shard is too short for one sample, if a weight is not positive, or if the number of weights
    differs from the number of shards.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        weights: Sequence[float],
        seq_length: int,
        seed: int,
        pack_impl: str = "packed",
        allow_chopped: bool = True,
    ) -> None:
        if not shards or len(shards) != len(weights):
            raise DataError(f"weights: {len(weights)} weights for {len(shards)} shards; give one weight for each shard")
        if not all(math.isfinite(w) and w > 0 for w in weights):
            raise DataError(f"weights: must be positive numbers, not {list(weights)}")
        if seq_length < 1:
            raise DataError(f"seq_length: must be at least 1, not {seq_length}")
        self.seq_length, self.seed = seq_length, seed
        self.first, self._read = 0, np.zeros(len(shards), dtype=np.int64)
        self.shards: tuple[Shard, ...] = tuple(shards)
        self.weights = tuple(float(weight) for weight in weights)
        self._labelled = any(shard.labels is not None for shard in shards)
        self.pack_impl, self.allow_chopped = pack_impl, allow_chopped
        together = pack_impl == "pack_until_overflow"
        self._sources = [
            _SampledShard(shard, number, seq_length, seed)
            if pack_impl == "packed"
            else _WholeDocuments(shard, number, seq_length, seed, together, allow_chopped)
            for number, shard in enumerate(shards)
        ]
        # The number of slots of each source, int64 [sources]. The slots are divided in proportion to the weights with
        # the largest remainder method.
        exact = np.asarray(weights, dtype=np.float64) / math.fsum(weights) * PATTERN_SLOTS
        self._quotas = np.floor(exact).astype(np.int64)
        missing = PATTERN_SLOTS - int(self._quotas.sum())
        self._quotas[np.argsort(self._quotas - exact, kind="stable")[:missing]] += 1
        # For each slot, its source and its number among the slots of that source. The slots of a source are evenly
        # spread.
        source = np.repeat(np.arange(len(self._quotas)), self._quotas)
        number = np.concatenate([np.arange(quota) for quota in self._quotas])
        order = np.lexsort((source, (number + 0.5) / self._quotas[source]))
        self._slot_source, self._slot_number = source[order], number[order]
        self._rare = self._share_slots(exact)

    def _share_slots(self, exact: np.ndarray) -> list[tuple[int, int, float]]:
        """Assign a share of a slot to each source that is too rare to have its own slot.

        Returns a list of (source, slot, mean number of samples per block).

        A block is `PATTERN_SLOTS` consecutive samples. In some blocks, one slot of the largest source provides a sample
        of the rare source instead. `exact`, float64 [sources], is each source's number of slots per block before
        rounding.
        """
        rare, largest = np.flatnonzero(self._quotas == 0), int(np.argmax(self._quotas))
        lent = np.flatnonzero(self._slot_source == largest)
        if len(rare) > len(lent):
            raise DataError(
                f"{self.shards[int(rare[0])].prefix}: is one of {len(rare)} shards with a weight below "
                f"1/{PATTERN_SLOTS} of the sum, which are too many to mix; merge the shards of a source, or raise "
                "their weights"
            )
        slots = lent[np.arange(len(rare)) * len(lent) // max(1, len(rare))]
        return list(zip(rare.tolist(), slots.tolist(), exact[rare].tolist(), strict=True))

    def after(self, first: int, tokens: Mapping[str, int]) -> "Blend":
        """Return the same blend with sample numbers that start at `first`. Each source continues after the tokens that
        were already read from it. `tokens` maps the name of each shard to the number of tokens that were read.
        """
        later = copy(self)
        read = [-(-tokens.get(shard.name, 0) // self.seq_length) for shard in self.shards]
        later.first, later._read = first, np.asarray(read, dtype=np.int64)
        return later

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map global sample numbers, int64 [n], to (source numbers, running sample numbers within the source), each
        int64 [n].
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and indices.min() < self.first:
            raise DataError(f"sample {indices.min()}: does not exist; sample numbers start at {self.first}")
        blocks, slots = np.divmod(indices - self.first, PATTERN_SLOTS)
        source, number = self._slot_source[slots], self._slot_number[slots]
        running = self._read[source] + blocks * self._quotas[source] + number
        for rare, slot, share in self._rare:
            before = np.floor(blocks * share).astype(np.int64)
            taken = (slots == slot) & (np.floor((blocks + 1) * share) > before)
            running = np.where(taken, self._read[rare] + before, running)
            source = np.where(taken, rare, source)
        return source, running

    def by_source(self, indices: np.ndarray | Sequence[int]) -> list[SourceSamples]:
        """Locate samples by global number. Returns one entry for each source that provides any of the samples."""
        sources, running = self.locate(np.asarray(indices, dtype=np.int64))
        rows = [(int(number), np.flatnonzero(sources == number)) for number in np.unique(sources)]
        return [SourceSamples(number, chosen, self._sources[number].starts(running[chosen])) for number, chosen in rows]

    def tokens(self, located: Sequence[SourceSamples]) -> np.ndarray:
        """Read the samples in `located`. Returns int64 [samples, seq_length + 1]."""
        tokens = np.empty((sum(len(samples.rows) for samples in located), self.seq_length + 1), dtype=np.int64)
        for samples in located:
            tokens[samples.rows] = self._sources[samples.source].tokens(samples.starts)
        return tokens

    def document_begins(self, located: Sequence[SourceSamples]) -> np.ndarray:
        """Return a mask of the inputs in `located` that start a document, bool [samples, seq_length]."""
        begins = np.empty((sum(len(samples.rows) for samples in located), self.seq_length), dtype=bool)
        for samples in located:
            begins[samples.rows] = self._sources[samples.source].begins(samples.starts)
        return begins

    def loss_mask(self, located: Sequence[SourceSamples], tokens: np.ndarray) -> np.ndarray | None:
        """Return a mask of the inputs with a target that counts in the loss, bool [samples, seq_length], or None if all
        targets count. `tokens` is the result of `tokens(located)`.
        """
        found = [self._sources[samples.source].loss_mask(samples.starts, tokens[samples.rows]) for samples in located]
        if all(rows is None for rows in found):
            return None
        mask = np.ones((len(tokens), self.seq_length), dtype=bool)
        for samples, rows in zip(located, found, strict=True):
            mask[samples.rows] = True if rows is None else rows
        return mask

    def read(self, indices: np.ndarray, boundaries: bool = False) -> UncheckedBatch:
        """Read samples by global number. With `boundaries`, the result also has the mask of the inputs that start a
        document.
        """
        located = self.by_source(indices)
        tokens = self.tokens(located)
        begins = self.document_begins(located) if boundaries else None
        mask = self.loss_mask(located, tokens)
        if mask is None and self._labelled:  # other batches may have a mask, so this batch needs one too
            mask = np.ones((len(tokens), self.seq_length), dtype=bool)
        return UncheckedBatch(tokens, begins, mask)

    def origin(self, index: int) -> str:
        """Return the name of the shard that provides a sample."""
        return self.shards[self.by_source([index])[0].source].name

    def batch(self, indices: np.ndarray | Sequence[int]) -> np.ndarray:
        """Read samples by global number. Returns int64 [len(indices), seq_length + 1]."""
        return self.tokens(self.by_source(indices))

    def sample(self, index: int) -> np.ndarray:
        """Read one sample by global number. Returns int64 [seq_length + 1]."""
        return self.batch([index])[0]

    @property
    def epoch_samples(self) -> list[int]:
        """Number of samples in one pass over each source."""
        return [source.samples for source in self._sources]

    def mixture(self, n_samples: int) -> list[SourceShare]:
        """Return the share of each source in the `n_samples` samples that start at `first`."""
        blocks, rest = divmod(n_samples, PATTERN_SLOTS)
        counts = blocks * self._quotas + np.bincount(self._slot_source[:rest], minlength=len(self._quotas))
        for rare, slot, share in self._rare:
            counts[rare] = math.floor((blocks + (slot < rest)) * share)
            counts[self._slot_source[slot]] -= counts[rare]
        return [
            SourceShare(
                source=source.shard.name,
                weight=weight / math.fsum(self.weights),
                samples=count,
                fraction=count / max(1, n_samples),
                tokens=count * self.seq_length,
                epochs=count / source.samples,
            )
            for source, weight, count in zip(self._sources, self.weights, counts.tolist(), strict=True)
        ]


class Samples(Protocol):
    """The interface that `Blend` and `SyntheticSamples` share: training samples in a fixed order. Sample numbers start
    at `first`.
    """

    seq_length: int
    seed: int
    first: int

    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def weights(self) -> Sequence[float]: ...
    def read(self, indices: np.ndarray, boundaries: bool = False) -> UncheckedBatch: ...
    def origin(self, index: int) -> str: ...
    def after(self, first: int, tokens: Mapping[str, int]) -> "Samples": ...
    def mixture(self, n_samples: int) -> list[SourceShare]: ...
