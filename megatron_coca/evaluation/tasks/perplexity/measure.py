"""Sliding-window perplexity: the command `megatron-coca evaluate perplexity`, and the measurement as a function."""

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_coca.config.checks.parallelism import uneven_chunks
from megatron_coca.evaluation.documents import Documents, read_subject_documents
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import Cost, EvaluationError, Meter, Show, Store, measured
from megatron_coca.evaluation.sequence_ring import SequenceRing
from megatron_coca.evaluation.statistics import exponential
from megatron_coca.evaluation.subject import Evaluation, Subject, Unusable, noting_missing
from megatron_coca.evaluation.tasks.perplexity.document_scores import DocumentScores
from megatron_coca.evaluation.tasks.perplexity.task import (
    DocumentScore,
    PerplexityProtocol,
    PerplexityResult,
    WindowResult,
)
from megatron_coca.evaluation.window_progress import WindowProgress
from megatron_coca.model import GPT

logger = logging.getLogger(__name__)

PROTOCOL = (
    "sliding window: the model reads exactly W tokens at a time, positions counted from the window's start, no "
    "token added; the first window of a document scores all of its tokens but the first, every later one the next "
    "S tokens, each from the at least W-S+1 and at most W tokens before it that it reads, and the last one of a "
    "document what is left; every token of a document but its first is scored exactly once for every W; "
    "perplexity = exp(sum of nll / number of scored tokens) over all documents; nll in nats from the float32 "
    "log-softmax over the padded vocabulary, summed in float64"
)
"""Part of the identity of a result file: if this string changes, earlier files are not resumed."""

LOGITS_AT_ONCE = {"cpu": 1 << 22}
"""Number of logits in a chunk, by device type; 1 << 26 on other devices. 1 << 22 float32 logits fit into the caches of
a CPU, which halves the time compared to larger chunks.
"""


def run(args: Namespace, show: Show) -> int:
    check_windows(args.windows, args.stride)
    evaluation = Evaluation(subject_options(args), "perplexity", show)
    documents = read_subject_documents(args, evaluation, max(args.windows))
    check_vocabulary(documents.arrays, args.vocabulary)
    task = evaluation.opened.trained.data.synthetic
    if task is not None and task.text and args.vocabulary is None:
        logger.warning(
            "--vocabulary: not set, but the model was trained on facts in text, so it gives probability to keys and "
            "values, which these documents do not contain; add --vocabulary %d",
            task.filler_tokens,
        )
    protocol = PerplexityProtocol(
        text=PROTOCOL, stride=args.stride, tokens_per_batch=args.tokens_per_batch, vocabulary=args.vocabulary
    )
    remedy = f"lower --tokens-per-batch (now {args.tokens_per_batch}; at least one window) or use --dtype bfloat16"
    fields = {"protocol": protocol, "documents": documents.record()}
    ring_ranks = evaluation.ring_ranks = args.context_parallel_size
    if ring_ranks > 1:
        _check_ring(args)
        with SequenceRing(args, "perplexity", partial(score_on_rank, vocabulary=args.vocabulary)) as ring:
            return _measure_all(args, evaluation, documents, fields, remedy, ring)
    if args.part is not None:
        return _measure_part(args, evaluation, documents.arrays, fields, remedy)
    return _measure_all(args, evaluation, documents, fields, remedy, None)


def _check_ring(args: Namespace) -> None:
    """Raise EvaluationError if the processes of `--context-parallel-size` cannot divide a window."""
    for window in args.windows:
        if problem := uneven_chunks(window, args.context_parallel_size, 1):
            raise EvaluationError(f"--context-parallel-size {args.context_parallel_size}: window {window}: {problem}")


def _measure_all(
    args: Namespace,
    evaluation: Evaluation,
    documents: Documents,
    fields: dict[str, Any],
    remedy: str,
    ring: SequenceRing | None,
) -> int:
    """Measure all variants and windows that have no result yet, and return the exit status."""
    indices = {variant.label: index for index, variant in enumerate(evaluation.options.variants)}
    for subject, store in evaluation.variants(PerplexityResult, **fields):
        kept = DocumentScores(store.path, store.result)
        for window in sorted(args.windows):
            earlier = store.get((window,))
            scores = [] if earlier is None else earlier.scores()
            remaining = documents.arrays[len(scores) :]
            progress = scoring_progress(f"{subject.label}, window {window}", remaining, window, args.stride)
            with noting_missing(store, f"window {window}", remedy), progress:
                advance = partial(_advance, progress, window)
                if ring is not None and remaining:
                    ring.use(subject, indices[subject.label])
                for tokens in remaining:
                    score, meter = _measured_score(args, subject, kept, window, len(scores), tokens, advance, ring)
                    scores.append(score)
                    lengths = [len(scored) for scored in documents.arrays[: len(scores)]]
                    store.put(pooled(window, scores, lengths), Cost.of(f"window {window}", meter, len(tokens) - 1))
        kept.remove()
    return evaluation.status


