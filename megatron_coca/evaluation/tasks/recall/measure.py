"""`megatron-coca evaluate recall`: accuracy of key-value recall by length and shift, and attention scores by head."""

import hashlib
import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.backends.reference import with_sinks
from megatron_coca.attention.inputs import AttentionInputs
from megatron_coca.data import Blend, Shard, TaskSettings
from megatron_coca.data.remote_shards import local_prefix
from megatron_coca.data.shards import sampled_digest
from megatron_coca.data.synthetic import ORDERED, QUESTIONS, Draws, ordered_question, recall_question
from megatron_coca.evaluation.attention_maps import observed, row_scores
from megatron_coca.evaluation.documents import test_data
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import Cost, EvaluationError, Show, measured
from megatron_coca.evaluation.subject import Evaluation, Subject, noting_missing
from megatron_coca.evaluation.tasks.recall.task import (
    MULTIPLES,
    TRAINED,
    HeadScores,
    RecallEntry,
    RecallProtocol,
    RecallResult,
)
from megatron_coca.evaluation.tasks.retrieval import cases as tasks
from megatron_coca.evaluation.tasks.retrieval.measure import noting_errors
from megatron_coca.evaluation.tasks.retrieval.task import Tally, tally, tally_fields
from megatron_coca.model import GPT
from megatron_coca.support.console import Progress

PROTOCOL = (
    "recall: facts in random places between filler, and a question on one of them, drawn uniformly, as the last token "
    "of an input of exactly l tokens; right if the likeliest of all tokens is the value; inside, beyond: the fact is "
    "at most, or more than, the training length before the question; a shift adds to all positions and leaves the "
    "length that an extension sees; score of the fact: of the last token with the fact's token in one head, rest: the "
    "log-sum-exp of its scores with all other keys, both as softmax takes them; for models without the task the "
    "passkey prompt with its answer stub, right if the likeliest token is the first of the key, and the score of the "
    "fact is the log-sum-exp over the tokens of the key's first mention"
)
ORDERED_PROTOCOL = (
    "ordered recall: facts in random places between filler give each key several values one after the other; the last "
    "token of an input of exactly l tokens asks for the latest value of a key, for its first value, or for the value "
    "told k facts before (back), drawn uniformly; right if the likeliest of all tokens is the value; a model that does "
    "not see the order can only choose among the values of the key; inside, beyond, shifts and scores as in recall"
)
PROTOCOLS = {"recall": PROTOCOL, ORDERED: ORDERED_PROTOCOL}
"""The protocols, by the synthetic task that the model was trained on."""


NO_KIND = -1


class Questions(NamedTuple):
    """Questions with inputs of one length. `ids` is int64 [n, length], all other fields are int64 [n].

    The fact that answers input i is in the input's tokens first[i] to last[i] - 1. `kinds` has indices in `QUESTIONS`,
    or NO_KIND if the task has only one kind of question.
    """

    ids: np.ndarray
    answers: np.ndarray
    first: np.ndarray
    last: np.ndarray
    kinds: np.ndarray

    @property
    def distances(self) -> np.ndarray:
        """Number of tokens from the fact's first token to the question."""
        return self.ids.shape[1] - 1 - self.first


Maker = Callable[[int], list[Questions]]
"""A function that returns the questions for a length in tokens. Inputs may be shorter than this length; each
`Questions` contains inputs of one exact length.
"""


def synthetic_questions(args: Namespace, evaluation: Evaluation, settings: TaskSettings) -> Maker:
    """Return a function that makes questions of the model's training task."""
    data, seed = evaluation.opened.trained.data, seed_of(args, evaluation)

    def make(length: int) -> list[Questions]:
        draws = Draws(np.arange(args.cases), seed, f"evaluation {length}")
        if settings.text:
            text = Blend(
                [Shard(local_prefix(path)) for path in paths],
                data.test_data_weights or [1.0] * len(paths),
                length,
                seed,
            )
            filler = text.batch(np.arange(args.cases))[:, :length]
        else:
            filler = draws.integers(length, settings.filler_tokens)
        if settings.task == ORDERED:
            ids, answers, places, kinds = ordered_question(settings, filler, draws)
            return [Questions(ids, answers, places, places + 1, kinds)]
        ids, answers, places = recall_question(settings, filler, draws)
        return [Questions(ids, answers, places, places + 1, np.full_like(places, NO_KIND))]

    paths = test_data(evaluation) if settings.text else []
    if settings.text and not paths:
        raise EvaluationError(
            "test_data_paths: not set in the run's config, but this task fills its inputs with test data; set the "
            "paths with --set test_data_paths=[PREFIX]"
        )
    return make


