"""`python evaluate.py passkey`, `needle` and `ruler`."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.options import add_dynamic_length_option, add_subject_options, int_list, positive_int
from megatron_coca.evaluation.results import Cell, Cost, EvaluationError, Missing, Result, Store, measured
from megatron_coca.evaluation.retrieval import ruler, tasks
from megatron_coca.evaluation.retrieval.cases import Case, LengthError, RetrievalTask
from megatron_coca.evaluation.retrieval.haystack import BUILTIN, FILLER_BLOCKS, Haystack, load_haystack
from megatron_coca.evaluation.retrieval.records import (
    CaseRecord,
    FactRecord,
    NeedleProtocol,
    NeedleResult,
    PasskeyResult,
    RetrievalProtocol,
    RulerResult,
    needle_cell,
    needle_table,
    passkey_cell,
    passkey_table,
    ruler_cell,
    ruler_table,
)
from megatron_coca.evaluation.subject import EvaluatedCheckpoint, Header, Subject, Task, noting_missing, run_subjects
from megatron_coca.model import DYNAMIC_LENGTH, NOT_GENERATED, DynamicLength, generate

ANSWER_CHARACTERS = 160
"""Of an answer that are kept: a score comes from all of it."""


@dataclass(frozen=True)
class Decoding:
    """How answers are generated: tokens at most, the tokens that one batch may hold (one prompt at least), and what an
    extension that depends on the length sees.
    """

    max_new_tokens: int
    tokens_per_batch: int
    dynamic_length: DynamicLength = DYNAMIC_LENGTH


@dataclass(frozen=True)
class Question:
    """A case with the task that reads its answer, and the tokenizer that wrote it."""

    case: Case
    task: RetrievalTask


@dataclass(frozen=True)
class Answered:
    """An answer that has been read, and the number of tokens it has."""

    record: CaseRecord
    tokens: int


def ask(
    subject: Subject, tokenizer: Tokenizer, questions: Sequence[Question], decoding: Decoding, title: str
) -> list[Answered]:
    """What the model answers, in the order of `questions`.

    Prompts are not padded: with CoCA a shift of all positions changes what a model computes. The batches follow from
    the questions alone, so the same questions give the same bits.
    """
    answers: dict[int, Answered] = {}
    with tqdm(total=len(questions), desc=title, unit="case") as bar:
        for batch in batches([len(question.case.prompt) for question in questions], decoding):
            asked = [questions[index] for index in batch]
            for index, question, ids in zip(batch, asked, _generated(subject, tokenizer, asked, decoding), strict=True):
                answers[index] = _read(question, ids, tokenizer)
            bar.update(len(batch))
    return [answers[index] for index in range(len(questions))]


def batches(lengths: Sequence[int], decoding: Decoding) -> Iterator[list[int]]:
    """Indices of prompts of one length, as many at a time as the tokens of a batch allow, short prompts first."""
    for length in sorted(set(lengths)):
        alike = [index for index, each in enumerate(lengths) if each == length]
        size = max(1, decoding.tokens_per_batch // (length + decoding.max_new_tokens))
        yield from (alike[first : first + size] for first in range(0, len(alike), size))


def _generated(
    subject: Subject, tokenizer: Tokenizer, questions: Sequence[Question], decoding: Decoding
) -> list[list[int]]:
    """The tokens of each answer, without the end-of-document token that ends it."""
    prompts = torch.from_numpy(np.stack([question.case.prompt for question in questions])).long()
    answers = generate(
        subject.model,
        prompts.to(subject.device),
        decoding.max_new_tokens,
        finished=lambda ids: ids[-1] == tokenizer.eod,
        vocab_size=min(subject.vocab_size, tokenizer.vocab_size),
        dynamic_length=decoding.dynamic_length,
    )
    ends = (NOT_GENERATED, tokenizer.eod)
    return [[token for token in row if token not in ends] for row in answers.tolist()]


def _read(question: Question, ids: list[int], tokenizer: Tokenizer) -> Answered:
    case, answer = question.case, tokenizer.decode(ids)
    record = CaseRecord(
        number=case.number,
        tokens=len(case.prompt),
        facts=[FactRecord(depth=fact.depth, distance=fact.distance) for fact in case.facts],
        expected=list(case.expected),
        answer=answer[:ANSWER_CHARACTERS],
        score=question.task.score(answer, case),
    )
    return Answered(record, len(ids))


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Part:
    """The cases of one cell.

    Attributes:
        key: the cell's.
        task: makes them and scores them.
        cell: makes the cell from what was answered, for a model of some training length.
    """

    key: tuple[Any, ...]
    task: RetrievalTask
    cell: Callable[[list[CaseRecord], int], Cell]


@dataclass(frozen=True)
class Unit:
    """Cells that are measured in one go, because their prompts are of one length; `at` names it where it fails."""

    at: str
    length: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Retrieval(Generic[R]):
    """A `running.Measurement`.

    Attributes:
        tokenizer: of the checkpoint.
        units: what is to be measured, in this order.
        count: cases of a cell.
        seed: of the cases.
        decoding: how answers are generated.
        make_empty: the result file without results.
        make_table: for the console.
    """

    tokenizer: Tokenizer
    units: Sequence[Unit]
    count: int
    seed: int
    decoding: Decoding
    make_empty: Callable[[Header], R]
    make_table: Callable[[R], str]
    _questions: dict[str, list[Question]] = field(default_factory=dict)

    def empty(self, header: Header) -> R:
        """As in `running.Measurement`."""
        return self.make_empty(header)

    def measure(self, subject: Subject, store: Store[R]) -> None:
        """What a length misses keeps no other from being measured."""
        remedy = f"lower --tokens-per-batch (it is {self.decoding.tokens_per_batch}, one prompt at least)"
        for unit in self.units:
            if not all(store.has(part.key) for part in unit.parts):
                with noting_missing(store, unit.at, f"{remedy} or use --dtype bfloat16"), _refusals(store, unit.at):
                    self._measure_unit(subject, store, unit)

    def table(self, result: R) -> str:
        """As in `running.Measurement`."""
        return self.make_table(result)

    def questions(self, unit: Unit) -> list[Question]:
        """Of all parts, one after another; the same for every subject. Raises LengthError."""
        if unit.at not in self._questions:
            self._questions[unit.at] = [
                Question(case, part.task)
                for part in unit.parts
                for case in part.task.make_cases(self.tokenizer, unit.length, self.count, self.seed)
            ]
        return self._questions[unit.at]

    def _measure_unit(self, subject: Subject, store: Store[R], unit: Unit) -> None:
        questions = self.questions(unit)
        with measured(subject.device) as meter:
            answers = ask(subject, self.tokenizer, questions, self.decoding, f"{subject.label}, {unit.at}")
        records = iter(answer.record for answer in answers)
        cells = [part.cell(list(islice(records, self.count)), subject.training_length) for part in unit.parts]
        for cell in cells[:-1]:
            store.put(cell)
        store.put(cells[-1], Cost.of(unit.at, meter, sum(answer.tokens for answer in answers)))


@contextmanager
def _refusals(store: Store[Any], at: str) -> Iterator[None]:
    """Notes why a length cannot be measured: a prompt that does not fit, positions that the model does not have,
    numbers that overflow.
    """
    try:
        yield
    except LengthError as error:
        store.miss(Missing(at=at, kind="refused", reason=str(error)))
    except ValueError as error:
        if isinstance(error, EvaluationError):
            raise
        store.miss(Missing(at=at, kind="refused", reason=str(error)))
    except FloatingPointError as error:
        store.miss(Missing(at=at, kind="failed", reason=str(error)))


def needed_tokenizer(source: EvaluatedCheckpoint) -> Tokenizer:
    """Raises EvaluationError where the checkpoint carries none."""
    if source.tokenizer is None:
        raise EvaluationError(
            f"{source.options.checkpoint}: carries no tokenizer, and prompts are text; put the model's tokenizer.json "
            "into the folder"
        )
    return source.tokenizer


LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
"""Of the CoCA paper."""

DEPTHS = list(range(0, 101, 10))

Begin = Callable[[EvaluatedCheckpoint], Retrieval[Any]]


def percent_list(text: str) -> list[int]:
    """An argparse type: "0,50,100"."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) <= 100 for part in parts):
        raise ArgumentTypeError(f"{text!r} is not a list of whole percents, 0 to 100")
    return sorted({int(part) for part in parts})