def scoring_progress(
    title: str, documents: Sequence[np.ndarray], window: int, stride: int, show: bool = True
) -> WindowProgress:
    """Return the progress of scoring documents in windows of the same length."""
    count = sum(window_count(len(tokens), window, stride) for tokens in documents)
    return WindowProgress(title, count, count * window, show)


def _advance(progress: WindowProgress, window: int, count: int) -> None:
    progress.read(count, count * window)


def _measured_score(
    args: Namespace,
    subject: Subject,
    kept: DocumentScores,
    window: int,
    document: int,
    tokens: np.ndarray,
    advance: Callable[[int], None],
    ring: SequenceRing | None = None,
) -> tuple[DocumentScore, Meter]:
    """Return the score of a document and its cost. If a part of the evaluation has measured them, they are read from
    `kept`. `advance` is called with the number of windows that were scored.
    """
    if (found := kept.get(window, document)) is not None:
        advance(window_count(len(tokens), window, args.stride))
        return DocumentScore(*found[:2]), found[2]
    with measured(subject.device) as meter:
        score = score_document(
            subject.model, tokens, window, args.stride, args.tokens_per_batch, args.vocabulary, advance, ring
        )
    return score, meter


def _measure_part(
    args: Namespace, evaluation: Evaluation, arrays: Sequence[np.ndarray], fields: dict[str, Any], remedy: str
) -> int:
    """Score the documents of part `args.part`, and keep their scores. The command without a part merges them.

    A unit is one document in windows of one size for one variant. The units of one window size are consecutive, so the
    numbers of these units in two parts differ by at most one. A variant is not loaded if none of its units belongs to
    this part.
    """
    part, parts = args.part
    pairs = [(window, document) for window in sorted(args.windows, reverse=True) for document in range(len(arrays))]
    variants = evaluation.options.variants
    own = {
        variant.label: [pair for number, pair in enumerate(pairs, first) if number % parts == part]
        for variant, first in zip(variants, range(0, len(variants) * len(pairs), len(pairs)), strict=True)
    }
    evaluation.options = replace(evaluation.options, variants=tuple(each for each in variants if own[each.label]))
    for subject in evaluation.subjects():
        if isinstance(subject, Unusable):
            continue  # the command without a part reports it
        label = subject.header.label
        empty = PerplexityResult(**vars(subject.header), **fields, results=[], missing=[])
        unsaved = Store(None, empty)
        kept = DocumentScores(evaluation.options.output_of("perplexity", label), empty)
        waiting = [pair for pair in own[label] if kept.get(*pair) is None]
        counts = [(window_count(len(arrays[document]), window, args.stride), window) for window, document in waiting]
        total, read = sum(count for count, _ in counts), sum(count * window for count, window in counts)
        with WindowProgress(f"{label}, part {part + 1} of {parts}", total, read) as progress:
            for window, document in waiting:
                if kept.get(window, document) is None:  # another process may have scored it meanwhile
                    with noting_missing(unsaved, f"window {window}", remedy):
                        tokens, advance = arrays[document], partial(_advance, progress, window)
                        score, meter = _measured_score(args, subject, kept, window, document, tokens, advance)
                        kept.put(window, document, *score, meter)
    return 0


class LanguageModel(Protocol):
    """The methods that perplexity needs from a causal language model: `GPT`, or a module of the caller."""

    training: bool

    def parameters(self) -> Iterator[Tensor]: ...

    def hidden_states(self, input_ids: Tensor, *, last: int | None = None) -> Tensor:
        """[batch, length] int64 -> [batch, last, hidden_size]: states at the last positions, after the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., padded vocabulary]."""


