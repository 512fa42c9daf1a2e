"""`megatron-coca evaluate margin`: margins of hidden facts, and the loss of the same tokens at every length.

A margin is the log-probability of the right answer minus that of the likeliest foil, which is a wrong answer of the
same form. Margins can distinguish models even if all of them answer right, or all of them wrong.
"""

from argparse import Namespace
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch

from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.chats import chat_record
from megatron_coca.evaluation.documents import Documents, collect_documents, default_data
from megatron_coca.evaluation.multiples import is_multiple
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import Cost, EvaluationError, Show, Store, measured
from megatron_coca.evaluation.subject import Evaluation, Subject, noting_missing
from megatron_coca.evaluation.tasks.margin.task import (
    CaseMargin,
    MarginEntry,
    MarginProtocol,
    MarginResult,
    facts_at,
    windows_at,
)
from megatron_coca.evaluation.tasks.perplexity.measure import score_hidden
from megatron_coca.evaluation.tasks.retrieval import cases as retrieval_cases
from megatron_coca.evaluation.tasks.retrieval.cases import distinct_numbers
from megatron_coca.evaluation.tasks.retrieval.measure import form_of, noting_errors, prompt_form
from megatron_coca.evaluation.tasks.retrieval.prompts import FILLER_HAYSTACK, Case, PromptForm
from megatron_coca.model import GPT, SharedPrefix, prefix_order
from megatron_coca.model.shared_prefix import common_prefix
from megatron_coca.support.console import Progress

MOST_NEEDLES = 1_000_000
"""Largest number of needles of one length that all have different seeds."""
FOILS = 7
"""Number of wrong answers per case. By chance, the right one of the eight answers is the likeliest in 1/8 of cases."""
DIGITS = 7
"""Number of digits of every hidden number."""
PROTOCOL = (
    "loss: the last tokens of each document, given the tokens before them in one input; facts: passkeys (random "
    f"depths) and needles (depths 1/2, 1/4, 3/4, 1/8, ..) in turn, numbers of {DIGITS} digits in the passkey filler; "
    f"margin: log-probability of the number minus that of the likeliest of {FOILS} random numbers of {DIGITS} digits; "
    "found: greedy decoding gives the number after the tokens with which all of these numbers begin, such as a space"
)
"""Part of the identity of a result file: if this string changes, earlier files are not resumed."""


ANSWER_TOKENS = 8
"""Prompts are this many tokens shorter than the requested length, which leaves room for the answer."""
MOST_SCORED = 1024
"""Default number of scored tokens per document, unless half of the training length is less."""
DOCUMENTS = 4
"""Largest number of documents without --num-documents. Short data may have fewer."""
REMEDY = "shorten --lengths, or use --dtype bfloat16"

Cases = Sequence[tuple[str, Case]]
"""Prompts with the names of their tasks, passkey or needle."""


def run(args: Namespace, show: Show) -> int:
    """Measure every variant. Raises EvaluationError or DataError."""
    evaluation, lengths = Evaluation(subject_options(args), "margin", show), sorted(set(args.lengths))
    tokenizer, longest = evaluation.needed_tokenizer(), args.max_length or lengths[-1]
    if longest < lengths[-1]:
        raise EvaluationError(f"--max-length {longest}: must be at least {lengths[-1]}, the longest input")
    scored = args.scored or default_scored(evaluation)
    if lengths[0] < scored:
        raise EvaluationError(f"--lengths {lengths[0]}: is shorter than the {scored} scored tokens; lower --scored")
    documents = read_documents(evaluation, args.data, longest + 1, args.num_documents)
    protocol = MarginProtocol(
        text=PROTOCOL,
        scored=scored,
        seed=args.seed,
        start=evaluation.start_token(args.start_token),
        chat=chat_record(args, tokenizer),
    )
    form, cases = prompt_form(tokenizer, protocol.start, protocol.chat), dict[int, Cases]()
    for subject, store in evaluation.variants(MarginResult, protocol=protocol, documents=documents.record()):
        for length in lengths:
            with Progress(f"{subject.label}, length {length}", unit="inputs") as progress:
                with noting_missing(store, windows_at(length), REMEDY):
                    for _ in score_windows(subject, store, documents.arrays, length):
                        progress.advance()
                with noting_missing(store, facts_at(length), REMEDY), noting_errors(store, facts_at(length)):
                    if length not in cases:
                        cases[length] = make_cases(form, length - ANSWER_TOKENS, args.facts, args.seed)
                    for _ in score_facts(subject, store, cases[length], length):
                        progress.advance()
    return evaluation.status