def _text_digest(evaluation: Evaluation) -> str:
    """Return a sha256 over samples of the test shards and over the weights of the shards."""
    shards = [sampled_digest(Shard(local_prefix(path))) for path in test_data(evaluation)]
    weights = evaluation.opened.trained.data.test_data_weights
    return hashlib.sha256(json.dumps([shards, weights]).encode()).hexdigest()


def seed_of(args: Namespace, evaluation: Evaluation) -> int:
    """Return the seed of the questions: `--seed`, or the seed of the model's training.

    Raises EvaluationError if the checkpoint does not record the seed of its training.
    """
    if args.seed != TRAINED:
        return int(args.seed)
    if evaluation.opened.step is None:
        raise EvaluationError(
            f"--seed {TRAINED}: {args.checkpoint} does not record its training seed; set --seed to a number"
        )
    return evaluation.opened.trained.seed


def passkey_questions(args: Namespace, evaluation: Evaluation) -> Maker:
    """Return a function that makes passkey prompts, for models that were not trained on recall."""
    tokenizer, task, seed = evaluation.needed_tokenizer(), tasks.passkey(answer_stub=True), seed_of(args, evaluation)

    @cache
    def added_tokens(key: str) -> int:
        """Return the number of tokens that a key adds to text when it follows a space."""
        return len(tokenizer.encode(f"{key} {key}")) - len(tokenizer.encode(key))

    def make(length: int) -> list[Questions]:
        groups: dict[int, list[tuple[np.ndarray, int, int]]] = {}
        for case in task.make_cases(tokenizer, length, args.cases, seed):
            start = len(case.prompt) - case.facts[0].distance
            group = groups.setdefault(len(case.prompt), [])
            group.append((case.prompt.astype(np.int64), start, start + added_tokens(case.expected[0])))
        made = []
        for group in groups.values():
            ids, first, last = (np.stack(part) for part in zip(*group, strict=True))
            made.append(Questions(ids, ids[np.arange(len(ids)), first], first, last, np.full_like(first, NO_KIND)))
        return made

    return make


def run(args: Namespace, show: Show) -> int:
    evaluation = Evaluation(subject_options(args), "recall", show)
    trained = evaluation.opened.trained
    task, length = trained.data.synthetic, trained.model.seq_length
    if task is not None and task.task not in PROTOCOLS:
        raise EvaluationError(
            f"--checkpoint {args.checkpoint}: was trained on {task.task}; name a run of {' or '.join(PROTOCOLS)}"
        )
    lengths = args.lengths or [multiple * length for multiple in MULTIPLES]
    if task is not None and min(lengths) <= task.facts:
        raise EvaluationError(
            f"--lengths {min(lengths)}: {task.facts} facts and a question need {task.facts + 1} tokens; raise it"
        )
    settings = TaskSettings(**task.model_dump()) if task is not None else None
    make = passkey_questions(args, evaluation) if settings is None else synthetic_questions(args, evaluation, settings)
    chance = None if settings is None else 1 / settings.values
    name = "passkey"
    if settings is not None:
        told = "" if settings.updates is None else f", {settings.updates} values of each key told"
        told += "" if settings.back is None else f", at most {settings.back} facts back"
        name = f"synthetic {settings.task}, {settings.facts} facts, {settings.keys} keys{told}"
    protocol = RecallProtocol(
        text=PROTOCOL if settings is None else PROTOCOLS[settings.task],
        cases=args.cases,
        diagnosed=args.diagnosed,
        seed=args.seed,
        prompts=name,
        chance=chance,
        prompts_sha256=tasks.sample_digest([tasks.passkey(answer_stub=True)]) if settings is None else None,
        text_sha256=_text_digest(evaluation) if settings is not None and settings.text else None,
    )
    entries = [(tokens, 0) for tokens in sorted(set(lengths))]
    entries += [(length, shift) for shift in sorted(set(args.shifts)) if (length, shift) not in entries]
    remedy = f"lower --tokens-per-batch (now {args.tokens_per_batch}) or use --dtype bfloat16"
    made: dict[int, list[Questions]] = {}  # by length; the same for every variant
    for subject, store in evaluation.variants(RecallResult, protocol=protocol):
        with Progress(subject.label, len(entries), "measurements") as progress:
            for tokens, shift in entries:
                progress.advance(1)
                at = f"length {tokens}" + (f", shift {shift}" if shift else "")
                if store.get((tokens, shift)) is not None:
                    continue
                with noting_missing(store, at, remedy), noting_errors(store, at):
                    if tokens not in made:
                        made[tokens] = make(tokens)
                    with measured(subject.device) as meter:
                        diagnosed = 0 if shift else args.diagnosed
                        entry = measure(subject, made[tokens], tokens, shift, diagnosed, args.tokens_per_batch)
                    store.put(entry, Cost.of(at, meter, args.cases * tokens))
    return evaluation.status