def sliding_window_perplexity(
    model: LanguageModel,
    documents: Sequence[np.ndarray],
    windows: Sequence[int],
    stride: int,
    *,
    tokens_per_batch: int = 8192,
    vocabulary: int | None = None,
    progress: bool = True,
) -> list[WindowResult]:
    """Return the perplexity of `documents` for each window size. PROTOCOL defines it.

    Documents are one-dimensional integer arrays. `tokens_per_batch` limits the tokens of a forward pass, and thus the
    memory; a pass has at least one window. The LM head is applied only to the scored positions, in chunks. With
    `vocabulary`, the softmax is only over the ids below it. This is for models that also learned tokens that do not
    occur in text. Results are in the order of `windows`; no number depends on that order or on the order of the
    documents. `progress` shows a progress bar for each window size.

    Raises EvaluationError for an invalid window, stride, vocabulary or document, and ValueError for a model in training
    mode.
    """
    check_windows(windows, stride)
    if not documents:
        raise EvaluationError("documents: none given; pass at least one document")
    shortest = min(range(len(documents)), key=lambda index: len(documents[index]))
    if max(windows) > len(documents[shortest]):
        raise EvaluationError(
            f"window {max(windows)}: is longer than document {shortest}, which has {len(documents[shortest])} tokens; "
            "use longer documents or a smaller window"
        )
    if tokens_per_batch < 1:
        raise EvaluationError(f"tokens_per_batch: must be at least 1, not {tokens_per_batch}")
    if model.training:
        raise ValueError("model: in training mode, so dropout would change the result; call model.eval()")
    arrays = [np.ascontiguousarray(tokens, dtype=np.int64) for tokens in documents]
    check_vocabulary(arrays, vocabulary)
    results = []
    for window in windows:
        with scoring_progress(f"window {window}", arrays, window, stride, progress) as shown:
            options = window, stride, tokens_per_batch, vocabulary, partial(_advance, shown, window)
            scores = [score_document(model, tokens, *options) for tokens in arrays]
        results.append(pooled(window, scores, [len(tokens) for tokens in arrays]))
    return results


def check_windows(windows: Sequence[int], stride: int) -> None:
    if stride < 1:
        raise EvaluationError(f"stride: must be at least 1 token, not {stride}")
    if not windows:
        raise EvaluationError("windows: none given; name at least one window size")
    if len(set(windows)) != len(windows):
        raise EvaluationError(f"windows {', '.join(map(str, windows))}: duplicate size; name each size once")
    too_short = [window for window in windows if window < max(stride, 2)]
    if too_short:
        raise EvaluationError(
            f"window {too_short[0]}: is shorter than the stride {stride} (or than 2), so tokens between two windows "
            "would not be scored; choose a smaller stride or a larger window"
        )


def check_vocabulary(documents: Sequence[np.ndarray], vocabulary: int | None) -> None:
    """Raise EvaluationError if the documents contain a token id that is not below `vocabulary`."""
    if vocabulary is None:
        return
    largest = max((int(tokens.max()) for tokens in documents if len(tokens)), default=0)
    if largest >= vocabulary:
        raise EvaluationError(
            f"vocabulary {vocabulary}: the documents contain the token id {largest}; raise the limit, or leave it out"
        )


class Window(NamedTuple):
    """One window: the model reads tokens [start, start + W) of a document and scores tokens [first_scored, end)."""

    start: int
    first_scored: int
    end: int

    @property
    def tokens_scored(self) -> int:
        return self.end - self.first_scored


def plan_windows(length: int, window: int, stride: int) -> list[Window]:
    """Return the windows of a document of `length` tokens. Together they score each of tokens 1 .. length-1 once.

    A token is predicted at the position before it, so each later window ends before the last token that it scores.
    Every token is scored even if stride == window, because such windows overlap in one token. The last window may
    overlap in more.
    """
    windows = [Window(0, 1, window)]
    while windows[-1].end < length:
        end = min(windows[-1].end + stride, length)
        windows.append(Window(end - 1 - window, windows[-1].end, end))
    return windows


