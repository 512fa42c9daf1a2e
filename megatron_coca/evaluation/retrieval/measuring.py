"""`evaluate.py passkey`, `needle` and `ruler`: generate an answer to every prompt and score it."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_coca.console import Progress
from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.results import Cost, EvaluationError, Missing, Store, measured
from megatron_coca.evaluation.retrieval import records, tasks
from megatron_coca.evaluation.retrieval.prompts import FILLER_BLOCKS, Case, Haystack, LengthError, load_haystack
from megatron_coca.evaluation.retrieval.tasks import RetrievalTask
from megatron_coca.evaluation.subject import Evaluation, Header, Subject, noting_missing
from megatron_coca.model import NOT_GENERATED, equal_length_batches, generate

ANSWER_CHARACTERS = 160
"""Characters of an answer in the result file; it is scored in full."""


class Unit(NamedTuple):
    """Cells that are measured together because their prompts have one length; `at` names them if they are missing."""

    at: str
    length: int
    tasks: dict[tuple[Any, ...], RetrievalTask]  # by the cell's key


def passkey(args: Namespace) -> int:
    units = [
        Unit(f"length {length}", length, {(length,): tasks.passkey(args.answer_stub)})
        for length in sorted(set(args.lengths))
    ]
    evaluation = Evaluation(args, "passkey")
    protocol = records.RetrievalProtocol(**protocol_fields(args, tasks.PASSKEY_PROTOCOL, FILLER_BLOCKS))
    return measure(evaluation, args, units, protocol, records.PasskeyResult)


def needle(args: Namespace) -> int:
    evaluation = Evaluation(args, "needle")
    haystack = load_haystack(args.haystack, Path(evaluation.source.opened.trained.data.data_root))
    protocol = records.NeedleProtocol(**protocol_fields(args, tasks.NEEDLE_PROTOCOL, haystack), depths=args.depths)
    by_depth = {depth: tasks.needle(depth, haystack, args.answer_stub) for depth in args.depths}
    units = [
        Unit(f"length {length}", length, {(length, depth): task for depth, task in by_depth.items()})
        for length in sorted(set(args.lengths))
    ]
    return measure(evaluation, args, units, protocol, records.NeedleResult)


def ruler(args: Namespace) -> int:
    evaluation = Evaluation(args, "ruler")
    haystack = load_haystack(args.haystack, Path(evaluation.source.opened.trained.data.data_root))
    protocol = records.RetrievalProtocol(**protocol_fields(args, tasks.RULER_PROTOCOL, haystack))
    by_name = {name: tasks.RULER_TASKS[name](haystack, args.answer_stub) for name in args.tasks}
    units = [
        Unit(f"{name}, length {length}", length, {(name, length): task})
        for length in sorted(set(args.lengths))
        for name, task in by_name.items()
    ]
    return measure(evaluation, args, units, protocol, records.RulerResult)


def protocol_fields(args: Namespace, text: str, haystack: Haystack) -> dict[str, Any]:
    options = ("cases", "max_new_tokens", "seed", "tokens_per_batch", "answer_stub", "dynamic_length")
    return {"text": text, "haystack": haystack.record()} | {name: getattr(args, name) for name in options}


def measure(
    evaluation: Evaluation,
    args: Namespace,
    units: Sequence[Unit],
    protocol: Any,
    kind: type[records.RetrievalResult],
) -> int:
    """For each variant and unit: make the cases, generate the answers, score and store; returns the exit status."""
    tokenizer = evaluation.source.needed_tokenizer()
    cases: dict[str, list[tuple[RetrievalTask, Case]]] = {}  # by unit, the same for every variant
    remedy = f"lower --tokens-per-batch (it is {args.tokens_per_batch}, one prompt at least) or use --dtype bfloat16"

    def empty(header: Header) -> records.RetrievalResult:
        return kind(**vars(header), protocol=protocol, results=[], missing=[])

    for subject, store in evaluation.variants(empty, records.console_table):
        for unit in units:
            if all(store.get(key) is not None for key in unit.tasks):
                continue
            with noting_missing(store, unit.at, remedy), noting_refusals(store, unit.at):
                if unit.at not in cases:
                    cases[unit.at] = [
                        (task, case)
                        for task in unit.tasks.values()
                        for case in task.make_cases(tokenizer, unit.length, args.cases, args.seed)
                    ]
                prompts = [case.prompt for _, case in cases[unit.at]]
                with measured(subject.device) as meter:
                    answers = generate_answers(subject, tokenizer, prompts, args, f"{subject.label}, {unit.at}")
                answered = []
                for (task, case), ids in zip(cases[unit.at], answers, strict=True):
                    answer = tokenizer.decode(ids)
                    record = records.CaseRecord(
                        number=case.number,
                        tokens=len(case.prompt),
                        facts=[records.FactRecord(**fact._asdict()) for fact in case.facts],
                        expected=list(case.expected),
                        answer=answer[:ANSWER_CHARACTERS],
                        score=task.score_answer(answer, case.expected),
                    )
                    answered.append(record)
                cost = Cost.of(unit.at, meter, sum(map(len, answers)))
                for number, key in enumerate(unit.tasks):
                    own = answered[number * args.cases :][: args.cases]
                    cell = records.make_cell(store.result.task, key, own, subject.training_length)
                    store.put(cell, cost if number == len(unit.tasks) - 1 else None)
    return evaluation.status


@contextmanager
def noting_refusals(store: Store[Any], at: str) -> Iterator[None]:
    """Note prompts that do not fit, positions that the model lacks, and numbers that overflow."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, EvaluationError) and not isinstance(error, LengthError):
            raise
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
    lengths = [len(prompt) for prompt in prompts]
    with Progress(title, len(prompts), "cases") as progress:
        for batch in equal_length_batches(lengths, args.max_new_tokens, args.tokens_per_batch):
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
            progress.advance(len(batch))
    return [answers[index] for index in range(len(prompts))]