def batches(questions: Sequence[Questions], tokens_per_batch: int) -> Iterator[Questions]:
    for group in questions:
        size = max(1, tokens_per_batch // group.ids.shape[1])
        for begin in range(0, len(group.ids), size):
            yield Questions(*(part[begin : begin + size] for part in group))


@torch.inference_mode()
def measure(
    subject: Subject, questions: Sequence[Questions], length: int, shift: int, diagnosed: int, tokens_per_batch: int
) -> RecallEntry:
    """Ask all `questions` with positions shifted by `shift`, and score the heads on the first `diagnosed` questions.

    Raises FloatingPointError if a log-likelihood is not finite.
    """
    model, scores, distances, kinds, nll = subject.model, list[float](), list[int](), list[int](), 0.0
    for batch in batches(questions, tokens_per_batch):
        ids = torch.from_numpy(batch.ids).to(subject.device)
        positions = None if shift == 0 else torch.arange(shift, shift + ids.shape[1])
        hidden = model.hidden_states(ids, positions=positions, length=ids.shape[1], last=1)
        logs = model.logits(hidden[:, -1])[:, : subject.vocab_size].double().log_softmax(dim=-1)
        answers = torch.from_numpy(batch.answers).to(subject.device)[:, None]
        nll -= float(logs.gather(1, answers).sum())
        scores += (logs.argmax(dim=-1, keepdim=True) == answers)[:, 0].double().tolist()
        distances += batch.distances.tolist()
        kinds += batch.kinds.tolist()
    if not math.isfinite(nll):  # without this check, an invalid logit would count as an answer
        raise FloatingPointError(
            f"the log-likelihood of an answer is {nll}: the computation overflowed its dtype; use float32 or bfloat16"
        )
    cases, trained = list(zip(distances, scores, strict=True)), subject.training_length
    return RecallEntry(
        **tally_fields(scores),
        length=length,
        shift=shift,
        nll=nll / len(scores),
        inside=tally([score for distance, score in cases if distance <= trained]),
        beyond=tally([score for distance, score in cases if distance > trained]),
        heads=head_scores(model, questions, diagnosed, tokens_per_batch) if diagnosed else [],
        questions=by_question(kinds, scores) if NO_KIND not in kinds else None,
    )


def by_question(kinds: Sequence[int], scores: Sequence[float]) -> dict[str, Tally]:
    """Return the tally of each kind of question that was asked."""
    of_kinds = {
        name: [score for kind, score in zip(kinds, scores, strict=True) if QUESTIONS[kind] == name]
        for name in QUESTIONS
    }
    return {name: found for name, of_kind in of_kinds.items() if (found := tally(of_kind)) is not None}


def head_scores(model: GPT, questions: Sequence[Questions], count: int, tokens_per_batch: int) -> list[HeadScores]:
    """Return each head's scores of the question with the fact and with all other keys. They are means over the first
    `count` questions.
    """
    device, layers = next(model.parameters()).device, len(model.blocks)
    left, visited = count, list[Tensor]()

    def visit(fact: Tensor, q: Tensor, k: Tensor, inputs: AttentionInputs) -> None:
        row = row_scores(inputs, torch.tensor([inputs.value.shape[2] - 1])).double()
        fact = fact if inputs.sinks is None else F.pad(fact, (0, 1))  # a sink counts as one of the other keys
        row = with_sinks(row, inputs.sinks)[:, :, 0]
        sides = [row.masked_fill(~side[:, None], -math.inf).logsumexp(dim=-1) for side in (fact, ~fact)]
        visited.append(torch.stack([*sides, sides[0].sub(sides[1]).sigmoid()]).cpu())  # [3, batch, heads]

    for batch in batches(questions, tokens_per_batch):
        taken = Questions(*(part[:left] for part in batch))
        left -= len(taken.ids)
        if not len(taken.ids):
            break
        key = torch.arange(taken.ids.shape[1])
        fact = (key >= torch.from_numpy(taken.first)[:, None]) & (key < torch.from_numpy(taken.last)[:, None])
        with observed(model, partial(visit, fact.to(device))):
            model.hidden_states(torch.from_numpy(taken.ids).to(device), length=taken.ids.shape[1])
    found = []
    for layer in range(layers):
        means = torch.cat(visited[layer::layers], dim=1).mean(dim=1).T.tolist()
        for head, (own, rest, weight) in enumerate(means):
            score = own if math.isfinite(own) else None
            found.append(HeadScores(layer=layer, head=head, fact=score, rest=rest, weight=weight))
    return found
