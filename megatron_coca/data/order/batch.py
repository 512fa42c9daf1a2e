"""One micro-batch as the training step takes it, and what documents mean within its samples."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


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
