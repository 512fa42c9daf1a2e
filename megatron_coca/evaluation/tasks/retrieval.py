"""`megatron-coca evaluate passkey`, `needle` and `ruler`: result files and the shared measurement."""

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.chats import ChatRecord, chat_record
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import (
    OPEN,
    Cost,
    Entry,
    EvaluationError,
    Missing,
    Record,
    Result,
    Show,
    Store,
    measured,
)
from megatron_coca.evaluation.statistics import wilson_interval
from megatron_coca.evaluation.subject import Evaluation, Subject, noting_missing
from megatron_coca.evaluation.tasks import retrieval_cases as tasks
from megatron_coca.evaluation.tasks.answers import end_tokens, finished_by
from megatron_coca.evaluation.tasks.prompts import (
    FILLER_BLOCKS,
    Case,
    FactRecord,
    Haystack,
    HaystackRecord,
    LengthError,
    PromptForm,
    load_haystack,
)
from megatron_coca.evaluation.tasks.retrieval_cases import RetrievalTask
from megatron_coca.model import (
    DYNAMIC_LENGTHS,
    NOT_GENERATED,
    DynamicLength,
    SharedPrefix,
    equal_length_batches,
    generate,
    prefix_order,
)
from megatron_coca.support.console import Progress, short

ANSWER_CHARACTERS = 160
"""Number of characters of an answer that result files keep. The score is that of the whole answer."""


class Tally(Record):
    """Summary of cases: `accuracy` is their mean score, `low` .. `high` its 95% Wilson interval."""

    accuracy: float
    correct: int  # number of cases with a score of 1
    count: int
    low: float
    high: float


class CaseRecord(Record):
    number: int
    tokens: int  # length of the prompt
    facts: list[FactRecord]  # in the order of the prompt; empty if the answer depends on the whole text
    expected: list[str]
    answer: str  # first 160 characters of the answer
    score: float  # 0 .. 1


class ScoredEntry(Tally, Entry):
    """Cases of one length (and depth or task), with their tally."""

    length: int  # requested length in tokens; prompts are at most this long
    cases: list[CaseRecord]


class PasskeyEntry(ScoredEntry):
    """One length. `inside`: cases with the key within the training length of the end; `beyond`: all other cases."""

    model_config = OPEN
    inside: Tally | None
    beyond: Tally | None

    @property
    def key(self) -> tuple[int]:
        return (self.length,)


class NeedleEntry(ScoredEntry):
    depth: int  # percent of the filler units before the needle

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
    dynamic_length: DynamicLength = "total"  # the behaviour before the option existed
    start: int | None = None  # token id put before every prompt
    ends: list[int] = []  # tokens that end an answer; empty: only the end-of-document token
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


RetrievalResult = PasskeyResult | NeedleResult | RulerResult


def tally_fields(scores: Sequence[float]) -> dict[str, Any]:
    accuracy = math.fsum(scores) / len(scores)
    low, high = wilson_interval(accuracy, len(scores))
    correct = sum(score == 1 for score in scores)
    return {"accuracy": accuracy, "correct": correct, "count": len(scores), "low": low, "high": high}


def tally(scores: Sequence[float]) -> Tally | None:
    return Tally(**tally_fields(scores)) if scores else None


ENTRIES: dict[str, tuple[type[ScoredEntry], tuple[str, ...]]] = {
    "passkey": (PasskeyEntry, ("length",)),
    "needle": (NeedleEntry, ("length", "depth")),
    "ruler": (RulerEntry, ("task", "length")),
}
"""The entry type of each `megatron-coca evaluate TASK`, and the names of the values in the entries' keys."""


def make_entry(task: str, key: tuple[Any, ...], cases: Sequence[CaseRecord], training_length: int) -> ScoredEntry:
    """Build the entry of `megatron-coca evaluate TASK` with this key."""
    kind, names = ENTRIES[task]
    fields = tally_fields([case.score for case in cases]) | dict(zip(names, key, strict=True))
    if kind is PasskeyEntry:
        scored = [(max(fact.distance for fact in case.facts), case.score) for case in cases]
        fields["inside"] = tally([score for distance, score in scored if distance <= training_length])
        fields["beyond"] = tally([score for distance, score in scored if distance > training_length])
    return kind(**fields, cases=list(cases))


class Unit(NamedTuple):
    """Entries with prompts of the same length, measured together; `at` names them if they are missing."""

    at: str
    length: int
    tasks: dict[tuple[Any, ...], RetrievalTask]  # by entry key


