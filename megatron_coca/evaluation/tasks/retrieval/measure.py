"""`megatron-coca evaluate passkey`, `needle` and `ruler`: the commands and their shared measurement."""

import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_coca.data import Tokenizer
from megatron_coca.data.tokenizers.chat import with_variables
from megatron_coca.data.tokenizers.stops import text_before_stop
from megatron_coca.evaluation.chat_settings import ChatRecord
from megatron_coca.evaluation.chats import chat_record
from megatron_coca.evaluation.documents import builtin_root
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import Cost, EvaluationError, Missing, Show, Store, measured
from megatron_coca.evaluation.subject import Evaluation, Subject, noting_missing
from megatron_coca.evaluation.tasks.answers import end_tokens, finished_by
from megatron_coca.evaluation.tasks.retrieval import cases as tasks
from megatron_coca.evaluation.tasks.retrieval.cases import RetrievalTask
from megatron_coca.evaluation.tasks.retrieval.prompts import (
    FILLER_BLOCKS,
    Case,
    Haystack,
    LengthError,
    PromptForm,
    load_haystack,
)
from megatron_coca.evaluation.tasks.retrieval.task import (
    ENTRIES,
    CaseRecord,
    NeedleProtocol,
    NeedleResult,
    PasskeyEntry,
    PasskeyResult,
    RetrievalProtocol,
    RulerResult,
    ScoredEntry,
    tally,
    tally_fields,
)
from megatron_coca.model import (
    DYNAMIC_LENGTHS,
    NOT_GENERATED,
    SharedPrefix,
    equal_length_batches,
    generate,
    prefix_order,
)
from megatron_coca.support.console import Progress, short

logger = logging.getLogger(__name__)

ANSWER_CHARACTERS = 160
"""Largest number of characters of an answer that result files keep. Scores are computed from the whole answer."""


RetrievalResult = PasskeyResult | NeedleResult | RulerResult


def make_entry(task: str, key: tuple[Any, ...], cases: Sequence[CaseRecord], training_length: int) -> ScoredEntry:
    """Build the entry with this key for the result file of `megatron-coca evaluate TASK`."""
    kind, names = ENTRIES[task]
    fields = tally_fields([case.score for case in cases]) | dict(zip(names, key, strict=True))
    if kind is PasskeyEntry:
        scored = [(max(fact.distance for fact in case.facts), case.score) for case in cases]
        fields["inside"] = tally([score for distance, score in scored if distance <= training_length])
        fields["beyond"] = tally([score for distance, score in scored if distance > training_length])
    return kind(**fields, cases=list(cases), unfinished=sum(case.unfinished for case in cases))


class Unit(NamedTuple):
    """Entries that are measured together, with prompts of one length. `at` names them in notes on missing entries."""

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
    """Raise LengthError if prompts of passkey, needle or ruler do not fit into one of the lengths in `args`.

    This needs no model. Also raises the errors of `load_haystack`.
    """
    haystack = FILLER_BLOCKS if args.task == "passkey" else load_haystack(args.haystack, data_root)
    kinds = {
        "passkey": lambda: [tasks.passkey(args.answer_stub)],
        "needle": lambda: [tasks.needle(args.depths[0], haystack, args.answer_stub)],  # texts do not depend on depth
        "ruler": lambda: [tasks.ruler(name, haystack, args.answer_stub) for name in args.tasks],
    }
    form = form_of(args, tokenizer)
    for task in kinds[args.task]():
        for length in sorted(set(args.lengths)):
            task.check_length(form, length, args.cases, args.seed)


def form_of(args: Namespace, tokenizer: Tokenizer) -> PromptForm:
    """Return the form of prompts that the parsed options select."""
    chat = tokenizer.chat if args.apply_chat_template else None
    chat = None if chat is None else with_variables(chat, args.chat_template_kwargs)
    start = None if args.start_token is None or chat is not None else tokenizer.token(args.start_token)
    return PromptForm(tokenizer, start, chat, args.system_instruction)


def evaluation_in_haystack(args: Namespace, task: str, show: Show) -> tuple[Evaluation, Haystack]:
    """Open the checkpoint and read `--haystack`. Raises the errors of `Evaluation` and `load_haystack`."""
    evaluation = Evaluation(subject_options(args), task, show)
    return evaluation, load_haystack(args.haystack, builtin_root(evaluation.opened.trained.data))