def task_list(text: str) -> list[str]:
    """An argparse type: "multi_key,common_words"."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in ruler.RULER_TASKS]
    if unknown:
        raise ArgumentTypeError(f"no task {unknown[0]!r}; there are {', '.join(ruler.RULER_TASKS)}")
    return names


def common_arguments(parser: ArgumentParser, cases: int, max_new_tokens: int) -> None:
    """What the three tasks have in common."""
    add_subject_options(parser)
    add = parser.add_argument
    add("--lengths", type=int_list, default=LENGTHS, metavar="N,N,...", help="of prompts, in tokens; default: 512..32k")
    add("--cases", type=positive_int, default=cases, metavar="N", help=f"prompts of each cell; default: {cases}")
    tokens = f"of an answer at most; default: {max_new_tokens}"
    add("--max-new-tokens", type=positive_int, default=max_new_tokens, metavar="N", help=tokens)
    add("--seed", type=int, default=0, metavar="N", help="of the cases: the same for every model; default: 0")
    add("--tokens-per-batch", type=positive_int, default=16384, metavar="N", help="fewer need less memory")
    stub = 'end the prompt with the beginning of the answer, such as "The pass key is"'
    add("--answer-stub", action="store_true", help=stub)
    add_dynamic_length_option(parser)


def haystack_argument(parser: ArgumentParser) -> None:
    """The text in which something is hidden."""
    text = f"text files, JSONL files or folders, or {BUILTIN} for the built-in corpus; default: the passkey's filler"
    parser.add_argument("--haystack", nargs="+", metavar="PATH", help=text)


def passkey_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    common_arguments(parser, cases=100, max_new_tokens=64)


def needle_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    common_arguments(parser, cases=5, max_new_tokens=64)
    haystack_argument(parser)
    depths = "share of the text before the needle, in percent; default: 0,10,..100"
    parser.add_argument("--depths", type=percent_list, default=DEPTHS, metavar="P,P,...", help=depths)


def ruler_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    common_arguments(parser, cases=25, max_new_tokens=96)
    haystack_argument(parser)
    names = list(ruler.RULER_TASKS)
    tasks = f"some of {', '.join(names)}; default: all"
    parser.add_argument("--tasks", type=task_list, default=names, metavar="TASK,...", help=tasks)


def protocol_fields(args: Namespace, text: str, haystack: Haystack) -> dict[str, Any]:
    """What a `RetrievalProtocol` holds."""
    return {
        "text": text,
        "cases": args.cases,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "tokens_per_batch": args.tokens_per_batch,
        "answer_stub": args.answer_stub,
        "haystack": haystack.record(),
        "dynamic_length": args.dynamic_length,
    }


def begin_passkey(args: Namespace, source: EvaluatedCheckpoint) -> Retrieval[PasskeyResult]:
    """The measurement for one checkpoint."""
    protocol = RetrievalProtocol(**protocol_fields(args, tasks.PASSKEY_PROTOCOL, FILLER_BLOCKS))
    task = tasks.passkey(args.answer_stub)
    units = [
        Unit(f"length {length}", length, (Part((length,), task, partial(passkey_cell, length)),))
        for length in shortest_first(args.lengths)
    ]

    def empty(header: Header) -> PasskeyResult:
        return PasskeyResult(**header.fields(), protocol=protocol, results=[], missing=[])

    return retrieval(args, source, units, empty, passkey_table)


def begin_needle(args: Namespace, source: EvaluatedCheckpoint) -> Retrieval[NeedleResult]:
    """The measurement for one checkpoint."""
    haystack = load_haystack(args.haystack, Path(source.opened.trained.data.data_root))
    protocol = NeedleProtocol(**protocol_fields(args, tasks.PROTOCOL, haystack), depths=args.depths)
    by_depth = {depth: tasks.needle(depth, haystack, args.answer_stub) for depth in args.depths}
    units = [
        Unit(
            f"length {length}",
            length,
            tuple(Part((length, depth), task, partial(needle_cell, length, depth)) for depth, task in by_depth.items()),
        )
        for length in shortest_first(args.lengths)
    ]

    def empty(header: Header) -> NeedleResult:
        return NeedleResult(**header.fields(), protocol=protocol, results=[], missing=[])

    return retrieval(args, source, units, empty, needle_table)


def begin_ruler(args: Namespace, source: EvaluatedCheckpoint) -> Retrieval[RulerResult]:
    """The measurement for one checkpoint."""
    haystack = load_haystack(args.haystack, Path(source.opened.trained.data.data_root))
    protocol = RetrievalProtocol(**protocol_fields(args, ruler.PROTOCOL, haystack))
    tasks = {name: ruler.RULER_TASKS[name](haystack, args.answer_stub) for name in args.tasks}
    units = [
        Unit(f"{name}, length {length}", length, (Part((name, length), task, partial(ruler_cell, name, length)),))
        for length in shortest_first(args.lengths)
        for name, task in tasks.items()
    ]

    def empty(header: Header) -> RulerResult:
        return RulerResult(**header.fields(), protocol=protocol, results=[], missing=[])

    return retrieval(args, source, units, empty, ruler_table)


def shortest_first(lengths: Sequence[int]) -> list[int]:
    """Each length once, so that what costs little is there early."""
    return sorted(set(lengths))


def retrieval(
    args: Namespace,
    source: EvaluatedCheckpoint,
    units: Sequence[Unit],
    empty: Callable[[Header], Any],
    table: Callable[[Any], str],
) -> Retrieval[Any]:
    """The measurement of these units with the options that all three tasks have. Raises EvaluationError."""
    decoding = Decoding(args.max_new_tokens, args.tokens_per_batch, args.dynamic_length)
    return Retrieval(needed_tokenizer(source), units, args.cases, args.seed, decoding, empty, table)


def task(name: str, about: str, add_arguments: Callable[[ArgumentParser], None], begin: Callable[..., Any]) -> Task:
    """A subcommand that runs over all variants of a checkpoint."""
    return Task(about, add_arguments, lambda args: run_subjects(args, name, partial(begin, args)))


PASSKEY = task("passkey", "a number hidden in filler, by length", passkey_arguments, begin_passkey)
NEEDLE = task("needle", "a sentence hidden in text, by length and depth", needle_arguments, begin_needle)
RULER = task("ruler", "RULER-style tasks: several facts, chains of facts, frequent words", ruler_arguments, begin_ruler)