def passkey(args: Namespace, show: Show) -> int:
    units = [
        Unit(f"length {length}", length, {(length,): tasks.passkey(args.answer_stub)})
        for length in sorted(set(args.lengths))
    ]
    evaluation = Evaluation(subject_options(args), "passkey", show)
    made = [task for unit in units[:1] for task in unit.tasks.values()]
    fields = protocol_fields(args, evaluation, tasks.PASSKEY_PROTOCOL, FILLER_BLOCKS, made)
    protocol = RetrievalProtocol(**fields)
    return measure(evaluation, units, protocol, PasskeyResult)


def needle(args: Namespace, show: Show) -> int:
    evaluation, haystack = evaluation_in_haystack(args, "needle", show)
    by_depth = {depth: tasks.needle(depth, haystack, args.answer_stub) for depth in args.depths}
    fields = protocol_fields(args, evaluation, tasks.NEEDLE_PROTOCOL, haystack, by_depth.values())
    protocol = NeedleProtocol(**fields, depths=args.depths)
    units = [
        Unit(f"length {length}", length, {(length, depth): task for depth, task in by_depth.items()})
        for length in sorted(set(args.lengths))
    ]
    return measure(evaluation, units, protocol, NeedleResult)


def ruler(args: Namespace, show: Show) -> int:
    evaluation, haystack = evaluation_in_haystack(args, "ruler", show)
    by_name = {name: tasks.ruler(name, haystack, args.answer_stub) for name in args.tasks}
    fields = protocol_fields(args, evaluation, tasks.RULER_PROTOCOL, haystack, by_name.values())
    protocol = RetrievalProtocol(**fields)
    units = [
        Unit(f"{name}, length {length}", length, {(name, length): task})
        for length in sorted(set(args.lengths))
        for name, task in by_name.items()
    ]
    return measure(evaluation, units, protocol, RulerResult)


def check_lengths(args: Namespace, tokenizer: Tokenizer, data_root: Path) -> None:
    """Raise LengthError if prompts of passkey, needle or ruler do not fit into a length of `args`, the parsed options.

    This needs no model. Also raises the errors of `load_haystack`.
    """
    haystack = FILLER_BLOCKS if args.task == "passkey" else load_haystack(args.haystack, data_root)
    kinds = {
        "passkey": lambda: [tasks.passkey(args.answer_stub)],
        "needle": lambda: [tasks.needle(args.depths[0], haystack, args.answer_stub)],  # all depths have equal texts
        "ruler": lambda: [tasks.ruler(name, haystack, args.answer_stub) for name in args.tasks],
    }
    chat = tokenizer.chat if args.apply_chat_template else None
    start = None if args.start_token is None or chat is not None else tokenizer.token(args.start_token)
    form = PromptForm(tokenizer, start, chat, args.system_instruction)
    for task in kinds[args.task]():
        for length in sorted(set(args.lengths)):
            task.check_length(form, length, args.cases, args.seed)


def evaluation_in_haystack(args: Namespace, task: str, show: Show) -> tuple[Evaluation, Haystack]:
    """Open the checkpoint and read `--haystack`. Raises the errors of `Evaluation` and `load_haystack`."""
    evaluation = Evaluation(subject_options(args), task, show)
    return evaluation, load_haystack(args.haystack, Path(evaluation.opened.trained.data.data_root))


def protocol_fields(
    args: Namespace, evaluation: Evaluation, text: str, haystack: Haystack, made: Iterable[RetrievalTask]
) -> dict[str, Any]:
    """Return the fields of a protocol. Raises EvaluationError for invalid chat options or a missing tokenizer."""
    options = ("cases", "max_new_tokens", "seed", "tokens_per_batch", "answer_stub", "dynamic_length")
    tokenizer = evaluation.needed_tokenizer()
    chat = chat_record(args, tokenizer)
    if chat is not None and args.start_token is not None:
        raise EvaluationError("--start-token: the chat template adds its own start token; remove the option")
    ends = end_tokens(tokenizer, chat is not None)
    return {name: getattr(args, name) for name in options} | {
        "text": text,
        "haystack": haystack.record(),
        "prompts_sha256": tasks.sample_digest(made),
        "start": evaluation.start_token(args.start_token) if chat is None else None,
        "ends": [] if ends == [tokenizer.eod] else ends,
        "chat": chat,
    }


def prompt_form(tokenizer: Tokenizer, protocol: RetrievalProtocol) -> PromptForm:
    if protocol.chat is None:
        return PromptForm(tokenizer, protocol.start)
    return PromptForm(tokenizer, None, tokenizer.chat, protocol.chat.system)


