"""`megatron-coca evaluate longppl`: options and result files."""

from argparse import ArgumentParser
from operator import attrgetter
from typing import Literal

from megatron_coca.evaluation.declaration import Task, TaskSection
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.options import (
    add_batch_option,
    add_document_options,
    add_subject_options,
    length_list,
    token_count,
)
from megatron_coca.evaluation.results import DocumentsRecord, Entry, Record, Result
from megatron_coca.support.arguments import expanded


class LongPerplexity(Entry):
    """The numbers measured on all documents at one length."""

    length: int  # tokens of each document
    longppl: float  # exp(nll); infinite if it overflows
    nll: float  # nats, mean over the key tokens
    perplexity: float  # exp(nll_all)
    nll_all: float  # nats, mean over all tokens but the first of each document
    key_tokens: int
    tokens_scored: int
    keys_sha256: str  # hash of the places of the key tokens; equal for models with the same key tokens
    nll_by_document: list[float]  # nats, sum over each document's key tokens

    @property
    def key(self) -> tuple[int]:
        return (self.length,)


class Evaluator(Record):
    """The model that finds the key tokens."""

    path: str
    identity: str
    network: str
    tokenizer: str | None  # fingerprint


class LongPerplexityProtocol(Record):
    text: str
    short: int
    stride: int
    alpha: float
    beta: float
    tokens_per_batch: int
    evaluator: Evaluator | None  # None: each variant finds its own key tokens


class LongPerplexityResult(Result):
    task: Literal["longppl"] = "longppl"
    protocol: LongPerplexityProtocol
    documents: DocumentsRecord
    results: list[LongPerplexity]


def add_longppl_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add_document_options(parser)
    add = parser.add_argument
    add("--lengths", required=True, type=length_list, metavar="N,N,...", help="lengths of the documents, such as 2L,4L")
    evaluator = "checkpoint or Hugging Face folder that finds the key tokens; default: each variant finds its own"
    add("--evaluator", type=expanded, metavar="DIR", help=evaluator)
    add(
        "--short", type=token_count, default=4096, metavar="K", help="tokens of the short context; default: %(default)s"
    )
    stride = "number of tokens that share the beginning of a short context; default: %(default)s"
    add("--stride", type=token_count, default=1024, metavar="S", help=stride)
    alpha = "smallest log-likelihood that a key token gains from the long context, in nats; default: %(default)g"
    add("--alpha", type=float, default=2.0, metavar="NATS", help=alpha)
    beta = "smallest log-likelihood of a key token given the long context, in nats; default: %(default)g"
    add("--beta", type=float, default=-2.0, metavar="NATS", help=beta)
    add_batch_option(parser, 8192)


LONGPPL = Task(
    "longppl",
    "perplexity of the tokens that need a long context, by length",
    add_longppl_options,
    "--checkpoint runs/350M_roformer_coca --lengths 8192,16384 --evaluator models/llama-3.1-8b "
    "--data books --output results",
    "longppl.measure.run",
    LongPerplexityResult,
    numbers=(
        Number("LongPPL", attrgetter("longppl"), best="lowest", logarithm=attrgetter("nll")),
        Number("perplexity", attrgetter("perplexity"), best="lowest", logarithm=attrgetter("nll_all")),
        Number("share of key tokens", lambda entry: entry.key_tokens / entry.tokens_scored, best="neither"),
    ),
    comparable={
        "documents (sha256)": "documents.sha256",
        "short context": "protocol.short",
        "stride": "protocol.stride",
        "alpha": "protocol.alpha",
        "beta": "protocol.beta",
        "evaluator": "protocol.evaluator",
        "protocol": "protocol.text",
    },
    divided_by="lengths",
    sections=(
        TaskSection(
            "longppl",
            "Perplexity of the tokens that need a long context",
            "longppl.section.longppl_blocks",
            place=50,
            sentence=70,
        ),
    ),
    place=20,
)
