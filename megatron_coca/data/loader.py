"""Batches for one rank, read ahead by one step. The only state is what can be computed again from the step."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch

from megatron_coca.data.blend import Blend
from megatron_coca.data.errors import DataError


class Loader:
    """Cuts the global batch of each step into this rank's micro-batches.

    Sample ``i`` of accumulation step ``a`` on rank ``r`` is number ``step * global_batch + (a * world_size + r) *
    micro_batch + i`` of the blend: all ranks together read the same samples whatever their number.

    Args:
        blend: the order of the data.
        global_batch: samples per step, over all ranks and accumulation steps.
        micro_batch: samples per rank and accumulation step.
        vocab_size: ids at or above it are refused when they are read; None checks nothing.
        rank: of this process among the data-parallel ones.
        world_size: number of data-parallel processes.

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
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: tuple[int, Future[list[torch.Tensor]]] | None = None

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

    def micro_batches(self, step: int) -> list[torch.Tensor]:
        """The micro-batches of ``step``, each int64 [micro_batch, seq_length + 1]; begins to read those of the next.

        An error of the reading thread is raised here, at the step it belongs to.
        """
        pending, self._ahead = self._ahead, None
        ready = pending[1] if pending and pending[0] == step else self._reader.submit(self._read, step)
        batches = ready.result()
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return batches

    def close(self) -> None:
        """Stop reading ahead; waits for a read in progress."""
        self._ahead = None
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> list[torch.Tensor]:
        numbers = self.indices(step)
        rows = self._blend.batch(numbers.ravel()).reshape(*numbers.shape, -1)
        if self._vocab_size is not None and rows.max() >= self._vocab_size:
            places = ", ".join(str(shard.prefix) for shard in self._blend.shards)
            raise DataError(
                f"{places}: token id {rows.max()} lies outside the model's vocabulary of {self._vocab_size}. "
                "Take shards made with the model's tokenizer, or a larger vocab_size."
            )
        return [torch.from_numpy(micro) for micro in rows]