def measure(
    evaluation: Evaluation, units: Sequence[Unit], protocol: RetrievalProtocol, kind: type[RetrievalResult]
) -> int:
    """Make the cases of each unit; generate, score and store the answers of each variant. Return the exit status."""
    tokenizer = evaluation.needed_tokenizer()
    form = prompt_form(tokenizer, protocol)
    cases: dict[str, list[tuple[RetrievalTask, Case]]] = {}  # by unit; the same for every variant
    remedy = f"lower --tokens-per-batch (now {protocol.tokens_per_batch}; at least one prompt) or use --dtype bfloat16"
    for subject, store in evaluation.variants(kind, protocol=protocol):
        for unit in units:
            if all(store.get(key) is not None for key in unit.tasks):
                continue
            with noting_missing(store, unit.at, remedy), noting_errors(store, unit.at):
                if unit.at not in cases:
                    cases[unit.at] = [
                        (task, case)
                        for task in unit.tasks.values()
                        for case in task.make_cases(form, unit.length, protocol.cases, protocol.seed)
                    ]
                prompts = [case.prompt for _, case in cases[unit.at]]
                with measured(subject.device) as meter:
                    answers = generate_answers(subject, tokenizer, prompts, protocol, f"{subject.label}, {unit.at}")
                answered = []
                for (task, case), ids in zip(cases[unit.at], answers, strict=True):
                    answer = tokenizer.decode(ids)
                    for stop in tokenizer.turn_ends()[1] if protocol.chat is not None else ():
                        answer = answer.partition(stop)[0]
                    record = CaseRecord(
                        number=case.number,
                        tokens=len(case.prompt),
                        facts=list(case.facts),
                        expected=list(case.expected),
                        answer=answer[:ANSWER_CHARACTERS],
                        score=task.score_answer(answer, case.expected),
                    )
                    answered.append(record)
                cost = Cost.of(unit.at, meter, sum(map(len, answers)))
                for number, key in enumerate(unit.tasks):
                    own = answered[number * protocol.cases :][: protocol.cases]
                    entry = make_entry(store.result.task, key, own, subject.training_length)
                    store.put(entry, cost if number == len(unit.tasks) - 1 else None)
    return evaluation.status


@contextmanager
def noting_errors(store: Store[Any], at: str) -> Iterator[None]:
    """Record `at` as missing in `store` if prompts do not fit, the model lacks their positions, or numbers overflow."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, EvaluationError) and not isinstance(error, LengthError):
            raise
        store.miss(Missing(at=at, kind="refused", reason=str(error)))
    except FloatingPointError as error:
        store.miss(Missing(at=at, kind="failed", reason=str(error)))


def generate_answers(
    subject: Subject, tokenizer: Tokenizer, prompts: Sequence[np.ndarray], protocol: RetrievalProtocol, title: str
) -> list[list[int]]:
    """Return each answer's token ids, without the token that ends the answer, in the order of `prompts` (int32 [n]).

    Prompts are not padded, because shifting all positions changes the output of a model with CoCA. The batches depend
    only on the prompts, so the same prompts produce bit-identical answers.

    Prompts of one length that are too long for a common batch are processed in the order of `prefix_order`, and their
    common beginning, which is the filler before the fact, is computed once.
    """
    answers: dict[int, list[int]] = {}
    ends = {NOT_GENERATED, *(protocol.ends or [tokenizer.eod])}
    stops = tokenizer.turn_ends()[1] if protocol.chat is not None else []
    finished = finished_by(ends, stops, tokenizer.decode)
    shared, new_tokens = SharedPrefix(subject.model), protocol.max_new_tokens
    batches = [*equal_length_batches([len(prompt) for prompt in prompts], new_tokens, protocol.tokens_per_batch)]
    batches.sort(key=lambda batch: prefix_order(prompts[batch[0]]) if len(batch) == 1 else (len(prompts[batch[0]]), []))
    finished_tokens, all_tokens = 0, sum(map(len, prompts))
    with Progress(title, len(prompts), "cases") as progress:
        for batch in batches:
            ids = torch.from_numpy(np.stack([prompts[index] for index in batch])).long()
            fixed = DYNAMIC_LENGTHS[protocol.dynamic_length](ids.shape[1], new_tokens)
            cache = shared.cache_for(prompts[batch[0]], new_tokens, fixed) if len(batch) == 1 else None
            generated = generate(
                subject.model,
                ids.to(subject.device),
                new_tokens,
                finished=finished,
                vocab_size=min(subject.vocab_size, tokenizer.vocab_size),
                dynamic_length=protocol.dynamic_length,
                cache=cache,
            )
            if cache is not None:
                shared.keep(prompts[batch[0]], cache)
            for index, row in zip(batch, generated.tolist(), strict=True):
                answers[index] = [token for token in row if token not in ends]
            finished_tokens += len(batch) * ids.shape[1]
            progress.details = [f"{short(finished_tokens)} of {short(all_tokens)} tokens"]
            progress.advance(len(batch))
    return [answers[index] for index in range(len(prompts))]
