"""The loader reads the samples of every step and cuts them into the micro-batches of one rank."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megatron_coca.data.blend import Samples
from megatron_coca.data.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Samples with their documents, positions and loss mask. For an attribute that is None, the model uses its default.

    Attributes:
        tokens: int64 [samples, seq_length + 1]. All tokens but the last are inputs; all but the first are targets.
        documents: number of each input's document, int32 [samples, seq_length]. Inputs attend only to inputs with the
            same number. None if attention crosses document boundaries.
        positions: position of each input, int64 [samples, seq_length]. None if positions count from 0 in the sample or,
            with `documents`, in each document.
        loss_mask: mask of the inputs with a target that counts in the loss, bool [samples, seq_length]. None if all
            targets count. Either all batches of a data set have a mask, or none of them has.
    """

    tokens: np.ndarray
    documents: np.ndarray | None = None
    positions: np.ndarray | None = None
    loss_mask: np.ndarray | None = None

    def split(self, size: int) -> Iterator["Batch"]:
        """Yield batches of `size` samples, which are views of this batch's memory."""
        for begin in range(0, len(self.tokens), size):
            rows = slice(begin, begin + size)
            rest = (self.documents, self.positions, self.loss_mask)
            yield Batch(self.tokens[rows], *(None if array is None else array[rows] for array in rest))


@dataclass(frozen=True)
class Packing:
    """How document boundaries within a sample are treated. The first two attributes have Megatron's names.

    Attributes:
        reset_attention_mask: whether attention stops at the boundaries of documents.
        reset_position_ids: whether positions start at 0 in every document.
        masked_token: token id of the document separator. The target after this input does not count in the loss, so the
            first token of a document is not predicted from the end of the previous document. Megatron and GPT-NeoX call
            this rule `eod_mask_loss`. None if all targets count.
    """

    reset_attention_mask: bool = False
    reset_position_ids: bool = False
    masked_token: int | None = None

    @property
    def needs_documents(self) -> bool:
        """True if a batch depends on the document boundaries."""
        return self.reset_attention_mask or self.reset_position_ids

    def batch(self, tokens: np.ndarray, begins: np.ndarray | None, mask: np.ndarray | None = None) -> Batch:
        """Make a batch from tokens [samples, seq_length + 1]. `begins`, bool [samples, seq_length], marks the inputs
        that start a document; it may be None if `needs_documents` is False. `mask` is the loss mask of the data, if
        there is one.
        """
        if self.masked_token is not None:
            kept = tokens[:, :-1] != self.masked_token
            mask = kept if mask is None else kept & mask
        if begins is None or not self.needs_documents:
            return Batch(tokens, loss_mask=mask)
        documents = np.cumsum(begins, axis=1, dtype=np.int32) if self.reset_attention_mask else None
        positions = None
        # If attention and positions are both reset, the model's default positions are correct.
        if not (self.reset_attention_mask and self.reset_position_ids):
            positions = np.broadcast_to(np.arange(begins.shape[1]), begins.shape).copy()
            if self.reset_position_ids:
                positions -= np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        return Batch(tokens, documents, positions, mask)


class PositionDraw(Protocol):
    """The interface of `DrawnPositions`, which draws the positions of samples."""

    def draw(self, numbers: np.ndarray, length: int, begins: np.ndarray | None = None, step: int = 0) -> np.ndarray:
        """Draw positions, int64 [n, length], for samples of `step`. `numbers`, int64 [n], are the samples' global
        numbers. With `begins`, the positions of each document are drawn separately.
        """


