"""`megatron-coca evaluate passkey`, `needle` and `ruler`: options and result files."""

import math
from argparse import ArgumentParser
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Literal

from megatron_coca.evaluation.chat_settings import ChatRecord
from megatron_coca.evaluation.declaration import Comparable, Task, TaskSection
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.options import (
    Decoding,
    DynamicLength,
    add_batch_option,
    add_chat_options,
    add_decoding_option,
    add_dynamic_length_option,
    add_start_option,
    add_subject_options,
    length_list,
    names_of,
    percent_list,
    positive_int,
    token_count,
)
from megatron_coca.evaluation.results import OPEN, Entry, Record, Result, Share
from megatron_coca.evaluation.statistics import wilson_interval

RULER_NAMES = ("multi_key", "multi_value", "multi_query", "variable_tracking")


class FactRecord(Record):
    """Where a prompt contains a fact that the answer needs."""

    depth: float  # fraction of the filler units that are before the fact, from 0 to 1
    distance: int  # number of tokens from the start of the fact's first mention to the end of the prompt


class HaystackRecord(Record):
    name: str
    sentences: int  # 1 in results of passkey, because the five sentences of its filler form one unit
    sha256: str  # hash of the sentences, each followed by a line feed


class Tally(Record):
    """Summary of cases. `accuracy` is their mean score, `low` and `high` are the ends of its 95% Wilson interval."""

    accuracy: Share
    correct: int  # number of cases with a score of 1
    count: int
    low: float
    high: float


def tally_fields(scores: Sequence[float]) -> dict[str, Any]:
    accuracy = math.fsum(scores) / len(scores)
    low, high = wilson_interval(accuracy, len(scores))
    correct = sum(score == 1 for score in scores)
    return {"accuracy": accuracy, "correct": correct, "count": len(scores), "low": low, "high": high}


def tally(scores: Sequence[float]) -> Tally | None:
    return Tally(**tally_fields(scores)) if scores else None


class CaseRecord(Record):
    number: int
    tokens: int  # length of the prompt
    facts: list[FactRecord]  # in the order of the prompt; empty if the answer depends on the whole text
    expected: list[str]
    answer: str  # first 160 characters of the answer
    score: Share
    unfinished: bool = False  # whether the answer had not ended after max_new_tokens


class ScoredEntry(Tally, Entry):
    """Cases of one length, with their tally. Needles also share a depth, and RULER-style cases a task."""

    length: int  # requested length in tokens; prompts are at most this long
    cases: list[CaseRecord]
    unfinished: int | None = None  # number of answers that had not ended after max_new_tokens; None in older files


class PasskeyEntry(ScoredEntry):
    """Cases of one length. `inside` is the tally of the cases in which the key is at most the training length before
    the end of the prompt. `beyond` is the tally of all other cases.
    """

    model_config = OPEN
    inside: Tally | None
    beyond: Tally | None

    @property
    def key(self) -> tuple[int]:
        return (self.length,)


class NeedleEntry(ScoredEntry):
    depth: int  # percentage of the filler units that are before the needle

    @property
    def key(self) -> tuple[int, int]:
        return (self.length, self.depth)


class RulerEntry(ScoredEntry):
    task: str

    @property
    def key(self) -> tuple[str, int]:
        return (self.task, self.length)


class RetrievalProtocol(Record):
    """Options common to all entries of a result file. Each entry has its own length and task."""

    text: str
    cases: int  # number of cases per entry
    max_new_tokens: int
    seed: int
    tokens_per_batch: int
    answer_stub: bool
    haystack: HaystackRecord
    dynamic_length: DynamicLength = "total"  # the default is for files from before the option existed
    decoding: Decoding = "growing"
    start: int | None = None  # token id put before every prompt
    ends: list[int] = []  # tokens that end an answer; empty if only the end-of-document token does
    chat: ChatRecord | None = None  # None: prompts are plain text
    prompts_sha256: str | None = None  # hash of sample prompts; None in files of earlier versions


class NeedleProtocol(RetrievalProtocol):
    depths: list[int]  # percent


class PasskeyResult(Result):
    task: Literal["passkey"] = "passkey"
    protocol: RetrievalProtocol
    results: list[PasskeyEntry]


class NeedleResult(Result):
    task: Literal["needle"] = "needle"
    protocol: NeedleProtocol
    results: list[NeedleEntry]


class RulerResult(Result):
    task: Literal["ruler"] = "ruler"
    protocol: RetrievalProtocol
    results: list[RulerEntry]


ENTRIES: dict[str, tuple[type[ScoredEntry], tuple[str, ...]]] = {
    "passkey": (PasskeyEntry, ("length",)),
    "needle": (NeedleEntry, ("length", "depth")),
    "ruler": (RulerEntry, ("task", "length")),
}
"""The type of the entries of each task, and the names of the fields that form an entry's key."""