def protocol_fields(
    args: Namespace, evaluation: Evaluation, text: str, haystack: Haystack, made: Iterable[RetrievalTask]
) -> dict[str, Any]:
    """Return the fields of a protocol. Raises EvaluationError for invalid chat options or a missing tokenizer."""
    options = ("cases", "max_new_tokens", "seed", "tokens_per_batch", "answer_stub", "dynamic_length", "decoding")
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


def prompt_form(tokenizer: Tokenizer, start: int | None, chat: ChatRecord | None) -> PromptForm:
    """Return the form of prompts that a protocol records."""
    if chat is None:
        return PromptForm(tokenizer, start)
    return PromptForm(tokenizer, None, tokenizer.chat, chat.system)


def measure(
    evaluation: Evaluation, units: Sequence[Unit], protocol: RetrievalProtocol, kind: type[RetrievalResult]
) -> int:
    """Make the cases of each unit; generate, score and store the answers of each variant. Return the exit status."""
    tokenizer = evaluation.needed_tokenizer()
    form = prompt_form(tokenizer, protocol.start, protocol.chat)
    stops = tokenizer.turn_ends()[1] if protocol.chat is not None else []
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
                for (task, case), (ids, unfinished) in zip(cases[unit.at], answers, strict=True):
                    answer = text_before_stop(tokenizer, ids, stops)[0]
                    record = CaseRecord(
                        number=case.number,
                        tokens=len(case.prompt),
                        facts=list(case.facts),
                        expected=list(case.expected),
                        answer=answer[:ANSWER_CHARACTERS],
                        score=task.score_answer(answer, case.expected),
                        unfinished=unfinished,
                    )
                    answered.append(record)
                warn_of_unfinished(f"{subject.label}, {unit.at}", answered, protocol)
                cost = Cost.of(unit.at, meter, sum(len(ids) for ids, _ in answers))
                for number, key in enumerate(unit.tasks):
                    own = answered[number * protocol.cases :][: protocol.cases]
                    entry = make_entry(store.result.task, key, own, subject.training_length)
                    store.put(entry, cost if number == len(unit.tasks) - 1 else None)
    return evaluation.status


def warn_of_unfinished(at: str, cases: Sequence[CaseRecord], protocol: RetrievalProtocol) -> None:
    """In chats, warn of wrong answers that had not ended, because the model may still have been thinking."""
    wrong = sum(case.unfinished and case.score < 1 for case in cases)
    if wrong and protocol.chat is not None:
        logger.warning(
            "%s: %d of %d answers are wrong and had not ended after %d tokens; raise --max-new-tokens, or let a model "
            "that thinks answer at once, as --chat-template-kwargs '{\"enable_thinking\": false}' does for Qwen 3",
            *(at, wrong, len(cases), protocol.max_new_tokens),
        )


@contextmanager
def noting_errors(store: Store[Any], at: str) -> Iterator[None]:
    """Record `at` as missing in `store` if prompts do not fit, the model has too few positions, or numbers overflow."""
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
) -> list[tuple[list[int], bool]]:
    """Return the answers in the order of `prompts`, each of which is int32 [n]. An answer is a pair: its token ids
    without the token that ends it, and whether it had not ended.

    Prompts are not padded, because shifting all positions changes the output of a model with CoCA. The batches depend
    only on the prompts, so the same prompts produce bit-identical answers.

    Prompts of one length that are too long for a common batch are processed in the order of `prefix_order`, and their
    common beginning, which is the filler before the fact, is computed once.
    """
    answers: dict[int, tuple[list[int], bool]] = {}
    ends = {NOT_GENERATED, *(protocol.ends or [tokenizer.eod])}
    stops = tokenizer.turn_ends()[1] if protocol.chat is not None else []
    finished = finished_by(ends, stops, tokenizer.spell)
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
                decoding=protocol.decoding,
            )
            if cache is not None:
                shared.keep(prompts[batch[0]], cache)
            for index, row in zip(batch, generated.tolist(), strict=True):
                unfinished = not finished([token for token in row if token != NOT_GENERATED])
                answers[index] = [token for token in row if token not in ends], unfinished
            finished_tokens += len(batch) * ids.shape[1]
            progress.details = [f"{short(finished_tokens)} of {short(all_tokens)} tokens"]
            progress.advance(len(batch))
    return [answers[index] for index in range(len(prompts))]
