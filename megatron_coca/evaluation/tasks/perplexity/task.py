"""`megatron-coca evaluate perplexity`: options and result files."""

from argparse import ArgumentParser
from operator import attrgetter
from typing import Literal, NamedTuple, Self

from pydantic import model_validator

from megatron_coca.evaluation.declaration import Task, TaskSection
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.options import (
    add_batch_option,
    add_document_options,
    add_subject_options,
    length,
    length_list,
    positive_int,
)
from megatron_coca.evaluation.results import DocumentsRecord, Entry, Record, Result, Share


class DocumentScore(NamedTuple):
    """Sum of the nll of a document's scored tokens in nats, and the number of correct predictions."""

    nll: float
    correct: int


class WindowResult(Entry):
    """Scores with one window size, over all documents, or over the first ones if the measurement was interrupted."""

    window: int  # tokens of one input
    perplexity: float  # exp(nll); infinite if it overflows
    nll: float  # nats, mean over the scored tokens
    nll_stderr: float | None  # standard error of the mean over documents; None for a single document
    accuracy: Share  # share of the scored tokens that the model predicted as likeliest
    tokens_scored: int
    documents: int
    nll_by_document: list[float]  # nats, sum over each document's scored tokens
    correct_by_document: list[int]  # number of scored tokens of each document that the model predicted as likeliest

    @property
    def key(self) -> tuple[int]:
        return (self.window,)

    def scores(self) -> list[DocumentScore]:
        return [DocumentScore(*score) for score in zip(self.nll_by_document, self.correct_by_document, strict=True)]

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        if not self.documents == len(self.nll_by_document) == len(self.correct_by_document):
            raise ValueError(f"window {self.window}: must have one sum for each of its {self.documents} documents")
        return self


class PerplexityProtocol(Record):
    text: str
    stride: int
    tokens_per_batch: int
    vocabulary: int | None = None  # the softmax is over the ids below this number; None: over the padded vocabulary


class PerplexityResult(Result):
    task: Literal["perplexity"] = "perplexity"
    protocol: PerplexityProtocol
    documents: DocumentsRecord
    results: list[WindowResult]


def add_perplexity_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add_document_options(parser)
    add = parser.add_argument
    text = "window sizes in tokens, or as multiples of the training length; default: %(default)s"
    add("--windows", default="1L,2L,4L", type=length_list, metavar="W,W,...", help=text)
    stride = "number of tokens that each window scores, or a multiple of the training length; default: %(default)s"
    add("--stride", default="1L", type=length, metavar="S", help=stride)
    text = "restrict the softmax to token ids below N, such as the text tokens of a model that also learned facts"
    add("--vocabulary", type=positive_int, metavar="N", help=text)
    ring = "number of processes, each on its own GPU, that share the tokens of every window; default: %(default)s"
    add("--context-parallel-size", type=positive_int, default=1, metavar="N", help=ring)
    add_batch_option(parser, 8192)


WINDOW, LOSSES = attrgetter("window"), attrgetter("nll_by_document")
PERPLEXITY = Task(
    "perplexity",
    "sliding-window perplexity of a checkpoint",
    add_perplexity_options,
    "--checkpoint runs/350M_roformer_coca --windows 512,1024,2048 --stride 512 --output results",
    "perplexity.measure.run",
    PerplexityResult,
    numbers=(
        Number(
            "perplexity",
            attrgetter("perplexity"),
            best="lowest",
            logarithm=attrgetter("nll"),
            sums=LOSSES,
            length=WINDOW,
            published="perplexity",
        ),
        Number(
            "loss",
            attrgetter("nll"),
            unit="nats per token",
            best="lowest",
            digits=4,
            sums=LOSSES,
            length=WINDOW,
            published="loss",
        ),
        Number(
            "next-token accuracy",
            attrgetter("accuracy"),
            share=True,
            sums=attrgetter("correct_by_document"),
            length=WINDOW,
            published="next-token accuracy",
        ),
    ),
    comparable={
        "documents (sha256)": "documents.sha256",
        "stride": "protocol.stride",
        "vocabulary": "protocol.vocabulary",
        "protocol": "protocol.text",
    },
    at="window {}",
    by_document=True,
    sections=(
        TaskSection(
            "perplexity",
            "Perplexity beyond the training length",
            "perplexity.section.perplexity_blocks",
            place=40,
            sentence=60,
        ),
    ),
    place=10,
)
