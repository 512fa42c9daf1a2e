"""`megatron-coca evaluate margin`: options and result files."""

import math
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Literal

from megatron_coca.evaluation.chat_settings import ChatRecord
from megatron_coca.evaluation.declaration import Task, TaskSection
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.options import (
    add_chat_options,
    add_start_option,
    add_subject_options,
    length,
    length_list,
    positive_int,
    token_count,
)
from megatron_coca.evaluation.results import DocumentsRecord, Entry, Record, Result
from megatron_coca.evaluation.statistics import exponential
from megatron_coca.evaluation.tasks.retrieval.task import Tally, tally
from megatron_coca.support.arguments import expanded


class CaseMargin(Record):
    """The outcome of one prompt."""

    task: str  # passkey or needle
    number: int  # index among the cases of the same length
    tokens: int  # length of the prompt
    depth: float
    margin: float  # nats
    found: bool  # whether each token of the number is the likeliest after the tokens before it


class MarginEntry(Entry):
    """The facts and losses that are measured so far at one length. All other numbers are computed from them."""

    length: int  # tokens of an input
    documents: int  # number of documents to score; `nlls` is shorter until all are scored
    scored: int  # scored tokens of each document
    cases: list[CaseMargin] = []  # sorted by number; some numbers are missing until all facts are measured
    nlls: list[float] = []  # nats, sum over the scored tokens of each document

    @property
    def key(self) -> tuple[int]:
        return (self.length,)

    @property
    def facts(self) -> list[CaseMargin]:
        """The cases before the first one that is not measured, so that models are compared by the same facts."""
        return [case for _, case in takewhile(lambda pair: pair[0] == pair[1].number, enumerate(self.cases))]

    @property
    def margins(self) -> list[float]:
        """The margins of `facts` in nats."""
        return [case.margin for case in self.facts]

    @property
    def margin(self) -> float | None:
        return mean(self.margins) if self.margins else None

    @property
    def found(self) -> Tally | None:
        """The tally of `facts`. A fact has score 1 if greedy decoding finds it."""
        return tally([float(case.found) for case in self.facts])

    @property
    def nll(self) -> float | None:
        """The loss in nats per token, or None if some documents are not scored."""
        return mean(self.nlls) / self.scored if 0 < self.documents <= len(self.nlls) else None

    @property
    def perplexity(self) -> float | None:
        return None if self.nll is None else exponential(self.nll)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def facts_at(length: int) -> str:
    """Return the name that costs and missing entries have for the facts of a length."""
    return f"length {length}"


def windows_at(length: int) -> str:
    """Return the name that costs and missing entries have for the windows of a length."""
    return f"length {length}, windows"


class MarginProtocol(Record):
    text: str
    scored: int  # scored tokens of each document
    seed: int  # seed of the hidden facts
    start: int | None = None  # token id with which windows and plain prompts begin
    chat: ChatRecord | None = None  # None: prompts are plain text


class MarginResult(Result):
    task: Literal["margin"] = "margin"
    protocol: MarginProtocol
    documents: DocumentsRecord
    results: list[MarginEntry]


def add_margin_options(parser: ArgumentParser) -> None:
    add_subject_options(parser)
    add = parser.add_argument
    text = "lengths of prompts and windows in tokens, or as multiples of the training length; default: %(default)s"
    add("--lengths", default="1L,2L,4L", type=length_list, metavar="N,N,...", help=text)
    facts = "number of hidden facts of each length, alternately passkeys and needles; default: %(default)s"
    add("--facts", type=positive_int, default=16, metavar="N", help=facts)
    add("--seed", type=int, default=0, metavar="N", help="seed of the facts; default: %(default)s")
    data = "text files, JSONL files, folders of such files, or shard prefixes; default: the run's test data"
    add("--data", type=expanded, nargs="+", metavar="PATH", help=data)
    documents = (
        "number of documents for the loss, each with one window of each length; default: 4, or fewer if data are short"
    )
    add("--num-documents", type=positive_int, metavar="N", help=documents)
    longest = "truncate documents to N + 1 tokens; default: the greatest length"
    add("--max-length", type=length, metavar="N", help=longest)
    scored = "number of last tokens of each document to score; default: 1024, or half of the training length if less"
    add("--scored", type=token_count, metavar="N", help=scored)
    add_start_option(parser, "window and every plain prompt")
    add_chat_options(parser)


MARGIN = Number(
    "margin", attrgetter("margin"), quantity="margin of hidden facts", unit="nats", digits=1, sums=attrgetter("margins")
)
FOUND = Number("facts found", quantity="share of hidden facts found", share=True, tally=attrgetter("found"))
LOSS = Number(
    "perplexity of last tokens",
    attrgetter("perplexity"),
    best="lowest",
    logarithm=attrgetter("nll"),
    sums=attrgetter("nlls"),
)
MARGINS = Task(
    "margin",
    "log-probability margins of hidden facts, and the loss of the same tokens at every length",
    add_margin_options,
    "--checkpoint runs/350M_roformer_coca --lengths 1L,2L,4L --facts 32 --output results",
    "margin.measure.run",
    MarginResult,
    numbers=(MARGIN, FOUND, LOSS),
    comparable={
        "documents (sha256)": "documents.sha256",
        "scored tokens": "protocol.scored",
        "seed": "protocol.seed",
        "tokenizer": "tokenizer",  # lengths are counted in the tokenizer's tokens
        "start token": "protocol.start",
        "chat": "protocol.chat",
        "protocol": "protocol.text",
    },
    divided_by="lengths",
    fits="margin.measure.check_lengths",
    sections=(TaskSection("margin", "Margins of hidden facts", place=75, sentence=45),),
    place=55,
)
