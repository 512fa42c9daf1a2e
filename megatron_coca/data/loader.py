"""Batches for one rank, read ahead by threads. The only state is what can be computed again from the step."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.order import Blend, Places


@dataclass(frozen=True)
class Batch:
    """Samples with what the model must know about them; None stands for what a model does by itself.

    Attributes:
        tokens: int64 [samples, seq_length + 1], inputs and, one place on, targets.
        documents: int32 [samples, seq_length]: inputs of a sample with one number are one document, and see no other;
            None where attention crosses documents.
        positions: int64 [samples, seq_length]; None for 0, 1, ... through the sample or, with ``documents``, through
            each document.
        loss_mask: bool [samples, seq_length], whether the loss is taken at an input; None for all of them.
    """

    tokens: np.ndarray
    documents: np.ndarray | None = None
    positions: np.ndarray | None = None
    loss_mask: np.ndarray | None = None

    def split(self, size: int) -> Iterator["Batch"]:
        """Batches of ``size`` samples each, on the same memory."""
        for begin in range(0, len(self.tokens), size):
            rows = slice(begin, begin + size)
            rest = (self.documents, self.positions, self.loss_mask)
            yield Batch(self.tokens[rows], *(None if array is None else array[rows] for array in rest))


@dataclass(frozen=True)
class Packing:
    """What the ends of documents within a sample change; the names are Megatron's.

    Attributes:
        reset_attention_mask: attention does not cross from one document into another.
        reset_position_ids: positions begin at 0 in every document.
        masked_token: the id at which, as an input, no loss is taken (Megatron's and GPT-NeoX's ``eod_mask_loss``: the
            first token of a document is not predicted from the end of another); None takes it everywhere.
    """

    reset_attention_mask: bool = False
    reset_position_ids: bool = False
    masked_token: int | None = None

    @property
    def needs_documents(self) -> bool:
        """Whether a batch depends on where documents begin."""
        return self.reset_attention_mask or self.reset_position_ids

    def batch(self, tokens: np.ndarray, begins: np.ndarray | None) -> Batch:
        """The batch of samples [samples, seq_length + 1] whose documents begin at ``begins``, bool [samples,
        seq_length]; None will do where ``needs_documents`` is false.
        """
        mask = None if self.masked_token is None else tokens[:, :-1] != self.masked_token
        if begins is None or not self.needs_documents:
            return Batch(tokens, loss_mask=mask)
        documents = np.cumsum(begins, axis=1, dtype=np.int32) if self.reset_attention_mask else None
        return Batch(tokens, documents, self._positions(begins), mask)

    def _positions(self, begins: np.ndarray) -> np.ndarray | None:
        """Positions where they are not those that a model gives by itself."""
        if self.reset_attention_mask and self.reset_position_ids:
            return None
        through = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
        if not self.reset_position_ids:
            return through.copy()
        return through - np.maximum.accumulate(np.where(begins, through, 0), axis=1)


class Loader:
    """Cuts the global batch of each step into this rank's micro-batches.

    Sample ``i`` of accumulation step ``a`` on rank ``r`` is number ``step * global_batch + (a * world_size + r) *
    micro_batch + i`` of the blend: all ranks together read the same samples whatever their number.

    Args:
        blend: the order of the data.
        global_batch: samples per step, over all ranks and accumulation steps.
        micro_batch: samples per rank and accumulation step.
        rank: of this process among the data-parallel ones.
        world_size: number of data-parallel processes.
        vocab_size: ids outside it are refused when they are read; None checks nothing.
        packing: what the ends of documents within a sample change; by default nothing.
        num_workers: threads, each of which reads one step ahead; with 0 a step is read when it is asked for. What is
            read does not depend on it.

    Raises:
        DataError: the global batch is not a multiple of ``micro_batch * world_size``, or the rank does not exist.
    """

    def __init__(
        self,
        blend: Blend,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        vocab_size: int | None = None,
        packing: Packing | None = None,
        num_workers: int = 1,
    ) -> None:
        if min(global_batch, micro_batch, world_size) < 1 or global_batch % (micro_batch * world_size):
            raise DataError(
                f"A global batch of {global_batch} does not divide into micro-batches of {micro_batch} x "
                f"{world_size} ranks."
            )
        if not 0 <= rank < world_size:
            raise DataError(f"Rank {rank} does not exist among {world_size}.")
        self._blend, self._global_batch, self._micro_batch = blend, global_batch, micro_batch
        self._rank, self._world_size, self._vocab_size = rank, world_size, vocab_size
        self._packing, self._num_workers = packing or Packing(), num_workers
        self._readers = ThreadPoolExecutor(max_workers=max(1, num_workers), thread_name_prefix="loader")
        self._ahead: dict[int, Future[list[Batch]]] = {}

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def indices(self, step: int) -> np.ndarray:
        """Global sample numbers of this rank at ``step``: int64 [accumulation, micro_batch]."""
        if step < 0:
            raise DataError(f"Steps begin at 0, not {step}.")
        samples = np.arange(self._global_batch, dtype=np.int64) + step * self._global_batch
        return samples.reshape(-1, self._world_size, self._micro_batch)[:, self._rank]

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro-batches of ``step``, in the order of accumulation; begins to read those of the next steps.

        An error of a reading thread is raised here, at the step it belongs to.
        """
        wanted = range(step, step + self._num_workers + 1)
        for passed in self._ahead.keys() - set(wanted):
            self._ahead.pop(passed).cancel()
        ready = self._submitted(step).result()
        del self._ahead[step]
        for ahead in wanted[1:]:
            self._submitted(ahead)
        return ready

    def close(self) -> None:
        """Stop reading ahead; waits for a read in progress."""
        self._ahead.clear()
        self._readers.shutdown(wait=True, cancel_futures=True)

    def _submitted(self, step: int) -> "Future[list[Batch]]":
        if step not in self._ahead:
            self._ahead[step] = self._readers.submit(self._read, step)
        return self._ahead[step]

    def _read(self, step: int) -> list[Batch]:
        places = self._blend.places(self.indices(step).ravel())
        tokens = self._blend.tokens(places)
        # As unsigned numbers, so that one comparison finds negative ids as well.
        if self._vocab_size is not None and tokens.view(np.uint64).max() >= self._vocab_size:
            raise self._outside(places, tokens)
        begins = self._blend.document_begins(places) if self._packing.needs_documents else None
        return list(self._packing.batch(tokens, begins).split(self._micro_batch))

    def _outside(self, places: list[Places], tokens: np.ndarray) -> DataError:
        wrong = (tokens < 0) | (tokens >= self._vocab_size)
        part = next(part for part in places if wrong[part.rows].any())
        token = tokens[part.rows][wrong[part.rows]][0]
        return DataError(
            f"{self._blend.shards[part.source].prefix}: token id {token} lies outside the model's vocabulary of "
            f"vocab_size={self._vocab_size}. Take shards made with the model's tokenizer, or a larger vocab_size."
        )