def window_count(length: int, window: int, stride: int) -> int:
    """Return the number of windows in `plan_windows`."""
    return 1 + max(0, -(-(length - window) // stride))


@torch.inference_mode()
def score_document(
    model: LanguageModel,
    tokens: np.ndarray,
    window: int,
    stride: int,
    tokens_per_batch: int = 8192,
    vocabulary: int | None = None,
    advance: Callable[[int], None] = lambda windows: None,
    ring: SequenceRing | None = None,
) -> DocumentScore:
    """Score all tokens of one document (int64, one dimension) except the first.

    After each batch, `advance` is called with its number of windows. The processes of `ring` divide every window.

    A batch contains only windows of this document. The last bits of a matrix product depend on the other rows of the
    batch, and the result must not depend on other documents. The first window is a separate batch, because all of its
    positions are scored.

    Raises RuntimeError if the windows do not score every token once.
    """
    device = next(model.parameters()).device
    plan = plan_windows(len(tokens), window, stride)
    count, expected = sum(planned.tokens_scored for planned in plan), len(tokens) - 1
    if count != expected:
        raise RuntimeError(f"window {window}, stride {stride}: {count} tokens were scored instead of {expected}")
    size = max(1, tokens_per_batch // window)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in (plan[:1], *(plan[first : first + size] for first in range(1, len(plan), size))):
        rows = np.stack([tokens[planned.start : planned.start + window] for planned in batch])
        if ring is not None:
            bounds = [(planned.first_scored - planned.start, planned.end - planned.start) for planned in batch]
            following = [[*tokens[planned.start + window : planned.start + window + 1], 0][:1] for planned in batch]
            total += ring.score(torch.from_numpy(np.hstack((rows, following))), torch.tensor(bounds)).to(device)
            advance(len(batch))
            continue
        first = min(planned.first_scored - 1 - planned.start for planned in batch)  # predicts the first scored token
        hidden = model.hidden_states(torch.from_numpy(rows).to(device), last=window - first)
        scored = [
            hidden[row, planned.first_scored - 1 - planned.start - first : planned.end - 1 - planned.start - first]
            for row, planned in enumerate(batch)
        ]
        targets = np.concatenate([tokens[planned.first_scored : planned.end] for planned in batch])
        total += score_hidden(model, torch.cat(scored), torch.from_numpy(targets).to(device), vocabulary)
        advance(len(batch))
    nll, correct = total.tolist()
    return DocumentScore(nll, round(correct))


def score_on_rank(model: GPT, rows: Tensor, held: Tensor, bounds: Tensor, vocabulary: int | None = None) -> Tensor:
    """Return the result of `score_hidden` for the tokens that this rank of a ring scores; see `ScoreSequence`. A token
    is scored by the rank that has the token before it.
    """
    hidden, states, targets = model.hidden_states(rows[:, :-1]), [], []
    for row, (first, end) in enumerate(bounds.tolist()):
        own = (held >= first - 1) & (held < end - 1)
        states.append(hidden[row][own])
        targets.append(rows[row][held[own] + 1])
    return score_hidden(model, torch.cat(states), torch.cat(targets), vocabulary)


def score_hidden(model: LanguageModel, hidden: Tensor, targets: Tensor, vocabulary: int | None = None) -> Tensor:
    """Return (sum of nll in nats, correct predictions) as float64 [2].

    `hidden` is [n, hidden_size], and `targets` is int64 [n].
    """
    total = torch.zeros(2, dtype=torch.float64, device=hidden.device)
    for losses, correct in _scored(model, hidden, targets, vocabulary):
        total[0] += losses.double().sum()
        total[1] += correct.sum()
    return total


def token_losses(model: LanguageModel, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's nll in nats, and whether it is the likeliest. The arguments are those of `score_hidden`."""
    losses, correct = zip(*_scored(model, hidden, targets, None), strict=True)
    return torch.cat(losses), torch.cat(correct)


def _scored(
    model: LanguageModel, hidden: Tensor, targets: Tensor, vocabulary: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each token's loss, and whether it is the likeliest, in chunks that limit the memory of the logits."""
    size = max(1, LOGITS_AT_ONCE.get(hidden.device.type, 1 << 26) // model.logits(hidden[:1]).shape[-1])
    for states, tokens in zip(hidden.split(size), targets.split(size), strict=True):
        logits = model.logits(states)[:, :vocabulary]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest, own = logits.amax(dim=-1), logits.gather(1, tokens[:, None])[:, 0]
        # In place, because a copy would be as large as the logits themselves.
        sums = logits.sub_(largest[:, None]).exp_().sum(dim=-1)
        yield sums.log() + (largest - own), own >= largest


def pooled(window: int, scores: Sequence[DocumentScore], lengths: Sequence[int]) -> WindowResult:
    """Pool the scores of documents of these `lengths` in tokens into one entry.

    Sums are exact (math.fsum), so they do not depend on the order of the documents. The standard error is that of the
    ratio estimator, which treats documents as independent draws.
    """
    number, count = len(scores), sum(length - 1 for length in lengths)
    nlls = [score.nll for score in scores]
    nll = math.fsum(nlls) / count
    stderr = None
    if number > 1:
        residuals = [total - nll * (length - 1) for total, length in zip(nlls, lengths, strict=True)]
        squares = math.fsum(residual * residual for residual in residuals)
        stderr = math.sqrt(squares / (number * (number - 1))) / (count / number)
    return WindowResult(
        window=window,
        perplexity=exponential(nll),
        nll=nll,
        nll_stderr=stderr,
        accuracy=sum(score.correct for score in scores) / count,
        tokens_scored=count,
        documents=number,
        nll_by_document=nlls,
        correct_by_document=[score.correct for score in scores],
    )