def add_retrieval_options(
    parser: ArgumentParser, cases: int, max_new_tokens: int = 64, has_haystack: bool = True
) -> None:
    """Declare the options that passkey, needle and ruler share. `cases` and `max_new_tokens` are a task's defaults."""
    add_subject_options(parser)
    add = parser.add_argument
    lengths = [512, 1024, 2048, 4096, 8192, 16384, 32768]  # as in the CoCA paper
    text = "prompt lengths in tokens, or as multiples of the training length, such as 1L,2L; default: 512,1024,..,32768"
    add("--lengths", type=length_list, default=lengths, metavar="N,N,...", help=text)
    add(
        "--cases",
        type=positive_int,
        default=cases,
        metavar="N",
        help="number of prompts per length (and per depth or task); default: %(default)s",
    )
    text = "maximum tokens of an answer; default: %(default)s"
    add("--max-new-tokens", type=token_count, default=max_new_tokens, metavar="N", help=text)
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the cases; all models get the same cases; default: %(default)s",
    )
    add_batch_option(parser, 16384)
    stub = 'end the prompt with the beginning of the answer, such as "The pass key is"'
    add("--answer-stub", action="store_true", help=stub)
    add_start_option(parser, "prompt")
    add_chat_options(parser)
    add_dynamic_length_option(parser)
    add_decoding_option(parser)
    if has_haystack:
        text = "filler: text files, JSONL files, folders, or builtin (the built-in corpus); default: passkey filler"
        add("--haystack", nargs="+", metavar="PATH", help=text)


def add_passkey_options(parser: ArgumentParser) -> None:
    add_retrieval_options(parser, cases=100, has_haystack=False)


def add_needle_options(parser: ArgumentParser) -> None:
    add_retrieval_options(parser, cases=5)
    text = "depths of the needle, as percentages of the text before it; default: 0,10,..,100"
    parser.add_argument("--depths", type=percent_list, default=[*range(0, 101, 10)], metavar="P,P,...", help=text)


def add_ruler_options(parser: ArgumentParser) -> None:
    add_retrieval_options(parser, cases=25, max_new_tokens=96)
    text = f"tasks to run; choices: {', '.join(RULER_NAMES)}; default: all"
    parser.add_argument("--tasks", type=names_of(RULER_NAMES), default=[*RULER_NAMES], metavar="TASK,...", help=text)


COMPARABLE: Comparable = {
    "cases": "protocol.cases",
    "seed": "protocol.seed",
    "new tokens": "protocol.max_new_tokens",
    "answer stub": "protocol.answer_stub",
    "haystack (sha256)": "protocol.haystack.sha256",
    "tokenizer": "tokenizer",  # lengths are counted in the tokenizer's tokens
    "dynamic length": "protocol.dynamic_length",
    "start token": "protocol.start",
    "chat": "protocol.chat",
    "protocol": "protocol.text",
}
LEARNED = 0.5
"""Accuracy that some label must reach at some length. A task that no model has learned cannot compare lengths."""


def whole(entry: Any) -> Any:
    """Return the entry itself, which is a tally."""
    return entry


def accuracy(name: str, tally: Any = whole, quantity: str = "") -> Number:
    return Number(name, tally=tally, quantity=quantity, share=True, learned=LEARNED)


PASSKEY = Task(
    "passkey",
    "retrieval of a number hidden in filler, by length",
    add_passkey_options,
    "--checkpoint runs/350M_roformer_coca --lengths 512,1024,2048 --output results",
    "retrieval.measure.passkey",
    PasskeyResult,
    numbers=(
        accuracy("accuracy", quantity="passkey accuracy"),
        accuracy("accuracy, inside", attrgetter("inside")),
        accuracy("accuracy, beyond", attrgetter("beyond")),
    ),
    comparable=COMPARABLE,
    divided_by="lengths",
    fits="retrieval.measure.check_lengths",
    sections=(TaskSection("passkey", "Passkey retrieval", "retrieval.section.passkey_blocks", place=60, sentence=20),),
    place=30,
)
NEEDLE = Task(
    "needle",
    "retrieval of a sentence hidden in text, by length and depth",
    add_needle_options,
    "--checkpoint runs/350M_roformer_coca --lengths 512,1024,2048 --output results",
    "retrieval.measure.needle",
    NeedleResult,
    numbers=(accuracy("accuracy, depth {entry.depth}%"),),
    comparable={**COMPARABLE, "depths": "protocol.depths"},
    divided_by="lengths",
    fits="retrieval.measure.check_lengths",
    sections=(
        TaskSection("needle", "A needle in a haystack", "retrieval.section.needle_blocks", place=70, sentence=30),
    ),
    place=50,
)
RULER = Task(
    "ruler",
    "RULER-style retrieval of several facts or of a chain of facts",
    add_ruler_options,
    "--checkpoint runs/350M_roformer_coca --tasks multi_key,variable_tracking --output results",
    "retrieval.measure.ruler",
    RulerResult,
    numbers=(accuracy("accuracy, {entry.task}"),),
    comparable=COMPARABLE,
    divided_by="lengths",
    fits="retrieval.measure.check_lengths",
    sections=(TaskSection("ruler", "RULER-style tasks", "retrieval.section.ruler_blocks", place=80, sentence=40),),
    place=60,
)
