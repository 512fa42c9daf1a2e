"""`evaluate.py passkey`, `needle` and `ruler`: generate an answer to every prompt and score it."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.results import Cell, Cost, EvaluationError, Missing, ResultType, Store, measured
from megatron_coca.evaluation.retrieval.prompts import FILLER_BLOCKS, Case, Haystack, LengthError, load_haystack
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
from megatron_coca.evaluation.retrieval.tasks import (
    NEEDLE_PROTOCOL,
    PASSKEY_PROTOCOL,
    RULER_PROTOCOL,
    RULER_TASKS,
    RetrievalTask,
)
from megatron_coca.evaluation.retrieval.tasks import needle as needle_task
from megatron_coca.evaluation.retrieval.tasks import passkey as passkey_task
from megatron_coca.evaluation.subject import Evaluation, Header, Subject, noting_missing
from megatron_coca.model import NOT_GENERATED, generate

ANSWER_CHARACTERS = 160
"""Characters of an answer in the result file; it is scored in full."""


class Unit(NamedTuple):
    """Cells that are measured together because their prompts have one length; `at` names them if they are missing."""

    at: str
    length: int
    tasks: dict[tuple[Any, ...], RetrievalTask]  # by the cell's key


def passkey(args: Namespace) -> int:
    evaluation = Evaluation(args, "passkey")
    protocol = RetrievalProtocol(**_protocol_fields(args, PASSKEY_PROTOCOL, FILLER_BLOCKS))
    task = passkey_task(args.answer_stub)
    units = [Unit(f"length {length}", length, {(length,): task}) for length in sorted(set(args.lengths))]

    def empty(header: Header) -> PasskeyResult:
        return PasskeyResult(**vars(header), protocol=protocol, results=[], missing=[])

    def cell(key: tuple[Any, ...], cases: list[CaseRecord], subject: Subject) -> Cell:
        return passkey_cell(key[0], cases, subject.training_length)

    return _measure(evaluation, args, units, empty, cell, passkey_table)


def needle(args: Namespace) -> int:
    evaluation = Evaluation(args, "needle")
    haystack = load_haystack(args.haystack, Path(evaluation.source.opened.trained.data.data_root))
    protocol = NeedleProtocol(**_protocol_fields(args, NEEDLE_PROTOCOL, haystack), depths=args.depths)
    tasks = {depth: needle_task(depth, haystack, args.answer_stub) for depth in args.depths}
    units = [
        Unit(f"length {length}", length, {(length, depth): task for depth, task in tasks.items()})
        for length in sorted(set(args.lengths))
    ]

    def empty(header: Header) -> NeedleResult:
        return NeedleResult(**vars(header), protocol=protocol, results=[], missing=[])

    return _measure(
        evaluation, args, units, empty, lambda key, cases, _: needle_cell(key[0], key[1], cases), needle_table
    )


def ruler(args: Namespace) -> int:
    evaluation = Evaluation(args, "ruler")
    haystack = load_haystack(args.haystack, Path(evaluation.source.opened.trained.data.data_root))
    protocol = RetrievalProtocol(**_protocol_fields(args, RULER_PROTOCOL, haystack))
    tasks = {name: RULER_TASKS[name](haystack, args.answer_stub) for name in args.tasks}
    units = [
        Unit(f"{name}, length {length}", length, {(name, length): task})
        for length in sorted(set(args.lengths))
        for name, task in tasks.items()
    ]

    def empty(header: Header) -> RulerResult:
        return RulerResult(**vars(header), protocol=protocol, results=[], missing=[])

    return _measure(
        evaluation, args, units, empty, lambda key, cases, _: ruler_cell(key[0], key[1], cases), ruler_table
    )


def _protocol_fields(args: Namespace, text: str, haystack: Haystack) -> dict[str, Any]:
    options = ("cases", "max_new_tokens", "seed", "tokens_per_batch", "answer_stub", "dynamic_length")
    return {"text": text, "haystack": haystack.record()} | {name: getattr(args, name) for name in options}


def _measure(
    evaluation: Evaluation,
    args: Namespace,
    units: Sequence[Unit],
    empty: Callable[[Header], ResultType],
    make_cell: Callable[[tuple[Any, ...], list[CaseRecord], Subject], Cell],
    table: Callable[[ResultType], str],
) -> int:
    """For each variant and unit: make the cases, generate the answers, score and store; returns the exit status."""
    tokenizer = evaluation.source.needed_tokenizer()
    cases: dict[str, list[tuple[RetrievalTask, Case]]] = {}  # by unit, the same for every variant
    remedy = f"lower --tokens-per-batch (it is {args.tokens_per_batch}, one prompt at least) or use --dtype bfloat16"
    for subject, store in evaluation.variants(empty, table):
        for unit in units:
            if all(store.has(key) for key in unit.tasks):
                continue
            with noting_missing(store, unit.at, remedy), _noting_refusals(store, unit.at):
                if unit.at not in cases:
                    cases[unit.at] = [
                        (task, case)
                        for task in unit.tasks.values()
                        for case in task.make_cases(tokenizer, unit.length, args.cases, args.seed)
                    ]
                prompts = [case.prompt for _, case in cases[unit.at]]
                with measured(subject.device) as meter:
                    answers = generate_answers(subject, tokenizer, prompts, args, f"{subject.label}, {unit.at}")
                records = [
                    _case_record(task, case, tokenizer.decode(ids))
                    for (task, case), ids in zip(cases[unit.at], answers, strict=True)
                ]
                cost = Cost.of(unit.at, meter, sum(map(len, answers)))
                for number, key in enumerate(unit.tasks):
                    cell = make_cell(key, records[number * args.cases :][: args.cases], subject)
                    store.put(cell, cost if number == len(unit.tasks) - 1 else None)
    return evaluation.status


@contextmanager
def _noting_refusals(store: Store[Any], at: str) -> Iterator[None]:
    """Note prompts that do not fit, positions that the model lacks, and numbers that overflow."""
    try:
        yield
    except LengthError as error:
        store.miss(Missing(at=at, kind="refused", reason=str(error)))
    except EvaluationError:
        raise
    except ValueError as error:
        store.miss(Missing(at=at, kind="refused", reason=str(error)))
    except FloatingPointError as error:
        store.miss(Missing(at=at, kind="failed", reason=str(error)))


def generate_answers(
    subject: Subject, tokenizer: Tokenizer, prompts: Sequence[np.ndarray], args: Namespace, title: str
) -> list[list[int]]:
    """Return the token ids of each answer without its end-of-document token, in the order of `prompts` (int32 [n]).

    Prompts are not padded, because with CoCA a shift of all positions changes what a model computes. The batches follow
    from the prompts alone, so the same prompts give the same bits.
    """
    answers: dict[int, list[int]] = {}
    with tqdm(total=len(prompts), desc=title, unit="case") as bar:
        for batch in batches([len(prompt) for prompt in prompts], args.max_new_tokens, args.tokens_per_batch):
            ids = torch.from_numpy(np.stack([prompts[index] for index in batch])).long()
            generated = generate(
                subject.model,
                ids.to(subject.device),
                args.max_new_tokens,
                finished=lambda answer: answer[-1] == tokenizer.eod,
                vocab_size=min(subject.vocab_size, tokenizer.vocab_size),
                dynamic_length=args.dynamic_length,
            )
            for index, row in zip(batch, generated.tolist(), strict=True):
                answers[index] = [token for token in row if token not in (NOT_GENERATED, tokenizer.eod)]
            bar.update(len(batch))
    return [answers[index] for index in range(len(prompts))]


def batches(lengths: Sequence[int], max_new_tokens: int, tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield indices of prompts of one length, at most `tokens_per_batch` tokens with their answers, short ones first."""
    for length in sorted(set(lengths)):
        indices = [index for index, other in enumerate(lengths) if other == length]
        size = max(1, tokens_per_batch // (length + max_new_tokens))
        yield from (indices[first : first + size] for first in range(0, len(indices), size))


def _case_record(task: RetrievalTask, case: Case, answer: str) -> CaseRecord:
    return CaseRecord(
        number=case.number,
        tokens=len(case.prompt),
        facts=[FactRecord(depth=fact.depth, distance=fact.distance) for fact in case.facts],
        expected=list(case.expected),
        answer=answer[:ANSWER_CHARACTERS],
        score=task.score(answer, case),
    )
