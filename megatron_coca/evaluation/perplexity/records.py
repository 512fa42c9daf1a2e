"""The result file of `evaluate.py perplexity`."""

from typing import Literal, Self

from pydantic import model_validator

from megatron_coca.evaluation.documents import DocumentsRecord
from megatron_coca.evaluation.results import Cell, Record, Result


class WindowResult(Cell):
    """One window size over all documents, or over the first of them where the measurement was interrupted."""

    window: int  # tokens the model reads at a time
    perplexity: float  # exp(nll); infinite where it overflows
    nll: float  # nats, mean over the scored tokens
    nll_stderr: float | None  # standard error over documents of the mean; None for one document
    accuracy: float  # share of the scored tokens that were the likeliest
    tokens_scored: int
    documents: int
    nll_by_document: list[float]  # nats, sum over the scored tokens of each
    correct_by_document: list[int]  # tokens that were the likeliest

    @property
    def key(self) -> tuple[int]:
        return (self.window,)

    @model_validator(mode="after")
    def _of_as_many_documents(self) -> Self:
        if not self.documents == len(self.nll_by_document) == len(self.correct_by_document):
            raise ValueError(f"window {self.window} does not have a sum for each of its {self.documents} documents")
        return self


class PerplexityProtocol(Record):
    """How was measured."""

    text: str
    stride: int
    tokens_per_batch: int


class PerplexityResult(Result):
    """Perplexity by window size."""

    task: Literal["perplexity"] = "perplexity"
    protocol: PerplexityProtocol
    documents: DocumentsRecord
    results: list[WindowResult]
