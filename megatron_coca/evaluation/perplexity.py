"""Sliding-window perplexity of documents, window size by window size."""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor
from tqdm import tqdm

from megatron_coca.evaluation.documents import Documents, DocumentsRecord, add_document_options, read_subject_documents
from megatron_coca.evaluation.options import add_subject_options, int_list, positive_int
from megatron_coca.evaluation.results import Cell, Cost, EvaluationError, Record, Result, Store, measured
from megatron_coca.evaluation.subject import EvaluatedCheckpoint, Header, Subject, Task, noting_missing, run_subjects
from megatron_coca.tables import format_table


class WindowResult(Cell):
    """One window size over all documents, or over the first of them where the measurement was interrupted."""

    window: int  # tokens the model reads at a time
    perplexity: float  # exp(nll); infinite where it overflows
    nll: float  # nats, mean over the scored tokens
    nll_stderr: float | None  # standard error over documents of the mean; None for one document
    accuracy: float  # share of the scored tokens that were the likeliest
    tokens_scored: int
    documents: int
    nll_by_document: list[float]  # nats, sum over the scored tokens of each
    correct_by_document: list[int]  # tokens that were the likeliest

    @property
    def key(self) -> tuple[int]:
        return (self.window,)

    @model_validator(mode="after")
    def _of_as_many_documents(self) -> Self:
        if not self.documents == len(self.nll_by_document) == len(self.correct_by_document):
            raise ValueError(f"window {self.window} does not have a sum for each of its {self.documents} documents")
        return self


class PerplexityProtocol(Record):
    """How was measured."""

    text: str
    stride: int
    tokens_per_batch: int


class PerplexityResult(Result):
    """Perplexity by window size."""

    task: Literal["perplexity"] = "perplexity"
    protocol: PerplexityProtocol
    documents: DocumentsRecord
    results: list[WindowResult]


PROTOCOL = (
    "sliding window: the model reads exactly W tokens at a time, positions counted from the window's start, no "
    "token added; the first window of a document scores all of its tokens but the first, every later one the next "
    "S tokens, each from the at least W-S+1 and at most W tokens before it that it reads, and the last one of a "
    "document what is left; every token of a document but its first is scored exactly once for every W; "
    "perplexity = exp(sum of nll / number of scored tokens) over all documents; nll in nats from the float32 "
    "log-softmax over the padded vocabulary, summed in float64"
)

LOGITS_AT_ONCE = {"cpu": 1 << 22}
"""Numbers by kind of device. On the CPU 16 MB of float32 logits stay in its caches: half the time of 200 MB."""
LOGITS_AT_ONCE_ELSEWHERE = 1 << 26


class LanguageModel(Protocol):
    """What is asked of a model, in evaluation mode; a torch module."""

    training: bool

    def parameters(self) -> Iterator[Tensor]: ...

    def hidden_states(self, input_ids: Tensor, *, last: int | None = None) -> Tensor:
        """[batch, length] int64 -> [batch, last, hidden_size] of the last so many tokens, after the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., padded vocabulary]."""


@dataclass(frozen=True)
class Window:
    """The model reads tokens [start, start + W) of a document and scores tokens [first_scored, end)."""

    start: int
    first_scored: int
    end: int

    @property
    def tokens_scored(self) -> int:
        return self.end - self.first_scored


def plan_windows(length: int, window: int, stride: int) -> list[Window]:
    """The windows of one document of `length` tokens; together they score tokens 1 .. length-1 once each.

    A token is predicted at the position before it, so a later window reads one token further to the left than
    the tokens it scores. Hence stride == window (windows that do not overlap) scores every token too.
    """
    windows = [Window(0, 1, window)]
    while windows[-1].end < length:
        end = min(windows[-1].end + stride, length)
        windows.append(Window(end - 1 - window, windows[-1].end, end))
    return windows


def check_windows(windows: Sequence[int], stride: int) -> None:
    """Raises EvaluationError unless the stride fits every window."""
    if stride < 1:
        raise EvaluationError(f"stride {stride}: must be at least 1 token")
    if not windows:
        raise EvaluationError("no window: name at least one window size")
    if len(set(windows)) != len(windows):
        raise EvaluationError(f"windows {', '.join(map(str, windows))}: the same size twice; name each once")
    too_short = [window for window in windows if window < max(stride, 2)]
    if too_short:
        raise EvaluationError(
            f"window {too_short[0]} is shorter than the stride {stride} (or than 2): the tokens between two windows "
            "would not be scored; choose a smaller stride or a larger window"
        )


def check_lengths(documents: Sequence[np.ndarray], windows: Sequence[int]) -> None:
    """Raises EvaluationError unless every window fits into every document."""
    if not documents:
        raise EvaluationError("no document: at least one is needed")
    shortest = min(range(len(documents)), key=lambda index: len(documents[index]))
    if max(windows) > len(documents[shortest]):
        raise EvaluationError(
            f"window {max(windows)} is longer than document {shortest}, which has {len(documents[shortest])} tokens; "
            "use longer documents or a smaller window"
        )