class Loader:
    """A context manager that reads the global batch of each step and cuts it into the micro-batches of this rank.

    With the default `start`, sample `i` of accumulation step `a` on rank `r` has the number `step * global_batch + (a *
    world_size + r) * micro_batch + i` in the blend. The samples of a step therefore do not depend on the number of
    ranks.

    Args:
        blend: a `Blend`, or the samples of a synthetic task.
        global_batch: samples per step, over all ranks and accumulation steps.
        micro_batch: samples per rank and accumulation step.
        rank: rank of this process among the data-parallel processes.
        world_size: number of data-parallel processes.
        vocab_size: vocabulary size of the model. Reading a token id outside the vocabulary raises an error; None
            disables this check.
        packing: how document boundaries are treated; by default they are ignored.
        num_workers: number of threads, which is also the number of steps that are read ahead. With 0, a step is read
            when it is requested.
        length: number of inputs that are kept, from the end of each sample; None keeps all inputs.
        positions: object that draws the positions of the inputs; None leaves the positions to `packing`.
        start: (first step, number of its first sample). Earlier steps may have had other batch sizes.

    Raises `DataError` if the global batch is not a multiple of `micro_batch * world_size`, or if the rank is not below
    `world_size`.
    """

    def __init__(
        self,
        blend: Samples,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        vocab_size: int | None = None,
        packing: Packing | None = None,
        num_workers: int = 1,
        length: int | None = None,
        positions: PositionDraw | None = None,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        if min(global_batch, micro_batch, world_size) < 1 or global_batch % (micro_batch * world_size):
            raise DataError(
                f"train_batch_size: {global_batch} is not a multiple of {micro_batch} samples x {world_size} ranks; "
                "set it to a multiple"
            )
        if not 0 <= rank < world_size:
            raise DataError(f"rank: must be at least 0 and below the number of ranks, {world_size}, not {rank}")
        self._start = start
        self._blend, self._global_batch, self._micro_batch = blend, global_batch, micro_batch
        self._rank, self._world_size, self._vocab_size = rank, world_size, vocab_size
        self._packing, self._num_workers, self._positions = packing or Packing(), num_workers, positions
        self._first = blend.seq_length - (length or blend.seq_length)
        self._threads = ThreadPoolExecutor(max_workers=max(1, num_workers), thread_name_prefix="loader")
        self._ahead: dict[int, Future[list[Batch]]] = {}

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def indices(self, step: int) -> np.ndarray:
        """Return the global sample numbers of this rank at `step`, int64 [accumulation, micro_batch]."""
        first, sample = self._start
        if step < first:
            raise DataError(f"step {step}: must be at least {first}, the first step")
        samples = np.arange(self._global_batch, dtype=np.int64) + sample + (step - first) * self._global_batch
        return samples.reshape(-1, self._world_size, self._micro_batch)[:, self._rank]

    def micro_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of `step` in the order of accumulation, and start to read the following steps.

        If a thread fails to read a step, the error is raised here when that step is requested.
        """
        wanted = range(step, step + self._num_workers + 1)
        for passed in self._ahead.keys() - set(wanted):
            self._ahead.pop(passed).cancel()
        ready = self._submit(step).result()
        del self._ahead[step]
        for ahead in wanted[1:]:
            self._submit(ahead)
        return ready

    def close(self) -> None:
        """Stop reading ahead. Waits for a read in progress."""
        self._ahead.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _submit(self, step: int) -> "Future[list[Batch]]":
        if step not in self._ahead:
            self._ahead[step] = self._threads.submit(self._read, step)
        return self._ahead[step]

    def _read(self, step: int) -> list[Batch]:
        numbers, first = self.indices(step).ravel(), self._first
        tokens, begins, mask = self._blend.read(numbers, self._packing.needs_documents)
        # As unsigned numbers, negative ids are large. One comparison therefore finds all ids outside the vocabulary.
        if self._vocab_size is not None and tokens.view(np.uint64).max() >= self._vocab_size:
            raise self._outside(numbers, tokens, self._vocab_size)
        tokens, begins = tokens[:, first:], None if begins is None else begins[:, first:]
        batch = self._packing.batch(tokens, begins, None if mask is None else mask[:, first:])
        if self._positions is not None:
            restarts = begins if self._packing.reset_position_ids else None
            batch = replace(batch, positions=self._positions.draw(numbers, tokens.shape[1] - 1, restarts, step))
        return list(batch.split(self._micro_batch))

    def _outside(self, numbers: np.ndarray, tokens: np.ndarray, vocab_size: int) -> DataError:
        wrong = (tokens < 0) | (tokens >= vocab_size)
        row = int(np.flatnonzero(wrong.any(axis=1))[0])
        return DataError(
            f"{self._blend.origin(int(numbers[row]))}: token id {tokens[row][wrong[row]][0]} is outside the model's "
            f"vocabulary, vocab_size={vocab_size}; use shards prepared with the model's tokenizer and without this "
            "token, or a model with a row for it"
        )