def default_scored(evaluation: Evaluation) -> int:
    return min(MOST_SCORED, evaluation.opened.trained.model.seq_length // 2)


def check_lengths(args: Namespace, tokenizer: Tokenizer, data_root: Path) -> None:
    """Raise LengthError if the prompts do not fit into one of the lengths in `args`, the parsed options.

    Multiples of the training length, such as the default lengths, are not checked.
    """
    form = form_of(args, tokenizer)
    for length in sorted({each for each in args.lengths if not is_multiple(each)}):
        make_cases(form, length - ANSWER_TOKENS, min(args.facts, 2), args.seed)


def read_documents(evaluation: Evaluation, data: Sequence[str] | None, length: int, wanted: int | None) -> Documents:
    """Return the first `wanted` documents of at least `length` tokens, truncated to `length`.

    If `wanted` is None, return at most DOCUMENTS. If too few documents are long enough, the rest of the data is joined
    and divided into documents of this length. Raises EvaluationError or DataError.
    """
    names, shape = list(data or default_data(evaluation)), evaluation.opened.trained.model
    vocabulary = shape.vocab_size or shape.padded_vocab_size
    found = collect_documents(names, evaluation.tokenizer, vocabulary, length, wanted or DOCUMENTS, joined=True)
    if len(found.arrays) < (wanted or 1):
        raise EvaluationError(
            f"{', '.join(names)}: has text for only {len(found.arrays)} documents of {length} tokens, not "
            f"{wanted or 1}; name more texts with --data, or ask for fewer documents"
        )
    return found


def begun(store: Store[MarginResult], length: int) -> MarginEntry:
    """Return the entry of a length with all measurements so far, or an empty entry if there are none."""
    result = store.result
    empty = MarginEntry(length=length, documents=result.documents.count, scored=result.protocol.scored)
    entry: MarginEntry = store.get((length,)) or empty
    return entry


def score_windows(
    subject: Subject, store: Store[MarginResult], documents: Sequence[np.ndarray], length: int
) -> Iterator[int]:
    """Score each document that has no loss at this length, in a window of this length.

    Yields the number of tokens read for each document, after its loss is stored.
    """
    protocol = store.result.protocol
    for tokens in documents[len(begun(store, length).nlls) :]:
        with measured(subject.device) as meter:
            nll = last_loss(subject.model, tokens, length, protocol.scored, protocol.start)
        entry = begun(store, length)
        entry = entry.model_copy(update={"nlls": [*entry.nlls, nll]})
        store.put(entry, Cost.of(windows_at(length), meter, protocol.scored))
        yield length


def score_facts(subject: Subject, store: Store[MarginResult], cases: Cases, length: int) -> Iterator[int]:
    """Measure each case that has no margin at this length.

    Yields the number of tokens of each prompt, after its margin is stored.
    """
    assert subject.tokenizer is not None, "the cases were encoded by it"
    known = {case.number for case in begun(store, length).cases}
    waiting = margins(subject.model, subject.tokenizer, cases, known)
    while True:
        with measured(subject.device) as meter:
            case = next(waiting, None)
        if case is None:
            return
        entry = begun(store, length)
        made = sorted([*entry.cases, case], key=lambda case: case.number)
        store.put(entry.model_copy(update={"cases": made}), Cost.of(facts_at(length), meter, case.tokens))
        yield case.tokens


@torch.inference_mode()
def last_loss(model: GPT, tokens: np.ndarray, window: int, scored: int, start: int | None = None) -> float:
    """Return the loss of the last `scored` tokens of a document, given the tokens before them, as a sum in nats.

    `tokens` is the document, int64 [tokens]. The model reads `window` tokens, the last of which predicts the document's
    last token. If `start` is given, it replaces the first token of the window.
    """
    device = next(model.parameters()).device
    ids = torch.from_numpy(tokens[len(tokens) - 1 - window : -1].astype(np.int64)).to(device)
    if start is not None:
        ids[0] = start
    hidden = model.hidden_states(ids[None], last=scored)[0]
    targets = torch.from_numpy(tokens[-scored:].astype(np.int64)).to(device)
    return float(score_hidden(model, hidden, targets)[0])


def make_cases(form: PromptForm, length: int, count: int, seed: int = 0) -> Cases:
    """Return `count` cases of at most `length` tokens, alternately passkeys and needles. A larger count adds cases.

    Passkeys are at random depths. The depths of needles are 1/2, 1/4, 3/4, 1/8 and so on. The prompts end with the
    beginning of the answer. Raises LengthError if the length is too short.
    """
    passkeys = retrieval_cases.passkey(answer_stub=True, digits=DIGITS).make_cases(form, length, -(-count // 2), seed)
    made: list[tuple[str, Case]] = []
    for number in range(count // 2):
        # Rounded depths repeat if there are many needles, so the needle's number is part of the seed.
        task = retrieval_cases.needle(round(100 * _spread(number + 1)), FILLER_HAYSTACK, answer_stub=True)
        own = task.make_cases(form, length, 1, seed * MOST_NEEDLES + number)
        made += [("passkey", passkeys[number]), ("needle", own[0])]
    return [*made, *(("passkey", case) for case in passkeys[count // 2 :])]


def _spread(number: int) -> float:
    """Return 0.b, where b is the number's binary digits in reverse order: 1/2, 1/4, 3/4, 1/8, .. (van der Corput)."""
    digits = f"{number:b}"
    return int(digits[::-1], 2) / 2 ** len(digits)


def margins(model: GPT, tokenizer: Tokenizer, cases: Cases, known: Container[int] = ()) -> Iterator[CaseMargin]:
    """Yield the margin of each case with a number that is not in `known`.

    Cases are ordered by the tokens of their prompts, and thus by the depth of the fact. So consecutive prompts of
    equal length share a long beginning, which `SharedPrefix` computes once.
    """
    shared, waiting = SharedPrefix(model), [number for number in range(len(cases)) if number not in known]
    for number in sorted(waiting, key=lambda number: prefix_order(cases[number][1].prompt)):
        task, case = cases[number]
        (right,) = case.expected
        random = Random(f"{task} {case.number} {right}")
        numbers = [right, *distinct_numbers(random, len(right), FOILS + 1)]
        answers = list(dict.fromkeys(numbers))[: FOILS + 1]
        dropped, continuations = _continuations(tokenizer, case.stub, answers)
        prompt = case.prompt[: len(case.prompt) - dropped]
        scores, likeliest = _scores(model, shared, prompt, continuations)
        yield CaseMargin(
            task=task,
            number=number,
            tokens=len(case.prompt),
            depth=case.facts[0].depth,
            margin=scores[0] - max(scores[1:]),
            found=likeliest,
        )


def _continuations(tokenizer: Tokenizer, stub: str, answers: Sequence[str]) -> tuple[int, list[list[int]]]:
    """Return the number of tokens to drop from the end of the stub, and the tokens of each answer that follow the rest.

    The stub and an answer are encoded together, which may change the stub's last tokens.
    """
    before = np.array(tokenizer.encode(stub))
    encoded = [np.array(tokenizer.encode(f"{stub} {answer}")) for answer in answers]
    common = min(common_prefix(before, each) for each in encoded)
    return len(before) - common, [each[common:].tolist() for each in encoded]


def _common_beginning(answers: Sequence[Sequence[int]]) -> int:
    """Return how many tokens the answers share at the beginning. The last token of the shortest answer never counts."""
    first = np.array(answers[0])
    return min(*(common_prefix(first, np.array(each)) for each in answers[1:]), min(map(len, answers)) - 1)


@torch.inference_mode()
def _scores(
    model: GPT, shared: SharedPrefix, prompt: np.ndarray, answers: Sequence[Sequence[int]]
) -> tuple[list[float], bool]:
    """Return the log-probability of each answer after the prompt, and whether greedy decoding gives the first answer.

    Greedy decoding starts after the tokens with which all answers begin, because a model that would first write "a"
    instead of the space before a number may still know the number.
    """
    shared_tokens = _common_beginning(answers)
    device, longest = next(model.parameters()).device, max(map(len, answers))
    cache = shared.cache_for(prompt, longest, len(prompt) + longest)
    new = torch.from_numpy(prompt[len(cache) :].astype(np.int64)).to(device)
    first = model.logits(model.hidden_states(new[None], cache=cache, last=1))[0].float().log_softmax(-1)
    scores, greedy = [], False
    for number, answer in enumerate(answers):
        steps = first
        if len(answer) > 1:
            ids = torch.tensor([answer[:-1]], device=device)
            after = model.logits(model.hidden_states(ids, cache=cache))[0].float().log_softmax(-1)
            steps = torch.cat((first, after))
            cache.cut(len(prompt))
        right = torch.tensor(answer, device=device)
        scores.append(float(steps.gather(1, right[:, None]).double().sum()))
        if number == 0:
            greedy = bool((steps.argmax(dim=-1) == right)[shared_tokens:].all())
    shared.keep(prompt, cache)
    return scores, greedy