def batches(windows: Sequence[Window], size: int) -> Iterator[Sequence[Window]]:
    """Cuts the windows of a document into runs of `size`; the first is alone, as all of its positions are needed."""
    yield windows[:1]
    for first in range(1, len(windows), size):
        yield windows[first : first + size]


class DocumentScore(NamedTuple):
    """Of the scored tokens of a document: the sum of their nll in nats, and how many were the likeliest."""

    nll: float
    correct: int


def score_hidden(model: LanguageModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """The two sums of `DocumentScore`, float64 [2]; hidden [n, hidden_size], targets [n] int64."""
    total = torch.zeros(2, dtype=torch.float64, device=hidden.device)
    at_once = LOGITS_AT_ONCE.get(hidden.device.type, LOGITS_AT_ONCE_ELSEWHERE)
    size = max(1, at_once // model.logits(hidden[:1]).shape[-1])
    for states, tokens in zip(hidden.split(size), targets.split(size), strict=True):
        logits = model.logits(states).float()
        largest, own = logits.amax(dim=-1), logits.gather(1, tokens[:, None])[:, 0]
        # In place, as a copy would be as large as the logits are.
        sums = logits.sub_(largest[:, None]).exp_().sum(dim=-1)
        total[0] += (sums.log() + (largest - own)).double().sum()
        total[1] += (own >= largest).sum()
    return total


def score_batch(
    model: LanguageModel, tokens: np.ndarray, batch: Sequence[Window], window: int, device: torch.device
) -> Tensor:
    """The sums, as `score_hidden`, of what a batch of windows of one document scores."""
    rows = np.stack([tokens[each.start : each.start + window] for each in batch])
    first = min(each.first_scored - 1 - each.start for each in batch)  # the position that predicts the first token
    hidden = model.hidden_states(torch.from_numpy(rows).to(device), last=window - first)
    scored = [
        hidden[row, each.first_scored - 1 - each.start - first : each.end - 1 - each.start - first]
        for row, each in enumerate(batch)
    ]
    targets = np.concatenate([tokens[each.first_scored : each.end] for each in batch])
    return score_hidden(model, torch.cat(scored), torch.from_numpy(targets).to(device))


@torch.inference_mode()
def score_document(
    model: LanguageModel, tokens: np.ndarray, window: int, stride: int, tokens_per_batch: int = 8192
) -> DocumentScore:
    """Scores all tokens of one document (int64, one dimension) but its first.

    A batch holds windows of this document alone: the last bits of a matrix product depend on the other rows of its
    batch, and so nothing depends on which other documents there are.

    Raises RuntimeError if another number of tokens was scored.
    """
    device = next(model.parameters()).device
    plan = plan_windows(len(tokens), window, stride)
    counted, wanted = sum(each.tokens_scored for each in plan), len(tokens) - 1
    if counted != wanted:
        raise RuntimeError(f"window {window}, stride {stride}: {counted} tokens were scored instead of {wanted}")
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches(plan, max(1, tokens_per_batch // window)):
        total += score_batch(model, tokens, batch, window, device)
    nll, correct = total.tolist()
    return DocumentScore(nll, round(correct))


def exponential(nll: float) -> float:
    """exp, with infinity instead of an overflow: an untrained length can cost more than 709 nats a token."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def pooled(window: int, scores: Sequence[DocumentScore], lengths: Sequence[int]) -> WindowResult:
    """One window size, from the score of each document and its number of tokens.

    Sums are exact (math.fsum), so that the order of the documents changes nothing.
    """
    count = sum(length - 1 for length in lengths)
    nlls = [score.nll for score in scores]
    nll = math.fsum(nlls) / count
    return WindowResult(
        window=window,
        perplexity=exponential(nll),
        nll=nll,
        nll_stderr=standard_error(nll, nlls, lengths),
        accuracy=sum(score.correct for score in scores) / count,
        tokens_scored=count,
        documents=len(scores),
        nll_by_document=nlls,
        correct_by_document=[score.correct for score in scores],
    )


def standard_error(nll: float, nlls: Sequence[float], lengths: Sequence[int]) -> float | None:
    """Of the pooled mean `nll`, over documents as independent draws (the ratio estimator); None for one document."""
    number = len(nlls)
    if number < 2:
        return None
    residuals = [total - nll * (length - 1) for total, length in zip(nlls, lengths, strict=True)]
    mean_count = sum(length - 1 for length in lengths) / number
    return math.sqrt(math.fsum(each * each for each in residuals) / (number * (number - 1))) / mean_count


def check_model(model: LanguageModel) -> None:
    """Raises ValueError for a model in training mode."""
    if model.training:
        raise ValueError("the model is in training mode, dropout would change the result: call model.eval()")


def sliding_window_perplexity(
    model: LanguageModel,
    documents: Sequence[np.ndarray],
    windows: Sequence[int],
    stride: int,
    *,
    tokens_per_batch: int = 8192,
    progress: bool = True,
) -> list[WindowResult]:
    """Perplexity of `documents` (one-dimensional integer arrays of token ids) for each window size, by PROTOCOL.

    `tokens_per_batch` bounds the tokens in one forward pass (at least one window) and with it the memory; the head
    sees only the scored positions, a chunk at a time. Results come in the order of `windows`, on which, as on the
    order of the documents, no number depends. `progress` shows a bar for each window.

    Raises EvaluationError for windows, stride or documents that do not fit, ValueError for a model in training mode.
    """
    check_windows(windows, stride)
    check_lengths(documents, windows)
    if tokens_per_batch < 1:
        raise EvaluationError(f"tokens per batch {tokens_per_batch}: must be at least 1")
    check_model(model)
    arrays = [np.ascontiguousarray(tokens, dtype=np.int64) for tokens in documents]
    found = []
    for window in windows:
        shown = tqdm(arrays, desc=f"window {window}", unit="document", disable=not progress)
        scores = [score_document(model, tokens, window, stride, tokens_per_batch) for tokens in shown]
        found.append(pooled(window, scores, [len(tokens) for tokens in arrays]))
    return found


HEADER = ("window", "perplexity", "nll", "accuracy", "tokens scored")


@dataclass(frozen=True)
class Perplexity:
    """The same documents for every subject."""

    documents: Documents
    windows: tuple[int, ...]
    stride: int
    tokens_per_batch: int

    def empty(self, header: Header) -> PerplexityResult:
        """As in `running.Measurement`."""
        protocol = PerplexityProtocol(text=PROTOCOL, stride=self.stride, tokens_per_batch=self.tokens_per_batch)
        return PerplexityResult(
            **header.fields(), protocol=protocol, documents=self.documents.record(), results=[], missing=[]
        )

    def measure(self, subject: Subject, store: Store[PerplexityResult]) -> None:
        """Short windows first, and after each document what is known of its window is written."""
        remedy = (
            f"lower --tokens-per-batch (it is {self.tokens_per_batch}, one window at least) or use --dtype bfloat16"
        )
        for window in sorted(self.windows):
            with noting_missing(store, f"window {window}", remedy):
                self._measure_window(subject, store, window)

    def _measure_window(self, subject: Subject, store: Store[PerplexityResult], window: int) -> None:
        arrays, earlier = self.documents.arrays, store.get((window,))
        scores = scores_of(earlier) if earlier is not None else []
        for tokens in tqdm(arrays[len(scores) :], desc=f"{subject.label}, window {window}", unit="document"):
            with measured(subject.device) as meter:
                scores.append(score_document(subject.model, tokens, window, self.stride, self.tokens_per_batch))
            cell = pooled(window, scores, [len(scored) for scored in arrays[: len(scores)]])
            store.put(cell, Cost.of(f"window {window}", meter, len(tokens) - 1))

    def table(self, result: PerplexityResult) -> str:
        """As in `running.Measurement`."""
        rows = [
            [
                str(each.window),
                f"{each.perplexity:.3f}",
                f"{each.nll:.4f}",
                f"{each.accuracy:.4f}",
                str(each.tokens_scored),
            ]
            for each in result.results
        ]
        place = f"{result.documents.count} documents, stride {result.protocol.stride}"
        header = f"{result.label}: trained at {result.checkpoint.seq_length}, {place}"
        return f"{header}\n\n{format_table(HEADER, rows)}\n"


def scores_of(cell: WindowResult) -> list[DocumentScore]:
    """The scores that a window's result was made of."""
    return [DocumentScore(*score) for score in zip(cell.nll_by_document, cell.correct_by_document, strict=True)]


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    add_subject_options(parser)
    add_document_options(parser)
    add = parser.add_argument
    add("--windows", required=True, type=int_list, metavar="W,W,...", help="window sizes in tokens")
    add("--stride", required=True, type=positive_int, metavar="S", help="tokens scored by each window")
    add("--tokens-per-batch", type=positive_int, default=8192, metavar="N", help="fewer need less memory")


def run(args: Namespace) -> int:
    """Measures every variant; returns the exit status."""
    check_windows(args.windows, args.stride)

    def begin(source: EvaluatedCheckpoint) -> Perplexity:
        documents = read_subject_documents(args, source, max(args.windows))
        return Perplexity(documents, tuple(args.windows), args.stride, args.tokens_per_batch)

    return run_subjects(args, "perplexity", begin)


PERPLEXITY = Task("sliding-window perplexity of a checkpoint", add_arguments, run)
